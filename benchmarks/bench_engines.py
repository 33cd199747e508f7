#!/usr/bin/env python3
"""Milliseconds of a decode step after N tokens of real text: ours beside llama.cpp and OpenVINO GenAI.

h2o-generate        the C++ program, full cache and a fifth of the prompt (--budget)
Python              h2o_kv.generation, the same two
llama.cpp           llama-cpp-python: full cache in float16, flash attention, else its defaults
OpenVINO GenAI      full cache and its cache eviction with as many slots

All have the same weights: those of a GGUF file, unpacked once into GGUF files and model folders in
floating point (OpenVINO reads no other than float16, and has 8 bits for keys and values). In float32,
all that can must first agree on the tokens after a prompt. Each engine is in a process of its own; they
take turns, a run of decode steps each, several rounds, each round in another order. A row is an engine;
x llama.cpp 2.00: llama.cpp takes twice as long. What is not installed is left out.
"""

from __future__ import annotations

import argparse
import contextlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import ROOT, Spread, Timing, read_text
from engine_process import EngineProcess
from engine_runs import LlamaCppEngine, OpenVINOEngine, ProgramEngine, PythonEngine, Run
from engines import EngineUnavailable, OpenVINOSession
from gguf_float import float_gguf
from report import Column, Point, Report, colours, legend, make_parser, parse, times, values_of

from h2o_kv import EvictionPolicy
from h2o_kv.models import cache_dir, convert_model, converted_folder, find_embedded_model
from h2o_kv_cli.text_tokens import open_tokenizer

QUICK = {"tokens": [1000], "repeats": 10, "rounds": 2, "dtype": ["float32"]}
# The part of a step that does not grow with the context is its time here.
_SHORT = 64
_WARMUP = 3
_CHECKED_PROMPT, _CHECKED_TOKENS = 200, 50
BASELINE = "llama.cpp"
COLUMNS = (
    Column("engine", "what"),
    Column("dtype", "dtype"),
    Column("context", "seq_len", "{:,}"),
    Column("kept", "cache_len", "{:,}"),
    Column("ms a token", "median_ms", "{:.2f}"),
    times("x llama.cpp", "llama_cpp"),
    Column("ms at 64", "base_ms", "{:.2f}"),
    Column("ms of the context", "growth_ms", "{:.2f}"),
    Column("prefill, s", "prefill_s", "{:.2f}"),
    Column("resident, MB", "resident_mb", "{:,.0f}"),
)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """An engine to come.

    Attributes
    ----------
    name : str
    kept : callable
        Slots of its cache after a prompt of so many tokens.
    make : callable
        Starts it; raises EngineUnavailable.
    checked : bool
        It keeps everything, and says which tokens it chooses.
    """

    name: str
    kept: Callable[[int], int]
    make: Callable[[], Any]
    checked: bool = False


def new_tokens(args: argparse.Namespace) -> int:
    """Steps of all runs after a prompt, those of the warm-up included."""
    return int(_WARMUP + args.rounds * args.repeats)


def entries(
    ggufs: dict[str, Path], folder: Path, dtype: str, longest: int, args: argparse.Namespace
) -> list[Entry]:
    """The engines of a type of weights.

    Parameters
    ----------
    ggufs : dict of str to Path
        The file of each type.
    folder : Path
        With the weights of this one.
    dtype : str
    longest : int
        Tokens that a cache must have room for.
    args : argparse.Namespace
    """
    policy = EvictionPolicy(heavy_ratio=args.budget / 2, recent_ratio=args.budget / 2)
    everything = {"kept": lambda tokens: tokens, "checked": True}
    share = {"kept": lambda tokens: policy.resolve(tokens).total}
    ours: dict[str, Any] = {"folder": str(folder), "dtype": dtype, "threads": args.threads}
    program: dict[str, Any] = {"program": str(args.h2o_generate), **ours}

    def python(share: float | None) -> Callable[[], Any]:
        return lambda: EngineProcess(PythonEngine, share=share, **ours)

    def openvino(share: float | None) -> Callable[[], Any]:
        return lambda: EngineProcess(
            OpenVINOEngine,
            gguf=str(ggufs["float16"]),
            dtype=dtype,
            new_tokens=new_tokens(args),
            threads=args.threads,
            share=share,
        )

    def llama_cpp() -> Any:
        gguf = str(ggufs[dtype])
        return EngineProcess(LlamaCppEngine, gguf=gguf, context=longest, threads=args.threads)

    percent = f"{args.budget:.0%}"
    found = [
        Entry(name=BASELINE, make=llama_cpp, **everything),
        Entry(
            name="h2o-generate, full",
            make=lambda: ProgramEngine(share=None, **program),
            **everything,
        ),
        Entry(
            name=f"h2o-generate, {percent}",
            make=lambda: ProgramEngine(share=args.budget, **program),
            **share,
        ),
        Entry(name="Python, full", make=python(None), **everything),
        Entry(name=f"Python, {percent}", make=python(args.budget), **share),
        Entry(name="OpenVINO, full", make=openvino(None), kept=lambda tokens: tokens),
        Entry(
            name=f"OpenVINO, {percent}",
            make=openvino(args.budget),
            kept=lambda tokens: OpenVINOSession.slots(args.budget * tokens),
        ),
    ]
    return [e for e in found if not args.engines or any(n in e.name for n in args.engines)]


def start_engines(
    wanted: Sequence[Entry], stack: contextlib.ExitStack, report: Report
) -> list[tuple[Entry, Any]]:
    """Start what is there; note what is not."""
    started = []
    for entry in wanted:
        report.start(f"starting {entry.name}")
        try:
            engine = entry.make()
        except EngineUnavailable as reason:
            report.note(str(reason))
            continue
        if isinstance(engine, EngineProcess):
            stack.callback(engine.close)
        started.append((entry, engine))
    return started


def check_tokens(engines: Sequence[tuple[Entry, Any]], ids: Sequence[int], report: Report) -> None:
    """Stop where an engine with its full cache chooses another token than the first one."""
    prompt = ids[:_CHECKED_PROMPT]
    expected: list[int] = []
    first = ""
    for entry, engine in engines:
        if not entry.checked:
            continue
        report.start(f"checking {entry.name}")
        tokens = engine.greedy(prompt, _CHECKED_TOKENS)
        if not expected:
            expected, first = tokens, entry.name
        for index, (own, other) in enumerate(zip(tokens, expected, strict=True)):
            if own != other:
                raise SystemExit(
                    f"{entry.name}: chooses token {own} as new token {index}, {first} {other}"
                )


def bench_context(
    engines: Sequence[tuple[Entry, Any]],
    ids: Sequence[int],
    tokens: int,
    dtype: str,
    args: argparse.Namespace,
    report: Report,
) -> dict[str, list[Run]]:
    """The runs of each engine, in turns, after a prompt."""
    label = f"{dtype}, {tokens:,} tokens"
    for entry, engine in engines:
        report.start(f"{label}: prefill, {entry.name}")
        engine.start(ids[:tokens])
        if not isinstance(engine, ProgramEngine):
            engine.run(ids[tokens : tokens + _WARMUP])
    runs: dict[str, list[Run]] = {entry.name: [] for entry, _ in engines}
    show = report.start(label, args.rounds * len(engines))
    order = random.Random(0)
    coming = iter(ids[tokens + _WARMUP :])
    for _ in range(args.rounds):
        fed = [next(coming) for _ in range(args.repeats)]
        for entry, engine in order.sample(list(engines), len(engines)):
            runs[entry.name].append(engine.run(fed))
            show(sum(map(len, runs.values())))
    return runs


def add_points(
    engines: Sequence[tuple[Entry, Any]],
    runs: dict[str, list[Run]],
    base: dict[str, float],
    tokens: int,
    dtype: str,
    model: str,
    report: Report,
) -> None:
    """A point an engine; `base` holds the time at the short context and is filled there."""
    medians = {name: Timing(tuple(run.step_ms.median for run in own)) for name, own in runs.items()}
    for entry, _ in engines:
        own = runs[entry.name]
        spread = Spread(
            *(
                Spread.of([getattr(run.step_ms, field) for run in own]).median
                for field in ("median", "p10", "p90")
            )
        )
        base.setdefault(entry.name, spread.median)
        timings = {"h2o": medians[entry.name]}
        if BASELINE in medians:
            timings["llama_cpp"] = medians[BASELINE]
        report.add(
            op="generate",
            dtype=dtype,
            shape={"batch": 1, "seq_len": tokens, "cache_len": entry.kept(tokens)},
            timings=timings,
            baseline="llama_cpp",
            baseline_name="llama.cpp, full cache",
            model=model,
            what=entry.name,
            p10_ms=round(spread.p10, 6),
            p90_ms=round(spread.p90, 6),
            base_ms=round(base[entry.name], 4),
            growth_ms=round(spread.median - base[entry.name], 4),
            prefill_s=round(Spread.of([run.prefill_s for run in own]).median, 4),
            **({} if own[0].resident_mb is None else {"resident_mb": own[0].resident_mb}),
        )


def draw(pyplot: Any, points: list[Point]) -> Any:
    """Milliseconds a token against the context, a panel a dtype."""
    dtypes, names = values_of(points, "dtype"), values_of(points, "what")
    palette = colours(list(dict.fromkeys(map(_engine, names))))
    figure, axes = pyplot.subplots(
        1, len(dtypes), figsize=(1 + 5 * len(dtypes), 4.5), squeeze=False, layout="constrained"
    )
    for axis, dtype in zip(axes[0], dtypes, strict=True):
        for name in names:
            line = [p for p in points if p["dtype"] == dtype and p["what"] == name]
            axis.plot(
                [p["seq_len"] for p in line],
                [p["median_ms"] for p in line],
                marker="o",
                color=palette[_engine(name)],
                linestyle="--" if name.endswith("%") else "-",
                label=name,
            )
        axis.set(title=dtype, xlabel="tokens of context", ylabel="ms a token")
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    legend(figure)
    return figure


def _engine(name: str) -> str:
    """Without what its cache keeps."""
    return name.partition(",")[0]


def model_folder(gguf: Path, dtype: str, report: Report) -> Path:
    """The file's model as a folder with weights of a type; made once."""
    folder = cache_dir() / "engines" / f"{converted_folder(gguf).name}-{dtype}"
    if not folder.is_dir():
        show = report.start(f"writing the model, {dtype}", 100)
        convert_model(
            gguf, folder, dtype=dtype, progress=lambda text, done: show(round(100 * done))
        )
    return folder


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = make_parser(__doc__, "bench_engines", repeats=30, dtypes=("float32", "bfloat16"))
    parser.add_argument("--model", type=Path, help="GGUF file (default: the installed model)")
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[1000, 4000, 8000], help="of context, beside 64"
    )
    parser.add_argument("--rounds", type=int, default=3, help="runs of --repeats steps, in turns")
    parser.add_argument(
        "--budget", type=float, default=0.2, help="part of the context that is kept"
    )
    parser.add_argument(
        "--engines", nargs="+", metavar="NAME", help="only those with such a part in their name"
    )
    parser.add_argument(
        "--h2o-generate",
        type=Path,
        default=ROOT / "build" / "cmake" / "h2o-generate",
        metavar="FILE",
        help="the program (default: build/cmake/h2o-generate)",
    )
    parser.add_argument(
        "--prompt-file",
        type=Path,
        help="real text, repeated where too short (default: Genesis 1-4)",
    )
    args = parse(parser, argv, QUICK)
    if min(args.tokens) <= _SHORT:
        parser.error(f"--tokens must be > {_SHORT}, got {min(args.tokens)}")
    if args.rounds < 1:
        parser.error(f"--rounds must be >= 1, got {args.rounds}")
    if not 0 < args.budget <= 1:
        parser.error(f"--budget must be above 0 and at most 1, got {args.budget}")
    args.model = args.model or find_embedded_model()
    if args.model is None or args.model.suffix != ".gguf":
        parser.error(f"--model must be a GGUF file, got {args.model}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write, print."""
    args = parse_arguments(argv)
    contexts = [_SHORT, *args.tokens]
    longest = max(max(contexts) + new_tokens(args), _CHECKED_PROMPT + _CHECKED_TOKENS)
    total = len(args.dtype) * len(contexts) * 7
    with Report("Decode steps of engines", args, COLUMNS, total=total) as report:
        for dtype in args.dtype:
            folder = model_folder(args.model, dtype, report)
            ggufs = {}
            for kind in (dtype, "float16"):
                show = report.start(f"writing the GGUF file, {kind}", 100)
                ggufs[kind] = float_gguf(
                    args.model, kind, lambda done, show=show: show(round(100 * done))
                )
            ids = open_tokenizer(str(folder)).encode(read_text(args.prompt_file))
            ids = (ids * -(-longest // len(ids)))[:longest]
            with contextlib.ExitStack() as stack:
                engines = start_engines(entries(ggufs, folder, dtype, longest, args), stack, report)
                if dtype == "float32":
                    check_tokens(engines, ids, report)
                base: dict[str, float] = {}
                for tokens in contexts:
                    runs = bench_context(engines, ids, tokens, dtype, args, report)
                    add_points(engines, runs, base, tokens, dtype, args.model.name, report)
        report.plot("ms_per_token", draw)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
