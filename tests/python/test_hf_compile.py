"""torch.compile through `generate`: the decode step is one graph, whatever the cache goes through."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CompileConfig

from h2o_kv import EvictionPolicy, H2OCache
from h2o_kv.hf.cache import _builds_whole_masks
from hf_models import forward, generate, left_padded, tiny_config, tiny_model, tokens
from test_hf_cache import STATE, Calls

SMALL = EvictionPolicy(num_heavy=4, num_recent=3, num_sink=1)
FAMILIES = ("llama", "opt", "gpt_neox")
WHOLE_MASKS = _builds_whole_masks(tiny_config("opt"))
GRAPHS: list[Any] = []


def counting(graph: Any, inputs: Any) -> Any:
    """A backend that notes what it compiles; a function, for generate copies its configs deeply."""
    GRAPHS.append(graph)
    return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    GRAPHS.clear()
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(**options: Any) -> CompileConfig:
    config = CompileConfig(**{"fullgraph": True, "backend": counting, "mode": None, **options})
    config._compile_all_devices = True  # By itself transformers does it on a GPU.
    return config


def supported(family: str) -> Any:
    marks = [pytest.mark.skip("OPT of this release")] if family == "opt" and WHOLE_MASKS else []
    return pytest.param(family, marks=marks)


def assert_same(cache: H2OCache, other: H2OCache) -> None:
    assert cache.get_seq_length() == other.get_seq_length()
    for layer, plain in zip(cache.layers, other.layers, strict=True):
        for name in STATE:
            assert torch.equal(getattr(layer, name), getattr(plain, name)), name


@pytest.mark.parametrize("how", ["greedy", "padded", "sampling", "ratios"])
@pytest.mark.parametrize("family", [supported(family) for family in FAMILIES])
def test_generate_compiles_one_graph_from_filling_to_full(family: str, how: str) -> None:
    model, ids, mask = tiny_model(family), tokens(2, 5), None
    policy = EvictionPolicy(heavy_ratio=0.5, recent_ratio=0.4) if how == "ratios" else SMALL
    if how in ("padded", "ratios"):
        ids, mask = left_padded([tokens(1, 5)[0], tokens(1, 3, seed=1)[0]])
    options: dict[str, Any] = dict(do_sample=True, top_k=20) if how == "sampling" else {}
    texts, caches = [], []
    for config in (None, compiled()):
        cache = H2OCache(model.config, policy, compileable=config is not None)
        torch.manual_seed(3)
        with torch._dynamo.config.patch(error_on_recompile=True):
            texts.append(
                generate(model, ids, cache, new=14, mask=mask, compile_config=config, **options)
            )
        caches.append(cache)
    assert torch.equal(*texts)
    assert len({tuple(row.tolist()) for row in texts[0]}) == 2
    assert_same(*reversed(caches))
    assert len(GRAPHS) == 1


def test_other_caches_turns_and_rows_take_the_same_graph() -> None:
    model = tiny_model("llama")

    def run(cache: H2OCache, ids: Tensor, **options: Any) -> None:
        plain = H2OCache(model.config, SMALL)
        want = generate(model, ids, plain, new=8, **options)
        got = generate(model, ids, cache, new=8, compile_config=compiled(), **options)
        assert torch.equal(got, want)
        assert_same(cache, plain)

    cache = H2OCache(model.config, SMALL, compileable=True)
    run(cache, tokens(2, 5))
    addresses = [getattr(layer, name).data_ptr() for layer in cache.layers for name in STATE]
    with torch._dynamo.config.patch(error_on_recompile=True):
        cache.reset()
        run(cache, tokens(2, 7))
        generate(model, tokens(2, 20), cache, new=4, compile_config=compiled())  # A second turn.
        assert cache.get_seq_length() == 23
        now = [getattr(layer, name).data_ptr() for layer in cache.layers for name in STATE]
        assert now == addresses
        run(H2OCache(model.config, SMALL, compileable=True), tokens(2, 12))
        run(H2OCache(model.config, SMALL, compileable=True), tokens(1, 6), num_beams=2)
    assert len(GRAPHS) == 1


def test_the_default_backend_gives_the_same_tokens() -> None:
    model, ids = tiny_model("llama"), tokens(2, 5)
    plain, cache = H2OCache(model.config, SMALL), H2OCache(model.config, SMALL, compileable=True)
    want = generate(model, ids, plain, new=10)
    config = compiled(backend="inductor", mode="default")
    assert torch.equal(generate(model, ids, cache, new=10, compile_config=config), want)
    for layer, other in zip(cache.layers, plain.layers, strict=True):
        assert torch.equal(layer.positions, other.positions)
        torch.testing.assert_close(layer.scores, other.scores)


def test_a_compiled_step_follows_a_forward_that_stopped() -> None:
    model, ids = tiny_model("llama"), tokens(2, 5)
    want = generate(model, ids, H2OCache(model.config, SMALL), new=14)
    cache = H2OCache(model.config, SMALL, compileable=True)
    generate(model, ids, cache, new=6, compile_config=compiled())

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    hook = model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(torch.OutOfMemoryError):
        forward(model, want[:, 5:6], cache)
    hook.remove()
    assert 0 in cache._progress.undo
    text = torch.cat([ids, want[:, :6]], 1)
    got = generate(model, text, cache, new=8, compile_config=compiled())
    assert torch.equal(got, want[:, 6:])
    assert len(GRAPHS) == 1


def test_generate_compiles_only_what_it_may(tmp_path: Path) -> None:
    model, ids = tiny_model("llama"), tokens(2, 5)
    want = generate(model, ids, H2OCache(model.config, SMALL), new=8)
    off = H2OCache(model.config, SMALL)
    recording = H2OCache(model.config, SMALL, prompt_length=5, max_rollback=3, compileable=True)
    for cache in (off, recording):
        assert not cache.is_compileable
        assert torch.equal(generate(model, ids, cache, new=8, compile_config=compiled()), want)
    assert GRAPHS == []
    recording.deactivate_past_recording()
    assert recording.is_compileable
    assert recording.fork(2).compileable
    recording.save(tmp_path / "a")
    loaded = H2OCache.load(tmp_path / "a", model.config)
    assert not loaded.compileable
    loaded.deactivate_past_recording()
    loaded.compileable = True
    assert loaded.is_compileable
    assert all(layer.is_compileable for layer in loaded.layers)


def test_compileable_is_a_bool_and_not_for_every_opt() -> None:
    with pytest.raises(TypeError, match="^H2OCache: compileable must be a bool, got 1$"):
        H2OCache(tiny_config("llama"), SMALL, compileable=1)  # type: ignore[arg-type]
    if WHOLE_MASKS:
        match = "^H2OCache: compileable must be False for OPT with transformers .*, got True$"
        with pytest.raises(ValueError, match=match):
            H2OCache(tiny_config("opt"), SMALL, compileable=True)


def test_a_prompt_in_chunks_compiles_in_memory_that_is_there() -> None:
    model, ids = tiny_model("llama"), tokens(2, 15)
    plain, cache = H2OCache(model.config, SMALL), H2OCache(model.config, SMALL, compileable=True)
    want = generate(model, ids, plain, new=8, prefill_chunk_size=4)
    options: dict[str, Any] = dict(new=8, prefill_chunk_size=4, compile_config=compiled())
    num_heads = plain.layers[0].k_cache.shape[1]
    cache.early_initialization(2, num_heads, 8, torch.float32, torch.device("cpu"))
    assert torch.equal(generate(model, ids, cache, **options), want)
    assert_same(cache, plain)
    if not GRAPHS:
        pytest.skip("this release compiles no prefill")
    assert len(GRAPHS) == 4  # First chunk, later chunks, the last one, steps.
    with pytest.raises(Exception, match="first forward that is compiled must find its memory"):
        generate(model, ids, H2OCache(model.config, SMALL, compileable=True), **options)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("padded", [False, True])
def test_a_decode_step_of_a_model_has_static_addresses_and_asks_nothing(
    family: str, padded: bool
) -> None:
    """What a CUDA graph needs: the same memory at every step, and never a value on the host."""
    model = tiny_model(family)
    cache = H2OCache(model.config, SMALL)
    forward(model, tokens(2, 5), cache)

    def step(i: int) -> list[str]:
        options: dict[str, Any] = {"position_ids": torch.full((2, 1), 5 + i)}
        if padded and not WHOLE_MASKS:
            options["mask"] = torch.ones(2, 1, 1, 1, dtype=torch.bool)
        with Calls() as calls:
            forward(model, tokens(2, 1, seed=i), cache, **options)
        return calls.names

    step(0)
    addresses = set()
    for i in range(1, 8):  # From filling to full.
        names = step(i)
        for asks in ("_local_scalar_dense", "nonzero", "is_nonzero", "aten.equal"):
            assert not [name for name in names if asks in name]
        held = [getattr(layer, name) for layer in cache.layers for name in STATE]
        for layer in cache.layers:
            room = layer.step_room
            held += [*room.before, room.k_evicted, room.v_evicted]
        addresses.add(tuple(tensor.data_ptr() for tensor in held))
    assert len(addresses) == 1
    assert cache.tokens_kept()[0].eq(8).all()
