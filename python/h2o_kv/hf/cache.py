"""H2OCache: the transformers cache whose layers hold the four tensors of one H2O layer each.

transformers hands a cache only the new keys and values, never the query, so `update` stores
nothing: it puts the layer on the key tensor and returns it, the attention function "h2o"
(attention.py) finds the layer there, and `H2OLayer.attend` does the whole step in one call of
h2o_attention_decode.
"""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.fx.experimental.sym_node import DynamicInt
from transformers import PretrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin

from h2o_kv._C import Budget, EvictionPolicy

__all__ = ["ATTENTION_NAME", "LAYER_ATTRIBUTE", "CacheBytes", "H2OCache", "H2OLayer"]

# Name under which the attention and the mask function are registered.
ATTENTION_NAME = "h2o"
# Attribute of the key tensor by which the attention function finds its layer: the one channel that
# every supported release and model family leaves open, and that is safe between threads.
LAYER_ATTRIBUTE = "_h2o_layer"

_PREFILLS = ("one_shot", "streaming")
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
# Models whose position embedding is a table with an end, and the config key that says where.
_LEARNED_POSITIONS = {"opt": "max_position_embeddings"}
# What a model must share with the config of the cache.
_MODEL_SHAPE = (
    "model_type",
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
)
# Tensors of a layer with one entry a row; whatever moves a row moves all of them.
_ROW_STATE = ("keys", "values", "scores", "positions", "tokens_seen", "row_budget")
# The one overload, found once.
_attention_decode = torch.ops.h2o.h2o_attention_decode.default


@dataclass(frozen=True)
class CacheBytes:
    """Bytes that a cache has allocated, over all layers.

    Attributes
    ----------
    kv : int
        Keys and values.
    bookkeeping : int
        Scores and positions.
    """

    kv: int
    bookkeeping: int

    @property
    def total(self) -> int:
        """Their sum."""
        return self.kv + self.bookkeeping


@dataclass(frozen=True)
class _Settings:
    """What all layers of a cache share and nothing changes."""

    config: Any
    policy: EvictionPolicy
    prefill: str
    prefill_chunk: int
    prompt_length: int | tuple[int, ...] | None
    dtype: torch.dtype | None
    max_positions: int | None
    whole_masks: bool

    def __deepcopy__(self, memo: dict[int, Any]) -> _Settings:
        # A copied cache belongs to the same model: its config must stay the model's own object,
        # or a later model.set_attn_implementation() would go unnoticed.
        return self

    def check_pairing(self) -> None:
        attention = self.config._attn_implementation
        if attention != ATTENTION_NAME:
            raise RuntimeError(
                f'H2OCache: attn_implementation must be "{ATTENTION_NAME}", got "{attention}"; '
                f'call model.set_attn_implementation("{ATTENTION_NAME}") and make the cache from '
                "model.config"
            )


class _Variable(DynamicInt):
    """An int that torch.compile does not take for a constant: the next one needs no other graph.

    Elsewhere an int like any other, and so is what is computed from it.
    """

    __add__ = int.__add__
    __sub__ = int.__sub__
    __repr__ = int.__repr__


@dataclass
class _Handover:
    """The layer that returned its keys from `update` and was not found by an attention function."""

    layer_idx: int | None = None


class H2OLayer(CacheLayerMixin):  # type: ignore[misc]
    """State of one decoder layer.

    The tensors are allocated at the first forward, on the device of its keys, and written in place
    by the operator. They are None before that.

    Attributes
    ----------
    k_cache, v_cache : Tensor, [batch, num_kv_heads, capacity, head_dim]
        What each slot holds; the same tensors as `keys` and `values`.
    scores : Tensor, float32 (float64 for float64 caches), [batch, num_kv_heads, capacity]
        Attention mass that each slot's token received so far.
    positions : Tensor, int32, [batch, num_kv_heads, capacity]
        Which token each slot holds, counted in the real tokens of its row; -1 = empty.
    tokens_seen : Tensor, int32, [batch]
        Real tokens of each row so far: the position of its next token.
    columns_seen : int
        Columns of input_ids so far, padding included: what `get_seq_length` answers.
    budget : Budget or None
        Budget of every row, or the largest one where they differ; its total is the capacity.
    row_budget : Tensor, int32, [batch, 3], or None
        (num_sink, num_heavy, num_recent) of each row where they differ.
    last_evicted : Tensor, int32, [batch, num_kv_heads, num_new], or None
        Positions that left in the last forward, -1 = none; see h2o_attention_decode.
    """

    is_sliding = False
    # True would make generate() compile the decode step by itself on CUDA; not offered yet.
    is_compileable = False
    is_croppable = False

    def __init__(self, settings: _Settings, handover: _Handover, layer_idx: int) -> None:
        super().__init__()
        self.settings = settings
        self.layer_idx = layer_idx
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.scores: Tensor | None = None
        self.positions: Tensor | None = None
        self.tokens_seen: Tensor | None = None
        self.columns_seen = 0
        self.budget: Budget | None = None
        self.row_budget: Tensor | None = None
        self.last_evicted: Tensor | None = None
        self._handover = handover
        self._known_config = settings.config
        self._window: int | None = None
        self._one: Tensor | None = None  # int32, [1]: torch adds it faster than a number.

    def __repr__(self) -> str:
        capacity = None if self.keys is None else self.keys.shape[2]
        return f"H2OLayer(layer_idx={self.layer_idx}, capacity={capacity})"

    @property
    def k_cache(self) -> Tensor | None:
        """Keys, [batch, num_kv_heads, capacity, head_dim]."""
        return self.keys

    @property
    def v_cache(self) -> Tensor | None:
        """Values, [batch, num_kv_heads, capacity, head_dim]."""
        return self.values

    @property
    def supports_early_init(self) -> bool:
        """Whether the capacity is known before the prompt."""
        return not self.settings.policy.has_ratio or self.settings.prompt_length is not None

    def window(self) -> int | None:
        """`configured_window` as it was when this sequence started: a config is slow to ask."""
        if self.columns_seen == 0:
            self._window = self.configured_window()
        return self._window

    def configured_window(self) -> int | None:
        """Sliding window, in tokens, that the model's config gives to this layer; None = none."""
        config = self.settings.config
        layer_types = getattr(config, "layer_types", None)
        if layer_types and layer_types[self.layer_idx] != "sliding_attention":
            return None
        if getattr(config, "use_sliding_window", None) is False:
            return None
        return getattr(config, "sliding_window", None) or None

    # ---- The step.

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Hand the layer over to the attention function, on the key tensor. Stores nothing."""
        self._handover.layer_idx = self.layer_idx
        # A tensor object of our own carries the layer.
        key_states = key_states.view_as(key_states)
        setattr(key_states, LAYER_ATTRIBUTE, self)
        return key_states, value_states

    def take_over(self, config: Any) -> None:
        """Note that the attention function has found this layer; `config` is that of its module.

        Raises
        ------
        ValueError
            The module belongs to another model than the cache.
        """
        self._handover.layer_idx = None
        if config is None or config is self._known_config:
            return
        ours, theirs = _model_shape(self.settings.config), _model_shape(config)
        if ours != theirs:
            raise ValueError(
                f"H2OCache: the model must be the one of the cache's config, {ours}, got {theirs}"
            )
        self._known_config = config

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scale: float | None,
    ) -> Tensor:
        """Attend, score, evict and store the new tokens: one call of h2o_attention_decode.

        Parameters
        ----------
        query : Tensor, [batch, num_q_heads, num_new, head_dim]
        key, value : Tensor, [batch, num_kv_heads, num_new, head_dim]
            Any strides. Cast to the dtype of the cache.
        attention_mask : Tensor, bool, [batch, 1, 1, num_new], optional
            True = real token. A [batch, 1, num_new, num_new] mask is taken if it says the same:
            causal, and the padding.
        scale : float, optional
            Factor on query . key. Default head_dim ** -0.5.

        Returns
        -------
        output : Tensor, dtype of the query, [batch, num_new, num_q_heads, head_dim]
            Zeros where a token is padding.

        Raises
        ------
        ValueError
            The mask is of another kind, or the shapes are not those that the cache was filled with.
        """
        batch, _, num_new, _ = key.shape
        real = None
        if attention_mask is not None:
            real = self._real_tokens(attention_mask, batch, num_new)
        if self.columns_seen == 0:
            self._start(key, value, real)
        elif batch != self.batch_size:
            raise ValueError(
                f"H2OCache: layer {self.layer_idx} holds batch={self.batch_size}, got {batch} rows; "
                "use a new cache or reset() for another batch"
            )
        assert self.keys is not None
        assert self.tokens_seen is not None
        assert self.budget is not None

        position_new, added = self._number(real, num_new)
        dtype = self.keys.dtype
        output, evicted = _attention_decode(
            _cast(query, dtype),
            self.keys,
            self.values,
            self.scores,
            self.positions,
            _cast(key, dtype),
            _cast(value, dtype),
            position_new,
            self.budget.num_sink,
            self.budget.num_heavy,
            self.budget.num_recent,
            gqa_reduce=self.settings.policy.gqa_reduce,
            scale=scale,
            chunk=self._chunk(num_new),
            row_budget=self.row_budget,
        )
        self.tokens_seen.add_(added)
        self.columns_seen += num_new
        if num_new > 1 and not torch.compiler.is_compiling():
            self.columns_seen = _Variable(self.columns_seen)
        self.last_evicted = evicted
        return _cast(output, query.dtype).transpose(1, 2).contiguous()

    def _number(self, real: Tensor | None, num_new: int) -> tuple[Tensor, Tensor | int]:
        """Positions of the new tokens, int32 [batch, num_new], and how many of each row are real.

        They count the real tokens of a row, so a padded row is numbered like the row alone.
        """
        assert self.tokens_seen is not None
        assert self._one is not None
        first = self.tokens_seen.unsqueeze(1)
        if real is None:
            if num_new == 1:
                return first, self._one
            columns = torch.arange(num_new, dtype=torch.int32, device=first.device)
            return first + columns, num_new
        if num_new == 1:  # A decode step on a device: no kernel launch more than it needs.
            return torch.where(real, first, -1), real[:, 0]
        rank = real.cumsum(1, dtype=torch.int32)
        return torch.where(real, first + (rank - 1), -1), rank[:, -1]

    def _chunk(self, num_new: int) -> int:
        if num_new > 1 and self.settings.prefill == "streaming":
            return min(self.settings.prefill_chunk, num_new)
        return max(num_new, 1)

    def _real_tokens(self, attention_mask: Tensor, batch: int, num_new: int) -> Tensor:
        """Which new tokens are real, bool [batch, num_new]."""
        mask = attention_mask
        # Columns of earlier tokens, if the model has them in its mask, say nothing new.
        whole = self.settings.whole_masks and mask.shape[-1] == self.columns_seen + num_new
        if (
            mask.ndim != 4
            or mask.shape[1] != 1
            or mask.shape[2] not in (1, num_new)
            or not (whole or (mask.dtype == torch.bool and mask.shape[3] == num_new))
        ):
            raise ValueError(
                "H2OCache: attention_mask must be 2-D (1 = real token, 0 = padding); which tokens "
                "are attended is the cache's own business, got a mask of shape "
                f"{list(mask.shape)} and dtype {mask.dtype} for {num_new} new tokens"
            )
        if mask.dtype != torch.bool:
            mask = mask == 0  # What is added to the logits.
        mask = mask[:, 0, :, -num_new:]
        real = mask[:, -1]
        if mask.shape[1] > 1:
            causal = torch.ones(num_new, num_new, dtype=torch.bool, device=mask.device).tril()
            if not torch.equal(mask, real[:, None] & causal):
                raise ValueError(
                    "H2OCache: attention_mask must hide later tokens and padding, nothing else, "
                    f"got another pattern of shape {list(attention_mask.shape)}"
                )
        return real.expand(batch, num_new)

    # ---- Allocation.

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        """Allocate for the shape, dtype and device of these keys; there may be 0 of them.

        Raises
        ------
        ValueError
            A ratio needs the prompt: give H2OCache a prompt_length.
        """
        if not self.supports_early_init:
            raise ValueError(
                "H2OCache: prompt_length must be given to allocate before the prompt with a policy "
                f"of ratios, got {self.settings.policy!r}"
            )
        self._allocate(key_states, key_states if value_states is None else value_states, None)

    def _start(self, key: Tensor, value: Tensor, real: Tensor | None) -> None:
        lengths = None
        if self.settings.policy.has_ratio and self.settings.prompt_length is None:
            batch, _, num_new, _ = key.shape
            lengths = [num_new] * batch if real is None else real.sum(1).tolist()
        self._allocate(key, value, lengths)

    def _allocate(self, key: Tensor, value: Tensor, lengths: Sequence[int] | None) -> None:
        """Resolve the budget of each row and make empty tensors, or keep those that fit."""
        batch, num_kv_heads, _, head_dim = key.shape
        if value.shape[3] != head_dim:
            raise ValueError(
                "H2OCache: keys and values must have the same head_dim, got "
                f"{head_dim} and {value.shape[3]}"
            )
        if lengths is None:
            lengths = self._given_lengths(batch)
        budgets = [self.settings.policy.resolve(length) for length in lengths]
        self.budget = max(budgets, key=lambda budget: budget.total)
        shape = (batch, num_kv_heads, self.budget.total)
        dtype = self.settings.dtype or torch.promote_types(key.dtype, value.dtype)
        self.device = key.device
        # Made as ordinary tensors even under inference_mode, so that the cache can be used outside.
        with torch.inference_mode(False):
            self.row_budget = None
            if any(budget != self.budget for budget in budgets):
                self.row_budget = torch.tensor(
                    [tuple(budget) for budget in budgets], dtype=torch.int32, device=self.device
                )
            if (
                self.keys is not None
                and self.keys.shape == (*shape, head_dim)
                and self.keys.dtype == dtype
                and self.keys.device == self.device
            ):
                return
            score_dtype = torch.float64 if dtype == torch.float64 else torch.float32
            try:
                keys = torch.zeros(*shape, head_dim, dtype=dtype, device=self.device)
                values = torch.zeros(*shape, head_dim, dtype=dtype, device=self.device)
                scores = torch.zeros(shape, dtype=score_dtype, device=self.device)
                positions = torch.full(shape, -1, dtype=torch.int32, device=self.device)
            except torch.OutOfMemoryError:
                raise  # A device's own error says how much there is.
            except RuntimeError as error:
                num_bytes = 2 * math.prod((*shape, head_dim)) * dtype.itemsize
                raise MemoryError(
                    "H2OCache: the budget must fit into memory, got "
                    f"{self.budget.total} tokens: {num_bytes / 1e9:.1f} GB of keys and values in "
                    "each layer"
                ) from error
            self.keys, self.values, self.scores, self.positions = keys, values, scores, positions
            self.tokens_seen = torch.zeros(batch, dtype=torch.int32, device=self.device)
            self._one = torch.ones(1, dtype=torch.int32, device=self.device)
        self.batch_size = batch
        self.is_initialized = True

    def _given_lengths(self, batch: int) -> Sequence[int]:
        lengths = self.settings.prompt_length
        if not isinstance(lengths, tuple):
            return [lengths or 0] * batch
        if len(lengths) != batch:
            raise ValueError(
                f"H2OCache: prompt_length must have one entry a row = {batch}, got {len(lengths)}"
            )
        return lengths

    # ---- What transformers asks of a layer.

    def get_seq_length(self, *args: Any) -> int:
        """Columns seen, not slots in use: position ids and input slicing come from it."""
        return self.columns_seen

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """(length, offset) of the keys that a mask must cover: the new ones alone.

        Called before the embedding, so what no step could undo is refused here.
        """
        if isinstance(query_length, Tensor):  # cache_position, before transformers 5.12
            query_length = query_length.shape[0]
        self.settings.check_pairing()
        self._check_positions(query_length)
        return query_length, self.columns_seen

    def _check_positions(self, num_new: int) -> None:
        limit = self.settings.max_positions
        if limit is None or self.columns_seen + num_new <= limit:
            return
        # Columns of padding take no position; only here, past the limit, is it worth to look.
        seen = 0 if self.tokens_seen is None else int(self.tokens_seen.max())
        if seen + num_new > limit:
            raise ValueError(
                f"H2OCache: positions of this model must be < {limit} (max_position_embeddings), "
                f"got {num_new} new tokens after {seen}; evicting does not move positions"
            )

    def get_max_length(self) -> int:
        """-1: a layer of any budget takes any number of tokens."""
        return -1

    def get_max_cache_shape(self) -> int:
        """Name of `get_max_length` in earlier releases."""
        return -1

    def reset(self) -> None:
        """Forget everything, budgets of ratios included; the memory stays allocated."""
        self.columns_seen = 0
        self.budget = None
        self.row_budget = None
        self.last_evicted = None
        self._handover.layer_idx = None
        if self.is_initialized:
            assert self.keys is not None
            assert self.values is not None
            assert self.scores is not None
            assert self.positions is not None
            assert self.tokens_seen is not None
            self.keys.zero_()
            self.values.zero_()
            self.scores.zero_()
            self.positions.fill_(-1)
            self.tokens_seen.zero_()

    def crop(self, tokens_to_remove: int) -> None:
        """Not supported yet: what was evicted cannot be brought back.

        Parameters
        ----------
        tokens_to_remove : int
            <= 0: minus the number of tokens to remove; > 0 (transformers 4): tokens to keep.

        Raises
        ------
        NotImplementedError
            A token would have to be removed.
        """
        to_keep = tokens_to_remove if tokens_to_remove > 0 else self.columns_seen + tokens_to_remove
        remove = self.columns_seen - to_keep
        if remove > 0:
            raise NotImplementedError(
                f"H2OCache: crop is not yet supported, asked to remove {remove} of "
                f"{self.columns_seen} tokens (assisted decoding needs it)"
            )

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes the former row beam_idx[i]. In place."""
        self._take_rows(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row becomes `repeats` rows next to each other."""
        if self.keys is not None:
            rows = torch.arange(self.keys.shape[0], device=self.keys.device)
            self._take_rows(rows.repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices`: integers, or a bool for each row."""
        if self.keys is not None:
            rows = torch.arange(self.keys.shape[0], device=self.keys.device)
            self._take_rows(rows[indices.to(rows.device)])

    def _take_rows(self, index: Tensor) -> None:
        if self.keys is None:
            return
        same_batch = index.shape[0] == self.keys.shape[0]
        with torch.inference_mode(False), torch.no_grad():
            index = index.to(self.keys.device)
            for name in _ROW_STATE:
                state = getattr(self, name)
                if state is None:
                    continue
                rows = state.index_select(0, index)
                if same_batch:
                    state.copy_(rows)
                else:
                    setattr(self, name, rows)
            if self.last_evicted is not None:
                self.last_evicted = self.last_evicted.index_select(0, index)
        self.batch_size = index.shape[0]

    def copy_from(self, other: H2OLayer) -> None:
        """Become a copy of `other` that shares no memory with it."""
        for name in (*_ROW_STATE, "last_evicted", "_one"):
            state = getattr(other, name)
            with torch.inference_mode(False), torch.no_grad():
                setattr(self, name, None if state is None else state.clone())
        self.columns_seen = other.columns_seen
        self._window = other._window
        self.budget = other.budget
        self.is_initialized = other.is_initialized
        if other.keys is not None:
            self.device = other.keys.device
            self.batch_size = other.keys.shape[0]


class H2OCache(Cache):  # type: ignore[misc]
    """A KV cache of fixed size with Heavy-Hitter Oracle eviction, for `generate` and `forward`.

    Needs a model whose attn_implementation is "h2o"; any other raises. One cache serves one batch
    of sequences; `reset()` makes it ready for another.

    Parameters
    ----------
    config : PreTrainedConfig
        `model.config` of a decoder-only model.
    policy : EvictionPolicy
        How many tokens each row and KV head keeps. Ratios are of the real tokens of each row's
        prompt: its first forward, unless prompt_length says otherwise. In a padded batch the
        capacity is the largest row's budget and each row keeps to its own.
    prefill : {"one_shot", "streaming"}
        What a forward with several tokens does. one_shot: all of them attend before anything is
        evicted. streaming: they join `prefill_chunk` at a time, and later ones never see what left.
        A forward with one token is the paper's step in both.
    prefill_chunk : int
        Tokens that join together in a streaming prefill, counted in the real tokens of each row.
    prompt_length : int or sequence of int, optional
        Real tokens of the prompt, of every row or of each, that ratios are taken of. Needed when
        the prompt arrives in several forwards (`prefill_chunk_size` of generate, or by hand);
        counts need none.
    dtype : torch.dtype, optional
        Of keys and values in the cache. Default: that of the first keys and values.

    Raises
    ------
    TypeError
        An argument is of another type than above; True is no number of tokens.
    ValueError
        An argument is out of its range, or the model is of a kind that the cache cannot serve.

    Notes
    -----
    H2O (Zhang et al., NeurIPS 2023, arXiv 2306.14048). Positions are never renumbered: what stays
    keeps the position, and so the rotation, with which it came.

    Examples
    --------
    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from h2o_kv import EvictionPolicy, H2OCache
    >>> from h2o_kv.hf import cache_kwarg
    >>> config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=32,
    ...                      num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    >>> model = LlamaForCausalLM(config).eval()
    >>> model.set_attn_implementation("h2o")
    >>> cache = H2OCache(model.config, EvictionPolicy(num_heavy=4, num_recent=4))
    >>> prompt = torch.arange(3, 23)[None]
    >>> with torch.no_grad():
    ...     output = model(prompt, **{cache_kwarg(model): cache})
    >>> cache.get_seq_length(), int(cache.tokens_kept()[0].max())
    (20, 8)
    """

    layers: list[H2OLayer]

    def __init__(
        self,
        config: Any,
        policy: EvictionPolicy,
        *,
        prefill: str = "one_shot",
        prefill_chunk: int = 64,
        prompt_length: int | Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if not isinstance(config, PretrainedConfig):
            raise TypeError(
                f"H2OCache: config must be that of a model, model.config, got {config!r}"
            )
        if not isinstance(policy, EvictionPolicy):
            raise TypeError(f"H2OCache: policy must be an EvictionPolicy, got {policy!r}")
        if prefill not in _PREFILLS:
            raise ValueError(f'H2OCache: prefill must be one of {_PREFILLS}, got "{prefill}"')
        prefill_chunk = _count("H2OCache: prefill_chunk", prefill_chunk)
        if prefill_chunk < 1:
            raise ValueError(f"H2OCache: prefill_chunk must be >= 1, got {prefill_chunk}")
        if dtype is not None and dtype not in _DTYPES:
            error = ValueError if isinstance(dtype, torch.dtype) else TypeError
            names = ", ".join(map(str, _DTYPES))
            raise error(f"H2OCache: dtype must be one of {names}, got {dtype!r}")
        decoder = _decoder_config(config)
        self._settings = _Settings(
            config=decoder,
            policy=policy,
            prefill=prefill,
            prefill_chunk=prefill_chunk,
            prompt_length=_prompt_length(prompt_length),
            dtype=dtype,
            max_positions=getattr(decoder, _LEARNED_POSITIONS.get(decoder.model_type, ""), None),
            whole_masks=_builds_whole_masks(decoder),
        )
        self._handover = _Handover()
        super().__init__(
            layers=[
                H2OLayer(self._settings, self._handover, i)
                for i in range(decoder.num_hidden_layers)
            ]
        )

    def __repr__(self) -> str:
        return (
            f"H2OCache({len(self.layers)} layers, {self.policy!r}, prefill={self.prefill!r}, "
            f"seen={self.get_seq_length()})"
        )

    @property
    def policy(self) -> EvictionPolicy:
        """How many tokens each row and KV head keeps."""
        return self._settings.policy

    @property
    def prefill(self) -> str:
        """Which prefill the results of this cache come from: "one_shot" or "streaming"."""
        return self._settings.prefill

    @property
    def prefill_chunk(self) -> int:
        """Tokens that join together in a streaming prefill."""
        return self._settings.prefill_chunk

    @property
    def budgets(self) -> tuple[Budget, ...] | None:
        """Budget of each row; None before the first forward."""
        layer = self.layers[0]
        if layer.budget is None or layer.keys is None:
            return None
        if layer.row_budget is None:
            return (layer.budget,) * layer.keys.shape[0]
        return tuple(
            Budget(num_sink=sink, num_heavy=heavy, num_recent=recent)
            for sink, heavy, recent in layer.row_budget.tolist()
        )

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """Take the new keys and values of a layer from the model; stores nothing.

        Raises
        ------
        RuntimeError
            The attention is not "h2o", the previous layer's attention never asked for its cache, or
            an earlier forward stopped half-way.
        ValueError
            The model has other layers than the cache.
        """
        num_layers = len(self.layers)
        if layer_idx == 0:  # Once a forward.
            self._settings.check_pairing()
        if layer_idx >= num_layers:
            raise ValueError(
                f"H2OCache: layer_idx must be < num_hidden_layers = {num_layers} of the config "
                f"that the cache was made from, got {layer_idx}"
            )
        if self._handover.layer_idx is not None:
            raise RuntimeError(
                f"H2OCache: the attention of layer {self._handover.layer_idx} did not use its "
                f'cache; every layer must run attn_implementation="{ATTENTION_NAME}" (after an '
                "interrupted forward: reset())"
            )
        if layer_idx == 0 and self.layers[0].columns_seen != self.layers[-1].columns_seen:
            raise RuntimeError(
                f"H2OCache: all {num_layers} layers must have seen the same tokens, got layer 0 at "
                f"{self.layers[0].columns_seen}, layer {num_layers - 1} at "
                f"{self.layers[-1].columns_seen}; the model has fewer layers than the cache, or a "
                "forward stopped half-way: reset()"
            )
        return self.layers[layer_idx].update(key_states, value_states, *args, **kwargs)

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        """-1: a cache of any budget takes any number of tokens."""
        return -1

    def tokens_kept(self) -> list[Tensor]:
        """Occupied slots of each layer, int64, [batch, num_kv_heads]; empty before any forward."""
        return [
            (layer.positions >= 0).sum(-1) for layer in self.layers if layer.positions is not None
        ]

    def nbytes(self) -> CacheBytes:
        """Bytes allocated; they do not grow with the tokens seen."""
        kv = bookkeeping = 0
        for layer in self.layers:
            if layer.is_initialized:
                kv += _nbytes(layer.keys) + _nbytes(layer.values)
                bookkeeping += _nbytes(layer.scores) + _nbytes(layer.positions)
        return CacheBytes(kv=kv, bookkeeping=bookkeeping)

    def fork(self, n: int) -> H2OCache:
        """Make a new cache in which each row stands `n` times, next to each other.

        Copies everything; the two share no memory.

        Parameters
        ----------
        n : int
            Copies of each row, >= 1.

        Raises
        ------
        TypeError
            n is no integer.
        ValueError
            n < 1.
        """
        n = _count("H2OCache.fork: n", n)
        if n < 1:
            raise ValueError(f"H2OCache.fork: n must be >= 1, got {n}")
        settings = self._settings
        copy = H2OCache(
            settings.config,
            settings.policy,
            prefill=settings.prefill,
            prefill_chunk=settings.prefill_chunk,
            prompt_length=settings.prompt_length,
            dtype=settings.dtype,
        )
        for layer, source in zip(copy.layers, self.layers, strict=True):
            layer.copy_from(source)
            if n > 1:
                layer.batch_repeat_interleave(n)
        return copy

    def save(self, file: str | os.PathLike[str]) -> NoReturn:
        """Not supported yet.

        Raises
        ------
        NotImplementedError
            Always.
        """
        raise NotImplementedError(_no_saved_sessions("save"))

    @classmethod
    def load(cls, file: str | os.PathLike[str], config: Any) -> NoReturn:
        """Not supported yet.

        Raises
        ------
        NotImplementedError
            Always.
        """
        raise NotImplementedError(_no_saved_sessions("load"))


def _decoder_config(config: Any) -> Any:
    """Config of the decoder, if the cache can serve it."""
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            "H2OCache: the model must be decoder-only, got is_encoder_decoder=True "
            f"({config.model_type})"
        )
    decoder = config.get_text_config(decoder=True)
    if getattr(decoder, "add_cross_attention", False):
        raise ValueError("H2OCache: cross-attention is not supported, got add_cross_attention=True")
    other = sorted(set(getattr(decoder, "layer_types", None) or ()) - _LAYER_TYPES)
    if other:
        raise ValueError(
            f"H2OCache: layer_types must be among {sorted(_LAYER_TYPES)}, got {other} "
            f"({decoder.model_type})"
        )
    if getattr(decoder, "num_kv_shared_layers", 0):
        raise ValueError(
            "H2OCache: layers that share keys and values are not supported, got "
            f"num_kv_shared_layers={decoder.num_kv_shared_layers}"
        )
    return decoder


def _builds_whole_masks(decoder: Any) -> bool:
    """Whether the model ignores the mask function and adds a float mask over all columns seen.

    OPT does, up to the release in which it took transformers' common masks.
    """
    if decoder.model_type != "opt":
        return False
    from transformers.models.opt import modeling_opt

    return not hasattr(modeling_opt, "create_causal_mask")


def _prompt_length(value: int | Sequence[int] | None) -> int | tuple[int, ...] | None:
    if value is None:
        return None
    name = "H2OCache: prompt_length"
    # Tensors and arrays without a dimension are numbers.
    is_sequence = hasattr(value, "__iter__") and getattr(value, "ndim", 1) > 0
    is_sequence = is_sequence and not isinstance(value, str)
    given: Any = value if is_sequence else (value,)
    lengths = tuple(_count(name, length) for length in given)
    if not lengths or min(lengths) < 1:
        raise ValueError(f"{name} must be >= 1 in every row, got {value}")
    return lengths if is_sequence else lengths[0]


def _count(name: str, value: Any) -> int:
    """The value as an int, if it is an integer and no bool."""
    if not isinstance(value, bool):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise TypeError(f"{name} must be an integer, got {value!r}")


def _no_saved_sessions(method: str) -> str:
    return (
        f"H2OCache.{method}: saving a cache to a file and loading it is not supported yet; the "
        "state of a layer is in layers[i].k_cache, v_cache, scores and positions"
    )


def _model_shape(config: Any) -> dict[str, Any]:
    return {name: getattr(config, name, None) for name in _MODEL_SHAPE}


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """`tensor.to(dtype)`, which takes longer to find out that it has nothing to do."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def _nbytes(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.nbytes
