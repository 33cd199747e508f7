#!/usr/bin/env python3
"""One-shot prefill beside torch: h2o_prefill_select, and the whole prefill in one call.

select   h2o_prefill_select: scores and choice, no output
prefill  h2o_attention_decode with a chunk of the whole prompt: attention, scores, choice, the cache
sdpa     causal attention alone: no scores, no choice
eager    the matrix of weights, its column sums, topk, gather: what the paper's code and kvpress do;
         left out where its weights are larger than --eager-mib

Each is checked against the float64 reference (its first 1,024 tokens), then they take turns. A point
also says how much memory the selection takes beyond its inputs, in a process of its own.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
from common import ModelShape, peak_growth
from op_cases import DTYPES, ERROR_LIMIT, ReferenceStep, check_close
from peers import causal_sdpa, eager_prefill
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
from torch import Tensor

from h2o_kv import ops, reference

QUICK = {"model": ["smollm2-135m"], "lengths": [1024], "repeats": 5}
PEERS = {"sdpa": "SDPA", "eager": "eager"}
# Tokens that the reference sees; each of its heads takes that squared, times 8 bytes.
_CHECKED = 1024
COLUMNS = (
    Column("what", "what"),
    *shape_columns("tokens", "seq_len"),
    *(times(f"x {text}", peer) for peer, text in PEERS.items()),
    Column("memory, of the matrix", "matrix_share", "{:.1%}"),
)


class PrefillCase:
    """A prompt, and the calls that prefill it into a fifth of its length."""

    def __init__(self, shape: ModelShape, batch: int, tokens: int, dtype: torch.dtype) -> None:
        self.query, self.key, self.value = (
            torch.randn(batch, heads, tokens, shape.head_dim).to(dtype)
            for heads in (shape.num_q_heads, shape.num_kv_heads, shape.num_kv_heads)
        )
        self.at = torch.arange(tokens).expand(batch, tokens)
        part = max(1, tokens // 10)
        self.counts = (0, part, part)
        slots = (batch, shape.num_kv_heads, 2 * part)
        self.state = (
            torch.empty(*slots, shape.head_dim, dtype=dtype),
            torch.empty(*slots, shape.head_dim, dtype=dtype),
            torch.zeros(slots),
            torch.full(slots, -1, dtype=torch.int32),
        )
        self.sizes = {
            "batch": batch,
            "num_q_heads": shape.num_q_heads,
            "num_kv_heads": shape.num_kv_heads,
            "head_dim": shape.head_dim,
            "seq_len": tokens,
        }

    def start(self, tokens: int) -> PrefillCase:
        """The first tokens of the last row's last KV head, with an empty cache, as a case of its own."""
        group = self.query.shape[1] // self.key.shape[1]
        shape = ModelShape(
            name="", num_layers=1, num_q_heads=group, num_kv_heads=1, head_dim=self.key.shape[3]
        )
        case = PrefillCase(shape, 1, min(tokens, self.key.shape[2]), self.key.dtype)
        whole = (self.query[-1:, -group:], self.key[-1:, -1:], self.value[-1:, -1:])
        case.query, case.key, case.value = (t[:, :, :tokens] for t in whole)
        return case

    def select(self) -> tuple[Tensor, Tensor]:
        """Scores and choice."""
        return ops.prefill_select(self.query, self.key, self.at, *self.counts)

    def prefill(self) -> Tensor:
        """Attention, scores, choice and cache."""
        self.state[2].zero_()
        self.state[3].fill_(-1)
        output, _ = ops.attention_decode(
            self.query,
            *self.state,
            self.key,
            self.value,
            self.at,
            *self.counts,
            chunk=self.key.shape[2],
        )
        return output

    def sdpa(self) -> Tensor:
        """Attention alone."""
        return causal_sdpa(self.query, self.key, self.value)()

    def eager(self) -> tuple[Tensor, ...]:
        """Attention, scores, choice and cache, by torch."""
        return eager_prefill(self.query, self.key, self.value, *self.counts[1:])()

    def check(self, name: str) -> None:
        """Stop where a result is not the reference's."""
        dtype, tokens = self.key.dtype, self.key.shape[2]
        query, key, value = (t.double() for t in (self.query, self.key, self.value))
        empty = [t.double() if t.is_floating_point() else t.clone() for t in self.state]
        steps: list[reference.Step] = []
        output, _ = reference.attention_decode(
            query, *empty, key, value, self.at, *self.counts, chunk=tokens, trace=steps
        )
        expected = ReferenceStep(steps, output)
        check_close(f"{name}, sdpa", self.sdpa(), output, ERROR_LIMIT[dtype])
        selected, scores = self.select()
        expected.check(f"{name}, select", dtype, selected, scores)
        output = self.prefill()
        expected.check(f"{name}, prefill", dtype, self.state[3], self.state[2], output)
        output, _, _, scores, keep = self.eager()
        expected.check(f"{name}, eager", dtype, keep, scores, output)


def _extra_memory(shape: ModelShape, batch: int, tokens: int, dtype: torch.dtype) -> float:
    """Peak resident memory of a selection over what was resident before it, MiB."""
    PrefillCase(shape, 1, 64, dtype).select()  # whatever is set up at the first call
    case = PrefillCase(shape, batch, tokens, dtype)
    with peak_growth() as growth:
        case.select()
        return growth() / 2**20


def extra_memory(*args: Any) -> float:
    """Of `_extra_memory`, measured in a process of its own."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as process:
        return process.submit(_extra_memory, *args).result()


def bench(shape: ModelShape, dtype_name: str, batch: int, tokens: int, report: Report) -> None:
    """Two points: the selection and the whole prefill."""
    name = f"{shape.name}, {dtype_name}, {batch} x {tokens:,} tokens"
    args = (shape, batch, tokens, DTYPES[dtype_name])
    report.start(f"{name}: memory")
    extra = extra_memory(*args)
    matrix = batch * shape.num_q_heads * tokens**2 * 4 / 2**20
    report.start(f"{name}: check")
    case = PrefillCase(*args)
    case.start(_CHECKED).check(name)
    calls = {"select": case.select, "prefill": case.prefill, "sdpa": case.sdpa}
    if matrix <= report.args.eager_mib:
        calls["eager"] = case.eager
    else:
        report.note(f"eager is left out above {report.args.eager_mib} MiB of weights (--eager-mib)")
    timings = report.measure(name, calls, warmup=1)
    peers = {name: timing for name, timing in timings.items() if name in PEERS}
    memory = {
        "extra_peak_mib": round(extra, 1),
        "matrix_mib": round(matrix, 1),
        "matrix_share": round(extra / matrix, 4),
    }
    for what, op in (("select", "h2o_prefill_select"), ("prefill", "h2o_attention_decode")):
        report.add(
            op=op,
            dtype=dtype_name,
            shape=case.sizes,
            timings={"h2o": timings[what], **peers},
            baseline="sdpa",
            baseline_name="sdpa, causal, no scores",
            model=shape.name,
            what=what,
            **(memory if what == "select" else {}),
        )


def draw_ratios(pyplot: Any, points: list[Point]) -> Any:
    """What each peer takes, by h2o's time."""
    return ratio_bars(
        pyplot, points, PEERS, lambda p: f"{p['model']}\n{p['what']}, {p['seq_len']:,} tokens"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write, print."""
    parser = make_parser(__doc__, "bench_prefill_select", repeats=5)
    add_shape_options(parser, "--tokens", [1024, 4096], caches="warm")
    parser.add_argument("--eager-mib", type=int, default=2048, help="largest matrix of weights")
    args = parse(parser, argv, QUICK)
    points = shape_points(args)
    with Report("One-shot prefill", args, COLUMNS, total=2 * len(points)) as report:
        for shape, dtype, batch, tokens in points:
            bench(shape, dtype, batch, tokens, report)
        report.plot("ratios", draw_ratios)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
