"""The attention function and the mask function that transformers knows as "h2o".

The only file that knows what transformers passes to an attention function. With an H2OCache the
layer is found on the key tensor and does the step; with any other cache, or none, attention is
exactly transformers' "sdpa".
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, eager_mask, sdpa_mask

from h2o_kv.hf.layer import LAYER_ATTRIBUTE, H2OLayer
from h2o_kv.hf.settings import ALIBI_MODELS, ATTENTION_NAME

__all__ = ["cache_kwarg", "h2o_attention_forward", "h2o_mask", "refuse_unknown", "register"]

# Arguments of other attention functions that change the result and that neither the operator nor
# sdpa_attention_forward of every release takes. None means "not used".
_CHANGES_RESULT = frozenset(
    {
        "alibi",
        "alibi_slopes",
        "head_mask",
        "layer_head_mask",
        "position_bias",
        "s_aux",
        "sinks",
        "softcap",
    }
)
# Packed sequences: several in one row, told apart by their lengths.
_PACKED = frozenset({"cu_seq_lens_k", "cu_seq_lens_q", "cu_seqlens", "seq_idx"})
# Arguments that models pass along and that attention does not use.
_NOT_USED = frozenset(
    {
        "cache_position",
        "labels",
        "logits_to_keep",
        "num_items_in_batch",
        "output_hidden_states",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "token_type_ids",
        "use_cache",
    }
)


def register() -> None:
    """Make "h2o" known to transformers as an attention implementation. Idempotent."""
    AttentionInterface.register(ATTENTION_NAME, h2o_attention_forward)
    AttentionMaskInterface.register(ATTENTION_NAME, h2o_mask)


def cache_kwarg(model: Any) -> str:
    """Name under which `model.forward` takes its cache.

    Parameters
    ----------
    model : PreTrainedModel

    Returns
    -------
    str
        "cache" (transformers 5.24 and later) or "past_key_values".
    """
    parameters = inspect.signature(model.forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


def h2o_attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    alibi_slopes: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer, as transformers calls it.

    Parameters
    ----------
    module : torch.nn.Module
        The attention module.
    query : Tensor, [batch, num_q_heads, num_new, head_dim]
        Rotated already.
    key, value : Tensor, [batch, num_kv_heads, num_new, head_dim]
        The new ones alone with an H2OCache; all of them otherwise.
    attention_mask : Tensor, optional
        From `h2o_mask`.
    dropout : float
        Must be 0 with an H2OCache.
    scaling : float, optional
        Factor on query . key, taken as given (OPT passes 1.0). Default head_dim ** -0.5.
    alibi_slopes : Tensor, float32 or float64, [num_q_heads], optional
        From alibi.py, with an H2OCache only.
    **kwargs
        What the model passes besides; what would change the result is refused.

    Returns
    -------
    output : Tensor, [batch, num_new, num_q_heads, head_dim]
    weights : None
        They are never built.

    Raises
    ------
    NotImplementedError
        An argument asks for something that the operator does not do.
    RuntimeError
        Dropout is asked for.
    ValueError
        Cache, mask or shapes do not fit.
    """
    layer: H2OLayer | None = getattr(key, LAYER_ATTRIBUTE, None)
    if layer is None:
        return _plain_attention(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            alibi_slopes=alibi_slopes,
            **kwargs,
        )
    layer.take_over(getattr(module, "config", None))
    _check_inference(module, dropout)
    if layer.journal is not None:
        position_ids = kwargs.get("position_ids")
        unknown = position_ids is None and alibi_slopes is not None
        _check_continues(layer, key.shape[2], position_ids, unknown)
    tokens = layer.columns_seen + key.shape[2]
    # Some models (PhiMoE, Moshi) tell the window to their mask function and transformers' cache
    # alone; neither has a say here.
    kwargs.setdefault("sliding_window", layer.window())
    for name, argument in kwargs.items():
        if argument is not None and name not in _NOT_USED:
            _check_argument(name, argument, tokens)
    rolling = layer.settings.rolling
    if rolling is not None:
        position_ids = kwargs.get("position_ids")
        query, key = rolling.undo(query, key, position_ids, first=layer.layer_idx == 0)
    return layer.attend(query, key, value, attention_mask, scaling, alibi_slopes), None


def h2o_mask(
    batch_size: int,
    kv_length: int,
    *,
    q_length: int | None = None,
    cache_position: Tensor | None = None,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    **kwargs: Any,
) -> Tensor | None:
    """Say what is padding among the new tokens; causality is the attention function's business.

    Parameters
    ----------
    batch_size, kv_length, q_length, kv_offset, mask_function, allow_is_causal_skip, **kwargs
        As transformers passes them to every mask function; `cache_position` stands for `q_length`
        before transformers 5.12. `H2OCache` answers kv_length = q_length, kv_offset = columns seen.
    attention_mask : Tensor, bool, [batch, columns seen + q_length], optional
        True = real token. Columns of the new tokens alone are enough.

    Returns
    -------
    mask : Tensor, bool, [batch, 1, 1, q_length], or None
        True = real token; None = all are. With other keys than the new ones, or another pattern
        than causal, transformers' sdpa mask. For a model with an attention of its own (BLOOM, MPT),
        transformers' eager mask.

    Raises
    ------
    ValueError
        attention_mask has another number of columns.
    """
    num_new = q_length
    if num_new is None:
        if cache_position is None:
            raise TypeError("h2o_mask: q_length or cache_position must be given, got neither")
        num_new = cache_position.shape[0]
    own_attention = getattr(kwargs.get("config"), "model_type", None) in ALIBI_MODELS
    if own_attention or kv_length != num_new or mask_function is not causal_mask_function:
        if attention_mask is not None and attention_mask.shape[1] == kv_length:
            # The new columns alone: sdpa_mask counts from the first column seen.
            attention_mask = torch.nn.functional.pad(attention_mask, (kv_offset, 0), value=1)
        new_tokens = (
            {"cache_position": cache_position} if q_length is None else {"q_length": q_length}
        )
        mask: Tensor | None = (eager_mask if own_attention else sdpa_mask)(
            batch_size=batch_size,
            kv_length=kv_length,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            allow_is_causal_skip=allow_is_causal_skip,
            **new_tokens,
            **kwargs,
        )
        return mask
    if attention_mask is None:
        return None
    if attention_mask.shape[1] not in (num_new, kv_offset + num_new):
        raise ValueError(
            "attention_mask must have one column for each token seen and each new one = "
            f"{kv_offset + num_new}, got {attention_mask.shape[1]}"
        )
    # A copy: strides of a view would change at every step, and with them a compiled graph.
    real = attention_mask[:, -num_new:].to(torch.bool, copy=True)
    # Asking costs a device its head start, so a decode step on one does not ask.
    if (
        allow_is_causal_skip
        and (num_new > 1 or real.device.type == "cpu")
        and not torch.compiler.is_compiling()
        and bool(real.all())
    ):
        return None
    return real[:, None, None, :].contiguous()


def _plain_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Run transformers' sdpa attention on a mask of `h2o_mask`."""
    for name in _CHANGES_RESULT & kwargs.keys():
        if kwargs[name] is not None:
            refuse_unknown(name, kwargs[name], ATTENTION_NAME)
    num_new, num_keys = query.shape[2], key.shape[2]
    is_causal = kwargs.get("is_causal")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    if (
        is_causal
        and num_new > 1
        and attention_mask is not None
        and attention_mask.dtype == torch.bool
        and attention_mask.shape[-2] == 1
    ):
        causal = torch.ones(num_new, num_keys, dtype=torch.bool, device=key.device)
        attention_mask = attention_mask & causal.tril(num_keys - num_new)
    output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    return output, None


def _check_inference(module: torch.nn.Module, dropout: float) -> None:
    if dropout:
        raise RuntimeError(
            f"H2OCache: attention dropout must be 0, got {dropout}; call model.eval()"
        )
    if getattr(module, "is_causal", True) is False:
        raise NotImplementedError("H2OCache: attention must be causal, got is_causal=False")


def _check_continues(
    layer: H2OLayer, num_new: int, position_ids: Tensor | None, unknown: bool
) -> None:
    """Refuse a conversation that comes again from its start, as if the cache were empty.

    transformers 5.24 passes the whole input when assisted decoding begins with a cache that has
    seen tokens. Then the last of more tokens than were seen has a position within this forward, and
    position 0 comes again in a row that has seen tokens. `unknown`: the model has positions but does
    not pass them on.
    """
    seen = layer.columns_seen
    if not 0 < seen < num_new:
        return
    again = unknown
    if position_ids is not None and layer.tokens_seen is not None:
        starts = (position_ids == 0).any(-1) & (layer.tokens_seen > 0).to(position_ids.device)
        again = bool(starts.any() & (position_ids[..., -1].max() < num_new))
    if again:
        where = (
            "and this model does not say where they begin"
            if unknown
            else ("whose positions begin at 0 again")
        )
        raise ValueError(
            f"H2OCache: the new tokens must follow the {seen} that were seen, got {num_new} "
            f"{where}. This release of transformers passes the whole conversation "
            "to assisted decoding although the cache holds its beginning: use a new cache or "
            "reset() for each call, or decode second turns without drafts"
        )


def _check_argument(name: str, argument: Any, tokens: int) -> None:
    """Refuse an argument that changes the result, or may; `tokens` counts this forward's too."""
    refuse_unknown(name, argument, ATTENTION_NAME)
    if name == "is_causal" and not argument:
        raise NotImplementedError("H2OCache: attention must be causal, got is_causal=False")
    if name == "output_attentions" and argument:
        raise NotImplementedError(
            "H2OCache: attention weights are never built, got output_attentions=True; "
            "layers[i].scores holds their sums"
        )
    if name == "sliding_window" and tokens > argument:
        raise NotImplementedError(
            "H2OCache: a sliding window in the model is not supported once it hides a token, got "
            f"sliding_window={argument} and {tokens} tokens; set config.sliding_window = None to "
            "run without it"
        )
    if name in _PACKED:
        raise NotImplementedError(
            f"H2OCache: packed sequences are not supported, got {name}; use one row for each"
        )
    if isinstance(argument, Tensor):
        raise NotImplementedError(
            f"H2OCache: what the tensor argument {name} does to attention is not known here, "
            f"got {_describe(argument)}"
        )


def refuse_unknown(name: str, argument: Any, implementation: str) -> None:
    """Refuse an argument that changes the result of other attention functions than `implementation`."""
    if name in _CHANGES_RESULT:
        raise NotImplementedError(
            f'attn_implementation="{implementation}" does not support {name}, got '
            f"{_describe(argument)}"
        )


def _describe(value: Any) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
