"""What the benchmarks of h2o_attention_decode share: full caches, and the check before the timing."""

from __future__ import annotations

import torch
from torch import Tensor

from h2o_kv import ops, reference

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
State = tuple[Tensor, Tensor, Tensor, Tensor]  # k_cache, v_cache, scores, positions

# Largest error of an output of size about 1 that the check lets pass.
OUTPUT_LIMIT = {torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 4e-2}
# Decisions by less than this are not compared: float32 sums of weights differ by about 1e-6.
_CLEAR_MARGIN = 1e-5


def full_caches(
    count: int,
    batch: int,
    num_kv_heads: int,
    capacity: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> tuple[State, list[State]]:
    """Full caches of `count` layers: all of them as four tensors [count, ...], and one by one."""
    sizes = (count, batch, num_kv_heads, capacity)
    k, v = (torch.randn(*sizes, head_dim, dtype=dtype, device=device) for _ in range(2))
    positions = torch.arange(capacity, dtype=torch.int32, device=device).expand(sizes).contiguous()
    together = (k, v, torch.rand(sizes, device=device), positions)
    return together, [(k[i], v[i], together[2][i], positions[i]) for i in range(count)]


def halves(capacity: int) -> tuple[int, int, int]:
    """A budget of the whole capacity, half of it heavy and half recent."""
    return 0, capacity // 2, capacity - capacity // 2


def decode_bytes(state: State) -> int:
    """Bytes that a step must move: K, V and positions once, scores twice; new tokens are nothing."""
    return sum(t.numel() * t.element_size() for t in (*state, state[2]))


def check_step(name: str, state: State, query: Tensor, new: Tensor) -> None:
    """Do a step on `state`; stop where victims or outputs of its last row differ from the reference."""
    capacity = state[0].shape[2]
    at = torch.tensor([[capacity]], device=query.device)
    before = tuple(t[-1:].cpu() for t in state)
    exact = tuple(t.double() if t.is_floating_point() else t.clone() for t in before)
    query_row, new_row = (t[-1:].cpu().double() for t in (query, new))
    steps: list[reference.Step] = []
    expected, left = reference.attention_decode(
        query_row, *exact, new_row, new_row, at.cpu(), *halves(capacity), trace=steps
    )
    output, evicted = ops.attention_decode(
        query, *state, new, new, at.expand(query.shape[0], 1), *halves(capacity)
    )
    error = float((output[-1:].cpu().double() - expected).abs().max())
    if not error <= OUTPUT_LIMIT[query.dtype]:
        raise SystemExit(f"{name}: differs from the reference, output error {error:.2g}")
    for step in steps:
        own, other = int(evicted[-1, step.head, 0]), int(left[0, step.head, 0])
        if own != other and step.margin > _CLEAR_MARGIN:
            raise SystemExit(f"{name}: head {step.head} evicts {own}, the reference {other}")
