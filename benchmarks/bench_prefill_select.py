#!/usr/bin/env python3
"""One-shot prefill: time beside SDPA, and the peak memory of h2o_prefill_select.

Prints one JSON line for the memory that the selection takes beyond its inputs (the attention matrix
would be heads x n x n x 4 bytes), one for its time, and one for the whole prefill (attention, scores,
eviction in one call of h2o_attention_decode), both beside SDPA's causal attention.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import sys
from pathlib import Path

import torch
from common import ResultWriter, machine_line, measure

from h2o_kv import ops


def _resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def _extra_memory(
    heads: int, tokens: int, head_dim: int, queue: multiprocessing.Queue[float]
) -> None:
    """Peak resident memory over what was resident before the call, MiB, in a process of its own."""
    small = torch.randn(1, heads, 64, head_dim)
    ops.prefill_select(small, small, torch.arange(64)[None], 0, 8, 8)
    query, key = torch.randn(1, heads, tokens, head_dim), torch.randn(1, heads, tokens, head_dim)
    before = _resident_mib()
    ops.prefill_select(query, key, torch.arange(tokens)[None], 0, tokens // 10, tokens // 10)
    queue.put(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - before)


def main() -> int:
    """Print the JSON lines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--quick", action="store_true", help="1,024 tokens")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    tokens = 1024 if args.quick else args.tokens
    print(machine_line(), file=sys.stderr)

    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_extra_memory, args=(args.heads, tokens, args.head_dim, queue))
    process.start()
    extra = queue.get()
    process.join()
    matrix = args.heads * tokens * tokens * 4 / 2**20
    print(
        json.dumps(
            {
                "op": "h2o_prefill_select",
                "num_q_heads": args.heads,
                "seq_len": tokens,
                "head_dim": args.head_dim,
                "extra_peak_mib": round(extra, 1),
                "matrix_mib": round(matrix, 1),
            }
        )
    )

    sizes = (1, args.heads, tokens, args.head_dim)
    query, key, value = (torch.randn(sizes) for _ in range(3))
    at, part = torch.arange(tokens)[None], tokens // 10
    state = (
        torch.empty(1, args.heads, 2 * part, args.head_dim),
        torch.empty(1, args.heads, 2 * part, args.head_dim),
        torch.zeros(1, args.heads, 2 * part),
        torch.full((1, args.heads, 2 * part), -1, dtype=torch.int32),
    )

    def whole() -> None:
        state[2].zero_()
        state[3].fill_(-1)
        ops.attention_decode(query, *state, key, value, at, 0, part, part, chunk=tokens)

    timings = measure(
        {
            "select": lambda: ops.prefill_select(query, key, at, 0, part, part),
            "prefill": whole,
            "sdpa": lambda: torch.nn.functional.scaled_dot_product_attention(
                query, key, value, is_causal=True
            ),
        },
        repeats=args.repeats,
        warmup=1,
    )
    shape = {"num_q_heads": args.heads, "seq_len": tokens, "head_dim": args.head_dim}
    writer = ResultWriter()
    for name, op in (("select", "h2o_prefill_select"), ("prefill", "h2o_attention_decode")):
        writer.write(
            op=op,
            device="cpu",
            dtype="float32",
            shape=shape,
            timing=timings[name],
            baseline=timings["sdpa"],
            baseline_name="sdpa, causal",
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
