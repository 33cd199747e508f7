"""The CUDA operators on a GPU: what no CPU can show, and random cases larger than the emulation's.

Tests that say something in the emulation too take the fixture `device` on both; the others are
skipped without a GPU.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from op_helpers import (
    CACHE_LAYOUTS,
    CUDA,
    DTYPES,
    EMULATED,
    LAYOUTS,
    OUTPUT_ATOL,
    SCORE_TOLERANCE,
    Counts,
    State,
    Tokens,
    assert_bitwise,
    assert_close,
    bitwise_equal,
    check_calls,
    check_selection,
    decode,
    evict,
    is_emulated,
    laid_out,
    operator,
    pad,
    planted_tokens,
    random_state,
    reference_evict,
    select,
)

on_cuda_operators = pytest.mark.parametrize("device", [CUDA, EMULATED], indirect=True)
on_a_gpu = pytest.mark.parametrize("device", [CUDA], indirect=True)

GROUP_SIZES = (1, 3, 7, 8, 16)
HEAD_DIMS = (64, 80, 96, 128, 256)
OCCUPANCIES = (0, 1, 31, 33, 2048)
CASES_OF_BLOCK = 10


def is_scaled_down() -> bool:
    """Whether a test runs on the emulation, and not in full (H2O_FULL_CASES=1; minutes)."""
    return is_emulated() and not os.environ.get("H2O_FULL_CASES")


# --- random cases -------------------------------------------------------------------------------


def cases(block: int) -> Iterator[random.Random]:
    """The random numbers of each case of a block; the emulation has time for one of them."""
    for case in range(1 if is_scaled_down() else CASES_OF_BLOCK):
        yield random.Random(1000 * block + case)


def a_state(r: random.Random, dtype: torch.dtype, head_dim: int, heads: int) -> State:
    """Two rows, one of them empty in one case of three, with a few empty slots or none."""
    occupancy = r.choice(OCCUPANCIES)
    if is_scaled_down():
        occupancy = min(occupancy, 300)
    capacity = max(1, occupancy + r.choice((0, 0, 1, 5)))
    state = random_state(2, heads, capacity, head_dim, dtype, r.randrange(10**6), occupancy, True)
    if r.random() < 1 / 3:
        row = r.randrange(2)
        for cache in state[:2]:
            cache[row] = math.nan
        state.scores[row] = 0
        state.positions[row] = -1
    return state


def a_budget(r: random.Random, capacity: int) -> Counts:
    """The whole capacity or less, any part of which may be 0."""
    total = r.choice((capacity, max(1, capacity - r.randrange(4)), r.randint(1, capacity)))
    num_sink = min(total, r.choice((0, 0, 1, 4)))
    num_heavy = r.choice((0, total - num_sink, r.randint(0, total - num_sink)))
    return num_sink, num_heavy, total - num_sink - num_heavy


@on_cuda_operators
@pytest.mark.parametrize("block", range(20))
def test_random_steps_equal_the_reference_and_the_cpu(block: int, device: torch.device) -> None:
    for r in cases(block):
        dtype, head_dim, group = r.choice(DTYPES), r.choice(HEAD_DIMS), r.choice(GROUP_SIZES)
        heads = r.choice((1, 2))
        state = a_state(r, dtype, head_dim, heads)
        counts = a_budget(r, state.k_cache.shape[2])
        num, start = r.randint(1, 3), int(state.positions.max()) + 1
        seed = r.randrange(10**6)
        tokens = planted_tokens(2, group * heads, heads, num, head_dim, dtype, seed, start)
        if num > 1 and r.random() < 0.5:
            tokens = pad(tokens, [[False] * (num - 1) + [True], [True] * num])
        layouts = r.choice(LAYOUTS), r.choice(CACHE_LAYOUTS)
        options: Any = {"gqa_reduce": r.choice(("sum", "max")), "layouts": layouts}
        first, on_cpu = tokens.columns(0, 1), state.clone()
        own = state.clone()
        steps = check_calls(own, first, counts, 1, device, clear_share=0, **options)
        expected, left = decode(on_cpu, first, counts, **options)
        again = state.clone()
        output, evicted = decode(again, first, counts, device, **options)
        assert_bitwise(again, own)
        assert_close(output, expected, 2 * OUTPUT_ATOL[dtype])
        for step in steps:
            at = step.row, step.head
            tolerance = SCORE_TOLERANCE[dtype] * (group + step.scores.abs().max().item())
            if step.margin > 2 * tolerance:
                assert torch.equal(evicted[at], left[at])
                assert torch.equal(own.positions[at], on_cpu.positions[at])
                assert_close(own.scores[at], on_cpu.scores[at], tolerance)
        width = r.choice((1, 1, num))
        check_calls(state, tokens, counts, width, device, clear_share=0, **options)


@on_cuda_operators
@pytest.mark.parametrize("block", range(20))
def test_the_same_scores_evict_the_same_tokens(block: int, device: torch.device) -> None:
    for r in cases(block):
        dtype, head_dim = r.choice(DTYPES), r.choice((8, *HEAD_DIMS))
        state = a_state(r, dtype, head_dim, 2)
        if r.random() < 0.5:  # ties, of both zeros and of NaN too
            values = torch.tensor([0.0, -0.0, 0.5, 1.0, math.nan], dtype=state.scores.dtype)
            g = torch.Generator().manual_seed(r.randrange(10**6))
            tied = values[torch.randint(0, 5, state.scores.shape, generator=g)]
            state.scores.copy_(torch.where(state.positions >= 0, tied, state.scores))
        num, start = r.randrange(4), int(state.positions.max()) + 1
        tokens = planted_tokens(2, 2, 2, num, head_dim, dtype, r.randrange(10**6), start)
        scores_new = torch.linspace(0, 1, 4 * num, dtype=state.scores.dtype).view(2, 2, num)
        counts = a_budget(r, state.k_cache.shape[2])
        on_cpu, expected = state.clone(), state.clone()
        left = evict(state, tokens, scores_new, counts, device)
        assert torch.equal(left, evict(on_cpu, tokens, scores_new, counts))
        assert torch.equal(left, reference_evict(expected, tokens, scores_new, counts)[0])
        assert_bitwise(state, on_cpu)
        assert_bitwise(state[:2], expected[:2])
        assert torch.equal(state.positions, expected.positions)


@on_cuda_operators
@pytest.mark.parametrize("block", range(10))
def test_random_prompts_equal_the_reference(block: int, device: torch.device) -> None:
    for r in cases(block):
        dtype, head_dim, group = r.choice(DTYPES), r.choice(HEAD_DIMS), r.choice(GROUP_SIZES)
        num = r.choice((1, 31, 33, 64, 129) if is_emulated() else (1, 33, 64, 200, 513))
        tokens = planted_tokens(2, group, 1, num, head_dim, dtype, r.randrange(10**6))
        tokens = pad(tokens, [[i >= num // 3 for i in range(num)], [True] * num])
        query, key, value = (laid_out(t, r.choice(LAYOUTS)) for t in tokens[:3])
        tokens = Tokens(query, key, value, tokens.position)
        reduce = r.choice(("sum", "max"))
        check_selection(tokens, a_budget(r, num), device, clear_share=0, gqa_reduce=reduce)


# --- how the work is split ----------------------------------------------------------------------


@on_cuda_operators
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_alone_is_the_row_in_a_large_batch(dtype: torch.dtype, device: torch.device) -> None:
    """Alone, many blocks share a head; in the batch, one or two do."""
    batch, heads, capacity = (4, 1, 600) if is_emulated() else (64, 8, 2300)
    seeds = [1, 2] if is_emulated() else range(8)
    rows = [random_state(1, heads, capacity, 64, dtype, s, capacity + 50, True) for s in seeds]
    state = State(*(torch.cat([row[i] for row in rows]) for i in range(4)))
    state = State(*(t.repeat(batch // len(rows), *[1] * (t.ndim - 1)) for t in state))
    tokens = planted_tokens(batch, 4 * heads, heads, 3, 64, dtype, start=capacity + 50)
    counts, checked = (4, capacity // 2, capacity // 2 - 4), (0, batch // 2, batch - 1)
    alone = [state.row(row) for row in checked]
    output, evicted = decode(state, tokens, counts, device)
    for row, own in zip(checked, alone, strict=True):
        own_output, own_evicted = decode(own, tokens.row(row), counts, device)
        assert_bitwise([*own, own_output], [*state.row(row), output[row : row + 1]])
        assert torch.equal(own_evicted[0], evicted[row])


@pytest.mark.parametrize("device", [EMULATED], indirect=True)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_number_of_blocks_gives_the_same_bits(dtype: torch.dtype, device: torch.device) -> None:
    start = random_state(1, 2, 1100, 64, dtype, newest=1200, full=True)
    tokens = planted_tokens(1, 6, 2, 2, 64, dtype, start=1200)
    expected: list[Tensor] = []
    try:
        for multiprocessors in (132, 1, 2, 3, 1000):
            torch.ops.h2o_emulated.set_device(multiprocessors)
            state = start.clone()
            result = [*decode(state, tokens, (4, 500, 400), device), *state]
            expected = expected or result
            assert_bitwise(result, expected)
    finally:
        torch.ops.h2o_emulated.set_device()


# --- streams, graphs, synchronisation, memory ---------------------------------------------------


Step = Callable[[], tuple[Tensor, ...]]


def steps_on(
    device: torch.device, chunk: int = 1, batch: int = 2, dtype: torch.dtype = torch.bfloat16
) -> tuple[State, list[Step]]:
    """A full cache on the device, and 20 calls on it; all that they read is on the device."""
    state = random_state(batch, 2, 700, 64, dtype, newest=700, full=True).to(device)
    tokens = planted_tokens(batch, 8, 2, 20 * chunk, 64, dtype, start=700).to(device)
    budget = torch.tensor([[4, 300, 300]] * batch, device=device)
    slopes = torch.linspace(0, 0.1, 8, device=device)

    def step_of(new: Tokens) -> Step:
        return lambda: tuple(
            operator("decode")(
                new.query, *state, *new[1:], 4, 300, 300,
                chunk=chunk, row_budget=budget, alibi_slopes=slopes,
            )
        )  # fmt: skip

    return state, [step_of(tokens.columns(i * chunk, (i + 1) * chunk)) for i in range(20)]


def other_operators(device: torch.device) -> tuple[State, Step]:
    """h2o_evict on a cache and h2o_prefill_select on a prompt."""
    state = random_state(2, 2, 700, 64, torch.bfloat16, 1, 700, True).to(device)
    prompt = planted_tokens(2, 8, 2, 300, 64, torch.bfloat16).to(device)
    new = planted_tokens(2, 2, 2, 2, 64, torch.bfloat16, start=700).to(device)
    scores_new = torch.tensor([0.5, 0.7], device=device).expand(2, 2, 2)

    def call() -> tuple[Tensor, ...]:
        evicted = operator("evict")(*state, new.key, new.value, scores_new, new.position, 4, 99, 99)
        return (evicted, *operator("select")(prompt.query, prompt.key, prompt.position, 4, 50, 50))

    return state, call


@on_a_gpu
@pytest.mark.parametrize("chunk", [1, 5])
@pytest.mark.parametrize("batch", [1, 64])
def test_a_graph_of_20_steps_replays_what_eager_does(
    chunk: int, batch: int, device: torch.device
) -> None:
    state, steps = steps_on(device, chunk, batch)
    start = state.clone()
    expected = [t.clone() for step in steps for t in step()]
    expected += [t.clone() for t in state]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [t for step in steps for t in step()]
    for _ in range(2):
        for own, tensor in zip(state, start, strict=True):
            own.copy_(tensor)
        graph.replay()
        assert_bitwise([t.cpu() for t in [*captured, *state]], [t.cpu() for t in expected])


@on_a_gpu
def test_a_graph_of_the_other_operators(device: torch.device) -> None:
    state, call = other_operators(device)
    start = state.clone()
    expected = [t.clone() for t in [*call(), *state]]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for own, tensor in zip(state, start, strict=True):
        own.copy_(tensor)
    graph.replay()
    assert_bitwise([t.cpu() for t in [*captured, *state]], [t.cpu() for t in expected])


@on_a_gpu
@pytest.mark.parametrize("chunk", [1, 5])
def test_a_side_stream_waits_for_its_own_work_alone(chunk: int, device: torch.device) -> None:
    """The inputs come late, on the side stream: another stream would read what was there before."""
    expected_state, steps = steps_on(device, chunk)
    expected = [t for step in steps for t in step()] + list(expected_state)
    state, steps = steps_on(device, chunk)
    late = state.clone()
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):  # once, so that later no memory must be had from the driver
        warm = [t for step in steps for t in step()]
    torch.cuda.synchronize()
    del warm
    for tensor in state:
        tensor.zero_()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(500_000_000)  # about 0.3 s
        for own, tensor in zip(state, late, strict=True):
            own.copy_(tensor, non_blocking=True)
        results = [t for step in steps for t in step()]
        done = torch.cuda.Event()
        done.record()
    assert not done.query()  # nothing has waited
    side.synchronize()
    assert_bitwise([t.cpu() for t in [*results, *state]], [t.cpu() for t in expected])


@on_a_gpu
def test_a_device_that_is_not_the_current_one(device: torch.device) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU")
    expected_state, steps = steps_on(torch.device("cuda:0"))
    expected = [t.cpu() for step in steps for t in step()] + [t.cpu() for t in expected_state]
    state, steps = steps_on(torch.device("cuda:1"))
    assert torch.cuda.current_device() == 0
    results = [t for step in steps for t in step()] + list(state)
    assert all(t.device.index == 1 for t in results)
    assert torch.cuda.current_device() == 0
    assert_bitwise([t.cpu() for t in results], expected)


@pytest.fixture
def synchronisation_is_an_error() -> Iterator[None]:
    """Any wait of the host for the GPU raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@on_a_gpu
@pytest.mark.parametrize("chunk", [1, 5])
def test_the_host_never_waits(chunk: int, device: torch.device, request: Any) -> None:
    _, steps = steps_on(device, chunk)
    _, call = other_operators(device)
    request.getfixturevalue("synchronisation_is_an_error")
    with pytest.raises(RuntimeError, match="synchroniz"):  # the mode works
        torch.ones(1, device=device).item()
    for step in [*steps, call]:
        step()


@on_a_gpu
@pytest.mark.parametrize("batch", [1, 64])
@pytest.mark.parametrize("chunk", [1, 5])
def test_memory_is_flat(batch: int, chunk: int, device: torch.device) -> None:
    """A step leaves nothing behind but its results, and takes no more than the last one did."""
    state, steps = steps_on(device, chunk, batch, torch.float16)
    steps[0]()
    torch.cuda.synchronize()
    of_state = sum(t.numel() * t.element_size() for t in state)
    current, reserved, peaks = torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), set()
    for i in range(100):
        torch.cuda.reset_peak_memory_stats()
        steps[i % 20]()
        peaks.add(torch.cuda.max_memory_allocated() - current)
        assert torch.cuda.memory_allocated() == current
    assert torch.cuda.memory_reserved() == reserved
    assert len(peaks) == 1
    assert peaks.pop() < of_state


# --- very large ---------------------------------------------------------------------------------


@on_a_gpu
def test_a_cache_of_more_than_2_31_elements(device: torch.device) -> None:
    heads, capacity, head_dim = 8, 2_200_000, 128
    elements = heads * capacity * head_dim
    assert elements > 2**31
    free, _ = torch.cuda.mem_get_info()
    if free < 20 * 2**30:
        pytest.skip(f"needs 20 GiB of GPU memory, {free / 2**30:.0f} GiB are free")
    half = {"dtype": torch.float16, "device": device}
    g = torch.Generator(device).manual_seed(0)
    k_cache, v_cache = (
        torch.randn(1, heads, capacity, head_dim, generator=g, **half) for _ in range(2)
    )
    scores = 1 + torch.rand(1, heads, capacity, generator=g, device=device)
    positions = torch.arange(capacity, dtype=torch.int32, device=device).repeat(1, heads, 1)
    query, key, value = (torch.randn(1, heads, 1, head_dim, generator=g, **half) for _ in range(3))
    at = torch.tensor([[capacity]], device=device)
    for head in range(heads):  # who must leave, with a quarter of the attention
        q, slot = query[0, head, 0].float(), capacity - 1 - head
        k_cache[0, head, slot] = 14 * head_dim**0.5 / (q @ q) * q
        scores[0, head, slot] = 0
    before = scores.clone()
    expected = []
    for head in range(heads):  # float32 of one head alone is 1.1 GB
        keys, values = (
            torch.cat([c[0, head], new[0, head]]).float()
            for c, new in ((k_cache, key), (v_cache, value))
        )
        weights = torch.softmax(keys @ query[0, head, 0].float() * head_dim**-0.5, 0)
        expected.append((weights @ values, weights))
        del keys, values
    counts = (0, capacity, 0)
    output, evicted = operator("decode")(
        query, k_cache, v_cache, scores, positions, key, value, at, *counts
    )
    for head, (true_output, weights) in enumerate(expected):
        slot = capacity - 1 - head
        # With no recent window the new token leaves if its own weight is the lowest, and it is.
        assert evicted[0, head, 0] == capacity
        assert_close(output[0, head, 0], true_output, OUTPUT_ATOL[torch.float16])
        assert_close(scores[0, head] - before[0, head], weights[:-1], 5e-7)
        assert 0.1 < scores[0, head, slot] < 0.4
        assert positions[0, head, slot] == slot
    # And with one: the planted token leaves, and its slot, far above 2**31, is overwritten.
    _, evicted = operator("decode")(
        query, k_cache, v_cache, scores, positions, key, value, at, 0, capacity - 1, 1
    )
    for head in range(heads):
        slot = capacity - 1 - head
        assert evicted[0, head, 0] == slot
        assert positions[0, head, slot] == capacity
        assert bitwise_equal(k_cache[0, head, slot], key[0, head, 0])
        assert bitwise_equal(v_cache[0, head, slot], value[0, head, 0])


@on_a_gpu
def test_results_come_from_the_gpu(device: torch.device) -> None:
    """What the other tests compare was computed there: the results are on the device."""
    state, steps = steps_on(device)
    assert all(t.is_cuda for t in [*steps[0](), *state])
    selected, scores = select(planted_tokens(num=40, head_dim=64), (0, 5, 5), device)
    assert selected.shape == scores.shape == (1, 1, 10)


@on_cuda_operators
def test_a_group_too_large_for_an_index_is_refused(device: torch.device) -> None:
    group = 2**29 + 1
    query = torch.ones(1, 1, 1, 1, device=device).expand(1, group, 1, 1)
    state, new = State.empty(1, 1, 4, 1, torch.float32).to(device), query[:, :1]
    position = torch.zeros(1, 1, dtype=torch.int64, device=device)
    message = r"num_q_heads / num_kv_heads must be <= 536870912 on CUDA, got 536870913"
    with pytest.raises(RuntimeError, match=message):
        torch.ops.h2o.h2o_attention_decode(query, *state, new, new, position, 0, 4, 0)
    assert (state.positions == -1).all()
