"""Rows that come and go: each goes on as if it had been alone, and no other row notices."""

from __future__ import annotations

import doctest
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList, SuppressTokensLogitsProcessor, TopKLogitsWarper

import h2o_kv.serve
from h2o_kv import EvictionPolicy, H2OCache
from h2o_kv.serve import Completion, Request, generate_many
from hf_models import (
    EOS,
    KINDS,
    check_against_reference,
    forward,
    generate,
    kept,
    left_padded,
    recorded,
    tiny_model,
    tokens,
)

SMALL = EvictionPolicy(num_heavy=4, num_recent=3, num_sink=1)
STATE = ("k_cache", "v_cache", "scores", "positions", "tokens_seen")


def step(model: Any, cache: H2OCache, ids: Tensor, real: Tensor | None = None) -> Tensor:
    """Logits of one token a row, at each row's own position."""
    position_ids = cache.layers[0].tokens_seen[:, None].long()
    mask = None if real is None else real[:, None, None, None]
    return forward(model, ids, cache, mask=mask, position_ids=position_ids)


def snapshot(cache: H2OCache, row: int) -> list[Tensor]:
    return [getattr(layer, name)[row].clone() for layer in cache.layers for name in STATE]


def assert_rows_equal(left: list[Tensor], right: list[Tensor]) -> None:
    for mine, theirs in zip(left, right, strict=True):
        assert torch.equal(mine, theirs)


# ---- insert and release


@pytest.mark.parametrize("family", KINDS)
def test_an_inserted_row_goes_on_as_it_would_alone(family: str) -> None:
    model = tiny_model(family, dtype=torch.float64)
    batch, alone = H2OCache(model.config, SMALL), H2OCache(model.config, SMALL)
    forward(model, tokens(3, 14), batch)
    forward(model, tokens(1, 21, seed=5), alone)
    before = [snapshot(batch, row) for row in (0, 2)]
    batch.insert(1, alone)
    assert_rows_equal(snapshot(batch, 1), snapshot(alone, 0))
    for row, was in zip((0, 2), before, strict=True):
        assert_rows_equal(snapshot(batch, row), was)
    assert batch.get_seq_length() == 21
    for i in range(12):
        ids = tokens(3, 1, seed=100 + i)
        got = step(model, batch, ids)[1]
        want = step(model, alone, ids[1:2])[0]
        torch.testing.assert_close(got, want, atol=1e-9, rtol=0)
        for mine, theirs in zip(batch.layers, alone.layers, strict=True):
            assert torch.equal(mine.positions[1], theirs.positions[0])


def test_the_row_that_is_copied_stays_what_it_was() -> None:
    model = tiny_model("llama")
    batch, alone = H2OCache(model.config, SMALL), H2OCache(model.config, SMALL)
    forward(model, tokens(2, 9), batch)
    forward(model, tokens(2, 12, seed=1), alone)
    was = snapshot(alone, 1)
    batch.insert(0, alone, source=1)
    step(model, batch, tokens(2, 1))
    assert_rows_equal(snapshot(alone, 1), was)


def test_a_released_row_is_empty_and_the_others_go_on() -> None:
    model = tiny_model("llama", dtype=torch.float64)
    batch, other = H2OCache(model.config, SMALL), H2OCache(model.config, SMALL)
    forward(model, tokens(2, 12), batch)
    forward(model, tokens(2, 12)[:1], other)
    batch.release(1)
    for layer in batch.layers:
        assert layer.positions[1].eq(-1).all()
        assert not layer.scores[1].any()
        assert not layer.k_cache[1].any()
        assert layer.tokens_seen.tolist() == [12, 0]
    real = torch.tensor([True, False])
    for i in range(5):
        ids = tokens(2, 1, seed=i)
        got = step(model, batch, ids, real)[0]
        torch.testing.assert_close(got, step(model, other, ids[:1])[0], atol=1e-9, rtol=0)
    assert all(layer.positions[1].eq(-1).all() for layer in batch.layers)


def test_a_released_row_takes_new_tokens_from_position_0() -> None:
    model = tiny_model("gpt_neox", dtype=torch.float64)
    batch, fresh = H2OCache(model.config, SMALL), H2OCache(model.config, SMALL)
    forward(model, tokens(2, 12), batch)
    batch.release(0)
    fresh.early_initialization(1, 4, 8, torch.float64, torch.device("cpu"))
    for i in range(11):
        ids = tokens(2, 1, seed=i)
        got, want = step(model, batch, ids)[0], step(model, fresh, ids[:1])[0]
        torch.testing.assert_close(got, want, atol=1e-9, rtol=0)


@pytest.mark.parametrize("capacities", [(6, 10), (10, 6)])
def test_a_row_keeps_its_budget_in_a_cache_of_another_capacity(capacities: tuple[int, int]) -> None:
    """Also out of a larger cache, in whose slots it may lie anywhere."""
    model = tiny_model("llama", dtype=torch.float64)
    ratios = EvictionPolicy(heavy_ratio=0.25, recent_ratio=0.25)
    # A budget of 6 in a batch whose longest prompt has one of `capacities`.
    mine, theirs = (
        H2OCache(model.config, ratios, prompt_length=(12, 2 * capacity)) for capacity in capacities
    )
    alone = H2OCache(model.config, ratios, prompt_length=12)
    prompt = tokens(1, 12, seed=3)
    forward(model, torch.cat([prompt, tokens(1, 12)]), theirs)
    forward(model, tokens(2, 12, seed=4), mine)
    forward(model, prompt, alone)
    for i in range(4):  # until what is kept lies in no order
        ids = tokens(2, 1, seed=i)
        step(model, theirs, ids)
        step(model, alone, ids[:1])
    mine.insert(1, theirs)
    assert mine.budgets[1] == alone.budgets[0]
    assert mine.budgets[1].total == 6
    for i in range(8):
        ids = tokens(2, 1, seed=10 + i)
        got, want = step(model, mine, ids)[1], step(model, alone, ids[1:])[0]
        torch.testing.assert_close(got, want, atol=1e-9, rtol=0)
        for layer, other in zip(mine.layers, alone.layers, strict=True):
            held = [sorted(p for p in head if p >= 0) for head in layer.positions[1].tolist()]
            assert held == [sorted(head) for head in other.positions[0].tolist()]


def test_a_batch_with_rows_of_different_ages_can_be_saved(tmp_path: Path) -> None:
    model = tiny_model("llama")
    batch, young = H2OCache(model.config, SMALL), H2OCache(model.config, SMALL)
    forward(model, tokens(3, 14), batch)
    forward(model, tokens(1, 5, seed=5), young)
    batch.insert(1, young)
    batch.release(2)
    batch.save(tmp_path / "batch")
    loaded = H2OCache.load(tmp_path / "batch", model.config)
    for i in range(6):
        ids, real = tokens(3, 1, seed=i), torch.tensor([True, True, False])
        assert torch.equal(step(model, batch, ids, real), step(model, loaded, ids, real))
    for row in range(3):
        assert_rows_equal(snapshot(batch, row), snapshot(loaded, row))


def test_a_row_that_becomes_itself_stays_what_it_is() -> None:
    model = tiny_model("llama")
    cache = H2OCache(model.config, EvictionPolicy(num_heavy=4, num_recent=4))
    forward(model, tokens(2, 12), cache)
    before = snapshot(cache, 1)
    cache.insert(1, cache, 1)
    assert_rows_equal(snapshot(cache, 1), before)


def test_a_row_that_comes_cannot_be_taken_back() -> None:
    model = tiny_model("llama")
    batch = H2OCache(model.config, SMALL, prompt_length=9, max_rollback=3)
    other = H2OCache(model.config, SMALL)
    forward(model, tokens(2, 9), batch)
    forward(model, tokens(1, 9, seed=1), other)
    step(model, batch, tokens(2, 1))
    batch.insert(0, other)
    was = snapshot(batch, 1)
    with pytest.raises(ValueError, match=r"got 1 with max_rollback=3 and 0 recorded"):
        batch.crop(-1)
    step(model, batch, tokens(2, 1))
    batch.crop(-1)  # what came later can be
    assert_rows_equal(snapshot(batch, 1), was)


def test_what_does_not_fit_raises_and_changes_nothing() -> None:
    model = tiny_model("llama")
    batch = H2OCache(model.config, SMALL)
    other = H2OCache(model.config, SMALL)
    with pytest.raises(ValueError, match="this cache must have its memory"):
        batch.insert(0, other)
    forward(model, tokens(2, 9), batch)
    with pytest.raises(ValueError, match="other must have its memory"):
        batch.insert(0, other)
    forward(model, tokens(1, 9, seed=1), other)
    was = [snapshot(batch, row) for row in range(2)]
    with pytest.raises(IndexError, match=r"insert: row must be in 0\.\.1, got 2"):
        batch.insert(2, other)
    with pytest.raises(IndexError, match=r"insert: source must be in 0\.\.0, got -1"):
        batch.insert(0, other, source=-1)
    with pytest.raises(TypeError, match="row must be an integer, got 0.5"):
        batch.insert(0.5, other)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="other must be an H2OCache"):
        batch.insert(0, batch.layers[0])  # type: ignore[arg-type]
    with pytest.raises(IndexError, match=r"release: row must be in 0\.\.1, got 2"):
        batch.release(2)
    for policy, dtype, match in (
        (EvictionPolicy(num_heavy=6, num_recent=3), None, "budget must be <= capacity = 8, got 9"),
        (EvictionPolicy(num_heavy=4, num_recent=3, gqa_reduce="max"), None, "gqa_reduce"),
        (SMALL, torch.bfloat16, "dtype of both caches must be the same"),
    ):
        unfit = H2OCache(model.config, policy, dtype=dtype)
        forward(model, tokens(1, 9), unfit)
        with pytest.raises(ValueError, match=match):
            batch.insert(0, unfit)
    stranger = tiny_model("llama", num_hidden_layers=3)
    deeper = H2OCache(stranger.config, SMALL)
    forward(stranger, tokens(1, 9), deeper)
    with pytest.raises(ValueError, match="model of both caches must be the same"):
        batch.insert(0, deeper)
    for row in range(2):
        assert_rows_equal(snapshot(batch, row), was[row])


# ---- A policy for each row

UNEQUAL = [
    EvictionPolicy(num_heavy=2, num_recent=2, num_sink=1),
    EvictionPolicy(num_heavy=0, num_recent=9),
    EvictionPolicy(num_heavy=1, num_recent=0),
]


@pytest.mark.parametrize("prefill", ["one_shot", "streaming"])
@pytest.mark.parametrize("family", KINDS)
def test_a_row_of_a_policy_of_its_own_is_what_it_is_alone(family: str, prefill: str) -> None:
    model = tiny_model(family, dtype=torch.float64)
    prompts = [tokens(1, length, seed=length)[0] for length in (17, 23, 11)]
    ids, mask = left_padded(prompts)
    options: dict[str, Any] = {"prefill": prefill, "prefill_chunk": 1}
    batch = H2OCache(model.config, UNEQUAL, **options)
    with recorded() as recording:
        got = generate(model, ids, batch, new=8, mask=mask)
    assert batch.layers[0].capacity == 9
    assert [tuple(budget) for budget in batch.budgets] == [(1, 2, 2), (0, 0, 9), (0, 1, 0)]
    budgets = [(1, 2, 2), (0, 0, 9), (0, 1, 0)]
    assert check_against_reference(recording, batch, budgets, mask) > 100
    for row, (prompt, policy) in enumerate(zip(prompts, UNEQUAL, strict=True)):
        alone = H2OCache(model.config, policy, **options)
        assert torch.equal(got[row], generate(model, prompt[None], alone, new=8)[0])
        assert kept(batch, row) == kept(alone, 0)
        assert {len(head) for layer in kept(batch, row) for head in layer} == {
            policy.budget().total
        }


def test_equal_policies_of_rows_are_one_policy() -> None:
    model = tiny_model("llama")
    rows, one = H2OCache(model.config, [SMALL] * 2), H2OCache(model.config, SMALL)
    assert torch.equal(forward(model, tokens(2, 14), rows), forward(model, tokens(2, 14), one))
    assert rows.layers[0].row_budget is None
    assert rows.budgets == one.budgets
    assert one.row_policies is None


def test_policies_of_rows_hold_again_after_a_reset() -> None:
    model = tiny_model("llama")
    cache = H2OCache(model.config, UNEQUAL)
    assert cache.policy == UNEQUAL[1]
    assert cache.row_policies == tuple(UNEQUAL)
    prompt = tokens(3, 14)
    forward(model, prompt, cache)
    first = [kept(cache, row) for row in range(3)]
    cache.set_budget(num_heavy=3, num_recent=3, num_sink=0)
    forward(model, tokens(3, 1), cache)
    cache.reset()
    forward(model, prompt, cache)
    assert [kept(cache, row) for row in range(3)] == first
    assert [budget.total for budget in cache.budgets] == [5, 9, 1]


def test_a_fork_keeps_the_budgets_of_its_rows() -> None:
    model = tiny_model("llama", dtype=torch.float64)
    cache = H2OCache(model.config, UNEQUAL)
    forward(model, tokens(3, 14), cache)
    fork = cache.fork(2)
    assert [budget.total for budget in fork.budgets] == [5, 5, 9, 9, 1, 1]
    ids = tokens(3, 1, seed=4)
    got = forward(model, ids.repeat_interleave(2, 0), fork)
    torch.testing.assert_close(got[::2], forward(model, ids, cache), atol=1e-9, rtol=0)
    fork.reset()
    with pytest.raises(ValueError, match="policy must have one entry a row = 6, got 3"):
        forward(model, tokens(6, 9), fork)


def test_policies_of_rows_are_saved(tmp_path: Path) -> None:
    model = tiny_model("llama")
    cache = H2OCache(model.config, UNEQUAL)
    forward(model, tokens(3, 14), cache)
    cache.save(tmp_path / "cache")
    loaded = H2OCache.load(tmp_path / "cache", model.config)
    assert loaded.row_policies == tuple(UNEQUAL)
    ids = tokens(3, 1, seed=4)
    assert torch.equal(forward(model, ids, loaded), forward(model, ids, cache))
    loaded.reset()
    forward(model, tokens(3, 14), loaded)
    assert [budget.total for budget in loaded.budgets] == [5, 9, 1]


@pytest.mark.parametrize(
    ("policies", "error", "match"),
    [
        ([], ValueError, "policy must have one entry a row, got none"),
        ([SMALL, None], TypeError, "policy of row 1 must be an EvictionPolicy, got None"),
        (
            [SMALL, EvictionPolicy(heavy_ratio=0.1, recent_ratio=0.1)],
            ValueError,
            "policy of row 1 must be of counts",
        ),
        (
            [SMALL, EvictionPolicy(num_heavy=4, num_recent=3, gqa_reduce="max")],
            ValueError,
            "policies of rows must be alike but for their counts",
        ),
        ("h2o", TypeError, "policy must be an EvictionPolicy, or a sequence"),
    ],
)
def test_bad_policies_of_rows_are_named(policies: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        H2OCache(tiny_model("llama").config, policies)


def test_a_batch_of_other_rows_than_policies_raises_and_changes_nothing() -> None:
    model = tiny_model("llama")
    cache = H2OCache(model.config, UNEQUAL)
    with pytest.raises(ValueError, match="policy must have one entry a row = 2, got 3"):
        forward(model, tokens(2, 9), cache)
    assert cache.get_seq_length() == 0
    forward(model, tokens(3, 9), cache)
    assert cache.get_seq_length() == 9


# ---- generate_many


def of_index(completions: Iterator[Completion]) -> dict[int, Completion]:
    found = list(completions)
    by_index = {completion.index: completion for completion in found}
    assert len(by_index) == len(found)
    return by_index


@pytest.mark.parametrize(
    "policy",
    [
        EvictionPolicy(num_heavy=60, num_recent=60),
        SMALL,
        EvictionPolicy(heavy_ratio=0.1, recent_ratio=0.1),
    ],
)
@pytest.mark.parametrize("family", KINDS)
def test_every_request_gets_what_it_gets_alone(family: str, policy: EvictionPolicy) -> None:
    model = tiny_model(family, dtype=torch.float64)
    lengths, new = (30, 5, 17, 1, 42, 8, 23), (6, 19, 1, 11, 8, 30, 4)
    # `generate` is told not to end by the same processor.
    never_ends = LogitsProcessorList([SuppressTokensLogitsProcessor([EOS])])
    requests = [
        Request(tokens(1, length, seed=length)[0], n, never_ends)
        for length, n in zip(lengths, new, strict=True)
    ]
    got = of_index(generate_many(model, requests, policy, batch_size=3, eos_token_id=[]))
    for index, request in enumerate(requests):
        cache = H2OCache(model.config, policy)
        want = generate(model, request.input_ids[None], cache, new=request.max_new_tokens)[0]
        assert got[index] == Completion(index, want.tolist(), "length")
    assert len({tuple(completion.tokens) for completion in got.values()}) == len(requests)


def test_a_request_ends_with_the_end_token_and_makes_room() -> None:
    model = tiny_model("llama", dtype=torch.float64)
    prompt = tokens(1, 12)
    sequence = generate(model, prompt, H2OCache(model.config, SMALL), new=10)[0].tolist()
    end = sequence[4]
    first = sequence.index(end)
    requests = [Request(prompt[0], 10) for _ in range(4)]
    done = of_index(generate_many(model, requests, SMALL, batch_size=2, eos_token_id=end))
    for index in range(4):
        assert done[index] == Completion(index, sequence[: first + 1], "eos")


def test_drawn_tokens_depend_on_the_request_s_seed_alone() -> None:
    model = tiny_model("llama", dtype=torch.float64)
    warper = LogitsProcessorList([TopKLogitsWarper(20)])
    requests = [Request(tokens(1, 9)[0], 12, warper, seed=seed) for seed in (1, 2, 1)]
    done = of_index(generate_many(model, requests, SMALL, batch_size=2, eos_token_id=[]))
    alone = of_index(generate_many(model, requests[1:2], SMALL, batch_size=1, eos_token_id=[]))
    assert done[0].tokens == done[2].tokens != done[1].tokens == alone[0].tokens


def test_requests_are_read_as_rows_come_free() -> None:
    model = tiny_model("llama")
    read: list[int] = []

    def endless() -> Iterator[Request]:
        while True:
            read.append(len(read))
            yield Request(tokens(1, 6, seed=len(read))[0], max_new_tokens=3)

    completions = generate_many(model, endless(), SMALL, batch_size=2, eos_token_id=[])
    for _ in range(5):
        next(completions)
    assert len(read) <= 5 + 2


def test_the_batch_has_the_memory_of_its_rows_whatever_passes_through() -> None:
    model = tiny_model("llama")
    requests = [Request(tokens(1, 40, seed=i)[0], max_new_tokens=4) for i in range(9)]
    batch = h2o_kv.serve._Batch(
        model,
        H2OCache(model.config, SMALL),
        H2OCache(model.config, SMALL),
        frozenset(),
        3,
    )
    sizes = {batch.cache.nbytes().total for _ in batch.run(enumerate(requests))}
    assert len(sizes) == 1


@pytest.mark.parametrize(
    ("request_", "match"),
    [
        (Request([], 4), r"input_ids must be \[length\] with length >= 1, got \[0\] in request 1"),
        (Request(tokens(2, 3), 4), r"input_ids must be \[length\].*got \[2, 3\] in request 1"),
        (Request([3], 0), "max_new_tokens must be >= 1, got 0 in request 1"),
    ],
)
def test_bad_requests_are_named(request_: Request, match: str) -> None:
    model = tiny_model("llama")
    requests = [Request([3, 4, 5], 9), request_]
    with pytest.raises(ValueError, match=match):
        list(generate_many(model, requests, SMALL, batch_size=2))


def test_a_request_past_the_learned_positions_is_named_before_it_runs() -> None:
    model = tiny_model("opt", max_position_embeddings=20)
    fits, not_quite = Request(range(3, 13), 11), Request(range(3, 13), 12)
    assert len(next(generate_many(model, [fits], SMALL, eos_token_id=[])).tokens) == 11
    with pytest.raises(ValueError, match=r"must be < 20 .* max_new_tokens=12 in request 0"):
        next(generate_many(model, [not_quite], SMALL, eos_token_id=[]))


def test_bad_batch_sizes_raise_at_once() -> None:
    model = tiny_model("llama")
    with pytest.raises(ValueError, match="batch_size must be >= 1, got 0"):
        generate_many(model, [], SMALL, batch_size=0)
    with pytest.raises(TypeError, match="batch_size must be an integer, got 2.0"):
        generate_many(model, [], SMALL, batch_size=2.0)  # type: ignore[arg-type]
    assert list(generate_many(model, [], SMALL)) == []


def test_the_example_in_the_documentation_runs() -> None:
    result = doctest.testmod(h2o_kv.serve)
    assert result.attempted > 5
    assert result.failed == 0
