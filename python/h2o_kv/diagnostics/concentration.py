"""How concentrated attention is: plain functions of scores, one number a row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from h2o_kv.policies import count_of

__all__ = ["PowerLaw", "gini", "power_law", "tokens_for", "top_share"]


@dataclass(frozen=True)
class PowerLaw:
    """Least-squares line of log(score) over log(rank).

    Attributes
    ----------
    slope : float
        Exponent; -1 is Zipf's law.
    r2 : float
        Share of the variance of log(score) that the line explains. nan where there is none.
    ranks : int
        Scores that were fitted: those above 0.
    """

    slope: float
    r2: float
    ranks: int


def top_share(scores: Tensor, part: float) -> Tensor:
    """Share of the total that the highest `part` of the tokens holds.

    Parameters
    ----------
    scores : Tensor, float, [..., tokens]
        Not negative, not all 0.
    part : float
        In (0, 1]; of it `count_of` tokens are taken.

    Returns
    -------
    Tensor, [...]
    """
    top = scores.topk(count_of(part, scores.shape[-1]), dim=-1).values
    return top.sum(-1) / scores.sum(-1)


def tokens_for(scores: Tensor, share: float) -> Tensor:
    """Fewest tokens whose scores together reach `share` of the total.

    Parameters
    ----------
    scores : Tensor, float, [..., tokens]
        Not negative, not all 0.
    share : float
        In (0, 1).

    Returns
    -------
    Tensor, int64, [...]
    """
    reached = scores.double().sort(-1, descending=True).values.cumsum(-1)
    return (reached < share * reached[..., -1:]).sum(-1) + 1


def power_law(scores: Tensor) -> PowerLaw:
    """Fit log(score) = slope * log(rank) + constant over all scores above 0, the highest at rank 1.

    Parameters
    ----------
    scores : Tensor, float, [tokens]
        At least two above 0.

    Notes
    -----
    Every token counts alike, so the many low ones decide; r2 says whether a line describes them.
    """
    y = scores.double()[scores > 0].sort(descending=True).values.log()
    x = torch.arange(1, len(y) + 1, dtype=torch.float64, device=y.device).log()
    x, y = x - x.mean(), y - y.mean()
    slope = (x * y).sum() / (x * x).sum()
    total = (y * y).sum()
    r2 = 1 - ((y - slope * x) ** 2).sum() / total if total > 0 else torch.tensor(torch.nan)
    return PowerLaw(slope=float(slope), r2=float(r2), ranks=len(y))


def gini(scores: Tensor) -> Tensor:
    """Gini coefficient: 0 where all scores are equal, (n - 1) / n where one token has all.

    Parameters
    ----------
    scores : Tensor, float, [..., tokens]
        Not negative, not all 0.

    Returns
    -------
    Tensor, float64, [...]
    """
    ordered = scores.double().sort(-1).values
    n = ordered.shape[-1]
    ranks = torch.arange(1, n + 1, dtype=torch.float64, device=ordered.device)
    return 2 * (ranks * ordered).sum(-1) / (n * ordered.sum(-1)) - (n + 1) / n
