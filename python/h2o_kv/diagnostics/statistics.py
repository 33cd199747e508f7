"""Attention statistics of an unmodified model: what the paper's section 3 says of its models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from h2o_kv.diagnostics.concentration import (
    PowerLaw,
    gini,
    power_law,
    tokens_for,
    top_share,
)
from h2o_kv.diagnostics.distribution import Distribution
from h2o_kv.diagnostics.overlap import (
    GroupSharing,
    HeadOverlap,
    group_sharing,
    head_overlap,
    overlap_coefficient,
    top_set,
)
from h2o_kv.diagnostics.teacher import Teacher
from h2o_kv.generation import attention_restored
from h2o_kv.policies import count_of

__all__ = [
    "AttentionStatistics",
    "HeadStatistics",
    "LayerStatistics",
    "Stability",
    "attention_statistics",
]

BELOW = 0.01
"""An entry is small below this part of its row's maximum (H2O, section 3.1)."""
TOP = 0.2
"""Part of the tokens whose share of the attention is measured, and that top sets have."""
SINKS = 4
"""First tokens whose share is given apart (StreamingLLM, arXiv 2309.17453, section 3.2)."""
_SEGMENT = 256


@dataclass(frozen=True)
class HeadStatistics:
    """One query head over a whole text.

    Attributes
    ----------
    sparsity : float
        Share of the causal entries (token not later than query) below 1 % of their row's maximum.
    top_share : float
        Share of all attention on the 20 % of the tokens with the highest accumulated score.
    sink_share : float
        Share of all attention on the first 4 tokens.
    tokens_90, tokens_95 : int
        Fewest tokens, by accumulated score, that hold 90 % and 95 % of all attention.
    rows_top_share : Distribution
        Share of a row's attention on the 20 % of its tokens that it weighs most, over sampled rows.
    rows_tokens_90, rows_tokens_95 : Distribution
        Fewest tokens that hold 90 % and 95 % of a row's attention, over sampled rows.
    power_law : PowerLaw
        Of the accumulated scores.
    gini : float
        Of the accumulated scores.
    """

    sparsity: float
    top_share: float
    sink_share: float
    tokens_90: int
    tokens_95: int
    rows_top_share: Distribution
    rows_tokens_90: Distribution
    rows_tokens_95: Distribution
    power_law: PowerLaw
    gini: float


@dataclass(frozen=True)
class Stability:
    """How early the heavy hitters of one layer are known: means over its query heads.

    Attributes
    ----------
    tokens : int
        Tokens after which the early set is taken: the 20 % of them with the highest scores then.
    in_final : float
        Overlap coefficient of the early set and the 20 % of the whole text at its end.
    same_tokens : float
        Of the early set and the 20 % of the same first tokens by their scores at the end.
    """

    tokens: int
    in_final: float
    same_tokens: float


@dataclass(frozen=True)
class LayerStatistics:
    """One layer over a whole text.

    Attributes
    ----------
    sparsity : float
        Share of the causal entries of all its heads below 1 % of their row's maximum.
    sparsity_square : float
        The same with the entries above the diagonal, which no row sees, counted as small.
    heads : tuple of HeadStatistics
        Query heads.
    overlap : HeadOverlap
        Of its query heads' top sets.
    groups : tuple of GroupSharing
        KV heads.
    stability : tuple of Stability
        One for each early point, ascending.
    """

    sparsity: float
    sparsity_square: float
    heads: tuple[HeadStatistics, ...]
    overlap: HeadOverlap
    groups: tuple[GroupSharing, ...]
    stability: tuple[Stability, ...]


class AttentionStatistics:
    """Collects the statistics of all layers, block by block: an `AttentionObserver`.

    What it holds is linear in the text: column sums, and one number a sampled row.

    Parameters
    ----------
    early : sequence of int
        Numbers of tokens after which the heavy hitters are compared with the final ones, ascending.
    row_stride : int
        Every so many rows the row itself is sorted, for its own top share: the slow part.

    Raises
    ------
    ValueError
        An argument is out of its range.
    """

    def __init__(self, *, early: Sequence[int] = (), row_stride: int = 8) -> None:
        if row_stride < 1:
            raise ValueError(f"AttentionStatistics: row_stride must be >= 1, got {row_stride}")
        if list(early) != sorted(set(early)) or (early and early[0] < 1):
            raise ValueError(
                f"AttentionStatistics: early must be ascending and >= 1, got {list(early)}"
            )
        self._early = tuple(early)
        self._row_stride = row_stride
        self._layers: dict[int, _LayerSums] = {}

    def observe(self, layer: int, first: int, weights: Tensor) -> None:
        """See `AttentionObserver.observe`."""
        sums = self._layers.setdefault(layer, _LayerSums())
        last = first + weights.shape[2]
        cuts = [first, *(n for n in self._early if first < n < last), last]
        for start, stop in pairwise(cuts):
            sums.add(weights[:, :, start - first : stop - first], start, self._row_stride)
            if stop in self._early:
                sums.early[stop] = sums.columns.clone()

    def result(self) -> tuple[LayerStatistics, ...]:
        """The statistics of every layer, as they stand.

        Raises
        ------
        ValueError
            Fewer than two tokens were seen.
        """
        if not self._layers or self._layers[0].rows < 2:
            raise ValueError("AttentionStatistics: there must be at least 2 tokens, got fewer")
        return tuple(self._layers[layer].result() for layer in sorted(self._layers))


def attention_statistics(
    model: Any,
    ids: Tensor,
    *,
    early: Sequence[float] = (0.1, 0.25, 0.5, 0.75),
    row_stride: int = 8,
    progress: Callable[[float], None] | None = None,
) -> tuple[LayerStatistics, ...]:
    """Attention statistics of every layer of an unmodified model over a text.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        As `Teacher` takes; left under the attention that it came with.
    ids : Tensor, int64, [tokens]
        At least two.
    early : sequence of float
        Parts of the text after which the heavy hitters are compared with the final ones.
    row_stride : int
        See `AttentionStatistics`.
    progress : callable, optional
        Called with the fraction that is done.

    Returns
    -------
    tuple of LayerStatistics

    Raises
    ------
    ValueError
        The text is too short.
    NotImplementedError
        The model's attention cannot be observed.
    """
    points = sorted({count_of(part, len(ids)) for part in early})
    collected = AttentionStatistics(early=points, row_stride=row_stride)
    teacher = Teacher(model, [collected])
    with attention_restored(model):
        for start in range(0, len(ids), _SEGMENT):
            teacher.feed(ids[start : start + _SEGMENT], keep_logits=1)
            if progress is not None:
                progress(min(1.0, (start + _SEGMENT) / len(ids)))
    return collected.result()


class _LayerSums:
    """Running sums of one layer; [H, G] are its KV heads and the query heads of each."""

    def __init__(self) -> None:
        self.rows = 0
        self.columns = torch.zeros(0)  # float64, [H, G, tokens]
        self._maximised = torch.zeros(0)  # float64, [H, tokens]
        self._below = torch.zeros(0)  # int64, [H, G]
        self._of_rows: dict[str, list[Tensor]] = {}
        self.early: dict[int, Tensor] = {}

    def add(self, weights: Tensor, first: int, row_stride: int) -> None:
        """Take rows `first` on, [H, G, rows, keys]; keys may go on past the last row."""
        rows = weights.shape[2]
        weights = weights[..., : first + rows]
        columns = weights.sum(2, dtype=torch.float64)
        maximised = weights.amax(1).sum(1, dtype=torch.float64)
        highest = weights.amax(-1, keepdim=True)
        # Later tokens have weight 0 and are small, too: they are not entries of their row.
        later = rows * (rows - 1) // 2
        below = (weights < BELOW * highest).sum((-2, -1)) - later
        if self.rows:
            columns[..., :first] += self.columns
            maximised[..., :first] += self._maximised
            below += self._below
        self.columns, self._maximised, self._below = columns, maximised, below
        self.rows = first + rows
        for row in range(-first % row_stride, rows, row_stride):
            self._add_row(weights[:, :, row, : first + row + 1])

    def _add_row(self, row: Tensor) -> None:
        # In a shorter row 20 % is no whole token.
        if row.shape[-1] * TOP < 1:
            return
        for name, value in (
            ("top_share", top_share(row, TOP)),
            ("tokens_90", tokens_for(row, 0.9)),
            ("tokens_95", tokens_for(row, 0.95)),
        ):
            self._of_rows.setdefault(name, []).append(value)

    def result(self) -> LayerStatistics:
        tokens = self.rows
        k = count_of(TOP, tokens)
        entries = tokens * (tokens + 1) // 2
        small = int(self._below.sum())
        heads = self.columns.flatten(0, 1)
        num_heads = len(heads)
        return LayerStatistics(
            sparsity=small / (num_heads * entries),
            sparsity_square=(small / num_heads + tokens * (tokens - 1) / 2) / tokens**2,
            heads=tuple(self._head(index, scores, entries) for index, scores in enumerate(heads)),
            overlap=head_overlap(heads, k),
            groups=tuple(
                group_sharing(group, maximised, k)
                for group, maximised in zip(self.columns, self._maximised, strict=True)
            ),
            stability=tuple(_stability(early, heads) for early in self.early.values()),
        )

    def _head(self, index: int, scores: Tensor, entries: int) -> HeadStatistics:
        rows = {
            name: Distribution.of(torch.stack(values).flatten(1)[:, index])
            for name, values in self._of_rows.items()
        }
        nothing = Distribution.of(torch.zeros(0))
        return HeadStatistics(
            sparsity=int(self._below.flatten()[index]) / entries,
            top_share=float(top_share(scores, TOP)),
            sink_share=float(scores[:SINKS].sum() / scores.sum()),
            tokens_90=int(tokens_for(scores, 0.9)),
            tokens_95=int(tokens_for(scores, 0.95)),
            rows_top_share=rows.get("top_share", nothing),
            rows_tokens_90=rows.get("tokens_90", nothing),
            rows_tokens_95=rows.get("tokens_95", nothing),
            power_law=power_law(scores),
            gini=float(gini(scores)),
        )


def _stability(early: Tensor, final: Tensor) -> Stability:
    """Compare early scores [H, G, tokens so far] with the final ones [heads, tokens]."""
    early = early.flatten(0, 1)
    so_far, tokens = early.shape[-1], final.shape[-1]
    k = count_of(TOP, so_far)
    then = top_set(early, k)
    in_final, same_tokens = 0.0, 0.0
    for head, scores in zip(then, final, strict=True):
        at_end = top_set(scores, count_of(TOP, tokens))[:so_far]
        in_final += int((head & at_end).sum()) / k
        same_tokens += overlap_coefficient(head, top_set(scores[:so_far], k))
    return Stability(
        tokens=so_far, in_final=in_final / len(then), same_tokens=same_tokens / len(then)
    )
