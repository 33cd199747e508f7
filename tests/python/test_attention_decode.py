"""h2o_attention_decode against the reference, step by step, and against itself, bit by bit."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from h2o_kv import ops, reference, trace
from op_helpers import (
    CACHE_LAYOUTS,
    DTYPES,
    LAYOUTS,
    Counts,
    State,
    Tokens,
    assert_bitwise,
    assert_close,
    assert_not_flat,
    bitwise_equal,
    budgets,
    cache_laid_out,
    check_calls,
    decode,
    evict,
    full_attention,
    is_emulated,
    laid_out,
    pad,
    planted_tokens,
    random_state,
    rank_angles,
    reference_decode,
    score_dtype,
)

INF, NAN = math.inf, math.nan
GOLDEN = sorted(trace.list_cases())
HALF = (torch.float16, torch.bfloat16)


# --- worked cases -------------------------------------------------------------------------------


def golden(name: str) -> tuple[dict[str, Any], State, Tokens, Counts, dict[str, Any]]:
    """What must come out, then what goes in: cache, tokens, budget, options."""
    worked = json.loads((trace.CASES_FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    case = trace.load_case(name)
    state = State(case.k_cache, case.v_cache, case.scores, case.positions)
    for tensor in state[:2]:
        tensor[state.positions < 0] = NAN
    tokens = Tokens(case.query, case.k_new, case.v_new, case.position_new)
    options = {"gqa_reduce": case.gqa_reduce, "scale": case.scale, "chunk": case.chunk}
    return worked, state, tokens, (case.num_sink, case.num_heavy, case.num_recent), options


def test_the_hand_example(device: torch.device) -> None:
    worked, state, tokens, counts, options = golden("hand_example")
    before = state.clone()
    output, evicted = decode(state, tokens, counts, device, **options)
    assert evicted.tolist() == [[[worked["victim"]]]]
    assert state.positions.tolist() == [[worked["slots_after"]]]
    assert_close(state.scores[0, 0], torch.tensor(worked["scores_by_slot_after"]).double(), 1e-7)
    assert_close(output[0, 0], torch.tensor(worked["output"]).double(), 1e-6)
    slot = worked["slots_after"].index(11)  # overwritten together, and nothing else
    before.k_cache[0, 0, slot], before.v_cache[0, 0, slot] = tokens.key[0, 0], tokens.value[0, 0]
    assert_bitwise(state[:2], before[:2])


@pytest.mark.parametrize("name", [name for name in GOLDEN if name != "hand_example"])
def test_worked_case_step_by_step(name: str, device: torch.device) -> None:
    worked, state, tokens, counts, options = golden(name)
    chunk, num_steps = options["chunk"], len(worked["steps"])
    assert num_steps == -(-tokens.num // chunk)
    outputs = []
    for i, step in enumerate(worked["steps"]):
        new = tokens.columns(i * chunk, min((i + 1) * chunk, tokens.num))
        output, evicted = decode(state, new, counts, device, **options)
        outputs.append(output)
        for head, want in enumerate(step["heads"]):
            where = f"step {i}, head {head}"
            left = want["victims"] + [-1] * (new.num - len(want["victims"]))
            assert evicted[0, head].tolist() == left, where
            assert state.kept(0, head) == want["kept"], where
            score = dict(zip(want["candidates"], want["scores"], strict=True))
            for position, own in state.score_of(0, head).items():
                assert abs(own - score[position]) < 1e-9, (where, position)
    assert_close(torch.cat(outputs, 2)[0], torch.tensor(worked["output"]).double(), 1e-6)


@pytest.mark.parametrize("name", GOLDEN)
def test_worked_case_in_one_call(name: str, device: torch.device) -> None:
    _, state, tokens, counts, options = golden(name)
    expected = state.clone()
    output, evicted = decode(state, tokens, counts, device, **options)
    true_output, true_evicted, _ = reference_decode(expected, tokens, counts, **options)
    assert torch.equal(evicted, true_evicted)
    assert torch.equal(state.positions, expected.positions)
    assert_bitwise(state[:2], expected[:2])
    assert_close(state.scores, expected.scores, 1e-10)
    assert_close(output, true_output, 1e-10)


# --- random shapes against the reference --------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    batch: int
    kv_heads: int
    group: int
    head_dim: int
    capacity: int
    counts: Counts
    row_budget: tuple[Counts, ...] | None
    newest: int
    full: bool
    num_new: int
    chunk: int
    padded: bool
    gaps: bool
    gqa_reduce: str
    sharpness: float | None  # the scale, in units of the default one
    alibi: str
    rotated: float  # share of head_dim, with position rolling; 0 = without
    position_dtype: torch.dtype
    layout: str
    cache_layout: str
    seed: int


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    batch, capacity = draw(st.integers(1, 3)), draw(st.integers(1, 14))
    num_new = draw(st.integers(0, 12))
    return Problem(
        batch=batch,
        kv_heads=draw(st.integers(1, 3)),
        group=draw(st.integers(1, 8)),
        head_dim=draw(st.sampled_from([1, 2, 3, 8, 15, 16, 17, 31, 64, 80])),
        capacity=capacity,
        counts=draw(budgets(capacity)),
        row_budget=draw(st.none() | st.tuples(*[budgets(capacity)] * batch)),
        newest=draw(st.sampled_from([0, 2, 20])),
        full=draw(st.booleans()),
        num_new=num_new,
        chunk=draw(st.sampled_from([1, 1, 2, 3, 5, num_new + 1, 1000])),
        padded=draw(st.booleans()),
        gaps=draw(st.booleans()),
        gqa_reduce=draw(st.sampled_from(["sum", "max"])),
        sharpness=draw(st.sampled_from([None, 0.5, 1.5])),
        alibi=draw(st.sampled_from(["none", "none", "float32", "float64"])),
        rotated=draw(st.sampled_from([0, 0, 0.3, 1])),
        position_dtype=draw(st.sampled_from([torch.int32, torch.int64])),
        layout=draw(st.sampled_from(LAYOUTS)),
        cache_layout=draw(st.sampled_from(CACHE_LAYOUTS)),
        seed=draw(st.integers(0, 2**16)),
    )


def inputs(p: Problem, dtype: torch.dtype) -> tuple[State, Tokens, dict[str, Any]]:
    q_heads = p.kv_heads * p.group
    state = random_state(
        p.batch, p.kv_heads, p.capacity, p.head_dim, dtype, p.seed, p.newest, p.full
    )
    tokens = planted_tokens(
        p.batch, q_heads, p.kv_heads, p.num_new, p.head_dim, dtype, p.seed, p.newest
    )
    if p.gaps:
        tokens = tokens._replace(position=tokens.position * 2 + 1)
    tokens = tokens._replace(position=tokens.position.to(p.position_dtype))
    if p.padded:
        g = torch.Generator().manual_seed(p.seed)
        tokens = pad(tokens, (torch.rand(p.batch, p.num_new, generator=g) < 0.6).tolist())
    tokens = Tokens(*(laid_out(t, p.layout) for t in tokens[:3]), tokens.position)
    slopes = None
    if p.alibi != "none":
        slopes = torch.linspace(0.02, 0.4, q_heads, dtype=getattr(torch, p.alibi))
    row_budget = None if p.row_budget is None else torch.tensor(p.row_budget)
    scale = None if p.sharpness is None else p.sharpness * p.head_dim**-0.5
    options = {"gqa_reduce": p.gqa_reduce, "scale": scale, "alibi_slopes": slopes}
    pairs = int(p.head_dim * p.rotated / 2)
    if pairs > 0:
        options.update(alibi_slopes=None, **rank_angles(p.capacity + p.num_new, pairs, dtype))
    return state, tokens, {**options, "row_budget": row_budget}


def room_for(tokens: Tokens, layout: str = "contiguous") -> dict[str, Tensor]:
    """Where the operator puts what leaves, full of sevens."""
    sevens = torch.full_like(tokens.key, 7, memory_format=torch.contiguous_format)
    return {name: laid_out(sevens, layout).clone() for name in ("k_evicted", "v_evicted")}


@given(problem=problems())
@settings(deadline=None, derandomize=True, max_examples=500)
def test_equals_the_reference_in_float64(problem: Problem) -> None:
    p = problem
    state, tokens, options = inputs(p, torch.float64)
    expected = state.clone()
    room, true_room = room_for(tokens), room_for(tokens)
    true_output, true_evicted, steps = reference_decode(
        expected, tokens, p.counts, chunk=p.chunk, **true_room, **options
    )
    assume(all(step.margin > 1e-9 for step in steps))
    view = cache_laid_out(state, p.cache_layout)
    output, evicted = decode(view.state, tokens, p.counts, chunk=p.chunk, **room, **options)
    assert_bitwise([*room.values()], [*true_room.values()])
    assert output.shape == tokens.query.shape
    assert_close(output, true_output, 1e-11)
    view.assert_rest_untouched()
    assert torch.equal(evicted, true_evicted)
    assert torch.equal(view.state.positions, expected.positions)
    assert_bitwise(view.state[:2], expected[:2])
    assert_close(view.state.scores, expected.scores, 1e-10)


@given(problem=problems(), dtype=st.sampled_from([torch.float32, *HALF]))
@settings(deadline=None, derandomize=True, max_examples=400)
def test_equals_the_reference_in_other_dtypes(problem: Problem, dtype: torch.dtype) -> None:
    state, tokens, options = inputs(problem, dtype)
    width = min(problem.chunk, max(1, problem.num_new))
    check_calls(state, tokens, problem.counts, width, clear_share=0, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "head_dim", "counts", "width"),
    [
        (1, 1, 8, (0, 4, 4), 1),
        (4, 4, 17, (1, 3, 4), 1),
        (8, 2, 64, (2, 6, 8), 1),
        (8, 1, 80, (0, 0, 5), 1),
        (6, 2, 16, (0, 5, 0), 1),
        (7, 1, 33, (3, 4, 1), 1),
        (8, 2, 64, (2, 6, 8), 7),
        (3, 1, 80, (1, 3, 5), 16),
    ],
)
@pytest.mark.parametrize("gqa_reduce", ["sum", "max"])
def test_a_stream_equals_the_reference_at_every_step(
    dtype: torch.dtype,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    counts: Counts,
    width: int,
    gqa_reduce: str,
    device: torch.device,
) -> None:
    tokens = planted_tokens(2, q_heads, kv_heads, 40, head_dim, dtype, seed=head_dim)
    tokens = pad(tokens, [[False] * 4 + [True] * 36, [True] * 40])
    state = State.empty(2, kv_heads, sum(counts) + 2, head_dim, dtype)
    steps = check_calls(state, tokens, counts, width, device, gqa_reduce=gqa_reduce)
    assert sum(len(step.victims) for step in steps) == 2 * kv_heads * (38 - sum(counts))
    if counts[1] > 0:
        assert_not_flat(state.scores, state.positions)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "capacity", "head_dim"),
    [(8, 2, 2100, 128), (2, 1, 300, 512), (71, 1, 260, 16), (5, 5, 129, 33)],
)
def test_large_shapes(
    dtype: torch.dtype,
    q_heads: int,
    kv_heads: int,
    capacity: int,
    head_dim: int,
    device: torch.device,
) -> None:
    counts = (4, capacity // 2, capacity - 4 - capacity // 2)
    state = random_state(1, kv_heads, capacity, head_dim, dtype, newest=capacity, full=True)
    # One slot in 10 is empty, ranges of slots that no one needs to read among them.
    state.positions[..., 256:384] = -1
    state.positions[..., ::10] = -1
    state.scores.masked_fill_(state.positions < 0, 0)
    tokens = planted_tokens(1, q_heads, kv_heads, 6, head_dim, dtype, start=capacity)
    check_calls(state.clone(), tokens, counts, 1, device)
    counts = (4, capacity // 3, capacity // 3)
    steps = check_calls(state, tokens, counts, 1, device)
    assert all(len(step.victims) == 1 for step in steps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("chunk", [1000, 128])
def test_long_prefill(dtype: torch.dtype, chunk: int, device: torch.device) -> None:
    tokens = planted_tokens(1, 4, 1, 700, 128, dtype)
    state = State.empty(1, 1, 96, 128, dtype)
    steps = check_calls(state, tokens, (4, 60, 32), chunk, device, scale=0.11)
    assert sum(len(step.victims) for step in steps) == 700 - 96
    assert_not_flat(state.scores, state.positions)


def test_a_very_large_batch(device: torch.device) -> None:
    batch = 3_000 if is_emulated() else 70_000
    state = State.empty(batch, 1, 4, 8, torch.float32)
    tokens = planted_tokens(batch, 1, 1, 6, 8, torch.float32)
    output, evicted = decode(state, tokens, (0, 2, 2), device)
    assert output.isfinite().all()
    for row in {0, 1, *(r for r in (32_767, 32_768, 65_535, 65_536) if r < batch), batch - 1}:
        alone = State.empty(1, 1, 4, 8, torch.float32)
        own_output, own_evicted = decode(alone, tokens.row(row), (0, 2, 2), device)
        assert_bitwise([*alone, own_output], [*state.row(row), output[row : row + 1]])
        assert torch.equal(own_evicted[0], evicted[row])
    # Many rows at once against plain arithmetic: what entered is either kept or evicted.
    left = evicted[:, 0].masked_fill(evicted[:, 0] < 0, 0).sum(-1)
    assert torch.equal(left + state.positions[:, 0].sum(-1), torch.full((batch,), 15))


def test_chunks_of_more_rows_than_fit_into_one_workspace() -> None:
    batch, capacity = 5000, 2000  # 10 million sums of columns
    k_cache, v_cache = torch.randn(2, batch, 1, capacity, 1)
    scores = torch.rand(batch, 1, capacity)
    positions = torch.arange(capacity, dtype=torch.int32).repeat(batch, 1, 1)
    state = State(k_cache, v_cache, scores, positions)
    tokens = planted_tokens(batch, 1, 1, 2, 1, torch.float32, start=capacity)
    rows = [0, 1, 4189, 4190, 4191, 4192, batch - 1]
    alone = [state.row(row) for row in rows]
    output, evicted = decode(state, tokens, (4, 1000, 996), chunk=2)
    for row, own in zip(rows, alone, strict=True):
        own_output, own_evicted = decode(own, tokens.row(row), (4, 1000, 996), chunk=2)
        assert_bitwise([*own, own_output], [*state.row(row), output[row : row + 1]])
        assert torch.equal(own_evicted[0], evicted[row])
    assert ((evicted >= 0).sum(-1) == 2).all()
    assert output.isfinite().all()


# --- nothing to do ------------------------------------------------------------------------------


@pytest.mark.parametrize(("batch", "num_new"), [(0, 3), (2, 0), (0, 0)])
@pytest.mark.parametrize("chunk", [1, 4])
def test_empty_calls(batch: int, num_new: int, chunk: int, device: torch.device) -> None:
    state = random_state(batch, 2, 5, 8, torch.float32, newest=9)
    before = state.clone()
    tokens = planted_tokens(batch, 4, 2, num_new, 8, torch.float32, start=9)
    output, evicted = decode(state, tokens, (1, 2, 2), device, chunk=chunk)
    assert output.shape == (batch, 4, num_new, 8)
    assert evicted.shape == (batch, 2, num_new)
    assert_bitwise(state, before)


@pytest.mark.parametrize("chunk", [1, 3])
def test_padding_alone_changes_nothing(chunk: int, device: torch.device) -> None:
    state = random_state(2, 2, 5, 8, torch.bfloat16, newest=9)
    before = state.clone()
    tokens = planted_tokens(2, 4, 2, 6, 8, torch.bfloat16, start=9)
    tokens = pad(tokens, [[False] * 6] * 2)
    output, evicted = decode(state, tokens, (1, 2, 2), device, chunk=chunk)
    assert not output.any()
    assert (evicted == -1).all()
    assert_bitwise(state, before)


def test_any_negative_position_is_padding(device: torch.device) -> None:
    state = State.empty(1, 1, 4, 8, torch.float32)
    tokens = planted_tokens(num=3, dtype=torch.float32)
    tokens = tokens._replace(position=torch.tensor([[-7, 0, -(2**40)]]))
    output, _ = decode(state, tokens, (0, 2, 2), device)
    assert output[0, 0].any(-1).tolist() == [False, True, False]
    assert state.positions.tolist() == [[[0, -1, -1, -1]]]


# --- what leaves --------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
@pytest.mark.parametrize("recent", [0, 3])
@pytest.mark.parametrize("chunk", [1, 4, 50])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_leaves_is_handed_out_in_its_own_bits(
    dtype: torch.dtype, chunk: int, recent: int, layout: str, device: torch.device
) -> None:
    counts = (1, 4, recent)
    tokens = pad(planted_tokens(2, 4, 2, 21, 24, dtype), [[False] * 4 + [True] * 17, [True] * 21])
    state = State.empty(2, 2, sum(counts) + 1, 24, dtype)
    plain = state.clone()
    room = room_for(tokens, layout)
    result = decode(state, tokens, counts, device, chunk=chunk, **room)
    # Nothing else depends on it.
    assert_bitwise([*result, *state], [*decode(plain, tokens, counts, device, chunk=chunk), *plain])
    # Among the new tokens by position, those that left; none of a chunk can be handed out with it.
    _, evicted = result
    handed_out = 0
    for row in range(2):
        columns = {p: c for c, p in enumerate(tokens.position[row].tolist()) if p >= 0}
        order = list(columns.values())
        for head in range(2):
            for column, position in enumerate(evicted[row, head].tolist()):
                own = [tensor[row, head, column] for tensor in room.values()]
                source = columns.get(position)
                if source is not None:
                    same_chunk = order.index(source) // chunk == order.index(column) // chunk
                    source = None if same_chunk else source
                if source is None:
                    assert all((tensor == 7).all() for tensor in own)
                else:
                    handed_out += 1
                    assert_bitwise(own, [t[row, head, source] for t in (tokens.key, tokens.value)])
    assert (handed_out > 0) == (chunk < 50)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_leaves_a_cache_in_use_equals_the_reference(
    dtype: torch.dtype, device: torch.device
) -> None:
    state = random_state(3, 2, 9, 16, dtype, newest=20, full=True)
    tokens = planted_tokens(3, 4, 2, 7, 16, dtype, start=20)
    budget = torch.tensor([[1, 4, 4], [0, 9, 0], [2, 1, 2]])
    for chunk in (1, 3):
        own, other = state.clone(), state.clone()
        room, true_room = room_for(tokens), room_for(tokens)
        options = {"chunk": chunk, "row_budget": budget}
        _, evicted = decode(own, tokens, (1, 1, 1), device, **options, **room)
        _, true_evicted, _ = reference_decode(other, tokens, (1, 1, 1), **options, **true_room)
        assert torch.equal(evicted, true_evicted)
        assert_bitwise([*room.values()], [*true_room.values()])


def test_inputs_may_be_the_room_for_what_leaves(device: torch.device) -> None:
    results = []
    for copied in (True, False):
        state = random_state(1, 2, 6, 16, torch.float32, newest=9, full=True).to(device)
        tokens = planted_tokens(1, 2, 2, 5, 16, torch.float32, start=9).to(device)
        room = [tokens.value.clone(), tokens.key.clone()] if copied else [tokens.value, tokens.key]
        result = ops.attention_decode(
            tokens.query, *state, *tokens[1:], 0, 3, 3, k_evicted=room[0], v_evicted=room[1]
        )
        results.append([*result, *state, *room])
    assert_bitwise(results[1], results[0])


# --- one token at a time, chunks, and the whole prompt ------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("counts", [(2, 3, 4), (0, 6, 0), (0, 0, 7)])
def test_one_call_is_many_calls_in_every_bit(
    dtype: torch.dtype, counts: Counts, device: torch.device
) -> None:
    tokens = planted_tokens(3, 6, 2, 30, 24, dtype)
    tokens = pad(tokens, [[True] * 30, [False] * 9 + [True] * 21, [i % 4 > 0 for i in range(30)]])
    start = random_state(3, 2, 9, 24, dtype)
    together, single = start.clone(), start.clone()
    output, evicted = decode(together, tokens, counts, device)
    parts = [decode(single, tokens.columns(i, i + 1), counts, device) for i in range(30)]
    assert_bitwise(together, single)
    assert bitwise_equal(output, torch.cat([o for o, _ in parts], 2))
    assert torch.equal(evicted, torch.cat([e for _, e in parts], 2))
    assert (evicted >= 0).any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_chunks_in_one_call_are_calls_in_every_bit(
    dtype: torch.dtype, device: torch.device
) -> None:
    tokens = planted_tokens(2, 6, 2, 31, 24, dtype)
    together, single = State.empty(2, 2, 9, 24, dtype), State.empty(2, 2, 9, 24, dtype)
    output, evicted = decode(together, tokens, (2, 3, 4), device, chunk=5)
    parts = [
        decode(single, tokens.columns(i, min(i + 5, 31)), (2, 3, 4), device, chunk=5)
        for i in range(0, 31, 5)
    ]
    assert_bitwise(together, single)
    assert bitwise_equal(output, torch.cat([o for o, _ in parts], 2))
    assert torch.equal(evicted, torch.cat([e for _, e in parts], 2))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("alibi", [False, True])
def test_one_chunk_of_the_prompt_is_full_causal_attention(
    dtype: torch.dtype, alibi: bool, device: torch.device
) -> None:
    tokens = planted_tokens(2, 6, 2, 75, 40, dtype)
    slopes = torch.linspace(0.01, 0.2, 6) if alibi else None
    state = State.empty(2, 2, 12, 40, dtype)
    output, evicted = decode(state, tokens, (2, 6, 4), device, chunk=75, alibi_slopes=slopes)
    expected = full_attention(tokens, alibi_slopes=slopes)
    rounding = {torch.float64: 1e-13, torch.float32: 2e-6, torch.float16: 2e-3}
    assert_close(output, expected, rounding.get(dtype, 1.6e-2))
    assert (evicted >= 0).sum(-1).flatten().tolist() == [63] * 4


@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("room", [0, 1, 30])
def test_a_budget_for_all_is_plain_attention(chunk: int, room: int, device: torch.device) -> None:
    tokens = planted_tokens(2, 4, 2, 40, 32, torch.float32)
    state = State.empty(2, 2, 40 + room, 32, torch.float32)
    output, evicted = decode(state, tokens, (0, 20, 20 + room), device, chunk=chunk, scale=0.3)
    assert_close(output, full_attention(tokens, scale=0.3), 1e-5)
    assert (evicted == -1).all()
    assert state.kept(1, 1) == list(range(40))
    # All queries' mass is there: one for each of the 2 query heads of a group and each token.
    assert_close(state.scores.sum(-1), torch.full((2, 2), 80.0), 1e-3)


def test_a_short_prompt_in_a_larger_budget(device: torch.device) -> None:
    tokens = planted_tokens(num=3, dtype=torch.float32)
    for chunk in (1, 3):
        state = State.empty(1, 1, 8, 8, torch.float32)
        output, _ = decode(state, tokens, (0, 4, 4), device, chunk=chunk)
        assert_close(output, full_attention(tokens), 1e-6)


def test_a_chunked_prefill_keeps_its_budget_and_the_first_sinks(device: torch.device) -> None:
    # 14 tokens, 5 at a time, budget 4: approximate, so not what one shot keeps.
    tokens = planted_tokens(num=14, seed=1)
    state = State.empty(1, 1, 4)
    for begin in range(0, 14, 5):
        new = tokens.columns(begin, min(begin + 5, 14))
        output, _ = decode(state, new, (2, 1, 1), device, chunk=5)
        assert output.any(-1).all()
        kept = state.kept()
        assert len(kept) == 4
        assert kept[:2] == [0, 1]
        assert kept[-1] == min(begin + 5, 14) - 1


# --- the same bits whatever else is in the call -------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("chunk", [1, 4, 50])
def test_a_padded_row_is_the_row_alone(
    dtype: torch.dtype, chunk: int, device: torch.device
) -> None:
    lengths = [20, 13, 1, 0]
    tokens = planted_tokens(4, 6, 2, 20, 16, dtype)
    patterns = [
        [True] * 20,
        [i % 3 > 0 for i in range(20)],
        [False] * 19 + [True],
        [False] * 20,
    ]
    padded = pad(tokens, patterns)
    state = State.empty(4, 2, 7, 16, dtype)
    budgets_of_rows = torch.tensor([[1, 3, 3], [0, 2, 3], [1, 1, 1], [0, 0, 1]])
    output, evicted = decode(
        state, padded, (1, 3, 3), device, chunk=chunk, row_budget=budgets_of_rows
    )
    for row, length in enumerate(lengths):
        real = torch.tensor(patterns[row])
        assert int(real.sum()) == length
        alone = State.empty(1, 2, 7, 16, dtype)
        own = Tokens(
            *(t[row : row + 1][:, :, real] for t in tokens[:3]), torch.arange(length)[None]
        )
        counts = tuple(budgets_of_rows[row].tolist())
        own_output, own_evicted = decode(alone, own, counts, device, chunk=chunk)
        assert_bitwise(alone, state.row(row))
        assert bitwise_equal(own_output[0], output[row][:, real])
        left = evicted[row][evicted[row] >= 0]
        assert torch.equal(own_evicted[own_evicted >= 0], left)


@pytest.mark.parametrize("chunk", [1, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_does_not_see_its_batch(chunk: int, dtype: torch.dtype, device: torch.device) -> None:
    state = random_state(5, 2, 300, 16, dtype, newest=900, full=True)
    tokens = planted_tokens(5, 6, 2, 16, 16, dtype, start=900)
    before = state.clone()
    output, evicted = decode(state, tokens, (4, 200, 90), device, chunk=chunk)
    for rows in ([0], [4], [3, 1], [4, 3, 2, 1, 0]):
        some = State(*(t[rows].clone() for t in before))
        new = Tokens(*(t[rows] for t in tokens))
        own_output, own_evicted = decode(some, new, (4, 200, 90), device, chunk=chunk)
        assert_bitwise(some, [t[rows] for t in state])
        assert_bitwise([own_output, own_evicted], [output[rows], evicted[rows]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("batch", "q_heads", "kv_heads", "capacity", "num_new", "chunk"),
    [(1, 1, 1, 8192, 3, 1), (2, 8, 2, 700, 5, 1), (1, 4, 1, 64, 300, 100), (3, 2, 2, 32, 90, 1000)],
)
def test_results_do_not_depend_on_threads_or_repetition(
    dtype: torch.dtype,
    batch: int,
    q_heads: int,
    kv_heads: int,
    capacity: int,
    num_new: int,
    chunk: int,
) -> None:
    start = random_state(batch, kv_heads, capacity, 64, dtype, newest=2 * capacity, full=True)
    tokens = planted_tokens(batch, q_heads, kv_heads, num_new, 64, dtype, start=2 * capacity)
    counts = (4, capacity // 2, capacity // 4)
    first: tuple[Tensor, ...] = ()
    for threads in (1, 2, 2, 1):
        torch.set_num_threads(threads)
        state = start.clone()
        result = (*decode(state, tokens, counts, chunk=chunk), *state)
        first = first or result
        assert_bitwise(result, first)


@pytest.mark.parametrize("chunk", [1, 3])
def test_a_hundred_repeats_are_equal_in_every_bit(chunk: int, device: torch.device) -> None:
    torch.set_num_threads(2)
    start = random_state(2, 2, 260, 32, torch.float32, newest=500, full=True)
    tokens = planted_tokens(2, 4, 2, 3, 32, torch.float32, start=500)
    first: tuple[Tensor, ...] = ()
    for _ in range(8 if is_emulated() else 100):
        state = start.clone()
        result = (*decode(state, tokens, (4, 100, 100), device, chunk=chunk), *state)
        first = first or result
        assert_bitwise(result, first)


@pytest.mark.parametrize("length", range(1, 18))
def test_short_rows_in_a_cache_of_many_ranges(length: int, device: torch.device) -> None:
    # The tokens lie in slots far apart; most of the cache is empty.
    spread, dense = State.empty(1, 2, 1100, 16), State.empty(1, 2, 18, 16)
    tokens = planted_tokens(1, 4, 2, length + 1, 16)
    slots = torch.linspace(3, 1099, length).long()
    for state, at in ((spread, slots), (dense, torch.arange(length))):
        state.k_cache[:, :, at] = tokens.key[:, :, :length]
        state.v_cache[:, :, at] = tokens.value[:, :, :length]
        state.positions[:, :, at] = torch.arange(length, dtype=torch.int32)
    last = tokens.columns(length, length + 1)
    output, _ = decode(spread, last, (0, 9, 9), device)
    expected, _ = decode(dense, last, (0, 9, 9), device)
    assert_close(output, expected, 1e-14)
    for head in range(2):
        own, other = spread.score_of(0, head), dense.score_of(0, head)
        assert own.keys() == other.keys()
        assert all(abs(own[p] - other[p]) < 1e-14 for p in own)


# --- inputs and caches in any layout ------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("chunk", [1, 6])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strided_inputs(layout: str, chunk: int, dtype: torch.dtype, device: torch.device) -> None:
    tokens = planted_tokens(2, 4, 2, 12, 16, dtype)
    plain, strided = State.empty(2, 2, 6, 16, dtype), State.empty(2, 2, 6, 16, dtype)
    expected = decode(plain, tokens, (1, 2, 3), device, chunk=chunk)
    new = Tokens(*(laid_out(t.to(device), layout) for t in tokens[:3]), tokens.position)
    assert layout == "contiguous" or not new.key.is_contiguous()
    result = decode(strided, new, (1, 2, 3), device, chunk=chunk)
    assert_bitwise([*result, *strided], [*expected, *plain])


@pytest.mark.parametrize("chunk", [1, 6])
def test_expanded_inputs(chunk: int, device: torch.device) -> None:
    one = planted_tokens(1, 2, 1, 12, 8, torch.float32)
    # stride 0 in the batch, and in the heads, as repeat_kv without a copy would make
    tokens = Tokens(
        one.query.expand(3, 2, 12, 8),
        one.key.expand(3, 2, 12, 8),
        one.value.expand(3, 2, 12, 8),
        one.position.expand(3, 12),
    )
    state, plain = State.empty(3, 2, 6, 8, torch.float32), State.empty(3, 2, 6, 8, torch.float32)
    result = decode(state, tokens, (1, 2, 3), device, chunk=chunk)
    expected = decode(
        plain, Tokens(*(t.contiguous() for t in tokens)), (1, 2, 3), device, chunk=chunk
    )
    assert_bitwise([*result, *state], [*expected, *plain])


@pytest.mark.parametrize("cache_layout", CACHE_LAYOUTS)
@pytest.mark.parametrize("chunk", [1, 6])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strided_caches_are_written_through(
    cache_layout: str, chunk: int, dtype: torch.dtype, device: torch.device
) -> None:
    tokens = planted_tokens(2, 4, 2, 12, 16, dtype, start=9)
    start = random_state(2, 2, 6, 16, dtype, newest=9)
    plain, view = start.clone(), cache_laid_out(start.to(device), cache_layout)
    assert cache_layout == "contiguous" or not view.state.k_cache.is_contiguous()
    expected = decode(plain, tokens, (1, 2, 3), device, chunk=chunk)
    result = decode(view.state, tokens, (1, 2, 3), device, chunk=chunk)
    assert_bitwise([*result, *view.state.to("cpu")], [*expected, *plain])
    view.assert_rest_untouched()


def test_strided_positions_budgets_and_slopes(device: torch.device) -> None:
    tokens = planted_tokens(2, 4, 2, 12, 16, torch.float32)
    slopes = torch.linspace(0.1, 0.4, 4)
    row_budget = torch.tensor([[1, 2, 3], [0, 3, 1]])
    plain, strided = (
        State.empty(2, 2, 6, 16, torch.float32),
        State.empty(2, 2, 6, 16, torch.float32),
    )
    expected = decode(plain, tokens, (1, 2, 3), device, alibi_slopes=slopes, row_budget=row_budget)
    position = tokens.position.T.contiguous().T
    result = decode(
        strided,
        tokens._replace(position=position.to(device)),
        (1, 2, 3),
        device,
        alibi_slopes=torch.stack([slopes, slopes + 1], 1).to(device)[:, 0],
        row_budget=row_budget.T.contiguous().to(device).T,
    )
    assert_bitwise([*result, *strided], [*expected, *plain])


# --- who leaves ---------------------------------------------------------------------------------


def test_equal_tokens_leave_from_the_oldest(device: torch.device) -> None:
    # Equal logits, and values that show who was attended; 1/n to each of n candidates.
    zeros = torch.zeros(1, 1, 6, 2)
    tokens = Tokens(zeros, zeros, zeros, torch.arange(6)[None])
    state = State.empty(1, 1, 4, 2, torch.float32)
    _, evicted = decode(state, tokens, (0, 2, 2), device)
    assert evicted.tolist() == [[[-1, -1, -1, -1, 2, 3]]]
    assert state.positions.tolist() == [[[0, 1, 4, 5]]]


@pytest.mark.parametrize("chunk", [1, 2])
def test_among_equals_the_lowest_slot_is_overwritten(chunk: int, device: torch.device) -> None:
    # One position in two slots, which no model makes, with one score.
    tokens = planted_tokens(num=1, head_dim=16, dtype=torch.float32, start=500)
    state = State.empty(1, 1, 64, 16, torch.float32)
    state.k_cache.zero_(), state.v_cache.zero_()
    state.positions[:] = torch.arange(10, 74, dtype=torch.int32)
    state.positions[0, 0, [8, 16]] = 7
    decode(state, tokens, (0, 63, 1), device, chunk=chunk)
    assert (state.positions == 500).nonzero()[:, 2].tolist() == [8]


@pytest.mark.parametrize("num_sink", [0, 2])
def test_the_two_latest_are_there_after_every_step(num_sink: int, device: torch.device) -> None:
    tokens = planted_tokens(num=43, dtype=torch.float32)
    state = State.empty(1, 1, 4 + num_sink, dtype=torch.float32)
    entered_with: dict[int, float] = {}
    for i in range(43):
        before = state.clone()
        _, evicted = decode(state, tokens.columns(i, i + 1), (num_sink, 2, 2), device)
        expected = before.clone()
        _, _, steps = reference_decode(expected, tokens.columns(i, i + 1), (num_sink, 2, 2))
        assert set(state.kept()) >= {max(0, i - 1), i}
        assert evicted.item() != i
        # The newcomer starts from its own weight, not from what the evicted token had.
        own_weight = steps[0].weights[0][0, -1].item()
        assert abs(state.score_of()[i] - own_weight) < 1e-6
        entered_with[i] = own_weight
    assert len(entered_with) == 43
    assert state.kept() != list(range(num_sink)) + list(range(num_sink, num_sink + 2)) + [41, 42]


def test_without_a_recent_window_the_newcomer_may_leave_at_once(device: torch.device) -> None:
    # Two tokens that hold all attention; a third that gets almost none is never written.
    state = State.empty(1, 1, 2, 2, torch.float32)
    key = torch.tensor([[9.0, 0], [9.0, 0], [0, 9.0]]).view(1, 1, 3, 2)
    query = torch.tensor([[1.0, 0]]).expand(1, 1, 3, 2)
    tokens = Tokens(query, key, torch.ones(1, 1, 3, 2), torch.arange(3)[None])
    decode(state, tokens.columns(0, 2), (0, 2, 0), device)
    before = state.clone()
    _, evicted = decode(state, tokens.columns(2, 3), (0, 2, 0), device)
    assert evicted.tolist() == [[[2]]]
    assert_bitwise([state.k_cache, state.v_cache, state.positions], [*before[:2], before.positions])
    assert (state.scores > before.scores).all()


def test_two_sinks_and_a_window_of_three(device: torch.device) -> None:
    tokens = planted_tokens(num=7)
    state = State.empty(1, 1, 5)
    for i in range(7):
        decode(state, tokens.columns(i, i + 1), (2, 0, 3), device)
        assert len(state.kept()) == min(i + 1, 5)
    assert state.kept() == [0, 1, 4, 5, 6]


def last_row_step(
    probabilities: list[list[float]], kv_heads: int, reduce: str, device: torch.device
) -> tuple[State, Tensor]:
    """All tokens but the last are cached with score 0; the last one's query has these weights."""
    weights = torch.tensor(probabilities)
    group, num = len(probabilities) // kv_heads, weights.shape[1]
    key = weights.log().clamp(min=-1e4).view(kv_heads, group, num).transpose(1, 2)[None]
    query = torch.eye(group).repeat(kv_heads, 1)[None, :, None]  # head h reads element h
    state = State.empty(1, kv_heads, num, group, torch.float32)
    state.k_cache[:, :, : num - 1] = key[:, :, :-1]
    state.v_cache[:, :, : num - 1] = 0
    state.positions[:, :, : num - 1] = torch.arange(num - 1, dtype=torch.int32)
    tokens = Tokens(query, key[:, :, -1:], key[:, :, -1:], torch.tensor([[num - 1]]))
    _, evicted = decode(state, tokens, (0, num - 2, 1), device, gqa_reduce=reduce, scale=1.0)
    return state, evicted


def test_query_heads_of_a_group_make_one_score(device: torch.device) -> None:
    weights = [[0.7, 0.1, 0.1, 0.1], [0.1, 0.6, 0.2, 0.1], [0.25] * 4, [0.05, 0.05, 0.05, 0.85]]
    expected = {
        "sum": [[0.8, 0.7, 0.3, 0.2], [0.3, 0.3, 0.3, 1.1]],
        "max": [[0.7, 0.6, 0.2, 0.1], [0.25, 0.25, 0.25, 0.85]],
    }
    for reduce, scores in expected.items():
        state, evicted = last_row_step(weights, 2, reduce, device)
        assert evicted[0, :, 0].tolist() == [2, 0]
        for head, victim in enumerate([2, 0]):
            own = state.score_of(0, head)
            assert own.keys() == set(range(4)) - {victim}
            assert all(abs(own[p] - scores[head][p]) < 1e-6 for p in own)


def test_sum_and_max_evict_differently(device: torch.device) -> None:
    weights = [[0.5, 0.3, 0.2], [0.0, 0.25, 0.75]]
    assert last_row_step(weights, 1, "sum", device)[1].item() == 0
    assert last_row_step(weights, 1, "max", device)[1].item() == 1


def test_alibi_comes_from_original_positions(device: torch.device) -> None:
    # Equal keys; slope 1 per position makes weights e^-distance. Positions 0, 5, 9 and the query 10.
    state = State.empty(1, 1, 4, 2, torch.float32)
    state.k_cache[..., :3, :], state.v_cache[..., :3, :] = 0, 0
    state.positions[0, 0, :3] = torch.tensor([9, 0, 5], dtype=torch.int32)
    zeros = torch.zeros(1, 1, 1, 2)
    tokens = Tokens(zeros, zeros, zeros, torch.tensor([[10]]))
    for chunk in (1, 2):
        own = state.clone()
        decode(own, tokens, (0, 2, 2), device, chunk=chunk, alibi_slopes=torch.ones(1))
        weights = torch.tensor([-1.0, -10, -5, 0]).softmax(0)
        assert_close(own.scores[0, 0], weights, 1e-6)
        assert own.positions.tolist() == [[[9, 0, 5, 10]]]


def test_an_over_full_cache_neither_grows_nor_shrinks(device: torch.device) -> None:
    # Occupied by 6, budget 3: one leaves for each that joins; h2o_evict is what shrinks it.
    start = random_state(1, 1, 8, 4, newest=6, full=True)
    start.positions[0, 0, 6:] = -1
    start = start._replace(scores=start.scores.masked_fill(start.positions < 0, 0))
    tokens = planted_tokens(num=4, head_dim=4, start=6)
    for chunk in (1, 2, 4):
        state, expected = start.clone(), start.clone()
        occupied = len(state.kept())
        _, evicted = decode(state, tokens, (0, 1, 2), device, chunk=chunk)
        _, true_evicted, _ = reference_decode(expected, tokens, (0, 1, 2), chunk=chunk)
        assert torch.equal(evicted, true_evicted)
        assert torch.equal(state.positions, expected.positions)
        assert len(state.kept()) == occupied
    no_tokens = planted_tokens(num=0, head_dim=4)
    evict(state, no_tokens, torch.zeros(1, 1, 0).double(), (0, 1, 2), device)
    assert len(state.kept()) == 3


@pytest.mark.parametrize("chunk", [1, 3])
def test_positions_that_do_not_follow_the_cache(chunk: int, device: torch.device) -> None:
    # The cache is newer than the tokens that join: all of it is recent, so the newcomers give way.
    start = random_state(1, 2, 4, 4, newest=4, full=True)
    start.positions.add_(100)
    tokens = planted_tokens(1, 2, 2, 3, 4, start=10)
    state, expected = start.clone(), start.clone()
    _, evicted = decode(state, tokens, (0, 2, 2), device, chunk=chunk)
    _, true_evicted, _ = reference_decode(expected, tokens, (0, 2, 2), chunk=chunk)
    assert torch.equal(evicted, true_evicted)
    assert torch.equal(state.positions, expected.positions)
    assert (state.positions >= 100).all()


# --- numbers that other projects fell over ------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("filling", [NAN, INF, -INF])
@pytest.mark.parametrize("chunk", [1, 4])
def test_what_lies_in_unused_slots_does_not_matter(
    dtype: torch.dtype, filling: float, chunk: int, device: torch.device
) -> None:
    tokens = planted_tokens(1, 4, 2, 7, 16, dtype)
    results = []
    for fill in (0.0, filling):
        state = State.empty(1, 2, 8, 16, dtype, fill=fill)
        decode(state, tokens.columns(0, 3), (0, 4, 4), device)
        assert (state.scores[..., 3:] == 0).all()
        output, _ = decode(state, tokens.columns(3, 7), (0, 4, 4), device, chunk=chunk)
        results.append((output, state.scores))
        assert (state.scores[..., 7:] == 0).all()
    assert_bitwise(results[1], results[0])
    assert results[0][0].isfinite().all()


@pytest.mark.parametrize("chunk", [1, 3])
def test_fp16_logits_above_the_fp16_range(chunk: int, device: torch.device) -> None:
    # q . k is 288,000 and 32,199 after scaling, beyond the 65,504 of fp16 before it.
    sign = torch.tensor([1.0, 1.0, -1.0]).view(1, 1, 3, 1)
    key = (60 * sign.expand(1, 1, 3, 80)).half()
    value = torch.tensor([2.0, 4.0, 100.0]).view(1, 1, 3, 1).expand(1, 1, 3, 80).half()
    query = torch.full((1, 1, 3, 80), 60.0).half()
    tokens = Tokens(query, key, value, torch.arange(3)[None])
    state = State.empty(1, 1, 3, 80, torch.float16)
    output, _ = decode(state, tokens, (0, 3, 0), device, chunk=chunk)
    assert (output[0, 0, 2] == 3.0).all()
    assert state.scores.tolist() == [[[2.0, 1.0, 0.0]]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("chunk", [1, 2])
def test_extreme_logits_stay_finite(dtype: torch.dtype, chunk: int, device: torch.device) -> None:
    # Logits of +-3e4 and far below each other: weights are 0 or 1, never NaN.
    key = torch.tensor([1.0, -1.0, 0.5, -0.5]).view(1, 1, 4, 1).expand(1, 1, 4, 4) * 100
    query = torch.full((1, 1, 4, 4), 150.0)
    value = torch.arange(4.0).view(1, 1, 4, 1).expand(1, 1, 4, 4) + 1
    tokens = Tokens(query.to(dtype), key.to(dtype), value.to(dtype), torch.arange(4)[None])
    state = State.empty(1, 1, 4, 4, dtype)
    output, _ = decode(state, tokens, (0, 2, 2), device, chunk=chunk)
    assert output[0, 0, :, 0].tolist() == [1.0, 1.0, 1.0, 1.0]
    assert state.scores.tolist() == [[[4.0, 0.0, 0.0, 0.0]]]


@pytest.mark.parametrize("chunk", [1, 2])
@pytest.mark.parametrize("gqa_reduce", ["sum", "max"])
def test_a_nan_shows_in_output_and_scores_and_leaves_first(
    chunk: int, gqa_reduce: str, device: torch.device
) -> None:
    tokens = planted_tokens(1, 2, 1, 6, 8, torch.float32)
    tokens.query[0, 1, 2] = NAN  # one query head of one token
    state = State.empty(1, 1, 8, 8, torch.float32)
    output, _ = decode(state, tokens, (0, 4, 4), device, chunk=chunk, gqa_reduce=gqa_reduce)
    assert output.isnan().any(-1)[0].tolist() == [[False] * 6, [i == 2 for i in range(6)]]
    assert state.scores[0, 0, :6].isnan().tolist() == [True] * 3 + [False] * 3
    no_tokens = planted_tokens(num=0, dtype=torch.float32)
    evicted = evict(state, no_tokens, torch.zeros(1, 1, 0), (0, 2, 2), device)
    assert evicted[0, 0, :2].tolist() == [0, 1]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("what", ["key", "value"])
@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("num", [6, 150])
def test_a_chunk_does_not_look_ahead(
    dtype: torch.dtype, what: str, bad: float, num: int, device: torch.device
) -> None:
    # Weight 0 times NaN is NaN: a token that comes later must not be read at all.
    tokens = planted_tokens(1, 4, 2, num, 8, dtype)
    later = num - 2
    spoilt = tokens._replace(**{what: getattr(tokens, what).clone()})
    getattr(spoilt, what)[0, :, later] = bad
    outputs = []
    for new in (tokens, spoilt):
        state = State.empty(1, 2, num, 8, dtype)
        outputs.append(decode(state, new, (0, 3, num - 3), device, chunk=num)[0])
    assert bitwise_equal(outputs[1][:, :, :later], outputs[0][:, :, :later])
    assert not outputs[1][:, :, later:].isfinite().all()


def test_the_cache_keeps_its_dtype_and_bits(device: torch.device) -> None:
    for dtype in HALF:
        tokens = planted_tokens(num=2, dtype=dtype)
        tokens.value[0, 0, 0] = 0.1621
        state = State.empty(1, 1, 4, 8, dtype)
        decode(state, tokens, (0, 2, 2), device)
        assert state.k_cache.dtype == state.v_cache.dtype == dtype
        assert state.scores.dtype == score_dtype(dtype)
        assert bitwise_equal(state.v_cache[0, 0, :2], tokens.value[0, 0])
        assert abs(state.v_cache[0, 0, 0, 0].item() - 0.1621) < 1e-3


# --- a long stream ------------------------------------------------------------------------------


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_stream_of_20000_steps() -> None:
    counts, head_dim, calls = (4, 28, 32), 16, 100
    state = State.empty(1, 2, 64, head_dim, torch.float32)
    resident = []
    for call in range(calls):
        tokens = planted_tokens(1, 4, 2, 200, head_dim, torch.float32, seed=call, start=200 * call)
        saved = state.clone()
        output, evicted = decode(state, tokens, counts)
        assert output.isfinite().all()
        assert state.scores.isfinite().all()
        resident.append(resident_bytes())
    assert max(resident[20:]) - resident[20] < 4e6
    assert_not_flat(state.scores, state.positions)

    true_output, true_evicted, steps = reference_decode(saved, tokens, counts)
    assert state.scores.max() > 500  # of tokens that have been there for long
    assert min(step.margin for step in steps) > 1e-5, "choose a seed whose decisions are clear"
    assert torch.equal(evicted, true_evicted)
    assert torch.equal(state.positions, saved.positions)
    assert_bitwise(state[:2], saved[:2])
    assert_close(output, true_output, 2e-6)
    torch.testing.assert_close(state.scores, saved.scores, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scale", [0.0, -0.5, 1e-60])
@pytest.mark.parametrize("capacity", [5, 127, 129])
def test_a_scale_of_zero_or_less_is_a_number_like_any_other(scale: float, capacity: int) -> None:
    torch.manual_seed(capacity)
    query, new = torch.randn(1, 4, 1, 8), torch.randn(1, 2, 1, 8)
    state = (
        torch.randn(1, 2, capacity, 8),
        torch.randn(1, 2, capacity, 8),
        torch.rand(1, 2, capacity),
        torch.arange(capacity, dtype=torch.int32).expand(1, 2, -1).contiguous(),
    )
    exact = [t.double() if t.is_floating_point() else t.clone() for t in state]
    position, counts = torch.tensor([[capacity]]), (0, capacity - 1, 1)
    output, left = ops.attention_decode(query, *state, new, new, position, *counts, scale=scale)
    expected, expected_left = reference.attention_decode(
        query.double(), *exact, new.double(), new.double(), position, *counts, scale=scale
    )
    torch.testing.assert_close(output.double(), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(state[2].double(), exact[2], atol=1e-5, rtol=0)
    assert torch.equal(left, expected_left)


@pytest.mark.parametrize("chunk", [1, 2])
@pytest.mark.parametrize("group_size", [1, 4, 5, 8, 9])
def test_equal_tokens_have_equal_scores_wherever_they_lie(group_size: int, chunk: int) -> None:
    capacity, num_others = 21, 4
    for seed in range(60):
        torch.manual_seed(seed)
        keys = torch.randn(1, 1, 1, 16).expand(1, 1, capacity, 16).clone()
        keys[:, :, 8 : 8 + num_others] = torch.randn(num_others, 16)
        others = range(capacity - 8 - num_others, capacity - 8)  # their positions
        values, scores = torch.randn(1, 1, capacity, 16), torch.full((1, 1, capacity), 0.3)
        positions = torch.arange(capacity - 1, -1, -1, dtype=torch.int32)[None, None]
        query, new = torch.randn(1, group_size, chunk, 16), torch.randn(1, 1, chunk, 16)
        at = torch.arange(capacity, capacity + chunk)[None]
        found = []
        for stride in (1, 3):
            strided = scores.repeat_interleave(stride, -1)[..., ::stride]
            state = (keys.clone(), values.clone(), strided, positions.clone())
            counts = (0, capacity - chunk, chunk)
            _, left = ops.attention_decode(query, *state, new, new, at, *counts, chunk=chunk)
            equal = [position for position in range(capacity) if position not in others]
            # Of equal tokens the oldest ones leave.
            gone = [position for position in left[0, 0].tolist() if position not in others]
            assert gone == equal[: len(gone)]
            alike = torch.isin(state[3][0, 0], torch.tensor(equal))
            assert len(state[2][0, 0, alike].unique()) == 1
            found.append(state[2].clone())
        assert torch.equal(*found)
