"""A number's distribution: never only its mean."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Distribution"]


@dataclass(frozen=True)
class Distribution:
    """Mean, percentiles with linear interpolation, and extremes; all nan of no values.

    Attributes
    ----------
    count : int
    mean, low, p1, p5, median, p95, high : float
    """

    count: int
    mean: float
    low: float
    p1: float
    p5: float
    median: float
    p95: float
    high: float

    @classmethod
    def of(cls, values: Tensor) -> Distribution:
        """Of the values of a tensor of any shape that are not nan."""
        values = values.double().flatten().cpu()
        values = values[~values.isnan()]
        if not len(values):
            return cls(0, *[torch.nan] * 7)
        ordered = values.sort().values
        # torch.quantile has a limit of 16 million values.
        places = torch.tensor([0.0, 0.01, 0.05, 0.5, 0.95, 1.0], dtype=torch.float64)
        places = places * (len(ordered) - 1)
        low, high = places.floor().long(), places.ceil().long()
        cut = ordered[low] + (ordered[high] - ordered[low]) * (places - low)
        least, p1, p5, median, p95, most = cut.tolist()
        return cls(len(ordered), float(ordered.mean()), least, p1, p5, median, p95, most)
