"""Modes in which tokens leave for good: our own order, the official real_drop, and its rolling.

They run in a model through H2OCache, which does the same; tests say so.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from h2o_kv import ops
from h2o_kv._C import EvictionPolicy
from h2o_kv.hf import H2OCache, cache_kwarg
from h2o_kv.hf.settings import ATTENTION_NAME
from h2o_kv.parity.mode import (
    Counts,
    ParityMode,
    ParityTrace,
    attention_weights,
    causal,
    check_count,
    check_integer,
    check_ratio,
    check_replay,
    group_sums,
    highest,
)

__all__ = ["CachingMode", "Fixed", "RealDrop", "RealDropRolling", "attention_implementation"]

# Given the first row, the row after the last one, and which tokens before are there, bool
# [score_heads, first]: the logits [heads, rows, columns up to the last row].
_RowLogits = Callable[[int, int, Tensor], Tensor]


class CachingMode(ParityMode):
    """A mode that runs through an H2OCache."""

    @abstractmethod
    def cache(self, model: Any, prompt_len: int | None = None) -> H2OCache:
        """An empty cache that does what the mode does.

        Parameters
        ----------
        model : PreTrainedModel
        prompt_len : int, optional
            Tokens of the prompt, where the budget is a part of it.
        """

    @contextmanager
    def running(self, model: Any, prompt_len: int | None = None) -> Iterator[dict[str, Any]]:
        """Run a model with a new cache of this mode; see `ParityMode.running`.

        The cache is in what it gives, under the name that the model's forward has for it.
        """
        cache = self.cache(model, prompt_len)
        with attention_implementation(model, ATTENTION_NAME):
            yield {cache_kwarg(model): cache}

    def _score_row(self, model: Any, input_ids: Tensor, prompt_len: int) -> Tensor:
        with self.running(model, prompt_len) as options:
            parts = [model(input_ids[:, :prompt_len], **options).logits]
            for column in range(prompt_len, input_ids.shape[1]):
                parts.append(model(input_ids[:, column : column + 1], **options).logits)
        return torch.cat(parts, dim=1)


@dataclass(frozen=True)
class Fixed(CachingMode):
    """Our own order (docs/algorithm.md): what every other mode is compared with.

    Attributes
    ----------
    num_heavy, num_recent, num_sink : int
        Tokens that stay.
    prefill : {"one_shot", "streaming"}
        What a prompt does, as in H2OCache.
    prefill_chunk : int
        Tokens that join together in a streaming prefill; 1 is the paper's algorithm from the start.
    """

    name: ClassVar[str] = "fixed"
    source: ClassVar[str] = ""

    num_heavy: int
    num_recent: int
    num_sink: int = 0
    prefill: str = "one_shot"
    prefill_chunk: int = 1

    def __post_init__(self) -> None:
        _check_budget(self.name, self.num_heavy, self.num_recent, self.num_sink)
        if self.prefill not in ("one_shot", "streaming"):
            raise ValueError(
                f'fixed: prefill must be "one_shot" or "streaming", got {self.prefill!r}'
            )
        check_integer("fixed: prefill_chunk", self.prefill_chunk)
        if self.prefill_chunk < 1:
            raise ValueError(f"fixed: prefill_chunk must be >= 1, got {self.prefill_chunk}")

    @classmethod
    def from_ratios(cls, heavy_ratio: float, recent_ratio: float, length: int) -> Fixed:
        """One-shot, without sinks, rounded as `EvictionPolicy` does; see `ParityMode.from_ratios`."""
        _check_parts(cls.name, heavy_ratio, recent_ratio, length)
        ratios = {"heavy": heavy_ratio, "recent": recent_ratio}
        if not any(ratios.values()):
            return cls(0, 0)
        # A policy takes a ratio above 0, or a count.
        options: dict[str, Any] = {
            f"{what}_ratio" if ratio else f"num_{what}": ratio or 0
            for what, ratio in ratios.items()
        }
        budget = EvictionPolicy(**options).resolve(length)
        return cls(budget.num_heavy, budget.num_recent)

    def counts(self, length: int) -> Counts:
        """The budget without the sinks, whatever the length."""
        return Counts(self.num_heavy, self.num_recent)

    def replay(self, logits: Tensor, prompt_len: int, *, group_size: int = 1) -> ParityTrace:
        """Replay recorded attention; see `ParityMode.replay`.

        Parameters
        ----------
        logits, prompt_len
            As there.
        group_size : int
            Query heads that share a KV head, next to each other: their weights are summed.
        """
        chunk = prompt_len if self.prefill == "one_shot" else self.prefill_chunk
        budget = (self.num_sink, self.num_heavy, self.num_recent)
        return _replay_logits(self.name, logits, prompt_len, chunk, budget, group_size)

    def cache(self, model: Any, prompt_len: int | None = None) -> H2OCache:
        """See `CachingMode.cache`."""
        policy = EvictionPolicy(
            num_heavy=self.num_heavy, num_recent=self.num_recent, num_sink=self.num_sink
        )
        return H2OCache(
            model.config, policy, prefill=self.prefill, prefill_chunk=self.prefill_chunk
        )


@dataclass(frozen=True)
class RealDrop(CachingMode):
    """`utils_real_drop`: tokens are dropped for good; the whole prompt attends before any is.

    It is our own order with chunk = prompt, then 1. A later forward of several tokens is a chunk, too.

    Attributes
    ----------
    hh_size, recent_size : int
        Tokens that stay, as the flags of `run_summarization.py`.
    """

    name: ClassVar[str] = "real_drop"
    source: ClassVar[str] = "h2o_hf/utils_real_drop/modify_llama.py (H2OLlamaAttention)"

    hh_size: int = 1024
    recent_size: int = 1024

    def __post_init__(self) -> None:
        _check_budget(self.name, self.hh_size, self.recent_size)

    @classmethod
    def from_ratios(cls, heavy_ratio: float, recent_ratio: float, length: int) -> RealDrop:
        """Rounded down, as the other scripts do; see `ParityMode.from_ratios`."""
        _check_parts(cls.name, heavy_ratio, recent_ratio, length)
        return cls(int(heavy_ratio * length), int(recent_ratio * length))

    def counts(self, length: int) -> Counts:
        """The budget, whatever the length."""
        return Counts(self.hh_size, self.recent_size)

    def replay(self, logits: Tensor, prompt_len: int, *, group_size: int = 1) -> ParityTrace:
        """Replay recorded attention; see `ParityMode.replay`, and `Fixed.replay` for group_size.

        The script itself fails with grouped-query attention; groups are summed as H2OCache does.
        """
        budget = (0, self.hh_size, self.recent_size)
        return _replay_logits(self.name, logits, prompt_len, prompt_len, budget, group_size)

    def cache(self, model: Any, prompt_len: int | None = None) -> H2OCache:
        """See `CachingMode.cache`."""
        return Fixed(self.hh_size, self.recent_size).cache(model)


@dataclass(frozen=True)
class RealDropRolling(RealDrop):
    """`utils_real_drop` as `run_streaming.py` uses it: positions are ranks within the cache.

    Keys are stored without rotation; in each step key i of the cache is rotated by i and a query by its
    own place behind them.
    """

    name: ClassVar[str] = "real_drop_rolling"
    source: ClassVar[str] = "h2o_hf/utils_real_drop/modify_llama.py (H2OLlamaAttention_streaming)"

    def replay(self, logits: Tensor, prompt_len: int, *, group_size: int = 1) -> ParityTrace:
        """Not from logits: they depend on who was dropped before. Use `replay_vectors`.

        Raises
        ------
        ValueError
            Always.
        """
        raise ValueError(
            f"{self.name}: logits must not be recorded, since rotations follow what is dropped; call "
            "replay_vectors with queries and keys before rotation"
        )

    def replay_vectors(
        self,
        query: Tensor,
        key: Tensor,
        cos: Tensor,
        sin: Tensor,
        prompt_len: int,
        *,
        scale: float | None = None,
    ) -> ParityTrace:
        """Replay recorded queries and keys.

        Parameters
        ----------
        query : Tensor, float, [heads, seq_len, head_dim]
            Not rotated.
        key : Tensor, float, [score_heads, seq_len, head_dim]
            Not rotated. heads is a multiple of score_heads.
        cos, sin : Tensor, [num_ranks, pairs]
            As `h2o_kv.ops.rotate` takes them, for as many ranks as there are tokens at a time.
        prompt_len : int
            As in `ParityMode.replay`.
        scale : float, optional
            Factor on query . key; head_dim ** -0.5 by default.

        Returns
        -------
        ParityTrace

        Raises
        ------
        ValueError
            prompt_len is out of its range, shapes do not fit, or heads is no multiple.
        """
        if query.ndim != 3 or key.ndim != 3 or query.shape[1:] != key.shape[1:] or 0 in key.shape:
            raise ValueError(
                f"{self.name}: query and key must be [heads, seq_len, head_dim], alike but for their "
                f"heads, got {list(query.shape)} and {list(key.shape)}"
            )
        heads, seq_len, head_dim = query.shape
        group_size = heads // key.shape[0]
        factor = head_dim**-0.5 if scale is None else scale
        like = query.new_zeros(heads, seq_len, seq_len)
        if key.shape[0] * group_size != heads:
            raise ValueError(
                f"{self.name}: heads of query must be a multiple of those of key = {key.shape[0]}, "
                f"got {heads}"
            )
        check_replay(self.name, like, prompt_len)

        def row_logits(start: int, stop: int, present: Tensor) -> Tensor:
            new = torch.ones(len(present), stop - start, dtype=torch.bool, device=present.device)
            ranks = torch.cat([present, new], -1).cumsum(-1) - 1  # Of who is absent: anything.
            turned = [
                ops.rotate(vectors[None], index[None], cos, sin)[0]
                for vectors, index in (
                    (key[:, :stop], ranks.clamp(min=0)),
                    (query[:, start:stop], ranks[:, start:].repeat_interleave(group_size, 0)),
                )
            ]
            keys = turned[0].repeat_interleave(group_size, 0)
            return factor * turned[1] @ keys.transpose(-1, -2)

        steps = _steps(seq_len, prompt_len, prompt_len)
        return _replay(row_logits, like, steps, (0, self.hh_size, self.recent_size), group_size)

    def cache(self, model: Any, prompt_len: int | None = None) -> H2OCache:
        """See `CachingMode.cache`."""
        policy = EvictionPolicy(num_heavy=self.hh_size, num_recent=self.recent_size)
        return H2OCache(model, policy, positions="rolling")


@contextmanager
def attention_implementation(model: Any, name: str) -> Iterator[None]:
    """Have a model run the attention function `name` inside a `with`."""
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _check_budget(name: str, num_heavy: int, num_recent: int, num_sink: int = 0) -> None:
    for what, count in (("heavy", num_heavy), ("recent", num_recent), ("sink", num_sink)):
        check_count(f"{name}: {what} tokens", count)
    if num_heavy + num_recent + num_sink < 1:
        raise ValueError(f"{name}: the budget must be >= 1 token, got 0")


def _check_parts(name: str, heavy_ratio: float, recent_ratio: float, length: int) -> None:
    check_ratio(f"{name}: heavy_ratio", heavy_ratio)
    check_ratio(f"{name}: recent_ratio", recent_ratio)
    if length < 1:
        raise ValueError(
            f"{name}: length must be >= 1, of which the ratios are taken, got {length}"
        )


def _steps(seq_len: int, prompt_len: int, chunk: int) -> list[tuple[int, int]]:
    """First row and row after the last of each forward: the prompt `chunk` rows at a time, then one."""
    prompt = [(row, min(row + chunk, prompt_len)) for row in range(0, prompt_len, chunk)]
    return prompt + [(row, row + 1) for row in range(prompt_len, seq_len)]


def _replay_logits(
    name: str,
    logits: Tensor,
    prompt_len: int,
    chunk: int,
    budget: tuple[int, int, int],
    group_size: int,
) -> ParityTrace:
    check_replay(name, logits, prompt_len, group_size)
    steps = _steps(logits.shape[1], prompt_len, chunk)
    return _replay(
        lambda start, stop, _: logits[:, start:stop, :stop], logits, steps, budget, group_size
    )


def _replay(
    row_logits: _RowLogits,
    like: Tensor,
    steps: list[tuple[int, int]],
    budget: tuple[int, int, int],
    group_size: int,
) -> ParityTrace:
    """Attend, score and evict, forward after forward; budget is (sink, heavy, recent).

    Scores and kept sets are indexed by position, which no eviction moves; `like` is [heads, seq_len,
    seq_len].
    """
    heads, seq_len, _ = like.shape
    score_heads = heads // group_size
    attended = torch.zeros_like(like, dtype=torch.bool)
    weights = torch.zeros_like(like)
    scores = like.new_zeros(score_heads, seq_len, seq_len)
    kept = torch.zeros_like(scores, dtype=torch.bool)
    score = like.new_zeros(score_heads, seq_len)
    present = torch.zeros_like(score, dtype=torch.bool)
    for start, stop in steps:
        logits = row_logits(start, stop, present[:, :start])
        present[:, start:stop] = True
        seen = present[:, None, :stop] & causal(stop - start, stop, like.device)
        visible = seen.repeat_interleave(group_size, 0)
        row_weights = attention_weights(logits, visible)
        attended[:, start:stop, :stop] = visible
        weights[:, start:stop, :stop] = row_weights
        added = group_sums(row_weights, group_size)
        kept[:, start:stop, :stop] = seen
        # Row by row as recorded, all at once as counted: 16-bit scripts round the sum once.
        scores[:, start:stop, :stop] = score[:, None, :stop] + added.cumsum(1)
        score[:, :stop] += added.sum(1)
        present[:, :stop] &= _staying(score[:, :stop], present[:, :stop], budget)
        score.masked_fill_(~present, 0)
        scores[:, stop - 1] = score
        kept[:, stop - 1] = present
    return ParityTrace(attended, weights, scores, kept)


def _staying(score: Tensor, present: Tensor, budget: tuple[int, int, int]) -> Tensor:
    """Who stays of `present`, bool [score_heads, num]; every head has as many tokens."""
    num_sink, num_heavy, num_recent = budget
    num = score.shape[-1]
    if int(present[0].sum()) <= num_sink + num_heavy + num_recent:
        return present
    position = torch.arange(num, device=score.device)
    protected = present & ((position < num_sink) | (position >= num - num_recent))
    free = num_sink + num_heavy + num_recent - int(protected[0].sum())
    candidates = score.masked_fill(protected | ~present, -1)  # Scores are sums of weights: >= 0.
    return protected | highest(candidates, free)
