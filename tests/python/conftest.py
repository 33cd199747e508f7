"""Fixtures that all tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import h2o_kv


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


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each device that there is an operator for; the others are skipped with the reason."""
    name: str = request.param
    if name == "cuda" and not h2o_kv.build_info()["cuda"]:
        pytest.skip("h2o_kv was built without CUDA")
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    return torch.device(name)
