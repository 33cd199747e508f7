"""Modes that only mask attention, and the attention function "h2o_parity" that runs them in a model.

Nothing leaves memory: the model keeps a full cache, or none, and attention hides tokens. The official
scripts replace attention modules to do so; here the models are unmodified.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from h2o_kv.hf.attention import refuse_unknown
from h2o_kv.hf.settings import ALIBI_MODELS
from h2o_kv.parity.caching import attention_implementation
from h2o_kv.parity.mode import Counts, ParityMode, causal, check_ratio

__all__ = [
    "PARITY_ATTENTION",
    "LayerMask",
    "MaskingMode",
    "RatioMode",
    "parity_attention_forward",
    "register",
]

PARITY_ATTENTION = "h2o_parity"
"""Name under which transformers knows the attention function."""

# Attribute of an attention module by which the function finds what its model runs.
_RUN_ATTRIBUTE = "_h2o_parity_run"


class LayerMask(ABC):
    """What one layer hides from one batch of sequences; remembers what it has to."""

    seen: int = 0
    """Tokens that went through `attend`."""

    @abstractmethod
    def attend(self, logits: Tensor) -> Tensor:
        """Weights of the newest tokens.

        Parameters
        ----------
        logits : Tensor, float, [..., num_new, seen + num_new]
            Scaled query . key of the new tokens with all.

        Returns
        -------
        weights : Tensor, as `logits`

        Raises
        ------
        ValueError
            The mode does not take so many tokens at once.
        """


class MaskingMode(ParityMode):
    """A mode that runs through the attention function "h2o_parity"."""

    @abstractmethod
    def begin(self, prompt_len: int | None = None) -> LayerMask:
        """The mask of a layer that has seen nothing.

        Parameters
        ----------
        prompt_len : int, optional
            Tokens of the prompt; by default the first call brings it all.
        """

    @contextmanager
    def running(self, model: Any, prompt_len: int | None = None) -> Iterator[dict[str, Any]]:
        """Run a model masked, with any full cache or none; see `ParityMode.running`.

        What it gives is empty. A forward whose keys are all new begins a new sequence, so the context
        serves one `generate` after another. Query heads of a group see their KV head's keys, each with
        a mask of its own: KV heads are repeated, where the scripts fail.

        Raises
        ------
        RuntimeError
            The model runs in a mode already.
        ValueError
            The model's attention does not ask for an attention function.
        """
        model_type = model.config.get_text_config(decoder=True).model_type
        if model_type in ALIBI_MODELS:
            raise ValueError(
                f"{self.name}: the model must call transformers' attention functions, got {model_type}"
            )
        run = _Run(self, prompt_len)
        modules = [module for module in model.modules() if hasattr(module, "layer_idx")]
        if any(hasattr(module, _RUN_ATTRIBUTE) for module in modules):
            raise RuntimeError(
                f"{self.name}: the model must run in one mode at a time, got another"
            )
        with attention_implementation(model, PARITY_ATTENTION):
            for module in modules:
                setattr(module, _RUN_ATTRIBUTE, run)
            try:
                yield {}
            finally:
                for module in modules:
                    delattr(module, _RUN_ATTRIBUTE)

    def _score_row(self, model: Any, input_ids: Tensor, prompt_len: int) -> Tensor:
        with self.running(model, prompt_len):
            logits: Tensor = model(input_ids, use_cache=False).logits
        return logits


@dataclass(frozen=True)
class RatioMode(MaskingMode):
    """A mode that masks by parts of a length.

    Attributes
    ----------
    heavy_ratio, recent_ratio : float
        As the flags of its script.
    """

    heavy_ratio: float = 0.1
    recent_ratio: float = 0.1

    def __post_init__(self) -> None:
        check_ratio(f"{self.name}: heavy_ratio", self.heavy_ratio)
        check_ratio(f"{self.name}: recent_ratio", self.recent_ratio)

    @classmethod
    def from_ratios(cls, heavy_ratio: float, recent_ratio: float, length: int) -> ParityMode:
        """See `ParityMode.from_ratios`."""
        return cls(heavy_ratio, recent_ratio)

    def counts(self, length: int) -> Counts:
        """Both rounded down, as Python's int does it: 0.29 of 100 is 28."""
        return Counts(int(self.heavy_ratio * length), int(self.recent_ratio * length))


class _Run:
    """The masks of all layers of a model that runs in a mode."""

    def __init__(self, mode: MaskingMode, prompt_len: int | None) -> None:
        self.mode = mode
        self._prompt_len = prompt_len
        self._layers: dict[int, LayerMask] = {}

    def layer(self, layer_idx: int, num_new: int, num_keys: int) -> LayerMask:
        """The mask of a layer about to see `num_new` tokens, the last of `num_keys`."""
        if num_new == num_keys:
            self._layers[layer_idx] = self.mode.begin(self._prompt_len)
        mask = self._layers.get(layer_idx)
        seen = 0 if mask is None else mask.seen
        if mask is None or seen != num_keys - num_new:
            raise ValueError(
                f"{self.mode.name}: tokens must follow the {seen} that were seen, got {num_new} after "
                f"{num_keys - num_new}; nothing can be taken back, and a second turn begins anew"
            )
        return mask


def register() -> None:
    """Make "h2o_parity" known to transformers as an attention implementation. Idempotent."""
    AttentionInterface.register(PARITY_ATTENTION, parity_attention_forward)
    AttentionMaskInterface.register(PARITY_ATTENTION, sdpa_mask)


def parity_attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Attention of one layer under `MaskingMode.running`, as transformers calls it.

    Parameters
    ----------
    module : torch.nn.Module
        The attention module.
    query : Tensor, [batch, num_q_heads, num_new, head_dim]
    key, value : Tensor, [batch, num_kv_heads, num_keys, head_dim]
        All of them: a full cache's, or the new ones alone.
    attention_mask : Tensor, [batch or 1, 1, num_new, num_keys], optional
        bool, True = attended, or added to the logits. Causal, without padding.
    dropout : float
        Must be 0.
    scaling : float, optional
        Factor on query . key; head_dim ** -0.5 by default.
    **kwargs
        What the model passes besides; what would change the result is refused.

    Returns
    -------
    output : Tensor, [batch, num_new, num_q_heads, head_dim]
    weights : Tensor, [batch, num_q_heads, num_new, num_keys]

    Raises
    ------
    NotImplementedError
        An argument asks for something that no script does.
    RuntimeError
        The model is not inside `running`, or dropout is asked for.
    ValueError
        The mask hides something, or the tokens do not follow those that were seen.
    """
    run: _Run | None = getattr(module, _RUN_ATTRIBUTE, None)
    if run is None:
        raise RuntimeError(
            f'attn_implementation="{PARITY_ATTENTION}" must run inside "with mode.running(model)", '
            f"got {type(module).__name__} outside of it"
        )
    if dropout:
        raise RuntimeError(
            f"{run.mode.name}: attention dropout must be 0, got {dropout}; call model.eval()"
        )
    for name, argument in kwargs.items():
        if argument is not None:
            refuse_unknown(name, argument, PARITY_ATTENTION)
    num_new, num_keys = query.shape[2], key.shape[2]
    if attention_mask is not None:
        _check_mask(run.mode.name, attention_mask, num_new, num_keys)
    group_size = query.shape[1] // key.shape[1]
    keys, values = (tensor.repeat_interleave(group_size, 1) for tensor in (key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    logits = torch.matmul(query, keys.transpose(-1, -2)) * scale
    layer_idx: int = module.layer_idx  # type: ignore[assignment]
    weights = run.layer(layer_idx, num_new, num_keys).attend(logits)
    output = torch.matmul(weights, values).transpose(1, 2).contiguous()
    return output, weights


def _check_mask(name: str, attention_mask: Tensor, num_new: int, num_keys: int) -> None:
    mask = attention_mask if attention_mask.dtype == torch.bool else attention_mask == 0
    visible = causal(num_new, num_keys, mask.device)
    if mask.shape[-2:] != visible.shape or not bool((mask == visible).all()):
        raise ValueError(
            f"{name}: attention_mask must hide later tokens and nothing else, since the scripts ran "
            "one example at a time without padding, got another pattern of shape "
            f"{list(attention_mask.shape)}; score_forward takes rows with padding one by one"
        )
