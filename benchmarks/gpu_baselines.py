"""What h2o_attention_decode is compared with on a GPU only, and how calls are repeated there."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import torch
from common import Call
from op_cases import State
from torch import Tensor


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
