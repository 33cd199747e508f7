"""Log-likelihoods of continuations under any policy, a whole batch of examples in one forward.

With `H2OCache(prefill="streaming", prefill_chunk=1)` one forward over many tokens is the paper's step
for each of them, in order, inside the operator: the same as feeding them one at a time, at nearly the
cost of a forward with a full cache. So eviction happens within each example, as it would in decoding.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from h2o_kv._C import EvictionPolicy
from h2o_kv.eval.caches import CacheUse, Setting, attention_for, padded, policy_cache
from h2o_kv.eval.data import EvalError
from h2o_kv.hf import H2OCache, cache_kwarg

__all__ = [
    "Request",
    "Rows",
    "Score",
    "continuation_logits",
    "encode_pair",
    "score",
    "scores",
    "token_log_probs",
]

BATCH_TOKENS = 2048
"""Tokens of a batch, padding included, unless said otherwise."""

# Logits of a batch, in numbers: 256 MiB of float32.
_MAX_LOGITS = 2**26


@dataclass(frozen=True)
class Request:
    """A text to be scored after another.

    Attributes
    ----------
    context, continuation : tuple of int
        Token ids, at least one each.
    """

    context: tuple[int, ...]
    continuation: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.context or not self.continuation:
            raise EvalError(
                "a request must have at least one token of context and one of continuation, got "
                f"{len(self.context)} and {len(self.continuation)}"
            )

    @property
    def num_tokens(self) -> int:
        """Tokens of both, of which budgets are parts. The last one is predicted, and never fed."""
        return len(self.context) + len(self.continuation)


@dataclass(frozen=True)
class Score:
    """How well a continuation is predicted.

    Attributes
    ----------
    log_prob : float, nats
        Sum over its tokens.
    is_greedy : bool
        Whether each token is the most likely one.
    use : CacheUse
    """

    log_prob: float
    is_greedy: bool
    use: CacheUse


def encode_pair(tokenizer: Any, context: str, continuation: str) -> Request:
    """Token ids of a context and its continuation, as lm-evaluation-harness makes them.

    Spaces at the end of the context move to the continuation, the whole text is tokenised at once
    without special tokens, and the context's own tokens are taken off its front.

    Raises
    ------
    EvalError
        Nothing is left of one of them.
    """
    stripped = context.rstrip()
    continuation = context[len(stripped) :] + continuation
    whole = tokenizer(stripped + continuation, add_special_tokens=False)["input_ids"]
    length = len(tokenizer(stripped, add_special_tokens=False)["input_ids"])
    return Request(tuple(whole[:length]), tuple(whole[length:]))


def score(
    model: Any, requests: Sequence[Request], setting: Setting, *, batch_tokens: int = BATCH_TOKENS
) -> list[Score]:
    """Score each request; in the order of `requests`, whatever the batches are.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        Causal language model, in evaluation mode.
    requests : sequence of Request
    setting : Setting
    batch_tokens : int
        Tokens of a batch, padding included; a longer request is a batch of its own.

    Raises
    ------
    EvalError
        A request is longer than the model's context.
    """
    found = dict(scores(model, requests, setting, batch_tokens=batch_tokens))
    return [found[index] for index in range(len(requests))]


def scores(
    model: Any, requests: Sequence[Request], setting: Setting, *, batch_tokens: int = BATCH_TOKENS
) -> Iterator[tuple[int, Score]]:
    """As `score`, with the index of each request, as the batches come."""
    for index, logits, use in continuation_logits(
        model, requests, setting, batch_tokens=batch_tokens
    ):
        target = torch.tensor(requests[index].continuation, device=logits.device)
        log_probs = token_log_probs(logits, target)
        is_greedy = bool((logits.argmax(-1) == target).all())
        yield index, Score(float(log_probs.sum()), is_greedy, use)


def token_log_probs(logits: Tensor, target: Tensor) -> Tensor:
    """Log-probability of each target token [tokens] under logits [tokens, vocabulary], in nats.

    In float32, or float64 where the logits are.
    """
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return wide.gather(-1, target[:, None])[:, 0] - wide.logsumexp(-1)


@torch.inference_mode()
def continuation_logits(
    model: Any, requests: Sequence[Request], setting: Setting, *, batch_tokens: int = BATCH_TOKENS
) -> Iterator[tuple[int, Tensor, CacheUse]]:
    """What the model predicts for the tokens of each continuation.

    Yields
    ------
    index : int
        Of the request; they come as their batches do, the longest first.
    logits : Tensor, [tokens of the continuation, vocabulary]
    use : CacheUse

    Raises
    ------
    EvalError
        A request is longer than the model's context.
    """
    context = getattr(model.config, "max_position_embeddings", None)
    for index, request in enumerate(requests):
        if context is not None and request.num_tokens - 1 > context:
            raise EvalError(
                f"request {index} must fit the model's context of {context} tokens, got "
                f"{request.num_tokens - 1}"
            )
    for group in setting.alike([request.num_tokens for request in requests]):
        alike = [requests[index] for index in group]
        # Scores that are given are those of one text.
        most = 1 if setting.needs_oracle else len(alike)
        for batch in _batches(alike, batch_tokens, model.config.vocab_size, most):
            chosen = [alike[index] for index in batch]
            with attention_for(model, setting):
                run = _one_shot if setting.prefill == "one_shot" else _at_once
                logits, uses = run(model, chosen, setting)
            yield from zip((group[index] for index in batch), logits, uses, strict=True)


def _batches(
    requests: Sequence[Request], batch_tokens: int, vocabulary: int, most: int
) -> Iterator[list[int]]:
    """Indices of requests, those of like length together, at most so many in a batch."""
    batch: list[int] = []
    first = 0
    for index in sorted(range(len(requests)), key=lambda index: -requests[index].num_tokens):
        rows, context = len(batch) + 1, len(requests[index].context)
        if batch:
            # The first one is the longest; logits are made from the end of the shortest context on.
            longest, start = requests[batch[0]].num_tokens, min(first, context)
            num_logits = rows * (longest - start) * vocabulary
            if rows > most or rows * longest > batch_tokens or num_logits > _MAX_LOGITS:
                yield batch
                batch = []
        first = min(first, context) if batch else context
        batch.append(index)
    if batch:
        yield batch


def _at_once(
    model: Any, requests: Sequence[Request], setting: Setting
) -> tuple[list[Tensor], list[CacheUse]]:
    """Logits [tokens, vocabulary] of each continuation, from one forward over everything."""
    rows = [[*request.context, *request.continuation][:-1] for request in requests]
    first = min(len(request.context) for request in requests) - 1
    keep = max(map(len, rows)) - first
    if setting.evicts:
        sizes = [request.num_tokens for request in requests]
        cache = policy_cache(model, sizes, setting, **_oracle(model, rows, setting))
        logits = Rows(model, cache).forward(rows, keep, side="right")
        uses = CacheUse.of(cache)
    else:
        logits = Rows(model, None).forward(rows, keep, side="right")
        uses = [CacheUse(len(row), len(row), 0) for row in rows]
    found = []
    for row, request in zip(logits, requests, strict=True):
        start = len(request.context) - 1 - first
        found.append(row[start : start + len(request.continuation)])
    return found, uses


def _one_shot(
    model: Any, requests: Sequence[Request], setting: Setting
) -> tuple[list[Tensor], list[CacheUse]]:
    """The same, with the contexts in one forward and what follows them step by step in another."""
    rest = [request.continuation[:-1] for request in requests]
    longest = max(map(len, rest))
    rows_of = [[*request.context, *request.continuation][:-1] for request in requests]
    cache = policy_cache(
        model,
        [request.num_tokens for request in requests],
        setting,
        prompt_length=[len(request.context) for request in requests],
        # A recorded forward past the prompt is a step for each of its tokens.
        max_rollback=max(1, longest),
        **_oracle(model, rows_of, setting),
    )
    rows = Rows(model, cache)
    first = rows.forward([request.context for request in requests], 1)
    found = list(first)
    if longest > 0:
        later = rows.forward(rest, longest)
        found = [
            torch.cat([one, more[longest - len(tokens) :]])
            for one, more, tokens in zip(first, later, rest, strict=True)
        ]
    return found, CacheUse.of(cache)


def _oracle(model: Any, rows: Sequence[Sequence[int]], setting: Setting) -> dict[str, Any]:
    """Scores that the full cache gives to one text in all, for a policy that is to know them."""
    if not setting.needs_oracle:
        return {}
    [row] = rows
    whole = H2OCache(model, EvictionPolicy(num_heavy=len(row), num_recent=0))
    Rows(model, whole).forward(rows, 1)
    given = []
    for layer in whole.layers:
        assert layer.positions is not None
        assert layer.scores is not None
        # Nothing has left, so that ranks are positions.
        order = layer.positions[0].argsort(-1)
        given.append(layer.scores[0].gather(-1, order)[:, -len(row) :])
    return {"given_scores": given}


class Rows:
    """A batch of sequences that come in one or more forwards; without a cache in one, padded right.

    Parameters
    ----------
    model : transformers.PreTrainedModel
    cache : H2OCache, DynamicCache or None
    mask : Tensor, int64, [batch, columns], optional
        1 = real, of what the cache has seen.
    """

    def __init__(self, model: Any, cache: Any, mask: Tensor | None = None) -> None:
        self._model, self._cache = model, cache
        self._mask = mask
        self._accepts = inspect.signature(model.forward).parameters

    def forward(self, rows: Sequence[Sequence[int]], keep: int, side: str = "left") -> Tensor:
        """Logits [batch, keep, vocabulary] of the last `keep` columns of these tokens.

        `side` is where the shorter rows are padded.
        """
        ids, real = padded(rows, self._model.device, side)
        if self._mask is None:
            return self._forward_part(ids, real, keep)
        # A forward longer than what was seen could be the whole text again, and H2OCache asks.
        at_most = self._mask.shape[1]
        parts = zip(torch.split(ids, at_most, 1), torch.split(real, at_most, 1), strict=True)
        logits = [self._forward_part(*part, keep) for part in parts]
        return torch.cat(logits, 1)[:, -keep:]

    def _forward_part(self, ids: Tensor, real: Tensor, keep: int) -> Tensor:
        former = real[:, :0] if self._mask is None else self._mask
        self._mask = torch.cat([former, real], 1)
        seen = former.sum(1, keepdim=True)
        # Padding has the position of the first token after it: never that of an earlier one.
        arguments: dict[str, Any] = {
            "position_ids": seen + (real.cumsum(1) - 1).clamp(min=0),
            "logits_to_keep": keep,
        }
        arguments = {name: arguments[name] for name in arguments if name in self._accepts}
        if self._cache is not None:
            arguments[cache_kwarg(self._model)] = self._cache
            arguments["attention_mask"] = self._mask
        # Without a cache padding comes last, and causal attention never sees it.
        output = self._model(input_ids=ids, use_cache=self._cache is not None, **arguments)
        logits: Tensor = output.logits[:, -keep:]
        return logits
