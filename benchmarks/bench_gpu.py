#!/usr/bin/env python3
"""The operators on a GPU beside what bounds them and what else does their work.

Each point is first checked against the float64 reference. Then the calls of several caches, together
larger than the L2 cache, are captured in one CUDA graph each for h2o, a device copy of as many bytes,
torch's SDPA, flash-attn and FlashInfer where they are installed, and the same step in torch's own
operators; the replays take turns. `launched_x` is h2o's speed-up over SDPA when every call is launched
on its own. `evict_overhead` compares a step on a full cache with one that has room: both attend and
score, for the operator never does less.

One JSON line a point; a Markdown table of the ratios and the targets at the end.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from common import Call, ResultWriter, Timing, machine_line, measure, ratio
from gpu_baselines import copy_of, flash_attn, flashinfer, repeated
from gpu_report import ratio_table, read_points, target_lines
from op_cases import DTYPES, State, check_selection, check_step, decode_bytes, full_caches, halves
from peers import causal_sdpa, eager_step, scatter_evict, sdpa

from h2o_kv import ops

# A replay moves about as many bytes as this, and makes at most so many calls.
_BYTES_OF_REPLAY = 4 * 2**30
_MOST_CALLS = 128
_LEAST_CALLS = 4


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a point, by their names in the glossary."""

    batch: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    capacity: int = 0
    seq_len: int = 0

    def fields(self) -> dict[str, int]:
        """The sizes that mean something."""
        return {name: size for name, size in vars(self).items() if size}

    def __str__(self) -> str:
        return ", ".join(f"{name} {size}" for name, size in self.fields().items())


@dataclass(frozen=True)
class Settings:
    """How a point is measured."""

    device: torch.device
    repeats: int
    writer: ResultWriter


def decode_shapes() -> list[Shape]:
    """Every named shape; the one that the targets are about first."""
    shapes = [
        Shape(batch=b, num_q_heads=8 * g, num_kv_heads=8, head_dim=128, capacity=c)
        for c in (2048, 512, 8192)
        for b in (64, 1, 8)
        for g in (4, 1, 8)
    ]
    return shapes


def number_of_caches(bytes_of_one: int, device: torch.device) -> int:
    """Caches that are together four times as large as the L2 cache."""
    if device.type != "cuda":
        return 2
    l2 = torch.cuda.get_device_properties(device).L2_cache_size
    return min(_MOST_CALLS, max(2, -(-4 * l2 // bytes_of_one)))


def ratios(timings: dict[str, Timing]) -> dict[str, float]:
    """Every other time by h2o's; the copy's as a share of its bandwidth."""
    names = {name: "copy_share" if name == "copy" else f"x_{name}" for name in timings}
    return {
        names[name]: round(ratio(timings["h2o"], timing).median, 4)
        for name, timing in timings.items()
        if name not in ("h2o", "room")
    }


class DecodeBench:
    """Full caches of a shape, and the calls on them that are measured.

    The new tokens' positions are in one tensor on the device, so that a captured call meets a later
    position at each replay. `room` are the same K and V with scores and positions of their own, where
    the last slots are emptied before each replay.
    """

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        sizes = (shape.batch, shape.num_kv_heads, shape.capacity, shape.head_dim)
        of_one = 2 * sizes[0] * sizes[1] * sizes[2] * sizes[3] * dtype.itemsize
        count = number_of_caches(of_one, device)
        together, self.states = full_caches(count, *sizes, dtype, device)
        calls = min(_MOST_CALLS, max(_LEAST_CALLS, count, _BYTES_OF_REPLAY // of_one))
        self.rounds = min(-(-calls // count), shape.capacity // 4)
        self.room_positions = together[3].clone()
        room_scores = together[2].clone()
        self.room = [
            (k, v, room_scores[i], self.room_positions[i])
            for i, (k, v, _, _) in enumerate(self.states)
        ]
        self.query, self.new = (
            torch.randn(shape.batch, heads, 1, shape.head_dim, dtype=dtype, device=device)
            for heads in (shape.num_q_heads, shape.num_kv_heads)
        )
        self.at = torch.arange(shape.capacity + 1, shape.capacity + 1 + self.rounds, device=device)
        self.counts = halves(shape.capacity)

    @property
    def calls(self) -> int:
        """How many calls a replay makes."""
        return self.rounds * len(self.states)

    def prepare(self) -> None:
        """Move on to later positions; make room where there shall be some."""
        self.at.add_(self.rounds)
        self.room_positions[..., -self.rounds :] = -1

    def step(self, state: State, turn: int) -> Call:
        """A step of h2o."""
        at = self.at[turn].expand(self.query.shape[0], 1)
        return lambda: ops.attention_decode(
            self.query, *state, self.new, self.new, at, *self.counts
        )

    def in_turn(self, call_of: Callable[[State, int], Call], room: bool = False) -> list[Call]:
        """A call on each cache, as many rounds as a replay makes."""
        states = self.room if room else self.states
        return [call_of(state, turn) for turn in range(self.rounds) for state in states]


def all_repeated(calls: dict[str, list[Call]], device: torch.device) -> dict[str, Call]:
    """Each list of calls as one; a baseline that cannot be captured is left out."""
    replays: dict[str, Call] = {}
    for name, of_one in calls.items():
        try:
            replays[name] = repeated(of_one, device)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if name in ("h2o", "room", "copy"):
                raise
            print(f"{name} is left out: {error}", file=sys.stderr)
    return replays


def optional_baselines(bench: DecodeBench) -> dict[str, list[Call]]:
    """Calls of the packages that are installed and take this shape."""
    found: dict[str, list[Call]] = {}
    for name, make in (("flash_attn", flash_attn), ("flashinfer", flashinfer)):
        try:
            calls = [make(state, bench.query) for state in bench.states]
            if None in calls:
                continue
            calls[0]()
            found[name] = calls * bench.rounds
        except Exception as error:  # another package's trouble must not end this benchmark
            print(f"{name} is left out: {error}", file=sys.stderr)
    return found


def bench_decode(shape: Shape, dtype_name: str, settings: Settings) -> None:
    """One point of h2o_attention_decode."""
    device = settings.device
    bench = DecodeBench(shape, DTYPES[dtype_name], device)
    check_step(f"{shape}, {dtype_name}", bench.states[0], bench.query, bench.new)
    num_bytes = decode_bytes(bench.states[0])
    calls = {
        "h2o": bench.in_turn(bench.step),
        "room": bench.in_turn(bench.step, room=True),
        "copy": [copy_of(num_bytes, device) for _ in bench.states] * bench.rounds,
        "sdpa": bench.in_turn(lambda state, _: sdpa(state, bench.query)),
        "eager": bench.in_turn(
            lambda state, _: eager_step(
                state, bench.query, bench.new, bench.counts[2], repeat_kv=False
            )
        ),
        **optional_baselines(bench),
    }
    replays = all_repeated(calls, device)
    timings = measure(
        replays, repeats=settings.repeats, warmup=2, device=device, prepare=bench.prepare
    )
    timings = {name: timing.scaled(bench.calls) for name, timing in timings.items()}
    launched = measure(
        {name: calls[name][-1] for name in ("h2o", "sdpa") if name in timings},
        repeats=settings.repeats,
        device=device,
        prepare=bench.prepare,
    )
    settings.writer.write(
        op="h2o_attention_decode",
        device=device.type,
        dtype=dtype_name,
        shape=shape.fields(),
        timing=timings["h2o"],
        num_bytes=num_bytes,
        baseline=timings.get("sdpa"),
        baseline_name="sdpa, no scores, no eviction",
        **ratios(timings),
        evict_overhead=round(ratio(timings["room"], timings["h2o"]).median - 1, 4),
        launched_x=ratios(launched).get("x_sdpa"),
        launched_ms=round(launched["h2o"].spread.median, 6),
        copy_ms=round(timings["copy"].spread.median, 6),
        caches=len(bench.states),
    )


def bench_evict(shape: Shape, dtype_name: str, settings: Settings) -> None:
    """One point of h2o_evict: a token joins a full cache."""
    bench = DecodeBench(shape, DTYPES[dtype_name], settings.device)
    score = torch.ones(shape.batch, shape.num_kv_heads, 1, device=settings.device)

    def own(state: State, turn: int) -> Call:
        at = bench.at[turn].expand(shape.batch, 1)
        return lambda: ops.evict(*state, bench.new, bench.new, score, at, *bench.counts)

    def eager(state: State, turn: int) -> Call:
        at = bench.at[turn].to(torch.int32).expand(shape.batch, shape.num_kv_heads, 1)
        return scatter_evict(state, bench.new, score, at, bench.counts[2])

    num_bytes = 3 * 4 * shape.batch * shape.num_kv_heads * shape.capacity
    copies = [copy_of(num_bytes, settings.device) for _ in bench.states]
    calls = {
        "h2o": bench.in_turn(own),
        "copy": copies * bench.rounds,
        "eager": bench.in_turn(eager, room=True),
    }
    timings = measure(
        all_repeated(calls, settings.device),
        repeats=settings.repeats,
        device=settings.device,
        prepare=lambda: bench.at.add_(bench.rounds),
    )
    timings = {name: timing.scaled(bench.calls) for name, timing in timings.items()}
    settings.writer.write(
        op="h2o_evict",
        device=settings.device.type,
        dtype=dtype_name,
        shape=shape.fields(),
        timing=timings["h2o"],
        num_bytes=num_bytes,  # scores and positions read, what left written
        baseline=timings["eager"],
        baseline_name="torch: argmin and scatter",
        **ratios(timings),
    )


def bench_select(shape: Shape, dtype_name: str, settings: Settings) -> None:
    """One point of h2o_prefill_select beside causal SDPA."""
    device, tokens = settings.device, shape.seq_len
    dtype, kv_heads = DTYPES[dtype_name], shape.num_kv_heads
    query, key, value = (
        torch.randn(shape.batch, heads, tokens, shape.head_dim, dtype=dtype, device=device)
        for heads in (shape.num_q_heads, kv_heads, kv_heads)
    )
    part = min(tokens, 1024) // 8
    check_selection(f"{shape}, {dtype_name}", query, key, (0, part, part))
    at = torch.arange(tokens, device=device).expand(shape.batch, tokens)
    calls: dict[str, Call] = {
        "h2o": lambda: ops.prefill_select(query, key, at, 0, tokens // 8, tokens // 8),
        "sdpa": causal_sdpa(query, key, value),
    }
    timings = measure(calls, repeats=max(5, settings.repeats // 2), device=device, cold=True)
    settings.writer.write(
        op="h2o_prefill_select",
        device=device.type,
        dtype=dtype_name,
        shape=shape.fields(),
        timing=timings["h2o"],
        baseline=timings["sdpa"],
        baseline_name="sdpa, causal",
        **ratios(timings),
    )


Point = tuple[Callable[[Shape, str, Settings], None], Shape, str]


def points(quick: bool, tiny: bool) -> list[Point]:
    """What is measured, the most important first."""
    heads = {"batch": 1, "num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128}
    if tiny:
        small = {"batch": 2, "num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16}
        return [
            (bench_decode, Shape(**small, capacity=64), "float32"),
            (bench_evict, Shape(**small, capacity=64), "float32"),
            (bench_select, Shape(**small, seq_len=64), "float32"),
        ]
    evicts = [Shape(**{**heads, "batch": b}, capacity=2048) for b in (64, 1)]
    prompts = [Shape(**heads, seq_len=tokens) for tokens in (1024, 4096, 16384)]
    shapes = decode_shapes()
    others: list[Point] = [(bench_evict, shape, "bfloat16") for shape in evicts]
    others += [(bench_select, shape, "bfloat16") for shape in prompts]
    if quick:
        some = [s for s in shapes if s.capacity == 2048 and s.num_q_heads == 32]
        return [(bench_decode, shape, "bfloat16") for shape in some] + others
    first, *rest = [(bench_decode, shape, "bfloat16") for shape in shapes]
    more: list[Point] = [
        (bench_decode, shape, name) for name in ("float16", "float32") for shape in shapes
    ]
    return [first, *others, *rest, *more, (bench_select, prompts[1], "float16")]


def main() -> int:
    """Measure the points, print their table and the targets."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument(
        "--output", type=Path, default=Path("build/bench_gpu.jsonl"), help="JSON lines"
    )
    parser.add_argument("--repeats", type=int, default=15, help="replays of each graph")
    parser.add_argument(
        "--seconds", type=float, default=600, help="start no further point after this long"
    )
    parser.add_argument("--quick", action="store_true", help="bfloat16 and few shapes")
    parser.add_argument(
        "--tiny", action="store_true", help="sizes that need no GPU, to try this script out"
    )
    args = parser.parse_args()
    torch.manual_seed(0)
    print(machine_line(args.device), file=sys.stderr)
    end = time.monotonic() + args.seconds
    failures, left_out = 0, list[str]()
    with ResultWriter(args.output) as writer:
        settings = Settings(args.device, 3 if args.tiny else args.repeats, writer)
        for bench, shape, dtype_name in points(args.quick, args.tiny):
            name = f"{bench.__name__}, {shape}, {dtype_name}"
            if time.monotonic() > end:
                print(f"left out, no time: {name}", file=sys.stderr)
                left_out.append(name)
                continue
            start = time.monotonic()
            try:
                bench(shape, dtype_name, settings)
            except torch.OutOfMemoryError:
                print(f"left out, not enough memory: {name}", file=sys.stderr)
                left_out.append(name)
            except (SystemExit, Exception) as error:  # the other points are still worth it
                print(f"FAILED: {name}: {error}", file=sys.stderr)
                failures += 1
            print(f"{time.monotonic() - start:.1f} s: {name}", file=sys.stderr, flush=True)
            gc.collect()
            if args.device.type == "cuda":
                torch.cuda.empty_cache()
    measured = read_points(args.output)
    print("\n".join([*ratio_table(measured), "", *target_lines(measured)]))
    print(f"{len(measured)} points, {failures} failed, {len(left_out)} left out")
    return int(failures > 0)


if __name__ == "__main__":
    raise SystemExit(main())
