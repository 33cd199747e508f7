"""h2o_evict: given the same scores, exactly the reference's victims, slots and bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cases import EVICT_CASES, INF, NAN, EvictCase
from h2o_kv import reference
from op_helpers import (
    CACHE_LAYOUTS,
    DTYPES,
    LAYOUTS,
    Counts,
    State,
    Tokens,
    assert_bitwise,
    bitwise_equal,
    budgets,
    cache_laid_out,
    evict,
    laid_out,
    pad,
    planted_tokens,
    random_state,
    reference_evict,
    score_dtype,
)

CPU = torch.device("cpu")


def assert_same(
    state: State,
    tokens: Tokens,
    scores_new: Tensor,
    counts: Counts,
    device: torch.device = CPU,
    row_budget: Tensor | None = None,
) -> Tensor:
    """Operator and reference on copies of the state: everything equal in every bit."""
    actual, expected = state.clone(), state.clone()
    evicted = evict(actual, tokens, scores_new, counts, device, row_budget)
    true_evicted, _ = reference_evict(expected, tokens, scores_new, counts, row_budget)
    assert torch.equal(evicted, true_evicted), f"{evicted}\n{true_evicted}"
    assert_bitwise(actual, expected)
    for tensor, result in zip(state, actual, strict=True):
        tensor.copy_(result)
    return evicted


def no_tokens(state: State, batch: int = 1, heads: int = 1) -> tuple[Tokens, Tensor]:
    tokens = planted_tokens(batch, heads, heads, 0, state.k_cache.shape[-1], state.k_cache.dtype)
    return tokens, state.scores.new_zeros(batch, heads, 0)


# --- worked by hand -----------------------------------------------------------------------------


@pytest.mark.parametrize("case", EVICT_CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_case_worked_by_hand(case: EvictCase, dtype: torch.dtype, device: torch.device) -> None:
    capacity, num_new = len(case.positions), len(case.new)
    state = State.empty(1, 1, capacity, 4, dtype)
    state.positions[0, 0] = torch.tensor(case.positions, dtype=torch.int32)
    state.scores[0, 0] = torch.tensor(case.scores, dtype=state.scores.dtype)
    occupied = state.positions >= 0
    state.k_cache[occupied] = state.positions[occupied][:, None].to(dtype)
    state.v_cache[occupied] = -state.k_cache[occupied]
    before = state.clone()
    tokens = planted_tokens(num=num_new, head_dim=4, dtype=dtype)
    position = torch.tensor([[p for p, _ in case.new]], dtype=torch.int64).view(1, num_new)
    key = position[:, None, :, None].expand(1, 1, num_new, 4).to(dtype)
    tokens = Tokens(tokens.query, key, -key, position)
    scores_new = torch.tensor([s for _, s in case.new], dtype=state.scores.dtype)

    evicted = evict(state, tokens, scores_new.view(1, 1, num_new), case.counts, device)

    left = list(case.victims) + [-1] * (capacity + num_new - len(case.victims))
    assert evicted.dtype == torch.int32
    assert evicted.tolist() == [[left]]
    assert state.positions.tolist() == [[list(case.positions_after)]]
    scores_after = torch.tensor([[case.scores_after]], dtype=state.scores.dtype)
    assert bitwise_equal(state.scores, scores_after), state.scores
    for slot, position_after in enumerate(case.positions_after):
        if position_after >= 0:
            assert state.k_cache[0, 0, slot].tolist() == [position_after] * 4
            assert state.v_cache[0, 0, slot].tolist() == [-position_after] * 4
        else:  # the bytes of a freed slot stay
            assert bitwise_equal(state.k_cache[0, 0, slot], before.k_cache[0, 0, slot])
            assert bitwise_equal(state.v_cache[0, 0, slot], before.v_cache[0, 0, slot])


# --- the rules ----------------------------------------------------------------------------------


def test_rows_and_heads_decide_for_themselves(device: torch.device) -> None:
    # Scores summed over the batch would evict slot 2 in both rows.
    state = State.empty(2, 1, 4, 2)
    state.scores[:, 0] = torch.tensor([[9.0, 1, 2, 3], [1, 9, 2, 3]])
    state.positions[:] = torch.arange(4, dtype=torch.int32)
    tokens, scores_new = no_tokens(state, 2)
    evicted = evict(state, tokens, scores_new, (0, 2, 1), device)
    assert evicted[:, 0, :2].tolist() == [[1, -1], [0, -1]]
    assert state.positions[:, 0].tolist() == [[0, -1, 2, 3], [-1, 1, 2, 3]]


@pytest.mark.parametrize("score", [1.0, 0.0, 3e38, INF, -INF, NAN])
@pytest.mark.parametrize("num_sink", [0, 2])
def test_flat_scores_keep_what_is_protected(
    score: float, num_sink: int, device: torch.device
) -> None:
    state = State.empty(1, 1, 16, 2, torch.float32)
    state.scores.fill_(score)
    state.positions[:] = torch.randperm(16).to(torch.int32)
    tokens, scores_new = no_tokens(state)
    evict(state, tokens, scores_new, (num_sink, 4 - num_sink, 4), device)
    heavy = list(range(8 + num_sink, 12))  # of equal scores the smaller position leaves
    assert state.kept() == list(range(num_sink)) + heavy + [12, 13, 14, 15]


@pytest.mark.parametrize("counts", [(0, 0, 3), (0, 3, 0), (3, 0, 0), (1, 1, 1), (1, 2, 0)])
def test_each_part_of_the_budget_may_be_0(counts: Counts, device: torch.device) -> None:
    state = random_state(2, 2, 9, 4, torch.float32, newest=30, full=True)
    tokens = planted_tokens(2, 2, 2, 3, 4, torch.float32, start=30)
    scores_new = torch.rand(2, 2, 3) * 3
    evicted = assert_same(state, tokens, scores_new, counts, device)
    # A budget of sinks alone may be left with less than its sum; nothing is above it.
    assert (state.positions >= 0).sum(-1).max() <= sum(counts)
    assert (evicted >= 0).sum(-1).min() >= 9


def test_a_budget_that_holds_changes_nothing(device: torch.device) -> None:
    state = random_state(2, 3, 6, 5, torch.float32, newest=20)
    before = state.clone()
    tokens, scores_new = no_tokens(state, 2, 3)
    assert (evict(state, tokens, scores_new, (0, 3, 3), device) == -1).all()
    assert_bitwise(state, before)


def test_an_empty_cache_and_no_token(device: torch.device) -> None:
    state = State.empty(2, 2, 4, 3, torch.float32)
    before = state.clone()
    tokens, scores_new = no_tokens(state, 2, 2)
    evicted = evict(state, tokens, scores_new, (1, 1, 1), device)
    assert evicted.tolist() == [[[-1] * 4] * 2] * 2
    assert_bitwise(state, before)


def test_batch_0(device: torch.device) -> None:
    state = State.empty(0, 2, 4, 3, torch.float32)
    tokens = planted_tokens(0, 2, 2, 5, 3, torch.float32)
    evicted = evict(state, tokens, torch.zeros(0, 2, 5), (1, 1, 1), device)
    assert evicted.shape == (0, 2, 9)


def test_padding_is_not_stored_and_does_not_move_the_window(device: torch.device) -> None:
    state = random_state(3, 2, 6, 4, torch.float32, newest=10, full=True)
    tokens = planted_tokens(3, 2, 2, 5, 4, torch.float32, start=10)
    tokens = pad(tokens, [[0, 0, 1, 1, 1], [1, 0, 1, 0, 0], [0, 0, 0, 0, 0]])
    scores_new = torch.rand(3, 2, 5).masked_fill(tokens.position[:, None] < 0, NAN)
    before = state.clone()
    evicted = assert_same(state, tokens, scores_new, (1, 2, 3), device)
    assert (evicted[0] >= 0).sum(-1).tolist() == [3, 3]
    assert (evicted[1] >= 0).sum(-1).tolist() == [2, 2]
    assert_bitwise(state.row(2), before.row(2))


def test_the_window_is_that_of_each_head(device: torch.device) -> None:
    # Head 0 has 9, head 1 has 5 as its newest token.
    state = State.empty(1, 2, 4, 2)
    state.positions[0] = torch.tensor([[2, 9, 3, 4], [5, 4, 3, 2]], dtype=torch.int32)
    tokens, scores_new = no_tokens(state, 1, 2)
    evict(state, tokens, scores_new, (0, 1, 2), device)
    assert [state.kept(0, 0), state.kept(0, 1)] == [[3, 4, 9], [3, 4, 5]]


def test_row_budgets_differ_from_row_to_row(device: torch.device) -> None:
    for dtype in (torch.int32, torch.int64):
        state = random_state(3, 2, 8, 4, torch.float32, newest=40, full=True)
        tokens, scores_new = no_tokens(state, 3, 2)
        row_budget = torch.tensor([[0, 1, 1], [2, 3, 3], [1, 0, 4]], dtype=dtype)
        # The three numbers are not used where there are row budgets.
        assert_same(state, tokens, scores_new, (0, 8, 0), device, row_budget)
        assert (state.positions >= 0).sum(-1).tolist() == [[2, 2], [8, 8], [5, 5]]


@pytest.mark.parametrize("cached", [0, 2, 5])
@pytest.mark.parametrize("num_new", [0, 2, 4])
@pytest.mark.parametrize("counts", [(3, 0, 0), (0, 1, 2), (1, 1, 0)])
def test_where_positions_repeat_the_budget_still_holds(
    cached: int, num_new: int, counts: Counts, device: torch.device
) -> None:
    # Equal positions, which no model makes, can all be protected: then the last candidates leave.
    # New tokens must increase, but nothing looks whether they are newer than the cached ones.
    state = State.empty(1, 1, 5, 2)
    state.positions[..., 5 - cached :] = 0
    state.scores[..., 5 - cached :] = 1
    tokens = planted_tokens(num=num_new, head_dim=2)
    scores_new = torch.ones(1, 1, num_new, dtype=torch.float64)
    evicted = assert_same(state, tokens, scores_new, counts, device)
    staying = min(sum(counts), cached + num_new)
    assert (state.positions >= 0).sum() == staying
    assert (evicted >= 0).sum() == cached + num_new - staying


# --- against the reference ----------------------------------------------------------------------

# Few different values, so that ties are common.
SCORES = (0.0, -0.0, 0.5, 1.0, 1.0 + 2**-23, -1.0, 3e38, -3e38, 1e-40, INF, -INF, NAN)


@dataclass(frozen=True)
class Problem:
    batch: int
    heads: int
    capacity: int
    head_dim: int
    dtype: torch.dtype
    counts: Counts
    row_budget: tuple[Counts, ...] | None
    num_new: int
    position_dtype: torch.dtype
    padded: bool
    tied: bool
    newest: int
    full: bool
    layout: str
    cache_layout: str
    seed: int


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    batch, capacity = draw(st.integers(1, 3)), draw(st.integers(1, 12))
    rows = st.none() | st.tuples(*[budgets(capacity)] * batch)
    return Problem(
        batch=batch,
        heads=draw(st.integers(1, 3)),
        capacity=capacity,
        head_dim=draw(st.sampled_from([1, 2, 7, 8, 17, 64])),
        dtype=draw(st.sampled_from(DTYPES)),
        counts=draw(budgets(capacity)),
        row_budget=draw(rows),
        num_new=draw(st.integers(0, 9)),
        position_dtype=draw(st.sampled_from([torch.int32, torch.int64])),
        padded=draw(st.booleans()),
        tied=draw(st.booleans()),
        newest=draw(st.sampled_from([0, 1, 5, 12, 60])),
        full=draw(st.booleans()),
        layout=draw(st.sampled_from(LAYOUTS)),
        cache_layout=draw(st.sampled_from(CACHE_LAYOUTS)),
        seed=draw(st.integers(0, 2**16)),
    )


def random_scores(sizes: tuple[int, ...], dtype: torch.dtype, tied: bool, seed: int) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    if tied:
        values = torch.tensor(SCORES, dtype=dtype)
        return values[torch.randint(0, len(SCORES), sizes, generator=g)]
    return torch.rand(*sizes, generator=g, dtype=dtype) * 3


@given(problem=problems())
@settings(deadline=None, derandomize=True, max_examples=600)
def test_equals_the_reference_in_every_bit(problem: Problem) -> None:
    p = problem
    state = random_state(
        p.batch, p.heads, p.capacity, p.head_dim, p.dtype, p.seed, p.newest, p.full
    )
    dtype = score_dtype(p.dtype)
    scores = random_scores(tuple(state.scores.shape), dtype, p.tied, p.seed + 1)
    state.scores.copy_(torch.where(state.positions >= 0, scores, 0))
    tokens = planted_tokens(
        p.batch, p.heads, p.heads, p.num_new, p.head_dim, p.dtype, p.seed, p.newest
    )
    tokens = tokens._replace(position=tokens.position.to(p.position_dtype))
    if p.padded:
        g = torch.Generator().manual_seed(p.seed + 2)
        tokens = pad(tokens, (torch.rand(p.batch, p.num_new, generator=g) < 0.6).tolist())
    scores_new = random_scores((p.batch, p.heads, p.num_new), dtype, p.tied, p.seed + 3)
    row_budget = None if p.row_budget is None else torch.tensor(p.row_budget)

    expected = state.clone()
    true_evicted, _ = reference_evict(expected, tokens, scores_new, p.counts, row_budget)
    laid = tokens._replace(
        key=laid_out(tokens.key, p.layout), value=laid_out(tokens.value, p.layout)
    )
    view = cache_laid_out(state, p.cache_layout)
    spread = scores_new.new_empty(p.batch, p.num_new, p.heads, 2)[..., 1].transpose(1, 2)
    spread.copy_(scores_new)
    evicted = evict(view.state, laid, spread, p.counts, row_budget=row_budget)
    assert torch.equal(evicted, true_evicted)
    assert_bitwise(view.state, expected)
    view.assert_rest_untouched()


@pytest.mark.parametrize("tied", [False, True])
def test_a_large_cache_equals_the_reference(tied: bool, device: torch.device) -> None:
    state = random_state(2, 2, 3000, 8, torch.float32, newest=5000, full=True)
    scores = random_scores((2, 2, 3000), torch.float32, tied, 1)
    state.scores.copy_(scores)
    tokens = planted_tokens(2, 2, 2, 700, 8, torch.float32, start=5000)
    scores_new = random_scores((2, 2, 700), torch.float32, tied, 2)
    assert_same(state, tokens, scores_new, (4, 1500, 600), device)
    assert (state.positions >= 0).sum(-1).tolist() == [[2104, 2104]] * 2
    tokens, scores_new = no_tokens(state, 2, 2)
    assert_same(state, tokens, scores_new, (4, 16, 16), device)


@pytest.mark.parametrize("counts", [(0, 0, 12), (2, 10, 0), (1, 7, 4), (0, 3, 9)])
def test_one_token_in_and_one_out_equals_the_reference(
    counts: Counts, device: torch.device
) -> None:
    state = State.empty(2, 2, 13, 4, torch.float32)
    for step in range(60):
        tokens = planted_tokens(2, 2, 2, 1, 4, torch.float32, start=step)
        scores_new = random_scores((2, 2, 1), torch.float32, True, step)
        evicted = assert_same(state, tokens, scores_new, counts, device)
        assert ((evicted >= 0).sum(-1) == (step >= 12)).all()


def test_a_very_large_batch(device: torch.device) -> None:
    batch = 70_000
    state = State.empty(batch, 1, 4, 8, torch.float32, fill=0)
    state.positions[:] = torch.arange(4, dtype=torch.int32)
    state.scores.copy_(torch.rand(batch, 1, 4))
    tokens = planted_tokens(num=1, head_dim=8, dtype=torch.float32, start=4)
    tokens = Tokens(*(t.expand(batch, *t.shape[1:]) for t in tokens))
    first = state.scores[:, 0, :3].argmin(-1)
    evicted = evict(state, tokens, torch.zeros(batch, 1, 1), (0, 2, 2), device)
    assert torch.equal(evicted[:, 0, 0].long(), first)
    assert (evicted[:, 0, 1:] == -1).all()
    assert torch.equal(
        state.positions[:, 0].gather(1, first[:, None]), torch.full((batch, 1), 4).int()
    )
    assert torch.equal(state.k_cache[torch.arange(batch), 0, first], tokens.key[:, 0, 0])


def test_per_row_lengths_and_budgets(device: torch.device) -> None:
    # 38-like: lengths 3, 5000, 17 and 1 with budgets 2, 64, 16 and 1 in one call.
    lengths, kept = [3, 5000, 17, 1], [2, 64, 16, 1]
    state = State.empty(4, 1, 5000, 2, torch.float32, fill=0)
    for row, length in enumerate(lengths):
        state.positions[row, 0, :length] = torch.arange(length, dtype=torch.int32)
        state.scores[row, 0, :length] = torch.rand(length)
    tokens, scores_new = no_tokens(state, 4)
    row_budget = torch.tensor([[0, k, 0] for k in kept])
    scores = state.scores.clone()
    assert_same(state, tokens, scores_new, (0, 64, 0), device, row_budget)
    for row, (length, k) in enumerate(zip(lengths, kept, strict=True)):
        highest = scores[row, 0, :length].topk(k).indices
        assert state.kept(row) == sorted(highest.tolist())


def test_results_do_not_depend_on_batch_or_threads() -> None:
    state = random_state(5, 3, 200, 8, torch.float32, newest=400, full=True)
    tokens = planted_tokens(5, 3, 3, 60, 8, torch.float32, start=400)
    scores_new = random_scores((5, 3, 60), torch.float32, True, 4)
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        together = state.clone()
        evicted = evict(together, tokens, scores_new, (2, 40, 50))
        results.append((*together, evicted))
    assert_bitwise(results[0], results[1])
    for row in range(5):
        alone = state.row(row)
        evicted = evict(alone, tokens.row(row), scores_new[row : row + 1], (2, 40, 50))
        assert_bitwise((*alone, evicted), [t[row : row + 1] for t in results[0]])


def test_reference_and_operator_agree_on_the_same_scores_after_attention() -> None:
    # What decode does in one call, attention by PyTorch and h2o_evict do in two.
    num, counts = 20, (1, 3, 3)
    tokens = planted_tokens(num=num, head_dim=16)
    whole, parts = State.empty(1, 1, 8, 16), State.empty(1, 1, 8, 16)
    for i in range(num):
        new = tokens.columns(i, i + 1)
        _, true_evicted = reference.attention_decode(
            new.query, *whole, new.key, new.value, new.position, *counts
        )
        slots = parts.positions[0, 0] >= 0
        keys = torch.cat([parts.k_cache[0, 0, slots], new.key[0, 0]])
        weights = torch.softmax(new.query[0, 0] @ keys.T / math.sqrt(16), -1)[0]
        parts.scores[0, 0, slots] += weights[:-1]
        evicted = evict(parts, new, weights[-1:].view(1, 1, 1), counts)
        assert evicted[0, 0, 0].item() == true_evicted.item()
        assert torch.equal(parts.positions, whole.positions)
    torch.testing.assert_close(parts.scores, whole.scores, rtol=0, atol=1e-12)
