#!/usr/bin/env python3
"""Tasks of lm-evaluation-harness under policies at one budget; by default its offline RULER tasks.

Prompts and metrics are theirs, the cache is ours (h2o_kv.eval.lm_eval_model). Other tasks fetch their
data from the Hugging Face hub. Writes results.json and results.md into --out after each policy.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from common import commit, machine_line
from report import RESULTS, markdown_table

from h2o_kv.cli.generate import parse_number
from h2o_kv.eval import EvalError, settings
from h2o_kv.models import DTYPES, EMBEDDED_MODEL, ModelLoadError, load_model

# Of RULER (arXiv 2404.06654); their other tasks fetch essays or questions.
OFFLINE = (
    "niah_single_1",
    "niah_multikey_2",
    "niah_multikey_3",
    "ruler_vt",
    "ruler_cwe",
    "ruler_fwe",
)
# That their metrics know.
LENGTHS = (4096, 8192, 16384, 32768, 65536, 131072)
# Their metric for "not of this length".
NOT_MEASURED = -1
QUICK = {"tasks": ["niah_single_1"], "policies": ["full", "h2o"], "limit": 1}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tasks; returns the exit status."""
    args = parse_arguments(argv)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    try:
        chosen = settings(args.policies, [args.ratio], [args.prefill])
        args.out.mkdir(parents=True, exist_ok=True)
        model, tokenizer = load_model(args.model, dtype=args.dtype, device=args.device)
    except (EvalError, ModelLoadError, ValueError, OSError) as error:
        sys.stderr.write(f"lm_eval_tasks: {error}\n")
        return 2
    with tempfile.TemporaryDirectory() as folder:
        prepare_nltk(Path(folder))
        try:
            import lm_eval

            from h2o_kv.eval.lm_eval_model import H2OLM
        except ImportError as error:
            sys.stderr.write(f"lm_eval_tasks: {error}\n")
            return 2
        found: dict[str, dict[str, Any]] = {}
        for setting in chosen:
            sys.stderr.write(f"{setting.policy}, {setting.prefill}\n")
            ours = H2OLM(
                model,
                tokenizer=tokenizer,
                policy=setting.policy,
                ratio=setting.ratio,
                prefill=args.prefill,
                batch_size=args.batch_size,
            )
            try:
                result = lm_eval.simple_evaluate(
                    model=ours,
                    tasks=args.tasks,
                    limit=args.limit,
                    num_fewshot=args.shots,
                    log_samples=False,
                    bootstrap_iters=0,
                    metadata={"tokenizer": model.name_or_path, "max_seq_lengths": args.lengths},
                )
            except (ImportError, LookupError, OSError, ValueError) as error:
                sys.stderr.write(f"lm_eval_tasks: {error}\n")
                return 2
            found[setting.policy] = result["results"]
            write(args, found, len(chosen) - len(found))
    sys.stdout.write((args.out / "results.md").read_text(encoding="utf-8"))
    sys.stderr.write(f"written to {args.out}: results.json, results.md\n")
    return 0


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help=f"folder, GGUF file or hub id (default: {EMBEDDED_MODEL})")
    parser.add_argument("--tasks", nargs="+", default=list(OFFLINE), help="names of theirs")
    parser.add_argument("--policies", nargs="+", default=["full", "h2o", "streaming", "local"])
    parser.add_argument(
        "--ratio", type=parse_number, default=0.2, help="slots, as a part of a request's tokens"
    )
    parser.add_argument("--prefill", default="one_shot", help="one_shot or streamed (docs/eval.md)")
    parser.add_argument(
        "--lengths",
        type=int,
        nargs="+",
        choices=LENGTHS,
        default=[4096],
        help="of RULER's texts, tokens",
    )
    parser.add_argument("--shots", type=int, help="default: the task's own")
    parser.add_argument("--limit", type=int, default=10, help="examples of each task")
    parser.add_argument("--batch-size", type=int, default=1, help="texts generated at a time")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, help="CPU threads of PyTorch")
    parser.add_argument("--out", type=Path, default=RESULTS / "lm_eval_tasks")
    parser.add_argument("--quick", action="store_true", help="one example; other options win")
    args = parser.parse_args(argv)
    if args.quick:
        parser.set_defaults(**QUICK)
        args = parser.parse_args(argv)
    for name in ("limit", "batch_size", "threads"):
        value = getattr(args, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be >= 1, got {value}")
    return args


def prepare_nltk(folder: Path) -> None:
    """Let RULER's tasks, which fetch sentence data of nltk on import, find an empty folder instead.

    Only its tasks on essays split sentences; they fail for want of the data, as they do for want of
    the essays.
    """
    try:
        import nltk
    except ImportError:
        return
    try:
        nltk.data.find("tokenizers/punkt_tab")
    except LookupError:
        (folder / "tokenizers" / "punkt_tab").mkdir(parents=True)
        nltk.data.path.append(os.fspath(folder))


def measured(results: dict[str, Any]) -> dict[tuple[str, str], float]:
    """The values of each (task, metric) of lm-evaluation-harness' results; no standard errors."""
    return {
        (task, metric.partition(",")[0]): float(value)
        for task, metrics in results.items()
        for metric, value in metrics.items()
        if "," in metric
        and "_stderr" not in metric
        and isinstance(value, (int, float))
        and value != NOT_MEASURED
    }


def write(args: argparse.Namespace, found: dict[str, dict[str, Any]], left: int) -> None:
    """Write what there is so far."""
    of_policies = {policy: measured(results) for policy, results in found.items()}
    model = args.model or EMBEDDED_MODEL
    document = {
        "model": model,
        "dtype": args.dtype,
        "ratio": args.ratio,
        "prefill": args.prefill,
        "limit": args.limit,
        "machine": machine_line(args.device),
        "commit": commit(),
        "results": found,
    }
    text = json.dumps(document, ensure_ascii=False, indent=1, default=str)
    (args.out / "results.json").write_text(text + "\n", encoding="utf-8")
    names = list(dict.fromkeys(name for values in of_policies.values() for name in values))
    rows = [[*name, *(f"{values[name]:.3f}" for values in of_policies.values())] for name in names]
    report = (
        "# Tasks of lm-evaluation-harness\n\n"
        f"{model} ({args.dtype}); {args.ratio:.4g} of a request's tokens as slots, {args.prefill}; "
        f"{args.limit} examples a task.\n{document['machine']}; commit {document['commit']}.\n\n"
        + markdown_table(["task", "metric", *of_policies], rows, text_columns=2)
    )
    if left:
        report += f"\n{left} policies are still to run.\n"
    (args.out / "results.md").write_text(report, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
