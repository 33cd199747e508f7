"""BLOOM and MPT under an H2OCache: what enabling them changes, their slopes, and what is refused.

That they are right wherever other models are is in the tests of hf_models.FAMILIES and KINDS.
"""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, FalconConfig, FalconForCausalLM

from h2o_kv import EvictionPolicy, H2OCache
from h2o_kv.hf import cache_kwarg, disable_alibi, enable_alibi
from hf_models import (
    ALIBI_FAMILIES,
    check_against_reference,
    forward,
    generate,
    kept,
    left_padded,
    recorded,
    tiny_config,
    tiny_model,
    tokens,
)

AMPLE = EvictionPolicy(num_heavy=40, num_recent=40)
SMALL = EvictionPolicy(num_heavy=4, num_recent=3, num_sink=1)
SMALL_BUDGET = (1, 4, 3)


def attention_modules(model: Any) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "layer_idx")]


def check_equal_to_full_cache(family: str, **overrides: Any) -> None:
    """Logits of a prompt, a padded row in it, and steps."""
    # In float64 their own attention makes NaN of a padded row.
    model = tiny_model(family, **overrides)
    ids, mask = left_padded([tokens(1, 12)[0], tokens(1, 7, seed=1)[0]])
    ids = torch.cat([ids, tokens(2, 4, seed=2)], 1)
    mask = torch.cat([mask, torch.ones(2, 4, dtype=torch.long)], 1)
    cache = H2OCache(model.config, AMPLE)
    got = [forward(model, ids[:, :12], cache, mask[:, :12])]
    got += [forward(model, ids[:, i : i + 1], cache, mask[:, : i + 1]) for i in range(12, 16)]
    disable_alibi(model)
    want = forward(model, ids, DynamicCache(), mask)
    real = mask == 1
    torch.testing.assert_close(torch.cat(got, 1)[real], want[real], atol=1e-4, rtol=1e-4)


# ---- Without the call nothing is silently wrong.


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("family", ALIBI_FAMILIES)
def test_a_model_that_was_not_enabled_is_told_what_to_call(family: str, layers: int) -> None:
    for loaded_as_h2o in (False, True):
        model = tiny_model(family, attention="eager", num_hidden_layers=layers)
        if loaded_as_h2o:
            config = tiny_config(family, num_hidden_layers=layers)
            model = AutoModelForCausalLM.from_config(config, attn_implementation="h2o").eval()
        cache = H2OCache(model.config, SMALL)
        with pytest.raises(RuntimeError, match=r"call h2o_kv\.hf\.enable_alibi\(model\)"):
            forward(model, tokens(1, 5), cache)
            for _ in range(2):  # One layer: no other notices, and once may be an interrupt.
                forward(model, tokens(1, 1), cache)
        cache.reset()
        enable_alibi(model)
        forward(model, tokens(1, 5), cache)
        assert cache.get_seq_length() == 5


@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("family", ALIBI_FAMILIES)
def test_under_h2o_any_other_cache_gives_the_model_s_own_attention(
    family: str, enabled: bool
) -> None:
    plain = tiny_model(family, attention="eager")
    model = AutoModelForCausalLM.from_config(tiny_config(family), attn_implementation="h2o").eval()
    model.load_state_dict(plain.state_dict())
    assert model.config._attn_implementation == "h2o"
    if enabled:
        enable_alibi(model)
    ids, mask = left_padded([tokens(1, 9)[0], tokens(1, 5, seed=1)[0]])
    for cache_class in (DynamicCache, lambda: None):
        got = forward(model, ids, cache_class(), mask)
        assert torch.equal(got, forward(plain, ids, cache_class(), mask))
        got = forward(model, ids, cache_class())
        assert torch.equal(got, forward(plain, ids, cache_class()))
    got = generate(model, ids, DynamicCache(), new=6, mask=mask, use_cache=True)
    assert torch.equal(got, generate(plain, ids, DynamicCache(), new=6, mask=mask, use_cache=True))


@pytest.mark.parametrize("alibi", [False, True])
def test_falcon_is_refused(alibi: bool) -> None:
    config = FalconConfig(
        vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=alibi
    )
    model = FalconForCausalLM(config).eval()
    model.set_attn_implementation("h2o")  # transformers warns that it does not.
    with pytest.raises(RuntimeError, match='attn_implementation must be "h2o", got "sdpa"'):
        forward(model, tokens(1, 5), H2OCache(model.config, SMALL))
    with pytest.raises(
        TypeError, match="model must be or contain one of bloom, mpt, got FalconForCausalLM"
    ):
        enable_alibi(model)


@pytest.mark.parametrize("model", [None, torch.nn.Linear(2, 2)])
def test_what_is_no_such_model_is_named(model: Any) -> None:
    with pytest.raises(TypeError, match=f"one of bloom, mpt, got {type(model).__name__}"):
        enable_alibi(model)


# ---- What enabling changes.


@pytest.mark.parametrize("family", ALIBI_FAMILIES)
def test_enabling_changes_one_model_and_can_be_undone(family: str) -> None:
    model, other = (tiny_model(family, attention="eager", use_cache=False) for _ in range(2))
    classes = [type(module) for module in model.modules()]
    ids = tokens(1, 9)
    before = forward(model, ids, DynamicCache())
    for _ in range(2):  # The second time changes nothing.
        enable_alibi(model)
        for module, parent in zip(model.modules(), classes, strict=True):
            is_attention = hasattr(module, "layer_idx")
            assert (type(module) is parent) != is_attention
            assert isinstance(module, parent)
        assert model.config._attn_implementation == "h2o"
        assert model.generation_config.use_cache is True
        assert torch.equal(forward(model, ids, DynamicCache()), before)
        assert torch.equal(forward(model, ids, None), before)
    assert [type(module) for module in other.modules()] == classes
    assert other.config._attn_implementation == "eager"
    assert model.state_dict().keys() == other.state_dict().keys()
    for _ in range(2):
        disable_alibi(model)
        assert [type(module) for module in model.modules()] == classes
        assert model.config._attn_implementation == "eager"
        assert model.generation_config.use_cache is False
        assert [sorted(vars(m)) for m in model.modules()] == [
            sorted(vars(m)) for m in other.modules()
        ]
    assert torch.equal(forward(model, ids, DynamicCache()), before)


@pytest.mark.parametrize("family", ALIBI_FAMILIES)
def test_an_enabled_model_is_copied_pickled_and_saved(family: str, tmp_path: Path) -> None:
    model, ids = tiny_model(family), tokens(1, 12)
    want = generate(model, ids, H2OCache(model.config, SMALL), new=6)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(attention_modules(loaded)[0]) is not type(attention_modules(model)[0])
    enable_alibi(loaded)
    for again in (copy.deepcopy(model), torch.load(file, weights_only=False), loaded):
        assert again.config is not model.config
        assert type(attention_modules(again)[0]) is type(attention_modules(model)[0])
        assert torch.equal(generate(again, ids, H2OCache(again.config, SMALL), new=6), want)
        disable_alibi(again)
        assert again.config._attn_implementation == "eager"
    assert model.config._attn_implementation == "h2o"


def test_a_backbone_and_a_module_around_the_model_are_enabled_too() -> None:
    model = tiny_model("bloom", attention="eager")
    for part in (model.transformer, torch.nn.ModuleList([model])):
        enable_alibi(part)
        cache = H2OCache(model.config, SMALL)
        forward(model, tokens(1, 5), cache)
        assert cache.get_seq_length() == 5
        disable_alibi(part)
    assert model.config._attn_implementation == "eager"


def test_a_forward_that_was_replaced_is_refused() -> None:
    model = tiny_model("bloom", attention="eager")
    module = attention_modules(model)[1]
    module.forward = module.forward
    with pytest.raises(NotImplementedError, match="forward of an attention module must be that of"):
        enable_alibi(model)
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("family", ALIBI_FAMILIES)
def test_a_model_with_another_dtype_keeps_float32_slopes(family: str) -> None:
    model = tiny_model(family).to(torch.bfloat16)
    cache = H2OCache(model.config, SMALL)
    with recorded() as recording:
        generate(model, tokens(2, 12), cache, new=5)
    slopes = {call.alibi_slopes.dtype for call in recording.calls[1]}
    assert slopes == {torch.float32}
    assert check_against_reference(recording, cache, [SMALL_BUDGET] * 2, tolerance=0.05) > 0


# ---- The slopes.


def bias_of(model: Any, length: int) -> Tensor:
    """The model's own ALiBi bias, [num_heads, length], as it adds it to the logits."""
    backbone = model.transformer
    if model.config.model_type == "bloom":
        mask = torch.ones(1, length, dtype=torch.long)
        return backbone.build_alibi_tensor(mask, backbone.num_heads, torch.float32)[:, 0]
    return backbone.build_mpt_alibi_tensor(backbone.num_heads, length)[:, 0]


@pytest.mark.parametrize("heads", [1, 2, 4, 6, 8, 12, 16, 20])
@pytest.mark.parametrize("family", ALIBI_FAMILIES)
def test_slopes_are_the_model_s_own(family: str, heads: int) -> None:
    model = tiny_model(family, num_attention_heads=heads, hidden_size=4 * heads)
    slopes = attention_modules(model)[0].h2o_alibi_slopes
    assert (slopes.dtype, slopes.shape) == (torch.float32, (heads,))
    bias = bias_of(model, 9)
    torch.testing.assert_close(bias - bias[:, :1], slopes[:, None] * torch.arange(9.0))
    assert slopes.min() > 0


def test_the_two_models_differ_where_heads_are_no_power_of_two() -> None:
    slopes = {}
    for heads in (8, 12):
        bloom, mpt = (
            attention_modules(tiny_model(family, num_attention_heads=heads, hidden_size=4 * heads))[
                0
            ]
            for family in ALIBI_FAMILIES
        )
        slopes[heads] = torch.equal(bloom.h2o_alibi_slopes, mpt.h2o_alibi_slopes)
    assert slopes == {8: True, 12: False}


@pytest.mark.parametrize("heads", [4, 6, 12])
@pytest.mark.parametrize("family", ALIBI_FAMILIES)
def test_any_number_of_heads_equals_the_full_cache(family: str, heads: int) -> None:
    check_equal_to_full_cache(family, num_attention_heads=heads, hidden_size=4 * heads)


def test_bloom_s_other_residual_equals_the_full_cache() -> None:
    check_equal_to_full_cache("bloom", apply_residual_connection_post_layernorm=True)


@pytest.mark.parametrize(
    "attn_config", [{"clip_qkv": 0.3}, {"softmax_scale": 0.9}, {"alibi_bias_max": 4}]
)
def test_mpt_s_attention_config_equals_the_full_cache(attn_config: dict[str, Any]) -> None:
    """alibi_bias_max included, which transformers does not look at."""
    check_equal_to_full_cache("mpt", attn_config=attn_config)


def test_mpt_without_alibi_is_refused() -> None:
    model = tiny_model("mpt", attention="eager", attn_config={"alibi": False})
    with pytest.raises(ValueError, match=r"attn_config\.alibi of MPT must be True, got False"):
        enable_alibi(model)
    assert model.config._attn_implementation == "eager"


def test_bloom_s_slow_but_exact_is_refused() -> None:
    model = tiny_model("bloom", attention="eager", slow_but_exact=True, pretraining_tp=2)
    with pytest.raises(
        NotImplementedError, match="slow_but_exact of BLOOM must be False, got True"
    ):
        enable_alibi(model)
    check_equal_to_full_cache("bloom", pretraining_tp=2)


def test_dropout_and_weights_are_refused() -> None:
    dropout = {"bloom": {"attention_dropout": 0.1}, "mpt": {"attn_config": {"attn_pdrop": 1}}}
    for family in ALIBI_FAMILIES:
        model = tiny_model(family, **dropout[family])
        forward(model, tokens(1, 5), H2OCache(model.config, SMALL))
        with pytest.raises(RuntimeError, match="attention dropout must be 0, got"):
            forward(model.train(), tokens(1, 5), H2OCache(model.config, SMALL))
    model = tiny_model("bloom")
    with pytest.raises(NotImplementedError, match="got output_attentions=True"):
        forward(model, tokens(1, 5), H2OCache(model.config, SMALL), output_attentions=True)


def test_a_cache_of_another_model_is_refused() -> None:
    model, larger = tiny_model("bloom"), tiny_model("bloom", hidden_size=64)
    with pytest.raises(ValueError, match="the model must be the one of the cache's config"):
        forward(model, tokens(1, 5), H2OCache(larger.config, SMALL))


# ---- Long texts.


def test_mpt_goes_on_past_max_seq_len() -> None:
    """Its full cache ends there; the bias comes from positions, which do not."""
    short, long = (tiny_model("mpt", max_seq_len=length) for length in (16, 64))
    ids = tokens(1, 12)
    want = generate(long, ids, H2OCache(long.config, SMALL), new=20)
    assert torch.equal(generate(short, ids, H2OCache(short.config, SMALL), new=20), want)
    ids = tokens(1, 20)  # A prompt that is longer, too.
    torch.testing.assert_close(
        forward(short, ids, H2OCache(short.config, AMPLE)),
        forward(long, ids, None),
        atol=1e-4,
        rtol=0,
    )
    with pytest.raises(RuntimeError, match="must match the size"):
        forward(short, ids, None)


@pytest.mark.parametrize("prefill", ["one_shot", "streaming"])
@pytest.mark.parametrize("family", ALIBI_FAMILIES)
def test_the_bias_comes_from_original_positions_after_eviction(family: str, prefill: str) -> None:
    """Padding, chunks and turns, by the reference; a bias by slots would fail here."""
    model = tiny_model(family, dtype=torch.float64)
    ids, mask = left_padded([tokens(1, 20)[0], tokens(1, 8, seed=1)[0]])
    cache = H2OCache(model.config, SMALL, prefill=prefill, prefill_chunk=4)
    with recorded() as recording:
        answer = generate(model, ids, cache, new=6, mask=mask, prefill_chunk_size=7)
        ids = torch.cat([ids, answer, tokens(2, 5, seed=2)], 1)
        generate(model, ids, cache, new=6, mask=torch.cat([mask, torch.ones(2, 11)], 1).long())
    assert check_against_reference(recording, cache, [SMALL_BUDGET] * 2, mask) > 0
    slopes = recording.calls[0][0].alibi_slopes
    for calls in recording.calls.values():
        for call in calls:
            call.alibi_slopes = slopes * 1.01
    with pytest.raises(AssertionError):
        check_against_reference(recording, cache, [SMALL_BUDGET] * 2, mask)


@pytest.mark.parametrize("family", ALIBI_FAMILIES)
def test_a_fork_that_has_had_no_forward_takes_back(family: str) -> None:
    """The steps that stay go through the operator again, with the slopes."""
    model, ids = tiny_model(family, dtype=torch.float64), tokens(1, 20)
    cache = H2OCache(model.config, SMALL, prompt_length=12, max_rollback=6)
    forward(model, ids[:, :12], cache)
    forward(model, ids[:, 12:18], cache)
    fork = cache.fork(1)
    plain = H2OCache(model.config, SMALL)
    forward(model, ids[:, :12], plain)
    for i in range(12, 15):
        forward(model, ids[:, i : i + 1], plain)
    for one in (cache, fork):
        one.crop(-3)
        assert kept(one, 0) == kept(plain, 0)
        for mine, want in zip(one.layers, plain.layers, strict=True):
            torch.testing.assert_close(mine.scores.sort().values, want.scores.sort().values)


def test_the_example_in_the_documentation_runs() -> None:
    text = (Path(__file__).parents[2] / "docs/huggingface.md").read_text(encoding="utf-8")
    example = text.partition("## ALiBi")[2].partition("```python\n")[2].partition("```")[0]
    model = tiny_model("mpt", attention="eager", use_cache=False)
    inputs = {"input_ids": tokens(1, 12), "attention_mask": torch.ones(1, 12, dtype=torch.long)}
    names: dict[str, Any] = {
        "model": model,
        "policy": SMALL,
        "inputs": inputs,
        "H2OCache": H2OCache,
        "cache_kwarg": cache_kwarg,
    }
    exec(example, names)
    assert names["cache"].get_seq_length() == names["output"].shape[1] - 1 > 12
