#!/usr/bin/env python3
"""A table or figure of the H2O paper (arXiv 2306.14048), ours beside the paper's.

What is run is in configs/paper/<table>.json: "paper" with the paper's models, "small" on the installed
default model. Writes results.json, table.md and a plot into OUT/<table>/; of tables of quality also
rows.jsonl, from which an interrupted run goes on. docs/paper.md says what differs from the paper.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from rich.console import Console

from h2o_kv.cli.bars import Bars
from h2o_kv.models import DTYPES, EMBEDDED_MODEL, ModelLoadError, resolve_device
from h2o_kv_cli import one_line

try:
    from paper.configs import (
        FOLDER,
        VARIANTS,
        QualityTable,
        TableError,
        load_table,
        parse_bytes,
        table_names,
    )
except ModuleNotFoundError as error:
    if error.name != "pydantic":
        raise
    raise SystemExit("reproduce: configs need pydantic: pip install 'h2o-kv[bench]'") from error
from paper import quality, sparsity, streaming, throughput
from paper.output import Run

ALL = "all"
KINDS: dict[str, Any] = {
    "quality": quality,
    "throughput": throughput,
    "sparsity": sparsity,
    "streaming": streaming,
}
# Exit statuses: a mistake of the user, something that is not there yet, and Ctrl-C.
USER_ERROR, MISSING, INTERRUPTED = 2, 3, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is asked for; returns the exit status."""
    args = parse_arguments(argv)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    names = table_names() if args.table == ALL else [args.table]
    status = 0
    bars = Bars(Console(file=sys.stderr))
    try:
        # All configs are read before the first of them runs.
        tables = {name: load_table(FOLDER / f"{name}.json") for name in names}
        for name, table in tables.items():
            if table.kind not in KINDS:
                sys.stderr.write(
                    f"reproduce: {name} needs quantised caches, which h2o_kv does not have yet\n"
                )
                status = MISSING
                continue
            check_folder(args.out / name)
            text = run_one(name, table, args, bars.update)
            sys.stdout.write(f"{text}\n")
    except (TableError, ModelLoadError, ValueError, NotImplementedError, OSError) as error:
        bars.hide()
        sys.stderr.write(f"reproduce: {one_line(error)}\n")
        return USER_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        bars.hide()
    return 0 if args.table == ALL else status


def check_folder(folder: Path) -> None:
    """Raise ValueError where no folder can be made: before anything runs, not when it is written."""
    place = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not place.is_dir():
        raise ValueError(f"--out must be a folder, got {place}")


def run_one(
    name: str, table: Any, args: argparse.Namespace, show: Callable[[str, str, float], None]
) -> str:
    """Run one table; returns its Markdown."""
    module = KINDS[table.kind]
    variant = getattr(table.variants, args.variant)
    if args.quick:
        variant = module.quick(variant)
    device = args.device or variant.device
    update: dict[str, Any] = {"device": str(resolve_device(device, name="device"))}
    if args.dtype is not None:
        update["dtype"] = args.dtype
    if args.model is not None:
        update["models"] = (args.model,)
    if isinstance(table, QualityTable) and args.limit is not None:
        update["tasks"] = tuple(
            task.model_copy(update={"limit": args.limit}) for task in variant.tasks
        )
    run = Run(
        name=name,
        table=table,
        variant=args.variant,
        data=args.data,
        out=args.out / name,
        processes=args.processes,
        threads=args.threads,
        memory=args.memory,
        quick=args.quick,
        progress=lambda text, done: show(name, text, done),
    )
    # With "all", tables without the scripts' flags are run without them.
    can = getattr(table, "parity", None) is not None
    run = dataclasses.replace(run, parity=args.parity and (can or args.table != ALL))
    found: str = module.run_table(run, table, variant.model_copy(update=update))
    return found


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="reproduce.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("table", choices=[*table_names(), ALL], help="or all of them")
    parser.add_argument("--variant", choices=VARIANTS, default="small", help="(default: small)")
    parser.add_argument(
        "--data", type=Path, required=True, metavar="DIR", help="with the data files (docs/eval.md)"
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="for a folder for each table"
    )
    parser.add_argument(
        "--model",
        help=f"folder, GGUF file or hub id instead of the variant's (small has {EMBEDDED_MODEL})",
    )
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="instead of the variant's")
    parser.add_argument("--device", help="instead of the variant's")
    parser.add_argument("--limit", type=int, metavar="N", help="first examples of a quality task")
    parser.add_argument(
        "--parity", action="store_true", help="quality: also as the official scripts scored choices"
    )
    parser.add_argument(
        "--memory", metavar="SIZE", help='throughput: that the largest batch must fit in, as "16GB"'
    )
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="of a sweep")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads of each process")
    parser.add_argument("--quick", action="store_true", help="few, short examples")
    args = parser.parse_args(argv)
    for name in ("limit", "processes", "threads"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            parser.error(f"--{name} must be >= 1, got {getattr(args, name)}")
    if args.memory is not None:
        try:
            parse_bytes(args.memory)
        except ValueError as error:
            parser.error(f"--memory {error}, got {args.memory!r}")
    return args


if __name__ == "__main__":
    raise SystemExit(main())
