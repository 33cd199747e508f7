"""What the operators are compared with: their work in torch's operators, and the memory's limit.

Each function makes a call without arguments, to be timed; the scripts check first what it returns.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from common import WORKING_SET, Call, Timing, in_turns
from op_cases import State
from torch import Tensor

Tensors = tuple[Tensor, ...]


# --- memory -------------------------------------------------------------------------------------


def reads(num_bytes: int) -> dict[str, Call]:
    """Plain reads of so many bytes of float32, each time from elsewhere: torch.sum and torch.dot.

    Now one and now the other is faster, see `with_read`.
    """
    count = max(1, num_bytes // 4)
    pool = torch.rand(max(count, WORKING_SET // 4))
    parts = list(pool[: len(pool) // count * count].view(-1, count))
    half = len(parts) // 2  # so that neither finds what the other has just read
    dots = [lambda part=part: torch.dot(part, part) for part in parts[half:] + parts[:half]]
    return {"sum": in_turns([part.sum for part in parts]), "dot": in_turns(dots)}


def with_read(timings: dict[str, Timing]) -> dict[str, Timing]:
    """The same times with one read, the faster of both, in place of them."""
    both = [timings[name] for name in ("sum", "dot")]
    others = {name: timing for name, timing in timings.items() if name not in ("sum", "dot")}
    return {**others, "read": min(both, key=lambda timing: timing.spread.median)}


# --- attention ----------------------------------------------------------------------------------


def sdpa(state: State, query: Tensor) -> Callable[[], Tensor]:
    """Attention over as many tokens; no scores, no eviction."""
    k, v = state[:2]
    return lambda: torch.nn.functional.scaled_dot_product_attention(query, k, v, enable_gqa=True)


def causal_sdpa(query: Tensor, key: Tensor, value: Tensor) -> Callable[[], Tensor]:
    """Causal attention over a prompt; no scores."""
    return lambda: torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, enable_gqa=True
    )


def _weights(query: Tensor, keys: Tensor, mask: Tensor | None = None) -> Tensor:
    """Softmax weights in float32, as transformers' eager attention makes them."""
    logits = query @ keys.transpose(2, 3) * query.shape[-1] ** -0.5
    if mask is not None:
        logits = logits + mask
    return torch.softmax(logits, -1, dtype=torch.float32)


def _repeat_kv(tensor: Tensor, group_size: int) -> Tensor:
    """Keys or values once for each query head, as transformers' eager attention wants them."""
    return tensor[:, :, None].expand(-1, -1, group_size, -1, -1).flatten(1, 2)


def _kept(scores: Tensor, num_heavy: int, num_recent: int) -> Tensor:
    """Indices of the highest scores and of the last tokens, as the paper's code chooses them."""
    num = scores.shape[-1]
    heavy = scores[..., : num - num_recent].topk(num_heavy, -1).indices
    recent = torch.arange(num - num_recent, num, device=scores.device)
    return torch.cat([heavy, recent.expand(*scores.shape[:-1], -1)], -1)


def _gathered(keys: Tensor, values: Tensor, scores: Tensor, keep: Tensor) -> Tensors:
    wide = keep[..., None].expand(-1, -1, -1, keys.shape[-1])
    return keys.gather(2, wide), values.gather(2, wide), scores.gather(2, keep), keep


def eager_step(
    state: State, query: Tensor, new: Tensor, num_recent: int, *, repeat_kv: bool
) -> Callable[[], Tensors]:
    """A decode step in torch's own operators: weights, their sums, topk, gather.

    As the paper's code and kvpress, it returns a new cache instead of writing in place: output, keys,
    values, scores, indices of what was kept. `repeat_kv` says whether keys and values are repeated
    for each query head, as transformers does, or the query heads of a group share them.
    """
    k_cache, v_cache, scores, _ = state
    batch, num_kv_heads, capacity, head_dim = k_cache.shape
    group_size = query.shape[1] // num_kv_heads

    def step() -> Tensors:
        keys, values = torch.cat([k_cache, new], 2), torch.cat([v_cache, new], 2)
        if repeat_kv:
            weights = _weights(query, _repeat_kv(keys, group_size))
            output = weights.to(query.dtype) @ _repeat_kv(values, group_size)
        else:
            weights = _weights(query.view(batch, num_kv_heads, group_size, head_dim), keys)
            output = (weights.to(query.dtype) @ values).view_as(query)
        grown = weights.view(batch, num_kv_heads, group_size, capacity + 1).sum(2)
        grown[..., :capacity] += scores
        keep = _kept(grown, capacity - num_recent, num_recent)
        return output, *_gathered(keys, values, grown, keep)

    return step


def eager_prefill(
    query: Tensor, key: Tensor, value: Tensor, num_heavy: int, num_recent: int
) -> Callable[[], Tensors]:
    """A one-shot prefill that builds the matrix of weights: output, then what the cache holds."""
    batch, num_kv_heads, tokens, _ = key.shape
    group_size = query.shape[1] // num_kv_heads
    later = torch.full((tokens, tokens), -torch.inf, dtype=query.dtype, device=query.device)
    later = later.triu(1)

    def prefill() -> Tensors:
        weights = _weights(query, _repeat_kv(key, group_size), later)
        output = weights.to(query.dtype) @ _repeat_kv(value, group_size)
        scores = weights.sum(2).view(batch, num_kv_heads, group_size, tokens).sum(2)
        return output, *_gathered(key, value, scores, _kept(scores, num_heavy, num_recent))

    return prefill


# --- eviction -----------------------------------------------------------------------------------


def scatter_evict(
    state: State, new: Tensor, score: Tensor, position: Tensor, num_recent: int
) -> Callable[[], Tensor]:
    """A scored token takes the slot of the lowest score that is not recent: argmin, four scatters.

    `position` is int32, [batch, num_kv_heads, 1].
    """
    k, v, scores, positions = state

    def step() -> Tensor:
        slot = scores.masked_fill(positions > position - num_recent, torch.inf).argmin(-1, True)
        left = positions.gather(-1, slot)
        wide = slot[..., None].expand(-1, -1, 1, k.shape[-1])
        k.scatter_(2, wide, new)
        v.scatter_(2, wide, new)
        scores.scatter_(2, slot, score)
        positions.scatter_(2, slot, position)
        return left

    return step


def gather_evict(
    state: State, new: Tensor, score: Tensor, num_recent: int
) -> Callable[[], Tensors]:
    """A scored token joins, the lowest score that is not recent leaves: topk, gather.

    The slots are in the order of the positions; returns a new cache and what was kept.
    """
    k, v, scores, _ = state
    capacity = k.shape[2]

    def step() -> Tensors:
        grown = torch.cat([scores, score], 2)
        keep = _kept(grown, capacity - num_recent, num_recent)
        return _gathered(torch.cat([k, new], 2), torch.cat([v, new], 2), grown, keep)

    return step


def gather_shrink(state: State, num_heavy: int, num_recent: int) -> Callable[[], Tensors]:
    """A cache is cut down: topk, gather, slots in the order of the positions."""
    k, v, scores, _ = state
    return lambda: _gathered(k, v, scores, _kept(scores, num_heavy, num_recent))
