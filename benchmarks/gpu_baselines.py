"""What h2o_attention_decode is compared with on a GPU, and how calls are repeated there."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence

import torch
from decode_cases import State
from torch import Tensor

Call = Callable[[], object]
# A call for each of the caches that take turns.
PerState = Callable[[State], Call]


def repeated(calls: Sequence[Call], device: torch.device) -> Call:
    """One function that makes all the calls: on a GPU the replay of a CUDA graph, without launches."""
    if device.type != "cuda":
        return lambda: [call() for call in calls]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        calls[0]()  # whatever is set up at the first call
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph.replay


def copy_of(num_bytes: int, device: torch.device) -> Call:
    """A copy that reads and writes `num_bytes` together: what the memory can do."""
    source = torch.randint(0, 256, (num_bytes // 2,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def sdpa(state: State, query: Tensor) -> Call:
    """Attention by torch over as many tokens; no scores, no eviction."""
    k, v = state[:2]
    return lambda: torch.nn.functional.scaled_dot_product_attention(query, k, v, enable_gqa=True)


def flash_attn(state: State, query: Tensor) -> Call | None:
    """Of the package flash-attn, if it is there."""
    if importlib.util.find_spec("flash_attn") is None:
        return None
    from flash_attn import flash_attn_with_kvcache

    q, k, v = (t.transpose(1, 2) for t in (query, *state[:2]))
    return lambda: flash_attn_with_kvcache(q, k, v)


def flashinfer(state: State, query: Tensor) -> Call | None:
    """Of the package flashinfer, if it is there, for one sequence."""
    if query.shape[0] != 1 or importlib.util.find_spec("flashinfer") is None:
        return None
    from flashinfer import single_decode_with_kv_cache

    q, k, v = query[0, :, 0], state[0][0], state[1][0]
    return lambda: single_decode_with_kv_cache(q, k, v, kv_layout="HND")


def eager_h2o(state: State, query: Tensor, new: Tensor, num_recent: int) -> Call:
    """The same step in torch's own operators: weights, their sums, topk, gather.

    Returns the new cache instead of writing it in place, as the paper's code does.
    """
    k_cache, v_cache, scores, _ = state
    batch, num_kv_heads, capacity, head_dim = k_cache.shape

    def step() -> tuple[Tensor, ...]:
        keys, values = torch.cat([k_cache, new], 2), torch.cat([v_cache, new], 2)
        grouped = query.view(batch, num_kv_heads, -1, head_dim)
        logits = grouped @ keys.transpose(2, 3) * head_dim**-0.5
        weights = torch.softmax(logits, -1, dtype=torch.float32)
        output = weights.to(query.dtype) @ values
        grown = weights.sum(2)
        grown[..., :capacity] += scores
        heavy = grown[..., : capacity + 1 - num_recent].topk(capacity - num_recent, -1).indices
        recent = torch.arange(capacity + 1 - num_recent, capacity + 1, device=query.device)
        keep = torch.cat([heavy, recent.expand(batch, num_kv_heads, -1)], -1)
        wide = keep[..., None].expand(-1, -1, -1, head_dim)
        return output, keys.gather(2, wide), values.gather(2, wide), grown.gather(2, keep)

    return step
