"""One decoder layer's share of an H2OCache: its four tensors, and the step on them.

transformers hands a cache only the new keys and values, never the query, so `update` stores
nothing: it puts the layer on the key tensor and returns it, the attention function "h2o"
(attention.py) finds the layer there, and `H2OLayer.attend` does the whole step in one call of
h2o_attention_decode.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx.experimental.sym_node import DynamicInt
from transformers.cache_utils import CacheLayerMixin

from h2o_kv._C import Budget, EvictionPolicy
from h2o_kv.hf.journal import Entry, Forward, Journal

__all__ = [
    "ALIBI_MODELS",
    "ATTENTION_NAME",
    "LAYER_ATTRIBUTE",
    "OPTIONS",
    "STATE_TENSORS",
    "H2OLayer",
    "Handover",
    "LayerState",
    "Settings",
    "model_shape",
]

# Name under which the attention and the mask function are registered.
ATTENTION_NAME = "h2o"
# Models whose attention has to be told of an H2OCache (alibi.py).
ALIBI_MODELS = frozenset({"bloom", "mpt"})
# Attribute of the key tensor by which the attention function finds its layer: the one channel that
# every supported release and model family leaves open, and that is safe between threads.
LAYER_ATTRIBUTE = "_h2o_layer"
# What a model must share with the config of the cache.
_MODEL_SHAPE = (
    "model_type",
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
)
# Tensors of a layer with one entry a slot, and with one entry a row; whatever moves a slot or a row
# moves all of them.
_SLOT_STATE = ("keys", "values", "scores", "positions")
_ROW_STATE = (*_SLOT_STATE, "tokens_seen", "row_budget")
# Settings that are keyword arguments of H2OCache.
OPTIONS = ("prefill", "prefill_chunk", "prompt_length", "dtype", "max_rollback")
# With the one that every step makes anew, all tensors of a layer: what is copied and saved.
STATE_TENSORS = (*_ROW_STATE, "last_evicted")
# Tokens that can be taken back where nobody has said how many: transformers drafts 20 at most, unless
# it is told otherwise.
_MAX_ROLLBACK = 32
# The one overload, found once.
_attention_decode = torch.ops.h2o.h2o_attention_decode.default


@dataclass(frozen=True)
class Settings:
    """What all layers of a cache share and nothing changes."""

    config: Any
    policy: EvictionPolicy
    prefill: str
    prefill_chunk: int
    prompt_length: int | tuple[int, ...] | None
    dtype: torch.dtype | None
    max_rollback: int | None
    max_positions: int | None
    whole_masks: bool

    def __deepcopy__(self, memo: dict[int, Any]) -> Settings:
        # A copied cache belongs to the same model: its config must stay the model's own object,
        # or a later model.set_attn_implementation() would go unnoticed.
        return self

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


class _Variable(DynamicInt):
    """An int that torch.compile does not take for a constant: the next one needs no other graph.

    Elsewhere an int like any other, and so is what is computed from it.
    """

    __add__ = int.__add__
    __sub__ = int.__sub__
    __repr__ = int.__repr__


@dataclass
class Handover:
    """The layer that returned its keys from `update` and was not found by an attention function."""

    layer_idx: int | None = None


@dataclass(frozen=True)
class LayerState:
    """All that distinguishes a layer from a new one of the same settings.

    Attributes
    ----------
    columns_seen : int
    budget : Budget or None
    window : int or None
        Sliding window of the model when the sequence started.
    tensors : dict of str to Tensor
        Those of STATE_TENSORS that there are.
    """

    columns_seen: int
    budget: Budget | None
    window: int | None
    tensors: dict[str, Tensor]


class _NewTokens(NamedTuple):
    """What a forward brings, in the dtype of the cache."""

    query: Tensor  # [batch, num_q_heads, num_new, head_dim]
    key: Tensor  # [batch, num_kv_heads, num_new, head_dim], and so is value
    value: Tensor
    position: Tensor  # int32, [batch, num_new]; -1 = padding
    added: Tensor | int  # how many of each row are real
    scale: float | None


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
    journal : Journal or None
        What `crop` can take back, while forwards are recorded.
    """

    is_sliding = False
    # True would make generate() compile the decode step by itself on CUDA; not offered yet.
    is_compileable = False

    def __init__(self, settings: Settings, handover: Handover, layer_idx: int) -> None:
        super().__init__()
        self.settings = settings
        self.layer_idx = layer_idx
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.scores: Tensor | None = None
        self.positions: Tensor | None = None
        self.tokens_seen: Tensor | None = None
        self.columns_seen = 0
        self.budget = None
        self.row_budget: Tensor | None = None
        self.last_evicted: Tensor | None = None
        self.journal: Journal | None = None
        self._in_prompt = False  # While recording: whether some row's prompt may still go on.
        self._record_from_the_start()
        self._handover = handover
        self._known_config = settings.config
        self._gqa_reduce = settings.policy.gqa_reduce
        self._window: int | None = None
        self._alibi_slopes: Tensor | None = None  # [num_q_heads]: those of the latest step
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
    def budget(self) -> Budget | None:
        """Budget of every row, or the largest one where they differ."""
        return self._budget

    @budget.setter
    def budget(self, budget: Budget | None) -> None:
        self._budget = budget
        # As the operator takes it: a step does not ask C++ for each.
        self._counts: tuple[int, ...] = () if budget is None else tuple(budget)

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
        ours, theirs = model_shape(self.settings.config), model_shape(config)
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
        alibi_slopes: Tensor | None = None,
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
        alibi_slopes : Tensor, float32 or float64, [num_q_heads], optional
            Adds slope * (key position - query position) to the logits.

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

        self._alibi_slopes = alibi_slopes
        dtype = self.keys.dtype
        vectors = _cast(query, dtype), _cast(key, dtype), _cast(value, dtype)
        new = _NewTokens(*vectors, *self._number(real, num_new), scale)
        output = self._join(new) if self.journal is None else self._recorded_step(self.journal, new)
        self.columns_seen += num_new
        if num_new > 1 and not torch.compiler.is_compiling():
            self.columns_seen = _Variable(self.columns_seen)
        return _cast(output, query.dtype).transpose(1, 2).contiguous()

    def _step(self, new: _NewTokens, chunk: int, **room: Tensor) -> Tensor:
        """Call h2o_attention_decode on the state of this layer; `room`: k_evicted and v_evicted."""
        assert self.tokens_seen is not None
        output: Tensor
        output, self.last_evicted = _attention_decode(
            new.query,
            self.keys,
            self.values,
            self.scores,
            self.positions,
            new.key,
            new.value,
            new.position,
            *self._counts,
            gqa_reduce=self._gqa_reduce,
            scale=new.scale,
            chunk=chunk,
            alibi_slopes=self._alibi_slopes,
            row_budget=self.row_budget,
            **room,
        )
        self.tokens_seen.add_(new.added)
        return output

    def _join(self, new: _NewTokens) -> Tensor:
        """Let new tokens join as the cache's prefill says."""
        return self._step(new, self._chunk(new.key.shape[2]))

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

    # ---- Steps that can be taken back.

    def _recorded_step(self, journal: Journal, new: _NewTokens) -> Tensor:
        """Do the step of `attend`, so that `crop` can undo it.

        Tokens of the prompt join as the cache's prefill says, and so do those of a forward that is
        too long to consist of drafts; all others join one by one and are recorded.
        """
        num_new = new.key.shape[2]
        in_prompt = self._prompt_columns(new.position)
        if not journal.takes(num_new - in_prompt):
            journal.clear(unverified=num_new)
            return self._join(new)
        if in_prompt == 0:
            return self._verify(journal, new)
        journal.clear()
        if in_prompt == num_new:
            return self._join(new)
        # The prompt, then its first drafts. Those in memory of their own: a view would keep all.
        vectors, position = new[:3], new.position
        q, k, v = (tensor[:, :, :in_prompt] for tensor in vectors)
        first = position[:, :in_prompt]
        output = self._join(_NewTokens(q, k, v, first, _count_real(first), new.scale))
        evicted = self.last_evicted
        assert evicted is not None
        q, k, v = (tensor[:, :, in_prompt:].clone() for tensor in vectors)
        rest = position[:, in_prompt:]
        drafts = self._verify(journal, _NewTokens(q, k, v, rest, _count_real(rest), new.scale))
        assert self.last_evicted is not None
        self.last_evicted = torch.cat([evicted, self.last_evicted], 2)
        return torch.cat([output, drafts], 2)

    def _verify(self, journal: Journal, new: _NewTokens) -> Tensor:
        """Let new tokens join one by one, and record it."""
        assert self.tokens_seen is not None
        assert self.scores is not None
        assert self.positions is not None
        entry = Entry(self.scores.clone(), self.positions.clone(), self.tokens_seen.clone())
        position = new.position.clone()  # That of a single token lies in tokens_seen.
        room = {name: new.key.new_empty(new.key.shape) for name in ("k_evicted", "v_evicted")}
        output = self._step(new._replace(position=position), 1, **room)
        evicted = self.last_evicted
        assert evicted is not None
        entry.append(
            Forward(new.query, new.key, new.value, position, evicted, **room, scale=new.scale)
        )
        journal.add(entry)
        return output

    def _prompt_columns(self, position_new: Tensor) -> int:
        """How many of the new columns belong to the prompt, whose length only the caller knows."""
        if not self._in_prompt:
            return 0
        assert self.tokens_seen is not None
        batch, num_new = position_new.shape
        if self.settings.prompt_length is None:
            if self.columns_seen == 0 and num_new > 1:
                raise ValueError(
                    "H2OCache: prompt_length must be given where forwards are recorded for "
                    f"assisted decoding, got None: the first forward has {num_new} tokens, and which "
                    "of them are drafts is not for the cache to see; make it with "
                    "H2OCache(..., prompt_length=input_ids.shape[1])"
                )
            self._in_prompt = False
            return 0
        positions = position_new.cpu()
        lengths = torch.tensor(self._given_lengths(batch), device=positions.device)[:, None]
        is_draft = positions >= lengths
        columns = is_draft.any(0).nonzero()
        first_draft = int(columns[0]) if len(columns) else num_new
        if ((positions >= 0) & ~is_draft)[:, first_draft:].any():
            raise ValueError(
                "H2OCache: prompts must end in the same column in every row where forwards are "
                f"recorded, got prompt_length={self.settings.prompt_length}, with which column "
                f"{self.columns_seen + first_draft} is past the end in some rows only"
            )
        seen = self.tokens_seen.cpu() + _count_real(positions)
        self._in_prompt = bool((seen < lengths[:, 0]).any())
        return first_draft

    @property
    def is_croppable(self) -> bool:
        """Whether `crop` can take tokens back: while forwards are recorded."""
        return self.journal is not None

    @property
    def record_past(self) -> bool:
        """Name by which transformers 5 asks whether forwards are recorded, and says so."""
        return self.journal is not None

    @record_past.setter
    def record_past(self, record: bool) -> None:
        if record:
            self.activate_past_recording()
        else:
            self.journal = None

    def activate_past_recording(self) -> None:
        """Record forwards from now on, so that `crop` can undo them.

        Raises
        ------
        ValueError
            max_rollback is 0.
        """
        if self.journal is not None:
            return
        depth = self.settings.max_rollback
        if depth == 0:
            raise ValueError(
                "H2OCache: max_rollback must be >= 1 for assisted decoding and prompt lookup, got 0; "
                "make the cache with max_rollback = the number of drafts of a forward"
            )
        self.journal = Journal(_MAX_ROLLBACK if depth is None else depth)
        self._in_prompt = self.columns_seen == 0  # What was seen before is the prompt.

    def _record_from_the_start(self) -> None:
        self.journal = None
        if self.settings.max_rollback:
            self.activate_past_recording()

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last tokens of every row of this layer, in place; see `H2OCache.crop`."""
        self.check_crop(tokens_to_remove)
        remove = self._removed_by(tokens_to_remove)
        if remove <= 0:
            return
        journal, seen = self.journal, self.tokens_seen
        assert journal is not None
        assert seen is not None
        assert self.keys is not None
        assert self.values is not None
        assert self.scores is not None
        assert self.positions is not None
        state = (self.keys, self.values, self.scores, self.positions, seen)
        with torch.inference_mode(False), torch.no_grad():
            for forward in journal.take_back(remove, *state):
                added = _count_real(forward.position)
                self._step(_NewTokens(*forward[:4], added, forward.scale), 1)
        self.columns_seen -= remove
        entries = journal.entries
        self.last_evicted = entries[-1].forwards[-1].evicted if entries else None

    def check_crop(self, tokens_to_remove: int) -> None:
        """Refuse what `crop` could not do; changes nothing.

        Raises
        ------
        RuntimeError
            Nothing is recorded.
        ValueError
            More tokens would be removed than are recorded, or the last forward had too many to be
            recorded.
        """
        remove, journal = self._removed_by(tokens_to_remove), self.journal
        if journal is None:
            if remove > 0:
                raise RuntimeError(
                    f"H2OCache.crop: {remove} of {self.columns_seen} tokens cannot be removed, since "
                    "nothing is recorded; make the cache with max_rollback = the number of drafts of "
                    "a forward, or call activate_past_recording() before the forward"
                )
            return
        if journal.unverified:
            raise ValueError(
                f"H2OCache.crop: a forward to be verified must have at most max_rollback + 1 = "
                f"{journal.depth + 1} tokens, got {journal.unverified}; they joined as a prompt "
                "does. Draft fewer, or make the cache with a larger max_rollback"
            )
        if remove > min(journal.depth, journal.num_columns):
            raise ValueError(
                "H2OCache.crop: tokens to remove must be <= max_rollback and among those recorded "
                f"since the prompt, got {remove} with max_rollback={journal.depth} and "
                f"{journal.num_columns} recorded"
            )

    def _removed_by(self, tokens_to_remove: int) -> int:
        """How many tokens `crop` is to remove; 0 or less for none."""
        if tokens_to_remove > 0:
            return self.columns_seen - int(tokens_to_remove)
        return -int(tokens_to_remove)

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
        # Made as ordinary tensors even under inference_mode, so that the cache can be used outside.
        with torch.inference_mode(False):
            self.row_budget = None
            if any(budget != self.budget for budget in budgets):
                self.row_budget = torch.tensor(
                    [tuple(budget) for budget in budgets], dtype=torch.int32, device=key.device
                )
            if (
                self.keys is not None
                and self.keys.shape == (*shape, head_dim)
                and self.keys.dtype == dtype
                and self.keys.device == key.device
            ):
                return
            score_dtype = torch.float64 if dtype == torch.float64 else torch.float32
            try:
                keys = torch.zeros(*shape, head_dim, dtype=dtype, device=key.device)
                values = torch.zeros(*shape, head_dim, dtype=dtype, device=key.device)
                scores = torch.zeros(shape, dtype=score_dtype, device=key.device)
                positions = torch.full(shape, -1, dtype=torch.int32, device=key.device)
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
            self.tokens_seen = torch.zeros(batch, dtype=torch.int32, device=key.device)
            self._note_tensors()

    def _note_tensors(self) -> None:
        """Set what follows from the tensors."""
        assert self.keys is not None
        self.device = self.keys.device
        self.batch_size = self.keys.shape[0]
        self._one = torch.ones(1, dtype=torch.int32, device=self.device)
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
        self._record_from_the_start()
        self._handover.layer_idx = None
        if self.is_initialized:
            self._empty(slice(None))

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
            if self.journal is not None:
                self.journal = self.journal.map(lambda tensor: tensor.index_select(0, index))
        self.batch_size = index.shape[0]

    def insert_row(self, row: int, other: H2OLayer, source: int) -> None:
        """Row `row` becomes row `source` of `other`; `check_insertion` says whether it can."""
        assert self.tokens_seen is not None
        assert other.tokens_seen is not None
        assert other.positions is not None
        self.release_row(row)
        # What a larger cache holds may lie anywhere in it, and moves to the front.
        held = other.positions[source] >= 0
        order = torch.argsort(held.int(), dim=1, descending=True, stable=True)
        for name in _SLOT_STATE:
            mine, theirs = getattr(self, name)[row], getattr(other, name)[source]
            num_slots = min(mine.shape[1], theirs.shape[1])
            if num_slots < theirs.shape[1]:
                slots = order[:, :num_slots]
                theirs = theirs.take_along_dim(slots if mine.ndim == 2 else slots[..., None], 1)
            mine[:, :num_slots] = theirs
        self.tokens_seen[row] = other.tokens_seen[source]
        self._give_budget(row, other.budget_of(source))
        self.columns_seen = max(self.columns_seen, other.columns_seen)
        self._window = other._window

    def _give_budget(self, row: int, budget: Budget) -> None:
        assert self.budget is not None
        assert self.tokens_seen is not None
        if self.row_budget is None:
            if budget == self.budget:
                return
            every = torch.tensor(tuple(self.budget), dtype=torch.int32, device=self.device)
            self.row_budget = every.repeat(self.tokens_seen.shape[0], 1)
        self.row_budget[row] = torch.tensor(tuple(budget), dtype=torch.int32)

    def release_row(self, row: int) -> None:
        """Forget what row `row` has seen; its budget stays. What `crop` could undo is forgotten too."""
        assert self.tokens_seen is not None
        if self.journal is not None:
            self.journal.clear()
        self._empty(row)
        self.last_evicted = None

    def _empty(self, rows: int | slice) -> None:
        """Make these rows what they were when they were allocated."""
        for name in (*_SLOT_STATE, "tokens_seen"):
            getattr(self, name)[rows].fill_(-1 if name == "positions" else 0)

    def budget_of(self, row: int) -> Budget:
        """The budget that this row keeps to."""
        assert self.budget is not None
        if self.row_budget is None:
            return self.budget
        num_sink, num_heavy, num_recent = self.row_budget[row].tolist()
        return Budget(num_sink=num_sink, num_heavy=num_heavy, num_recent=num_recent)

    def check_insertion(self, other: H2OLayer, source: int) -> None:
        """Raise where this layer cannot take row `source` of `other`.

        Raises
        ------
        ValueError
            Shape, dtype or device differ, or the row's budget is larger than the capacity here.
        """
        assert self.keys is not None
        assert other.keys is not None
        facts = {
            "number of KV heads": (self.keys.shape[1], other.keys.shape[1]),
            "head_dim": (self.keys.shape[3], other.keys.shape[3]),
            "dtype": (self.keys.dtype, other.keys.dtype),
            "device": (self.keys.device, other.keys.device),
        }
        for name, (mine, theirs) in facts.items():
            if mine != theirs:
                raise ValueError(
                    f"H2OCache.insert: {name} of both caches must be the same, got {mine} here and "
                    f"{theirs} in other, layer {self.layer_idx}"
                )
        budget, capacity = other.budget_of(source), self.keys.shape[2]
        if budget.total > capacity:
            raise ValueError(
                f"H2OCache.insert: the row's budget must be <= capacity = {capacity}, got "
                f"{budget.total} tokens, layer {self.layer_idx}"
            )

    def copy_from(self, other: H2OLayer) -> None:
        """Become a copy of `other` that shares no memory with it."""
        state = other.state()
        with torch.inference_mode(False), torch.no_grad():
            copies = {name: tensor.clone() for name, tensor in state.tensors.items()}
            self.restore(replace(state, tensors=copies))
            self.journal = None if other.journal is None else other.journal.map(torch.clone)
        self._in_prompt = other._in_prompt
        self._alibi_slopes = other._alibi_slopes

    def state(self) -> LayerState:
        """What `restore` needs; its tensors are the layer's own."""
        named = {name: getattr(self, name) for name in STATE_TENSORS}
        tensors = {name: tensor for name, tensor in named.items() if tensor is not None}
        return LayerState(self.columns_seen, self.budget, self._window, tensors)

    def restore(self, state: LayerState) -> None:
        """Make a new layer the one that `state` was taken of; its tensors become the layer's own."""
        for name in STATE_TENSORS:
            setattr(self, name, state.tensors.get(name))
        # As a prompt leaves it, for a step that is compiled after this.
        self.columns_seen = _Variable(state.columns_seen) if state.columns_seen else 0
        self.budget = state.budget
        self._window = state.window
        # Where its length is known, the next forward finds out by itself.
        self._in_prompt = self.journal is not None and (
            not state.columns_seen or self.settings.prompt_length is not None
        )
        if self.keys is not None:
            with torch.inference_mode(False):
                self._note_tensors()


def model_shape(config: Any) -> dict[str, Any]:
    """What two configs must share for a cache of one to serve the other."""
    return {name: getattr(config, name, None) for name in _MODEL_SHAPE}


def _count_real(positions: Tensor) -> Tensor:
    """Tokens that are no padding, int32 [batch], of positions [batch, num_new]."""
    return (positions >= 0).sum(1, dtype=torch.int32)


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """`tensor.to(dtype)`, which takes longer to find out that it has nothing to do."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)
