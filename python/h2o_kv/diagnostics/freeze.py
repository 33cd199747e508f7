"""Meters of freezing: whether an accumulated-score cache still takes in new heavy hitters.

Scores only grow, so the lowest heavy score may rise until no newcomer reaches it: the set is frozen.
Slot ages grow by one a step then, the lowest heavy score rises, and the promotion rate falls to 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from h2o_kv import Budget
from h2o_kv.diagnostics.departures import STAYED, Departures
from h2o_kv.diagnostics.distribution import Distribution

__all__ = ["Lifetimes", "Promotions", "lifetimes", "lowest_heavy", "promotions", "slot_ages"]


@dataclass(frozen=True)
class Promotions:
    """Tokens that left the recent window while the cache was full.

    Attributes
    ----------
    left_window : Tensor, int64, [num_layers]
        (KV head, token) pairs that left the window in steps where somebody had to leave the cache.
    promoted : Tensor, int64, [num_layers]
        Of these, those that stayed: another token left, and they are among the heavy ones.
    """

    left_window: Tensor
    promoted: Tensor

    @property
    def rates(self) -> Tensor:
        """Promoted share, float64 [num_layers]; nan of none."""
        return self.promoted.double() / self.left_window

    @property
    def rate(self) -> float:
        """Promoted share of all layers."""
        count = int(self.left_window.sum())
        return int(self.promoted.sum()) / count if count else torch.nan


@dataclass(frozen=True)
class Lifetimes:
    """How long the tokens of one class stayed, over (layer, KV head, token).

    Attributes
    ----------
    count : int
    stayed : float
        Share that was never evicted.
    lifetime : Distribution
        Steps from the token's own to the one at which it left, of those that left.
    so_far : Distribution
        The same of all; who stayed counts with the steps up to the end of the text, which is less
        than its lifetime.
    """

    count: int
    stayed: float
    lifetime: Distribution
    so_far: Distribution


def slot_ages(departures: Departures, step: int, budget: Budget) -> tuple[Distribution, ...]:
    """Ages of the heavy hitters after a step: kept, and neither sinks nor recent.

    Returns
    -------
    tuple of Distribution
        Of each layer, in steps since the token came, over its KV heads.
    """
    oldest, newest = budget.num_sink, step - budget.num_recent
    positions = torch.arange(oldest, max(newest + 1, oldest))
    kept = departures.left_at[:, :, oldest : oldest + len(positions)] > step
    ages = torch.where(kept, (step - positions).double(), torch.nan)
    return tuple(Distribution.of(layer) for layer in ages)


def lowest_heavy(positions: Tensor, scores: Tensor, budget: Budget, step: int) -> Tensor:
    """Lowest score among the kept tokens that are neither sinks nor recent, after a step.

    Parameters
    ----------
    positions : Tensor, int32, [num_kv_heads, capacity]
    scores : Tensor, float, [num_kv_heads, capacity]
    budget : Budget
    step : int
        Position of the newest token.

    Returns
    -------
    Tensor, float64, [num_kv_heads]
        nan where there is no such token.
    """
    heavy = (positions >= budget.num_sink) & (positions <= step - budget.num_recent)
    lowest = scores.double().masked_fill(~heavy, torch.inf).amin(-1)
    return lowest.masked_fill(~heavy.any(-1), torch.nan)


def promotions(departures: Departures, budget: Budget, first: int, last: int) -> Promotions:
    """Count promotions in the steps first .. last - 1, in each of which one token joined alone.

    Parameters
    ----------
    departures : Departures
    budget : Budget
    first, last : int
        A token leaves the window num_recent steps after its own. Steps in which nobody left do not
        count; when somebody does, the sinks have long been outside the window.
    """
    left_at = departures.left_at
    num_layers = left_at.shape[0]
    left_window = torch.zeros(num_layers, dtype=torch.int64)
    promoted = torch.zeros(num_layers, dtype=torch.int64)
    busy = torch.zeros((*left_at.shape[:2], last), dtype=torch.bool)
    layers, heads, tokens = ((left_at >= first) & (left_at < last)).nonzero(as_tuple=True)
    busy[layers, heads, left_at[layers, heads, tokens].long()] = True
    steps = torch.arange(max(first, budget.num_recent), last)
    leaving = left_at[:, :, steps - budget.num_recent]
    someone = busy[:, :, steps]
    left_window += someone.sum((1, 2))
    promoted += (someone & (leaving != steps)).sum((1, 2))
    return Promotions(left_window=left_window, promoted=promoted)


def lifetimes(departures: Departures, classes: Sequence[str]) -> dict[str, Lifetimes]:
    """How long the tokens of each class stayed.

    Parameters
    ----------
    departures : Departures
    classes : sequence of str
        Of each token of the text.

    Returns
    -------
    dict of str to Lifetimes
        In the order in which the classes first come.
    """
    left_at = departures.left_at
    tokens = left_at.shape[2]
    stayed = left_at == STAYED
    life = torch.where(stayed, tokens - 1, left_at) - torch.arange(tokens)
    found = {}
    for name in dict.fromkeys(classes):
        chosen = torch.tensor([c == name for c in classes])
        some, kept = life[:, :, chosen].double(), stayed[:, :, chosen]
        found[name] = Lifetimes(
            count=some.numel(),
            stayed=float(kept.double().mean()),
            lifetime=Distribution.of(some[~kept]),
            so_far=Distribution.of(some),
        )
    return found
