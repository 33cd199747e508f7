#!/usr/bin/env python3
"""A long stream of tokens through one layer at a fixed budget.

Shows that resident memory stays flat, and that the last steps equal the float64 reference restarted
from the state saved before them: the same victims at every step where the reference's margin is above
float32's error, and the same outputs. With --rolling, keys are rotated by their rank among the kept
tokens, and the angles end where the context of the model would: a rank past it would raise.
"""

from __future__ import annotations

import argparse
import json
import time

import torch
from common import resident_mib
from rich.console import Console
from rich.progress import track
from torch import Tensor

from h2o_kv import ops, reference

# Of SmolLM2-135M.
HEAD_DIM, NUM_KV_HEADS, GROUP_SIZE, THETA = 64, 3, 3, 100_000.0


class Stream:
    """Keys, values and queries with a few directions that later queries come back to."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.topics = self.normal(16, HEAD_DIM)

    def normal(self, *sizes: int) -> Tensor:
        """Normal numbers of the stream's own generator."""
        return torch.randn(*sizes, generator=self.generator)

    def next_tokens(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value of the next tokens, [1, heads, count, head_dim]."""
        topic = self.topics[torch.randint(16, (count,), generator=self.generator)]
        query = self.normal(1, NUM_KV_HEADS * GROUP_SIZE, count, HEAD_DIM) + 0.7 * topic
        key = self.normal(1, NUM_KV_HEADS, count, HEAD_DIM) + 0.7 * topic
        return query, key, self.normal(1, NUM_KV_HEADS, count, HEAD_DIM)


def rank_angles(num_ranks: int) -> dict[str, Tensor]:
    """Of a rotary embedding over the whole head."""
    pairs = HEAD_DIM // 2
    turns = torch.arange(num_ranks)[:, None] / THETA ** (torch.arange(pairs) / pairs)
    return {"rope_cos": turns.cos(), "rope_sin": turns.sin()}


def main() -> int:
    """Run the stream and print one JSON line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=100_000, help="length of the stream")
    parser.add_argument("--checked", type=int, default=1_000, help="steps compared at the end")
    parser.add_argument("--budget", type=int, default=256, help="slots: half heavy, half recent")
    parser.add_argument(
        "--sinks", type=int, default=0, help="slots of the budget for the first tokens"
    )
    parser.add_argument("--rolling", action="store_true", help="rotate keys by rank")
    parser.add_argument("--context", type=int, default=8192, help="ranks that have angles")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="3,000 tokens, 200 of them compared")
    args = parser.parse_args()
    tokens, checked = (3_000, 200) if args.quick else (args.tokens, args.checked)
    if not 0 < checked < tokens:
        parser.error(f"--checked must be in 1..{tokens - 1}, got {checked}")
    window = args.budget - args.sinks
    if args.sinks < 0 or window < 2:
        parser.error(
            f"--budget must be >= --sinks + 2, and --sinks >= 0, got {args.budget} and {args.sinks}"
        )
    counts = (args.sinks, window // 2, window - window // 2)
    angles = rank_angles(args.context) if args.rolling else {}
    stream = Stream(args.seed)
    screen = Console(stderr=True)
    state = [
        torch.empty(1, NUM_KV_HEADS, args.budget, HEAD_DIM),
        torch.empty(1, NUM_KV_HEADS, args.budget, HEAD_DIM),
        torch.zeros(1, NUM_KV_HEADS, args.budget),
        torch.full((1, NUM_KV_HEADS, args.budget), -1, dtype=torch.int32),
    ]

    # A thousand tokens a call with chunk=1 are a thousand single steps.
    block, position, memory, began = 1_000, 0, [], time.perf_counter()
    blocks = (tokens - checked) // block
    for _ in track(range(blocks), description="stream", console=screen):
        query, key, value = stream.next_tokens(block)
        ops.attention_decode(
            query,
            *state,
            key,
            value,
            torch.arange(position, position + block)[None],
            *counts,
            **angles,
        )
        position += block
        memory.append(resident_mib())
    seconds = time.perf_counter() - began

    saved = [t.double() if t.is_floating_point() else t.clone() for t in state]
    equal = close = ties = 0
    worst = 0.0
    for _ in track(range(checked), description="compare", console=screen):
        query, key, value = stream.next_tokens(1)
        at = torch.tensor([[position]])
        steps: list[reference.Step] = []
        expected, left = reference.attention_decode(
            query.double(), *saved, key.double(), value.double(), at, *counts, trace=steps, **angles
        )
        output, evicted = ops.attention_decode(query, *state, key, value, at, *counts, **angles)
        worst = max(worst, float((output - expected).abs().max()))
        if torch.equal(evicted, left):
            equal += 1
        elif min(step.margin for step in steps) < 1e-4:
            ties += 1  # closer than float32 can tell: go on from the operator's choice
            saved = [t.double() if t.is_floating_point() else t.clone() for t in state]
        close += torch.equal(state[3].sort().values, saved[3].sort().values)
        position += 1
    middle = len(memory) // 2
    result = {
        "op": "h2o_attention_decode",
        "tokens": position,
        "budget": args.budget,
        "sinks": args.sinks,
        "rolling": args.rolling,
        "largest_position": args.budget if args.rolling else position - 1,
        "us_per_token": round(seconds / (blocks * block) * 1e6, 2),
        "resident_mib_after_first_block": round(memory[0], 1),
        "resident_mib_half_way": round(memory[middle], 1),
        "resident_mib_end": round(memory[-1], 1),
        "checked_steps": checked,
        "equal_victims": equal,
        "ties_within_1e-4": ties,
        "equal_kept_sets": close,
        "worst_output_error": worst,
    }
    print(json.dumps(result))
    return 0 if equal + ties == checked and close == checked else 1


if __name__ == "__main__":
    raise SystemExit(main())
