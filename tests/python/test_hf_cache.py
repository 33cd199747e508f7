"""State and interface of H2OCache: what transformers asks of a cache, rows that move, errors."""

from __future__ import annotations

import copy
import doctest
import importlib
import sys
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import BartConfig, Gemma3nTextConfig

import h2o_kv.hf.cache
from h2o_kv import EvictionPolicy, H2OCache
from h2o_kv.hf import TRANSFORMERS_BELOW, TRANSFORMERS_MIN
from h2o_kv.hf.versions import check_transformers
from hf_models import (
    FAMILIES,
    forward,
    generate,
    kept,
    left_padded,
    tiny_config,
    tiny_model,
    tokens,
)

POLICY = EvictionPolicy(num_heavy=4, num_recent=3, num_sink=1)
STATE = ("k_cache", "v_cache", "scores", "positions", "tokens_seen")


def filled(
    batch: int = 2, length: int = 20, policy: EvictionPolicy = POLICY
) -> tuple[Any, H2OCache]:
    """A tiny llama and its cache after one forward."""
    model = tiny_model("llama")
    cache = H2OCache(model.config, policy)
    forward(model, tokens(batch, length), cache)
    return model, cache


def state(cache: H2OCache) -> list[torch.Tensor]:
    tensors = [getattr(layer, name) for layer in cache.layers for name in STATE]
    return [tensor.clone() for tensor in tensors]


def equal_states(a: H2OCache, b: H2OCache) -> bool:
    return all(map(torch.equal, state(a), state(b)))


# ---- Tensors and counts.


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_layers_hold_the_four_tensors(dtype: torch.dtype) -> None:
    model = tiny_model("llama", dtype=dtype)
    cache = H2OCache(model.config, POLICY)
    assert all(layer.k_cache is None for layer in cache.layers)
    assert cache.tokens_kept() == []
    forward(model, tokens(3, 5), cache)
    for layer in cache.layers:
        assert layer.k_cache.shape == layer.v_cache.shape == (3, 2, 8, 8)
        assert layer.scores.shape == layer.positions.shape == (3, 2, 8)
        assert layer.k_cache.dtype == layer.v_cache.dtype == dtype
        assert layer.scores.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert (layer.positions.dtype, layer.tokens_seen.dtype) == (torch.int32, torch.int32)
        assert layer.keys is layer.k_cache
        assert layer.values is layer.v_cache
        assert layer.positions[:, :, 5:].eq(-1).all()
        assert layer.scores[:, :, 5:].eq(0).all()
    assert [count.tolist() for count in cache.tokens_kept()] == [[[5, 5]] * 3] * 2


def test_tensors_are_written_in_place() -> None:
    model, cache = filled()
    before = [getattr(layer, name) for layer in cache.layers for name in STATE]
    forward(model, tokens(2, 1), cache)
    after = [getattr(layer, name) for layer in cache.layers for name in STATE]
    assert all(map(lambda a, b: a is b, before, after))


def test_lengths_are_those_of_what_was_seen() -> None:
    _, cache = filled(length=20)
    assert cache.get_seq_length() == cache.get_seq_length(1) == 20
    for new in (1, 7):
        assert cache.layers[0].get_mask_sizes(new) == (new, 20)
        assert cache.layers[0].get_mask_sizes(torch.arange(20, 20 + new)) == (new, 20)
    assert cache.layers[0].get_max_length() == cache.layers[0].get_max_cache_shape() == -1
    assert cache.get_max_cache_shape() == -1
    assert cache.is_sliding == [False, False]
    assert not cache.is_compileable
    assert cache.layers[0].batch_size == 2
    assert cache.prefill == "one_shot"
    assert cache.policy == POLICY


def test_a_row_whose_new_token_is_padding_is_left_alone() -> None:
    _, cache = filled()
    layer = cache.layers[0]
    new = [torch.randn(2, heads, 1, 8) for heads in (4, 2, 2)]
    before = [getattr(layer, name).clone() for name in STATE]
    output = layer.attend(*new, torch.tensor([False, True])[:, None, None, None], None)
    assert output[0].eq(0).all()
    assert output[1].ne(0).all()
    assert layer.tokens_seen.tolist() == [20, 21]
    after = [getattr(layer, name) for name in STATE]
    assert all(torch.equal(a[0], b[0]) for a, b in zip(after, before, strict=True))
    assert not any(torch.equal(a[1], b[1]) for a, b in zip(after, before, strict=True))


def test_last_evicted_names_who_left() -> None:
    model, cache = filled(length=20)
    before = kept(cache, 0)
    assert cache.layers[0].last_evicted.shape == (2, 2, 20)
    forward(model, tokens(2, 1, seed=4), cache)
    for layer, heads, now in zip(cache.layers, before, kept(cache, 0), strict=True):
        for head in range(2):
            (left,) = {*heads[head], 20} - set(now[head])
            assert layer.last_evicted[0, head].tolist() == [left]


def test_bytes_are_counted_apart() -> None:
    _, cache = filled()
    slots = 2 * 2 * 2 * 8  # layers, rows, KV heads, capacity
    size = cache.nbytes()
    assert (size.kv, size.bookkeeping) == (slots * 2 * 8 * 4, slots * (4 + 4))
    assert size.total == size.kv + size.bookkeeping
    assert H2OCache(tiny_config("llama"), POLICY).nbytes().total == 0


def test_repr_says_what_it_is() -> None:
    _, cache = filled()
    assert repr(cache).startswith("H2OCache(2 layers, ")
    assert repr(cache).endswith("prefill='one_shot', seen=20)")
    assert repr(cache.layers[1]) == "H2OLayer(layer_idx=1, capacity=8)"


class Calls(TorchDispatchMode):
    """Names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("masked", [False, True])
def test_a_decode_step_is_one_call_and_never_waits_for_the_device(masked: bool) -> None:
    _, cache = filled()
    layer = cache.layers[0]
    new = [torch.randn(2, heads, 1, 8) for heads in (4, 2, 2)]
    mask = torch.ones(2, 1, 1, 1, dtype=torch.bool) if masked else None
    layer.attend(*new, mask, None)  # The first one allocates.
    with Calls() as calls:
        layer.attend(*new, mask, None)
    views = {"aten.unsqueeze.default", "aten.transpose.int", "aten.expand.default"}
    views |= {"aten.select.int", "aten.slice.Tensor"}  # of the mask
    names = [name for name in calls.names if name not in views]
    if masked:  # The positions of the new tokens, -1 where they are padding.
        assert len([name for name in names if "where" in name]) == 1
        names = names[-3:]
    # The step and the count of tokens seen, after one copy of the small tensors by which the step
    # could be undone: no keys and values are copied, nothing is allocated beside the output.
    step = ["h2o.h2o_attention_decode.default", "aten.add_.Tensor"]
    assert names == ["aten._foreach_copy_.default", *step]
    with Calls() as calls:
        assert int(layer.tokens_seen[0]) == 22
    assert "aten._local_scalar_dense.default" in calls.names


@pytest.mark.parametrize("family", FAMILIES)
def test_the_operator_takes_a_new_token_where_it_lies(family: str) -> None:
    model = tiny_model(family)
    cache = H2OCache(model.config, POLICY)
    forward(model, tokens(2, 20), cache)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        forward(model, tokens(2, 1), cache)
    steps = [event for event in profile.events() if event.name == "h2o::h2o_attention_decode"]
    assert len(steps) == 2
    inside = {child.name for step in steps for child in step.cpu_children}
    assert not inside & {"aten::clone", "aten::contiguous", "aten::copy_", "aten::to"}


def test_a_forward_calls_the_operator_once_a_layer() -> None:
    model, cache = filled()
    for new in (1, 6):
        with Calls() as calls:
            forward(model, tokens(2, new), cache)
        assert calls.names.count("h2o.h2o_attention_decode.default") == 2


# ---- Starting again.


@pytest.mark.parametrize(
    "policy", [POLICY, EvictionPolicy(heavy_ratio=0.3, recent_ratio=0.2)], ids=["counts", "ratios"]
)
def test_reset_clears_everything(policy: EvictionPolicy) -> None:
    model = tiny_model("llama")
    cache = H2OCache(model.config, policy)
    ids, mask = left_padded([tokens(1, 20)[0], tokens(1, 8)[0]])
    forward(model, ids, cache, mask)
    assert (cache.layers[0].row_budget is not None) == policy.has_ratio
    cache.reset()
    assert cache.get_seq_length() == 0
    assert cache.budgets is None
    for layer in cache.layers:
        assert layer.k_cache.eq(0).all()
        assert layer.v_cache.eq(0).all()
        assert layer.scores.eq(0).all()
        assert layer.positions.eq(-1).all()
        assert layer.tokens_seen.eq(0).all()
        assert layer.row_budget is None
        assert layer.last_evicted is None
    # Another batch and another prompt: nothing of the first one shows.
    ids, mask = left_padded([tokens(1, 6)[0], tokens(1, 15)[0], tokens(1, 11)[0]])
    fresh = H2OCache(model.config, policy)
    assert torch.equal(
        generate(model, ids, cache, new=5, mask=mask), generate(model, ids, fresh, new=5, mask=mask)
    )
    assert equal_states(cache, fresh)
    assert cache.budgets == fresh.budgets
    if policy.has_ratio:
        assert [tuple(budget) for budget in cache.budgets] == [(0, 1, 1), (0, 4, 3), (0, 3, 2)]


def test_reset_keeps_the_memory_for_the_same_shape() -> None:
    model, cache = filled(batch=2)
    before = cache.layers[0].k_cache
    cache.reset()
    forward(model, tokens(2, 9), cache)
    assert cache.layers[0].k_cache is before


def test_another_batch_without_reset_raises() -> None:
    model, cache = filled(batch=2)
    with pytest.raises(
        ValueError, match="layer 0 holds batch=2, got 3 rows; use a new cache or reset"
    ):
        forward(model, tokens(3, 1), cache)


def test_early_initialization_allocates_before_the_prompt() -> None:
    model = tiny_model("llama")
    ratios = EvictionPolicy(heavy_ratio=0.25, recent_ratio=0.25)
    for policy, capacity in ((POLICY, 8), (ratios, 10)):
        cache = H2OCache(model.config, policy, prompt_length=20)
        assert not cache.is_initialized
        cache.early_initialization(2, 2, 8, torch.float32, torch.device("cpu"))
        assert cache.is_initialized
        assert cache.layers[1].k_cache.shape == (2, 2, capacity, 8)
        assert cache.get_seq_length() == 0
        before = cache.layers[0].k_cache
        forward(model, tokens(2, 20), cache)
        assert cache.layers[0].k_cache is before
    layer = H2OCache(model.config, ratios).layers[0]
    assert not layer.supports_early_init
    with pytest.raises(ValueError, match="prompt_length must be given to allocate before"):
        layer.lazy_initialization(torch.zeros(1, 2, 0, 8))


def test_caches_made_in_inference_mode_are_usable_outside() -> None:
    model = tiny_model("llama")
    cache, other = H2OCache(model.config, POLICY), H2OCache(model.config, POLICY)
    with torch.inference_mode():
        forward(model, tokens(2, 12), cache)
    forward(model, tokens(2, 12), other)
    for one in (cache, other):
        forward(model, tokens(2, 1), one)
    with torch.inference_mode():
        cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0, 2]))
    cache.reorder_cache(torch.tensor([0, 1]))
    for one in (cache, other):
        forward(model, tokens(2, 1), one)
    assert equal_states(cache, other)


def test_two_caches_can_take_turns() -> None:
    model = tiny_model("llama")
    caches = [H2OCache(model.config, POLICY) for _ in range(2)]
    alone = H2OCache(model.config, POLICY)
    prompts = [tokens(2, 12, seed=seed) for seed in range(2)]
    for prompt, cache in zip(prompts, caches, strict=True):
        forward(model, prompt, cache)
    for i in range(4):
        for prompt, cache in zip(prompts, caches, strict=True):
            forward(model, prompt[:, i : i + 1], cache)
    forward(model, prompts[1], alone)
    for i in range(4):
        forward(model, prompts[1][:, i : i + 1], alone)
    assert equal_states(caches[1], alone)
    assert not equal_states(caches[0], alone)


# ---- Rows that move.


def test_reorder_moves_every_part_of_a_row() -> None:
    ratios = EvictionPolicy(heavy_ratio=0.25, recent_ratio=0.25)
    model = tiny_model("llama")
    cache = H2OCache(model.config, ratios)
    ids, mask = left_padded([tokens(1, 8)[0], tokens(1, 20)[0]])
    forward(model, ids, cache, mask)
    for layer in cache.layers:
        layer.scores[0], layer.scores[1] = 1, 2
    before = [state(cache), cache.budgets, [layer.last_evicted for layer in cache.layers]]
    pointers = [layer.scores.data_ptr() for layer in cache.layers]
    cache.reorder_cache(torch.tensor([1, 0]))
    for layer in cache.layers:
        assert layer.scores[0].eq(2).all()
        assert layer.scores[1].eq(1).all()
        assert layer.tokens_seen.tolist() == [20, 8]
        assert layer.row_budget.tolist() == [[0, 5, 5], [0, 2, 2]]
    assert all(torch.equal(a, b.flip(0)) for a, b in zip(state(cache), before[0], strict=True))
    assert cache.budgets == before[1][::-1]
    for layer, evicted in zip(cache.layers, before[2], strict=True):
        assert torch.equal(layer.last_evicted, evicted.flip(0))
    assert pointers == [layer.scores.data_ptr() for layer in cache.layers]


def test_reordered_rows_go_on_as_before() -> None:
    model = tiny_model("llama")
    swapped, plain = H2OCache(model.config, POLICY), H2OCache(model.config, POLICY)
    prompt, step = tokens(3, 14), tokens(3, 1, seed=8)
    order = torch.tensor([2, 0, 0])
    forward(model, prompt, swapped)
    forward(model, prompt[order], plain)
    swapped.reorder_cache(order)
    assert torch.equal(forward(model, step, swapped), forward(model, step, plain))
    assert equal_states(swapped, plain)


def test_repeat_and_select_rows_move_every_tensor() -> None:
    model, cache = filled(batch=2)
    before = state(cache)
    cache.batch_repeat_interleave(2)
    repeated = state(cache)
    assert all(tensor.shape[0] == 4 for tensor in repeated)
    assert all(torch.equal(a, b[[0, 0, 1, 1]]) for a, b in zip(repeated, before, strict=True))
    assert cache.layers[0].batch_size == 4
    cache.batch_select_indices(torch.tensor([3, 0]))
    assert all(torch.equal(a, b[[1, 0]]) for a, b in zip(state(cache), before, strict=True))
    cache.batch_select_indices(torch.tensor([False, True]))
    assert all(torch.equal(a, b[:1]) for a, b in zip(state(cache), before, strict=True))
    forward(model, tokens(1, 1), cache)


@pytest.mark.parametrize(
    ("move", "message"),
    [
        (
            lambda c: c.reorder_cache(torch.tensor([0, 2])),
            r"reorder_cache: beam_idx must be in 0\.\.1",
        ),
        (lambda c: c.reorder_cache(torch.tensor([-1, 0])), r"must be in 0\.\.1, got \[-1, 0\]"),
        (
            lambda c: c.batch_select_indices(torch.tensor([2])),
            r"indices must be in 0\.\.1, got \[2\]",
        ),
        (
            lambda c: c.batch_select_indices(torch.tensor([True])),
            r"indices must have one bool a row = 2, got 1",
        ),
        (lambda c: c.batch_repeat_interleave(-1), r"repeats must be >= 0, got -1"),
        (
            lambda c: c.reorder_cache(torch.tensor([0.0, 1.0])),
            r"must be a tensor of .*int64, got .*32",
        ),
        (
            lambda c: c.reorder_cache(torch.tensor([True, True])),
            r"must be a tensor of .*got torch.bool",
        ),
        (lambda c: c.reorder_cache([0, 1]), r"must be a tensor of .*, got \[0, 1\]"),
        (lambda c: c.batch_select_indices(torch.tensor(0)), r"must be \[rows\], got \[\]"),
        (lambda c: c.crop(-1.5), r"crop: tokens_to_remove must be an integer, got -1.5"),
        (
            lambda c: c.set_budget(num_heavy=2, max_evictions_per_step=2**31),
            r"must be in 2\.\.2147483647",
        ),
    ],
)
def test_rows_that_are_not_there_are_refused_and_nothing_changes(move: Any, message: str) -> None:
    model, cache = filled()
    before = copy.deepcopy(cache)
    with pytest.raises((IndexError, TypeError, ValueError), match=message):
        move(cache)
    assert equal_states(cache, before)
    forward(model, tokens(2, 1), cache)


def test_rows_of_an_empty_cache_move_without_complaint() -> None:
    cache = H2OCache(tiny_config("llama"), POLICY)
    cache.reorder_cache(torch.tensor([0]))
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0]))
    cache.reset()
    assert cache.fork(2).get_seq_length() == 0


@pytest.mark.parametrize("n", [1, 3])
def test_fork_copies_each_row_and_shares_nothing(n: int) -> None:
    model, cache = filled(batch=2)
    before = state(cache)
    fork = cache.fork(n)
    assert all(
        torch.equal(a, b.repeat_interleave(n, 0)) for a, b in zip(state(fork), before, strict=True)
    )
    assert (fork.get_seq_length(), fork.prefill, fork.policy) == (20, "one_shot", POLICY)
    forward(model, tokens(2 * n, 1, seed=2), fork)
    assert all(map(torch.equal, state(cache), before))
    assert (fork.get_seq_length(), cache.get_seq_length()) == (21, 20)


def test_fork_of_nothing_raises() -> None:
    _, cache = filled()
    with pytest.raises(ValueError, match="fork: n must be >= 1, got 0"):
        cache.fork(0)
    for n in (1.5, True, "2"):
        with pytest.raises(TypeError, match=f"^H2OCache.fork: n must be an integer, got {n!r}$"):
            cache.fork(n)


@pytest.mark.parametrize("lengths", [(9, 8), torch.tensor([9, 8]), np.array([9, 8])])
def test_prompt_length_takes_any_integers(lengths: Any) -> None:
    model = tiny_model("llama")
    ratios = EvictionPolicy(heavy_ratio=0.25, recent_ratio=0.5)
    cache = H2OCache(model.config, ratios, prompt_length=lengths)
    forward(model, tokens(2, 9), cache)
    assert cache.budgets is not None
    assert [budget.num_recent for budget in cache.budgets] == [4, 4]
    assert H2OCache(model.config, ratios, prompt_length=lengths[0])


def test_a_deep_copy_belongs_to_the_same_model() -> None:
    model, cache = filled()
    other = copy.deepcopy(cache)
    assert torch.equal(forward(model, tokens(2, 1), other), forward(model, tokens(2, 1), cache))
    assert equal_states(other, cache)
    model.set_attn_implementation("sdpa")
    with pytest.raises(RuntimeError, match="attn_implementation must be"):
        forward(model, tokens(2, 1), other)


# ---- What is refused.


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        (
            {"policy": 256},
            TypeError,
            "policy must be an EvictionPolicy, or a sequence with one a row, got 256",
        ),
        ({"prefill": "lazy"}, ValueError, r"prefill must be one of \('one_shot', 'streaming'\), "),
        ({"prefill_chunk": 0}, ValueError, "prefill_chunk must be >= 1, got 0"),
        (
            {"policy": EvictionPolicy(num_heavy=4, num_recent=4, score_rule="misses")},
            ValueError,
            'prefill must be "streaming" and prefill_chunk 1 with .*"misses".*"one_shot" and 64',
        ),
        ({"prompt_length": 0}, ValueError, "prompt_length must be >= 1 in every row, got 0"),
        ({"prompt_length": [3, 0]}, ValueError, r"in every row, got \[3, 0\]"),
        ({"prompt_length": []}, ValueError, "prompt_length must be >= 1"),
        ({"prefill_chunk": 2.5}, TypeError, "prefill_chunk must be an integer, got 2.5"),
        ({"prefill_chunk": True}, TypeError, "prefill_chunk must be an integer, got True"),
        ({"prompt_length": "9"}, TypeError, "prompt_length must be an integer, got '9'"),
        ({"prompt_length": 9.5}, TypeError, r"prompt_length must be an integer, got 9\.5"),
        ({"prompt_length": True}, TypeError, "prompt_length must be an integer, got True"),
        ({"prompt_length": [9, 8.5]}, TypeError, r"prompt_length must be an integer, got 8\.5"),
        (
            {"dtype": "float16"},
            TypeError,
            r"dtype must be one of torch.float32, torch.float16, torch.bfloat16, torch.float64, "
            "got 'float16'",
        ),
        ({"dtype": torch.int8}, ValueError, "dtype must be one of torch.float32, .*got torch.int8"),
        ({"config": "llama"}, TypeError, "config must be that of a model, .* got 'llama'"),
        ({"config": BartConfig()}, ValueError, r"got is_encoder_decoder=True \(bart\)"),
        (
            {"config": BartConfig(is_encoder_decoder=False, add_cross_attention=True)},
            ValueError,
            "cross-attention is not supported",
        ),
        (
            {"config": tiny_config("qwen2", layer_types=["full_attention", "chunked_attention"])},
            ValueError,
            r"layer_types must be among .* got \['chunked_attention'\] \(qwen2\)",
        ),
        (
            {"config": Gemma3nTextConfig(num_hidden_layers=10, num_kv_shared_layers=5)},
            ValueError,
            "got num_kv_shared_layers=5",
        ),
    ],
)
def test_bad_arguments_raise(arguments: dict[str, Any], error: type, match: str) -> None:
    with pytest.raises(error, match=f"^H2OCache: .*{match}"):
        H2OCache(**{"config": tiny_config("llama"), "policy": POLICY, **arguments})


def test_prompt_length_must_fit_the_batch() -> None:
    model = tiny_model("llama")
    ratios = EvictionPolicy(heavy_ratio=0.25, recent_ratio=0.25)
    cache = H2OCache(model.config, ratios, prompt_length=[9, 9, 9])
    with pytest.raises(ValueError, match="prompt_length must have one entry a row = 2, got 3"):
        forward(model, tokens(2, 9), cache)


def test_a_budget_that_memory_cannot_hold_is_named() -> None:
    model = tiny_model("llama")
    cache = H2OCache(model.config, EvictionPolicy(num_heavy=2**31 - 1, num_recent=2**31 - 1))
    # 2 KV heads of 1024 float64 elements: above the address space of the processors of today.
    match = (
        "^H2OCache: the budget must fit into memory, got 4294967294 tokens: 140737488.* GB of keys"
    )
    with pytest.raises(MemoryError, match=match):
        cache.layers[0].lazy_initialization(torch.empty(1000, 2, 0, 1024, dtype=torch.float64))


def test_a_prefill_chunk_may_be_any_number() -> None:
    model, ids = tiny_model("llama"), tokens(1, 20)
    logits = [
        forward(model, ids, H2OCache(model.config, POLICY, prefill="streaming", prefill_chunk=n))
        for n in (20, 10**30)
    ]
    assert torch.equal(*logits)


def test_keys_and_values_of_different_head_dim_raise() -> None:
    layer = H2OCache(tiny_config("llama"), POLICY).layers[0]
    with pytest.raises(ValueError, match="must have the same head_dim, got 8 and 4"):
        layer.lazy_initialization(torch.zeros(1, 2, 0, 8), torch.zeros(1, 2, 0, 4))


def test_the_end_of_learned_positions_raises_before_the_step() -> None:
    model = tiny_model("opt", max_position_embeddings=12)
    cache = H2OCache(model.config, POLICY)
    forward(model, tokens(2, 10), cache)
    for _ in range(2):
        forward(model, tokens(2, 1), cache)
    before = state(cache)
    match = "positions of this model must be < 12 .* got 1 new tokens after 12"
    with pytest.raises(ValueError, match=match):
        cache.layers[0].get_mask_sizes(1)
    with pytest.raises((ValueError, IndexError)):
        forward(model, tokens(2, 1), cache)
    assert all(map(torch.equal, state(cache), before))
    rotary = tiny_model("llama", max_position_embeddings=12)
    forward(rotary, tokens(2, 14), H2OCache(rotary.config, POLICY))


def test_padding_takes_no_position() -> None:
    model = tiny_model("opt", max_position_embeddings=12)
    cache = H2OCache(model.config, POLICY)
    ids, mask = left_padded([tokens(1, 6)[0], tokens(1, 3)[0]])
    ids, mask = torch.nn.functional.pad(ids, (4, 0)), torch.nn.functional.pad(mask, (4, 0))
    forward(model, ids, cache, mask)
    for _ in range(6):
        mask = torch.nn.functional.pad(mask, (0, 1), value=1)
        forward(model, tokens(2, 1), cache, mask)
    assert cache.get_seq_length() == 16
    assert cache.layers[0].tokens_seen.tolist() == [12, 9]
    with pytest.raises(ValueError, match="got 1 new tokens after 12"):
        cache.layers[0].get_mask_sizes(1)


def test_the_example_in_the_documentation_runs() -> None:
    result = doctest.testmod(h2o_kv.hf.cache)
    assert result.failed == 0
    assert result.attempted >= 10


# ---- Versions.


@pytest.mark.parametrize("version", ["4.57.0", "4.57.6", "5.0.0", "5.24.0", "5.25.0.dev0"])
def test_supported_transformers_are_taken(version: str) -> None:
    check_transformers(version)


@pytest.mark.parametrize("version", ["4.56.2", "3.5.1", "6.0.0", "6.0.0.dev0", "7.1"])
def test_other_transformers_are_refused(version: str) -> None:
    needed = f"needs transformers>={TRANSFORMERS_MIN},<{TRANSFORMERS_BELOW}, got transformers"
    with pytest.raises(ImportError, match=f"{needed} {version}"):
        check_transformers(version)


def test_the_version_is_checked_at_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "4.40.0")
    with pytest.raises(ImportError, match=r"got transformers 4.40.0; install one with: pip"):
        importlib.reload(h2o_kv.hf)


def test_nothing_of_this_package_stands_in_transformers() -> None:
    """No function or class of ours was put into a module or a class of transformers."""
    model = tiny_model("llama")
    forward(model, tokens(1, 5), H2OCache(model.config, POLICY))
    owners = [
        module for name, module in sys.modules.items() if name.split(".")[0] == "transformers"
    ]
    owners += [
        value
        for module in owners
        for value in vars(module).values()
        if isinstance(value, type) and value.__module__.startswith("transformers")
    ]
    members = [
        (owner, name, value) for owner in owners for name, value in list(vars(owner).items())
    ]
    assert len(members) > 10_000
    package = str(Path(h2o_kv.hf.__file__).parents[1])
    for owner, name, value in members:
        if isinstance(value, staticmethod | classmethod):
            value = value.__func__
        elif isinstance(value, property):
            value = value.fget
        if isinstance(value, FunctionType):
            assert not value.__code__.co_filename.startswith(package), (owner, name)
        elif isinstance(value, type):
            assert not str(vars(value).get("__module__")).startswith("h2o_kv"), (owner, name)
