"""Tiny random models of the families that h2o_kv is tested under, and how tests run them.

Their weights are drawn with a standard deviation of 0.3: at the usual 0.02 attention is flat and
greedy text constant, and every policy looks right.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    BloomConfig,
    DynamicCache,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    MptConfig,
    OPTConfig,
    Qwen2Config,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.mpt import modeling_mpt

from h2o_kv import reference
from h2o_kv.hf import H2OCache, cache_kwarg, disable_alibi, enable_alibi
from h2o_kv.policies import rules_of

# Their attention is their own, and never sdpa.
ALIBI_FAMILIES = ("bloom", "mpt")
FAMILIES = ("llama", "mistral", "qwen2", "opt", "gpt_neox", *ALIBI_FAMILIES)
# One of each kind of positions and of attention.
KINDS = ("llama", "opt", "gpt_neox", *ALIBI_FAMILIES)
VOCABULARY = 96
PAD = 0
# Never produced: tests ask for min_new_tokens. transformers 4 needs one to be set.
EOS = 1
# For `generate`: no token ends a text, and none is excluded.
NO_END: dict[str, Any] = {"eos_token_id": VOCABULARY, "min_new_tokens": None}

_COMMON: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=256,
    pad_token_id=PAD,
    bos_token_id=2,
    eos_token_id=EOS,
)
_ROTARY: dict[str, Any] = dict(_COMMON, intermediate_size=48, initializer_range=0.3)


def tiny_config(family: str, **overrides: Any) -> Any:
    """Config of a model with 2 layers, 4 query heads and (llama, mistral, qwen2) 2 KV heads."""
    if family == "opt":
        return OPTConfig(
            **{**_COMMON, "ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": 0.3, **overrides}
        )
    if family in ALIBI_FAMILIES:
        # With tied weights their greedy text is constant.
        options = {**_COMMON, "initializer_range": 0.3, "tie_word_embeddings": False}
        options["use_cache"] = True  # MPT's default is False.
        length = options.pop("max_position_embeddings")
        if family == "bloom":
            return BloomConfig(**{**options, **overrides})
        return MptConfig(**{**options, "max_seq_len": length, **overrides})
    if family == "gpt_neox":
        return GPTNeoXConfig(**{**_ROTARY, **overrides})
    config_class = {"llama": LlamaConfig, "mistral": MistralConfig, "qwen2": Qwen2Config}[family]
    return config_class(**{**_ROTARY, "num_key_value_heads": 2, **overrides})


def tiny_model(
    family: str,
    *,
    attention: str = "h2o",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **overrides: Any,
) -> Any:
    """A model of `tiny_config` in eval mode; the same weights for the same family and seed."""
    if (
        family == "mpt"
        and dtype == torch.float64
        and not hasattr(modeling_mpt, "create_causal_mask")
    ):
        pytest.skip("MPT of this transformers makes no masks in float64")
    # With seed 0 their text repeats itself.
    torch.manual_seed(seed + 1 if family in ALIBI_FAMILIES else seed)
    model = AutoModelForCausalLM.from_config(tiny_config(family, **overrides)).to(dtype).eval()
    set_attention(model, attention)
    return model


def set_attention(model: Any, attention: str) -> None:
    """Run the model under an attention implementation; one of ALIBI_FAMILIES has "h2o" and its own."""
    if model.config.model_type not in ALIBI_FAMILIES:
        model.set_attn_implementation(attention)
    elif attention == "h2o":
        enable_alibi(model)
    else:
        disable_alibi(model)


def assistant(family: str, drafts: int, **options: Any) -> Any:
    """The same model with a full cache, its weights a little off: right often, not always."""
    model = tiny_model(family, attention="sdpa", **options)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(0.02 * noise)
    model.generation_config.num_assistant_tokens = drafts
    model.generation_config.num_assistant_tokens_schedule = "constant"
    model.generation_config.assistant_confidence_threshold = 0.0
    return model


def tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    """Random ids [batch, length], none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (batch, length), generator=generator)


def left_padded(prompts: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Ids and mask [batch, longest] of prompts [length]."""
    longest = max(len(prompt) for prompt in prompts)
    ids = torch.full((len(prompts), longest), PAD)
    mask = torch.zeros(len(prompts), longest, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = prompt
        mask[row, longest - len(prompt) :] = 1
    return ids, mask


def generate(
    model: Any, ids: Tensor, cache: Any, *, new: int, mask: Tensor | None = None, **options: Any
) -> Tensor:
    """The `new` tokens [batch, new] that follow `ids` under `cache`; greedy by default."""
    mask = torch.ones_like(ids) if mask is None else mask
    length = ids.shape[1]
    options = {"do_sample": False, "min_new_tokens": new, **options, cache_kwarg(model): cache}
    output = model.generate(ids, attention_mask=mask, max_new_tokens=new, **options)
    return output[:, length:]


def full_cache_generate(model: Any, ids: Tensor, **options: Any) -> Tensor:
    """`generate` with transformers' own cache and attention; leaves the model under "h2o"."""
    set_attention(model, "sdpa")
    try:
        return generate(model, ids, DynamicCache(), **options)
    finally:
        set_attention(model, "h2o")


@torch.no_grad()
def forward(model: Any, ids: Tensor, cache: Any, mask: Tensor | None = None, **kwargs: Any) -> Any:
    """Logits [batch, length, vocabulary] of one forward."""
    return model(ids, attention_mask=mask, **{cache_kwarg(model): cache}, **kwargs).logits


@dataclass
class Call:
    """What one attention call got and gave, and the state of its layer afterwards."""

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float | None
    alibi_slopes: Tensor | None
    output: Tensor
    positions: Tensor
    scores: Tensor


@dataclass
class Recording:
    """Attention calls of each layer, in order."""

    calls: dict[int, list[Call]] = field(default_factory=dict)


@contextmanager
def recorded() -> Iterator[Recording]:
    """Record every attention call under "h2o" that has an H2OCache."""
    recording = Recording()
    original = ALL_ATTENTION_FUNCTIONS["h2o"]

    def record(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
    ) -> Any:
        layer = getattr(key, "_h2o_layer", None)
        before = [x.clone() for x in (query, key, value)]
        result = original(module, query, key, value, mask, **kwargs)
        if layer is not None:
            recording.calls.setdefault(module.layer_idx, []).append(
                Call(
                    *before,
                    kwargs.get("scaling"),
                    kwargs.get("alibi_slopes"),
                    result[0].clone(),
                    layer.positions.clone(),
                    layer.scores.clone(),
                )
            )
        return result

    AttentionInterface.register("h2o", record)
    try:
        yield recording
    finally:
        AttentionInterface.register("h2o", original)


def check_against_reference(
    recording: Recording,
    cache: H2OCache,
    budgets: list[tuple[int, int, int]],
    mask: Tensor | None = None,
    *,
    tolerance: float = 1e-9,
) -> int:
    """Replay the recorded queries, keys and values through h2o_kv.reference, call by call.

    Parameters
    ----------
    recording : Recording
        Of everything that `cache` went through since it was empty.
    budgets : list of (num_sink, num_heavy, num_recent)
        Of each row.
    mask : Tensor, int, [batch, columns], optional
        1 = real; columns past its end are real.

    Returns
    -------
    evictions : int
        Tokens that left, so that a test can show that there were some.
    """
    assert sorted(recording.calls) == list(range(len(cache.layers)))
    evictions = 0
    for layer_idx, calls in recording.calls.items():
        rules = rules_of(cache.policy)
        if cache.policy.score_rule == "random":
            rules["score_seed"] = cache.policy.layer_seed(layer_idx)
        batch, num_kv_heads, _, head_dim = calls[0].key.shape
        capacity = max(sum(budget) for budget in budgets)
        shape = (batch, num_kv_heads, capacity)
        state = (
            torch.zeros(*shape, head_dim, dtype=torch.float64),
            torch.zeros(*shape, head_dim, dtype=torch.float64),
            torch.zeros(shape, dtype=torch.float64),
            torch.full(shape, -1, dtype=torch.int32),
        )
        column, seen = 0, [0] * batch
        for call in calls:
            num_new = call.key.shape[2]
            position = torch.full((batch, num_new), -1)
            for row in range(batch):
                for i in range(num_new):
                    in_mask = mask is not None and column + i < mask.shape[1]
                    if not in_mask or mask[row, column + i]:
                        position[row, i] = seen[row]
                        seen[row] += 1
            column += num_new
            chunk = num_new
            if num_new > 1 and cache.prefill == "streaming":
                chunk = cache.prefill_chunk
            output, evicted = reference.attention_decode(
                call.query.double(),
                *state,
                call.key.double(),
                call.value.double(),
                position,
                *budgets[0],
                gqa_reduce=cache.policy.gqa_reduce,
                scale=call.scale,
                alibi_slopes=call.alibi_slopes,
                chunk=chunk,
                row_budget=torch.tensor(budgets),
                **rules,
            )
            evictions += int((evicted >= 0).sum())
            torch.testing.assert_close(
                call.output.double().transpose(1, 2), output, atol=tolerance, rtol=0
            )
            for row in range(batch):
                for head in range(num_kv_heads):
                    got = _by_position(call.positions[row, head], call.scores[row, head])
                    want = _by_position(state[3][row, head], state[2][row, head])
                    assert got.keys() == want.keys()
                    for kept, score in want.items():
                        assert abs(got[kept] - score) <= tolerance * max(1.0, score)
    return evictions


def _by_position(positions: Tensor, scores: Tensor) -> dict[int, float]:
    return {
        int(position): float(score)
        for position, score in zip(positions, scores, strict=True)
        if position >= 0
    }


def kept(cache: H2OCache, row: int) -> list[list[list[int]]]:
    """Positions kept in `row`, ascending: [layer][KV head]."""
    return [
        [sorted(int(p) for p in head if p >= 0) for head in layer.positions[row]]
        for layer in cache.layers
    ]
