"""The rules of h2o_attention_decode other than H2O's own: beside the reference, step by step."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from h2o_kv import ops, reference
from h2o_kv.reference_scoring import Rules
from op_helpers import (
    DTYPES,
    State,
    Tokens,
    assert_bitwise,
    assert_close,
    check_calls,
    decode,
    is_emulated,
    operator,
    pad,
    planted_tokens,
    random_state,
    rank_angles,
    reference_decode,
)

RULES: dict[str, dict[str, Any]] = {
    "decay": {"score_rule": "decay", "score_decay": 0.75},
    "mean": {"score_rule": "mean"},
    "value": {"score_rule": "value"},
    "misses": {"score_rule": "misses"},
    "prompt": {"score_rule": "prompt"},
    "random": {"score_rule": "random", "score_seed": 7},
    "given": {"score_rule": "given"},
    "strided": {"pattern_stride": 3, "pattern_columns": 1},
    "fixed": {"score_rule": "given", "pattern_stride": 8, "pattern_columns": 3},
    "last queries": {"score_queries": 3},
    "pooled": {"score_pool": 5},
    "decay of the last": {"score_rule": "decay", "score_decay": 0.5, "score_queries": 4},
}
ONE_BY_ONE = ("misses",)


@pytest.mark.parametrize("gqa_reduce", ["sum", "max"])
@pytest.mark.parametrize("width", [1, 6])
@pytest.mark.parametrize("rule", RULES)
def test_every_rule_is_the_references(
    rule: str, width: int, gqa_reduce: str, device: torch.device
) -> None:
    if width > 1 and rule in ONE_BY_ONE:
        pytest.skip("tokens join one by one")
    state = random_state(2, 2, 14, 8, torch.float64, seed=3, newest=20)
    real = [[True] * 24, [False, False, True, True, False] + [True] * 19]
    tokens = pad(planted_tokens(2, 6, 2, 24, 8, torch.float64, seed=5, start=20), real)
    # Whole numbers of misses are often equal: ties are settled and compared, but have no margin.
    clear = {"pooled": 0.8}.get(rule, 0.9)  # two neighbours have the same mean
    if rule in ("misses", "given", "fixed", "prompt"):
        clear = 0.0
    check_calls(
        state,
        tokens,
        (1, 7, 4),
        width,
        device,
        gqa_reduce=gqa_reduce,
        clear_share=clear,
        **RULES[rule],
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", ["decay", "mean", "value", "random", "strided"])
def test_every_dtype(rule: str, dtype: torch.dtype, device: torch.device) -> None:
    state = random_state(1, 2, 40, 16, dtype, seed=1, newest=40)
    tokens = planted_tokens(1, 4, 2, 8, 16, dtype, seed=2, start=40)
    tolerance = {"value": 0.0}.get(rule, 0.8)  # |v| rounds more than a weight does
    check_calls(state, tokens, (2, 30, 6), 1, device, clear_share=tolerance, **RULES[rule])


@pytest.mark.parametrize("rule", ["misses", "given", "prompt", "fixed"])
def test_whole_numbers_give_the_same_victims(rule: str, device: torch.device) -> None:
    """Where scores are exact there are ties, and who leaves is the same everywhere."""
    tokens = planted_tokens(2, 4, 2, 40, 8, torch.float64, seed=11)
    own, expected = State.empty(2, 2, 12), State.empty(2, 2, 12)
    _, evicted = decode(own, tokens, (1, 6, 5), device, **RULES[rule])
    _, true_evicted, _ = reference_decode(expected, tokens, (1, 6, 5), **RULES[rule])
    assert torch.equal(evicted, true_evicted)
    assert torch.equal(own.positions, expected.positions)
    assert_close(own.scores, expected.scores, 0.0 if rule != "prompt" else 1e-12)
    assert (evicted >= 0).any()


@pytest.mark.parametrize("rule", RULES)
def test_several_tokens_are_as_many_calls(rule: str, device: torch.device) -> None:
    tokens = planted_tokens(1, 4, 2, 12, 8, torch.float32, seed=4)
    together, singly = (
        State.empty(1, 2, 6, 8, torch.float32),
        State.empty(1, 2, 6, 8, torch.float32),
    )
    result = decode(together, tokens, (1, 3, 2), device, **RULES[rule])
    parts = [
        decode(singly, tokens.columns(i, i + 1), (1, 3, 2), device, **RULES[rule])
        for i in range(tokens.num)
    ]
    assert_bitwise(result, [torch.cat(of, 2) for of in zip(*parts, strict=True)])
    assert_bitwise(together[2:], singly[2:])


def weights_of(*logits: float) -> list[float]:
    """Softmax weights, by hand."""
    exponentials = [math.exp(logit) for logit in logits]
    return [e / sum(exponentials) for e in exponentials]


def step(
    state: State, position: int, key: float, device: torch.device, value: float = 1.0, **rule: Any
) -> Tensor:
    """One token of head_dim 1 whose query is 1, so that logits are the keys."""
    own = torch.full((1, 1, 1, 1), 1.0, dtype=torch.float64)
    tokens = Tokens(own, own * key, own * value, torch.tensor([[position]]))
    counts = rule.pop("counts", (0, 8, 1))
    return decode(state, tokens, counts, device, scale=1.0, **rule)[1]


def test_decay_mean_value_and_misses_by_hand(device: torch.device) -> None:
    first, second = weights_of(0.5, -0.5), weights_of(0.5, -0.5, 2.0)
    expected = {
        "decay": [(1 * 0.5 + first[0]) * 0.5 + second[0], first[1] * 0.5 + second[1], second[2]],
        "mean": [1 + first[0] + second[0], first[1] + second[1], second[2]],
        # |v| is 3, 1 and 0.5.
        "value": [(1 + first[0] + second[0]) * 3, (first[1] + second[1]) * 1, second[2] * 0.5],
        # Even shares are 1, 1/2 and 1/3; the weights 1, then .73 .27, then .17 .06 .77.
        "misses": [-1.0, -2.0, 0.0],
    }
    for rule, scores in expected.items():
        options = {"score_rule": rule} | ({"score_decay": 0.5} if rule == "decay" else {})
        state = State.empty(1, 1, 9, 1)
        for position, (key, value) in enumerate([(0.5, -3.0), (-0.5, 1.0), (2.0, 0.5)]):
            step(state, position, key, device, value, **options)
        assert state.scores[0, 0, :3].tolist() == pytest.approx(scores, abs=1e-12), rule


def test_the_mean_lets_an_old_token_go_that_the_sum_keeps(device: torch.device) -> None:
    """Position 0 has a sum of 2 in 10 steps, position 8 of 1 in 2: by sum 8 leaves, by mean 0."""
    for rule, victim in (("sum", 8), ("mean", 0)):
        state = State.empty(1, 1, 2, 1, fill=0.0)
        state.positions[0, 0] = torch.tensor([0, 8])
        state.scores[0, 0] = torch.tensor([2.0, 1.0])
        counts = (0, 1, 1)
        assert step(state, 9, 0.0, device, score_rule=rule, counts=counts).item() == victim
        shrunk = State.empty(1, 1, 3, 1, fill=0.0)
        shrunk.positions[0, 0] = torch.tensor([0, 8, 9])
        shrunk.scores[0, 0] = torch.tensor([2.0, 1.0, 0.5])
        nothing = planted_tokens(1, 1, 1, 0, 1)
        none = torch.zeros(1, 1, 0, dtype=torch.float64)
        moved = shrunk.to(device)
        left = ops.evict(
            *moved, *(t.to(device) for t in (nothing.key, nothing.value, none, nothing.position)),
            0, 1, 1, score_rule=rule,
        )  # fmt: skip
        assert left.cpu().flatten().tolist() == [victim, -1, -1]


def test_tokens_of_the_pattern_leave_last_and_the_oldest_first(device: torch.device) -> None:
    """Every 4th position from 3 on is of the pattern; the budget of 4 fills with them."""
    state = State.empty(1, 1, 4, 1)
    left = [
        int(step(state, p, 0.0, device, counts=(0, 3, 1), pattern_stride=4, pattern_columns=1))
        for p in range(20)
    ]
    # Until 15 others leave, the lowest sum first; then all but the newest are of the pattern.
    assert [p for p in left if p >= 0 and p % 4 == 3] == [3]
    assert state.kept() == [7, 11, 15, 19]


def test_random_numbers_are_the_references_and_differ_by_head_position_and_seed(
    device: torch.device,
) -> None:
    tokens = planted_tokens(2, 3, 3, 5, 8, torch.float32)
    state = State.empty(2, 3, 5, 8, torch.float32)
    decode(state, tokens, (0, 4, 1), device, score_rule="random", score_seed=5)
    rules = Rules(score_rule="random", score_seed=5)
    expected = [[rules.drawn(head, p) for p in range(5)] for head in range(3)]
    assert state.scores[0].tolist() == expected == state.scores[1].tolist()
    assert len({number for head in expected for number in head}) == 15
    assert all(0 <= number < 1 for head in expected for number in head)
    other = [Rules(score_rule="random", score_seed=6).drawn(0, p) for p in range(5)]
    assert not set(other) & set(expected[0])


def test_random_numbers_are_even() -> None:
    rules = Rules(score_rule="random", score_seed=0)
    numbers = torch.tensor([rules.drawn(h, p) for h in range(4) for p in range(2500)])
    assert abs(numbers.mean().item() - 0.5) < 0.01
    assert abs(numbers.var().item() - 1 / 12) < 0.003
    shares = torch.histc(numbers, 10, 0, 1) / len(numbers)
    assert (shares - 0.1).abs().max() < 0.015


def test_given_scores_are_what_is_compared(device: torch.device) -> None:
    tokens = planted_tokens(1, 1, 1, 5, 8)
    given_scores = torch.tensor([[[0.3, 0.1, 0.5, 0.2, 0.4]]], dtype=torch.float64)
    state = State.empty(1, 1, 2, 8)
    _, evicted = decode(
        state, tokens, (0, 2, 0), device, score_rule="given", score_new=given_scores
    )
    assert evicted.flatten().tolist() == [-1, -1, 1, 3, 0]
    assert state.score_of() == {2: 0.5, 4: 0.4}


def test_given_scores_add_to_those_of_another_rule(device: torch.device) -> None:
    tokens = planted_tokens(2, 4, 2, 7, 8)
    plain, added = State.empty(2, 2, 7, 8), State.empty(2, 2, 7, 8)
    given_scores = torch.rand(2, 2, 7, dtype=torch.float64)
    for chunk in (1, 7):
        decode(plain, tokens, (0, 6, 1), device, chunk=chunk)
        decode(added, tokens, (0, 6, 1), device, chunk=chunk, score_new=given_scores)
        assert_close(added.scores, plain.scores + given_scores, 1e-12)
        plain, added = State.empty(2, 2, 7, 8), State.empty(2, 2, 7, 8)


def test_a_one_shot_selection_is_that_of_snapkv(device: torch.device) -> None:
    """SnapKV, written out: votes of the last 4 queries, mean pooling of 5, the 6 highest stay."""
    window, pool, capacity, num = 4, 5, 10, 40
    tokens = planted_tokens(1, 2, 2, num, 8, seed=9)
    logits = tokens.query[0] @ tokens.key[0].transpose(1, 2) * 8**-0.5
    causal = torch.ones(num, num, dtype=torch.bool).tril()
    weights = logits.masked_fill(~causal, -math.inf).softmax(-1)
    votes = weights[:, -window:, :-window].sum(1)
    pooled = torch.nn.functional.avg_pool1d(votes, pool, 1, pool // 2)
    best = pooled.topk(capacity - window, -1).indices
    expected = [sorted([*row.tolist(), *range(num - window, num)]) for row in best]
    state = State.empty(1, 2, capacity, 8)
    decode(
        state, tokens, (0, capacity - window, window), device,
        chunk=num, score_rule="prompt", score_queries=window, score_pool=pool,
    )  # fmt: skip
    assert [state.kept(head=head) for head in range(2)] == expected
    for head in range(2):
        scores = state.score_of(head=head)
        for index in best[head].tolist():
            assert scores[index] == pytest.approx(pooled[head, index].item(), abs=1e-12)
    # What is generated has no vote and leaves at the end of the window, once the prompt's own
    # window has taken its part in the vote.
    later = planted_tokens(1, 2, 2, 9, 8, seed=10, start=num)
    _, evicted = decode(state, later, (0, capacity - window, window), device, score_rule="prompt")
    assert (evicted[0, :, :window] < num).all()
    assert evicted[0, :, window:].tolist() == [list(range(num, num + 5))] * 2


READINGS = [(1, 1), (3, 1), (4, 4), (6, 3), (100, 1), (100, 8)]


@pytest.mark.parametrize(("slots", "page"), READINGS)
def test_reading_less_is_the_references(slots: int, page: int, device: torch.device) -> None:
    state = random_state(2, 2, 17, 8, torch.float64, seed=3, newest=20)
    tokens = planted_tokens(2, 6, 2, 12, 8, torch.float64, seed=5, start=20)
    tokens = pad(tokens, [[True] * 12, [False, False] + [True] * 10])
    expected = state.clone()
    options = {"read_slots": slots, "read_page": page}
    output, evicted = decode(state, tokens, (1, 8, 4), device, **options)
    true_output, true_evicted, _ = reference_decode(expected, tokens, (1, 8, 4), **options)
    assert torch.equal(evicted, true_evicted)
    assert_close(output, true_output, 1e-12)
    assert_close(state.scores, expected.scores, 1e-12)
    assert torch.equal(state.positions, expected.positions)


def test_reading_everything_is_reading_all(device: torch.device) -> None:
    tokens = planted_tokens(1, 4, 2, 16, 8, torch.float64)
    for page in (1, 4):
        own, whole = State.empty(1, 2, 9, 8), State.empty(1, 2, 9, 8)
        result = decode(own, tokens, (1, 5, 3), device, read_slots=12, read_page=page)
        for tensor, other in zip(result, decode(whole, tokens, (1, 5, 3), device), strict=True):
            assert_close(tensor, other, 1e-12)
        assert torch.equal(own.positions, whole.positions)


def test_top_k_by_hand(device: torch.device) -> None:
    """Logits 0, 1, 2 and the new token's -5: the two highest are read, and the token itself."""
    state = State.empty(1, 1, 4, 1)
    for position, key in enumerate((0.0, 1.0, 2.0)):
        step(state, position, key, device, counts=(0, 4, 0))
    before = state.scores.clone()
    step(state, 3, -5.0, device, counts=(0, 4, 0), read_slots=2)
    weights = weights_of(1.0, 2.0, -5.0)
    assert (state.scores - before)[0, 0].tolist() == pytest.approx([0.0, *weights], abs=1e-12)


def test_the_victims_of_a_sparse_step_are_handed_out(device: torch.device) -> None:
    tokens = planted_tokens(2, 2, 2, 12, 8, torch.float32, seed=6)
    plain = State.empty(2, 2, 5, 8, torch.float32)
    rooms = [torch.full_like(tokens.key, 9.0) for _ in range(2)]
    _, evicted = decode(
        plain, tokens, (1, 2, 2), device, read_slots=3, k_evicted=rooms[0], v_evicted=rooms[1]
    )
    assert (evicted >= 0).any()
    for row in range(2):
        for head in range(2):
            for column, position in enumerate(evicted[row, head].tolist()):
                for room, source in zip(rooms, (tokens.key, tokens.value), strict=True):
                    own = room[row, head, column]
                    if position < 0 or position == column:
                        assert (own == 9).all()
                    else:
                        assert torch.equal(own, source[row, head, position])


def test_given_scores_add_to_those_of_a_sparse_step(device: torch.device) -> None:
    tokens = planted_tokens(2, 2, 2, 9, 8, seed=2)
    given_scores = 3 * torch.rand(2, 2, 9, dtype=torch.float64)
    own, expected = State.empty(2, 2, 5, 8), State.empty(2, 2, 5, 8)
    options = {"read_slots": 2, "score_new": given_scores}
    output, evicted = decode(own, tokens, (0, 3, 2), device, **options)
    true_output, true_evicted, _ = reference_decode(expected, tokens, (0, 3, 2), **options)
    assert torch.equal(evicted, true_evicted)
    assert_close(output, true_output, 1e-12)
    assert_close(own.scores, expected.scores, 1e-12)


@pytest.mark.parametrize("rope", [False, True])
def test_chunks_read_everything_also_one_that_is_left_alone(
    rope: bool, device: torch.device
) -> None:
    """Rows of three and of one real token, two at a time: the last of each is alone."""
    tokens = pad(
        planted_tokens(2, 2, 1, 3, 8, seed=7, start=20), [[True] * 3, [False, False, True]]
    )
    state = random_state(2, 1, 12, 8, torch.float64, seed=3, newest=20, full=True)
    angles = rank_angles(16, 4, torch.float64) if rope else {}
    sparse, dense = state.clone(), state.clone()
    result = decode(sparse, tokens, (0, 8, 4), device, chunk=2, read_slots=2, read_page=2, **angles)
    assert_bitwise(result, decode(dense, tokens, (0, 8, 4), device, chunk=2, **angles))
    assert_bitwise(sparse[2:], dense[2:])


def test_padding_is_zeros_beside_infinite_values_in_a_sparse_step(device: torch.device) -> None:
    state = random_state(1, 1, 4, 8, torch.float64, seed=1, newest=4, full=True)
    state.v_cache[0, 0, 1] = math.inf
    tokens = pad(planted_tokens(1, 1, 1, 1, 8, start=4), [[False]])
    output, _ = decode(state, tokens, (0, 4, 0), device, read_slots=2)
    assert not output.any()


def test_an_empty_batch_reads_nothing(device: torch.device) -> None:
    tokens, state = planted_tokens(0, 2, 1, 3, 8), State.empty(0, 1, 4, 8)
    for options in ({"read_slots": 2}, {"read_slots": 4, "read_page": 2}):
        output, evicted = decode(state, tokens, (0, 2, 2), device, **options)
        assert output.shape == tokens.query.shape
        assert evicted.shape == (0, 1, 3)


def test_a_token_alone_in_its_chunk_is_scored_as_alone(device: torch.device) -> None:
    """In a padded row of a chunk of three one real token: by "prompt" it gets nothing, and no mean."""
    tokens = planted_tokens(1, 2, 1, 1, 8, start=7)
    column = torch.tensor([-1, -1, 7])[None]
    wide = Tokens(*(t.repeat(1, 1, 3, 1) for t in tokens[:3]), column)
    for rules in ({"score_rule": "prompt"}, {"score_pool": 5}):
        state = random_state(1, 1, 6, 8, torch.float64, seed=1, newest=7)
        padded, alone = state.clone(), state.clone()
        decode(padded, wide, (1, 5, 0), device, chunk=3, **rules)
        decode(alone, tokens, (1, 5, 0), device, **rules)
        assert_close(padded.scores, alone.scores, 1e-12)
        assert torch.equal(padded.positions, alone.positions)


@pytest.mark.parametrize("chunk", [1, 2])
def test_scores_that_lie_where_the_operator_writes(chunk: int, device: torch.device) -> None:
    """`score_new` may be a part of the scores that are written: it counts as it was."""
    tokens = planted_tokens(1, 2, 1, 4, 8, seed=3, start=9)
    for options in ({}, {"read_slots": 2}, rank_angles(12, 4, torch.float64)):
        own = random_state(1, 1, 6, 8, torch.float64, seed=5, newest=9).to(device)
        apart = own.clone()
        results = []
        for state, given_scores in (
            (own, own.scores[:, :, :4]),
            (apart, apart.scores[:, :, :4] + 0),
        ):
            query, key, value, position = tokens.to(device)
            placed = {n: t.to(device) if isinstance(t, Tensor) else t for n, t in options.items()}
            results.append(
                ops.attention_decode(
                    query, *state, key, value, position, 0, 4, 2,
                    chunk=chunk, score_new=given_scores, **placed,
                )
            )  # fmt: skip
        assert_bitwise(results[0], results[1])
        assert_bitwise(own[2:], apart[2:])


@st.composite
def any_rules(draw: st.DrawFn) -> dict[str, Any]:
    rule = draw(st.sampled_from(["sum", "decay", "mean", "value", "prompt", "random", "given"]))
    rules: dict[str, Any] = {"score_rule": rule}
    if rule == "decay":
        rules["score_decay"] = draw(st.floats(0.01, 1.0))
    if rule == "random":
        rules["score_seed"] = draw(st.integers(-(2**63), 2**63 - 1))
    rules["score_queries"] = draw(st.integers(0, 9))
    rules["score_pool"] = draw(st.sampled_from([1, 3, 7]))
    rules["pattern_stride"] = draw(st.integers(0, 6))
    rules["pattern_columns"] = draw(
        st.integers(min(1, rules["pattern_stride"]), rules["pattern_stride"])
    )
    return rules


@settings(max_examples=60)
@given(rules=any_rules(), chunk=st.integers(1, 8), seed=st.integers(0, 1000))
def test_any_rules_together_keep_what_the_reference_keeps(
    rules: dict[str, Any], chunk: int, seed: int
) -> None:
    tokens = planted_tokens(1, 4, 2, 14, 4, torch.float64, seed=seed)
    own, expected = State.empty(1, 2, 7, 4), State.empty(1, 2, 7, 4)
    decode(own, tokens, (1, 4, 2), chunk=chunk, **rules)
    reference_decode(expected, tokens, (1, 4, 2), chunk=chunk, **rules)
    assert torch.equal(own.positions, expected.positions)
    assert_close(own.scores, expected.scores, 1e-10)


def test_evicting_by_a_pattern_is_the_references(device: torch.device) -> None:
    state = random_state(2, 2, 12, 8, torch.float64, seed=8, newest=30, full=True)
    tokens = planted_tokens(2, 2, 2, 4, 8, torch.float64, seed=5, start=30)
    scores = torch.rand(2, 2, 4, dtype=torch.float64)
    expected = state.clone()
    for rules in ({"score_rule": "mean"}, {"pattern_stride": 3, "pattern_columns": 2}):
        moved = state.to(device)
        evicted = ops.evict(
            *moved, *(t.to(device) for t in (tokens.key, tokens.value, scores, tokens.position)),
            1, 5, 2, **rules,
        )  # fmt: skip
        true = reference.evict(
            *expected, tokens.key, tokens.value, scores, tokens.position, 1, 5, 2, **rules
        )
        assert torch.equal(evicted.cpu(), true)
        assert torch.equal(moved.positions.cpu(), expected.positions)
        expected = state.clone()


BAD = {
    'score_rule must be one of "sum", "decay".* got "best"': {"score_rule": "best"},
    "score_decay must be > 0 and <= 1, got 0": {"score_rule": "decay", "score_decay": 0.0},
    'score_decay must be 1 unless score_rule is "decay", got 0.5 with "sum"': {"score_decay": 0.5},
    'score_seed must be 0 unless score_rule is "random", got 3 with "sum"': {"score_seed": 3},
    "score_queries must be >= 0, got -1": {"score_queries": -1},
    "score_pool must be odd and >= 1, got 4": {"score_pool": 4},
    "pattern_stride must be in 0..2147483647, got -2": {"pattern_stride": -2},
    "pattern_columns must be in 1..pattern_stride = 4, got 0": {"pattern_stride": 4},
    "pattern_columns must be in 0..pattern_stride = 0, got 2": {"pattern_columns": 2},
    "read_slots must be >= 0, got -1": {"read_slots": -1},
    "read_page must be in 1..2147483647, got 0": {"read_slots": 1, "read_page": 0},
    "read_page must be 1 unless read_slots is given, got 16": {"read_page": 16},
    'score_rule must be "sum" with read_slots, got "mean"': {"read_slots": 4, "score_rule": "mean"},
    'chunk must be 1 with score_rule "misses".* got 5': {"score_rule": "misses", "chunk": 5},
    "read_page must be 1 with alibi_slopes.* got 4": {
        "read_slots": 4,
        "read_page": 4,
        "alibi_slopes": torch.ones(2),
    },
}


@pytest.mark.parametrize("message", BAD)
def test_bad_rules_are_refused_before_anything_is_written(
    message: str, device: torch.device
) -> None:
    tokens = planted_tokens(1, 2, 1, 3, 8)
    state = State.empty(1, 1, 4, 8)
    before = state.clone()
    with pytest.raises(ValueError, match=f"h2o_attention_decode: {message}"):
        decode(state, tokens, (0, 2, 2), device, **BAD[message])
    assert_bitwise(state, before)


def test_given_scores_of_another_shape_or_dtype_are_refused(device: torch.device) -> None:
    tokens, state = planted_tokens(1, 2, 1, 3, 8), State.empty(1, 1, 4, 8)
    with pytest.raises(RuntimeError, match=r"score_new must be \[batch, num_kv_heads, num_new\]"):
        decode(state, tokens, (0, 2, 2), device, score_new=torch.zeros(1, 1, 4).double())
    with pytest.raises(RuntimeError, match="score_new must be float64, got Float"):
        decode(state, tokens, (0, 2, 2), device, score_new=torch.zeros(1, 1, 3))


def test_meta_tensors_take_the_rules() -> None:
    tokens = planted_tokens(1, 2, 1, 3, 8).to("meta")
    state = State.empty(1, 1, 4, 8).to("meta")
    query, key, value, position = tokens
    for rule in RULES.values():
        output, evicted = ops.attention_decode(query, *state, key, value, position, 0, 2, 2, **rule)
        assert output.shape == query.shape
        assert evicted.shape == (1, 1, 3)


def test_opcheck_with_rules(device: torch.device) -> None:
    if is_emulated():
        pytest.skip("of the library's own operators")
    tokens, state = planted_tokens(1, 2, 1, 3, 8), State.empty(1, 1, 4, 8, fill=0.0)
    query, key, value, position = tokens.to(device)
    for rule in (RULES["decay"], {"read_slots": 2}):
        torch.library.opcheck(
            operator("decode").default,
            (query, *state.to(device), key, value, position, 0, 2, 2),
            rule,
        )


def test_what_is_empty_is_never_read(device: torch.device) -> None:
    """Slots full of NaN change no bit, by no rule."""
    tokens = planted_tokens(1, 2, 2, 3, 8, torch.float32)
    for rule in [*RULES.values(), {"read_slots": 2}, {"read_slots": 4, "read_page": 2}]:
        results = []
        for fill in (0.0, math.nan, math.inf):
            state = State.empty(1, 2, 6, 8, torch.float32, fill=fill)
            results.append([*decode(state, tokens, (1, 3, 2), device, **rule), *state[2:]])
        assert_bitwise(results[1], results[0])
        assert_bitwise(results[2], results[0])
