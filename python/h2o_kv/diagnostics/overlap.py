"""Whether heads want the same tokens: sets of highest scores, compared."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor

__all__ = [
    "GroupSharing",
    "HeadOverlap",
    "group_sharing",
    "head_overlap",
    "jaccard",
    "overlap_coefficient",
    "top_set",
]


@dataclass(frozen=True)
class HeadOverlap:
    """Overlap of the top sets of every two heads of a layer; nan where there is one head.

    Attributes
    ----------
    jaccard_mean, jaccard_min : float
        |A and B| / |A or B|.
    overlap_mean, overlap_min : float
        |A and B| / min(|A|, |B|).
    by_chance : float
        Overlap coefficient that random sets of this size have on average: their part of the tokens.
    """

    jaccard_mean: float
    jaccard_min: float
    overlap_mean: float
    overlap_min: float
    by_chance: float


@dataclass(frozen=True)
class GroupSharing:
    """What the query heads of one KV head lose by sharing one set of k tokens.

    Coverage of a head by a set: the share of the head's accumulated attention that is on the set.

    Attributes
    ----------
    sum_max_overlap : float
        Overlap coefficient of the set by summed and the set by maximised weights.
    sum_mean, sum_worst : float
        Mean and lowest coverage of the heads by the set of the summed weights.
    max_mean, max_worst : float
        The same by the set of the maximised weights.
    own_mean, own_worst : float
        Each head by its own k tokens: the most that any k tokens cover.
    union_mean, union_worst : float
        By the union of the heads' own sets: what no shared set of k tokens can exceed.
    union_tokens : int
        Tokens in that union, k to group_size * k.
    """

    sum_max_overlap: float
    sum_mean: float
    sum_worst: float
    max_mean: float
    max_worst: float
    own_mean: float
    own_worst: float
    union_mean: float
    union_worst: float
    union_tokens: int


def top_set(scores: Tensor, k: int) -> Tensor:
    """Which tokens are among the k highest; of equal scores the later token is, as in a prefill.

    Parameters
    ----------
    scores : Tensor, float, [..., tokens]
    k : int
        In 1 .. tokens.

    Returns
    -------
    Tensor, bool, [..., tokens]
    """
    order = scores.flip(-1).argsort(dim=-1, descending=True, stable=True)[..., :k]
    members = scores.shape[-1] - 1 - order
    chosen = torch.zeros(scores.shape, dtype=torch.bool, device=scores.device)
    return chosen.scatter_(-1, members, True)


def jaccard(a: Tensor, b: Tensor) -> float:
    """|A and B| / |A or B| of two sets, bool [tokens]."""
    return int((a & b).sum()) / int((a | b).sum())


def overlap_coefficient(a: Tensor, b: Tensor) -> float:
    """|A and B| / min(|A|, |B|) of two sets, bool [tokens]."""
    return int((a & b).sum()) / min(int(a.sum()), int(b.sum()))


def head_overlap(scores: Tensor, k: int) -> HeadOverlap:
    """Compare the k highest tokens of every two heads.

    Parameters
    ----------
    scores : Tensor, float, [heads, tokens]
        Accumulated attention of each head.
    k : int
        In 1 .. tokens.
    """
    pairs = list(itertools.combinations(top_set(scores, k), 2))
    nan = [torch.nan]
    jaccards = [jaccard(a, b) for a, b in pairs] or nan
    overlaps = [overlap_coefficient(a, b) for a, b in pairs] or nan
    return HeadOverlap(
        jaccard_mean=fmean(jaccards),
        jaccard_min=min(jaccards),
        overlap_mean=fmean(overlaps),
        overlap_min=min(overlaps),
        by_chance=k / scores.shape[-1],
    )


def group_sharing(scores: Tensor, maximised: Tensor, k: int) -> GroupSharing:
    """Compare the sets that a group of query heads could share.

    Parameters
    ----------
    scores : Tensor, float, [group_size, tokens]
        Accumulated attention of each query head; its sum over heads is `gqa_reduce="sum"`.
    maximised : Tensor, float, [tokens]
        Accumulated maximum over the heads, taken in each row: `gqa_reduce="max"`.
    k : int
        In 1 .. tokens.
    """
    by_sum, by_max = top_set(scores.sum(0), k), top_set(maximised, k)
    own = top_set(scores, k)
    union = own.any(0)

    def coverage(members: Tensor) -> Tensor:
        return (scores * members).sum(-1) / scores.sum(-1)

    covered = {"sum": by_sum, "max": by_max, "own": own, "union": union}
    return GroupSharing(
        sum_max_overlap=overlap_coefficient(by_sum, by_max),
        union_tokens=int(union.sum()),
        **{f"{name}_mean": float(coverage(members).mean()) for name, members in covered.items()},
        **{f"{name}_worst": float(coverage(members).min()) for name, members in covered.items()},
    )
