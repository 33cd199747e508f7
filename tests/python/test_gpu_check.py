"""benchmarks/gpu_check.sh without a GPU: a dry run reports, and a step that fails is not lost."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu_check.sh"

pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="there are no benchmarks here")


def check(out: Path, *options: str, tools: Path | None = None) -> subprocess.CompletedProcess[str]:
    path = os.environ["PATH"] if tools is None else f"{tools}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OUT": str(out), "PYTHON": sys.executable}
    return subprocess.run(
        [SCRIPT, *options],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env=environment,
    )


def report(out: Path) -> tuple[dict[str, Any], dict[str, tuple[str, str]]]:
    """The whole report; result and detail of each step."""
    whole = json.loads((out / "report.json").read_text())
    return whole, {step["name"]: (step["status"], step["detail"]) for step in whole["steps"]}


def fake_sanitizer(folder: Path, *lines: str) -> Path:
    """A folder with a compute-sanitizer that prints these lines of shell script's output."""
    folder.mkdir()
    tool = folder / "compute-sanitizer"
    tool.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    tool.chmod(0o755)
    return folder


def test_a_dry_run_passes_and_reports(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = check(out, "--dry-run", "--quick", "--commit", "a string")
    assert done.returncode == 0, done.stdout + done.stderr
    whole, steps = report(out)
    results = {name: status for name, (status, _) in steps.items()}
    assert results["build"] == "skipped"
    for name in ("facts", "cases", "tests", "bench"):
        assert results[name] == "passed", steps
    assert whole["facts"]["commit"] == "a string"
    ops = [point["op"] for point in whole["benchmark"]]
    assert ops == ["h2o_attention_decode", "h2o_evict", "h2o_prefill_select"]
    assert all({"copy_share", "x_sdpa"} & point.keys() for point in whole["benchmark"])
    files = list(out.iterdir())
    assert len(files) <= 8
    text = (out / "report.md").read_text()
    assert "| bench | passed |" in text
    assert "not measured: share of the copy's bandwidth" in text


def test_a_sanitizer_that_refuses_is_skipped_with_its_words(tmp_path: Path) -> None:
    tools = fake_sanitizer(
        tmp_path / "bin", 'echo "========= Error: Device not supported"', "exit 1"
    )
    done = check(tmp_path / "out", "--dry-run", "--steps", "memcheck,racecheck", tools=tools)
    assert done.returncode == 0, done.stdout + done.stderr
    _, steps = report(tmp_path / "out")
    for name in ("memcheck", "racecheck"):
        assert steps[name][0] == "skipped"
        assert "compute-sanitizer refuses: ========= Error: Device not supported" in steps[name][1]


def test_a_failing_step_does_not_stop_the_next(tmp_path: Path) -> None:
    tools = fake_sanitizer(
        tmp_path / "bin",
        'case "$2" in',
        'memcheck) echo "========= ERROR SUMMARY: 3 errors"; exit 9;;',
        'racecheck) echo "========= RACECHECK SUMMARY: 0 hazards displayed";;',
        'initcheck) echo "Segmentation fault";;',
        "esac",
    )
    names = ("memcheck", "racecheck", "initcheck", "facts")
    done = check(tmp_path / "out", "--dry-run", "--steps", ",".join(names), tools=tools)
    assert done.returncode == 1, done.stdout + done.stderr
    _, steps = report(tmp_path / "out")
    assert {name: steps[name][0] for name in names} == {
        "memcheck": "failed",
        "racecheck": "passed",
        "initcheck": "failed",
        "facts": "passed",
    }
    assert steps["memcheck"][1] == "exit status 9; ========= ERROR SUMMARY: 3 errors"
    assert "initcheck gave no summary" in steps["initcheck"][1]


def test_a_step_without_time_fails(tmp_path: Path) -> None:
    done = check(tmp_path, "--dry-run", "--steps", "facts,bench", "--minutes", "0")
    assert done.returncode == 1
    _, steps = report(tmp_path)
    assert steps["bench"] == ("failed", "not run: the 0 minutes are over")


def test_the_report_names_targets_and_failures(tmp_path: Path) -> None:
    point = {
        **{"op": "h2o_attention_decode", "dtype": "bfloat16", "batch": 64, "num_q_heads": 32},
        **{"num_kv_heads": 8, "capacity": 2048, "head_dim": 128, "copy_share": 0.83},
        **{"x_sdpa": 1.5, "evict_overhead": 0.07, "median_ms": 0.3, "p10_ms": 0.2, "p90_ms": 0.4},
    }
    (tmp_path / "bench.jsonl").write_text(json.dumps(point) + "\n" + '{"cut off')
    (tmp_path / "tests.xml").write_text(
        '<testsuites><testsuite><testcase classname="a" name="b" time="1"><failure message="no|"/>'
        '</testcase><testcase name="c"/><testcase name="d"><skipped message="one GPU"/></testcase>'
        "</testsuite></testsuites>"
    )
    command = [sys.executable, ROOT / "benchmarks" / "gpu_report.py", "--out", tmp_path]
    command += ["--work", tmp_path, "step", "bench", "failed", "7", "x | y"]
    subprocess.run(command, check=True, timeout=60)
    text = (tmp_path / "report.md").read_text()
    assert "- pass: share of the copy's bandwidth 83.0%, target >= 80%" in text
    assert "- MISS: evicting over not evicting 7.0%, target <= 5%" in text
    assert "tests: 1 passed, 1 failed, 1 skipped.\n- a::b: no|\n- skipped 1: one GPU" in text
    assert "| bench | failed | 7 | x \\| y |" in text
    assert "| 83% | 1.50 x | - | - | - | +7.0% | - | 0.3000 (0.2000-0.4000) |" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--fast"], "unknown option --fast"),
        (["--minutes"], "--minutes needs a value"),
        (["--minutes", "1.5"], "--minutes must be a whole number, got 1.5"),
        (["--dry-run", "--steps", "facts,tets"], "--steps must be of .* got tets"),
    ],
)
def test_bad_options_are_refused(options: list[str], message: str, tmp_path: Path) -> None:
    done = check(tmp_path, *options)
    assert done.returncode == 2
    assert re.search(message, done.stderr)
