"""H2OCache under real models: equal to the full cache when nothing leaves, to the float64 reference
fed with the same queries, keys and values when something does."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import DynamicCache

from h2o_kv import EvictionPolicy, H2OCache
from h2o_kv.hf import cache_kwarg
from hf_models import (
    ALIBI_FAMILIES,
    FAMILIES,
    KINDS,
    check_against_reference,
    forward,
    full_cache_generate,
    generate,
    kept,
    left_padded,
    recorded,
    set_attention,
    tiny_model,
    tokens,
)
from model_files import TEXT, save_tiny_model

AMPLE = EvictionPolicy(num_heavy=40, num_recent=40)
SMALL = EvictionPolicy(num_heavy=4, num_recent=3, num_sink=1)
SMALL_BUDGET = (1, 4, 3)


def prompts() -> list[Tensor]:
    """Rows of 5, 13 and 20 tokens."""
    return [tokens(1, length, seed=length)[0] for length in (5, 13, 20)]


# ---- Nothing leaves: every token equals the full cache's.


@pytest.mark.parametrize("prefill", ["one_shot", "streaming"])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_with_an_ample_budget_equals_the_full_cache(family: str, prefill: str) -> None:
    model, ids = tiny_model(family), tokens(2, 14)
    cache = H2OCache(model.config, AMPLE, prefill=prefill, prefill_chunk=4)
    got = generate(model, ids, cache, new=16)
    assert torch.equal(got, full_cache_generate(model, ids, new=16))
    assert len(set(got[0].tolist())) > 4, "constant text would prove nothing"
    assert cache.get_seq_length() == 14 + 15


# transformers' eager attention takes its softmax in float32 whatever the dtype, and so do models with
# an attention of their own.
@pytest.mark.parametrize(("attention", "tolerance"), [("sdpa", 1e-9), ("eager", 1e-4)])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_with_an_ample_budget_equal_the_full_cache(
    family: str, attention: str, tolerance: float
) -> None:
    model, ids = tiny_model(family, dtype=torch.float64), tokens(2, 12)
    tolerance = 1e-4 if family in ALIBI_FAMILIES else tolerance
    cache = H2OCache(model.config, AMPLE)
    got = [forward(model, ids[:, :8], cache)]
    got += [forward(model, ids[:, i : i + 1], cache) for i in range(8, 12)]
    set_attention(model, attention)
    want = forward(model, ids, DynamicCache())
    torch.testing.assert_close(torch.cat(got, 1), want, atol=tolerance, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_left_padded_batch_with_an_ample_budget_equals_the_full_cache(family: str) -> None:
    model = tiny_model(family)
    ids, mask = left_padded(prompts())
    got = generate(model, ids, H2OCache(model.config, AMPLE), new=10, mask=mask)
    assert torch.equal(got, full_cache_generate(model, ids, new=10, mask=mask))


@pytest.mark.parametrize("family", KINDS)
def test_sampling_several_sequences_equals_the_full_cache(family: str) -> None:
    model, ids = tiny_model(family), tokens(2, 10)
    options: dict[str, Any] = dict(new=12, do_sample=True, num_return_sequences=3, top_k=20)
    torch.manual_seed(5)
    got = generate(model, ids, H2OCache(model.config, AMPLE), **options)
    torch.manual_seed(5)
    assert torch.equal(got, full_cache_generate(model, ids, **options))
    assert got.shape[0] == 6
    assert len({tuple(row.tolist()) for row in got}) > 1


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3},
        {"num_beams": 4, "num_return_sequences": 2},
        {"num_beams": 3, "do_sample": True, "num_return_sequences": 3},
        {"num_beams": 3, "length_penalty": 2.0, "early_stopping": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("family", KINDS)
def test_beam_search_with_an_ample_budget_equals_the_full_cache(
    family: str, padded: bool, options: dict[str, Any]
) -> None:
    model = tiny_model(family)
    ids, mask = left_padded(prompts()) if padded else (tokens(2, 10), None)
    torch.manual_seed(5)
    got = generate(model, ids, H2OCache(model.config, AMPLE), new=10, mask=mask, **options)
    torch.manual_seed(5)
    assert torch.equal(got, full_cache_generate(model, ids, new=10, mask=mask, **options))


@pytest.mark.parametrize("prefill", ["one_shot", "streaming"])
@pytest.mark.parametrize("family", KINDS)
def test_second_turn_with_an_ample_budget_equals_the_full_cache(family: str, prefill: str) -> None:
    model, first, second = tiny_model(family), tokens(2, 9), tokens(2, 6, seed=1)
    cache = H2OCache(model.config, AMPLE, prefill=prefill, prefill_chunk=4)
    answer = generate(model, first, cache, new=5)
    conversation = torch.cat([first, answer, second], 1)
    got = generate(model, conversation, cache, new=6)
    assert torch.equal(got, full_cache_generate(model, conversation, new=6))
    assert cache.get_seq_length() == conversation.shape[1] + 5


def test_prompts_shorter_than_the_budget_keep_everything() -> None:
    model = tiny_model("llama", dtype=torch.float64)
    for length in (1, 2, 3):
        ids = tokens(1, length)
        set_attention(model, "sdpa")
        want = forward(model, ids, DynamicCache())
        set_attention(model, "h2o")
        cache = H2OCache(model.config, EvictionPolicy(num_heavy=4, num_recent=4))
        torch.testing.assert_close(forward(model, ids, cache), want, atol=1e-9, rtol=0)
        assert kept(cache, 0) == [[list(range(length))] * 2] * 2


def test_both_spellings_of_the_cache_argument() -> None:
    model, ids = tiny_model("llama"), tokens(1, 8)
    texts = []
    for name in {"past_key_values", cache_kwarg(model)}:
        cache = H2OCache(model.config, SMALL)
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=6,
            min_new_tokens=6,
            **{name: cache},
        )
        assert cache.get_seq_length() == 13
        texts.append(output)
    assert torch.equal(texts[0], texts[-1])


# ---- Something leaves: every kept position, score and output equals the reference's.


@pytest.mark.parametrize("prefill", ["one_shot", "streaming"])
@pytest.mark.parametrize("family", FAMILIES)
def test_eviction_equals_the_reference_at_every_step(family: str, prefill: str) -> None:
    model, ids = tiny_model(family, dtype=torch.float64), tokens(2, 18)
    cache = H2OCache(model.config, SMALL, prefill=prefill, prefill_chunk=5)
    with recorded() as recording:
        generate(model, ids, cache, new=12)
    evictions = check_against_reference(recording, cache, [SMALL_BUDGET] * 2)
    assert evictions == 2 * 2 * cache.layers[0].positions.shape[1] * (18 + 11 - 8)


@pytest.mark.parametrize("gqa_reduce", ["sum", "max"])
@pytest.mark.parametrize(
    "budget", [(0, 4, 4), (2, 3, 3), (0, 0, 6), (0, 6, 0), (4, 0, 3), (0, 1, 0)]
)
def test_every_kind_of_budget_equals_the_reference(
    budget: tuple[int, int, int], gqa_reduce: str
) -> None:
    sink, heavy, recent = budget
    policy = EvictionPolicy(
        num_sink=sink, num_heavy=heavy, num_recent=recent, gqa_reduce=gqa_reduce
    )
    model, ids = tiny_model("llama", dtype=torch.float64), tokens(1, 15)
    for prefill in ("one_shot", "streaming"):
        cache = H2OCache(model.config, policy, prefill=prefill, prefill_chunk=3)
        with recorded() as recording:
            generate(model, ids, cache, new=8)
        assert check_against_reference(recording, cache, [budget]) > 0


def test_gqa_sum_and_max_keep_different_tokens() -> None:
    model, ids = tiny_model("llama", dtype=torch.float64), tokens(1, 40)
    results = []
    for gqa_reduce in ("sum", "max"):
        policy = EvictionPolicy(num_heavy=12, num_recent=4, gqa_reduce=gqa_reduce)
        cache = H2OCache(model.config, policy, prefill="streaming", prefill_chunk=1)
        forward(model, ids, cache)
        results.append(kept(cache, 0))
    assert results[0] != results[1]


@pytest.mark.parametrize("prefill", ["one_shot", "streaming"])
def test_second_turn_on_a_full_cache_equals_the_reference(prefill: str) -> None:
    model = tiny_model("llama", dtype=torch.float64)
    first, second = tokens(2, 12), tokens(2, 7, seed=1)
    cache = H2OCache(model.config, SMALL, prefill=prefill, prefill_chunk=3)
    with recorded() as recording:
        answer = generate(model, first, cache, new=4)
        generate(model, torch.cat([first, answer, second], 1), cache, new=4)
    assert [call.key.shape[2] for call in recording.calls[0]] == [12, 1, 1, 1, 8, 1, 1, 1]
    assert check_against_reference(recording, cache, [SMALL_BUDGET] * 2) > 0


def test_sampling_with_eviction_equals_the_reference() -> None:
    model, ids = tiny_model("llama", dtype=torch.float64), tokens(2, 12)
    cache = H2OCache(model.config, SMALL)
    torch.manual_seed(3)
    with recorded() as recording:
        text = generate(model, ids, cache, new=8, do_sample=True, num_return_sequences=2)
    assert check_against_reference(recording, cache, [SMALL_BUDGET] * 4) > 0
    torch.manual_seed(3)
    again = generate(
        model, ids, H2OCache(model.config, SMALL), new=8, do_sample=True, num_return_sequences=2
    )
    assert torch.equal(text, again)


@pytest.mark.parametrize("prefill", ["one_shot", "streaming"])
def test_prompt_in_chunks_stays_within_the_budget(prefill: str) -> None:
    model, ids = tiny_model("llama", dtype=torch.float64), tokens(1, 14)
    policy = EvictionPolicy(num_sink=1, num_heavy=2, num_recent=1)
    cache = H2OCache(model.config, policy, prefill=prefill, prefill_chunk=2)
    with recorded() as recording:
        generate(model, ids, cache, new=3, prefill_chunk_size=5)
    lengths = [call.key.shape[2] for call in recording.calls[0]]
    # transformers 4 leaves the last token of the prompt to the first step.
    assert lengths in ([5, 5, 4, 1, 1], [5, 5, 3, 1, 1, 1])
    assert check_against_reference(recording, cache, [(1, 2, 1)]) > 0
    for layer in kept(cache, 0):
        assert all(len(head) == 4 and head[0] == 0 and head[-1] == 15 for head in layer)


# ---- Ratios.


def test_ratios_are_of_each_row_s_real_prompt() -> None:
    model = tiny_model("llama", dtype=torch.float64)
    ids, mask = left_padded(prompts())
    policy = EvictionPolicy(heavy_ratio=0.29, recent_ratio=0.2, num_sink=1)
    budgets = [
        (1, max(1, math.floor(0.29 * n + 1e-9)), max(1, math.floor(0.2 * n + 1e-9)))
        for n in (5, 13, 20)
    ]
    assert budgets == [(1, 1, 1), (1, 3, 2), (1, 5, 4)]
    cache = H2OCache(model.config, policy)
    with recorded() as recording:
        generate(model, ids, cache, new=8, mask=mask)
    assert [tuple(budget) for budget in cache.budgets] == budgets
    assert cache.layers[0].k_cache.shape[2] == 10
    assert [count[0].item() for count in cache.tokens_kept()[0]] == [3, 6, 10]
    assert check_against_reference(recording, cache, budgets, mask) > 0


def test_equal_rows_need_no_budget_of_their_own() -> None:
    model, ids = tiny_model("llama"), tokens(2, 20)
    cache = H2OCache(model.config, EvictionPolicy(heavy_ratio=0.2, recent_ratio=0.1))
    forward(model, ids, cache)
    assert cache.layers[0].row_budget is None
    assert [tuple(budget) for budget in cache.budgets] == [(0, 4, 2)] * 2


@pytest.mark.parametrize("prompt_length", [20, [20, 20]])
def test_prompt_length_names_the_prompt_of_ratios(prompt_length: Any) -> None:
    model, ids = tiny_model("llama"), tokens(2, 20)
    policy = EvictionPolicy(heavy_ratio=0.2, recent_ratio=0.1)
    cache = H2OCache(model.config, policy, prompt_length=prompt_length)
    generate(model, ids, cache, new=3, prefill_chunk_size=8)
    assert [tuple(budget) for budget in cache.budgets] == [(0, 4, 2)] * 2
    cache = H2OCache(model.config, policy, prompt_length=[20, 10])
    forward(model, ids, cache)
    assert [tuple(budget) for budget in cache.budgets] == [(0, 4, 2), (0, 2, 1)]


# ---- A row in a padded batch is the row alone.


@pytest.mark.parametrize("prefill", ["one_shot", "streaming"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "policy",
    [SMALL, EvictionPolicy(heavy_ratio=0.25, recent_ratio=0.25)],
    ids=["counts", "ratios"],
)
def test_left_padded_row_equals_the_row_alone(
    policy: EvictionPolicy, family: str, prefill: str
) -> None:
    model = tiny_model(family, dtype=torch.float64)
    ids, mask = left_padded(prompts())
    options: dict[str, Any] = dict(prefill=prefill, prefill_chunk=4)
    cache = H2OCache(model.config, policy, **options)
    batch = generate(model, ids, cache, new=8, mask=mask)
    for row, prompt in enumerate(prompts()):
        alone = H2OCache(model.config, policy, **options)
        assert torch.equal(batch[row], generate(model, prompt[None], alone, new=8)[0])
        assert kept(cache, row) == kept(alone, 0)
        assert int(cache.layers[0].tokens_seen[row]) == len(prompt) + 7


@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize("where", ["left", "right", "inside"])
def test_padding_anywhere_equals_the_row_alone(family: str, where: str) -> None:
    model = tiny_model(family, dtype=torch.float64)
    prompt, next_tokens = tokens(1, 12), tokens(2, 4, seed=9)
    columns = {"left": range(5, 17), "right": range(12), "inside": [*range(4), *range(9, 17)]}
    ids, mask = tokens(2, 17, seed=3), torch.ones(2, 17, dtype=torch.long)
    mask[0] = 0
    mask[0, list(columns[where])] = 1
    ids[0, list(columns[where])] = prompt[0]
    cache, alone = H2OCache(model.config, SMALL), H2OCache(model.config, SMALL)
    position_ids = (mask.cumsum(1) - 1).clamp(min=0)
    batch_logits = forward(model, ids, cache, mask, position_ids=position_ids)
    logits = forward(model, prompt, alone)
    torch.testing.assert_close(batch_logits[0, list(columns[where])], logits[0], atol=1e-9, rtol=0)
    assert kept(cache, 0) == kept(alone, 0)
    for i in range(4):
        mask = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], 1)
        step = next_tokens[:, i : i + 1]
        position_ids = mask.sum(1, keepdim=True) - 1
        batch_logits = forward(model, step, cache, mask, position_ids=position_ids)
        logits = forward(model, step[:1], alone)
        torch.testing.assert_close(batch_logits[0], logits[0], atol=1e-9, rtol=0)
        assert kept(cache, 0) == kept(alone, 0)


def test_padded_prefill_equals_the_reference() -> None:
    model = tiny_model("llama", dtype=torch.float64)
    ids, mask = left_padded(prompts())
    for prefill in ("one_shot", "streaming"):
        cache = H2OCache(model.config, SMALL, prefill=prefill, prefill_chunk=4)
        with recorded() as recording:
            generate(model, ids, cache, new=6, mask=mask)
        assert check_against_reference(recording, cache, [SMALL_BUDGET] * 3, mask) > 0


def run_alone(
    model: Any, history: Tensor, prompt: int, policy: EvictionPolicy
) -> tuple[Any, float]:
    """Cache of tokens that come alone, the first `prompt` together, and the mean log probability
    of the others, the last one's input excepted."""
    cache, total = H2OCache(model.config, policy), 0.0
    logits = forward(model, history[None, :prompt], cache)[0, -1]
    for step, token in enumerate(history[prompt:].tolist()):
        total += float(logits.log_softmax(-1)[token])
        if prompt + step + 1 < len(history):
            logits = forward(model, torch.tensor([[token]]), cache)[0, -1]
    return cache, total / (len(history) - prompt)


def is_same_row(cache: H2OCache, row: int, alone: H2OCache) -> bool:
    """Whether the row holds the same tokens with the same keys and scores."""
    for mine, want in zip(cache.layers, alone.layers, strict=True):
        for head in range(mine.positions.shape[1]):
            state = []
            for layer, at in ((mine, (row, head)), (want, (0, head))):
                slots = layer.positions[at].argsort()
                slots = slots[layer.positions[at][slots] >= 0]
                state.append((layer.positions, layer.scores, layer.k_cache, layer.v_cache))
                state[-1] = tuple(tensor[at][slots] for tensor in state[-1])
            if state[0][0].tolist() != state[1][0].tolist():
                return False
            if not all(
                torch.allclose(a, b, atol=1e-9, rtol=1e-9) for a, b in zip(*state, strict=True)
            ):
                return False
    return True


BEAM_POLICIES = {
    "ample": AMPLE,
    "counts": SMALL,
    "ratios": EvictionPolicy(heavy_ratio=0.25, recent_ratio=0.25, num_sink=1),
}


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("returned", [1, 3])
@pytest.mark.parametrize("policy", BEAM_POLICIES)
@pytest.mark.parametrize("family", KINDS)
def test_beams_equal_the_same_histories_run_alone(
    family: str, policy: str, returned: int, sample: bool
) -> None:
    """In a left-padded batch, whose rows have budgets of their own with ratios."""
    model = tiny_model(family, dtype=torch.float64)
    ids, mask = left_padded(prompts())
    cache = H2OCache(model.config, BEAM_POLICIES[policy])
    reorder, before = cache.reorder_cache, []

    def reorder_and_note(index: Tensor) -> None:
        before[:] = [cache.fork(1)]
        reorder(index)

    # The last reorder is of beams that end here, and transformers does not mind which.
    cache.reorder_cache = reorder_and_note
    output = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=9,
        min_new_tokens=9,
        num_beams=3,
        num_return_sequences=returned,
        do_sample=sample,
        top_k=0,
        return_dict_in_generate=True,
        output_scores=True,
        **{cache_kwarg(model): cache},
    )
    assert (cache.layers[0].row_budget is not None) == (policy == "ratios")
    beams = output.sequences[:, ids.shape[1] :].unflatten(0, (3, returned))
    scores = output.sequences_scores.unflatten(0, (3, returned))
    for index, prompt in enumerate(prompts()):
        assert len({tuple(beam.tolist()) for beam in beams[index]}) == returned
        for beam, score in zip(beams[index], scores[index].tolist(), strict=True):
            history = torch.cat([prompt, beam])
            alone, mean = run_alone(model, history, len(prompt), BEAM_POLICIES[policy])
            assert any(is_same_row(before[0], 3 * index + row, alone) for row in range(3))
            # Log probabilities are float32 in transformers.
            assert abs(score - mean) < 1e-4


# Which former beam each of four becomes, for every step of a search over two prompts. Group beams
# (two groups of two beams here) need code from the Hub in every release that is supported.
BEAM_STEPS = {
    "stay": [[0, 1, 2, 3]],
    "one takes all": [[2, 2, 2, 2], [0, 0, 0, 0]],
    "cross": [[3, 2, 1, 0], [1, 0, 3, 2]],
    "duplicates": [[0, 0, 3, 3], [1, 1, 0, 2]],
    "groups": [[1, 0, 2, 2], [0, 0, 3, 2], [1, 1, 3, 3]],
}


@pytest.mark.parametrize("policy", BEAM_POLICIES)
@pytest.mark.parametrize("pattern", BEAM_STEPS)
@pytest.mark.parametrize("family", KINDS)
def test_every_pattern_of_beams_equals_its_histories_run_alone(
    family: str, pattern: str, policy: str
) -> None:
    model = tiny_model(family, dtype=torch.float64)
    rows = [prompt for prompt in prompts()[:2] for _ in range(4)]
    ids, mask = left_padded(rows)
    cache = H2OCache(model.config, BEAM_POLICIES[policy])
    padding = (mask.cumsum(1) - 1).clamp(min=0)
    forward(model, ids, cache, mask, position_ids=padding)
    histories, new = rows, tokens(8, 8, seed=4)
    for step in range(8):
        index = torch.tensor(BEAM_STEPS[pattern][step % len(BEAM_STEPS[pattern])])
        index = torch.cat([index, index.flip(0) + 4 if pattern != "groups" else index + 4])
        cache.reorder_cache(index)
        mask = torch.cat([mask, torch.ones(8, 1, dtype=torch.long)], 1)
        histories = [
            torch.cat([histories[i], new[row, step : step + 1]]) for row, i in enumerate(index)
        ]
        position_ids = mask.sum(1, keepdim=True) - 1
        forward(model, new[:, step : step + 1], cache, mask, position_ids=position_ids)
    for row, history in enumerate(histories):
        # One token more, which is never fed.
        history = torch.cat([history, history[:1]])
        alone, _ = run_alone(model, history, len(rows[row]), BEAM_POLICIES[policy])
        assert is_same_row(cache, row, alone)


# ---- Faults that others had.


@pytest.mark.parametrize("budget", [2, 8, 15, 16, 17])
@pytest.mark.parametrize("family", KINDS)
def test_prefill_does_not_see_its_own_eviction(family: str, budget: int) -> None:
    model, ids = tiny_model(family, attention="eager"), tokens(2, 16)
    want = forward(model, ids, DynamicCache())
    set_attention(model, "h2o")
    cache = H2OCache(model.config, EvictionPolicy(num_heavy=budget - 1, num_recent=1))
    torch.testing.assert_close(forward(model, ids, cache), want, atol=1e-4, rtol=1e-4)
    assert int(cache.tokens_kept()[0].max()) == min(budget, 16)


@pytest.mark.parametrize("family", ["llama", "opt", "gpt_neox"])
def test_positions_stay_true_after_a_token_is_dropped(family: str) -> None:
    """Logits after dropping tokens equal those of a full cache that masks them."""
    model, ids = tiny_model(family), tokens(1, 15)
    stay = [0, 3, 7, 8, 9]
    cache = H2OCache(model.config, EvictionPolicy(num_heavy=10, num_recent=10))
    forward(model, ids[:, :10], cache)
    for layer in cache.layers:
        drop = ~torch.isin(layer.positions, torch.tensor(stay))
        layer.positions[drop] = -1
        layer.scores[drop] = 0
    keys = [_keys_by_position(layer) for layer in cache.layers]
    got = [forward(model, ids[:, i : i + 1], cache) for i in range(10, 15)]

    model.set_attn_implementation("sdpa")
    full = DynamicCache()
    forward(model, ids[:, :10], full)
    want = []
    for i in range(10, 15):
        visible = torch.zeros(1, 1, 1, i + 1, dtype=torch.bool)
        visible[..., stay] = True
        visible[..., 10:] = True
        position_ids = torch.tensor([[i]])
        mask = torch.zeros(visible.shape).masked_fill_(~visible, float("-inf"))
        want.append(forward(model, ids[:, i : i + 1], full, mask, position_ids=position_ids))
    torch.testing.assert_close(torch.cat(got), torch.cat(want), atol=1e-4, rtol=1e-4)
    for before, layer in zip(keys, cache.layers, strict=True):
        after = _keys_by_position(layer)
        assert all(torch.equal(after[where], key) for where, key in before.items())
        assert {position for _, position in after} == {*stay, *range(10, 15)}


def _keys_by_position(layer: Any) -> dict[tuple[int, int], Tensor]:
    return {
        (head, int(position)): layer.k_cache[0, head, slot].clone()
        for head in range(layer.positions.shape[1])
        for slot, position in enumerate(layer.positions[0, head])
        if position >= 0
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_each_query_head_adds_one_to_the_scores_at_every_step(family: str) -> None:
    model, ids = tiny_model(family), tokens(2, 9)
    cache = H2OCache(model.config, AMPLE)
    for step, columns in enumerate([ids[:, :8], ids[:, 8:], ids[:, :1]]):
        forward(model, columns, cache)
        for layer in cache.layers:
            group_size = 4 // layer.scores.shape[1]
            mass = torch.full_like(layer.scores[..., 0], group_size * (8 + step))
            torch.testing.assert_close(layer.scores.sum(-1), mass, atol=1e-4, rtol=0)


def test_cache_bytes_are_constant_once_full() -> None:
    model, ids = tiny_model("llama"), tokens(2, 20)
    cache = H2OCache(model.config, SMALL)
    sizes, pointers = set(), set()
    forward(model, ids, cache)
    for i in range(20):
        forward(model, ids[:, i : i + 1], cache)
        sizes.add(cache.nbytes())
        pointers.add(tuple(layer.k_cache.data_ptr() for layer in cache.layers))
    assert len(sizes) == len(pointers) == 1
    # 2 layers x 2 rows x 2 KV heads x 8 slots, and 8 elements a head; 4 bytes each.
    assert (sizes.pop().kv, cache.nbytes().bookkeeping) == (2 * 64 * 8 * 4, 2 * 64 * 4)


def test_a_bfloat16_cache_generates_and_keeps_its_dtypes() -> None:
    model, ids = tiny_model("llama", dtype=torch.bfloat16), tokens(2, 20)
    cache = H2OCache(model.config, SMALL)
    with recorded() as recording:
        generate(model, ids, cache, new=8)
    layer = cache.layers[0]
    assert (layer.k_cache.dtype, layer.scores.dtype) == (torch.bfloat16, torch.float32)
    assert {call.output.dtype for call in recording.calls[0]} == {torch.bfloat16}
    assert all(int(count.min()) == int(count.max()) == 8 for count in cache.tokens_kept())


def greedy(step: Any, model: Any, cache: H2OCache, ids: Tensor, real: Tensor | None) -> Tensor:
    """The 12 tokens [batch, 12] that follow `ids`, all but the first from a call of `step`."""
    # BLOOM and MPT have none, and early releases do not compile the warning about it.
    takes_positions = real is not None and model.config.model_type not in ALIBI_FAMILIES
    positions = {"position_ids": (real.cumsum(1) - 1).clamp(min=0)} if takes_positions else {}
    produced = [forward(model, ids, cache, real, **positions)[:, -1:].argmax(-1)]
    with torch.no_grad():
        while len(produced) < 12:
            if real is not None:
                real = torch.nn.functional.pad(real, (0, 1), value=1)
                # Else the mask's width in the first step is compiled in.
                torch._dynamo.mark_dynamic(real, 1)
            if takes_positions:
                positions = {"position_ids": real.sum(1, keepdim=True) - 1}
            output = step(
                produced[-1],
                attention_mask=real,
                **positions,
                **{cache_kwarg(model): cache},
            )
            produced.append(output.logits.argmax(-1))
    return torch.cat(produced, 1)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_decode_step_compiles_to_one_graph_from_filling_to_full(
    family: str, padded: bool
) -> None:
    model, ids, mask = tiny_model(family), tokens(2, 5), None
    if padded:
        ids, mask = left_padded([tokens(1, 5)[0], tokens(1, 3, seed=1)[0]])
    plain, compiled = H2OCache(model.config, SMALL), H2OCache(model.config, SMALL)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    step = torch.compile(model.forward, fullgraph=True, backend=counter)
    want = greedy(model.forward, model, plain, ids, mask)
    assert torch.equal(greedy(step, model, compiled, ids, mask), want)
    assert len({tuple(row.tolist()) for row in want}) == 2
    assert [kept(compiled, row) for row in (0, 1)] == [kept(plain, row) for row in (0, 1)]
    assert plain.get_seq_length() == compiled.get_seq_length() == 16
    assert counter.frame_count == 1
    torch._dynamo.reset()


# ---- The documentation.


@pytest.mark.filterwarnings("error::FutureWarning")
@pytest.mark.parametrize("file", ["README.md", "docs/huggingface.md"])
def test_the_example_runs_without_a_warning_and_holds_its_budget(file: str, tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / file).read_text(encoding="utf-8")
    example = text.partition("```python\n")[2].partition("```")[0]
    names: dict[str, Any] = {"path": str(save_tiny_model(tmp_path)), "prompt": TEXT}
    exec(example, names)
    assert int(names["cache"].tokens_kept()[0].max()) <= 256
    assert names["output"].shape[1] - names["inputs"]["input_ids"].shape[1] in range(1, 201)
    assert "{cache_kwarg(model): cache}" in example
