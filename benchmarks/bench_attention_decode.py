#!/usr/bin/env python3
"""One decode step of h2o_attention_decode beside torch on a cache of the same occupancy.

sdpa     attention alone: no scores, no eviction
eager    the same step in torch's operators, as the paper's code and kvpress do it: softmax weights over
         repeated keys and values, their sums, topk, gather
grouped  the same without repeating keys and values
read     a plain read of as many bytes as K and V: the limit

Each is checked against the float64 reference, then they take turns. Several caches take turns as well,
as the layers of a model do, so that together they are larger than the last-level cache. A last point
compares all threads with one, where a single KV head of a single row is all the work there is.

Where h2o_step_parts is built (cmake -DH2O_BENCHMARKS=ON), it times the kernels of a step one by one, on
one thread: how much of the step are the scores and the eviction.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from common import MODELS, ROOT, Call, Spread, Timing, in_turns, spread_fields
from op_cases import DTYPES, CachesInTurns, State, check_attention, check_step, dtype_name, kv_bytes
from peers import Tensors, eager_step, reads, sdpa, with_read
from report import (
    Column,
    Point,
    Report,
    add_shape_options,
    colours,
    legend,
    make_parser,
    parse,
    ratio_bars,
    shape_columns,
    shape_points,
    times,
    values_of,
)

import h2o_kv  # noqa: F401

QUICK = {"model": ["smollm2-135m", "llama-3-8b"], "lengths": [512, 2048], "repeats": 10}
_attention_decode = torch.ops.h2o.h2o_attention_decode.default
PEERS = {"sdpa": "SDPA", "eager": "eager", "grouped": "eager, grouped"}
COLUMNS = (
    *shape_columns("slots", "capacity"),
    *(times(f"x {text}", peer) for peer, text in PEERS.items()),
    Column("of the read", "x_read", "{:.0%}"),
    times("x 1 thread", "one_thread"),
    Column("scores", "scores_share", "{:.1%}", spread=False),
    Column("evict", "evict_share", "{:.1%}", spread=False),
)


class DecodeCase(CachesInTurns):
    """Caches, and the calls on them."""

    def step(self, state: State) -> Call:
        """A step of h2o, called as the cache of transformers calls it."""
        return lambda: _attention_decode(
            self.query, *state, self.new, self.new, self.at, *self.counts
        )

    def eager(self, state: State) -> dict[str, Callable[[], Tensors]]:
        """The same step by torch, with and without keys and values for each query head."""
        several = {"eager": True}
        if self.query.shape[1] > self.new.shape[1]:
            several["grouped"] = False
        return {
            name: eager_step(state, self.query, self.new, self.counts[2], repeat_kv=repeat_kv)
            for name, repeat_kv in several.items()
        }

    def check(self, name: str) -> None:
        """Stop where h2o or a peer does not do the reference's work, on the first cache."""
        state, dtype = self.states[0], self.query.dtype
        check_attention(f"{name}, sdpa", state, self.query, sdpa(state, self.query)())
        results = {peer: call() for peer, call in self.eager(state).items()}
        expected = check_step(name, state, self.query, self.new)
        for peer, (output, keys, values, scores, keep) in results.items():
            if not keys.shape == values.shape == state[0].shape:
                raise SystemExit(f"{name}, {peer}: makes a cache of {[*keys.shape]}")
            expected.check(f"{name}, {peer}", dtype, keep, scores, output)


def add(report: Report, case: DecodeCase, timings: dict[str, Timing], **fields: Any) -> None:
    """A point."""
    report.add(
        op="h2o_attention_decode",
        dtype=dtype_name(case.query),
        shape=case.sizes,
        timings=timings,
        num_bytes=kv_bytes(case.states[0]),
        caches=len(case.states),
        **fields,
    )


def shares(case: DecodeCase, report: Report) -> dict[str, float]:
    """How much of a step's kernels are the scores and the eviction; nothing without the program."""
    build = Path(os.environ.get("H2O_BUILD_DIR", ROOT / "build" / "cmake"))
    program = build / "benchmarks" / "cpp" / "h2o_step_parts"
    if not program.exists():
        report.note("no shares of scores and eviction: h2o_step_parts is not built")
        return {}
    heads = case.sizes["num_kv_heads"]
    sizes = (heads, case.sizes["num_q_heads"] // heads, case.sizes["head_dim"])
    numbers = (*sizes, case.sizes["capacity"], report.args.repeats)
    command = [str(program), dtype_name(case.query), *map(str, numbers)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    parts = json.loads(done.stdout)
    whole = [sum(step) for step in zip(*parts.values(), strict=True)]
    fields = {}
    for part in ("scores", "evict"):
        each = zip(parts[f"{part}_us"], whole, strict=True)
        fields |= spread_fields(f"{part}_share", Spread.of([us / step for us, step in each]))
    return fields


def bench_step(case: DecodeCase, name: str, report: Report, model: str) -> None:
    """A step beside its peers."""
    case.check(name)
    calls = {
        "h2o": case.in_turns(case.step),
        "sdpa": case.in_turns(lambda state: sdpa(state, case.query)),
    }
    for peer in case.eager(case.states[0]):
        calls[peer] = in_turns([case.eager(state)[peer] for state in case.states])
    calls |= reads(kv_bytes(case.states[0]))
    timings = with_read(report.measure(name, calls, prepare=case.advance))
    fields = {"baseline": "sdpa", "baseline_name": "sdpa, no scores, no eviction"}
    add(report, case, timings, model=model, what="step", **fields, **shares(case, report))


def bench_threads(case: DecodeCase, name: str, report: Report, model: str) -> None:
    """All threads beside one, on the same caches."""
    check_step(name, case.states[0], case.query, case.new)
    step, threads = case.in_turns(case.step), torch.get_num_threads()

    def with_threads(number: int) -> Call:
        def run() -> object:
            torch.set_num_threads(number)
            return step()

        return run

    calls = {"h2o": with_threads(threads), "one_thread": with_threads(1)}
    timings = report.measure(name, calls, prepare=case.advance)
    torch.set_num_threads(threads)
    baseline = {"baseline": "one_thread", "baseline_name": "h2o with one thread"}
    add(report, case, timings, model=model, what="threads", **baseline)


def draw_bandwidth(pyplot: Any, points: list[Point]) -> Any:
    """GB/s of K and V against slots, with what a plain read reaches."""
    points = [p for p in points if p["what"] == "step" and p["batch"] == points[0]["batch"]]
    models, dtypes = values_of(points, "model"), values_of(points, "dtype")
    lines = {"read": "plain read", "h2o": "h2o", **PEERS}
    palette = colours(list(lines))
    figure, axes = pyplot.subplots(
        len(dtypes),
        len(models),
        figsize=(1 + 3.2 * len(models), 1.2 + 2.6 * len(dtypes)),
        sharex=True,
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for row, dtype in zip(axes, dtypes, strict=True):
        for axis, model in zip(row, models, strict=True):
            found = [p for p in points if (p["dtype"], p["model"]) == (dtype, model)]
            for peer, text in lines.items():
                having = [p for p in found if peer == "h2o" or f"x_{peer}" in p]
                axis.plot(
                    [p["capacity"] for p in having],
                    [p["gb_per_s"] / p.get(f"x_{peer}", 1) for p in having],
                    color=palette[peer],
                    label=text,
                    linestyle="--" if peer == "read" else "-",
                    marker=None if peer == "read" else "o",
                    markersize=4,
                )
            slots = values_of(found, "capacity")
            axis.set_xscale("log", base=2)
            axis.set_xticks(slots, labels=[f"{n:,}" for n in slots])
            axis.grid(alpha=0.3)
            axis.set_title(f"{model}, {dtype}", fontsize=9)
        row[0].set_ylabel("K and V, GB/s")
    for axis in axes[-1]:
        axis.set_xlabel("slots")
    axes[0][0].set_ylim(bottom=0)  # of all panels, now that every line is there
    legend(figure)
    return figure


def draw_ratios(pyplot: Any, points: list[Point]) -> Any:
    """What each peer takes, by h2o's time."""
    steps = [p for p in points if p["what"] == "step"]
    return ratio_bars(
        pyplot, steps, PEERS, lambda p: f"{p['model']}\n{p['capacity']:,} slots, batch {p['batch']}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write, print."""
    parser = make_parser(__doc__, "bench_attention_decode", repeats=30)
    add_shape_options(parser, "--capacity", [256, 1024, 2048, 8192], caches="turns")
    parser.add_argument(
        "--threads-capacity", type=int, default=8192, help="slots where threads are compared"
    )
    args = parse(parser, argv, QUICK)
    if args.threads_capacity < 2:
        parser.error(f"--threads-capacity must be >= 2, got {args.threads_capacity}")
    points = shape_points(args)
    of_threads = [(MODELS[args.model[0]], dtype) for dtype in args.dtype if args.threads > 1]
    several = args.caches == "turns"
    with Report("A decode step", args, COLUMNS, total=len(points) + len(of_threads)) as report:
        for shape, dtype, batch, capacity in points:
            name = f"{shape.name}, {dtype}, {batch} x {capacity} slots"
            case = DecodeCase(shape, batch, capacity, DTYPES[dtype], several)
            bench_step(case, name, report, shape.name)
        for shape, dtype in of_threads:
            one_head = dataclasses.replace(
                shape, num_q_heads=shape.num_q_heads // shape.num_kv_heads, num_kv_heads=1
            )
            name = f"{shape.name}, {dtype}, one KV head"
            case = DecodeCase(one_head, 1, args.threads_capacity, DTYPES[dtype], several)
            bench_threads(case, name, report, shape.name)
        report.plot("bandwidth", draw_bandwidth)
        report.plot("ratios", draw_ratios)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
