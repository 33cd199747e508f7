"""Fixtures that all tests share."""

from __future__ import annotations

import functools
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import h2o_kv
from op_helpers import CUDA, EMULATED


@pytest.fixture(autouse=True)
def same_start() -> Iterator[None]:
    """The same random numbers, and one thread: for small tensors several are many times slower.

    Tests that are about threads set their number themselves.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


@functools.cache
def load_emulated() -> str | None:
    """Load torch.ops.h2o_emulated, the CUDA operators on CPU tensors; why it is not there, if so."""
    path = os.environ.get("H2O_EMULATED_LIBRARY")
    if path is None:
        return "H2O_EMULATED_LIBRARY is not set (make test-python does)"
    if not Path(path).exists():
        return f"{path} does not exist (make test-cpp builds it)"
    torch.ops.load_library(path)
    return None


@pytest.fixture(params=["cpu", CUDA, EMULATED])
def device(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[torch.device]:
    """Each device that there is an operator for; the others are skipped with the reason.

    "emulated" is the CUDA operators, run on the CPU by tests/cuda_emulation: tensors stay on the
    CPU, torch.ops.h2o is the emulation's, and what is allocated lies in its device memory, where a
    kernel that leaves a tensor runs into a page that cannot be accessed. Threads and blocks run in
    an order of each test's own.
    """
    name: str = request.param
    if name == "cuda" and not h2o_kv.build_info()["cuda"]:
        pytest.skip("h2o_kv was built without CUDA")
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    if name != "emulated":
        yield torch.device(name)
        return
    missing = load_emulated()
    if missing is not None:
        pytest.skip(missing)
    emulated = torch.ops.h2o_emulated
    monkeypatch.setattr(torch.ops, "h2o", emulated)
    emulated.set_seed(zlib.crc32(request.node.nodeid.encode()))
    emulated.device_memory(True)
    yield torch.device("cpu")
    emulated.device_memory(False)
    emulated.set_seed(0)
