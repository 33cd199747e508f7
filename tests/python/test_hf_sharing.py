"""Forks that share memory: until one of them writes, and without any of them noticing."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from h2o_kv import EvictionPolicy, H2OCache
from h2o_kv.hf import cache_kwarg
from hf_models import forward, tiny_config, tiny_model, tokens

POLICY = EvictionPolicy(num_heavy=4, num_recent=3, num_sink=1)
SLOTS = ("keys", "values", "scores", "positions")
STATE = (*SLOTS, "tokens_seen", "last_evicted")
LAYER_ROW = (
    2 * 8 * (2 * 8 * 4 + 4 + 4)
)  # Bytes of a row of a layer: heads, slots, k and v, numbers.


def filled(batch: int = 2, **options: Any) -> tuple[Any, H2OCache]:
    model = tiny_model("llama")
    cache = H2OCache(model.config, POLICY, **options)
    forward(model, tokens(batch, 20), cache)
    forward(model, tokens(batch, 1), cache)
    return model, cache


def snapshot(cache: H2OCache) -> list[Tensor]:
    state = [getattr(layer, name) for layer in cache.layers for name in STATE]
    return [torch.empty(0) if tensor is None else tensor.clone() for tensor in state]


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


def addresses(*caches: H2OCache) -> set[int]:
    """Where the memory of all slots lies."""
    return {
        layer.held(name).data_ptr() for cache in caches for layer in cache.layers for name in SLOTS
    }


def allocated(*caches: H2OCache) -> int:
    """Bytes of all slots, each counted once."""
    return sum(
        {
            layer.held(name).data_ptr(): layer.held(name).nbytes
            for cache in caches
            for layer in cache.layers
            for name in SLOTS
        }.values()
    )


def attend(cache: H2OCache, layer: int, seed: int = 0) -> Tensor:
    """A step of one layer."""
    generator = torch.Generator().manual_seed(seed)
    batch = cache.layers[layer].batch_size
    new = [torch.randn(1, h, 1, 8, generator=generator) for h in (4, 2, 2)]
    output: Tensor = cache.layers[layer].attend(
        *(tensor.expand(batch, -1, -1, -1) for tensor in new), None, None
    )
    return output


# ---- Where memory lies.


@pytest.mark.parametrize("n", [1, 3])
def test_a_fork_takes_no_memory_and_its_first_write_that_of_a_layer(n: int) -> None:
    _, cache = filled()
    before = addresses(cache)
    of_cache = [layer.keys for layer in cache.layers]
    whole = allocated(cache)
    assert whole == 2 * 2 * LAYER_ROW
    fork = cache.fork(n)
    assert addresses(cache, fork) == before
    assert allocated(cache, fork) == whole
    assert replace(cache.nbytes(), undo=0) == fork.nbytes()
    assert fork.nbytes().shared == fork.nbytes().total == whole
    assert fork.nbytes().owned == 0

    attend(fork, 0)
    assert addresses(cache) == before
    assert len(addresses(cache, fork)) == len(before) + 4
    assert allocated(cache, fork) == whole + 2 * n * LAYER_ROW
    assert fork.nbytes().owned - fork.nbytes().undo == 2 * n * LAYER_ROW
    assert fork.nbytes().shared == cache.nbytes().shared == 2 * LAYER_ROW
    attend(fork, 1)
    assert allocated(cache, fork) == whole + 2 * 2 * n * LAYER_ROW
    assert (fork.nbytes().shared, cache.nbytes().shared) == (0, 0)

    # The last who holds the memory goes on in it.
    for layer, keys in zip(cache.layers, of_cache, strict=True):
        attend(cache, layer.layer_idx)
        assert layer.keys is keys
    assert addresses(cache) == before


def test_the_origin_copies_when_it_writes_first_and_the_fork_goes_on_in_place() -> None:
    _, cache = filled()
    before = addresses(cache)
    fork = cache.fork(1)
    attend(cache, 0)
    attend(cache, 1)
    assert not addresses(cache) & before
    assert addresses(fork) == before
    attend(fork, 0)
    attend(fork, 1)
    assert addresses(fork) == before


def test_moving_rows_before_the_first_write_copies_nothing() -> None:
    _, cache = filled(3)
    whole = allocated(cache)
    fork, plain = cache.fork(2), copy.deepcopy(cache)
    plain.batch_repeat_interleave(2)
    moves: list[Callable[[H2OCache], Any]] = [
        lambda cache: cache.reorder_cache(torch.tensor([5, 4, 3, 2, 1, 0])),
        lambda cache: cache.batch_select_indices(torch.tensor([0, 2, 5])),
        lambda cache: cache.batch_repeat_interleave(2),
        lambda cache: cache.batch_select_indices(torch.tensor([True, False] * 3)),
    ]
    for move in moves:
        for each in (fork, plain):
            move(each)
        assert equal(snapshot(fork), snapshot(plain))
        assert allocated(cache, fork) == whole
    again, plain_again = fork.fork(2), copy.deepcopy(plain)
    plain_again.batch_repeat_interleave(2)
    assert allocated(cache, fork, again) == whole
    for each in (again, plain_again):
        each.reorder_cache(torch.tensor([1, 3, 5, 0, 2, 4]))
    for a, b in ((again, plain_again), (fork, plain)):
        for layer in (0, 1):
            assert torch.equal(attend(a, layer), attend(b, layer))
        assert equal(snapshot(a), snapshot(b))
    assert allocated(cache, fork, again) == whole + 2 * (3 + 6) * LAYER_ROW


def test_a_fork_that_is_dropped_gives_its_hold_back() -> None:
    _, cache = filled()
    before = addresses(cache)
    forks = [cache.fork(2) for _ in range(3)]
    attend(forks[0], 0)
    del forks
    gc.collect()
    assert cache.nbytes().shared == 0
    for layer in (0, 1):
        attend(cache, layer)
    assert addresses(cache) == before


def test_an_origin_that_is_dropped_leaves_its_forks_alone() -> None:
    _, cache = filled()
    before, want = addresses(cache), snapshot(cache)
    fork, rows = cache.fork(1), cache.fork(2)
    del cache
    gc.collect()
    assert equal(snapshot(fork), want)
    rows.batch_select_indices(torch.tensor([0, 2]))
    assert equal(snapshot(rows), want)
    attend(rows, 0)
    attend(rows, 1)
    assert equal(snapshot(fork), want)
    for layer in (0, 1):
        attend(fork, layer)
    assert addresses(fork) == before
    assert equal(snapshot(fork), snapshot(rows))


def test_the_last_whose_rows_are_others_copies_them() -> None:
    _, cache = filled()
    fork = cache.fork(2)
    want = [tensor.repeat_interleave(2, 0) for tensor in snapshot(cache)]
    del cache
    gc.collect()
    assert fork.nbytes().shared == 0
    assert equal(snapshot(fork), want)
    attend(fork, 0)
    assert fork.layers[0].keys.shape[0] == 4


# ---- Nobody notices.


WRITES: dict[str, Callable[[Any, H2OCache], Any]] = {
    "forward": lambda model, cache: forward(model, tokens(2, 1, seed=9), cache),
    "prompt": lambda model, cache: forward(model, tokens(2, 12, seed=9), cache),
    "crop": lambda model, cache: cache.crop(-1),
    "insert": lambda model, cache: cache.insert(0, filled()[1], 1),
    "release": lambda model, cache: cache.release(1),
    "set_budget": lambda model, cache: cache.set_budget(num_heavy=2),
    "larger": lambda model, cache: cache.set_budget(num_heavy=20),
    "slowly": lambda model, cache: (
        cache.set_budget(num_heavy=0, num_recent=2, max_evictions_per_step=2),
        forward(model, tokens(2, 1), cache),
    ),
    "reset": lambda model, cache: cache.reset(),
    "anew": lambda model, cache: (cache.reset(), forward(model, tokens(2, 9), cache)),
    "rows": lambda model, cache: (
        cache.reorder_cache(torch.tensor([1, 1])),
        forward(model, tokens(2, 1), cache),
    ),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("writer", ["fork", "origin"])
def test_what_one_writes_no_other_sees(writer: str, write: str) -> None:
    """And it is what a copy of its own would be after the same."""
    model, cache = filled(prompt_length=20, max_rollback=3)
    copied = copy.deepcopy(cache)
    fork, other = cache.fork(1), cache.fork(1)
    changed, kept = (fork, cache) if writer == "fork" else (cache, fork)
    want = snapshot(kept)
    WRITES[write](model, changed)
    WRITES[write](model, copied)
    assert equal(snapshot(kept), want)
    assert equal(snapshot(other), want)
    if write != "reset":
        assert equal(snapshot(changed), snapshot(copied))
        assert changed.get_seq_length() == copied.get_seq_length()
        assert changed.budgets == copied.budgets
    for each in (kept, other):
        each.crop(-1)
        assert each.get_seq_length() == 20
        forward(model, tokens(2, 1), each)
        assert equal(snapshot(each), want)


def test_reading_shows_each_its_rows_and_ends_no_share() -> None:
    _, cache = filled()
    fork = cache.fork(2)
    fork.reorder_cache(torch.tensor([3, 2, 1, 0]))
    for layer, origin in zip(fork.layers, cache.layers, strict=True):
        for name in ("k_cache", "v_cache", "scores", "positions", "last_evicted"):
            want = getattr(origin, name)[[1, 1, 0, 0]]
            assert torch.equal(getattr(layer, name), want)
        assert layer.tokens_seen.tolist() == [21] * 4
    kept = fork.tokens_kept()
    assert [count.tolist() for count in kept] == [[[8, 8]] * 4] * 2
    assert len(fork.budgets) == 4
    assert repr(fork.layers[0]) == "H2OLayer(layer_idx=0, capacity=8)"
    assert fork.nbytes().owned == 0
    assert allocated(cache, fork) == allocated(cache)


def test_a_shared_fork_gives_rows_to_others() -> None:
    model, cache = filled()
    batch = filled(3)[1]
    fork = cache.fork(2)
    batch.insert(2, fork, 3)
    for mine, theirs in zip(batch.layers, cache.layers, strict=True):
        assert torch.equal(mine.k_cache[2], theirs.k_cache[1])
    assert fork.nbytes().owned == 0
    forward(model, tokens(3, 1), batch)


def test_reset_keeps_memory_that_is_nobody_else_s() -> None:
    model, cache = filled()
    before = addresses(cache)
    fork = cache.fork(1)
    fork.reset()
    assert fork.nbytes().total == 0
    assert not fork.layers[0].is_initialized
    assert fork.budgets is None
    forward(model, tokens(1, 5), fork)
    assert fork.layers[0].batch_size == 1
    cache.reset()
    assert addresses(cache) == before


def test_forks_before_the_first_forward_share_nothing_or_empty_memory() -> None:
    model = tiny_model("llama")
    cache = H2OCache(model.config, POLICY)
    fork = cache.fork(3)
    assert fork.nbytes().total == 0
    cache.activate_past_recording()
    assert all(layer.is_croppable for layer in cache.fork(1).layers)
    cache.deactivate_past_recording()
    cache.early_initialization(2, 2, 8, torch.float32, torch.device("cpu"))
    early = cache.fork(1)
    assert early.nbytes().shared == early.nbytes().total > 0
    for each in (cache, fork, early):
        forward(model, tokens(2, 9), each)
    assert equal(snapshot(cache), snapshot(fork))
    assert equal(snapshot(cache), snapshot(early))


# ---- Taking back.


@pytest.mark.parametrize("n", [1, 2])
def test_a_shared_journal_is_each_one_s_own(n: int) -> None:
    model, cache = filled(prompt_length=20, max_rollback=4)
    forward(model, tokens(2, 3, seed=2), cache)
    recorded = cache.nbytes().journal
    fork = cache.fork(n)
    assert fork.nbytes().journal == recorded > 0
    assert fork.nbytes().owned == cache.nbytes().owned == 0
    plain = copy.deepcopy(cache)
    fork.crop(-2)
    forward(model, tokens(2 * n, 2, seed=4), fork)
    cache.crop(-3)
    plain.crop(-2)
    plain.batch_repeat_interleave(n)
    forward(model, tokens(2 * n, 2, seed=4), plain)
    assert equal(snapshot(fork), snapshot(plain))
    assert fork.nbytes() == plain.nbytes()
    fork.crop(-3)
    plain.crop(-3)
    assert equal(snapshot(fork)[:5], snapshot(plain)[:5])
    assert cache.get_seq_length() == 21


def test_recording_ends_for_the_one_who_ends_it() -> None:
    model, cache = filled(prompt_length=20, max_rollback=4)
    fork = cache.fork(1)
    fork.deactivate_past_recording()
    assert fork.nbytes().journal == 0
    cache.crop(-1)
    forward(model, tokens(2, 2), fork)
    assert (cache.get_seq_length(), fork.get_seq_length()) == (20, 23)


# ---- Copies, files, modes, graphs.


@pytest.mark.parametrize("how", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
@pytest.mark.parametrize("n", [1, 2])
def test_a_copy_of_a_fork_shares_nothing(how: Callable[[Any], Any], n: int) -> None:
    model, cache = filled(prompt_length=20, max_rollback=4)
    fork = cache.fork(n)
    copied = how(fork)
    assert copied.nbytes().shared == 0
    assert not addresses(copied) & addresses(cache, fork)
    assert equal(snapshot(copied), snapshot(fork))
    assert fork.nbytes().owned == 0
    for each in (copied, fork):
        each.crop(-1)
        forward(model, tokens(2 * n, 2), each)
    assert equal(snapshot(copied), snapshot(fork))


def test_a_shared_fork_is_saved_as_what_it_is(tmp_path: Path) -> None:
    _, cache = filled()
    fork = cache.fork(2)
    fork.reorder_cache(torch.tensor([1, 2, 3, 0]))
    fork.save(tmp_path / "a")
    assert fork.nbytes().owned == 0
    loaded = H2OCache.load(tmp_path / "a", tiny_config("llama"))
    assert equal(snapshot(loaded), snapshot(fork))
    attend(fork, 0)
    attend(fork, 1)
    attend(loaded, 0)
    attend(loaded, 1)
    fork.save(tmp_path / "a")
    loaded.save(tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_inside_and_outside_inference_mode() -> None:
    model = tiny_model("llama")
    with torch.inference_mode():
        cache = H2OCache(model.config, POLICY)
        forward(model, tokens(2, 20), cache)
        fork, rows = cache.fork(1), cache.fork(2)
        rows.reorder_cache(torch.tensor([3, 2, 1, 0]))
        forward(model, tokens(2, 1), fork)
    for each in (cache, fork, rows):
        forward(model, tokens(each.layers[0].batch_size, 1), each)
        each.reorder_cache(torch.zeros(each.layers[0].batch_size, dtype=torch.long))
    assert not any(
        getattr(layer, name).is_inference()
        for each in (cache, fork, rows)
        for layer in each.layers
        for name in SLOTS
    )


def test_no_memory_for_a_copy_leaves_the_share_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    _, cache = filled()
    fork = cache.fork(1)
    want = snapshot(cache)

    def fail(*args: Any) -> Tensor:
        raise torch.OutOfMemoryError("no more")

    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "clone", fail)
        with pytest.raises(torch.OutOfMemoryError):
            attend(fork, 0)
    assert fork.nbytes().owned == 0
    assert equal(snapshot(fork), want)
    assert equal(snapshot(cache), want)


@pytest.mark.parametrize("n", [1, 2])
def test_a_compiled_step_copies_and_then_needs_no_other_graph(n: int) -> None:
    torch._dynamo.reset()
    model, cache = filled()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model.forward, fullgraph=True, backend=counter)
    want = snapshot(cache)
    for _ in range(2):
        fork, plain = cache.fork(n), cache.fork(n)
        for i in range(4):
            new = tokens(2 * n, 1, seed=i)
            with torch.no_grad():
                got = compiled(new, **{cache_kwarg(model): fork}).logits
            torch.testing.assert_close(got, forward(model, new, plain))
        assert equal(snapshot(cache), want)
        assert fork.nbytes().shared == 0
        torch.testing.assert_close(fork.layers[1].scores, plain.layers[1].scores)
    assert counter.frame_count <= 4
    torch._dynamo.reset()
