"""Parity modes on recorded attention: worked cases, lists in float64, and h2o_kv.reference."""

from __future__ import annotations

import doctest
import json
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import parity_lists as lists
from h2o_kv import parity, reference
from op_helpers import State, planted_tokens, rank_angles
from parity_lists import positions

CASES = json.loads((Path(__file__).parent / "data/parity_cases.json").read_text(encoding="utf-8"))
SEEDS = range(9)
PROMPT, LENGTH, HEADS = 14, 30, 3
# A tenth of the prompt, of the example, and no round numbers.
RATIOS = [(0.15, 0.15), (0.3, 0.22), (0.0, 0.3), (0.3, 0.0), (0.08, 0.3), (0.05, 0.05), (1.0, 1.0)]


def recorded(seed: int, *, heads: int = HEADS, kv_heads: int | None = None) -> Tensor:
    tokens = planted_tokens(1, heads, kv_heads or heads, LENGTH, seed=seed)
    keys = tokens.key[0].repeat_interleave(heads // (kv_heads or heads), 0)
    return tokens.query[0] @ keys.transpose(-1, -2) * tokens.query.shape[-1] ** -0.5


# ---- Worked by hand


def total(terms: str) -> float:
    return float(sum(Fraction(term) for term in terms.split(" + ")))


@pytest.mark.parametrize("case", CASES["cases"], ids=lambda case: case["name"])
def test_hand_worked_case(case: dict[str, Any]) -> None:
    masses = CASES["attention"][case["attention"]]
    num = len(masses)
    logits = torch.full((1, num, num), math.nan, dtype=torch.float64)
    for t, row in enumerate(masses):
        for i, mass in enumerate(row):
            logits[0, t, i] = math.log(mass) if mass else -1000.0
    mode = parity.MODES[case["mode"]](**case["options"])
    trace = mode.replay(logits, case["prompt_len"])
    assert [sorted(positions(row)) for row in trace.attended[0]] == case["attended"]
    assert [sorted(positions(row)) for row in trace.kept[0]] == case["kept"]
    for t, row in enumerate(masses):
        shares = {i: row[i] for i in case["attended"][t]}
        if case["name"] == "utils_hh_nothing" and t >= case["prompt_len"]:
            shares = dict.fromkeys(shares, 1)
        weights = {i: mass / sum(shares.values()) for i, mass in shares.items()}
        lists.assert_by_position(trace.weights[0, t : t + 1], [weights], 1e-12)
    for t, scores in enumerate(case["scores"], case["first_row"]):
        expected = {int(i): total(terms) for i, terms in scores.items()}
        lists.assert_by_position(trace.scores[0, t : t + 1], [expected], 1e-12)
    if "slots" in case:
        assert trace.slots is not None
        assert trace.slots[0, case["first_row"] :].tolist() == case["slots"]


# ---- Against lists


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("counts", [(2, 2), (5, 3), (0, 4), (4, 0), (1, 1), (20, 20)])
def test_real_drop(counts: tuple[int, int], seed: int) -> None:
    logits = recorded(seed)
    trace = parity.RealDrop(*counts).replay(logits, PROMPT)
    lists.check(trace, logits, lambda rows: lists.drop(rows, PROMPT, *counts))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("hh_ratio", "k"), [(0.15, 2), (0.3, 4), (0.5, 7)])
def test_flexgen(hh_ratio: float, k: int, seed: int) -> None:
    logits = recorded(seed)
    mode = parity.FlexGen(hh_ratio)
    assert mode.counts(PROMPT) == (k - 1, k)
    lists.check(mode.replay(logits, PROMPT), logits, lambda rows: lists.flexgen(rows, PROMPT, k))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("ratios", RATIOS)
def test_utils_hh(ratios: tuple[float, float], seed: int) -> None:
    logits = recorded(seed)
    counts = [math.floor(Fraction(str(ratio)) * PROMPT) for ratio in ratios]
    trace = parity.UtilsHH(*ratios).replay(logits, PROMPT)
    lists.check(trace, logits, lambda rows: lists.utils_hh(rows, PROMPT, *counts))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("ratios", RATIOS)
@pytest.mark.parametrize("name", ["lm_eval_local", "lm_eval_oracle"])
def test_lm_eval(name: str, ratios: tuple[float, float], seed: int) -> None:
    logits = recorded(seed)
    counts = [math.floor(Fraction(str(ratio)) * LENGTH) for ratio in ratios]
    trace = parity.MODES[name](*ratios).replay(logits, PROMPT)
    lists.check(trace, logits, lambda rows: getattr(lists, name)(rows, *counts))


# ---- What the modes are to each other, and to the reference


def reference_steps(
    state: State, tokens: Any, counts: tuple[int, int, int], steps: list[tuple[int, int]], **kw: Any
) -> list[tuple[Tensor, list[list[int]], list[dict[int, float]]]]:
    """Output, kept positions and scores of each KV head after each step (first, last + 1)."""
    results = []
    for start, stop in steps:
        new = tokens.columns(start, stop)
        output, _ = reference.attention_decode(
            new.query, *state, new.key, new.value, new.position, *counts, chunk=stop - start, **kw
        )
        heads = range(state.positions.shape[1])
        kept = [state.kept(0, head) for head in heads]
        results.append((output[0], kept, [state.score_of(0, head) for head in heads]))
    return results


def check_steps(
    trace: parity.ParityTrace, value: Tensor, steps: list[tuple[int, int]], results: list[Any]
) -> None:
    """`trace` says what the reference does: outputs, kept sets and scores."""
    group_size = trace.attended.shape[0] // value.shape[0]
    outputs = trace.weights @ value.repeat_interleave(group_size, 0)
    for (start, stop), (output, kept, scores) in zip(steps, results, strict=True):
        torch.testing.assert_close(outputs[:, start:stop], output, atol=1e-12, rtol=0)
        for head, held in enumerate(kept):
            assert positions(trace.kept[head, stop - 1]) == set(held)
            lists.assert_by_position(trace.scores[head, stop - 1 : stop], [scores[head]], 1e-12)


def one_by_one(first: int) -> list[tuple[int, int]]:
    return [(t, t + 1) for t in range(first, LENGTH)]


@pytest.mark.parametrize("seed", SEEDS)
def test_real_drop_is_the_fixed_order_with_the_prompt_as_one_chunk(seed: int) -> None:
    tokens = planted_tokens(1, 4, 2, LENGTH, seed=seed)
    steps = [(0, PROMPT), *one_by_one(PROMPT)]
    results = reference_steps(State.empty(1, 2, 7), tokens, (0, 4, 3), steps)
    logits = recorded(seed, heads=4, kv_heads=2)
    trace = parity.RealDrop(4, 3).replay(logits, PROMPT, group_size=2)
    check_steps(trace, tokens.value[0], steps, results)


@pytest.mark.parametrize("chunk", [1, 4])
@pytest.mark.parametrize("seed", SEEDS)
def test_fixed_order_streaming_with_sinks(seed: int, chunk: int) -> None:
    tokens = planted_tokens(1, 4, 2, LENGTH, seed=seed)
    starts = range(0, PROMPT, chunk)
    steps = [(t, min(t + chunk, PROMPT)) for t in starts] + one_by_one(PROMPT)
    results = reference_steps(State.empty(1, 2, 9), tokens, (2, 4, 3), steps)
    mode = parity.Fixed(4, 3, num_sink=2, prefill="streaming", prefill_chunk=chunk)
    trace = mode.replay(recorded(seed, heads=4, kv_heads=2), PROMPT, group_size=2)
    check_steps(trace, tokens.value[0], steps, results)


@pytest.mark.parametrize("seed", SEEDS)
def test_real_drop_rolling_is_the_reference_with_ranks(seed: int) -> None:
    tokens = planted_tokens(1, 4, 2, LENGTH, seed=seed)
    angles = rank_angles(LENGTH, 3, torch.float64)
    steps = [(0, PROMPT), *one_by_one(PROMPT)]
    results = reference_steps(State.empty(1, 2, 7), tokens, (0, 4, 3), steps, **angles)
    trace = parity.RealDropRolling(4, 3).replay_vectors(
        tokens.query[0], tokens.key[0], angles["rope_cos"], angles["rope_sin"], PROMPT
    )
    check_steps(trace, tokens.value[0], steps, results)


@pytest.mark.parametrize("seed", SEEDS)
def test_flexgen_decodes_as_the_fixed_order_from_its_own_prefill(seed: int) -> None:
    tokens = planted_tokens(1, HEADS, HEADS, LENGTH, seed=seed)
    mode = parity.FlexGen(0.3)
    k = 4
    trace = mode.replay(recorded(seed), PROMPT)
    assert trace.slots is not None
    slots = trace.slots[:, PROMPT - 1]
    state = State.empty(1, HEADS, 2 * k - 1)
    state.positions[0] = slots.int()
    state.scores[0] = trace.scores[:, PROMPT - 1].gather(-1, slots)
    for head in range(HEADS):
        state.k_cache[0, head] = tokens.key[0, head, slots[head]]
        state.v_cache[0, head] = tokens.value[0, head, slots[head]]
    steps = one_by_one(PROMPT)
    results = reference_steps(state, tokens, (0, *mode.counts(PROMPT)), steps)
    check_steps(trace, tokens.value[0], steps, results)
    # In place: what stays in a heavy slot is never moved, and a row writes two slots.
    changed = trace.slots[:, PROMPT:] != trace.slots[:, PROMPT - 1 : -1]
    assert bool((changed.sum(-1) == 2).all())


@pytest.mark.parametrize("seed", SEEDS)
def test_flexgen_prefill_selects_k_heavy_and_k_minus_1_recent(seed: int) -> None:
    prompt = planted_tokens(1, HEADS, HEADS, LENGTH, seed=seed).columns(0, PROMPT)
    selected, scores = reference.prefill_select(prompt.query, prompt.key, prompt.position, 0, 4, 3)
    trace = parity.FlexGen(0.3).replay(recorded(seed), PROMPT)
    assert trace.slots is not None
    assert torch.equal(trace.slots[:, PROMPT - 1].sort(-1).values, selected[0])
    got = trace.scores[:, PROMPT - 1].gather(-1, selected[0])
    torch.testing.assert_close(got, scores[0], atol=1e-12, rtol=0)
    # Heavy ones in the order of their scores, then the latest in theirs.
    heavy = trace.scores[:, PROMPT - 1].gather(-1, trace.slots[:, PROMPT - 1, :4])
    assert bool((heavy.diff() <= 0).all())
    assert trace.slots[:, PROMPT - 1, 4:].tolist() == [[11, 12, 13]] * HEADS


def test_flexgen_scores_padding_and_attends_it() -> None:
    logits, pads = recorded(2), 3
    trace = parity.FlexGen(0.3).replay(logits, PROMPT, num_pads=pads)
    # A pad's row gives each of the 14 tokens a fourteenth, later ones too.
    torch.testing.assert_close(
        trace.weights[:, :pads, :PROMPT],
        torch.full((HEADS, pads, PROMPT), 1 / PROMPT, dtype=torch.float64),
    )
    sums = torch.full((HEADS, PROMPT), pads / PROMPT, dtype=torch.float64)
    for head in range(HEADS):
        for t in range(pads, PROMPT):
            for i, weight in lists.softmax(logits[head, t].tolist(), range(pads, t + 1)).items():
                sums[head, i] += weight
    held = trace.kept[:, PROMPT - 1, :PROMPT]
    torch.testing.assert_close(trace.scores[:, PROMPT - 1, :PROMPT], sums * held)


# ---- What is said of the scripts


@pytest.mark.parametrize("seed", SEEDS)
def test_utils_hh_attends_one_less_and_hides_each_token_for_a_step(seed: int) -> None:
    num_heavy, num_recent = 4, 3
    logits = recorded(seed)
    trace = parity.UtilsHH(0.3, 0.22).replay(logits, PROMPT)
    dropping = parity.RealDrop(num_heavy, num_recent).replay(logits, PROMPT)
    later = slice(PROMPT, None)
    assert bool(trace.attended[:, later].sum(-1).eq(num_heavy + num_recent).all())
    assert bool(dropping.attended[:, later].sum(-1).eq(num_heavy + num_recent + 1).all())
    for t in range(PROMPT, LENGTH):
        assert bool(trace.attended[:, t, t].all())
        left_the_window = t - num_recent
        assert not trace.attended[:, t, left_the_window].any()
        # Its score stays for the choice after it.
        assert bool((trace.scores[:, t - 1, left_the_window] > 0).all())
        # Others who are hidden have none.
        hidden = ~trace.kept[:, t - 1, :left_the_window]
        assert not trace.scores[:, t - 1, :left_the_window][hidden].any()


def test_utils_hh_lets_tokens_return_that_real_drop_has_lost() -> None:
    returned = 0
    for seed in SEEDS:
        attended = parity.UtilsHH(0.3, 0.22).replay(recorded(seed), PROMPT).attended
        for t in range(PROMPT + 1, LENGTH):
            returned += int((attended[:, t, :t] & ~attended[:, t - 1, :t]).sum())
        dropping = parity.RealDrop(4, 3).replay(recorded(seed), PROMPT).attended
        for t in range(PROMPT + 1, LENGTH):
            assert not (dropping[:, t, :t] & ~dropping[:, t - 1, :t]).any()
    assert returned > 5


@pytest.mark.parametrize("seed", SEEDS)
def test_lm_eval_local_has_dense_rows_then_at_most_the_budget(seed: int) -> None:
    num_heavy, num_recent = 6, 4
    trace = parity.LmEvalLocal(0.2, 0.14).replay(recorded(seed), LENGTH)
    counts = trace.attended.sum(-1)
    assert counts[:, :num_heavy].tolist() == [[t + 1 for t in range(num_heavy)]] * HEADS
    assert bool((counts[:, num_heavy:] <= num_heavy + num_recent).all())
    # Past the dense rows only num_heavy tokens have a score, and who lost his never has one again.
    with_score = trace.scores[:, num_heavy:] > 0
    assert bool(with_score.sum(-1).eq(num_heavy).all())
    again = with_score[:, 1:] & ~with_score[:, :-1]
    own = torch.eye(LENGTH, dtype=torch.bool)[num_heavy + 1 :]
    assert torch.equal(again, own.expand_as(again))


def test_lm_eval_oracle_looks_ahead_and_the_local_mask_does_not() -> None:
    logits = recorded(3)
    changed = logits.clone()
    changed[:, -8:, 1] += 9  # The last rows find token 1, which nobody cared for.
    early = slice(0, LENGTH - 8)
    local, oracle = parity.LmEvalLocal(0.2, 0.1), parity.LmEvalOracle(0.2, 0.1)
    before, after = (local.replay(each, LENGTH).attended[:, early] for each in (logits, changed))
    assert torch.equal(before, after)
    before, after = (oracle.replay(each, LENGTH).attended[:, early] for each in (logits, changed))
    assert not torch.equal(before, after)
    assert bool(after[:, 1:, 1].all())


@pytest.mark.parametrize("name", ["real_drop", "flexgen", "utils_hh", "lm_eval_local"])
def test_modes_keep_different_tokens(name: str) -> None:
    """The same attention, the same tenths: no mode stands for another."""
    logits = recorded(0)
    mode = parity.from_ratios(name, 0.3, 0.3, PROMPT)
    other = parity.from_ratios("lm_eval_oracle", 0.3, 0.3)
    later = slice(PROMPT, None)
    ours, theirs = (m.replay(logits, PROMPT).attended[:, later] for m in (mode, other))
    assert (ours != theirs).any(-1).float().mean() > 0.5


@pytest.mark.parametrize("name", [n for n in parity.MODES if n != "real_drop_rolling"])
def test_what_a_row_attends_is_what_was_kept_and_itself(name: str) -> None:
    mode = parity.from_ratios(name, 0.3, 0.3, PROMPT)
    for seed in SEEDS:
        trace = mode.replay(recorded(seed), PROMPT)
        own = torch.eye(LENGTH, dtype=torch.bool)
        assert torch.equal(trace.attended[:, 1:], trace.kept[:, :-1] | own[1:])
        torch.testing.assert_close(
            trace.weights.sum(-1), torch.ones(HEADS, LENGTH, dtype=torch.float64)
        )
        assert not trace.weights[~trace.attended].any()


def test_half_precision_scores_freeze_as_the_scripts_do() -> None:
    """In float16 a sum of 1024 does not notice 0.4: the script's dtype is the logits'."""
    num = 1100
    logits = torch.full((1, num, num), -60.0)
    logits[:, :, 0] = 0  # Everyone attends token 0.
    logits[:, -1] = torch.tensor([math.log(0.4)] + [-60.0] * (num - 2) + [math.log(0.6)])
    wide = parity.RealDrop(1, 1).replay(logits, num - 1)
    half = parity.RealDrop(1, 1).replay(logits.half(), num - 1)
    assert wide.scores[0, -1, 0].item() == pytest.approx(num - 1 + 0.4, abs=1e-3)
    assert half.scores.dtype == torch.float16
    assert half.scores[0, -1, 0].item() == num - 1


# ---- Budgets and errors


def test_budgets_are_rounded_down_as_the_scripts_do() -> None:
    # 0.29 * 100 is 28.999999999999996 for Python; EvictionPolicy makes 29 of it.
    assert parity.UtilsHH(0.29, 0.1).counts(100) == (28, 10)
    assert parity.LmEvalLocal(0.29, 0.1).counts(100) == (28, 10)
    assert parity.FlexGen(0.29).counts(100) == (27, 28)
    assert parity.UtilsHH().counts(9) == (0, 0)
    assert parity.from_ratios("real_drop", 0.29, 0.1, 100) == parity.RealDrop(28, 10)
    assert parity.from_ratios("fixed", 0.29, 0.2, 100) == parity.Fixed(29, 20)
    assert parity.from_ratios("fixed", 0.0, 0.1, 9) == parity.Fixed(0, 1)
    assert parity.from_ratios("real_drop_rolling", 0.1, 0.2, 9) == parity.RealDropRolling(0, 1)
    assert parity.RealDrop() == parity.RealDrop(1024, 1024)


def test_names() -> None:
    assert list(parity.MODES) == [
        "fixed",
        "real_drop",
        "real_drop_rolling",
        "flexgen",
        "utils_hh",
        "lm_eval_local",
        "lm_eval_oracle",
    ]
    assert all(mode.name == name for name, mode in parity.MODES.items())


SQUARE = torch.zeros(2, 6, 6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: parity.from_ratios("h2o"), r"parity mode must be one of fixed, .*, got 'h2o'"),
        (lambda: parity.RealDrop(-1, 4), "real_drop: heavy tokens must be >= 0, got -1"),
        (lambda: parity.RealDrop(0, 0), "real_drop: the budget must be >= 1 token, got 0"),
        (lambda: parity.Fixed(1, 1, prefill="all"), "fixed: prefill must be .*, got 'all'"),
        (lambda: parity.Fixed(1, 1, prefill_chunk=0), "fixed: prefill_chunk must be >= 1, got 0"),
        (lambda: parity.UtilsHH(1.5, 0.1), r"utils_hh: heavy_ratio must be in 0\.\.1, got 1\.5"),
        (lambda: parity.LmEvalLocal(0.1, -0.1), r"lm_eval_local: recent_ratio must be in 0\.\.1"),
        (
            lambda: parity.from_ratios("fixed", 2.0, 0, 9),
            r"fixed: heavy_ratio must be in 0\.\.1, got 2",
        ),
        (
            lambda: parity.from_ratios("fixed", 0, 0, 9),
            "fixed: the budget must be >= 1 token, got 0",
        ),
        (lambda: parity.from_ratios("real_drop"), "real_drop: length must be >= 1, .* got 0"),
        (lambda: parity.FlexGen(math.nan), r"flexgen: hh_ratio must be in 0\.\.1, got nan"),
        (
            lambda: parity.from_ratios("flexgen", 0.1, 0.2),
            "flexgen: heavy_ratio and recent_ratio must be equal, .* got 0.1 and 0.2",
        ),
        (lambda: parity.FlexGen(0.2).replay(SQUARE, 6), "k=1 of prompt_len=6, hh_ratio=0.2"),
        (lambda: parity.FlexGen(0.7).replay(SQUARE, 6), "k=4 of prompt_len=6, hh_ratio=0.7"),
        (
            lambda: parity.FlexGen(0.5).replay(SQUARE, 6, num_pads=6),
            r"flexgen: num_pads must be in 0\.\.5 \(prompt_len - 1\), got 6",
        ),
        (
            lambda: parity.UtilsHH().replay(SQUARE[0], 3),
            r"utils_hh: logits must be \[heads, seq_len, seq_len\], got \[6, 6\]",
        ),
        (
            lambda: parity.UtilsHH().replay(SQUARE.int(), 3),
            "utils_hh: logits must be of a float dtype, got torch.int32",
        ),
        (
            lambda: parity.LmEvalOracle().replay(SQUARE - math.inf, 3),
            "lm_eval_oracle: logits must be finite up to the diagonal",
        ),
        (
            lambda: parity.RealDrop().replay(SQUARE, 7),
            r"real_drop: prompt_len must be in 1\.\.6 \(seq_len\), got 7",
        ),
        (
            lambda: parity.RealDrop().replay(SQUARE, 3, group_size=3),
            "real_drop: group_size must divide heads = 2, got 3",
        ),
        (
            lambda: parity.RealDropRolling().replay(SQUARE, 3),
            "real_drop_rolling: logits must not be recorded, .* replay_vectors",
        ),
        (
            lambda: parity.RealDropRolling().replay_vectors(
                torch.zeros(3, 4, 2), torch.zeros(2, 4, 2), *torch.zeros(2, 4, 1), 2
            ),
            "real_drop_rolling: heads of query must be a multiple of those of key = 2, got 3",
        ),
        (
            lambda: parity.RealDropRolling().replay_vectors(
                torch.zeros(2, 4, 2), torch.zeros(0, 4, 2), *torch.zeros(2, 4, 1), 2
            ),
            r"real_drop_rolling: query and key must be .*, got \[2, 4, 2\] and \[0, 4, 2\]",
        ),
        (
            lambda: parity.RealDropRolling().replay_vectors(
                torch.zeros(2, 4, 2), torch.zeros(2, 3, 2), *torch.zeros(2, 4, 1), 2
            ),
            r"real_drop_rolling: query and key must be .*, got \[2, 4, 2\] and \[2, 3, 2\]",
        ),
    ],
)
def test_errors_say_what_must_be(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: parity.RealDrop(1.5, 2), "real_drop: heavy tokens must be an integer, got 1.5"),
        (lambda: parity.RealDrop(2, True), "real_drop: recent tokens must be an integer, got True"),
        (lambda: parity.UtilsHH("a"), "utils_hh: heavy_ratio must be a number, got 'a'"),
        (
            lambda: parity.Fixed(1, 1, prefill_chunk=1.5),
            "fixed: prefill_chunk must be an integer, got 1.5",
        ),
        (
            lambda: parity.UtilsHH().replay(SQUARE, 2.5),
            "utils_hh: prompt_len must be an integer, got 2.5",
        ),
        (
            lambda: parity.FlexGen(0.5).replay(SQUARE, 6, num_pads="1"),
            "flexgen: num_pads must be an integer, got '1'",
        ),
    ],
)
def test_arguments_of_another_type_are_refused(call: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call()


def test_docstring_examples_run() -> None:
    result = doctest.testmod(parity)
    assert result.attempted > 0
    assert result.failed == 0
