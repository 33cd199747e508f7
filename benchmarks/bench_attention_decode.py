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
from common import MODELS, ResultWriter, machine_line, measure
from decode_cases import DTYPES, State, check_step, decode_bytes, full_caches, halves
from torch import Tensor

from h2o_kv import ops

# Caches that take turns are at least this large together.
_WORKING_SET = 256 * 2**20


def stepper(states: list[State], query: Tensor, new: Tensor) -> Callable[[], object]:
    """A step of h2o on the next cache, at the next position."""
    position = capacity = states[0][0].shape[2]
    turn = 0

    def step() -> object:
        nonlocal position, turn
        position, turn = position + 1, (turn + 1) % len(states)
        return ops.attention_decode(
            query, *states[turn], new, new, torch.tensor([[position]]), *halves(capacity)
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
                count = max(2, min(64, _WORKING_SET // (2 * row)))
                _, states = full_caches(
                    count, 1, shape.num_kv_heads, capacity, shape.head_dim, dtype
                )
                query = torch.randn(1, shape.num_q_heads, 1, shape.head_dim).to(dtype)
                new = torch.randn(1, shape.num_kv_heads, 1, shape.head_dim).to(dtype)
                check_step(name, states[0], query, new)
                timings = measure(
                    {"h2o": stepper(states, query, new), "sdpa": attender(states, query)},
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
                    num_bytes=decode_bytes(states[0]),
                    baseline=timings["sdpa"],
                    baseline_name="sdpa, no scores, no eviction",
                )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
