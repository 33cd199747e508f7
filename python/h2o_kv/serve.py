"""Many requests through one batch of fixed size: a row that is done makes room for the next request.

transformers' own continuous batching makes its cache itself and takes no other. A row of an H2OCache
has a constant size, so a loop over `H2OCache.insert` and `release` is all it takes.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from h2o_kv._C import EvictionPolicy
from h2o_kv.generation import token_ids
from h2o_kv.hf import H2OCache, cache_kwarg
from h2o_kv.hf.settings import ALIBI_MODELS

__all__ = ["Completion", "Request", "generate_many"]


@dataclass(frozen=True)
class Request:
    """A prompt and how to go on from it.

    Attributes
    ----------
    input_ids : sequence of int or Tensor, [length]
        At least one token.
    max_new_tokens : int, tokens
        >= 1.
    logits_processor : LogitsProcessorList, optional
        Applied to the logits, with all tokens of the request so far, as in `generate`.
    seed : int, optional
        Tokens are drawn, from a generator of the request's own; None = the likeliest token.
    """

    input_ids: Sequence[int] | Tensor
    max_new_tokens: int
    logits_processor: LogitsProcessorList | None = None
    seed: int | None = None


@dataclass(frozen=True)
class Completion:
    """What came of a request.

    Attributes
    ----------
    index : int
        Which request it was, counted from 0.
    tokens : list of int
        New ones, with the token that ended them.
    finish_reason : {"eos", "length"}
    """

    index: int
    tokens: list[int]
    finish_reason: str


@dataclass
class _Running:
    index: int
    request: Request
    ids: Tensor  # [1, tokens so far]
    generator: torch.Generator | None
    tokens: list[int] = field(default_factory=list)

    def add(self, logits: Tensor) -> None:
        """Choose the next token from logits [1, vocabulary]."""
        logits = logits.float()
        if self.request.logits_processor is not None:
            logits = self.request.logits_processor(self.ids, logits)
        if self.generator is None:
            token = logits.argmax(-1, keepdim=True)
        else:
            token = torch.multinomial(logits.softmax(-1), 1, generator=self.generator)
        self.ids = torch.cat([self.ids, token], 1)
        self.tokens.append(int(token))

    def completion(self, eos: frozenset[int]) -> Completion | None:
        """The result, once there is nothing more to do."""
        if self.tokens[-1] in eos:
            return Completion(self.index, self.tokens, "eos")
        if len(self.tokens) >= self.request.max_new_tokens:
            return Completion(self.index, self.tokens, "length")
        return None


def generate_many(
    model: Any,
    requests: Iterable[Request],
    policy: EvictionPolicy,
    *,
    batch_size: int = 8,
    eos_token_id: int | Sequence[int] | None = None,
    prefill: str = "one_shot",
    prefill_chunk: int = 64,
    dtype: torch.dtype | None = None,
    positions: str = "original",
) -> Iterator[Completion]:
    """Generate for each request in a batch that is kept full.

    A prompt is run through alone, then its cache moves into a free row; all rows take their next step
    together. Every request gets what it would get alone, as far as the model's matrix products do not
    depend on the batch size.

    Parameters
    ----------
    model : PreTrainedModel
        With attn_implementation "h2o", in eval mode.
    requests : iterable of Request
        Read as rows come free, so it may be endless; with a policy of ratios it is read at once, since
        the longest prompt decides how large a row is.
    policy : EvictionPolicy
        Of each request alone; ratios are of its own prompt.
    batch_size : int, rows
        >= 1.
    eos_token_id : int or sequence of int, optional
        Default: that of model.generation_config.
    prefill, prefill_chunk, dtype, positions
        As in H2OCache.

    Yields
    ------
    Completion
        As they finish.

    Raises
    ------
    TypeError, ValueError
        An argument or a request is out of its range; naming the request.

    Examples
    --------
    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from h2o_kv import EvictionPolicy
    >>> from h2o_kv.serve import Request, generate_many
    >>> config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=32,
    ...                      num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    >>> model = LlamaForCausalLM(config).eval()
    >>> model.set_attn_implementation("h2o")
    >>> requests = [Request(range(3, 3 + n), max_new_tokens=n) for n in (4, 9, 6)]
    >>> done = generate_many(model, requests, EvictionPolicy(num_heavy=4, num_recent=4), batch_size=2)
    >>> sorted((c.index, len(c.tokens)) for c in done)
    [(0, 4), (1, 9), (2, 6)]
    """
    if isinstance(batch_size, bool) or not isinstance(batch_size, int):
        raise TypeError(f"generate_many: batch_size must be an integer, got {batch_size!r}")
    if batch_size < 1:
        raise ValueError(f"generate_many: batch_size must be >= 1, got {batch_size}")
    options: dict[str, Any] = dict(
        prefill=prefill, prefill_chunk=prefill_chunk, dtype=dtype, positions=positions
    )
    longest = None
    if policy.has_ratio:
        requests = list(requests)
        longest = max((len(request.input_ids) for request in requests), default=1)
    batch = H2OCache(model, policy, prompt_length=longest, **options)
    if eos_token_id is None:
        eos_token_id = model.generation_config.eos_token_id
    empty = H2OCache(model, policy, **options)
    loop = _Batch(model, batch, empty, token_ids(eos_token_id), batch_size)
    return loop.run(enumerate(requests))


class _Batch:
    """The rows of one batch, and what runs in each of them."""

    def __init__(
        self,
        model: Any,
        cache: H2OCache,
        empty: H2OCache,
        eos: frozenset[int],
        batch_size: int,
    ) -> None:
        self.model, self.cache, self.eos = model, cache, eos
        self.empty = empty  # Of which each prompt takes a fork.
        self.rows: list[_Running | None] = [None] * batch_size
        self.has_alibi = model.config.model_type in ALIBI_MODELS
        self.keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    @torch.no_grad()
    def run(self, requests: Iterator[tuple[int, Request]]) -> Iterator[Completion]:
        """Everything, as it finishes."""
        while True:
            for row in range(len(self.rows)):
                if self.rows[row] is None:
                    yield from self._fill(row, requests)
            if not any(self.rows):
                return
            yield from self._step()

    def _fill(self, row: int, requests: Iterator[tuple[int, Request]]) -> Iterator[Completion]:
        """Put the next request that needs more than its first token into a free row."""
        for index, request in requests:
            running = self._start(index, request)
            cache = self.empty.fork(1)
            running.add(self._forward(running.ids, cache)[:, -1])
            done = running.completion(self.eos)
            if done is not None:
                yield done
                continue
            if self.cache.budgets is None:
                self._allocate(cache)
            self.cache.insert(row, cache)
            self.rows[row] = running
            return

    def _step(self) -> Iterator[Completion]:
        """A token for every row that runs."""
        device = self.model.device
        last = [0 if running is None else running.tokens[-1] for running in self.rows]
        runs = torch.tensor([running is not None for running in self.rows], device=device)
        position_ids = self.cache.layers[0].tokens_seen
        assert position_ids is not None
        logits = self._forward(
            torch.tensor(last, device=device)[:, None],
            self.cache,
            attention_mask=self._padding(runs),
            position_ids=position_ids[:, None].to(device, torch.long),
        )
        for row, running in enumerate(self.rows):
            if running is None:
                continue
            running.add(logits[row : row + 1, -1])
            done = running.completion(self.eos)
            if done is not None:
                self.cache.release(row)
                self.rows[row] = None
                yield done

    def _start(self, index: int, request: Request) -> _Running:
        ids = torch.as_tensor(request.input_ids, dtype=torch.long, device=self.model.device)
        if ids.ndim != 1 or ids.numel() == 0:
            raise ValueError(
                f"generate_many: input_ids must be [length] with length >= 1, got {[*ids.shape]} in "
                f"request {index}"
            )
        if request.max_new_tokens < 1:
            raise ValueError(
                f"generate_many: max_new_tokens must be >= 1, got {request.max_new_tokens} in request "
                f"{index}"
            )
        longest, num_tokens = self.cache.max_positions, len(ids) + request.max_new_tokens - 1
        if longest is not None and num_tokens > longest:
            raise ValueError(
                f"generate_many: positions of this model must be < {longest} (max_position_embeddings), "
                f"got {len(ids)} tokens and max_new_tokens={request.max_new_tokens} in request {index}"
            )
        generator = None
        if request.seed is not None:
            generator = torch.Generator(self.model.device).manual_seed(request.seed)
        return _Running(index, request, ids[None], generator)

    def _allocate(self, like: H2OCache) -> None:
        for layer, source in zip(self.cache.layers, like.layers, strict=True):
            assert source.keys is not None
            _, num_kv_heads, _, head_dim = source.keys.shape
            layer.lazy_initialization(
                source.keys.new_empty(len(self.rows), num_kv_heads, 0, head_dim)
            )

    def _padding(self, runs: Tensor) -> Tensor:
        """Mask of a step in which rows without a request, False in `runs` [batch], are padding."""
        # Models with ALiBi take a 2-D mask; others would want a column of it for every token seen.
        return runs[:, None] if self.has_alibi else runs[:, None, None, None]

    def _forward(self, ids: Tensor, cache: H2OCache, **kwargs: Any) -> Tensor:
        """Logits [batch, 1 or length, vocabulary]; the last ones are the next token's."""
        kwargs[cache_kwarg(self.model)] = cache
        if self.keeps_logits:
            kwargs["logits_to_keep"] = 1
        logits: Tensor = self.model(input_ids=ids, use_cache=True, **kwargs).logits
        return logits
