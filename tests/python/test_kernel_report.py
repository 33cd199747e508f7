"""benchmarks/kernel_report.py: what is known of the CUDA kernels without a GPU stays within limits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import h2o_kv

ROOT = Path(__file__).resolve().parents[2]
REPORT = ROOT / "benchmarks" / "kernel_report.py"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    if not h2o_kv.build_info()["cuda"]:
        pytest.skip("h2o_kv was built without CUDA")
    if not os.environ.get("H2O_EMULATED_LIBRARY"):
        pytest.skip("H2O_EMULATED_LIBRARY is not set")
    emulated = Path(os.environ["H2O_EMULATED_LIBRARY"]).with_name("libh2o_emulated_checked.so")
    path = tmp_path_factory.mktemp("report") / "report.json"
    command = [sys.executable, str(REPORT), "--json", str(path), "--emulated", str(emulated)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if "there is no cuobjdump" in done.stderr:
        pytest.skip("there is no cuobjdump")
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(path.read_text())
    return result


def test_no_kernel_spills_and_two_blocks_fit(report: dict[str, Any]) -> None:
    kernels = report["kernels"]
    assert {kernel["arch"] for kernel in kernels} == {"sm_80", "sm_90"}
    names = {kernel["name"].partition("<")[0] for kernel in kernels}
    assert {"decode_step", "prompt_scores", "prompt_statistics", "select_and_store"} <= names
    for kernel in kernels:
        assert kernel["stack_bytes"] == kernel["spill_instructions"] == 0, kernel
        assert kernel["registers"] <= 128, kernel


def test_keys_and_values_are_loaded_16_bytes_at_a_time(report: dict[str, Any]) -> None:
    wide = {kernel["name"]: kernel["wide_loads"] for kernel in report["kernels"]}
    for dtype, elements in (("float", 4), ("Half", 8), ("BFloat16", 8), ("double", 2)):
        # Loops over keys and over values (of one block alone, and of several) unrolled by four.
        vectors = f"DecodeVectors<{dtype}, {elements}, 4, true>"
        assert wide[f"decode_step<{dtype}, {vectors}>"] >= 12
    assert wide["decode_step<Half, DecodeMatrices<Half>>"] > 0
    assert (
        wide["decode_step<Half, DecodeVectors<Half, 8, 4, false>>"] == 0
    )  # the one for cache tensors that are not aligned


def test_a_step_is_one_launch_that_reads_keys_and_values_once(report: dict[str, Any]) -> None:
    if "steps" not in report:
        pytest.skip("the checked emulation is not built (make test-cpp)")
    for step in report["steps"]:
        assert step["launches"] == 1, step
        # The weights of 16 heads at 2,048 slots fill most of the shared memory.
        assert step["blocks_per_multiprocessor"] >= (2 if step["group_size"] <= 8 else 1), step
        alone = step["blocks"] == step["row_heads"]
        # Blocks that share a head each read the queries, and leave the group's weights and their
        # parts of the output, 4 bytes each, for the last one to read; they stay in the L2 cache.
        elements = step["row_heads"] * step["capacity"] + step["blocks"] * step["head_dim"]
        parts = 0 if alone else 2 * 4 * step["group_size"] * elements
        moved = step["read_bytes"] + step["written_bytes"] - step["score_bytes"] - parts
        assert moved <= (1.05 if alone else 1.08) * step["floor_bytes"], step
