#!/usr/bin/env python3
"""Keeps the report of gpu_check.sh: report.json and report.md, written anew after each step.

Needs nothing but Python, so that there is a report whatever else fails.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

Point = dict[str, Any]
_MOST_FAILURES = 30
_SHAPE = ("batch", "num_q_heads", "num_kv_heads", "capacity", "seq_len", "head_dim")

# name of the target, the ratio, its bound, whether larger is better
_TARGETS = (
    ("share of the copy's bandwidth", "copy_share", 0.80, True),
    ("evicting over not evicting", "evict_overhead", 0.05, False),
)
_TARGET_POINT = {
    "op": "h2o_attention_decode",
    "dtype": "bfloat16",
    "batch": 64,
    "num_q_heads": 32,
    "num_kv_heads": 8,
    "capacity": 2048,
    "head_dim": 128,
}


# --- measured points ----------------------------------------------------------------------------


def read_points(path: Path) -> list[Point]:
    """The points of a file of JSON lines; a last line that was cut off is left out."""
    points = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            points.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return points


def _ratio(point: Point, name: str, form: str = "{:.2f} x") -> str:
    value = point.get(name)
    return "-" if value is None else form.format(value)


def ratio_table(points: Sequence[Point]) -> list[str]:
    """A Markdown table: how many times as fast as what each point is compared with; times last."""
    names = ["op", "shape", "dtype", "of the copy's bandwidth", "x SDPA", "x flash-attn"]
    names += ["x FlashInfer", "x eager", "evicting costs", "x SDPA, launched", "ms (p10-p90)"]
    lines = ["| " + " | ".join(names) + " |", "|" + " --- |" * len(names)]
    for p in points:
        cells = [
            p["op"],
            ", ".join(f"{name} {p[name]}" for name in _SHAPE if name in p),
            p["dtype"],
            _ratio(p, "copy_share", "{:.0%}"),
            _ratio(p, "x_sdpa"),
            _ratio(p, "x_flash_attn"),
            _ratio(p, "x_flashinfer"),
            _ratio(p, "x_eager"),
            _ratio(p, "evict_overhead", "{:+.1%}"),
            _ratio(p, "launched_x"),
            f"{p['median_ms']:.4f} ({p['p10_ms']:.4f}-{p['p90_ms']:.4f})",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def targets(points: Sequence[Point]) -> list[dict[str, Any]]:
    """What the operators shall reach, and whether they did; None where it was not measured."""
    found: Point = next(
        (p for p in points if all(p.get(k) == v for k, v in _TARGET_POINT.items())), {}
    )
    rows = []
    for name, ratio, bound, at_least in _TARGETS:
        value = found.get(ratio)
        met = None if value is None else (value >= bound if at_least else value <= bound)
        rows.append(
            {"name": name, "value": value, "bound": bound, "at_least": at_least, "met": met}
        )
    return rows


def target_lines(points: Sequence[Point]) -> list[str]:
    """One line a target: pass, miss or not measured."""
    lines = []
    for t in targets(points):
        verdict = {True: "pass", False: "MISS", None: "not measured"}[t["met"]]
        sign = ">=" if t["at_least"] else "<="
        value = "" if t["value"] is None else f"{t['value']:.1%}, "
        lines.append(f"- {verdict}: {t['name']} {value}target {sign} {t['bound']:.0%}")
    where = "batch 64, 32 query and 8 KV heads of 128, 2,048 slots, bfloat16"
    return [f"Targets ({where}):", "", *lines]


# --- the machine --------------------------------------------------------------------------------

_GPU_FIELDS = (
    "name,driver_version,compute_cap,memory.total,memory.used,clocks.sm,clocks.max.sm,clocks.mem,"
    "power.draw,power.limit,temperature.gpu,utilization.gpu"
)


def _first_line(*command: str) -> str:
    if shutil.which(command[0]) is None:
        return f"{command[0]}: not found"
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    lines = (done.stdout or done.stderr).strip().splitlines()
    return lines[-1 if command[0] == "nvcc" else 0] if lines else f"{command[0]}: no output"


def facts(commit: str) -> dict[str, Any]:
    """What the check ran on; a lack is a value too."""
    values = _first_line("nvidia-smi", f"--query-gpu={_GPU_FIELDS}", "--format=csv,noheader")
    names, parts = _GPU_FIELDS.split(","), [v.strip() for v in values.split(",")]
    gpu = dict(zip(names, parts, strict=True)) if len(parts) == len(names) else {"name": values}
    packages = {}
    for name in ("torch", "transformers", "triton", "flash-attn", "flashinfer-python", "numpy"):
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            packages[name] = "not installed"
    return {
        "commit": commit,
        "gpu": gpu,
        "nvcc": _first_line("nvcc", "--version"),
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": packages,
    }


# --- tests --------------------------------------------------------------------------------------


def summary_of_tests(path: Path) -> dict[str, Any] | None:
    """Numbers, failures and reasons for skipping of a JUnit file; None where there is none."""
    try:
        cases = list(ET.parse(path).getroot().iter("testcase"))
    except (OSError, ET.ParseError):
        return None
    failures, reasons = [], Counter[str]()
    for case in cases:
        for child in case:
            message = child.get("message", "").strip()
            if child.tag in ("failure", "error"):
                name = f"{case.get('classname', '')}::{case.get('name')}"
                failures.append({"test": name, "message": message[:500]})
            elif child.tag == "skipped":
                reasons[message] += 1
    slowest = sorted(cases, key=lambda c: -float(c.get("time", 0)))[:5]
    return {
        "tests": len(cases),
        "failed": len(failures),
        "skipped": reasons.total(),
        "passed": len(cases) - len(failures) - reasons.total(),
        "failures": failures[:_MOST_FAILURES],
        "skip_reasons": dict(reasons),
        "slowest": {str(c.get("name")): float(c.get("time", 0)) for c in slowest},
    }


# --- the report ---------------------------------------------------------------------------------


def _load(path: Path, default: Any) -> Any:
    return json.loads(path.read_text()) if path.exists() else default


def write_report(out: Path, work: Path) -> None:
    """Write report.json and report.md from what the steps left in `work` and `out`."""
    points = read_points(out / "bench.jsonl")
    tests = {p.stem: summary_of_tests(p) for p in sorted(work.glob("tests*.xml"))}
    report = {
        "facts": _load(work / "facts.json", {}),
        "steps": _load(work / "steps.json", []),
        "build": _load(work / "build.json", {}),
        "tests": tests,
        "targets": targets(points),
        "benchmark": points,
    }
    lines = ["# Check on a GPU", ""]
    lines += ["| step | result | seconds | |", "| --- | --- | ---: | --- |"]
    for step in report["steps"]:
        detail = step["detail"].replace("|", "\\|")
        lines.append(f"| {step['name']} | {step['status']} | {step['seconds']} | {detail} |")
    if report["build"]:
        size = report["build"]["libh2o_bytes"] / 2**20
        lines += ["", f"libh2o.so: {size:.1f} MiB, architectures {report['build']['arch']}."]
    for name, summary in tests.items():
        if summary is None:
            continue
        counts = ", ".join(f"{summary[k]} {k}" for k in ("passed", "failed", "skipped"))
        lines += ["", f"{name}: {counts}."]
        lines += [
            f"- {f['test']}: {f['message'].splitlines()[0] if f['message'] else ''}"
            for f in summary["failures"]
        ]
        lines += [f"- skipped {n}: {reason}" for reason, n in summary["skip_reasons"].items()]
    if points:
        lines += ["", *target_lines(points), "", *ratio_table(points)]
    lines += ["", "```", json.dumps(report["facts"], indent=1), "```"]
    for name, text in (
        ("report.json", json.dumps(report, indent=1)),
        ("report.md", "\n".join(lines)),
    ):
        part = work / name  # renamed into its place, so that a killed run leaves a whole one
        part.write_text(text + "\n", encoding="utf-8", errors="replace")
        shutil.move(part, out / name)


def record(work: Path, name: str, status: str, seconds: int, detail: str) -> None:
    """Add a step, or what became of it."""
    path = work / "steps.json"
    steps = [s for s in _load(path, []) if s["name"] != name]
    steps.append({"name": name, "status": status, "seconds": seconds, "detail": detail})
    path.write_text(json.dumps(steps))


def main() -> int:
    """Record facts or a step."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="where the report is")
    parser.add_argument("--work", type=Path, required=True, help="where the steps leave their part")
    commands = parser.add_subparsers(dest="command", required=True)
    of_facts = commands.add_parser("facts", help="what the check runs on")
    of_facts.add_argument("--commit", default="unknown")
    of_build = commands.add_parser("build", help="what was built")
    of_build.add_argument("--library", type=Path, required=True)
    of_build.add_argument("--arch", required=True)
    of_tests = commands.add_parser("tests", help="fails unless tests passed, by their JUnit file")
    of_tests.add_argument("results", type=Path)
    of_step = commands.add_parser("step", help="what became of a step")
    of_step.add_argument("name")
    of_step.add_argument("status", choices=["running", "passed", "failed", "skipped"])
    of_step.add_argument("seconds", type=int)
    of_step.add_argument("detail")
    args = parser.parse_args()
    if args.command == "facts":
        found = facts(args.commit)
        (args.work / "facts.json").write_text(json.dumps(found))
        json.dump(found, sys.stdout, indent=1)
        return 0
    if args.command == "build":
        built = {"libh2o_bytes": args.library.stat().st_size, "arch": args.arch}
        (args.work / "build.json").write_text(json.dumps(built))
        print(json.dumps(built))
        return 0
    if args.command == "tests":
        summary = summary_of_tests(args.results)
        passed = 0 if summary is None else summary["passed"]
        print(f"{passed} passed" if passed else "nothing was tested: every test was skipped")
        return int(passed == 0)
    record(args.work, args.name, args.status, args.seconds, args.detail)
    write_report(args.out, args.work)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
