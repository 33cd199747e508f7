"""One step of an evicting cache, seen from outside: every candidate's score before somebody leaves.

What a step leaves behind no longer has its victim's score. So, before the step, the same operator runs
on copies with room for everybody: it attends and scores alike, and nobody leaves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from h2o_kv import Budget, H2OCache
from h2o_kv.hf.layer import H2OLayer

__all__ = ["ObservedStep", "Victim", "observed_steps"]


@dataclass(frozen=True)
class Victim:
    """One eviction.

    Attributes
    ----------
    step : int
        Position of the newest token when it left.
    layer, head : int
        KV head.
    position : int
        Of the token that left.
    score : float
        Its accumulated score, this step's attention included.
    margin : float
        Lowest score among those that stayed and were not protected (sinks, recent tokens), less
        `score`. inf where nobody else could have left: then no score had a say.
    """

    step: int
    layer: int
    head: int
    position: int
    score: float
    margin: float

    @property
    def age(self) -> int:
        """Steps since the token came."""
        return self.step - self.position

    @property
    def tied(self) -> bool:
        """Whether the scores were equal, so that the positions decided."""
        return self.margin == 0


@dataclass(frozen=True, eq=False)
class ObservedStep:
    """What one layer did in one step: tokens that joined together, and who left for them.

    Attributes
    ----------
    layer : int
    step : int
        Position of the last new token.
    budget : Budget
        In force.
    positions : Tensor, int32, [num_kv_heads, candidates]
        Candidates by slot, -1 = empty.
    scores : Tensor, dtype of the cache's scores, [num_kv_heads, candidates]
        After attention, before anybody leaves.
    evicted : Tensor, int32, [num_kv_heads, num_new]
        Positions that left, in order; -1 = none.
    """

    layer: int
    step: int
    budget: Budget
    positions: Tensor
    scores: Tensor
    evicted: Tensor

    def victims(self) -> list[Victim]:
        """Those that left, by head, in the order in which they left."""
        window = self.step - self.budget.num_recent
        found = []
        for head, left in enumerate(self.evicted.tolist()):
            positions, scores = self.positions[head], self.scores[head].double()
            leavers = [position for position in left if position >= 0]
            if not leavers:
                continue
            unprotected = (positions >= self.budget.num_sink) & (positions <= window)
            rivals = scores[unprotected & ~torch.isin(positions, positions.new_tensor(leavers))]
            lowest = float(rivals.min()) if len(rivals) else math.inf
            for position in leavers:
                score = float(scores[positions == position])
                found.append(Victim(self.step, self.layer, head, position, score, lowest - score))
        return found


@contextmanager
def observed_steps(
    cache: H2OCache, on_step: Callable[[ObservedStep], None], layers: frozenset[int] | None = None
) -> Iterator[None]:
    """Call `on_step` for every layer of every forward of one cache.

    Parameters
    ----------
    cache : H2OCache
        With positions="original" and one row without padding. Each forward must be one step: one
        token, or tokens that join together (a one-shot prompt, one chunk of a streaming prefill).
    on_step : callable
        Takes an `ObservedStep`.
    layers : frozenset of int, optional
        Only these layers; all where left out.
    """
    observed = [layer for layer in cache.layers if layers is None or layer.layer_idx in layers]
    for layer in observed:
        setattr(layer, "attend", partial(_attend, layer, on_step))  # noqa: B010  (a method)
    try:
        yield
    finally:
        for layer in observed:
            del layer.attend


def _attend(
    layer: H2OLayer,
    on_step: Callable[[ObservedStep], None],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scale: float | None,
    alibi_slopes: Tensor | None = None,
) -> Tensor:
    first, num_new = layer.columns_seen, key.shape[2]
    positions, scores = _scored(layer, query, key, scale, alibi_slopes)
    output = H2OLayer.attend(layer, query, key, value, attention_mask, scale, alibi_slopes)
    assert layer.last_evicted is not None
    on_step(
        ObservedStep(
            layer=layer.layer_idx,
            step=first + num_new - 1,
            budget=layer.budget_in_force(0),
            positions=positions[0].cpu(),
            scores=scores[0].cpu(),
            evicted=layer.last_evicted[0].cpu(),
        )
    )
    return output


def _scored(layer: H2OLayer, query: Tensor, key: Tensor, scale: Any, slopes: Any) -> Any:
    """Positions and scores [1, num_kv_heads, candidates] after attention, nobody having left."""
    dtype = layer.settings.dtype or key.dtype
    batch, num_kv_heads, num_new, head_dim = key.shape
    room = (batch, num_kv_heads, num_new)
    keys = key.new_zeros(*room, head_dim, dtype=dtype)
    score_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    scores = key.new_zeros(room, dtype=score_dtype)
    positions = torch.full(room, -1, dtype=torch.int32, device=key.device)
    first = layer.columns_seen
    if first > 0:
        assert layer.keys is not None
        assert layer.scores is not None
        assert layer.positions is not None
        keys = torch.cat([layer.keys, keys], 2)
        scores = torch.cat([layer.scores, scores], 2)
        positions = torch.cat([layer.positions, positions], 2)
    new_key = key.to(dtype)
    torch.ops.h2o.h2o_attention_decode(
        query.to(dtype),
        keys,
        torch.zeros_like(keys),
        scores,
        positions,
        new_key,
        torch.zeros_like(new_key),
        torch.arange(first, first + num_new, dtype=torch.int32, device=key.device)[None],
        0,
        keys.shape[2],
        0,
        gqa_reduce=layer.settings.policy.gqa_reduce,
        scale=scale,
        chunk=num_new,
        alibi_slopes=slopes,
    )
    return positions, scores
