"""One step of an evicting cache, seen from outside: every candidate's score before somebody leaves.

What a step leaves behind no longer has its victim's score. So, before the step, the same operator runs
on copies with room for everybody: it attends and scores alike, and nobody leaves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

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
        Its accumulated score, this step's attention included; by another rule than H2O's, what is
        compared.
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
        After attention, before anybody leaves: what is compared, which by H2O's rule is the score.
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
                # Two of a pattern are both infinite, and equal.
                margin = 0.0 if score == lowest else lowest - score
                found.append(Victim(self.step, self.layer, head, position, score, margin))
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
    room = _room(layer, key)
    output = H2OLayer.attend(layer, query, key, value, attention_mask, scale, alibi_slopes)
    assert layer.last_evicted is not None
    budget = layer.budget_in_force(0)
    _score(layer, room, budget, (query, key, value), first, scale, alibi_slopes)
    scores, positions = room[2:]
    step = first + num_new - 1
    on_step(
        ObservedStep(
            layer=layer.layer_idx,
            step=step,
            budget=budget,
            positions=positions[0].cpu(),
            scores=_compared(layer, scores[0], positions[0], step).cpu(),
            evicted=layer.last_evicted[0].cpu(),
        )
    )
    return output


def _room(layer: H2OLayer, key: Tensor) -> list[Tensor]:
    """Copies of keys, values, scores and positions of a layer, with room for the new tokens too."""
    dtype = layer.settings.dtype or key.dtype
    batch, num_kv_heads, num_new, head_dim = key.shape
    room = (batch, num_kv_heads, num_new)
    new = [
        key.new_zeros(*room, head_dim, dtype=dtype),
        key.new_zeros(*room, head_dim, dtype=dtype),
        key.new_zeros(room, dtype=torch.float64 if dtype == torch.float64 else torch.float32),
        torch.full(room, -1, dtype=torch.int32, device=key.device),
    ]
    if layer.columns_seen == 0:
        return new
    state = (layer.keys, layer.values, layer.scores, layer.positions)
    return [
        torch.cat([old, more], 2) for old, more in zip(state, new, strict=True) if old is not None
    ]


def _score(
    layer: H2OLayer,
    room: Sequence[Tensor],
    budget: Budget,
    new: tuple[Tensor, Tensor, Tensor],
    first: int,
    scale: float | None,
    slopes: Tensor | None,
) -> None:
    """Let the new tokens join in `room`, where nobody leaves."""
    dtype, capacity = room[0].dtype, room[0].shape[2]
    query, key, value = (tensor.to(dtype) for tensor in new)
    num_new = key.shape[2]
    position = torch.arange(first, first + num_new, dtype=torch.int32, device=key.device)[None]
    recent = min(budget.num_recent, capacity)
    torch.ops.h2o.h2o_attention_decode(
        query,
        *room,
        key,
        value,
        position,
        0,
        capacity - recent,
        recent,
        scale=scale,
        chunk=num_new,
        alibi_slopes=slopes,
        **layer.scoring,
        **layer.given_scores(position),
    )


def _compared(layer: H2OLayer, scores: Tensor, positions: Tensor, newest: int) -> Tensor:
    """What the order of eviction compares; scores and positions are [num_kv_heads, candidates]."""
    rules = layer.scoring
    if rules.get("score_rule") == "mean":
        scores = scores / (newest - positions + 1)
    stride = rules.get("pattern_stride", 0)
    if stride > 0:
        scores = scores.masked_fill(
            positions % stride >= stride - rules["pattern_columns"], math.inf
        )
    return scores
