"""Budgets that are set while a cache runs: larger, smaller at once, smaller a few tokens a step."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from h2o_kv import Budget, EvictionPolicy, H2OCache, reference
from h2o_kv.hf import H2OLayer, SessionError, cache_kwarg
from hf_models import forward, generate, kept, left_padded, tiny_config, tiny_model, tokens
from op_helpers import bitwise_equal

BIG = EvictionPolicy(num_heavy=10, num_recent=5, num_sink=1)
SMALL = EvictionPolicy(num_heavy=3, num_recent=2, num_sink=1)
STATE = ("k_cache", "v_cache", "scores", "positions", "tokens_seen")


def filled(policy: EvictionPolicy = BIG, length: int = 30, **options: Any) -> tuple[Any, H2OCache]:
    """A tiny llama in float64, and its cache of two rows after a prompt and two steps."""
    model = tiny_model("llama", dtype=torch.float64)
    cache = H2OCache(model.config, policy, **options)
    forward(model, tokens(2, length), cache)
    for i in range(2):
        forward(model, tokens(2, 1, seed=i), cache)
    return model, cache


def snapshot(cache: H2OCache) -> list[Any]:
    state: list[Any] = [cache.budgets, cache.budget_events, cache.get_seq_length()]
    for layer in cache.layers:
        state += [
            None if tensor is None else tensor.clone()
            for tensor in (getattr(layer, name) for name in (*STATE, "row_budget", "row_target"))
        ]
    return state


def same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(
        torch.equal(x, y) if isinstance(x, Tensor) else x == y for x, y in zip(a, b, strict=True)
    )


def contents(layer: H2OLayer) -> list[dict[int, tuple[float, Any, Any]]]:
    """What each (row, KV head) holds, by position."""
    return [
        {
            int(p): (float(s), k.tolist(), v.tolist())
            for p, s, k, v in zip(*slots, strict=True)
            if p >= 0
        }
        for slots in zip(
            *(
                getattr(layer, name).flatten(0, 1)
                for name in ("positions", "scores", "k_cache", "v_cache")
            ),
            strict=True,
        )
    ]


def test_memory_of_before_is_given_back() -> None:
    model = tiny_model("llama")
    cache = H2OCache(model.config, EvictionPolicy(num_heavy=400, num_recent=400))
    forward(model, tokens(1, 60), cache)
    forward(model, tokens(1, 1), cache)
    former = [weakref.ref(layer.keys) for layer in cache.layers]
    cache.set_budget(num_heavy=4, num_recent=4)
    gc.collect()
    assert [reference() for reference in former] == [None, None]


# ---- Larger.


def test_a_larger_budget_takes_memory_and_nothing_leaves() -> None:
    model, cache = filled(SMALL)
    before = [contents(layer) for layer in cache.layers]
    cache.set_budget(BIG)
    assert [contents(layer) for layer in cache.layers] == before
    assert cache.budgets == (BIG.budget(),) * 2
    for layer in cache.layers:
        assert layer.k_cache.shape == (2, 2, 16, 8)
        assert layer.last_evicted.shape == (2, 2, 0)
        assert (layer.positions[:, :, 6:] == -1).all()
        assert not layer.scores[:, :, 6:].any()
    for i in range(10):
        forward(model, tokens(2, 1, seed=i), cache)
        assert (cache.layers[0].last_evicted == -1).all()
    assert cache.tokens_kept()[1].tolist() == [[16, 16]] * 2
    forward(model, tokens(2, 1), cache)
    assert (cache.layers[0].last_evicted >= 0).all()


def test_before_anything_left_it_is_as_if_the_budget_had_been_there_from_the_start() -> None:
    model = tiny_model("llama", dtype=torch.float64)
    early, late = (H2OCache(model.config, policy) for policy in (BIG, SMALL))
    for cache in (early, late):
        forward(model, tokens(2, 6), cache)
    late.set_budget(BIG)
    for i in range(25):
        logits = [forward(model, tokens(2, 1, seed=i), cache) for cache in (early, late)]
        assert torch.equal(*logits)
    assert all(
        torch.equal(getattr(a, name), getattr(b, name))
        for a, b in zip(early.layers, late.layers, strict=True)
        for name in STATE
    )


# ---- Smaller at once.


def test_at_once_is_the_operator_s_order_as_the_reference_has_it() -> None:
    _, cache = filled(length=40)
    wanted = []
    for layer in cache.layers:
        state = [getattr(layer, name).clone() for name in STATE[:4]]
        nothing = torch.zeros(2, 2, 0, 8, dtype=torch.float64)
        evicted = reference.evict(
            *state, nothing, nothing, nothing[..., 0], torch.zeros(2, 0, dtype=torch.int32), 1, 3, 2
        )
        wanted.append((state, evicted[:, :, :10]))
    cache.set_budget(num_heavy=3, num_recent=2)
    for layer, (state, evicted) in zip(cache.layers, wanted, strict=True):
        assert torch.equal(layer.last_evicted, evicted)
        assert (evicted >= 0).all()
        reduced = copy.copy(layer)
        reduced.keys, reduced.values, reduced.scores, reduced.positions = state
        assert contents(layer) == contents(reduced)
        assert layer.k_cache.shape == layer.v_cache.shape == (2, 2, 6, 8)
        assert layer.scores.shape == layer.positions.shape == (2, 2, 6)
    (event,) = cache.budget_events
    assert event.held_at == event.position == 42


@pytest.mark.parametrize("slow", [False, True])
def test_after_a_prompt_of_one_shot_it_is_the_prompt_with_that_budget(slow: bool) -> None:
    """Nothing had left, so the choice is the same; slowly, it is made later by other scores."""
    model = tiny_model("llama", dtype=torch.float64)
    small, moved = (H2OCache(model.config, policy) for policy in (SMALL, BIG))
    for cache in (small, moved):
        forward(model, tokens(2, 16), cache)
    moved.set_budget(SMALL, max_evictions_per_step=2 if slow else None)
    assert (kept(small, 0) == kept(moved, 0)) == (not slow)
    for i in range(20):
        a, b = (forward(model, tokens(2, 1, seed=i), cache) for cache in (small, moved))
        if not slow:
            torch.testing.assert_close(a, b, atol=1e-9, rtol=0)
            assert kept(small, 0) == kept(moved, 0)
    assert moved.tokens_kept()[0].tolist() == [[6, 6]] * 2


@pytest.mark.parametrize("most", [None, 2, 4])
def test_a_window_ends_where_it_would_have_been_from_the_start(most: int | None) -> None:
    """Without heavy tokens who stays depends on positions alone, once the budget holds."""
    (a, b) = (
        H2OCache(
            tiny_config("llama", num_hidden_layers=1),
            EvictionPolicy(num_heavy=0, num_recent=recent, num_sink=2),
        )
        for recent in (12, 5)
    )
    generator = torch.Generator().manual_seed(1)
    held = 0
    for i in range(60):
        new = [torch.randn(2, h, 1, 8, generator=generator).double() for h in (4, 2, 2)]
        if i == 30:
            a.set_budget(num_heavy=0, num_recent=5, max_evictions_per_step=most)
        outputs = [cache.layers[0].attend(*new, None, None) for cache in (a, b)]
        if a.budget_events and a.budget_events[0].held_at not in (None, a.get_seq_length()):
            held += 1
            torch.testing.assert_close(*outputs, atol=1e-12, rtol=0)
            assert kept(a, 1) == kept(b, 1)
    assert held >= 20


# ---- Smaller, a few tokens a step.


@pytest.mark.parametrize("most", [2, 3, 5, 100])
def test_slowly_at_most_so_many_leave_in_a_step(most: int) -> None:
    """Against the reference: the step, then the lowest scores of what is above, one step at a time."""
    _, cache = filled()
    layer = cache.layers[0]
    state = [getattr(layer, name).clone() for name in STATE[:4]]
    cache.set_budget(num_heavy=2, num_recent=4, num_sink=2, max_evictions_per_step=most)
    assert cache.budgets == (Budget(num_sink=2, num_heavy=2, num_recent=4),) * 2
    assert layer.last_evicted.shape == (2, 2, 0)
    nothing = torch.zeros(2, 2, 0, 8, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    held, steps = 16, 0
    for i in range(14):
        new = [torch.randn(2, h, 1, 8, generator=generator).double() for h in (4, 2, 2)]
        for each in cache.layers:
            output = each.attend(*new, None, None)
            if each is layer:
                got = output
        position = torch.full((2, 1), 32 + i)
        budget = (2, held - 6, 4)
        want, first = reference.attention_decode(new[0], *state, *new[1:], position, *budget)
        torch.testing.assert_close(got.transpose(1, 2), want, atol=1e-9, rtol=0)
        steps += held > 8
        held = max(8, held - (most - 1))
        more = reference.evict(
            *state, nothing, nothing, nothing[..., 0], position[:, :0], 2, held - 6, 4
        )
        left = torch.cat([first, more], 2)
        now = layer.last_evicted
        assert torch.equal(now, left[:, :, : now.shape[2]])
        assert (left[:, :, now.shape[2] :] == -1).all()
        assert ((now >= 0).sum(2) <= most).all()
        by_reference = copy.copy(layer)
        by_reference.keys, by_reference.values, by_reference.scores, by_reference.positions = state
        for mine, theirs in zip(contents(layer), contents(by_reference), strict=True):
            assert mine.keys() == theirs.keys()
            for p, (score, k, v) in mine.items():
                assert abs(score - theirs[p][0]) < 1e-9
                assert (k, v) == theirs[p][1:]
        assert layer.positions.shape[2] == (16 if held > 8 else 8)
    (event,) = cache.budget_events
    assert event.held_at == 32 + steps
    assert layer.row_target is None
    assert layer.row_budget is None


def test_a_forward_of_several_tokens_is_one_step_and_padding_none() -> None:
    """At most its own tokens and max_evictions_per_step - 1 besides; a row without tokens waits."""
    _, cache = filled()
    cache.set_budget(SMALL, max_evictions_per_step=3)
    layer = cache.layers[0]
    generator = torch.Generator().manual_seed(0)

    def attend(real: list[list[bool]]) -> list[int]:
        """Tokens kept by each row."""
        n = len(real[0])
        new = [torch.randn(2, h, n, 8, generator=generator).double() for h in (4, 2, 2)]
        for each in cache.layers:
            each.attend(*new, torch.tensor(real)[:, None, None], None)
        return (layer.positions[:, 0] >= 0).sum(1).tolist()

    assert attend([[True], [False]]) == [14, 16]
    assert (layer.last_evicted >= 0).sum(2).tolist() == [[3, 3], [0, 0]]
    assert attend([[True, True, True], [False, False, True]]) == [12, 14]
    assert (layer.last_evicted >= 0).sum(2).tolist() == [[5, 5], [3, 3]]
    assert attend([[True, False], [True, True]]) == [10, 12]
    assert layer.positions.shape[2] == 16
    for _ in range(2):
        attend([[True], [True]])
    assert layer.positions.shape[2] == 16  # The second row has more than its budget.
    assert attend([[True], [False]]) == [6, 8]
    assert layer.row_target is not None
    assert attend([[False], [True]]) == [6, 6]
    assert layer.row_target is None
    assert layer.positions.shape[2] == 6
    assert cache.budget_events[0].held_at == cache.get_seq_length() == 32 + 10


def test_a_row_alone_moves_as_in_a_padded_batch() -> None:
    model = tiny_model("llama", dtype=torch.float64)
    ids, mask = left_padded([tokens(1, 25)[0], tokens(1, 14, seed=1)[0]])
    batch, alone = (H2OCache(model.config, BIG) for _ in range(2))
    forward(model, ids, batch, mask)
    forward(model, ids[1:, 11:], alone)
    for cache in (batch, alone):
        cache.set_budget(SMALL, max_evictions_per_step=2)
    for i in range(14):
        new = tokens(2, 1, seed=i)
        mask = torch.nn.functional.pad(mask, (0, 1), value=1)
        a = forward(model, new, batch, mask)
        b = forward(model, new[1:], alone)
        # Rotations are of other columns here, and computed in float32.
        torch.testing.assert_close(a[1:], b, atol=1e-5, rtol=0)
        assert kept(batch, 1) == kept(alone, 0)


def test_a_text_that_is_short_enough_holds_at_once() -> None:
    model = tiny_model("llama")
    cache = H2OCache(model.config, BIG)
    forward(model, tokens(2, 5), cache)
    cache.set_budget(SMALL, max_evictions_per_step=2)
    assert cache.budget_events[0].held_at == 5
    assert cache.layers[1].k_cache.shape[2] == 6


def test_a_budget_on_the_way_to_another_turns_where_it_is() -> None:
    model, cache = filled()
    cache.set_budget(SMALL, max_evictions_per_step=2)
    for i in range(4):
        forward(model, tokens(2, 1, seed=i), cache)
    assert cache.tokens_kept()[0].tolist() == [[12, 12]] * 2
    cache.set_budget(num_heavy=6)  # Nine: at once, from twelve.
    assert cache.layers[0].last_evicted.shape == (2, 2, 3)
    cache.set_budget(BIG)
    assert cache.layers[0].k_cache.shape[2] == 16
    assert [event.held_at for event in cache.budget_events] == [None, 36, 36]
    assert [event.position for event in cache.budget_events] == [32, 36, 36]
    assert cache.budget_events[2].old == (Budget(num_sink=1, num_heavy=6, num_recent=2),) * 2


# ---- Rows of their own.


def test_rows_get_the_budgets_that_they_are_given() -> None:
    model, cache = filled()
    alone = cache.fork(1)
    alone.batch_select_indices(torch.tensor([1]))
    rows = [Budget(num_heavy=9, num_recent=2), EvictionPolicy(num_heavy=2, num_recent=3)]
    cache.set_budget(rows, max_evictions_per_step=3)
    alone.set_budget(rows[1], max_evictions_per_step=3)
    for i in range(8):
        new = tokens(2, 1, seed=i)
        a, b = forward(model, new, cache), forward(model, new[1:], alone)
        torch.testing.assert_close(a[1:], b, atol=1e-9, rtol=0)
        assert kept(cache, 1) == kept(alone, 0)
    assert cache.tokens_kept()[0].tolist() == [[11, 11], [5, 5]]
    assert cache.layers[0].k_cache.shape[2] == 11
    assert alone.layers[0].k_cache.shape[2] == 5
    # What is not given stays what it is in each row.
    cache.set_budget(num_recent=4)
    assert [tuple(budget) for budget in cache.budgets] == [(0, 9, 4), (0, 2, 4)]
    cache.set_budget(cache.budgets[::-1])
    assert [tuple(budget) for budget in cache.budgets] == [(0, 2, 4), (0, 9, 4)]


def test_a_row_that_moves_goes_on_in_another_cache() -> None:
    model, cache = filled()
    other = H2OCache(model.config, BIG)
    forward(model, tokens(3, 20, seed=4), other)
    cache.set_budget(SMALL, max_evictions_per_step=2)
    forward(model, tokens(2, 1), cache)
    other.insert(2, cache, 1)
    assert other.budgets == (BIG.budget(), BIG.budget(), SMALL.budget())
    for i in range(14):
        new = tokens(3, 1, seed=i)
        positions = torch.stack([layer.layers[0].tokens_seen[-1] for layer in (cache, other)])
        assert positions[0] == positions[1]
        kwargs = {"position_ids": other.layers[0].tokens_seen[:, None].long()}
        a = forward(model, new, other, **kwargs)
        b = forward(model, new[1:], cache)
        torch.testing.assert_close(a[2:], b[1:], atol=1e-9, rtol=0)
        assert kept(other, 2) == kept(cache, 1)
    assert other.tokens_kept()[0].tolist() == [[16, 16], [16, 16], [6, 6]]
    assert other.layers[0].row_target is None
    cache.release(0)
    assert cache.budgets == (SMALL.budget(),) * 2


def test_a_row_with_more_than_its_budget_needs_room_for_it() -> None:
    model, cache = filled()
    small = H2OCache(model.config, SMALL)
    forward(model, tokens(1, 9), small)
    cache.set_budget(SMALL, max_evictions_per_step=2)
    with pytest.raises(ValueError, match="row's budget must be <= capacity = 6, got 16 tokens"):
        small.insert(0, cache, 0)


def test_reset_goes_back_to_the_policy() -> None:
    model, cache = filled()
    fresh = H2OCache(model.config, BIG)
    cache.set_budget(SMALL, max_evictions_per_step=2)
    forward(model, tokens(2, 1), cache)
    assert cache.policy == BIG
    cache.reset()
    assert cache.budgets is None
    assert cache.budget_events == []
    for each in (cache, fresh):
        forward(model, tokens(2, 20), each)
    assert same(snapshot(cache), snapshot(fresh))


def test_ratios_are_overruled_until_reset() -> None:
    model = tiny_model("llama")
    ratios = EvictionPolicy(heavy_ratio=0.2, recent_ratio=0.1)
    cache = H2OCache(model.config, ratios)
    forward(model, tokens(2, 20), cache)
    assert [tuple(budget) for budget in cache.budgets] == [(0, 4, 2)] * 2
    cache.set_budget(num_heavy=8)
    assert [tuple(budget) for budget in cache.budgets] == [(0, 8, 2)] * 2
    assert cache.policy == ratios
    cache.reset()
    forward(model, tokens(2, 40), cache)
    assert [tuple(budget) for budget in cache.budgets] == [(0, 8, 4)] * 2


# ---- Taking back.


def recording(depth: int = 6) -> tuple[Any, H2OCache]:
    model = tiny_model("llama", dtype=torch.float64)
    cache = H2OCache(model.config, BIG, prompt_length=30, max_rollback=depth)
    forward(model, tokens(2, 30), cache)
    return model, cache


@pytest.mark.parametrize("remove", range(1, 7))
@pytest.mark.parametrize("most", [2, 4, 7])
def test_drafts_while_a_budget_moves_have_never_been_seen(most: int, remove: int) -> None:
    """Across the step in which the new budget came to hold, too."""
    model, cache = recording()
    plain = H2OCache(model.config, BIG, max_rollback=0)
    forward(model, tokens(2, 30), plain)
    for each in (cache, plain):
        each.set_budget(SMALL, max_evictions_per_step=most)
    new = tokens(2, 7, seed=3)
    forward(model, new[:, :1], cache)
    forward(model, new[:, 1:], cache)
    cache.crop(-remove)
    for i in range(7 - remove):
        forward(model, new[:, i : i + 1], plain)
    for a, b in zip(cache.layers, plain.layers, strict=True):
        assert (a.row_target is None) == (b.row_target is None)
        assert a.k_cache.shape == b.k_cache.shape
        assert torch.equal(a.positions, b.positions)
        torch.testing.assert_close(a.scores, b.scores, atol=1e-12, rtol=0)
        torch.testing.assert_close(a.k_cache, b.k_cache, atol=1e-12, rtol=0)
    assert [e.held_at for e in cache.budget_events] == [e.held_at for e in plain.budget_events]
    assert cache.budgets == plain.budgets
    for i in range(10):
        new = tokens(2, 1, seed=20 + i)
        torch.testing.assert_close(
            forward(model, new, cache), forward(model, new, plain), atol=1e-9, rtol=0
        )
        assert kept(cache, 0) == kept(plain, 0)
    assert cache.budget_events[0].held_at == plain.budget_events[0].held_at


def test_the_same_bits_after_every_crop_of_a_moving_layer() -> None:
    generator = torch.Generator().manual_seed(0)
    new = [torch.randn(2, h, 40, 8, generator=generator) for h in (4, 2, 2)]

    def columns(cache: H2OCache, first: int, end: int) -> None:
        cache.layers[0].attend(*(tensor[:, :, first:end] for tensor in new), None, None)

    for remove in range(1, 9):
        caches = []
        for takes_back in (True, False):
            config = tiny_config("llama", num_hidden_layers=1)
            cache = H2OCache(config, BIG, max_rollback=8, prompt_length=20)
            columns(cache, 0, 20)
            cache.set_budget(SMALL, max_evictions_per_step=3)
            for first, end in ((20, 21), (21, 25), (25, 29)):
                stop = end if takes_back else min(end, 29 - remove)
                if stop > first:
                    columns(cache, first, stop)
            if takes_back:
                cache.crop(-remove)
            caches.append(cache)
        (a,), (b,) = (cache.layers for cache in caches)
        for name in ("positions", "scores", "tokens_seen"):
            assert bitwise_equal(getattr(a, name), getattr(b, name)), (remove, name)
        assert bitwise_equal(a.k_cache[a.positions >= 0], b.k_cache[b.positions >= 0])
        assert caches[0].budget_events[0].held_at == caches[1].budget_events[0].held_at
        columns(caches[0], 29 - remove, 30)
        for i in range(29 - remove, 30):
            columns(caches[1], i, i + 1)
        assert bitwise_equal(a.scores, b.scores)


def test_set_budget_itself_cannot_be_taken_back() -> None:
    model, cache = recording()
    forward(model, tokens(2, 3), cache)
    assert cache.layers[0].journal.num_columns == 3
    cache.set_budget(num_heavy=9)
    with pytest.raises(ValueError, match="got 1 with max_rollback=6 and 0 recorded"):
        cache.crop(-1)
    forward(model, tokens(2, 3), cache)
    cache.crop(-2)
    with pytest.raises(ValueError, match="got 2 with max_rollback=6 and 1 recorded"):
        cache.crop(-2)


@pytest.mark.parametrize("most", [2, 5])
def test_assisted_decoding_equals_greedy_decoding_while_a_budget_moves(most: int) -> None:
    """Prompt lookup after set_budget: a token of drafts is a step, as it is without drafts."""
    model = tiny_model("llama")
    ids = tokens(1, 9, seed=3).repeat(1, 5)
    texts = []
    for drafts in (0, 5):
        cache = H2OCache(
            model.config,
            EvictionPolicy(num_heavy=20, num_recent=15),
            prompt_length=ids.shape[1] - 1,
            max_rollback=drafts,
        )
        forward(model, ids[:, :-1], cache)
        cache.set_budget(num_heavy=4, num_recent=4, max_evictions_per_step=most)
        text = ids[:, -1:]
        while text.shape[1] < 40:
            text = _next(model, cache, ids, text, drafts)
        texts.append(text[0, :40].tolist())
        assert cache.budget_events[0].held_at is not None
        assert cache.tokens_kept()[0].max() == 8
    assert len(set(texts[0])) > 4, "constant text would prove nothing"
    assert texts[0] == texts[1]


def _next(model: Any, cache: H2OCache, ids: Tensor, text: Tensor, drafts: int) -> Tensor:
    """Greedy tokens that follow: one, and drafts that were right; the drafts are of the prompt."""
    start = int(text[0, -1]) % 20
    guess = ids[:, start : start + drafts]
    logits = forward(model, torch.cat([text[:, -1:], guess], 1), cache)
    best = logits.argmax(-1)
    right = int((best[:, :-1] == guess).int().cumprod(1).sum()) if drafts else 0
    if drafts - right:
        cache.crop(right - drafts)
    return torch.cat([text, best[:, : right + 1]], 1)


# ---- Files and copies.


def test_a_cache_is_saved_on_the_way_and_goes_on(tmp_path: Path) -> None:
    model, cache = filled()
    cache.set_budget(num_heavy=12)
    rows = [Budget(num_heavy=3, num_recent=2), Budget(num_heavy=8, num_recent=1)]
    cache.set_budget(rows, max_evictions_per_step=2)
    forward(model, tokens(2, 1), cache)
    cache.save(tmp_path / "a")
    others = [
        H2OCache.load(tmp_path / "a", model.config),
        cache.fork(1),
        copy.deepcopy(cache),
        pickle.loads(pickle.dumps(cache)),
    ]
    for other in others:
        assert same(snapshot(other), snapshot(cache))
    for i in range(14):
        new = tokens(2, 1, seed=i)
        want = forward(model, new, cache)
        for other in others:
            assert torch.equal(forward(model, new, other), want)
            assert same(snapshot(other), snapshot(cache))
    assert cache.budget_events[1].held_at is not None
    cache.save(tmp_path / "b")
    others[0].save(tmp_path / "c")
    assert (tmp_path / "b").read_bytes() == (tmp_path / "c").read_bytes()
    with pytest.raises(SessionError, match=r"and <= capacity = 9 in all, got"):
        cache.layers[1].row_budget = torch.tensor([[0, 9, 1], [0, 8, 1]], dtype=torch.int32)
        cache.save(tmp_path / "c")


# ---- The log.


def test_events_say_when_and_what(caplog: pytest.LogCaptureFixture) -> None:
    model, cache = filled()
    assert cache.budget_events == []
    before = time.time()
    with caplog.at_level(logging.INFO, logger="h2o_kv"):
        cache.set_budget(SMALL, max_evictions_per_step=6)
        for i in range(3):
            forward(model, tokens(2, 1, seed=i), cache)
    (event,) = cache.budget_events
    assert (event.position, event.held_at, event.max_evictions_per_step) == (32, 34, 6)
    assert (event.old, event.new) == ((BIG.budget(),) * 2, (SMALL.budget(),) * 2)
    assert before <= event.time <= time.time()
    assert [(record.name, record.getMessage()) for record in caplog.records] == [
        (
            "h2o_kv.hf.budgets",
            "budget set after 32 tokens, at most 6 evictions a step: Budget(num_sink=1, num_heavy=10, "
            "num_recent=5) -> Budget(num_sink=1, num_heavy=3, num_recent=2)",
        ),
        ("h2o_kv.hf.budgets", "budget holds after 34 tokens"),
    ]
    with pytest.raises(AttributeError):
        event.position = 3  # type: ignore[misc]
    fork = cache.fork(2)
    fork.set_budget(num_heavy=9)
    assert len(cache.budget_events) == 1
    assert len(fork.budget_events) == 2


# ---- What raises.


@pytest.mark.parametrize(
    ("args", "kwargs", "error", "match"),
    [
        ((), {}, ValueError, "either a budget or counts must be given, got neither"),
        ((SMALL,), {"num_sink": 1}, ValueError, "either a budget or counts .* {'num_sink': 1}"),
        ((3,), {}, TypeError, "budget must be a Budget or an EvictionPolicy, got 3"),
        (([SMALL, 3],), {}, TypeError, "budget must be a Budget or an EvictionPolicy, got 3"),
        (([SMALL],), {}, ValueError, "budgets must be one a row = 2, got 1"),
        ((), {"num_heavy": -1}, ValueError, "num_heavy must be >= 0, got -1"),
        ((), {"num_heavy": 1.5}, TypeError, "num_heavy must be an integer, got 1.5"),
        ((), {"num_sink": True}, TypeError, "num_sink must be an integer, got True"),
        (
            (),
            {"num_heavy": 0, "num_recent": 0, "num_sink": 0},
            ValueError,
            r"num_sink \+ num_heavy \+ num_recent must be in 1\.\.2147483647, got {",
        ),
        (
            (),
            {"num_heavy": 2**31 - 1},
            ValueError,
            r"must be in 1\.\.2147483647, got {'num_sink': 1",
        ),
        ((Budget(),), {}, ValueError, r"must be in 1\.\.2147483647"),
        (
            (EvictionPolicy(heavy_ratio=0.5, num_recent=1),),
            {},
            ValueError,
            "budget must be of counts, since ratios are of a prompt",
        ),
        (
            (EvictionPolicy(num_heavy=5, num_recent=1, gqa_reduce="max"),),
            {},
            ValueError,
            'gqa_reduce must be that of the cache = "sum", got "max"',
        ),
        (
            (SMALL,),
            {"max_evictions_per_step": 1},
            ValueError,
            "max_evictions_per_step must be in 2..2147483647, one of which .*, got 1",
        ),
        ((SMALL,), {"max_evictions_per_step": "2"}, TypeError, "must be an integer, got '2'"),
        ((), {"num_heavy": 2**30}, MemoryError, "the budget must fit into memory, got 1073741830"),
    ],
)
def test_bad_arguments_change_nothing(args: Any, kwargs: Any, error: Any, match: str) -> None:
    _, cache = filled()
    before = snapshot(cache)
    message = match if error is MemoryError else f"^H2OCache.set_budget: .*{match}"
    with pytest.raises(error, match=message):
        cache.set_budget(*args, **kwargs)
    assert same(snapshot(cache), before)


def test_before_the_first_forward_the_policy_says_the_budget() -> None:
    cache = H2OCache(tiny_config("llama"), BIG)
    match = "^H2OCache.set_budget: the cache must have seen tokens, got H2OCache"
    with pytest.raises(ValueError, match=match):
        cache.set_budget(SMALL)
    cache.early_initialization(2, 2, 8, torch.float32, torch.device("cpu"))
    with pytest.raises(ValueError, match=match):
        cache.set_budget(SMALL)


def test_a_forward_that_stopped_half_way_raises() -> None:
    _, cache = filled()
    cache.layers[0].columns_seen += 1
    with pytest.raises(RuntimeError, match="must have seen the same tokens"):
        cache.set_budget(SMALL)


# ---- generate, modes and graphs.


def test_in_the_middle_of_generate_under_inference_mode() -> None:
    model = tiny_model("llama")
    cache = H2OCache(model.config, BIG)
    first = generate(model, tokens(2, 20), cache, new=4)
    with torch.inference_mode():
        cache.set_budget(SMALL, max_evictions_per_step=3)
        forward(model, first[:, -1:], cache)
        cache.reorder_cache(torch.tensor([1, 0]))
    forward(model, first[:, -1:], cache)
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.batch_repeat_interleave(2)
    assert not any(
        tensor.is_inference()
        for layer in cache.layers
        for name, tensor in layer.state().tensors.items()
        if name != "last_evicted"
    )
    for i in range(6):
        forward(model, tokens(4, 1, seed=i), cache)
    assert cache.tokens_kept()[0].tolist() == [[6, 6]] * 4


def test_steps_of_a_moving_budget_compile_and_the_next_other_one_finds_its_end() -> None:
    torch._dynamo.reset()
    model, cache = filled()
    plain = copy.deepcopy(cache)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model.forward, fullgraph=True, backend=counter)
    for each in (cache, plain):
        each.set_budget(SMALL, max_evictions_per_step=3)
    for i in range(8):
        new = tokens(2, 1, seed=i)
        with torch.no_grad():
            compiled(new, **{cache_kwarg(model): cache})
        forward(model, new, plain)
        assert kept(cache, 0) == kept(plain, 0)
    assert counter.frame_count <= 2
    assert cache.layers[0].row_target is not None
    assert cache.layers[0].k_cache.shape[2] == 16
    for each in (cache, plain):
        forward(model, tokens(2, 1), each)
    assert cache.layers[0].row_target is None
    assert cache.layers[0].k_cache.shape[2] == 6
    assert kept(cache, 1) == kept(plain, 1)
    torch._dynamo.reset()
