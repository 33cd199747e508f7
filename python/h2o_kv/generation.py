"""Timed generation and scoring of text under several caches, one token at a time.

The loop is explicit (one model call a token, `CacheSession.feed`), so that prefill and every
decode step are timed exactly, and so that several caches can take turns token by token: on a shared
machine that is the only comparison of speeds that means something.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from transformers import DynamicCache

from h2o_kv.hf import H2OCache, cache_kwarg

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from h2o_kv import EvictionPolicy

__all__ = [
    "CacheMeasurements",
    "CacheSession",
    "CacheSpec",
    "ContinuationScore",
    "GenerationResult",
    "GenerationRun",
    "SamplingOptions",
    "TokenAgreement",
    "attention_restored",
    "compare_tokens",
    "generate",
    "percentile",
    "resolve_policy",
    "score_continuation",
]

_T = TypeVar("_T")

PREFILL_MODES = ("one_shot", "streaming")
# A streaming prefill hands the model so many prompt tokens a call (rounded to whole chunks), so
# that the memory of the activations is bounded as well.
_STREAMING_CALL_TOKENS = 512

Progress = Callable[[float], None]
"""Called with the fraction of a prefill that is done, 0 to 1."""


@dataclass(frozen=True, kw_only=True)
class CacheSpec:
    """Which cache a run uses.

    Attributes
    ----------
    label : str
        Name in results, such as "full", "h2o" or "local".
    policy : EvictionPolicy, optional
        None is the full cache: transformers' `DynamicCache` under its "sdpa" attention. Ratios are
        resolved from the length of the whole prompt.
    prefill : {"one_shot", "streaming"}
        Of an `H2OCache`; see its documentation.
    prefill_chunk : int
        Tokens that join the cache together in a streaming prefill.
    """

    label: str
    policy: EvictionPolicy | None = None
    prefill: str = "one_shot"
    prefill_chunk: int = 64

    def __post_init__(self) -> None:
        if self.prefill not in PREFILL_MODES:
            raise ValueError(
                f'CacheSpec: prefill must be one of "one_shot", "streaming", got {self.prefill!r}'
            )
        if self.prefill_chunk < 1:
            raise ValueError(f"CacheSpec: prefill_chunk must be >= 1, got {self.prefill_chunk}")


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How the next token is chosen from the logits.

    Attributes
    ----------
    temperature : float
        0 takes the most likely token (the lowest id among equals).
    top_p : float
        Sample from the smallest set of most likely tokens whose probability reaches `top_p`.
    seed : int
        Of the generator that draws; every run has its own, seeded alike.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(
                f"SamplingOptions: temperature must be finite and >= 0, got {self.temperature}"
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"SamplingOptions: top_p must be in (0, 1], got {self.top_p}")
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"SamplingOptions: seed must be >= 0 and < 2**64, got {self.seed}")


@dataclass(frozen=True, kw_only=True)
class CacheMeasurements:
    """What one cache took and held over one run.

    Attributes
    ----------
    label : str
        Of the `CacheSpec`.
    prompt_tokens, tokens_seen : int
        Tokens of the prompt; tokens that passed the model (prompt and decode steps).
    tokens_kept : tuple of int
        Occupied slots of each layer at the end (of the KV head that holds most).
    kv_bytes : int
        Bytes that the cache has allocated: K and V, and for H2O also scores and positions.
    full_kv_bytes : int
        Bytes that K and V of all `tokens_seen` take.
    prefill_s : float
        Seconds of the prompt's model calls.
    step_ms : tuple of float
        Milliseconds of each decode step: model call and cache, without the choice of the token.
    """

    label: str
    prompt_tokens: int
    tokens_seen: int
    tokens_kept: tuple[int, ...]
    kv_bytes: int
    full_kv_bytes: int
    prefill_s: float
    step_ms: tuple[float, ...]

    @property
    def median_ms(self) -> float | None:
        """Median milliseconds of a decode step; None when there was none."""
        return statistics.median(self.step_ms) if self.step_ms else None

    @property
    def tokens_per_s(self) -> float | None:
        """Decode steps per second at the median step; None when there was none."""
        return 1000 / self.median_ms if self.median_ms else None

    def as_dict(self) -> dict[str, Any]:
        """Return fields and statistics as plain values that `json.dumps` takes."""
        steps = self.step_ms
        return {
            **asdict(self),
            "median_ms": self.median_ms,
            "p10_ms": percentile(steps, 10) if steps else None,
            "p90_ms": percentile(steps, 90) if steps else None,
            "tokens_per_s": self.tokens_per_s,
        }


@dataclass(frozen=True, kw_only=True)
class GenerationResult(CacheMeasurements):
    """Text that one cache led to, and what it cost.

    Attributes
    ----------
    token_ids : tuple of int
        New tokens, the final end-of-sequence token included.
    text : str
        The new tokens decoded, special tokens left out.
    finish_reason : {"length", "eos"}
    """

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str


@dataclass(frozen=True, kw_only=True)
class ContinuationScore(CacheMeasurements):
    """How well a given continuation is predicted under one cache.

    Attributes
    ----------
    nll : tuple of float
        Negative log-likelihood (nats) of each token of the continuation.
    """

    nll: tuple[float, ...]

    @property
    def mean_nll(self) -> float:
        """Mean negative log-likelihood, nats per token."""
        return statistics.fmean(self.nll)


@dataclass(frozen=True, kw_only=True)
class TokenAgreement:
    """How far two runs said the same.

    Attributes
    ----------
    compared : int
        Tokens compared: the length of the longer run.
    equal_prefix : int
        Tokens before the first difference.
    first_difference : int, optional
        Index of the first token that differs (or that one run lacks); None when the runs are equal.
    """

    compared: int
    equal_prefix: int
    first_difference: int | None


def compare_tokens(a: Sequence[object], b: Sequence[object]) -> TokenAgreement:
    """Compare two runs token by token (or two texts character by character).

    >>> compare_tokens([5, 6, 7], [5, 6, 9])
    TokenAgreement(compared=3, equal_prefix=2, first_difference=2)
    >>> compare_tokens([5, 6], [5, 6]).first_difference is None
    True
    """
    compared = max(len(a), len(b))
    shared = min(len(a), len(b))
    prefix = next((i for i in range(shared) if a[i] != b[i]), shared)
    return TokenAgreement(
        compared=compared,
        equal_prefix=prefix,
        first_difference=None if prefix == compared else prefix,
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """Percentile with linear interpolation between the two nearest values.

    >>> percentile([1.0, 2.0, 4.0], 75)
    3.0
    """
    if not values:
        raise ValueError("percentile: values must not be empty")
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def resolve_policy(policy: EvictionPolicy, prompt_len: int) -> EvictionPolicy:
    """Return the policy in counts: ratios are resolved from the prompt's length in tokens."""
    if not policy.has_ratio:
        return policy
    budget = policy.resolve(prompt_len)
    return policy.replace(
        num_sink=budget.num_sink, num_heavy=budget.num_heavy, num_recent=budget.num_recent
    )


class CacheSession:
    """One sequence under one cache: the prompt first, then token after token, each call timed.

    The model is put under the attention that the cache needs before each call, outside the time
    measured, so sessions with different caches may take turns on one model.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        Causal language model, in evaluation mode.
    spec : CacheSpec
        The cache.
    """

    def __init__(self, model: PreTrainedModel, spec: CacheSpec) -> None:
        self.spec = spec
        self.prefill_s = 0.0
        self.step_ms: list[float] = []
        self.prompt_tokens = 0
        self.tokens_seen = 0
        self._model: Any = model
        self._cache: Any = None
        self._cache_keyword = cache_kwarg(model)

    @property
    def cache(self) -> Any:
        """The transformers cache; None before `prefill`."""
        return self._cache

    @torch.inference_mode()
    def prefill(self, prompt_ids: Sequence[int], progress: Progress | None = None) -> Tensor:
        """Run the prompt.

        Parameters
        ----------
        prompt_ids : sequence of int
            At least one token.
        progress : callable, optional
            Called after each decoder layer with the fraction of the prompt's work that is done.

        Returns
        -------
        Tensor
            Logits of the token after the prompt, [vocabulary].

        Raises
        ------
        RuntimeError
            The session has a prompt already.
        ValueError
            The prompt is empty.
        """
        if self._cache is not None:
            raise RuntimeError("CacheSession: prefill must be called once")
        if not prompt_ids:
            raise ValueError("CacheSession: prompt_ids must have at least one token, got 0")
        self.prompt_tokens = len(prompt_ids)
        self._cache = self._new_cache()
        call_tokens = len(prompt_ids)
        if self.spec.policy is not None and self.spec.prefill == "streaming":
            chunk = self.spec.prefill_chunk
            call_tokens = max(chunk, _STREAMING_CALL_TOKENS // chunk * chunk)
        starts = range(0, len(prompt_ids), call_tokens)
        with _layer_progress(self._model, len(starts), progress):
            for start in starts:
                logits, seconds = self._call(prompt_ids[start : start + call_tokens])
                self.prefill_s += seconds
        return logits

    @torch.inference_mode()
    def feed(self, token_id: int) -> Tensor:
        """Run one token; return the logits of the next, [vocabulary]."""
        if self._cache is None:
            raise RuntimeError("CacheSession: prefill must be called before feed")
        logits, seconds = self._call([token_id])
        self.step_ms.append(1000 * seconds)
        return logits

    def measurements(self) -> dict[str, Any]:
        """Return the fields of `CacheMeasurements`, as they stand."""
        kept, kv_bytes, full_bytes = [], 0, 0
        for layer in self._cache.layers if self._cache is not None else ():
            layer_kept, layer_bytes, layer_full = _layer_use(layer, self.tokens_seen)
            kept.append(layer_kept)
            kv_bytes += layer_bytes
            full_bytes += layer_full
        return {
            "label": self.spec.label,
            "prompt_tokens": self.prompt_tokens,
            "tokens_seen": self.tokens_seen,
            "tokens_kept": tuple(kept),
            "kv_bytes": kv_bytes,
            "full_kv_bytes": full_bytes,
            "prefill_s": self.prefill_s,
            "step_ms": tuple(self.step_ms),
        }

    def _new_cache(self) -> Any:
        if self.spec.policy is None:
            return DynamicCache()
        # Resolved here: a cache that is filled in several calls sees only the first of them.
        policy = resolve_policy(self.spec.policy, self.prompt_tokens)
        return H2OCache(
            self._model.config,
            policy,
            prefill=self.spec.prefill,
            prefill_chunk=self.spec.prefill_chunk,
        )

    def _call(self, token_ids: Sequence[int]) -> tuple[Tensor, float]:
        model = self._model
        _use_attention(model, "sdpa" if self.spec.policy is None else "h2o")
        input_ids = torch.tensor([list(token_ids)], device=model.device)
        arguments = {self._cache_keyword: self._cache}
        _synchronize(model.device)
        start = time.perf_counter()
        # Without logits_to_keep a prompt of N tokens would make N x vocabulary logits.
        output = model(input_ids=input_ids, use_cache=True, logits_to_keep=1, **arguments)
        _synchronize(model.device)
        seconds = time.perf_counter() - start
        self.tokens_seen += len(token_ids)
        return output.logits[0, -1], seconds


class GenerationRun:
    """Generation of one continuation, advanced from outside one token at a time.

    Parameters
    ----------
    model, tokenizer
        From `h2o_kv.models.load_model`.
    prompt_ids : sequence of int
    spec : CacheSpec
    max_new_tokens : int
        Tokens to generate at most, >= 1.
    sampling : SamplingOptions
    ignore_eos : bool
        Go on after an end-of-sequence token.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        prompt_ids: Sequence[int],
        spec: CacheSpec,
        *,
        max_new_tokens: int = 64,
        sampling: SamplingOptions | None = None,
        ignore_eos: bool = False,
    ) -> None:
        if max_new_tokens < 1:
            raise ValueError(f"generate: max_new_tokens must be >= 1, got {max_new_tokens}")
        self.spec = spec
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self._session = CacheSession(model, spec)
        self._tokenizer: Any = tokenizer
        self._prompt_ids = list(prompt_ids)
        self._max_new_tokens = max_new_tokens
        self._sampler = _Sampler(sampling or SamplingOptions())
        self._eos = frozenset() if ignore_eos else _eos_token_ids(model)

    @property
    def finished(self) -> bool:
        """Whether the run has reached its length or an end-of-sequence token."""
        return self.finish_reason is not None

    @property
    def text(self) -> str:
        """What has been generated, special tokens left out."""
        # The clean-up of older tokenizers takes back spaces that were there a token before.
        return str(
            self._tokenizer.decode(
                self.token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )

    def start(self, progress: Progress | None = None) -> None:
        """Run the prompt and choose the first token; `progress` as in `CacheSession.prefill`."""
        self._choose(self._session.prefill(self._prompt_ids, progress))

    def step(self) -> None:
        """Run the last token and choose the next; nothing happens once the run is finished."""
        if not self.finished:
            self._choose(self._session.feed(self.token_ids[-1]))

    def result(self) -> GenerationResult:
        """Return what has been generated, and what it cost."""
        return GenerationResult(
            **self._session.measurements(),
            token_ids=tuple(self.token_ids),
            text=self.text,
            finish_reason=self.finish_reason or "length",
        )

    def _choose(self, logits: Tensor) -> None:
        token_id = self._sampler.choose(logits)
        self.token_ids.append(token_id)
        if token_id in self._eos:
            self.finish_reason = "eos"
        elif len(self.token_ids) == self._max_new_tokens:
            self.finish_reason = "length"


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt_ids: Sequence[int],
    specs: Sequence[CacheSpec],
    *,
    max_new_tokens: int = 64,
    sampling: SamplingOptions | None = None,
    ignore_eos: bool = False,
    on_prefill: Callable[[CacheSpec, float], None] | None = None,
    on_token: Callable[[Sequence[GenerationRun]], None] | None = None,
) -> tuple[GenerationResult, ...]:
    """Continue a prompt under each of several caches, the caches taking turns token by token.

    Parameters
    ----------
    model, tokenizer
        From `h2o_kv.models.load_model`. The model is left under the attention it came with.
    prompt_ids : sequence of int
        At least one token; the sequence is alone in its batch.
    specs : sequence of CacheSpec
        The caches; one gives plain generation.
    max_new_tokens : int
        Tokens to generate at most, >= 1.
    sampling : SamplingOptions, optional
        Greedy when left out.
    ignore_eos : bool
        Go on after an end-of-sequence token.
    on_prefill : callable, optional
        Called with a spec and the fraction of its prefill that is done.
    on_token : callable, optional
        Called with all runs after the prefills and after each round of tokens.

    Returns
    -------
    tuple of GenerationResult
        In the order of `specs`.

    Raises
    ------
    ValueError
        An argument is out of range.
    """
    runs = [
        GenerationRun(
            model,
            tokenizer,
            prompt_ids,
            spec,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            ignore_eos=ignore_eos,
        )
        for spec in specs
    ]
    with attention_restored(model):
        for run in runs:
            run.start(_bind(on_prefill, run.spec))
        if on_token:
            on_token(runs)
        for turn in range(max_new_tokens - 1):
            if all(run.finished for run in runs):
                break
            for run in _rotated(runs, turn):
                run.step()
            if on_token:
                on_token(runs)
        return tuple(run.result() for run in runs)


def score_continuation(
    model: PreTrainedModel,
    prompt_ids: Sequence[int],
    continuation_ids: Sequence[int],
    specs: Sequence[CacheSpec],
    *,
    on_prefill: Callable[[CacheSpec, float], None] | None = None,
    on_token: Callable[[int], None] | None = None,
) -> tuple[ContinuationScore, ...]:
    """Negative log-likelihood of a given continuation under each of several caches.

    The continuation is fed one token at a time through the cache (teacher forcing), so every token
    is predicted from what the cache kept, as in generation. The caches take turns token by token.

    Parameters
    ----------
    model
        From `h2o_kv.models.load_model`.
    prompt_ids, continuation_ids : sequence of int
        At least one token each.
    specs : sequence of CacheSpec
    on_prefill : callable, optional
        Called with a spec and the fraction of its prefill that is done.
    on_token : callable, optional
        Called with the number of tokens scored so far under every cache.

    Returns
    -------
    tuple of ContinuationScore
        In the order of `specs`.

    Raises
    ------
    ValueError
        The prompt or the continuation is empty.
    """
    if not continuation_ids:
        raise ValueError("score_continuation: continuation_ids must have at least one token, got 0")
    sessions = [CacheSession(model, spec) for spec in specs]
    losses: list[list[float]] = [[] for _ in specs]
    with attention_restored(model):
        logits = [
            session.prefill(prompt_ids, _bind(on_prefill, session.spec)) for session in sessions
        ]
        for count, token_id in enumerate(continuation_ids, start=1):
            for i in _rotated(range(len(sessions)), count):
                losses[i].append(_nll(logits[i], token_id))
                # The last token is only predicted: nothing after it is asked for.
                if count < len(continuation_ids):
                    logits[i] = sessions[i].feed(token_id)
            if on_token:
                on_token(count)
    return tuple(
        ContinuationScore(**session.measurements(), nll=tuple(nll))
        for session, nll in zip(sessions, losses, strict=True)
    )


class _Sampler:
    def __init__(self, options: SamplingOptions) -> None:
        self._options = options
        # On the CPU, so that one seed draws the same on every device.
        self._generator = torch.Generator().manual_seed(options.seed)

    def choose(self, logits: Tensor) -> int:
        """Token id chosen from logits [vocabulary]."""
        if self._options.temperature == 0:
            return int(logits.argmax())
        values = logits.float().cpu()
        # Below the smallest normal number the quotients would be 0 / 0; it is as good as greedy.
        temperature = max(self._options.temperature, torch.finfo(values.dtype).tiny)
        values = (values - values.max()) / temperature
        probabilities, order = torch.softmax(values, -1).sort(descending=True, stable=True)
        # A token stays while those before it have not reached top_p; the first always does.
        leaves = probabilities.cumsum(-1) - probabilities >= self._options.top_p
        leaves[0] = False
        probabilities = probabilities.masked_fill(leaves, 0)
        place = torch.multinomial(probabilities, 1, generator=self._generator)
        return int(order[place])


def _nll(logits: Tensor, token_id: int) -> float:
    return -float(torch.log_softmax(logits.float(), -1)[token_id])


def _layer_use(layer: Any, tokens_seen: int) -> tuple[int, int, int]:
    """Slots occupied, bytes stored, and bytes that K and V of all tokens seen would take."""
    stored: tuple[Tensor, ...]
    if hasattr(layer, "positions"):
        stored = (layer.k_cache, layer.v_cache, layer.scores, layer.positions)
        kept = int((layer.positions >= 0).sum(-1).max())
    else:
        stored = (layer.keys, layer.values)
        kept = layer.keys.shape[-2]
    per_token = sum(t.element_size() * t.shape[0] * t.shape[1] * t.shape[3] for t in stored[:2])
    return kept, sum(t.nbytes for t in stored), per_token * tokens_seen


def _eos_token_ids(model: Any) -> frozenset[int]:
    generation_config = getattr(model, "generation_config", None)
    eos = getattr(generation_config, "eos_token_id", None)
    if eos is None:
        eos = model.config.get_text_config(decoder=True).eos_token_id
    return token_ids(eos)


def token_ids(tokens: int | Sequence[int] | None) -> frozenset[int]:
    """One token, several or none, as configs name those that end a text."""
    if tokens is None:
        return frozenset()
    return frozenset([tokens] if isinstance(tokens, int) else tokens)


def _use_attention(model: Any, name: str) -> None:
    if model.config._attn_implementation != name:
        model.set_attn_implementation(name)


@contextmanager
def attention_restored(model: Any) -> Iterator[None]:
    """Put the model back under the attention that it has now."""
    name = model.config._attn_implementation
    try:
        yield
    finally:
        _use_attention(model, name)


@contextmanager
def _layer_progress(model: Any, calls: int, progress: Progress | None) -> Iterator[None]:
    """Report the fraction done after each decoder layer of `calls` model calls."""
    num_layers = model.config.get_text_config(decoder=True).num_hidden_layers
    layers = next(
        (
            module
            for module in model.modules()
            if isinstance(module, torch.nn.ModuleList) and len(module) == num_layers
        ),
        None,
    )
    if progress is None or layers is None:
        yield
        return
    done = 0

    def advance(*_: Any) -> None:
        nonlocal done
        done += 1
        progress(done / (calls * num_layers))

    handles = [layer.register_forward_hook(advance) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _rotated(items: Sequence[_T], places: int) -> list[_T]:
    """Items from another start each time, so that none is always the one that runs after a pause."""
    start = places % max(len(items), 1)
    return [*items[start:], *items[:start]]


def _bind(
    on_prefill: Callable[[CacheSpec, float], None] | None, spec: CacheSpec
) -> Progress | None:
    return None if on_prefill is None else lambda done: on_prefill(spec, done)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
