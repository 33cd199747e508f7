"""A cache that goes to another device or dtype, in place."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from h2o_kv import EvictionPolicy, H2OCache
from hf_models import forward, kept, tiny_config, tiny_model, tokens

POLICY = EvictionPolicy(num_heavy=4, num_recent=3, num_sink=1)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
STATE = ("k_cache", "v_cache", "scores", "positions", "tokens_seen")


def filled(dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Any, H2OCache]:
    model = tiny_model("llama", dtype=dtype)
    cache = H2OCache(model.config, POLICY, **options)
    forward(model, tokens(2, 20), cache)
    forward(model, tokens(2, 2), cache)
    return model, cache


def snapshot(cache: H2OCache) -> list[Tensor]:
    return [getattr(layer, name).clone() for layer in cache.layers for name in STATE]


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(
        x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(a, b, strict=True)
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("former", DTYPES, ids=str)
def test_keys_and_values_are_cast_and_scores_follow(
    former: torch.dtype, dtype: torch.dtype
) -> None:
    model, cache = filled(former)
    before = copy.deepcopy(cache)
    assert cache.to(dtype=dtype) is cache
    for layer, was in zip(cache.layers, before.layers, strict=True):
        assert layer.k_cache.dtype == layer.v_cache.dtype == dtype
        assert torch.equal(layer.k_cache, was.k_cache.to(dtype))
        assert torch.equal(layer.v_cache, was.v_cache.to(dtype))
        score_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        assert layer.scores.dtype == score_dtype
        assert torch.equal(layer.scores, was.scores.to(score_dtype))
        for name in ("positions", "tokens_seen", "last_evicted"):
            assert torch.equal(getattr(layer, name), getattr(was, name))
        assert layer.columns_seen == was.columns_seen
    # It goes on, and begins again, in its new dtype.
    assert forward(model, tokens(2, 1), cache).dtype == former
    cache.reset()
    forward(model, tokens(1, 9), cache)
    assert cache.layers[1].v_cache.dtype == dtype


def test_there_and_back_is_nothing_where_the_wider_dtype_holds_it_all() -> None:
    model, cache = filled(torch.bfloat16)
    other = copy.deepcopy(cache)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        cache.to(dtype=dtype)
    assert equal(snapshot(cache), snapshot(other))
    for i in range(5):
        new = tokens(2, 1, seed=i)
        assert torch.equal(forward(model, new, cache), forward(model, new, other))
    assert equal(snapshot(cache), snapshot(other))


def test_a_cache_in_float64_goes_on_as_one_that_was_made_so() -> None:
    """Of the same float32 state."""
    model, cache = filled()
    double = tiny_model("llama", dtype=torch.float64)
    model.double()
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), double.parameters(), strict=True)
    )
    made = H2OCache(double.config, POLICY, dtype=torch.float64)
    forward(double, tokens(2, 20), made)
    forward(double, tokens(2, 2), made)
    cache.to(dtype=torch.float64)
    for layer, source in zip(made.layers, cache.layers, strict=True):
        for name in STATE:
            getattr(layer, name).copy_(getattr(source, name))
    for i in range(12):
        new = tokens(2, 1, seed=i)
        assert torch.equal(forward(double, new, cache), forward(double, new, made))
    assert equal(snapshot(cache), snapshot(made))


def test_nothing_to_do_changes_nothing() -> None:
    _, cache = filled(prompt_length=20, max_rollback=4)
    tensors = [getattr(layer, name) for layer in cache.layers for name in STATE]
    fork = cache.fork(2)
    cache.to("cpu")
    cache.to(torch.device("cpu"), torch.float32)
    assert fork.nbytes().owned == 0
    after = [getattr(layer, name) for layer in cache.layers for name in STATE]
    assert all(a.data_ptr() == b.data_ptr() for a, b in zip(tensors, after, strict=True))
    cache.crop(-1)
    assert cache.get_seq_length() == 21


def test_before_the_first_forward_the_dtype_is_remembered() -> None:
    model = tiny_model("llama")
    cache = H2OCache(model.config, POLICY, dtype=torch.float16).to("cpu", torch.bfloat16)
    assert cache.nbytes().total == 0
    forward(model, tokens(2, 9), cache)
    assert cache.layers[0].k_cache.dtype == torch.bfloat16


@pytest.mark.parametrize("n", [1, 2])
def test_a_fork_moves_alone(n: int) -> None:
    _, cache = filled()
    fork = cache.fork(n)
    want = snapshot(cache)
    wider = [
        t.repeat_interleave(n, 0).double() if t.is_floating_point() else t.repeat_interleave(n, 0)
        for t in want
    ]
    fork.to(dtype=torch.float64)
    assert equal(snapshot(fork), wider)
    assert equal(snapshot(cache), want)
    assert fork.nbytes().shared == cache.nbytes().shared == 0
    addresses = {getattr(layer, name).data_ptr() for layer in cache.layers for name in STATE}
    assert not addresses & {
        getattr(layer, name).data_ptr() for layer in fork.layers for name in STATE
    }


def test_a_budget_on_its_way_goes_on() -> None:
    model, cache = filled(torch.float64)
    cache.set_budget(num_heavy=1, num_recent=2, max_evictions_per_step=2)
    forward(model, tokens(2, 1), cache)
    plain = copy.deepcopy(cache)
    cache.to(dtype=torch.float32)
    for i in range(6):
        for each in (cache, plain):
            forward(model, tokens(2, 1, seed=i), each)
        assert kept(cache, 0) == kept(plain, 0)
    assert cache.budget_events == plain.budget_events
    assert cache.budget_events[0].held_at == 26


def test_what_could_be_taken_back_is_forgotten_and_recording_goes_on() -> None:
    model, cache = filled(prompt_length=20, max_rollback=4)
    cache.to(dtype=torch.float64)
    with pytest.raises(ValueError, match="got 1 with max_rollback=4 and 0 recorded"):
        cache.crop(-1)
    before = snapshot(cache)
    forward(model, tokens(2, 3), cache)
    cache.crop(-3)
    assert torch.equal(cache.layers[0].positions, before[3])
    assert torch.equal(cache.layers[0].scores, before[2])


def test_it_is_saved_as_it_is(tmp_path: Path) -> None:
    model, cache = filled(dtype=torch.float32)
    cache.to(dtype=torch.float16)
    cache.save(tmp_path / "a")
    loaded = H2OCache.load(tmp_path / "a", model.config)
    assert equal(snapshot(loaded), snapshot(cache))
    for each in (loaded, cache):
        each.reset()
        forward(model, tokens(2, 9), each)
    assert equal(snapshot(loaded), snapshot(cache))
    assert loaded.layers[0].k_cache.dtype == torch.float16


def test_inside_and_outside_inference_mode() -> None:
    model, cache = filled()
    with torch.inference_mode():
        cache.to(dtype=torch.float64)
    forward(model, tokens(2, 1), cache)
    cache.reorder_cache(torch.tensor([1, 0]))


@pytest.mark.parametrize(
    ("args", "error", "match"),
    [
        ({}, ValueError, "device or dtype must be given, got neither"),
        ({"device": torch.float16}, TypeError, "device must be one, got torch.float16; give it as"),
        (
            {"dtype": torch.int8},
            ValueError,
            "dtype must be one of torch.float32, .*, got torch.int8",
        ),
        ({"dtype": "float16"}, TypeError, "dtype must be one of torch.float32, .*, got 'float16'"),
        ({"device": "meta"}, ValueError, "device must be \"auto\", .*, got 'meta'"),
        ({"device": "cuda:99"}, ValueError, "device must be a device that PyTorch .* sees"),
        ({"device": "cpu", "dtype": torch.int8}, ValueError, "dtype must be one of"),
    ],
)
def test_bad_arguments_change_nothing(args: Any, error: Any, match: str) -> None:
    _, cache = filled()
    before = snapshot(cache)
    with pytest.raises(error, match=f"^H2OCache.to: {match}"):
        cache.to(**args)
    assert equal(snapshot(cache), before)


def test_a_forward_that_stopped_half_way_is_not_moved() -> None:
    _, cache = filled()
    cache.layers[0].columns_seen += 1
    with pytest.raises(RuntimeError, match="must have seen the same tokens"):
        cache.to(dtype=torch.float64)
    assert cache.layers[1].k_cache.dtype == torch.float32


def test_no_memory_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    _, cache = filled()
    before = snapshot(cache)
    original, calls = Tensor.to, []

    def fail_later(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        calls.append(1)
        if len(calls) > 8:
            raise torch.OutOfMemoryError("no more")
        return original(self, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(Tensor, "to", fail_later)
        with pytest.raises(torch.OutOfMemoryError):
            cache.to(dtype=torch.float64)
    assert equal(snapshot(cache), before)
    assert cache._settings.dtype is None


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_to_a_gpu_and_back() -> None:
    model, cache = filled()
    cache.set_budget(num_heavy=2, max_evictions_per_step=2)
    fork, plain = cache.fork(2), copy.deepcopy(cache)
    cache.to("cuda")
    assert cache.layers[0].device.type == "cuda"
    assert all(tensor.is_cuda for tensor in snapshot(cache))
    assert fork.layers[0].k_cache.device.type == "cpu"
    model.cuda()
    forward(model, tokens(2, 1).cuda(), cache)
    model.cpu()
    cache.to("cpu")
    forward(model, tokens(2, 1), plain)
    assert kept(cache, 0) == kept(plain, 0)
    for layer, other in zip(cache.layers, plain.layers, strict=True):
        assert layer.scores.device.type == "cpu"
        assert layer.row_target.device.type == "cpu"
        torch.testing.assert_close(
            layer.scores.sort(-1).values, other.scores.sort(-1).values, atol=1e-3, rtol=1e-3
        )


def test_the_config_is_the_model_s_own_still() -> None:
    config = tiny_config("llama")
    cache = H2OCache(config, POLICY).to(dtype=torch.float64)
    assert cache._settings.config is config
    assert all(layer.settings is cache._settings for layer in cache.layers)
