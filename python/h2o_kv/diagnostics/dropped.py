"""m_t^drop: how much of the full cache's attention is on tokens that an evicting cache has dropped.

    m_t^drop = sum of a^full_{t,i} over the i not in D_t

High: the query needs what is gone. Low, and the logits differ all the same: directions of values, or
positions, or what came of it earlier.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

import torch
from torch import Tensor

from h2o_kv.diagnostics.departures import Departures
from h2o_kv.diagnostics.distribution import Distribution

__all__ = ["DroppedMass", "DroppedSummary", "kl_by_dropped", "summarise"]


class DroppedMass:
    """Collects m_t^drop of one evicting cache: an `AttentionObserver` of the teacher.

    Parameters
    ----------
    departures : Departures
        Of the cache; all that left before a step must be in it when the teacher does the step.

    Attributes
    ----------
    mass : Tensor, float32, [num_layers, num_kv_heads, group_size, tokens]
        m_t^drop of each query head at each step; nan where the teacher has not been.
    """

    def __init__(self, departures: Departures) -> None:
        self._departures = departures
        self.mass = torch.zeros(0)

    def observe(self, layer: int, first: int, weights: Tensor) -> None:
        """See `AttentionObserver.observe`."""
        num_kv_heads, group_size, rows, keys = weights.shape
        if not len(self.mass):
            num_layers, _, tokens = self._departures.left_at.shape
            self.mass = torch.full((num_layers, num_kv_heads, group_size, tokens), torch.nan)
        gone = self._departures.gone(layer, first, rows, keys).to(weights.device)
        dropped = (weights * gone[:, None]).sum(-1)
        self.mass[layer, :, :, first : first + rows] = dropped.float().cpu()


@dataclass(frozen=True)
class DroppedSummary:
    """Kept attention, 1 - m_t^drop, over (layer, query head, step).

    Attributes
    ----------
    first_step : int
        First step that counts: where something can be missing.
    kept : Distribution
        Of all.
    layers : tuple of Distribution
        Of each layer.
    slices : tuple of (int, int, Distribution)
        First step, last step + 1, and what was kept in between, in equal slices of the text.
    """

    first_step: int
    kept: Distribution
    layers: tuple[Distribution, ...]
    slices: tuple[tuple[int, int, Distribution], ...]


def summarise(mass: Tensor, first_step: int, *, num_slices: int = 8) -> DroppedSummary:
    """Sum up the attention that was kept.

    Parameters
    ----------
    mass : Tensor, float, [num_layers, num_kv_heads, group_size, tokens]
        m_t^drop.
    first_step : int
        Steps before it are left out: while nothing has left, nothing is missing, and a text's start
        would make any cache look good.
    num_slices : int
        Slices of what follows; fewer where there are fewer steps.
    """
    # Weights that were rounded may add up to a little more than 1.
    kept = (1 - mass[..., first_step:]).clamp_min(0)
    steps = kept.shape[-1]
    cuts = [round(steps * i / num_slices) for i in range(num_slices + 1)]
    slices = [
        (first_step + start, first_step + stop, Distribution.of(kept[..., start:stop]))
        for start, stop in pairwise(cuts)
        if start < stop
    ]
    return DroppedSummary(
        first_step=first_step,
        kept=Distribution.of(kept),
        layers=tuple(Distribution.of(layer) for layer in kept),
        slices=tuple(slices),
    )


def kl_by_dropped(
    mass: Tensor, kl: Tensor, first: int, *, parts: int = 4
) -> list[dict[str, float]]:
    """KL to the full cache beside m_t^drop: the steps sorted by their mean m_t^drop, in equal parts.

    Parameters
    ----------
    mass : Tensor, float, [num_layers, num_kv_heads, group_size, tokens]
    kl : Tensor, float, [steps]
        Of the steps from `first` on.
    first : int
    parts : int

    Returns
    -------
    list of dict
        `steps`, mean `dropped` and mean `kl` (nats) of each part, the least dropped first.
    """
    of_steps = mass[..., first : first + len(kl)].flatten(0, 2).double().mean(0)
    order = of_steps.argsort(stable=True)
    table = []
    for chosen in order.tensor_split(parts):
        if len(chosen):
            dropped, losses = of_steps[chosen].tolist(), kl[chosen].tolist()
            table.append({"steps": len(chosen), "dropped": fmean(dropped), "kl": fmean(losses)})
    return table
