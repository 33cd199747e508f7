"""The attention and the mask function "h2o": plain without an H2OCache, refusals with one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    DynamicCache,
)
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from h2o_kv import EvictionPolicy, H2OCache
from h2o_kv.hf import cache_kwarg
from h2o_kv.hf.attention import h2o_attention_forward, h2o_mask, register
from hf_models import (
    ALIBI_FAMILIES,
    FAMILIES,
    forward,
    generate,
    left_padded,
    set_attention,
    tiny_config,
    tiny_model,
    tokens,
)

POLICY = EvictionPolicy(num_heavy=4, num_recent=4)


def padded_batch() -> tuple[Tensor, Tensor]:
    """Two rows of six columns, the first with three columns of padding on the left."""
    return left_padded([tokens(1, 3)[0], tokens(1, 6, seed=1)[0]])


# ---- Any other cache, or none.


@pytest.mark.parametrize("cache_class", [None, DynamicCache, H2OCache])
@pytest.mark.parametrize("family", FAMILIES)
def test_left_padding_equals_eager(family: str, cache_class: Any) -> None:
    model = tiny_model(family)
    ids, mask = padded_batch()
    position_ids = (mask.cumsum(1) - 1).clamp(min=0)
    cache = H2OCache(model.config, POLICY) if cache_class is H2OCache else None
    cache = DynamicCache() if cache_class is DynamicCache else cache
    got = forward(model, ids, cache, mask, position_ids=position_ids)
    set_attention(model, "eager")
    want = forward(model, ids, None, mask, position_ids=position_ids)
    torch.testing.assert_close(got[mask == 1], want[mask == 1], atol=1e-4, rtol=1e-4)
    # The test can fail: without the padding mask row 0 is another one.
    unmasked = forward(model, ids, None, position_ids=position_ids)
    assert (unmasked[0, -1] - want[0, -1]).abs().max() > 0.1


@pytest.mark.parametrize("cache_class", [None, DynamicCache, H2OCache])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_without_padding_is_causal(family: str, cache_class: Any) -> None:
    model, ids = tiny_model(family), tokens(2, 6)
    cache = H2OCache(model.config, POLICY) if cache_class is H2OCache else None
    cache = DynamicCache() if cache_class is DynamicCache else cache
    got = forward(model, ids, cache, torch.ones_like(ids))
    changed = ids.clone()
    changed[:, -1] = 3 + (ids[:, -1] - 2) % 90
    cache = H2OCache(model.config, POLICY) if cache_class is H2OCache else None
    other = forward(model, changed, cache, torch.ones_like(ids))
    torch.testing.assert_close(got[:, :-1], other[:, :-1], atol=1e-5, rtol=1e-5)
    assert (got[:, -1] - other[:, -1]).abs().max() > 0.1


@pytest.mark.parametrize("family", FAMILIES)
def test_generate_with_another_cache_equals_sdpa(family: str) -> None:
    model = tiny_model(family)
    ids, mask = padded_batch()
    got = generate(model, ids, DynamicCache(), new=8, mask=mask)
    set_attention(model, "sdpa")
    assert torch.equal(got, generate(model, ids, DynamicCache(), new=8, mask=mask))


def test_several_tokens_on_a_dynamic_cache_equal_sdpa() -> None:
    ids, mask = padded_batch()
    results = []
    for attention in ("h2o", "sdpa"):
        model, cache = tiny_model("llama", attention=attention), DynamicCache()
        forward(model, ids[:, :4], cache, mask[:, :4])
        results.append(forward(model, ids[:, 4:], cache, mask))
    torch.testing.assert_close(results[0], results[1], atol=1e-5, rtol=1e-5)


def test_a_sliding_window_without_an_h2o_cache_equals_sdpa() -> None:
    ids, mask = tokens(2, 12), torch.ones(2, 12, dtype=torch.long)
    mask[0, :2] = 0
    results = []
    for attention, window in (("h2o", 4), ("sdpa", 4), ("sdpa", None)):
        model = tiny_model("mistral", attention=attention, sliding_window=window)
        results.append(forward(model, ids, None, mask)[mask == 1])
    torch.testing.assert_close(results[0], results[1], atol=1e-5, rtol=1e-5)
    assert (results[0] - results[2]).abs().max() > 0.1


def test_training_without_a_cache_has_gradients() -> None:
    model, ids = tiny_model("llama").train(), tokens(2, 6)
    model(ids, labels=ids, use_cache=False).loss.backward()
    assert model.model.layers[0].self_attn.q_proj.weight.grad.abs().max() > 0


def test_registering_again_changes_nothing() -> None:
    register()
    assert ALL_ATTENTION_FUNCTIONS["h2o"] is h2o_attention_forward
    assert ALL_MASK_ATTENTION_FUNCTIONS["h2o"] is h2o_mask
    assert AttentionInterface().get("h2o") is h2o_attention_forward
    assert AttentionMaskInterface().get("h2o") is h2o_mask


@pytest.mark.parametrize("family", FAMILIES)
def test_cache_kwarg_names_the_argument_of_forward(family: str) -> None:
    model = tiny_model(family)
    output = model(tokens(1, 4), use_cache=True)
    assert hasattr(output, cache_kwarg(model))


# ---- The mask function.


def mask_of(attention_mask: Tensor | None, num_new: int, offset: int = 0, **kwargs: Any) -> Any:
    return h2o_mask(
        2, num_new, q_length=num_new, kv_offset=offset, attention_mask=attention_mask, **kwargs
    )


def test_mask_is_the_padding_of_the_new_columns_alone() -> None:
    real = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 0]], dtype=torch.bool)
    assert torch.equal(mask_of(real, 5), real[:, None, None])
    assert torch.equal(mask_of(real, 2, offset=3), real[:, None, None, 3:])
    assert torch.equal(mask_of(real[:, 3:], 2, offset=3), real[:, None, None, 3:])
    assert mask_of(real, 1, offset=4).is_contiguous()


def test_no_mask_where_every_new_token_is_real() -> None:
    real = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]], dtype=torch.bool)
    assert mask_of(None, 4) is None
    assert mask_of(real, 2, offset=2) is None
    assert mask_of(real, 2, offset=2, allow_is_causal_skip=False).tolist() == [[[[True] * 2]]] * 2


def test_mask_of_another_width_is_refused() -> None:
    with pytest.raises(ValueError, match=r"attention_mask must have one column .* = 7, got 5"):
        mask_of(torch.ones(2, 5, dtype=torch.bool), 2, offset=5)
    with pytest.raises(TypeError, match="q_length or cache_position must be given, got neither"):
        h2o_mask(2, 5)


# ---- Wrong pairing.


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_another_attention_with_an_h2o_cache_raises(family: str, attention: str) -> None:
    model = tiny_model(family, attention=attention)
    cache = H2OCache(model.config, POLICY)
    own = family in ALIBI_FAMILIES  # And the implementation cannot be set.
    match = f'attn_implementation must be "h2o", got "{"eager" if own else attention}"; call ' + (
        r"h2o_kv\.hf\.enable_alibi\(model\)" if own else r"model\.set_attn_implementation\("
    )
    with pytest.raises(RuntimeError, match=match):
        forward(model, tokens(1, 5), cache)
    with pytest.raises(RuntimeError, match=match):
        cache.update(torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, 1, 8), 0)
    set_attention(model, "h2o")
    forward(model, tokens(1, 5), cache)
    assert cache.get_seq_length() == 5


def test_an_attention_that_ignores_the_cache_raises_at_the_next_layer() -> None:
    # The config of the cache says "h2o"; the model's does not.
    model = tiny_model("llama", attention="sdpa")
    other = tiny_model("llama")
    cache = H2OCache(other.config, POLICY)
    with pytest.raises(RuntimeError, match="the attention of layer 0 did not use its cache"):
        forward(model, tokens(1, 5), cache)
    cache.reset()
    forward(other, tokens(1, 5), cache)


def test_a_model_with_other_layers_raises() -> None:
    model = tiny_model("llama")
    short = H2OCache(tiny_config("llama", num_hidden_layers=1, attn_implementation="h2o"), POLICY)
    with pytest.raises(ValueError, match="the model must be the one of the cache's config"):
        forward(model, tokens(1, 5), short)
    short.reset()
    keys = torch.zeros(1, 2, 5, 8)
    with pytest.raises(ValueError, match=r"layer_idx must be < num_hidden_layers = 1 .* got 1"):
        short.update(keys, keys, 1)


def test_a_model_of_another_kind_raises() -> None:
    cache = H2OCache(tiny_config("opt", attn_implementation="h2o"), POLICY)
    with pytest.raises(ValueError, match=r"'model_type': 'opt'.* got .*'model_type': 'llama'"):
        forward(tiny_model("llama"), tokens(1, 5), cache)


def test_an_equal_config_object_is_as_good() -> None:
    model = tiny_model("llama")
    config = tiny_config("llama", attn_implementation="h2o")
    cache = H2OCache(config, POLICY)
    forward(model, tokens(1, 9), cache)
    assert cache.get_seq_length() == 9


# ---- What the operator does not do.


def call(layer: Any, module: Any = None, **kwargs: Any) -> Any:
    query, key = torch.zeros(1, 4, 5, 8), torch.zeros(1, 2, 5, 8)
    key, value = layer.update(key, torch.zeros(1, 2, 5, 8))
    module = torch.nn.Module() if module is None else module
    return h2o_attention_forward(module, query, key, value, kwargs.pop("mask", None), **kwargs)


@pytest.fixture
def layer() -> Any:
    return H2OCache(tiny_config("llama", attn_implementation="h2o"), POLICY).layers[0]


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"softcap": 30.0}, "does not support softcap, got 30.0"),
        ({"s_aux": torch.zeros(4)}, r"does not support s_aux, got a tensor of shape \[4\]"),
        ({"head_mask": torch.ones(4)}, "does not support head_mask"),
        ({"position_bias": torch.ones(4)}, "does not support position_bias"),
        ({"output_attentions": True}, "never built, got output_attentions=True"),
        ({"is_causal": False}, "must be causal, got is_causal=False"),
        ({"sliding_window": 4}, "got sliding_window=4 and 5 tokens"),
        ({"cu_seq_lens_q": torch.tensor([0, 5])}, "packed sequences are not supported"),
        ({"novelty": torch.ones(3)}, r"tensor argument novelty .* shape \[3\]"),
    ],
)
def test_arguments_that_change_the_result_are_refused(
    layer: Any, kwargs: dict[str, Any], match: str
) -> None:
    with pytest.raises(NotImplementedError, match=match):
        call(layer, **kwargs)
    assert layer.columns_seen == 0
    assert layer.keys is None


def test_arguments_that_change_nothing_are_taken(layer: Any) -> None:
    output, weights = call(
        layer,
        softcap=None,
        sliding_window=5,
        position_ids=torch.arange(5)[None],
        output_attentions=False,
        use_cache=True,
    )
    assert output.shape == (1, 5, 4, 8)
    assert output.is_contiguous()
    assert weights is None


def test_without_a_cache_what_sdpa_would_ignore_is_refused() -> None:
    tensors = torch.zeros(1, 4, 5, 8), torch.zeros(1, 4, 5, 8), torch.zeros(1, 4, 5, 8)
    with pytest.raises(NotImplementedError, match="does not support s_aux"):
        h2o_attention_forward(torch.nn.Module(), *tensors, None, s_aux=torch.zeros(4))


def test_a_module_that_is_not_causal_is_refused(layer: Any) -> None:
    module = torch.nn.Module()
    module.is_causal = False  # type: ignore[assignment]
    with pytest.raises(NotImplementedError, match="must be causal"):
        call(layer, module)


def test_a_forward_outside_no_grad_works_and_its_backward_raises() -> None:
    model = tiny_model("llama")
    cache = H2OCache(model.config, POLICY)
    logits = model(tokens(1, 5), **{cache_kwarg(model): cache}).logits
    assert cache.get_seq_length() == 5
    with pytest.raises(RuntimeError, match="h2o_attention_decode is not implemented"):
        logits.sum().backward()


def test_dropout_is_refused() -> None:
    model = tiny_model("llama", attention_dropout=0.1).train()
    cache = H2OCache(model.config, POLICY)
    with pytest.raises(RuntimeError, match=r"dropout must be 0, got 0\.1"):
        forward(model, tokens(1, 5), cache)


def test_mistral_s_window_raises_when_it_would_hide_a_token() -> None:
    model, ids = tiny_model("mistral", sliding_window=10), tokens(2, 8)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    cache = H2OCache(model.config, POLICY)
    forward(model, ids, cache, mask)
    model.set_attn_implementation("sdpa")
    full = DynamicCache()
    forward(model, ids, full, mask)
    for i in range(2):
        mask = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], 1)
        model.set_attn_implementation("h2o")
        forward(model, ids[:, i : i + 1], cache, mask)
    mask = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], 1)
    with pytest.raises(NotImplementedError, match="got sliding_window=10 and 11 tokens"):
        forward(model, ids[:, :1], cache, mask)


def test_a_mask_of_the_new_columns_alone_says_the_same_beside_a_window() -> None:
    model, ids = tiny_model("mistral", sliding_window=20), tokens(2, 8)
    seen = torch.ones_like(ids)
    seen[0, :3] = 0
    added = torch.tensor([[1], [0]])  # the second row ends before the first
    caches = [H2OCache(model.config, POLICY) for _ in range(2)]
    for cache in caches:
        forward(model, ids, cache, seen)
    whole = forward(model, ids[:, :1], caches[0], torch.cat([seen, added], 1))
    alone = forward(model, ids[:, :1], caches[1], added)
    assert torch.equal(whole, alone)
    for cache in caches:
        assert cache.layers[0].tokens_seen.tolist() == [6, 8]


def windowed_model(family: str) -> Any:
    """A model that tells its window of 6 tokens to its mask and to transformers' caches alone."""
    special: dict[str, dict[str, Any]] = {
        "phimoe": dict(num_local_experts=2, num_experts_per_tok=2, intermediate_size=48),
        "moshi": dict(head_dim=8, num_codebooks=2, ffn_dim=48),
    }
    config = CONFIG_MAPPING[family](
        vocab_size=96,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        sliding_window=6,
        **special[family],
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    model.set_attn_implementation("h2o")
    if model.config._attn_implementation != "h2o":
        pytest.skip(f"the {family} of this transformers has attention classes of its own")
    return model


@pytest.mark.parametrize("in_one_forward", [True, False])
@pytest.mark.parametrize("family", ["phimoe", "moshi"])
def test_a_window_in_the_config_alone_raises_when_it_would_hide_a_token(
    family: str, in_one_forward: bool
) -> None:
    model, ids = windowed_model(family), tokens(1, 7)
    cache = H2OCache(model.config, POLICY)
    match = "got sliding_window=6 and 7 tokens; set config.sliding_window = None"
    if in_one_forward:
        with pytest.raises(NotImplementedError, match=match):
            forward(model, ids, cache)
        return
    forward(model, ids[:, :4], cache)
    for i in range(4, 6):
        forward(model, ids[:, i : i + 1], cache)
    with pytest.raises(NotImplementedError, match=match):
        forward(model, ids[:, 6:], cache)


def test_a_window_that_the_config_switches_off_hides_nothing() -> None:
    model = windowed_model("phimoe")
    model.config.use_sliding_window = False
    cache = H2OCache(model.config, POLICY)
    forward(model, tokens(1, 4), cache)
    for i in range(6):
        forward(model, tokens(1, 1, seed=i), cache)
    cache.reset()
    model.config.use_sliding_window = True
    model.config.sliding_window = None
    forward(model, tokens(1, 10), cache)
    model.config.sliding_window = 6
    model.config.layer_types = ["full_attention", "sliding_attention"]
    assert [layer.configured_window() for layer in cache.layers] == [None, 6]


def test_copies_of_a_cache_keep_to_its_window() -> None:
    model, ids = windowed_model("phimoe"), tokens(1, 6)
    cache = H2OCache(model.config, POLICY)
    forward(model, ids, cache)
    for other in (cache, cache.fork(1), copy.deepcopy(cache)):
        with pytest.raises(NotImplementedError, match="got sliding_window=6 and 7 tokens"):
            forward(model, ids[:, :1], other)


def test_output_attentions_is_refused() -> None:
    model = tiny_model("llama")
    cache = H2OCache(model.config, POLICY)
    with pytest.raises(NotImplementedError, match="attention weights are never built"):
        forward(model, tokens(1, 5), cache, output_attentions=True)


@pytest.mark.parametrize("family", ["llama", "opt", "gpt_neox"])
def test_a_4d_mask_is_taken_only_if_it_says_causal_and_padding(family: str) -> None:
    model, ids = tiny_model(family), tokens(2, 6)
    real = torch.ones(2, 6, dtype=torch.bool)
    real[0, :2] = False
    causal = real[:, None, None] & torch.ones(6, 6, dtype=torch.bool).tril()
    position_ids = (real.cumsum(1) - 1).clamp(min=0)
    want = forward(
        model, ids, H2OCache(model.config, POLICY), real.long(), position_ids=position_ids
    )
    whole = _whole_mask(causal, model)
    got = forward(model, ids, H2OCache(model.config, POLICY), whole, position_ids=position_ids)
    torch.testing.assert_close(got[real], want[real])
    block = causal.clone()
    block[:, :, 4, 3] = False
    whole = _whole_mask(block, model)
    with pytest.raises(ValueError, match="must hide later tokens and padding, nothing else"):
        forward(model, ids, H2OCache(model.config, POLICY), whole, position_ids=position_ids)


def _whole_mask(mask: Tensor, model: Any) -> Tensor:
    """The mask as the model takes it: float for OPT of transformers 4, which adds it."""
    cache = H2OCache(model.config, POLICY)
    if not cache.layers[0].settings.whole_masks:
        return mask
    return torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)


def test_masks_of_another_kind_are_refused(layer: Any) -> None:
    for mask in (
        torch.zeros(1, 1, 5, 5),
        torch.ones(1, 4, 5, 5, dtype=torch.bool),
        torch.ones(1, 1, 1, 6, dtype=torch.bool),
        torch.ones(1, 5, dtype=torch.bool),
    ):
        with pytest.raises(ValueError, match="attention_mask must be 2-D"):
            call(layer, mask=mask)


# ---- dtypes.


def test_autocast_casts_to_the_cache_and_back() -> None:
    model, ids = tiny_model("llama"), tokens(2, 14)
    want = forward(model, ids, H2OCache(model.config, POLICY))
    cache = H2OCache(model.config, POLICY)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = [forward(model, ids[:, :12], cache)]
        got += [forward(model, ids[:, i : i + 1], cache) for i in (12, 13)]
    dtypes = {(layer.k_cache.dtype, layer.v_cache.dtype) for layer in cache.layers}
    assert dtypes == {(torch.float32, torch.float32)}
    torch.testing.assert_close(got[0].float(), want[:, :12], atol=1.0, rtol=0)
    assert all(torch.isfinite(logits).all() for logits in got)


@pytest.mark.parametrize("cache_dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("input_dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_mixed_dtypes_are_cast_not_reinterpreted(
    input_dtype: torch.dtype, cache_dtype: torch.dtype
) -> None:
    config = tiny_config("llama", attn_implementation="h2o")
    layer = H2OCache(config, POLICY, dtype=cache_dtype).layers[0]
    key = torch.full((1, 2, 3, 8), 0.1621, dtype=input_dtype)
    query = torch.full((1, 4, 3, 8), 0.1621, dtype=input_dtype)
    key, value = layer.update(key, key.clone())
    output, _ = h2o_attention_forward(torch.nn.Module(), query, key, value, None)
    assert output.dtype == input_dtype
    assert layer.k_cache.dtype == layer.v_cache.dtype == cache_dtype
    stored = layer.k_cache[layer.positions >= 0].float()
    assert stored.numel() == 2 * 3 * 8
    torch.testing.assert_close(stored, torch.full_like(stored, 0.1621), atol=2e-3, rtol=0)
    torch.testing.assert_close(
        output.float(), torch.full_like(output.float(), 0.1621), atol=2e-3, rtol=0
    )


def test_keys_and_values_of_different_dtypes_are_stored_in_the_wider_one(layer: Any) -> None:
    key, value = torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 8, dtype=torch.bfloat16)
    key, value = layer.update(key, value)
    h2o_attention_forward(torch.nn.Module(), torch.zeros(1, 4, 3, 8), key, value, None)
    assert layer.k_cache.dtype == layer.v_cache.dtype == torch.float32


def test_scaling_is_taken_as_given() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, 6, 8) for _ in range(3))
    outputs = {}
    for scaling in (None, 1.0):
        config = tiny_config("opt", attn_implementation="h2o")
        layer = H2OCache(config, POLICY).layers[0]
        new_key, new_value = layer.update(key, value)
        outputs[scaling], _ = h2o_attention_forward(
            torch.nn.Module(), query, new_key, new_value, None, scaling=scaling
        )
        want = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling
        )
        torch.testing.assert_close(outputs[scaling], want.transpose(1, 2), atol=1e-5, rtol=1e-5)
    assert (outputs[None] - outputs[1.0]).abs().max() > 0.01
