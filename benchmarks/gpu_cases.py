#!/usr/bin/env python3
"""Small calls of every CUDA operator, each compared with the CPU's: what compute-sanitizer runs.

They reach every kernel: one block and several for a head, chunks, aligned and unaligned vectors, tensor
cores, sorting in shared memory, padding, empty slots.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from op_cases import DTYPES, ERROR_LIMIT, full_caches
from torch import Tensor

from h2o_kv import ops

Results = list[Tensor]
Case = Callable[[torch.device], Results]


def decode_case(dtype: torch.dtype, capacity: int, head_dim: int, group: int, chunk: int) -> Case:
    """A cache with some empty slots, a row of padding, three chunks."""

    def run(device: torch.device) -> Results:
        torch.manual_seed(capacity)
        _, (state,) = full_caches(1, 2, 2, capacity, head_dim, dtype)
        state[3][:, :, 5::7] = -1
        state[2].masked_fill_(state[3] < 0, 0)
        num = 3 * chunk
        query = torch.randn(2, 2 * group, num, head_dim, dtype=dtype)
        key, value = (torch.randn(2, 2, num, head_dim, dtype=dtype) for _ in range(2))
        at = torch.arange(capacity, capacity + num).repeat(2, 1)
        at[0, 0] = -1
        moved = [t.to(device) for t in (query, *state, key, value, at)]
        counts = (1, capacity // 2, capacity // 4)
        return [*ops.attention_decode(*moved, *counts, chunk=chunk), *moved[1:5]]

    return run


def evict_case(dtype: torch.dtype, capacity: int, head_dim: int) -> Case:
    """A cut to half the capacity while two tokens join."""

    def run(device: torch.device) -> Results:
        torch.manual_seed(capacity)
        _, (state,) = full_caches(1, 2, 2, capacity, head_dim, dtype)
        new = torch.randn(2, 2, 2, head_dim, dtype=dtype)
        scores_new, at = torch.rand(2, 2, 2), torch.tensor([[capacity, capacity + 1]]).repeat(2, 1)
        moved = [t.to(device) for t in (*state, new, new, scores_new, at)]
        return [ops.evict(*moved, 1, capacity // 4, capacity // 4), *moved[:4]]

    return run


def select_case(dtype: torch.dtype, num: int, head_dim: int, group: int) -> Case:
    """A prompt with a padded row."""

    def run(device: torch.device) -> Results:
        torch.manual_seed(num)
        query = torch.randn(2, 2 * group, num, head_dim, dtype=dtype)
        key = torch.randn(2, 2, num, head_dim, dtype=dtype)
        at = torch.arange(num).repeat(2, 1)
        at[0] = (at[0] - num // 3).clamp(min=-1)
        moved = [t.to(device) for t in (query, key, at)]
        return list(ops.prefill_select(*moved, 1, num // 4, num // 4))

    return run


def cases(dtype: torch.dtype, quick: bool) -> dict[str, Case]:
    """The cases of a dtype by name."""
    chosen = {
        "decode, one block a head": decode_case(dtype, 40, 64, 4, 1),
        "decode, several blocks a head": decode_case(dtype, 600, 80, 3, 1),
        "chunks": decode_case(dtype, 70, 36, 2, 5),
        "evict": evict_case(dtype, 60, 64),
        "select": select_case(dtype, 100, 64, 4),
    }
    if not quick:
        chosen |= {
            "decode, unaligned": decode_case(dtype, 300, 33, 7, 1),
            "decode, a large head": decode_case(dtype, 300, 256, 16, 1),
            "evict, many": evict_case(dtype, 3000, 17),
            "select, unaligned": select_case(dtype, 150, 33, 1),
            "select, a large head": select_case(dtype, 130, 256, 8),
        }
    return chosen


def main() -> int:
    """Run all cases; the number of those that differ is the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--quick", action="store_true", help="half of the cases in bfloat16")
    args = parser.parse_args()
    torch.set_num_threads(1)
    differing = count = 0
    for name, dtype in DTYPES.items():
        if args.quick and dtype is not torch.bfloat16:
            continue
        for what, case in cases(dtype, args.quick).items():
            count += 1
            for own, other in zip(case(args.device), case(torch.device("cpu")), strict=True):
                atol = ERROR_LIMIT[own.dtype] if own.is_floating_point() else 0
                if not torch.allclose(own.cpu().double(), other.double(), rtol=0, atol=atol):
                    differing += 1
                    print(f"{name}, {what}: differs from the CPU's")
                    break
    print(f"{count - differing} of {count} cases equal the CPU's")
    return int(differing > 0)


if __name__ == "__main__":
    raise SystemExit(main())
