"""The unmodified model with its full cache, whose attention weights are shown to observers.

The model runs under an attention function of its own name that computes the softmax in blocks of
queries and hands each block to the observers of the moment, which reduce it at once: no more weights
are held than those of one layer and one block, whatever the length of the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.masking_utils import causal_mask_function

from h2o_kv.hf import cache_kwarg

# The rules of what changes attention are those of the evicting cache, which runs on the same model.
from h2o_kv.hf.attention import _NOT_USED, _check_argument, _check_inference
from h2o_kv.hf.settings import ALIBI_MODELS

__all__ = ["AttentionObserver", "Teacher", "register"]

TEACHER_ATTENTION = "h2o_teacher"
_BLOCK_ROWS = 64


class AttentionObserver(Protocol):
    """Something that looks at attention weights as they are computed."""

    def observe(self, layer: int, first: int, weights: Tensor) -> None:
        """Take the weights of some queries of one layer; they are written over afterwards.

        Parameters
        ----------
        layer : int
        first : int
            Position of the first query.
        weights : Tensor, float32 or float64, [num_kv_heads, group_size, rows, first + rows]
            Softmax weights of `rows` queries over all tokens up to the last of them, 0 where a token
            comes later than its query. Blocks of a layer come in order.
        """


_observers: ContextVar[Sequence[AttentionObserver] | None] = ContextVar("observers", default=None)


def register() -> None:
    """Make the teacher's attention known to transformers. Idempotent."""
    AttentionInterface.register(TEACHER_ATTENTION, _attention_forward)
    AttentionMaskInterface.register(TEACHER_ATTENTION, _mask)


class Teacher:
    """One sequence through an unmodified model with a full cache, attention shown to observers.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        Decoder whose attention is exchangeable (all families that run with an H2OCache but BLOOM and
        MPT), in evaluation mode. Each `feed` leaves it under the teacher's attention.
    observers : sequence of AttentionObserver
        They see every layer's weights of every token fed.

    Raises
    ------
    NotImplementedError
        The model is BLOOM or MPT, whose attention is their own.
    """

    def __init__(self, model: Any, observers: Sequence[AttentionObserver] = ()) -> None:
        config = model.config.get_text_config(decoder=True)
        if config.model_type in ALIBI_MODELS:
            raise NotImplementedError(
                "diagnostics: the model's attention must be exchangeable, which that of BLOOM and MPT "
                f"is not, got model_type={config.model_type!r}"
            )
        self._model = model
        self._observers = tuple(observers)
        self._cache = DynamicCache()

    @torch.inference_mode()
    def feed(self, ids: Tensor, *, keep_logits: int = 0) -> Tensor:
        """Run the next tokens.

        Parameters
        ----------
        ids : Tensor, int64, [tokens]
        keep_logits : int
            Of so many last tokens the logits are computed; 0 = of all.

        Returns
        -------
        Tensor, dtype of the model, [keep_logits or tokens, vocabulary]
        """
        if self._model.config._attn_implementation != TEACHER_ATTENTION:
            self._model.set_attn_implementation(TEACHER_ATTENTION)
        token = _observers.set(self._observers)
        try:
            output = self._model(
                input_ids=ids[None].to(self._model.device),
                use_cache=True,
                logits_to_keep=keep_logits,
                **{cache_kwarg(self._model): self._cache},
            )
        finally:
            _observers.reset(token)
        logits: Tensor = output.logits[0]
        return logits


def _attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal softmax attention in blocks of queries; arguments as transformers passes them."""
    observers = _observers.get()
    if observers is None:
        raise RuntimeError(
            f'attn_implementation="{TEACHER_ATTENTION}" is for h2o_kv.diagnostics alone; '
            'call model.set_attn_implementation("sdpa")'
        )
    num_kv_heads, num_keys = key.shape[1:3]
    num_new, head_dim = query.shape[2:]
    _check_inference(module, dropout)
    for name, argument in kwargs.items():
        if argument is not None and name not in _NOT_USED:
            _check_argument(name, argument, num_keys)
    scale = head_dim**-0.5 if scaling is None else scaling
    wide = torch.promote_types(query.dtype, torch.float32)
    queries = query[0].to(wide).reshape(num_kv_heads, -1, num_new, head_dim)
    keys = key[0].to(wide).transpose(1, 2)
    offset = num_keys - num_new
    outputs = []
    for start in range(0, num_new, _BLOCK_ROWS):
        block = queries[:, :, start : start + _BLOCK_ROWS]
        group_size, rows = block.shape[1:3]
        visible = offset + start + rows
        logits = (block.flatten(1, 2) @ keys[..., :visible]).mul_(scale)
        logits = logits.view(num_kv_heads, group_size, rows, visible)
        later = torch.ones(rows, rows, dtype=torch.bool, device=logits.device).triu(1)
        logits[..., -rows:].masked_fill_(later, -torch.inf)
        weights = torch.softmax(logits, -1)
        mixed = weights.flatten(1, 2).to(value.dtype) @ value[0, :, :visible]
        outputs.append(mixed.view(-1, rows, value.shape[3]))
        for observer in observers:
            observer.observe(module.layer_idx, offset + start, weights)
    return torch.cat(outputs, 1).transpose(0, 1)[None].contiguous(), None


def _mask(
    batch_size: int,
    *args: Any,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> None:
    """No mask: one sequence without padding, and causality is the attention function's business."""
    if batch_size != 1 or (attention_mask is not None and not bool(attention_mask.all())):
        raise ValueError("diagnostics: input must be one row without padding, got another batch")
    if mask_function is not causal_mask_function:
        raise NotImplementedError("diagnostics: attention must be causal over all tokens")
