"""One step of an evicting cache, seen from outside: every candidate's score before somebody leaves.

What a step leaves behind no longer has its victim's score. So, before the step, the same operator runs
on copies with room for everybody: it attends and scores alike, by the policy's rules, and nobody leaves.
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

from h2o_kv import Budget, EvictionPolicy, H2OCache
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
        What is compared of the lowest among those that stayed and were not protected (sinks, recent
        tokens), less `compared`. inf where nobody else could have left: then no score had a say.
    compared : float
        What the policy compares: the score by H2O's rule; with score_rule="mean" the score over the
        token's age; inf of a pattern's tokens.
    """

    step: int
    layer: int
    head: int
    position: int
    score: float
    margin: float
    compared: float

    @property
    def age(self) -> int:
        """Steps since the token came."""
        return self.step - self.position

    @property
    def tied(self) -> bool:
        """Whether what is compared was equal, so that the positions decided."""
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
    compared : Tensor, as `scores`
        What the policy compares of each; see `Victim`.
    evicted : Tensor, int32, [num_kv_heads, num_new]
        Positions that left, in order; -1 = none.
    """

    layer: int
    step: int
    budget: Budget
    positions: Tensor
    scores: Tensor
    compared: Tensor
    evicted: Tensor

    def victims(self) -> list[Victim]:
        """Those that left, by head, in the order in which they left."""
        window = self.step - self.budget.num_recent
        found = []
        for head, left in enumerate(self.evicted.tolist()):
            positions, scores = self.positions[head], self.scores[head].double()
            compared = self.compared[head].double()
            leavers = [position for position in left if position >= 0]
            if not leavers:
                continue
            unprotected = (positions >= self.budget.num_sink) & (positions <= window)
            rivals = compared[unprotected & ~torch.isin(positions, positions.new_tensor(leavers))]
            lowest = float(rivals.min()) if len(rivals) else math.inf
            for position in leavers:
                score, own = (float(of[positions == position]) for of in (scores, compared))
                margin = 0.0 if lowest == own and len(rivals) else lowest - own
                found.append(
                    Victim(self.step, self.layer, head, position, score, margin, compared=own)
                )
        return found


@contextmanager
def observed_steps(
    cache: H2OCache, on_step: Callable[[ObservedStep], None], layers: frozenset[int] | None = None
) -> Iterator[None]:
    """Call `on_step` for every layer of every forward of one cache.

    Parameters
    ----------
    cache : H2OCache
        With positions="original", no read_slots and one row without padding. Each forward must be one
        step: one token, or tokens that join together (a one-shot prompt, one chunk of a streaming
        prefill).
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
    step = first + num_new - 1
    positions, scores = _scored(layer, query, key, value, scale, alibi_slopes)
    output = H2OLayer.attend(layer, query, key, value, attention_mask, scale, alibi_slopes)
    assert layer.last_evicted is not None
    on_step(
        ObservedStep(
            layer=layer.layer_idx,
            step=step,
            budget=layer.budget_in_force(0),
            positions=positions[0].cpu(),
            scores=scores[0].cpu(),
            compared=_compared(layer.settings.policy, positions[0], scores[0], step).cpu(),
            evicted=layer.last_evicted[0].cpu(),
        )
    )
    return output


def _compared(policy: EvictionPolicy, positions: Tensor, scores: Tensor, newest: int) -> Tensor:
    """What is ordered by, of candidates [num_kv_heads, candidates], as h2o_evict has it."""
    rules = policy.arguments
    if policy.score_rule == "mean":
        scores = scores / (newest - positions + 1).to(scores.dtype)
    if rules["pattern_stride"] == 0:
        return scores
    column = positions % rules["pattern_stride"]
    in_pattern = column >= rules["pattern_stride"] - rules["pattern_columns"]
    return scores.masked_fill(in_pattern, math.inf)


def _scored(
    layer: H2OLayer, query: Tensor, key: Tensor, value: Tensor, scale: Any, slopes: Any
) -> tuple[Tensor, Tensor]:
    """Positions and scores [1, num_kv_heads, candidates] after attention, nobody having left."""
    dtype = layer.settings.dtype or key.dtype
    batch, num_kv_heads, num_new, head_dim = key.shape
    room = (batch, num_kv_heads, num_new)
    keys = key.new_zeros(*room, head_dim, dtype=dtype)
    values = torch.zeros_like(keys)
    score_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    scores = key.new_zeros(room, dtype=score_dtype)
    positions = torch.full(room, -1, dtype=torch.int32, device=key.device)
    first = layer.columns_seen
    if first > 0:
        assert layer.keys is not None
        assert layer.values is not None
        assert layer.scores is not None
        assert layer.positions is not None
        keys = torch.cat([layer.keys, keys], 2)
        values = torch.cat([layer.values, values], 2)
        scores = torch.cat([layer.scores, scores], 2)
        positions = torch.cat([layer.positions, positions], 2)
    new_positions = torch.arange(first, first + num_new, dtype=torch.int32, device=key.device)[None]
    capacity = keys.shape[2]
    budget = layer.budget_in_force(0) if first > 0 else layer.settings.policy.resolve(num_new)
    # Pooling leaves recent tokens out; more of them than candidates make no difference.
    num_recent = min(budget.num_recent, capacity)
    torch.ops.h2o.h2o_attention_decode(
        query.to(dtype),
        keys,
        values,
        scores,
        positions,
        key.to(dtype),
        value.to(dtype),
        new_positions,
        0,
        capacity - num_recent,
        num_recent,
        scale=scale,
        chunk=num_new,
        alibi_slopes=slopes,
        **layer.scoring,
        **layer.given_scores(new_positions),
    )
    return positions, scores
