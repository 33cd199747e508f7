#!/usr/bin/env python3
"""h2o_evict beside torch's operators: a scored token joins a full cache, or a cache is cut to half.

scatter  in place: argmin over what is not recent, four scatters (one token only)
gather   topk, gather: what the paper's code and kvpress do, a new cache each time
read     a plain read of as many bytes as scores and positions: the limit

Each is checked against the float64 reference, then they take turns. In a model the scores of a layer
have left the processor's caches when its turn comes again, so these are swept before every call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from common import Call, Timing, in_turns
from op_cases import DTYPES, CachesInTurns, ReferenceStep, State
from peers import Tensors, gather_evict, gather_shrink, reads, scatter_evict, with_read
from report import (
    Column,
    Point,
    Report,
    add_shape_options,
    make_parser,
    parse,
    ratio_bars,
    shape_columns,
    shape_points,
    times,
)

from h2o_kv import ops

QUICK = {"model": ["smollm2-135m", "llama-3-8b"], "lengths": [2048], "repeats": 10}
PEERS = {"scatter": "argmin, scatter", "gather": "topk, gather"}
COLUMNS = (
    Column("what", "what"),
    *shape_columns("slots", "capacity"),
    *(times(f"x {text}", peer) for peer, text in PEERS.items()),
    Column("of the read", "x_read", "{:.0%}"),
)


class EvictCase(CachesInTurns):
    """Caches, the token that joins and its score; torch has caches of its own."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.others = [(k.clone(), v.clone(), s.clone(), p.clone()) for k, v, s, p in self.states]
        self.score = torch.rand(self.sizes["batch"], self.sizes["num_kv_heads"], 1)
        self.at32 = self.at[:, None].to(torch.int32).expand_as(self.score).contiguous()
        self.half = (self.counts[1] // 2, self.counts[2] // 2)
        self.num_bytes = sum(t.nbytes for t in self.states[0][2:])

    def advance(self) -> None:
        """Move on to the next position."""
        super().advance()
        self.at32 += 1

    def restore(self) -> None:
        """Fill h2o's caches again, from torch's."""
        for own, other in zip(self.states, self.others, strict=True):
            own[2].copy_(other[2])
            own[3].copy_(other[3])

    def evict(self, state: State) -> Call:
        """A token joins under h2o."""
        return lambda: ops.evict(*state, self.new, self.new, self.score, self.at, *self.counts)

    def scatter(self, state: State) -> Call:
        """A token joins in place, by torch."""
        return scatter_evict(state, self.new, self.score, self.at32, self.counts[2])

    def gather(self, state: State) -> Callable[[], Tensors]:
        """A token joins, by torch."""
        return gather_evict(state, self.new, self.score, self.counts[2])

    def shrink(self, state: State) -> Call:
        """h2o cuts to half."""
        none, at = self.new[:, :, :0], self.at[:, :0]
        return lambda: ops.evict(*state, none, none, self.score[..., :0], at, 0, *self.half)


def one_token(case: EvictCase, name: str, report: Report) -> dict[str, Timing]:
    """A scored token joins."""
    own, other, dtype = case.states[0], case.others[0], case.new.dtype
    expected = ReferenceStep.of_evict(own, case.new, case.score)
    _, _, scores, keep = case.gather(own)()
    expected.check(f"{name}, gather", dtype, keep, scores)
    for what, state, call in (
        ("h2o", own, case.evict(own)),
        ("scatter", other, case.scatter(other)),
    ):
        call()
        expected.check(f"{name}, {what}", dtype, state[3], state[2])
    calls = {
        "h2o": case.in_turns(case.evict),
        "scatter": in_turns([case.scatter(state) for state in case.others]),
        "gather": in_turns([case.gather(state) for state in case.others]),
    }
    return report.measure(name, calls | reads(case.num_bytes), prepare=case.advance)


def shrink(case: EvictCase, name: str, report: Report) -> dict[str, Timing]:
    """A cache is cut to half."""
    own, dtype = case.states[0], case.new.dtype
    expected = ReferenceStep.of_shrink(own, *case.half)
    _, _, scores, keep = gather_shrink(case.others[0], *case.half)()
    expected.check(f"{name}, gather", dtype, keep, scores)
    case.shrink(own)()
    expected.check(f"{name}, h2o", dtype, own[3], own[2])
    calls = {
        "h2o": case.in_turns(case.shrink),
        "gather": in_turns([gather_shrink(state, *case.half) for state in case.others]),
    }
    return report.measure(name, calls | reads(case.num_bytes), prepare=case.restore)


def draw_ratios(pyplot: Any, points: list[Point]) -> Any:
    """What each peer takes, by h2o's time."""
    return ratio_bars(
        pyplot, points, PEERS, lambda p: f"{p['model']}\n{p['what']}, {p['capacity']:,} slots"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write, print."""
    parser = make_parser(__doc__, "bench_evict", repeats=30)
    add_shape_options(parser, "--capacity", [512, 2048, 8192], caches="cold")
    args = parse(parser, argv, QUICK)
    cases = ((one_token, "one token"), (shrink, "cut to half"))
    points = [(*case, *point) for case in cases for point in shape_points(args)]
    with Report("Eviction alone", args, COLUMNS, total=len(points)) as report:
        for measure_case, what, shape, dtype, batch, capacity in points:
            case = EvictCase(shape, batch, capacity, DTYPES[dtype], args.caches == "turns")
            name = f"{what}, {shape.name}, {dtype}, {batch} x {capacity} slots"
            report.add(
                op="h2o_evict",
                dtype=dtype,
                shape=case.sizes,
                timings=with_read(measure_case(case, name, report)),
                num_bytes=case.num_bytes,
                baseline="gather",
                baseline_name="topk, gather",
                model=shape.name,
                what=what,
                caches=len(case.states),
            )
        report.plot("ratios", draw_ratios)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
