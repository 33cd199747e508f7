"""The CUDA operators on the CPU (tests/cuda_emulation), beside what every test of `device` asks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from op_helpers import (
    DTYPES,
    OPERATORS,
    State,
    Tokens,
    assert_bitwise,
    assert_close,
    decode,
    evict,
    operator,
    pad,
    planted_tokens,
    random_state,
    select,
)

pytestmark = [
    pytest.mark.emulated,
    pytest.mark.parametrize("device", ["emulated"], indirect=True),
    pytest.mark.usefixtures("device"),
]


@pytest.fixture
def emulated(device: torch.device) -> Iterator[Any]:
    """torch.ops.h2o_emulated; its device is the default one again afterwards."""
    yield torch.ops.h2o_emulated
    torch.ops.h2o_emulated.set_device()


def case(dtype: torch.dtype) -> tuple[State, Tokens]:
    """Slots in use and empty ones, GQA, padding, a head_dim that no vector width divides evenly."""
    state = random_state(2, 2, 45, 36, dtype, newest=40)
    tokens = planted_tokens(2, 6, 2, 5, 36, dtype, start=40)
    return state, pad(tokens, [[True] * 5, [False, False, True, True, True]])


def results(dtype: torch.dtype, chunk: int) -> list[Tensor]:
    """What the three operators give and leave."""
    state, tokens = case(dtype)
    scores_new = torch.linspace(0, 1, 20, dtype=state.scores.dtype).view(2, 2, 5)
    after = state.clone()
    counts = (2, 20, 10)
    return [
        *decode(after, tokens, counts, chunk=chunk),
        *after,
        evict(state, tokens, scores_new, (2, 4, 4)),
        *state,
        *select(tokens, (1, 2, 2)),
    ]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk", [1, 3])
def test_results_do_not_depend_on_the_order_of_threads(
    dtype: torch.dtype, chunk: int, emulated: Any
) -> None:
    emulated.set_seed(0)
    expected = results(dtype, chunk)
    for seed in range(1, 6):
        emulated.set_seed(seed)
        assert_bitwise(results(dtype, chunk), expected)


@pytest.mark.parametrize("multiprocessors", [1, 3, 1000])
@pytest.mark.parametrize("shared_bytes", [4 * 1024, 227 * 1024])
@pytest.mark.parametrize("chunk", [1, 3])
def test_any_device_gives_the_same_to_rounding(
    multiprocessors: int, shared_bytes: int, chunk: int, emulated: Any
) -> None:
    expected = results(torch.float64, chunk)
    emulated.set_device(multiprocessors, shared_bytes)
    for own, other in zip(results(torch.float64, chunk), expected, strict=True):
        if own.is_floating_point():
            assert_close(own, other, 1e-12)
        else:
            assert torch.equal(own, other)


@pytest.mark.parametrize("op", OPERATORS)
def test_the_schema_is_that_of_the_library(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = str(operator(op).default._schema)
    monkeypatch.undo()
    assert own == str(operator(op).default._schema).replace("h2o::", "h2o_emulated::")


def test_the_kernels_ran(emulated: Any) -> None:
    launches, switches = emulated.launches(), emulated.switches()
    results(torch.float32, 1)
    assert emulated.launches() > launches
    assert emulated.switches() > switches + 1000


def test_a_device_that_cannot_be_is_refused(emulated: Any) -> None:
    with pytest.raises(ValueError, match="multiprocessors must be >= 1, got 0"):
        emulated.set_device(0)
    with pytest.raises(ValueError, match=r"shared_bytes must be in 0\.\.232448, got 232449"):
        emulated.set_device(132, 232449)


def test_traffic_is_counted_by_the_checked_build(emulated: Any) -> None:
    if not emulated.is_checked():
        with pytest.raises(RuntimeError, match="only the checked build counts traffic"):
            emulated.clear_traffic()
        return
    emulated.clear_traffic()
    results(torch.float32, 1)
    for writes in (False, True):
        lines = emulated.traffic(writes)
        assert all(requests > 0 and size > 0 for requests, size, _ in lines.values())
        assert any("decode" in line for line in lines)
