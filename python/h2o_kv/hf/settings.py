"""What an H2OCache is made with, shared by all of its layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from h2o_kv._C import EvictionPolicy
from h2o_kv.hf.rolling import Rolling

__all__ = ["ALIBI_MODELS", "ATTENTION_NAME", "OPTIONS", "Settings", "model_shape"]

# Name under which the attention and the mask function are registered.
ATTENTION_NAME = "h2o"
# Models whose attention has to be told of an H2OCache (alibi.py).
ALIBI_MODELS = frozenset({"bloom", "mpt"})
# Settings that are keyword arguments of H2OCache.
OPTIONS = ("prefill", "prefill_chunk", "prompt_length", "dtype", "max_rollback", "positions")
# What a model must share with the config of the cache.
_MODEL_SHAPE = (
    "model_type",
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
)


@dataclass(frozen=True)
class Settings:
    """What all layers of a cache share and nothing changes."""

    config: Any
    policy: EvictionPolicy
    row_policies: tuple[EvictionPolicy, ...] | None
    prefill: str
    prefill_chunk: int
    prompt_length: int | tuple[int, ...] | None
    dtype: torch.dtype | None
    max_rollback: int | None
    positions: str
    given_scores: tuple[Tensor, ...] | None
    rolling: Rolling | None
    max_positions: int | None
    whole_masks: bool

    def __deepcopy__(self, memo: dict[int, Any]) -> Settings:
        # A copied cache belongs to the same model: its config must stay the model's own object,
        # or a later model.set_attn_implementation() would go unnoticed.
        return self

    def policies(self, batch: int) -> Sequence[EvictionPolicy]:
        """The policy of each row of a batch.

        Raises
        ------
        ValueError
            The rows have policies of their own, and there are more or fewer of them.
        """
        if self.row_policies is None:
            return [self.policy] * batch
        if len(self.row_policies) != batch:
            raise ValueError(
                f"H2OCache: policy must have one entry a row = {batch}, got {len(self.row_policies)}"
            )
        return self.row_policies

    def options(self) -> dict[str, Any]:
        """Keyword arguments with which an H2OCache of these settings is made."""
        return {name: getattr(self, name) for name in OPTIONS}

    def check_pairing(self) -> None:
        """Raise where the model runs another attention function than ours."""
        attention = self.config._attn_implementation
        if attention != ATTENTION_NAME:
            raise RuntimeError(
                f'H2OCache: attn_implementation must be "{ATTENTION_NAME}", got "{attention}"; '
                f"call {self.how_to_pair()} and make the cache from model.config"
            )

    def how_to_pair(self) -> str:
        """The call that lets the model run with its cache."""
        if self.config.model_type in ALIBI_MODELS:
            return "h2o_kv.hf.enable_alibi(model)"
        return f'model.set_attn_implementation("{ATTENTION_NAME}")'


def model_shape(config: Any) -> dict[str, Any]:
    """What two configs must share for a cache of one to serve the other."""
    return {name: getattr(config, name, None) for name in _MODEL_SHAPE}
