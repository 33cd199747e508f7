"""95 % confidence intervals: Wilson's for proportions, a percentile bootstrap for everything else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

__all__ = ["RESAMPLES", "Interval", "bootstrap", "wilson"]

RESAMPLES = 2000
"""Resamples of a bootstrap."""

_LEVEL = 0.95


class Interval(NamedTuple):
    """A mean and the ends of its 95 % confidence interval."""

    mean: float
    low: float
    high: float


def wilson(successes: int, trials: int) -> Interval:
    """Wilson's score interval of a proportion (E. B. Wilson, 1927).

    >>> [round(x, 4) for x in wilson(62, 100)]
    [0.62, 0.5221, 0.709]
    """
    if not 0 <= successes <= trials or trials < 1:
        raise ValueError(f"wilson: successes must be in 0..trials, got {successes} of {trials}")
    z = NormalDist().inv_cdf((1 + _LEVEL) / 2)
    mean = successes / trials
    centre = (mean + z * z / (2 * trials)) / (1 + z * z / trials)
    half = (
        z
        / (1 + z * z / trials)
        * math.sqrt(mean * (1 - mean) / trials + z * z / (4 * trials * trials))
    )
    return _around(mean, max(0.0, centre - half), min(1.0, centre + half))


def bootstrap(values: Sequence[float]) -> Interval:
    """Percentile bootstrap of a mean (B. Efron, 1979), with RESAMPLES resamples, always the same.

    >>> bootstrap([0.5, 0.5])
    Interval(mean=0.5, low=0.5, high=0.5)
    """
    if not values:
        raise ValueError("bootstrap: values must be at least one, got none")
    sample = np.asarray(values, dtype=np.float64)
    draws = np.random.default_rng(0)
    means = [sample[draws.integers(len(sample), size=len(sample))].mean() for _ in range(RESAMPLES)]
    low, high = np.quantile(means, [(1 - _LEVEL) / 2, (1 + _LEVEL) / 2])
    return _around(float(sample.mean()), float(low), float(high))


def _around(mean: float, low: float, high: float) -> Interval:
    """The interval, whose mean is not outside of it by a rounding."""
    return Interval(mean, min(low, mean), max(high, mean))
