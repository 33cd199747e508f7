"""H2OCache under BLOOM and MPT, whose attention (ALiBi) does not ask for an attention function.

`enable_alibi` gives the attention modules of one model a subclass of their own class. It makes query,
key and value as the class does and hands them, with the slopes, to the attention function "h2o"
where the cache is an H2OCache; everything else is the class's own forward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from h2o_kv.hf.cache import H2OCache
from h2o_kv.hf.settings import ALIBI_MODELS, ATTENTION_NAME

__all__ = ["disable_alibi", "enable_alibi"]

# On an attention module that was enabled.
_SLOPES = "h2o_alibi_slopes"
# On the backbone: what was set elsewhere, as (object, attribute, former value).
_FORMER = "_h2o_former_settings"


def enable_alibi(model: Any) -> None:
    """Let a BLOOM or MPT model run with an H2OCache.

    Sets attn_implementation to "h2o" and, of the generation_config, use_cache to True: many MPT models
    say False, and `generate` would then feed the whole text to the cache again at every step.
    With any other cache, or none, the model computes what it did before. No other model is changed
    and no class of transformers. Calling it again changes nothing; `disable_alibi` undoes it.

    Parameters
    ----------
    model : PreTrainedModel
        BLOOM or MPT, or a module that contains one of them.

    Raises
    ------
    TypeError
        There is no BLOOM and no MPT in the model.
    ValueError
        MPT without ALiBi: its learned positions are not in transformers.
    NotImplementedError
        BLOOM with `slow_but_exact` and `pretraining_tp` > 1, or a module whose forward something else
        has replaced.

    Notes
    -----
    The bias is slope * (key position - query position), with the positions that tokens had when they
    came; the slopes are those of the model's own function, in float32. transformers rounds BLOOM's
    bias to the dtype of the model; the operator does not.

    Examples
    --------
    >>> from transformers import BloomConfig, BloomForCausalLM
    >>> from h2o_kv import EvictionPolicy, H2OCache
    >>> from h2o_kv.hf import enable_alibi
    >>> model = BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4))
    >>> enable_alibi(model)
    >>> model.config._attn_implementation
    'h2o'
    >>> cache = H2OCache(model.config, EvictionPolicy(num_heavy=4, num_recent=4))
    """
    parts = list(_parts(model))
    if not parts:
        raise TypeError(
            "enable_alibi: model must be or contain one of "
            f"{', '.join(sorted(ALIBI_MODELS))}, got {type(model).__name__}"
        )
    for part in parts:
        part.check()
    generation = [
        module.generation_config
        for module in model.modules()
        if vars(module).get("generation_config") is not None
    ]
    for part in parts:
        part.enable(generation)


def disable_alibi(model: Any) -> None:
    """Undo `enable_alibi`: every class and setting is again what it was.

    Parameters
    ----------
    model : PreTrainedModel
        Enabled or not.
    """
    for part in _parts(model):
        part.disable()


@dataclass(frozen=True)
class _Part:
    """A backbone with ALiBi, and what there is to change on it."""

    backbone: Any
    attention: type[torch.nn.Module]  # Class of its attention modules
    forward: type  # Ours, before it is joined to that class
    slopes: Callable[[Any], Tensor]  # float32, [num_heads]

    def modules(self) -> list[Any]:
        return [module for module in self.backbone.modules() if isinstance(module, self.attention)]

    def check(self) -> None:
        config = self.backbone.config
        if config.model_type == "mpt" and not config.attn_config.alibi:
            raise ValueError(
                "enable_alibi: attn_config.alibi of MPT must be True, got False; transformers has no "
                "learned positions for MPT"
            )
        if config.model_type == "bloom" and config.slow_but_exact and config.pretraining_tp > 1:
            raise NotImplementedError(
                "enable_alibi: slow_but_exact of BLOOM must be False, got True with "
                f"pretraining_tp={config.pretraining_tp}"
            )
        for module in self.modules():
            if "forward" in vars(module):
                raise NotImplementedError(
                    "enable_alibi: forward of an attention module must be that of its class, got "
                    f"{module.forward!r} on the module itself (a hook?); call enable_alibi first"
                )

    def enable(self, generation_configs: list[Any]) -> None:
        config = self.backbone.config
        settings = [
            (config, "_attn_implementation", ATTENTION_NAME),
            *((generation, "use_cache", True) for generation in generation_configs),
        ]
        if _FORMER not in vars(self.backbone):
            former = [(owner, name, getattr(owner, name)) for owner, name, _ in settings]
            setattr(self.backbone, _FORMER, former)
        for owner, name, value in settings:
            setattr(owner, name, value)
        slopes = self.slopes(self.backbone)
        for module in self.modules():
            module.config = config
            setattr(module, _SLOPES, slopes)
            if not isinstance(module, _AlibiAttention):
                parent: Any = type(module)
                module.__class__ = _enabled_class(self.forward, parent)

    def disable(self) -> None:
        if _FORMER not in vars(self.backbone):
            return
        for owner, name, value in vars(self.backbone).pop(_FORMER):
            setattr(owner, name, value)
        for module in self.modules():
            if isinstance(module, _AlibiAttention):
                module.__class__ = type(module).__bases__[1]
                del module.config
                delattr(module, _SLOPES)


class _AlibiAttention:
    """What the subclasses of BLOOM's and MPT's attention share."""

    config: Any
    layer_idx: int
    training: bool

    def __reduce__(self) -> tuple[Any, ...]:
        # The class is made at run time, so copying and pickling name what it is made of.
        ours, parent = type(self).__bases__
        return _new_module, (ours, parent), vars(self)

    def attend(
        self,
        cache: H2OCache,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        visible: Tensor,
        scale: float,
        **kwargs: Any,
    ) -> Tensor:
        """Attention over what the cache holds and the new tokens.

        Parameters
        ----------
        cache : H2OCache
        query, key, value : Tensor, [batch, num_heads, num_new, head_dim]
        visible : Tensor, bool, [batch, 1, num_new, num_new or columns seen + num_new]
        scale : float
            Factor on query . key.
        **kwargs
            Of the attention function.

        Returns
        -------
        Tensor, [batch, num_new, num_heads * head_dim]
        """
        slopes: Tensor = getattr(self, _SLOPES)
        if slopes.device != query.device:
            slopes = slopes.to(query.device)
            setattr(self, _SLOPES, slopes)
        key, value = cache.update(key, value, self.layer_idx)
        output, _ = ALL_ATTENTION_FUNCTIONS[ATTENTION_NAME](
            self,
            query,
            key,
            value,
            visible[..., -query.shape[2] :],
            scaling=scale,
            alibi_slopes=slopes,
            **kwargs,
        )
        context: Tensor = output.flatten(2)
        return context


class _BloomForward(_AlibiAttention):
    query_key_value: Any
    dense: Any
    _reshape: Any
    inv_norm_factor: float
    attention_dropout: Any
    hidden_dropout: float

    def forward(
        self,
        hidden_states: Tensor,
        residual: Tensor,
        alibi: Tensor,
        attention_mask: Tensor,
        layer_past: Any = None,
        **kwargs: Any,
    ) -> Any:
        """BLOOM's; `attention_mask` is added to the logits, 0 = visible."""
        if not isinstance(layer_past, H2OCache):
            return super().forward(  # type: ignore[misc]
                hidden_states, residual, alibi, attention_mask, layer_past=layer_past, **kwargs
            )
        query, key, value = self._reshape(self.query_key_value(hidden_states))
        context = self.attend(
            layer_past,
            query,
            key,
            value,
            attention_mask == 0,
            self.inv_norm_factor,
            dropout=self.attention_dropout.p if self.training else 0.0,
            **kwargs,
        )
        output = torch.nn.functional.dropout(
            self.dense(context), self.hidden_dropout, self.training
        )
        return residual + output, None


class _MptForward(_AlibiAttention):
    Wqkv: Any
    out_proj: Any
    clip_qkv: float | None
    n_heads: int
    softmax_scale: float
    attn_dropout_p: float

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """MPT's; `attention_mask` is True where a key is hidden."""
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        if not isinstance(cache, H2OCache):
            return super().forward(hidden_states, *args, **kwargs)  # type: ignore[misc]
        qkv = self.Wqkv(hidden_states)
        if self.clip_qkv:
            qkv = qkv.clamp(min=-self.clip_qkv, max=self.clip_qkv)
        query, key, value = (
            part.unflatten(2, (self.n_heads, -1)).transpose(1, 2) for part in qkv.chunk(3, dim=2)
        )
        context = self.attend(
            cache,
            query,
            key,
            value,
            ~kwargs["attention_mask"],
            self.softmax_scale,
            dropout=self.attn_dropout_p if self.training else 0.0,
        )
        return self.out_proj(context), None


@functools.cache
def _enabled_class(ours: type, parent: type) -> type:
    return type(f"H2O{parent.__name__}", (ours, parent), {"__module__": __name__})


def _new_module(ours: type, parent: type) -> Any:
    return object.__new__(_enabled_class(ours, parent))


def _parts(model: Any) -> Iterator[_Part]:
    """Every backbone with ALiBi in the model."""
    # Here, because importing a model of transformers takes a while.
    from transformers.models.bloom.modeling_bloom import BloomAttention, BloomModel
    from transformers.models.mpt.modeling_mpt import MptAttention, MptModel

    modules = model.modules() if isinstance(model, torch.nn.Module) else ()
    for module in modules:
        if isinstance(module, BloomModel):
            yield _Part(module, BloomAttention, _BloomForward, _bloom_slopes)
        if isinstance(module, MptModel):
            yield _Part(module, MptAttention, _MptForward, _mpt_slopes)


def _bloom_slopes(model: Any) -> Tensor:
    # The bias of the second of two tokens, which is at position 1.
    mask = torch.ones(1, 2, dtype=torch.long)
    bias: Tensor = model.build_alibi_tensor(mask, model.num_heads, torch.float32)
    return bias[:, 0, 1].contiguous()


def _mpt_slopes(model: Any) -> Tensor:
    # The bias of the first of two tokens, at distance -1; asked for as the model does.
    bias: Tensor = model.build_mpt_alibi_tensor(model.num_heads, 2)
    return -bias[:, 0, 0].contiguous()
