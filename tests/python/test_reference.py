"""The reference: worked cases, the rules one by one, and faults that broke other projects."""

from __future__ import annotations

import argparse
import io
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from rich.console import Console
from torch import Tensor

from h2o_kv import ops, reference, trace
from h2o_kv.cli import trace as trace_command
from h2o_kv.reference import Step

GOLDEN = sorted(trace.list_cases())
INF, NAN = math.inf, math.nan


# --- helpers ------------------------------------------------------------------------------------


class State(NamedTuple):
    """The four tensors of a cache, in the order in which every operator takes them."""

    k_cache: Tensor
    v_cache: Tensor
    scores: Tensor
    positions: Tensor

    @classmethod
    def empty(
        cls,
        batch: int = 1,
        heads: int = 1,
        capacity: int = 4,
        head_dim: int = 8,
        dtype: torch.dtype = torch.float64,
    ) -> State:
        """NaN in every slot: nobody may read one that is empty."""
        nothing = torch.full((batch, heads, capacity, head_dim), NAN, dtype=dtype)
        score_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        scores = torch.zeros(batch, heads, capacity, dtype=score_dtype)
        positions = torch.full((batch, heads, capacity), -1, dtype=torch.int32)
        return cls(nothing, nothing.clone(), scores, positions)

    @classmethod
    def filled(cls, scores: Sequence[Sequence[float]], positions: Sequence[int]) -> State:
        """One row for each list of scores, one KV head, head_dim 2."""
        state = cls.empty(len(scores), 1, len(positions), 2)
        state.k_cache.normal_(generator=torch.Generator().manual_seed(0))
        state.v_cache.copy_(state.k_cache + 1)
        state.scores.copy_(torch.tensor(scores, dtype=torch.float64)[:, None])
        state.positions.copy_(torch.tensor(positions, dtype=torch.int32))
        return state

    def clone(self) -> State:
        return State(*(tensor.clone() for tensor in self))

    def row(self, row: int) -> State:
        return State(*(tensor[row : row + 1] for tensor in self))

    def kept(self, row: int = 0, head: int = 0) -> list[int]:
        return sorted(p for p in self.positions[row, head].tolist() if p >= 0)

    def score_of(self, row: int = 0, head: int = 0) -> dict[int, float]:
        pairs = zip(
            self.positions[row, head].tolist(), self.scores[row, head].tolist(), strict=True
        )
        return {p: s for p, s in pairs if p >= 0}


class Tokens(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    position: Tensor

    def part(self, columns: slice) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return (
            self.query[:, :, columns],
            self.key[:, :, columns],
            self.value[:, :, columns],
            self.position[:, columns],
        )


def peaked_tokens(
    batch: int,
    q_heads: int,
    kv_heads: int,
    num: int,
    head_dim: int = 8,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> Tokens:
    """Random tokens, every fifth of which draws attention: scores that are far from flat."""
    g = torch.Generator().manual_seed(seed)
    query = torch.randn(batch, q_heads, num, head_dim, generator=g, dtype=torch.float64)
    key = torch.randn(batch, kv_heads, num, head_dim, generator=g, dtype=torch.float64)
    value = torch.randn(batch, kv_heads, num, head_dim, generator=g, dtype=torch.float64)
    key[:, :, 2::5] *= 3
    position = torch.arange(num).expand(batch, num).clone()
    return Tokens(query.to(dtype), key.to(dtype), value.to(dtype), position)


def decode(
    state: State,
    tokens: Tokens,
    counts: tuple[int, int, int],
    columns: slice = slice(None),
    **kw: Any,
) -> tuple[Tensor, Tensor]:
    query, key, value, position = tokens.part(columns)
    return reference.attention_decode(query, *state, key, value, position, *counts, **kw)


def dense_weights(tokens: Tokens, scale: float | None = None) -> Tensor:
    """Causal softmax weights [batch, kv_heads, group, num, num] of batches without padding."""
    batch, _, num, head_dim = tokens.query.shape
    kv_heads = tokens.key.shape[1]
    query = tokens.query.double().view(batch, kv_heads, -1, num, head_dim)
    logits = query @ tokens.key.double()[:, :, None].transpose(-1, -2)
    logits = logits * (head_dim**-0.5 if scale is None else scale)
    future = torch.ones(num, num, dtype=torch.bool).triu(1)
    return torch.softmax(logits.masked_fill(future, -INF), -1)


def dense_attention(tokens: Tokens, scale: float | None = None) -> Tensor:
    weights = dense_weights(tokens, scale)
    return (weights @ tokens.value.double()[:, :, None]).flatten(1, 2)


def equal_logits(num: int, pads: int = 0) -> Tokens:
    zeros = torch.zeros(1, 1, num, 2, dtype=torch.float64)
    position = torch.tensor([[-1] * pads + list(range(num - pads))])
    return Tokens(zeros, zeros, zeros, position)


def log_probability_tokens(probabilities: Sequence[Sequence[float]], kv_heads: int) -> Tokens:
    """Tokens whose last query row has these softmax weights, one list for each query head.

    Head h of a group reads element h of the keys, which holds the logarithms of its weights.
    """
    group = len(probabilities) // kv_heads
    weights = torch.tensor(probabilities, dtype=torch.float64)
    num = weights.shape[1]
    key = weights.log().clamp(min=-1e4).view(kv_heads, group, num).transpose(1, 2)[None]
    query = torch.eye(group, dtype=torch.float64).repeat(kv_heads, 1)[None, :, None]
    query = query.expand(1, kv_heads * group, num, group)
    return Tokens(query, key, torch.zeros_like(key), torch.arange(num)[None])


def last_row_step(
    probabilities: Sequence[Sequence[float]],
    kv_heads: int,
    counts: tuple[int, int, int],
    gqa_reduce: str,
) -> tuple[State, Tensor]:
    """All tokens but the last are cached with score 0, then the last one joins."""
    tokens = log_probability_tokens(probabilities, kv_heads)
    num, head_dim = tokens.key.shape[2:]
    state = State.empty(1, kv_heads, num, head_dim)
    state.k_cache[:, :, : num - 1] = tokens.key[:, :, :-1]
    state.v_cache[:, :, : num - 1] = tokens.value[:, :, :-1]
    state.positions[:, :, : num - 1] = torch.arange(num - 1, dtype=torch.int32)
    last = slice(num - 1, num)
    _, evicted = decode(state, tokens, counts, last, gqa_reduce=gqa_reduce, scale=1.0)
    return state, evicted


def close(actual: Tensor, expected: Any, atol: float = 1e-9) -> None:
    expected = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=atol)


# --- worked cases -------------------------------------------------------------------------------


def read_case(name: str) -> dict[str, Any]:
    text = (trace.CASES_FOLDER / f"{name}.json").read_text(encoding="utf-8")
    case: dict[str, Any] = json.loads(text)
    return case


def test_the_worked_cases_are_there() -> None:
    assert len(GOLDEN) == 12
    assert "hand_example" in GOLDEN


@pytest.mark.parametrize("name", [name for name in GOLDEN if name != "hand_example"])
def test_golden_case_equals_the_reference_step_by_step(name: str) -> None:
    golden = read_case(name)
    steps = trace.replay(trace.load_case(name))
    num_kv_heads = len(golden["key"])
    group = len(golden["query"]) // num_kv_heads
    assert len(steps) == len(golden["steps"]) * num_kv_heads

    outputs: list[list[Tensor]] = [[] for _ in range(num_kv_heads)]
    for index, step in enumerate(steps):
        want_step = golden["steps"][index // num_kv_heads]
        want = want_step["heads"][step.head]
        assert (step.row, step.head) == (0, index % num_kv_heads)
        assert list(step.positions) == want_step["positions"]
        assert sorted(step.candidates) == sorted(want["candidates"])
        assert list(step.recent) == want["recent"]
        assert list(step.victims) == want["victims"]
        assert list(step.kept) == want["kept"]

        # Slots are not part of a case: the same candidates may be listed in another order.
        order = [step.candidates.index(p) for p in want["candidates"]]
        close(step.scores[order], want["scores"])
        assert len(step.weights) == len(want["weights"])
        for weight, want_weight in zip(step.weights, want["weights"], strict=True):
            seen = order[: len(want_weight[0])]
            assert weight.shape == (group, len(seen))
            close(weight[:, seen], want_weight)
        outputs[step.head].append(step.output)
    close(torch.cat([torch.cat(parts, dim=1) for parts in outputs]), golden["output"])


def test_hand_example_is_the_one_of_the_source_document() -> None:
    golden, case = read_case("hand_example"), trace.load_case("hand_example")
    state = State(case.k_cache, case.v_cache, case.scores, case.positions).clone()
    tokens = Tokens(case.query, case.k_new, case.v_new, case.position_new)
    steps: list[Step] = []
    output, evicted = decode(state, tokens, (0, 3, 3), scale=1.0, trace=steps)

    (step,) = steps
    assert step.positions == (11,)
    assert step.candidates == (1, 3, 5, 8, 9, 10, 11)
    assert step.slots == (0, 1, 2, 3, 4, 5, -1)
    close(step.scores_before, [2.4, 1.7, 1.2, 0.3, 0.2, 0.0, 0.0])
    close(step.weights[0], [[0.20, 0.05, 0.02, 0.08, 0.15, 0.30, 0.20]])
    close(step.scores, [2.60, 1.75, 1.22, 0.38, 0.35, 0.30, 0.20])
    assert step.recent == (9, 10, 11)
    assert step.victims == (8,)
    assert step.margin == pytest.approx(0.84)
    assert step.kept == (1, 3, 5, 9, 10, 11)
    assert step.stored == ((11, 3),)

    assert evicted.tolist() == [[[8]]]
    assert state.positions[0, 0].tolist() == [1, 3, 5, 11, 9, 10] == golden["slots_after"]
    close(state.scores[0, 0], [2.60, 1.75, 1.22, 0.20, 0.35, 0.30])
    close(output[0, :, 0], golden["output"])
    assert torch.equal(state.k_cache[0, 0, 3], case.k_new[0, 0, 0])
    assert torch.equal(state.v_cache[0, 0, 3], case.v_new[0, 0, 0])
    others = [0, 1, 2, 4, 5]
    assert torch.equal(state.k_cache[0, 0, others], case.k_cache[0, 0, others])
    assert torch.equal(state.v_cache[0, 0, others], case.v_cache[0, 0, others])


# --- one step -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gqa_reduce", ["sum", "max"])
def test_several_tokens_with_chunk_one_are_that_many_calls(
    dtype: torch.dtype, gqa_reduce: str
) -> None:
    tokens = peaked_tokens(2, 4, 2, 40, dtype=dtype)
    counts = (1, 5, 4)
    together = State.empty(2, 2, 12, dtype=dtype)
    output, evicted = decode(together, tokens, counts, gqa_reduce=gqa_reduce)
    single = State.empty(2, 2, 12, dtype=dtype)
    parts = [
        decode(single, tokens, counts, slice(i, i + 1), gqa_reduce=gqa_reduce) for i in range(40)
    ]
    for ours, theirs in zip(together, single, strict=True):
        assert torch.equal(ours.nan_to_num(), theirs.nan_to_num())
    assert torch.equal(output, torch.cat([part[0] for part in parts], 2))
    assert torch.equal(evicted, torch.cat([part[1] for part in parts], 2))
    assert (evicted >= 0).sum() == 2 * 2 * 30
    # Heavy hitters stayed, and not merely the newest ones.
    assert together.scores.amax() > 3 * together.scores[together.positions >= 0].median()


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
def test_a_padded_row_is_the_row_alone(chunk: int) -> None:
    """Padding on the left, on the right and in between; one budget for each row."""
    alone = [peaked_tokens(1, 4, 2, num, seed=num) for num in (23, 12, 17)]
    budgets = [(1, 4, 3), (0, 2, 2), (2, 0, 4)]
    real = [list(range(23)), list(range(11, 23)), [*range(5), *range(9, 21)]]
    padded = peaked_tokens(3, 4, 2, 23, seed=99)  # what stands in the padding is not zero
    padded.position.fill_(-1)
    for row, (tokens, columns) in enumerate(zip(alone, real, strict=True)):
        padded.query[row][:, columns] = tokens.query[0]
        padded.key[row][:, columns] = tokens.key[0]
        padded.value[row][:, columns] = tokens.value[0]
        padded.position[row][columns] = tokens.position[0]

    state = State.empty(3, 2, 8)
    row_budget = torch.tensor(budgets, dtype=torch.int32)
    steps: list[Step] = []
    output, evicted = decode(
        state, padded, (0, 1, 1), chunk=chunk, row_budget=row_budget, trace=steps
    )
    assert len({step.kept for step in steps}) > 3
    for row, (tokens, columns) in enumerate(zip(alone, real, strict=True)):
        lone = State.empty(1, 2, 8)
        lone_output, lone_evicted = decode(lone, tokens, budgets[row], chunk=chunk)
        for ours, theirs in zip(state.row(row), lone, strict=True):
            assert torch.equal(ours.nan_to_num(), theirs.nan_to_num())
        assert torch.equal(output[row][:, columns], lone_output[0])
        for head in range(2):
            gone = [p for p in evicted[row, head].tolist() if p >= 0]
            assert gone == [p for p in lone_evicted[0, head].tolist() if p >= 0]
            assert len(gone) == len(columns) - sum(budgets[row])
        pads = sorted(set(range(23)) - set(columns))
        assert not output[row][:, pads].any()


def test_a_chunk_is_counted_in_real_tokens_and_reports_from_its_first_column() -> None:
    state = State.empty(capacity=2, head_dim=2)
    _, evicted = decode(state, equal_logits(8, pads=3), (0, 0, 2), chunk=3)
    # Chunks are columns 3-5 (positions 0-2) and 6-7 (positions 3-4); 2 has less score than 1.
    assert evicted.tolist() == [[[-1, -1, -1, 0, -1, -1, 2, 1]]]
    assert state.kept() == [3, 4]


def test_output_is_dense_attention_over_exactly_the_candidates() -> None:
    """Every position keeps its own key and value, whatever slot it moved into."""
    tokens = peaked_tokens(2, 4, 2, 60)
    state = State.empty(2, 2, 9)
    steps: list[Step] = []
    output, _ = decode(state, tokens, (1, 5, 3), trace=steps)
    query = tokens.query.view(2, 2, 2, 60, 8)
    slots_used: set[int] = set()
    for step in steps:
        (t,), seen = step.positions, sorted(step.candidates)
        key, value = (x[step.row, step.head, seen] for x in (tokens.key, tokens.value))
        weights = torch.softmax(query[step.row, step.head, :, t] @ key.T / math.sqrt(8), -1)
        close(output[step.row, 2 * step.head : 2 * step.head + 2, t], weights @ value)
        slots_used.update(slot for _, slot in step.stored)
    assert slots_used == set(range(9))
    for row in range(2):
        for head in range(2):
            where = state.positions[row, head].long()
            assert torch.equal(state.k_cache[row, head], tokens.key[row, head, where])
            assert torch.equal(state.v_cache[row, head], tokens.value[row, head, where])


def test_scores_are_what_each_position_received_since_it_joined() -> None:
    tokens = peaked_tokens(1, 2, 1, 50)
    state = State.empty(1, 1, 8)
    steps: list[Step] = []
    decode(state, tokens, (0, 4, 4), gqa_reduce="max", trace=steps)
    received: dict[int, float] = {}
    for step in steps:
        for position, weight in zip(step.candidates, step.weights[0].amax(0).tolist(), strict=True):
            received[position] = received.get(position, 0.0) + weight
    for position, score in state.score_of().items():
        assert score == pytest.approx(received[position], abs=1e-12)


def test_a_budget_as_large_as_the_sequence_is_full_attention() -> None:
    tokens = peaked_tokens(2, 6, 2, 20)
    for chunk in (1, 6, 20):
        state = State.empty(2, 2, 25)
        output, evicted = decode(state, tokens, (0, 15, 10), chunk=chunk)
        close(output, dense_attention(tokens), 1e-12)
        assert (evicted == -1).all()
        close(state.scores[:, :, :20], dense_weights(tokens).sum((2, 3)), 1e-12)
        assert not state.scores[:, :, 20:].any()
        assert state.positions[0, 0].tolist() == [*range(20), *[-1] * 5]


@pytest.mark.parametrize("gqa_reduce", ["sum", "max"])
@pytest.mark.parametrize("budget", [(0, 1, 1), (2, 3, 3), (0, 8, 0), (0, 0, 8), (1, 15, 4)])
def test_one_shot_is_full_attention_then_prefill_select(
    gqa_reduce: str, budget: tuple[int, int, int]
) -> None:
    tokens = peaked_tokens(2, 4, 2, 20)
    state = State.empty(2, 2, 20)
    steps: list[Step] = []
    output, _ = decode(
        state, tokens, budget, chunk=50, gqa_reduce=gqa_reduce, scale=0.7, trace=steps
    )
    close(output, dense_attention(tokens, 0.7), 1e-12)
    assert len(steps) == 2 * 2

    selecting: list[Step] = []
    selected, scores = reference.prefill_select(
        tokens.query,
        tokens.key,
        tokens.position,
        *budget,
        gqa_reduce=gqa_reduce,
        scale=0.7,
        trace=selecting,
    )
    assert selected.shape == scores.shape == (2, 2, sum(budget))
    weights = dense_weights(tokens, 0.7)
    dense = (weights.sum(2) if gqa_reduce == "sum" else weights.amax(2)).sum(-2)
    for row in range(2):
        for head in range(2):
            assert selected[row, head].tolist() == state.kept(row, head)
            close(scores[row, head], dense[row, head, selected[row, head]], 1e-12)
            close(scores[row, head], list(dict(sorted(state.score_of(row, head).items())).values()))
    for ours, theirs in zip(selecting, steps, strict=True):
        assert (ours.victims, ours.kept, ours.recent) == (
            theirs.victims,
            theirs.kept,
            theirs.recent,
        )
        assert ours.margin == pytest.approx(theirs.margin)
    sinks, recent = set(range(budget[0])), set(range(20 - budget[2], 20))
    assert all(sinks | recent <= set(step.kept) for step in steps)


def test_prefill_select_of_float32_gives_and_compares_float32_scores() -> None:
    tokens = peaked_tokens(1, 2, 1, 20, dtype=torch.float32)
    steps: list[Step] = []
    selected, scores = reference.prefill_select(
        tokens.query, tokens.key, tokens.position, 0, 4, 4, trace=steps
    )
    assert scores.dtype == torch.float32
    assert selected.dtype == torch.int64
    assert torch.equal(steps[0].scores[selected[0, 0]], scores[0, 0].double())
    assert torch.equal(steps[0].scores, steps[0].scores.float().double())
    close(steps[0].scores, dense_weights(tokens).sum((0, 1, 2, 3)), 1e-6)


def test_alibi_adds_slope_times_distance() -> None:
    tokens = peaked_tokens(1, 2, 1, 12)
    tokens.position.add_(100)  # only differences count
    slopes = torch.tensor([0.5, 0.125])
    state = State.empty(1, 1, 12)
    output, _ = decode(state, tokens, (0, 6, 6), alibi_slopes=slopes)
    distance = torch.arange(12.0)[None, :] - torch.arange(12.0)[:, None]
    logits = tokens.query[0] @ tokens.key[0].transpose(-1, -2) / math.sqrt(8)
    logits = logits + slopes[:, None, None].double() * distance
    future = torch.ones(12, 12, dtype=torch.bool).triu(1)
    weights = torch.softmax(logits.masked_fill(future, -INF), -1)
    close(output[0], weights @ tokens.value[0], 1e-12)
    assert (output[0] - dense_attention(tokens)[0]).abs().max() > 0.1
    selected, scores = reference.prefill_select(
        tokens.query, tokens.key, tokens.position, 0, 6, 6, alibi_slopes=slopes
    )
    assert selected[0, 0].tolist() == list(range(12))
    close(scores[0, 0], weights.sum((0, 1)), 1e-6)


def test_a_nan_reaches_only_what_its_token_sees() -> None:
    tokens = peaked_tokens(1, 1, 1, 6)
    tokens.query[0, 0, 2] = NAN
    _, scores = reference.prefill_select(tokens.query, tokens.key, tokens.position, 0, 6, 0)
    assert scores[0, 0].isnan().tolist() == [True] * 3 + [False] * 3
    state = State.empty(1, 1, 6)
    decode(state, tokens, (0, 6, 0), chunk=6)
    _, of_the_operator = ops.prefill_select(tokens.query, tokens.key, tokens.position, 0, 6, 0)
    for others in (state.scores, of_the_operator):
        torch.testing.assert_close(scores, others, rtol=0, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_low_precision_caches_are_computed_in_float64_and_keep_their_dtype(
    dtype: torch.dtype,
) -> None:
    tokens = peaked_tokens(1, 2, 1, 30, dtype=dtype)
    state = State.empty(1, 1, 8, dtype=dtype)
    steps: list[Step] = []
    output, _ = decode(state, tokens, (0, 4, 4), trace=steps)
    assert output.dtype == state.k_cache.dtype == state.v_cache.dtype == dtype
    assert state.scores.dtype == torch.float32
    assert state.positions.dtype == torch.int32
    exact = torch.cat([step.output for step in steps], 1)
    assert exact.dtype == torch.float64
    assert torch.equal(output[0], exact.to(dtype))
    # Victims are chosen by the scores as they are stored.
    assert torch.equal(steps[-1].scores, steps[-1].scores.float().double())
    where = state.positions[0, 0].long()
    assert torch.equal(state.k_cache[0, 0], tokens.key[0, 0, where])


def test_views_of_a_larger_buffer_are_written_through() -> None:
    tokens = peaked_tokens(1, 2, 2, 12)
    plain = State.empty(1, 2, 4)
    decode(plain, tokens, (0, 2, 2))
    buffer = torch.full((1, 4, 2, 16), NAN, dtype=torch.float64)
    view = buffer.transpose(1, 2)[..., ::2]
    state = State(view, *list(plain.clone())[1:])
    for tensor, value in zip(list(state)[1:], (NAN, 0, -1), strict=True):
        tensor.fill_(value)
    decode(state, tokens, (0, 2, 2))
    assert torch.equal(buffer.transpose(1, 2)[..., ::2], plain.k_cache)
    assert buffer[..., 1::2].isnan().all()
    assert torch.equal(state.positions, plain.positions)


def test_empty_batches_and_no_new_tokens_do_nothing() -> None:
    tokens = peaked_tokens(1, 2, 1, 5)
    state = State.empty(1, 1, 4)
    output, evicted = decode(state, tokens, (0, 2, 2), slice(0, 0))
    assert output.shape == (1, 2, 0, 8)
    assert evicted.shape == (1, 1, 0)
    assert state.kept() == []
    none = peaked_tokens(0, 2, 1, 5)
    output, evicted = decode(State.empty(0, 1, 4), none, (0, 2, 2))
    assert output.shape == (0, 2, 5, 8)
    assert evicted.shape == (0, 1, 5)
    selected, scores = reference.prefill_select(none.query, none.key, none.position, 0, 2, 2)
    assert selected.shape == scores.shape == (0, 1, 4)


# --- who leaves ---------------------------------------------------------------------------------


def shrink(state: State, counts: tuple[int, int, int], **kw: Any) -> list[list[int]]:
    """Evict with no new token; what left, for each row of KV head 0."""
    batch, heads, _, head_dim = state.k_cache.shape
    nothing = torch.zeros(batch, heads, 0, head_dim, dtype=state.k_cache.dtype)
    evicted = reference.evict(
        *state,
        nothing,
        nothing,
        torch.zeros(batch, heads, 0, dtype=state.scores.dtype),
        torch.zeros(batch, 0, dtype=torch.int64),
        *counts,
        **kw,
    )
    assert evicted.shape == (batch, heads, state.k_cache.shape[2])
    return [[p for p in row[0].tolist() if p >= 0] for row in evicted]


@pytest.mark.parametrize(
    ("scores", "left"),
    [
        ([3.0, 1.0, 2.0, 1.0, 9.0], [1, 3]),  # of equal scores the smaller position
        ([0.0, -0.0, 2.0, 1.0, 9.0], [0, 1]),  # -0.0 equals +0.0
        ([-0.0, 0.0, 2.0, 1.0, 9.0], [0, 1]),
        ([1.0, 0.0, NAN, -INF, 9.0], [2, 3]),  # NaN is lower than -inf
        ([1.0, NAN, 0.0, NAN, 9.0], [1, 3]),  # of several NaN the smaller position
        ([INF, INF, 3.0, INF, 9.0], [2, 0]),
    ],
)
def test_lowest_score_leaves_first(scores: list[float], left: list[int]) -> None:
    state = State.filled([scores], [0, 1, 2, 3, 4])
    assert shrink(state, (0, 2, 1)) == [left]
    # Neither does it depend on the slots: the same tokens, stored in the opposite order.
    mirrored = State.filled([scores[::-1]], [4, 3, 2, 1, 0])
    assert shrink(mirrored, (0, 2, 1)) == [left]
    assert state.kept() == mirrored.kept() == sorted({0, 1, 2, 3, 4} - set(left))


@pytest.mark.parametrize(
    ("scores", "margin"),
    [
        ([1.0, 2.5, 0.5, 9.0], 1.5),
        ([1.0, 1.0, 0.5, 9.0], 0.0),
        ([NAN, 1.0, NAN, 9.0], INF),
        ([NAN, NAN, NAN, 9.0], 0.0),
    ],
)
def test_margin_is_the_gap_to_the_one_that_stayed(scores: list[float], margin: float) -> None:
    steps: list[Step] = []
    shrink(State.filled([scores], [0, 1, 2, 3]), (0, 1, 1), trace=steps)
    assert steps[0].margin == margin
    # Nobody leaves; nobody else could have left.
    for counts in ((0, 3, 1), (0, 0, 1)):
        steps.clear()
        shrink(State.filled([scores], [0, 1, 2, 3]), counts, trace=steps)
        assert steps[0].margin == INF


def test_with_no_recent_window_the_new_token_may_be_the_victim_and_nothing_is_written() -> None:
    key = torch.arange(20.0, dtype=torch.float64).view(1, 1, 10, 2)
    tokens = equal_logits(10)._replace(key=key)
    state = State.empty(capacity=4, head_dim=2)
    decode(state, tokens, (0, 4, 0), slice(0, 4))
    before = state.clone()
    steps: list[Step] = []
    output, evicted = decode(state, tokens, (0, 4, 0), slice(4, 10), trace=steps)
    assert evicted.tolist() == [[[4, 5, 6, 7, 8, 9]]]
    assert all(step.stored == () and step.recent == () for step in steps)
    assert torch.equal(state.k_cache, before.k_cache)
    assert torch.equal(state.positions, before.positions)
    assert output.shape == (1, 1, 6, 2)
    # The query of the token that left was still scored.
    close(state.scores - before.scores, [[[6 * 0.2] * 4]])


def test_victim_slots_are_filled_in_order_of_position_then_the_empty_ones() -> None:
    state = State.filled([[1.0, 5.0, 0.5, 0.0, 4.0, 0.0, 0.0]], [7, 3, 8, -1, 5, -1, -1])
    zeros = torch.zeros(1, 1, 4, 2, dtype=torch.float64)
    tokens = Tokens(zeros, zeros, zeros, torch.arange(9, 13)[None])
    steps: list[Step] = []
    # 8 candidates, budget 6: positions 8 and 7 leave slots 2 and 0.
    _, evicted = decode(state, tokens, (0, 2, 4), chunk=4, trace=steps)
    assert evicted.tolist() == [[[8, 7, -1, -1]]]
    assert steps[0].stored == ((9, 0), (10, 2), (11, 3), (12, 5))
    assert state.positions[0, 0].tolist() == [9, 3, 10, 11, 5, 12, -1]


def test_a_cache_above_the_budget_does_not_grow_and_only_evict_shrinks_it() -> None:
    state = State.filled([[4.0, 3.0, 2.0, 1.0, 9.0, 9.0]], list(range(6)))
    zeros = torch.zeros(1, 1, 2, 2, dtype=torch.float64)
    tokens = Tokens(zeros, zeros, zeros, torch.tensor([[6, 7]]))
    _, evicted = decode(state, tokens, (0, 1, 1), chunk=2)
    # 8 candidates, budget 2, but only as many leave as have joined; position 6 is among the lowest.
    assert evicted.tolist() == [[[6, 3]]]
    assert state.kept() == [0, 1, 2, 4, 5, 7]
    _, evicted = decode(state, Tokens(zeros, zeros, zeros, torch.tensor([[8, 9]])), (0, 1, 1))
    assert (evicted >= 0).sum() == 2
    assert len(state.kept()) == 6
    shrink(state, (0, 1, 1))
    assert len(state.kept()) == 2
    assert 9 in state.kept()


def test_when_nobody_may_leave_the_newest_token_is_not_stored() -> None:
    """Only when positions were not increasing: 5 is newer than the token that joins after it."""
    state = State.filled([[1.0, 1.0]], [4, 5])
    zeros = torch.zeros(1, 1, 1, 2, dtype=torch.float64)
    _, evicted = decode(state, Tokens(zeros, zeros, zeros, torch.tensor([[2]])), (0, 0, 2))
    assert evicted.tolist() == [[[2]]]
    assert state.kept() == [4, 5]


def test_evict_frees_slots_and_leaves_their_bytes() -> None:
    state = State.filled([[5.0, 1.0, 1.0, 3.0, 9.0, 9.0]], list(range(6)))
    before = state.clone()
    assert shrink(state, (0, 2, 2)) == [[1, 2]]
    assert state.positions[0, 0].tolist() == [0, -1, -1, 3, 4, 5]
    assert state.scores[0, 0].tolist() == [5.0, 0.0, 0.0, 3.0, 9.0, 9.0]
    assert torch.equal(state.k_cache, before.k_cache)
    assert torch.equal(state.v_cache, before.v_cache)


def test_evict_places_scored_tokens_and_ends_the_window_at_the_largest_position() -> None:
    state = State.filled([[5.0, 0.1, 2.0, 0.0]], [0, 9, 2, -1])
    key = torch.arange(8.0, dtype=torch.float64).view(1, 1, 4, 2)
    steps: list[Step] = []
    evicted = reference.evict(
        *state,
        key,
        key + 10,
        torch.tensor([[[4.0, NAN, 3.0, 0.2]]], dtype=torch.float64),
        torch.tensor([[4, -1, 6, 7]]),
        0,
        2,
        2,
        trace=steps,
    )
    # t = 9 protects 8 and 9, so the low score of 9 stays and 7 goes first.
    assert evicted.tolist() == [[[7, 2, *[-1] * 6]]]
    assert state.positions[0, 0].tolist() == [0, 9, 4, 6]
    assert state.scores[0, 0].tolist() == [5.0, 0.1, 4.0, 3.0]
    assert state.k_cache[0, 0, 2].tolist() == [0.0, 1.0]
    assert state.v_cache[0, 0, 3].tolist() == [14.0, 15.0]
    assert steps[0].recent == (9,)
    assert steps[0].positions == (4, 6, 7)
    assert steps[0].margin == pytest.approx(1.0)


def test_evict_with_row_budgets_cuts_each_row_to_its_own() -> None:
    scores = [5.0, 4.0, 1.0, 2.0, 3.0]
    state = State.filled([scores, scores], list(range(5)))
    row_budget = torch.tensor([[0, 2, 1], [1, 0, 1]])
    assert shrink(state, (0, 1, 0), row_budget=row_budget) == [[2, 3], [2, 3, 1]]
    assert (state.kept(0), state.kept(1)) == ([0, 1, 4], [0, 4])


def test_decode_is_attention_then_evict() -> None:
    """Steps 4 to 6 of the one are the other, given the scores."""
    tokens = peaked_tokens(2, 2, 1, 30)
    state = State.empty(2, 1, 7)
    decode(state, tokens, (1, 3, 3), slice(0, 29))
    before = state.clone()
    steps: list[Step] = []
    _, evicted = decode(state, tokens, (1, 3, 3), slice(29, 30), trace=steps)
    for step in steps:
        row = before.row(step.row)
        row.scores[0, 0] = step.scores[:-1]
    _, key, value, position = tokens.part(slice(29, 30))
    score_new = torch.stack([step.scores[-1:] for step in steps])[:, None]
    left = reference.evict(*before, key, value, score_new, position, 1, 3, 3)
    assert torch.equal(left[:, :, :1], evicted)
    for ours, theirs in zip(before, state, strict=True):
        assert torch.equal(ours, theirs)


def test_prefill_select_of_padded_rows_with_their_own_budgets() -> None:
    tokens = peaked_tokens(1, 2, 1, 12)
    padded = peaked_tokens(2, 2, 1, 15, seed=7)
    padded.query[1, :, 3:], padded.key[1, :, 3:] = tokens.query[0], tokens.key[0]
    padded.position[1] = torch.tensor([-1, -1, -1, *range(12)])
    selected, scores = reference.prefill_select(
        padded.query,
        padded.key,
        padded.position,
        0,
        4,
        4,
        row_budget=torch.tensor([[0, 4, 4], [1, 2, 2]]),
    )
    alone, alone_scores = reference.prefill_select(
        tokens.query, tokens.key, tokens.position, 1, 2, 2
    )
    assert selected[1, 0].tolist() == [*(alone[0, 0] + 3).tolist(), -1, -1, -1]
    assert torch.equal(scores[1, 0, :5], alone_scores[0, 0])
    assert scores[1, 0, 5:].tolist() == [0.0, 0.0, 0.0]
    assert (selected[0] >= 0).all()
    padding = torch.full((1, 12), -1)
    selected, _ = reference.prefill_select(tokens.query, tokens.key, padding, 0, 1, 1)
    assert selected.tolist() == [[[-1, -1]]]


@pytest.mark.parametrize(
    ("kw", "message"),
    [
        ({"chunk": 0}, r"reference.attention_decode: chunk must be >= 1, got 0"),
        (
            {"gqa_reduce": "mean"},
            r'reference.attention_decode: gqa_reduce must be "sum" or "max", got "mean"',
        ),
        (
            {"row_budget": torch.tensor([[0, 3, 2]])},
            r"reference.attention_decode: budget must be in 1..4, got 5 in row 0",
        ),
        (
            {"row_budget": torch.tensor([[-1, 2, 2]])},
            r"reference.attention_decode: counts must be >= 0, got .*num_sink=-1.* in row 0",
        ),
    ],
)
def test_wrong_arguments_are_named(kw: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decode(State.empty(), peaked_tokens(1, 1, 1, 2), (0, 2, 2), **kw)


# --- faults that broke other projects -----------------------------------------------------------


def test_scores_are_not_summed_over_the_batch() -> None:
    state = State.filled([[9.0, 1.0, 2.0, 3.0], [1.0, 9.0, 2.0, 3.0]], [0, 1, 2, 3])
    assert shrink(state, (0, 2, 1)) == [[1], [0]]


@pytest.mark.parametrize("score", [1.0, 0.0, 1e30, -1e30, INF, NAN])
def test_protected_tokens_stay_when_scores_are_flat(score: float) -> None:
    state = State.filled([[score] * 16], list(range(16)))
    shrink(state, (0, 4, 4))
    assert state.kept() == list(range(8, 16))  # 12..15 are protected; ties go to larger positions
    state = State.filled([[score] * 16], list(range(16)))
    shrink(state, (2, 2, 4))
    assert state.kept() == [0, 1, 10, 11, 12, 13, 14, 15]


def test_prefill_scores_are_causal() -> None:
    want = [2.45, 1.45, 0.95, 37 / 60, 11 / 30, 1 / 6]
    tokens = equal_logits(6)
    selected, scores = reference.prefill_select(tokens.query, tokens.key, tokens.position, 0, 3, 3)
    assert selected.tolist() == [[[0, 1, 2, 3, 4, 5]]]
    close(scores[0, 0], want)
    for chunk in (1, 2, 6):
        state = State.empty(capacity=6, head_dim=2)
        decode(state, tokens, (0, 3, 3), chunk=chunk)
        close(state.scores[0, 0], want)


def test_padded_query_rows_add_no_score() -> None:
    want = [25 / 12, 13 / 12, 7 / 12, 0.25]
    tokens = equal_logits(6, pads=2)
    selected, scores = reference.prefill_select(tokens.query, tokens.key, tokens.position, 0, 3, 3)
    assert selected.tolist() == [[[2, 3, 4, 5, -1, -1]]]
    close(scores[0, 0], [*want, 0.0, 0.0])
    state = State.empty(capacity=6, head_dim=2)
    decode(state, tokens, (0, 3, 3), chunk=6)
    assert state.positions[0, 0].tolist() == [0, 1, 2, 3, -1, -1]
    close(state.scores[0, 0], [*want, 0.0, 0.0])


def test_query_heads_of_a_group_are_summed_or_maximised() -> None:
    rows = [[0.7, 0.1, 0.1, 0.1], [0.1, 0.6, 0.2, 0.1], [0.25] * 4, [0.05, 0.05, 0.05, 0.85]]
    state, _ = last_row_step(rows, 2, (0, 2, 2), "sum")
    close(state.scores[0], [[0.8, 0.7, 0.3, 0.2], [0.3, 0.3, 0.3, 1.1]])
    state, _ = last_row_step(rows, 2, (0, 2, 2), "max")
    close(state.scores[0], [[0.7, 0.6, 0.2, 0.1], [0.25, 0.25, 0.25, 0.85]])
    conflict = [[0.5, 0.3, 0.2], [0.0, 0.25, 0.75]]
    assert last_row_step(conflict, 1, (0, 1, 1), "sum")[1].tolist() == [[[0]]]
    assert last_row_step(conflict, 1, (0, 1, 1), "max")[1].tolist() == [[[1]]]


@pytest.mark.parametrize("garbage", [NAN, INF])
def test_what_stands_in_an_empty_slot_does_not_matter(garbage: float) -> None:
    tokens = peaked_tokens(1, 2, 1, 4)
    results = []
    for filling in (0.0, garbage):
        state = State.empty(1, 1, 8)
        state.k_cache.fill_(filling)
        state.v_cache.fill_(filling)
        output, _ = decode(state, tokens, (0, 4, 4))
        results.append((output, state.scores))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert not results[1][1][0, 0, 4:].any()


def test_float16_logits_do_not_overflow() -> None:
    key = torch.tensor([60.0, 60.0, -60.0]).view(1, 1, 3, 1).expand(1, 1, 3, 80).half()
    value = torch.tensor([2.0, 4.0, 100.0]).view(1, 1, 3, 1).expand(1, 1, 3, 80).half()
    query = torch.full((1, 1, 3, 80), 60.0).half()
    state = State.empty(1, 1, 3, 80, dtype=torch.float16)
    tokens = Tokens(query, key, value, torch.arange(3)[None])
    output, _ = decode(state, tokens, (0, 2, 1))
    assert (output[0, 0, 2] == 3.0).all()
    close(state.scores[0, 0], [1 + 0.5 + 0.5, 0.5 + 0.5, 0.0])


def test_the_newest_tokens_are_always_in_the_cache_and_start_from_their_own_attention() -> None:
    tokens = peaked_tokens(1, 1, 1, 43)
    state = State.empty(1, 1, 4)
    steps: list[Step] = []
    decode(state, tokens, (0, 2, 2), trace=steps)
    for t, step in enumerate(steps):
        assert {t, max(t - 1, 0)} <= set(step.kept)
        assert step.scores[-1] == step.weights[0][0, -1]
        assert step.kept == tuple(sorted(set(step.candidates) - set(step.victims)))
    assert sum(len(step.victims) for step in steps) == 39


def test_sinks_and_window_keep_the_first_and_the_last() -> None:
    tokens = peaked_tokens(1, 1, 1, 7)
    state = State.empty(1, 1, 8)
    for t in range(7):
        decode(state, tokens, (2, 0, 3), slice(t, t + 1))
        assert len(state.kept()) == min(t + 1, 5)
    assert state.kept() == [0, 1, 4, 5, 6]


# --- h2o-kv trace -------------------------------------------------------------------------------


def run_command(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    trace_command.add_arguments(parser)
    return trace_command.main(parser.parse_args(arguments))


def rows_of(text: str) -> list[list[str]]:
    """Cells of every table row that was printed."""
    # rich draws | where the terminal cannot show box characters.
    lines = [line.replace("│", "|") for line in text.splitlines()]
    rows = [line.strip("|").split("|") for line in lines if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows]


def test_trace_explains_the_hand_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("--case", "hand_example") == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert (
        "position 8 leaves (score 0.38, margin 0.84 to the next); position 11 takes its slot"
        in lines
    )
    assert "recent window: positions 9, 10, 11" in lines
    assert "kept: positions 1, 3, 5, 9, 10, 11" in lines
    assert (
        "7 candidates, budget 6: 1 must leave, lowest score first: "
        "8 (0.38), 5 (1.22), 3 (1.75), 1 (2.6)" in lines
    )
    assert rows_of(text) == [
        ["1", "0", "0.2000", "2.4000", "2.6000", "kept"],
        ["3", "1", "0.0500", "1.7000", "1.7500", "kept"],
        ["5", "2", "0.0200", "1.2000", "1.2200", "kept"],
        ["8", "3", "0.0800", "0.3000", "0.3800", "victim"],
        ["9", "4", "0.1500", "0.2000", "0.3500", "recent"],
        ["10", "5", "0.3000", "0.0000", "0.3000", "recent"],
        ["11", "-> 3", "0.2000", "0.0000", "0.2000", "recent"],
    ]


@pytest.mark.parametrize(
    ("name", "line"),
    [
        (
            "recent_zero_ties",
            "position 9 leaves (score 0.2, margin 1.25 to the next); it was never stored",
        ),
        ("local_only", "position 4 leaves (score 1, no other could); position 8 takes its slot"),
        ("chunked_prefill", "position 3 leaves (score 1.149); position 6 takes its slot"),
        ("chunked_prefill", "position 7 takes empty slot 5"),
        ("chunked_prefill", "step 0, KV head 1: positions 0, 1, 2, 3, 4 join"),
        ("gqa_sinks", "10 candidates, budget 10: nobody leaves"),
    ],
)
def test_trace_says_what_happened(name: str, line: str) -> None:
    console = Console(record=True, width=80, highlight=False, file=io.StringIO())
    steps = trace.run_case(name, console)
    lines = console.export_text().splitlines()
    assert line in lines
    assert sum(text.startswith("step ") for text in lines) == len(steps)


def test_trace_names_the_sinks() -> None:
    console = Console(record=True, width=80, highlight=False, file=io.StringIO())
    trace.run_case("gqa_sinks", console)
    states: dict[str, set[str]] = {}
    for cells in rows_of(console.export_text()):
        states.setdefault(cells[0], set()).add(cells[-1])
    assert states["0"] == states["1"] == {"sink"}
    assert states["2"] == {"recent", "candidate", "kept"}


def test_trace_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["name"] == "hand_example"
    (step,) = result["steps"]
    assert step["victims"] == [8]
    assert step["stored"] == [[11, 3]]
    assert step["margin"] == pytest.approx(0.84)
    assert step["kept"] == [1, 3, 5, 9, 10, 11]
    golden = read_case("hand_example")
    assert step["weights"] == [[pytest.approx(golden["weights"])]]
    assert step["output"] == [[pytest.approx(golden["output"][0])]]
    assert run_command("--json", "--case", "local_only") == 0
    assert json.loads(capsys.readouterr().out)["steps"][-1]["margin"] is None


def test_trace_lists_its_cases(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("--list") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == GOLDEN
    assert "local_only         heavy = 0: a sliding window" in lines
    assert run_command("--list", "--json") == 0
    assert json.loads(capsys.readouterr().out) == trace.list_cases()


def test_trace_refuses_an_unknown_case_and_names_the_known(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_command("--case", "hand_exmaple") == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        f"h2o-kv trace: case must be one of {', '.join(GOLDEN)}, "
        "or the path of a .json file, got 'hand_exmaple'\n"
    )


def test_trace_reads_a_case_by_path(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(read_case("random_16")), encoding="utf-8")
    by_path, by_name = (trace.replay(trace.load_case(x)) for x in (path, "random_16"))
    assert [step.victims for step in by_path] == [step.victims for step in by_name]
    with pytest.raises(ValueError, match=r"cannot read case file .*no.json: No such file"):
        trace.load_case(tmp_path / "no.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda case: case.pop("query"), r"case file .*bad.json lacks key 'query'"),
        (lambda case: case["config"].pop("heavy"), r"case file .*bad.json lacks key 'heavy'"),
        (
            lambda case: case["config"].update(window=3),
            r"bad.json is not a case: config must have only sink, .*, got 'window'",
        ),
        (
            lambda case: case["value"][0].pop(),
            r"must have the same number of tokens and head_dim, got query \[1, 10, 4\], "
            r"key \[1, 10, 4\], value \[1, 9, 4\]",
        ),
        (
            lambda case: case.update(
                key=case["key"] * 2, value=case["value"] * 2, query=case["query"] * 3
            ),
            r"num_q_heads must be a multiple of num_kv_heads, got num_q_heads=3, num_kv_heads=2",
        ),
        (lambda case: case.update(key=[1.0]), r"bad.json is not a case: "),
    ],
)
def test_trace_says_what_is_wrong_in_a_file(tmp_path: Path, change: Any, message: str) -> None:
    case = read_case("local_only")
    change(case)
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(case), encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        trace.load_case(path)


def test_trace_says_when_a_file_is_not_json(tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match=r"trace: case file .*bad.json is not JSON: Expecting"):
        trace.load_case(path)
