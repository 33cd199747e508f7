"""`h2o-kv eval`: the quality of policies at equal slots, on local data."""

from __future__ import annotations

import argparse
import itertools
import sys
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console

from h2o_kv.cli.bars import Bars
from h2o_kv.cli.generate import parse_budget
from h2o_kv.eval import (
    TASKS,
    EvalError,
    Plan,
    TaskSpec,
    markdown,
    plot,
    read_results,
    run_sweep,
    settings,
    summarise,
)
from h2o_kv.eval.caches import PREFILLS
from h2o_kv.models import DTYPES, EMBEDDED_MODEL, ModelLoadError, resolve_device
from h2o_kv.policies import POLICIES
from h2o_kv_cli import UserError, one_line, write_json

DESCRIPTION = (
    "Evaluate KV-cache policies at equal slots on local data files: each example with eviction "
    "inside it, beside the full cache. Results are appended to OUT/rows.jsonl; what is there already "
    "is not run again. See docs/eval.md."
)
_QUICK_LIMIT = 16
_POLICIES = ("full", "h2o", "local", "streaming")
_BUDGETS = "100%,40%,20%,10%,5%"
_QUICK_BUDGETS = "20%"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `h2o-kv eval` to its parser."""
    parser.add_argument("--data", required=True, metavar="DIR", help="folder with the data files")
    parser.add_argument(
        "--tasks", type=_names, required=True, metavar="A,B", help=f"of {', '.join(TASKS)}"
    )
    parser.add_argument(
        "--out", required=True, metavar="DIR", help="for rows.jsonl, summary.md and summary.png"
    )
    parser.add_argument("--model", help=f"folder, GGUF file or hub id (default: {EMBEDDED_MODEL})")

    cache = parser.add_argument_group("caches")
    cache.add_argument(
        "--policies",
        type=_names,
        default=_POLICIES,
        metavar="A,B",
        help=f"of {', '.join(POLICIES)} (default: {','.join(_POLICIES)})",
    )
    cache.add_argument(
        "--budgets",
        type=_parts,
        metavar="PARTS",
        help=f"slots, as parts of an example's tokens (default: {_BUDGETS})".replace("%", "%%"),
    )
    cache.add_argument(
        "--prefill",
        type=_names,
        default=("streamed",),
        metavar="A,B",
        help=f"of {', '.join(PREFILLS)}: whether eviction happens from the first token on, or begins "
        "after the whole context (default: streamed)",
    )

    size = parser.add_argument_group("size")
    size.add_argument("--limit", type=int, metavar="N", help="first examples of each task")
    size.add_argument("--shots", type=_counts, default=(0,), metavar="N,N", help="(default: 0)")
    size.add_argument("--seed", type=int, default=0, metavar="N", help="(default: 0)")
    size.add_argument(
        "--prompt-tokens",
        type=_counts,
        default=(512,),
        metavar="N,N",
        help="of texts that are cut to a length (default: 512)",
    )
    size.add_argument(
        "--new-tokens",
        type=_counts,
        default=(64,),
        metavar="N,N",
        help="scored or generated after them (default: 64)",
    )

    machine = parser.add_argument_group("machine")
    machine.add_argument("--dtype", choices=tuple(DTYPES), default="float32")
    machine.add_argument("--device", default="cpu", metavar="DEVICE")
    machine.add_argument("--threads", type=int, metavar="N", help="CPU threads of each process")
    machine.add_argument(
        "--processes", type=int, default=1, metavar="N", help="that share the work (default: 1)"
    )
    machine.add_argument(
        "--batch-tokens", type=int, default=2048, metavar="N", help="of a batch (default: 2048)"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"the first {_QUICK_LIMIT} examples at {_QUICK_BUDGETS}, if not told otherwise".replace(
            "%", "%%"
        ),
    )
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")


def main(args: argparse.Namespace) -> int:
    """Run `h2o-kv eval`; returns the exit status.

    Raises
    ------
    UserError
        A setting, file or model will not do.
    """
    out = Path(args.out)
    file = out / "rows.jsonl"
    try:
        plan = make_plan(args)
        bars = Bars(Console(file=sys.stderr))
        try:
            run_sweep(
                plan,
                file,
                processes=args.processes,
                progress=lambda text, done, total: bars.update("sweep", text, done / max(1, total)),
            )
        finally:
            bars.hide()
        groups = summarise(read_results(file))
        report = markdown(groups)
        (out / "summary.md").write_text(report, encoding="utf-8")
    except (EvalError, ModelLoadError, ValueError, OSError) as error:
        raise UserError(one_line(error)) from error
    except BrokenProcessPool as error:
        raise UserError(f"a process of the evaluation died: {one_line(error)}") from error
    try:
        plot(groups, out / "summary.png")
    except EvalError as error:
        sys.stderr.write(f"no summary.png: {error}\n")
    if args.json:
        write_json([asdict(group) for group in groups])
    else:
        sys.stdout.write(report)
    return 0


def make_plan(args: argparse.Namespace) -> Plan:
    """What the options ask for, all of it checked.

    Raises
    ------
    ValueError
        An option is out of its range.
    """
    for name, least in (("limit", 1), ("threads", 1), ("processes", 1), ("batch_tokens", 1)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise ValueError(f"--{name.replace('_', '-')} must be >= {least}, got {value}")
    specs = [
        TaskSpec(name, Path(args.data), shots, args.seed, prompt, new, args.batch_tokens)
        for name, shots, prompt, new in itertools.product(
            args.tasks, args.shots, args.prompt_tokens, args.new_tokens
        )
    ]
    budgets = args.budgets or _parts(_QUICK_BUDGETS if args.quick else _BUDGETS)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    return Plan(
        tasks=tuple(specs),
        settings=tuple(settings(args.policies, budgets, args.prefill)),
        model=args.model,
        dtype=args.dtype,
        device=str(resolve_device(args.device, name="--device")),
        limit=_QUICK_LIMIT if args.quick and args.limit is None else args.limit,
        threads=args.threads,
    )


def _names(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not names:
        raise argparse.ArgumentTypeError(f"must be at least one name, got {text!r}")
    return names


def _counts(text: str) -> tuple[int, ...]:
    try:
        counts = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be counts (512,1024), got {text!r}") from None
    if min(counts) < 0:
        raise argparse.ArgumentTypeError(f"must be >= 0, got {text!r}")
    return counts


def _parts(text: str) -> tuple[float, ...]:
    try:
        parts = [parse_budget(part.strip()) for part in text.split(",")]
    except argparse.ArgumentTypeError:
        parts = []
    if not parts or any(isinstance(part, int) for part in parts):
        raise argparse.ArgumentTypeError(f"must be parts (20% or 0.2), got {text!r}")
    return tuple(float(part) for part in parts)
