#!/usr/bin/env python3
"""One decode step of h2o_attention_decode beside torch's SDPA on a cache of the same occupancy.

SDPA computes the output alone; h2o also keeps the scores, evicts and writes the new token. Each point is
first checked against the float64 reference, then timed. One JSON line a point; `speedup` is SDPA's time
by h2o's. Several caches take turns, so that together they are larger than the last-level cache.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import torch
from common import MODELS, ModelShape, ResultWriter, machine_line, measure
from torch import Tensor

from h2o_kv import ops, reference

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Caches that take turns are at least this large together.
_WORKING_SET = 256 * 2**20
State = tuple[Tensor, Tensor, Tensor, Tensor]


def new_state(shape: ModelShape, capacity: int, dtype: torch.dtype) -> State:
    """A full cache of one layer."""
    sizes = (1, shape.num_kv_heads, capacity)
    k, v = (torch.randn(*sizes, shape.head_dim).to(dtype) for _ in range(2))
    positions = torch.arange(capacity, dtype=torch.int32).expand(sizes).contiguous()
    return k, v, torch.rand(sizes), positions


def check(
    shape: ModelShape, state: State, query: Tensor, new: Tensor, counts: tuple[int, ...]
) -> None:
    """Stop where victims or outputs differ from the reference."""
    exact = tuple(t.double() if t.is_floating_point() else t.clone() for t in state)
    at = torch.tensor([[state[0].shape[2]]])
    expected, left = reference.attention_decode(
        query.double(), *exact, new.double(), new.double(), at, *counts
    )
    copy = tuple(t.clone() for t in state)
    output, evicted = ops.attention_decode(query, *copy, new, new, at, *counts)
    error = float((output.double() - expected).abs().max())
    limit = 1e-5 if query.dtype == torch.float32 else 4e-2
    if not torch.equal(evicted, left) or error > limit:
        raise SystemExit(f"{shape.name}: differs from the reference, output error {error:.2g}")


def stepper(
    states: list[State], query: Tensor, new: Tensor, counts: tuple[int, ...]
) -> Callable[[], object]:
    """A step of h2o on the next cache, at the next position."""
    position = states[0][0].shape[2]
    turn = 0

    def step() -> object:
        nonlocal position, turn
        position, turn = position + 1, (turn + 1) % len(states)
        return ops.attention_decode(
            query, *states[turn], new, new, torch.tensor([[position]]), *counts
        )

    return step


def attender(states: list[State], query: Tensor) -> Callable[[], object]:
    """SDPA on the next cache."""
    turn = 0

    def attend() -> object:
        nonlocal turn
        turn = (turn + 1) % len(states)
        k, v = states[turn][:2]
        return torch.nn.functional.scaled_dot_product_attention(query, k, v, enable_gqa=True)

    return attend


def main() -> int:
    """Print one JSON line a point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--model", choices=MODELS, nargs="+", default=["llama-3-8b", "smollm2-135m"]
    )
    parser.add_argument("--capacity", type=int, nargs="+", default=[256, 2048], help="slots")
    parser.add_argument("--dtype", choices=DTYPES, nargs="+", default=list(DTYPES))
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--quick", action="store_true", help="one model, one capacity, 15 repeats")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    models = args.model[:1] if args.quick else args.model
    capacities = args.capacity[-1:] if args.quick else args.capacity
    print(machine_line(), file=sys.stderr)
    writer = ResultWriter()
    for name in models:
        shape = MODELS[name]
        for capacity in capacities:
            for dtype_name in args.dtype:
                dtype = DTYPES[dtype_name]
                row = shape.num_kv_heads * capacity * shape.head_dim * dtype.itemsize
                bytes_moved = 2 * row + 8 * shape.num_kv_heads * capacity  # K, V; scores twice
                count = max(2, min(64, _WORKING_SET // (2 * row)))
                states = [new_state(shape, capacity, dtype) for _ in range(count)]
                query = torch.randn(1, shape.num_q_heads, 1, shape.head_dim).to(dtype)
                new = torch.randn(1, shape.num_kv_heads, 1, shape.head_dim).to(dtype)
                counts = (0, capacity // 2, capacity - capacity // 2)
                check(shape, states[0], query, new, counts)
                timings = measure(
                    {"h2o": stepper(states, query, new, counts), "sdpa": attender(states, query)},
                    repeats=15 if args.quick else args.repeats,
                )
                writer.write(
                    op="h2o_attention_decode",
                    device="cpu",
                    dtype=dtype_name,
                    shape={
                        "batch": 1,
                        "num_q_heads": shape.num_q_heads,
                        "num_kv_heads": shape.num_kv_heads,
                        "head_dim": shape.head_dim,
                        "capacity": capacity,
                    },
                    timing=timings["h2o"],
                    num_bytes=bytes_moved,
                    baseline=timings["sdpa"],
                    baseline_name="sdpa, no scores, no eviction",
                )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
