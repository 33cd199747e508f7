"""H2OCache: the transformers cache whose layers (layer.py) keep to the budget of an EvictionPolicy."""

from __future__ import annotations

import operator
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache

from h2o_kv._C import Budget, EvictionPolicy
from h2o_kv.hf import session
from h2o_kv.hf.budgets import BudgetEvent, given_policies, requested_budgets
from h2o_kv.hf.layer import H2OLayer
from h2o_kv.hf.memory import check_alike
from h2o_kv.hf.progress import Progress
from h2o_kv.hf.rolling import Rolling
from h2o_kv.hf.settings import ATTENTION_NAME, Settings, model_shape
from h2o_kv.hf.sharing import SLOT_STATE
from h2o_kv.models import resolve_device
from h2o_kv.policies import rules_of

__all__ = ["CacheBytes", "H2OCache"]

_PREFILLS = ("one_shot", "streaming")
_POSITIONS = ("original", "rolling")
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
# Models whose position embedding is a table with an end, and the config key that says where.
_LEARNED_POSITIONS = {"opt": "max_position_embeddings"}


@dataclass(frozen=True)
class CacheBytes:
    """Bytes that a cache holds, over all layers.

    Attributes
    ----------
    kv : int
        Keys and values.
    bookkeeping : int
        Scores and positions.
    journal : int
        What `crop` could take back, while forwards are recorded.
    shared : int
        Those of them that other caches hold too: forks, or what this one was forked from. Each of
        these caches counts them once, however often it has a row.
    undo : int
        What takes back a decode step that stops half-way: a copy of the bookkeeping, and a token.
    """

    kv: int
    bookkeeping: int
    journal: int = 0
    shared: int = 0
    undo: int = 0

    @property
    def total(self) -> int:
        """Their sum."""
        return self.kv + self.bookkeeping + self.journal + self.undo

    @property
    def owned(self) -> int:
        """What is this cache's alone: what dropping it would free."""
        return self.total - self.shared


class H2OCache(Cache):  # type: ignore[misc]
    """A KV cache of fixed size with Heavy-Hitter Oracle eviction, for `generate` and `forward`.

    Needs a model whose attn_implementation is "h2o"; any other raises. One cache serves one batch
    of sequences; `reset()` makes it ready for another.

    Parameters
    ----------
    config : PreTrainedConfig or PreTrainedModel
        `model.config` of a decoder-only model, or the model itself, which positions="rolling" needs.
    policy : EvictionPolicy, or a sequence of them with one a row
        How many tokens each row and KV head keeps. Ratios are of the real tokens of each row's
        prompt: its first forward, unless prompt_length says otherwise. In a padded batch the
        capacity is the largest row's budget and each row keeps to its own. Policies of rows are of
        counts and alike in all else; the first forward after the cache was empty has as many rows.
    prefill : {"one_shot", "streaming"}
        What a forward with several tokens does. one_shot: all of them attend before anything is
        evicted. streaming: they join `prefill_chunk` at a time, and later ones never see what left.
        A forward with one token is the paper's step in both.
    prefill_chunk : int
        Tokens that join together in a streaming prefill, counted in the real tokens of each row.
    prompt_length : int or sequence of int, optional
        Real tokens of the prompt, of every row or of each, that ratios are taken of. Needed when
        the prompt arrives in several forwards (`prefill_chunk_size` of generate, or by hand), and
        for assisted decoding, which passes the prompt and its first drafts together; counts alone
        need none.
    dtype : torch.dtype, optional
        Of keys and values in the cache. Default: that of the first keys and values.
    max_rollback : int, optional
        Tokens that `crop` can take back: at least the drafts that assisted decoding verifies in one
        forward. A number records from the first forward on, which transformers before 5.14 needs,
        since it does not ask; 0 never does. By default recording starts when transformers asks
        for it, with 32. While it lasts, forwards of up to max_rollback + 1 tokens past the prompt
        are steps, one token after the other, and the first forward needs prompt_length.
    positions : {"original", "rolling"}
        original: a token keeps the position, and so the rotation, with which it came. rolling: its
        position is its rank among the tokens that its KV head keeps, so that none is ever past
        budget + new tokens: for streams longer than the model's context. Then `k_cache` holds keys
        without rotation. For models with rotary embeddings, see `h2o_kv.hf.ROLLING_MODELS`.
    given_scores : sequence of Tensor, float, [num_kv_heads, length], one a layer
        Only with score_rule="given": the score of each position, in every row; 0 past the end, or
        where none are given. Such a cache cannot be saved.
    compileable : bool
        Whether `generate` may compile the decode step: on a GPU it then does so by itself, elsewhere
        where its compile_config says so. Also an attribute; a saved session does not hold it.

    Raises
    ------
    TypeError
        An argument is of another type than above; True is no number of tokens.
    ValueError
        An argument is out of its range, or the model is of a kind that the cache cannot serve.

    Notes
    -----
    H2O (Zhang et al., NeurIPS 2023, arXiv 2306.14048). The paper renumbers nothing; rolling is
    StreamingLLM's (arXiv 2309.17453), and the policy stays the one that is given.

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
        policy: EvictionPolicy | Sequence[EvictionPolicy],
        *,
        prefill: str = "one_shot",
        prefill_chunk: int = 64,
        prompt_length: int | Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        max_rollback: int | None = None,
        positions: str = "original",
        given_scores: Sequence[Tensor] | None = None,
        compileable: bool = False,
    ) -> None:
        decoder = _decoder_config(config)
        policy, row_policies = given_policies(policy)
        if prefill not in _PREFILLS:
            raise ValueError(f'H2OCache: prefill must be one of {_PREFILLS}, got "{prefill}"')
        prefill_chunk = _count("H2OCache: prefill_chunk", prefill_chunk)
        if prefill_chunk < 1:
            raise ValueError(f"H2OCache: prefill_chunk must be >= 1, got {prefill_chunk}")
        if policy.score_rule == "misses" and (prefill, prefill_chunk) != ("streaming", 1):
            raise ValueError(
                'H2OCache: prefill must be "streaming" and prefill_chunk 1 with score_rule "misses", '
                f'which looks at every query, got "{prefill}" and {prefill_chunk}'
            )
        _check_dtype("H2OCache: dtype", dtype)
        if max_rollback is not None:
            max_rollback = _count("H2OCache: max_rollback", max_rollback)
            if max_rollback < 0:
                raise ValueError(f"H2OCache: max_rollback must be >= 0, got {max_rollback}")
        if positions not in _POSITIONS:
            raise ValueError(f'H2OCache: positions must be one of {_POSITIONS}, got "{positions}"')
        rolling = None
        if positions == "rolling":
            if not isinstance(config, PreTrainedModel):
                raise ValueError(
                    'H2OCache: the model itself must be given with positions="rolling", whose rotary '
                    f"embedding is undone, got {type(config).__name__}; H2OCache(model, ...)"
                )
            rolling = Rolling(config)
        settings = Settings(
            config=decoder,
            policy=policy,
            row_policies=row_policies,
            prefill=prefill,
            prefill_chunk=prefill_chunk,
            prompt_length=_prompt_length(prompt_length),
            dtype=dtype,
            max_rollback=max_rollback,
            positions=positions,
            given_scores=_given_scores(policy, given_scores, decoder.num_hidden_layers),
            rolling=rolling,
            max_positions=getattr(decoder, _LEARNED_POSITIONS.get(decoder.model_type, ""), None),
            whole_masks=_builds_whole_masks(decoder),
        )
        self._begin(settings, compileable)

    def _begin(self, settings: Settings, compileable: bool) -> None:
        """Be an empty cache of these settings."""
        self._settings = settings
        self._budget_events: list[BudgetEvent] = []
        num_layers = settings.config.num_hidden_layers
        self._progress = Progress(num_layers)
        super().__init__(layers=[H2OLayer(settings, self._progress, i) for i in range(num_layers)])
        self.compileable = compileable

    def __repr__(self) -> str:
        return (
            f"H2OCache({len(self.layers)} layers, {self.policy!r}, prefill={self.prefill!r}, "
            f"seen={self.get_seq_length()})"
        )

    @property
    def compileable(self) -> bool:
        """Whether `generate` may compile the decode step; transformers asks `is_compileable`."""
        return self._progress.compileable

    @compileable.setter
    def compileable(self, compileable: bool) -> None:
        if not isinstance(compileable, bool):
            raise TypeError(f"H2OCache: compileable must be a bool, got {compileable!r}")
        if compileable and self._settings.whole_masks:
            raise ValueError(
                "H2OCache: compileable must be False for OPT with transformers "
                f"{transformers.__version__}, which makes a mask over all tokens of a cache that is "
                "compiled; later ones do not, got True"
            )
        self._progress.compileable = compileable

    @property
    def policy(self) -> EvictionPolicy:
        """How many tokens each row and KV head keeps, until `set_budget` and after `reset`.

        Where rows have policies of their own, the one with the most slots.
        """
        return self._settings.policy

    @property
    def row_policies(self) -> tuple[EvictionPolicy, ...] | None:
        """The policy of each row of the first batch, where rows have policies of their own."""
        return self._settings.row_policies

    @property
    def positions(self) -> str:
        """What a token's rotation comes from: "original" position, or "rolling" rank."""
        return self._settings.positions

    @property
    def prefill(self) -> str:
        """Which prefill the results of this cache come from: "one_shot" or "streaming"."""
        return self._settings.prefill

    @property
    def prefill_chunk(self) -> int:
        """Tokens that join together in a streaming prefill."""
        return self._settings.prefill_chunk

    @property
    def max_positions(self) -> int | None:
        """Tokens of a row after which the model's learned positions end; None = they do not."""
        return self._settings.max_positions

    @property
    def budgets(self) -> tuple[Budget, ...] | None:
        """Budget of each row, or the one that it moves to; None before the first forward."""
        layer = self.layers[0].last_complete()
        if layer.budget is None or not layer.is_initialized:
            return None
        return tuple(layer.budget_of(row) for row in range(layer.batch_size))

    @property
    def budget_events(self) -> list[BudgetEvent]:
        """Every `set_budget` since the cache was empty, from the oldest to the latest."""
        events = list(self._budget_events)
        if events:
            events[-1] = replace(events[-1], held_at=self.layers[-1].last_complete().held_at)
        return events

    def set_budget(
        self,
        budget: Budget | EvictionPolicy | Sequence[Budget | EvictionPolicy] | None = None,
        *,
        num_heavy: int | None = None,
        num_recent: int | None = None,
        num_sink: int | None = None,
        max_evictions_per_step: int | None = None,
    ) -> None:
        """Keep to another budget from now on.

        A larger one takes memory, and nothing leaves. A smaller one lets what is above it leave, the
        lowest scores first: at once, or a few in each step. `cache.budget_events` has each call.

        Parameters
        ----------
        budget : Budget or EvictionPolicy, or a sequence with one a row, optional
            Of every row, or of each. A policy of counts, with `gqa_reduce` and rules of the cache.
        num_heavy, num_recent, num_sink : int, tokens, optional
            Instead of `budget`: of every row; what is not given stays what it is in each row.
        max_evictions_per_step : int, tokens, optional
            >= 2. The most that leave a row and KV head in a step, with the one that makes room for
            the new token. The new num_sink and num_recent hold at once, and the surplus is kept for
            its scores until the budget is reached. By default all of it leaves in this call.

        Raises
        ------
        TypeError
            An argument is of another type.
        ValueError
            An argument is out of its range, or nothing was seen yet: then the policy says the budget.
        MemoryError
            There is not so much memory for a larger budget. Nothing has changed but, perhaps, the
            capacity of some layers, of which nothing is to be seen in what follows.

        Notes
        -----
        A step is a forward, of a row that has a real token in it: of n tokens of a row, whose own
        tokens may leave besides, at most `n + max_evictions_per_step - 1` leave. Where drafts are
        verified, each token is a step. Memory becomes that of the largest row in this call, and again
        when all rows are within their budgets. What `crop` could take back is forgotten here.

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
        >>> cache = H2OCache(model.config, EvictionPolicy(num_heavy=8, num_recent=8))
        >>> with torch.no_grad():
        ...     output = model(torch.arange(3, 23)[None], **{cache_kwarg(model): cache})
        >>> cache.set_budget(num_heavy=4, num_recent=4)
        >>> int(cache.tokens_kept()[0].max()), cache.budget_events[0].held_at
        (8, 20)
        """
        name = "H2OCache.set_budget"
        self._settle()
        self._check_in_step()
        old, position = self.budgets, int(self.get_seq_length())
        if not old or position == 0:
            raise ValueError(
                f"{name}: the cache must have seen tokens, got {self!r}; before them the policy says "
                "the budget"
            )
        counts = {"num_sink": num_sink, "num_heavy": num_heavy, "num_recent": num_recent}
        for key, count in counts.items():
            counts[key] = None if count is None else _count(f"{name}: {key}", count)
        new = requested_budgets(old, budget, counts, self.policy)
        if max_evictions_per_step is not None:
            most = f"{name}: max_evictions_per_step"
            max_evictions_per_step = _count(most, max_evictions_per_step)
            if not 2 <= max_evictions_per_step < 2**31:
                raise ValueError(
                    f"{most} must be in 2..{2**31 - 1}, one of which makes room for the new token, got "
                    f"{max_evictions_per_step}"
                )
        for layer in self.layers:
            layer.make_room(new)
        events = self.budget_events
        events.append(BudgetEvent(position, time.time(), old, new, max_evictions_per_step))
        events[-1].log()
        with self._as_a_whole("set_budget"):
            for layer in self.layers:
                layer.set_budgets(new, max_evictions_per_step and max_evictions_per_step - 1)
            self._budget_events = events

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
            The attention is not "h2o", or the previous layer's attention never asked for its cache.
        ValueError
            The model has other layers than the cache.
        """
        num_layers = len(self.layers)
        if layer_idx >= num_layers:
            raise ValueError(
                f"H2OCache: layer_idx must be < num_hidden_layers = {num_layers} of the config "
                f"that the cache was made from, got {layer_idx}"
            )
        if layer_idx == 0:  # Once a forward.
            self._settings.check_pairing()
            self._begin_forward()
        elif self._progress.awaiting is not None:
            raise self._unused(self._progress.awaiting)
        return self.layers[layer_idx].update(key_states, value_states, *args, **kwargs)

    def _begin_forward(self) -> None:
        """Take back what an earlier forward left that stopped half-way, if there is one."""
        progress = self._progress
        awaiting = progress.awaiting
        if progress.undo or awaiting is not None:
            # An interrupt seldom comes twice in the same place; another model stops there always.
            num_done, again = len(progress.undo), progress.stops_again()
            self._settle()
            if again and awaiting is not None:
                progress.awaiting = awaiting
                raise self._unused(awaiting)
            if again:
                warnings.warn(
                    f"H2OCache: two forwards in a row stopped after {num_done} of "
                    f"{len(self.layers)} layers, and were taken back. Unless they were interrupted, "
                    "the model has fewer layers than its config",
                    RuntimeWarning,
                    stacklevel=2,
                )
        else:
            progress.finish()
        self._check_in_step()

    def _unused(self, layer_idx: int) -> RuntimeError:
        return RuntimeError(
            f"H2OCache: the attention of layer {layer_idx} did not use its cache; every layer must "
            f'run attn_implementation="{ATTENTION_NAME}": call {self._settings.how_to_pair()}'
        )

    def _settle(self) -> None:
        """Finish what stopped half-way, or take it back: not while a forward is under way."""
        progress = self._progress
        progress.finish()
        for layer_idx in list(progress.undo):
            self.layers[layer_idx].settle()
        progress.awaiting = None

    @contextmanager
    def _as_a_whole(self, what: str) -> Iterator[None]:
        """Settle, and let no later use of the cache pass if this stops half-way."""
        self._settle()
        self._progress.pending = partial(_refuse, what)
        yield
        self._progress.pending = None

    def _check_in_step(self) -> None:
        first, last = self.layers[0].columns_seen, self.layers[-1].columns_seen
        if first != last:
            raise RuntimeError(
                f"H2OCache: all {len(self.layers)} layers must have seen the same tokens, got layer "
                f"0 at {first}, layer {len(self.layers) - 1} at {last}: the model has fewer layers "
                "than the cache, or a compiled forward stopped half-way: reset()"
            )

    def activate_past_recording(self) -> None:
        """Record forwards from now on, so that `crop` can undo them; transformers 5 calls this.

        Raises
        ------
        ValueError
            max_rollback is 0.
        """
        self._settle()
        for layer in self.layers:
            layer.activate_past_recording()

    def deactivate_past_recording(self) -> None:
        """Stop it, and forget what could be undone."""
        self._settle()
        for layer in self.layers:
            layer.record_past = False

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last tokens of every row: afterwards they have never been seen.

        The state is that of a cache that saw the other tokens alone, in every bit.

        Parameters
        ----------
        tokens_to_remove : int
            <= 0: minus the number of tokens to remove; > 0 (transformers 4): tokens to keep.
            Padding counts.

        Raises
        ------
        RuntimeError
            Nothing is recorded. Nothing is changed.
        ValueError
            More tokens would be removed than max_rollback, or than are recorded since the prompt.
            Nothing is changed.
        """
        name = "H2OCache.crop: tokens_to_remove"
        tokens_to_remove = _count(name, tokens_to_remove)
        self._settle()
        self._check_in_step()
        for layer in self.layers:
            layer.check_crop(tokens_to_remove)
        changes = [layer.cropping(tokens_to_remove) for layer in self.layers]
        self._progress.change(partial(_do_all, changes))

    def reset(self) -> None:
        """Forget everything, budgets of ratios and `set_budget` included; memory stays allocated."""
        self._progress.change(self._reset_layers)

    def _reset_layers(self) -> None:
        self._progress.undo = {}
        self._progress.awaiting = None
        for layer in self.layers:
            layer.reset()
        self._budget_events = []

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes the former row beam_idx[i]. In place.

        Raises
        ------
        TypeError, IndexError
            There is no such row. Nothing has changed.
        """
        self._check_rows("reorder_cache: beam_idx", beam_idx)
        with self._as_a_whole("reorder_cache"):
            super().reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row becomes `repeats` rows next to each other.

        Raises
        ------
        ValueError
            repeats < 0.
        """
        repeats = _count("H2OCache.batch_repeat_interleave: repeats", repeats)
        if repeats < 0:
            raise ValueError(
                f"H2OCache.batch_repeat_interleave: repeats must be >= 0, got {repeats}"
            )
        with self._as_a_whole("batch_repeat_interleave"):
            super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices`: integers, or a bool for each row.

        Raises
        ------
        TypeError, IndexError
            There is no such row. Nothing has changed.
        """
        self._check_rows("batch_select_indices: indices", indices, may_be_bool=True)
        with self._as_a_whole("batch_select_indices"):
            super().batch_select_indices(indices)

    def _check_rows(self, argument: str, index: Any, *, may_be_bool: bool = False) -> None:
        """Refuse what is no index of rows, and rows that there are not where the host can look."""
        kinds = (torch.int32, torch.int64, *([torch.bool] if may_be_bool else []))
        if not isinstance(index, Tensor) or index.dtype not in kinds:
            got = index.dtype if isinstance(index, Tensor) else repr(index)
            names = ", ".join(map(str, kinds))
            raise TypeError(f"H2OCache.{argument} must be a tensor of {names}, got {got}")
        if index.ndim != 1:
            raise IndexError(f"H2OCache.{argument} must be [rows], got {list(index.shape)}")
        layer = self.layers[0]
        if not layer.is_initialized:
            return
        num_rows = layer.batch_size
        if index.dtype == torch.bool:
            if len(index) != num_rows:
                raise IndexError(
                    f"H2OCache.{argument} must have one bool a row = {num_rows}, got {len(index)}"
                )
        elif index.device.type == "cpu" and bool(((index < 0) | (index >= num_rows)).any()):
            raise IndexError(
                f"H2OCache.{argument} must be in 0..{num_rows - 1}, got {index.tolist()}"
            )

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        """-1: a cache of any budget takes any number of tokens."""
        return -1

    def tokens_kept(self) -> list[Tensor]:
        """Occupied slots of each layer, int64, [batch, num_kv_heads]; empty before any forward."""
        positions = (layer.complete("positions") for layer in self.layers)
        return [(tensor >= 0).sum(-1) for tensor in positions if tensor is not None]

    def nbytes(self) -> CacheBytes:
        """Bytes held; they do not grow with the tokens seen (`journal`: beyond its bound)."""
        kv = bookkeeping = journal = undo = shared = 0
        for layer in self.layers:
            sizes = {name: _nbytes(layer.held(name)) for name in SLOT_STATE}
            recorded = 0 if layer.journal is None else layer.journal.nbytes
            kv += sizes["keys"] + sizes["values"]
            bookkeeping += sizes["scores"] + sizes["positions"]
            journal += recorded
            undo += 0 if layer.step_room is None else layer.step_room.nbytes
            shared += (sum(sizes.values()) + recorded) * layer.is_shared
        return CacheBytes(kv, bookkeeping, journal, shared, undo)

    def insert(self, row: int, other: H2OCache, source: int = 0) -> None:
        """Row `row` of a running batch becomes row `source` of `other`; no other row changes.

        Parameters
        ----------
        row : int
            Of this cache, which has its memory: after a forward or `early_initialization`. What it
            held is forgotten.
        other : H2OCache
            Of the same model and with the same `gqa_reduce`, rules, `given_scores` and `positions`,
            such as one that a prompt was run through alone. It keeps its row.
        source : int
            Row of `other`, whose budget goes with it and must fit into the capacity here.

        Raises
        ------
        TypeError
            An argument is of another type.
        IndexError
            There is no such row.
        ValueError
            The caches do not fit each other. Nothing has changed then.

        Notes
        -----
        `get_seq_length` becomes the larger one of the two, as if the shorter row had been padded. A
        model is told the positions of the rows by position_ids; each row's next is
        `layers[0].tokens_seen`.
        """
        if not isinstance(other, H2OCache):
            raise TypeError(f"H2OCache.insert: other must be an H2OCache, got {other!r}")
        facts: dict[str, tuple[Any, Any]] = {
            "the model": (
                model_shape(self._settings.config),
                model_shape(other._settings.config),
            ),
            "gqa_reduce": (repr(self.policy.gqa_reduce), repr(other.policy.gqa_reduce)),
            "the rules": (rules_of(self.policy), rules_of(other.policy)),
            "positions": (repr(self.positions), repr(other.positions)),
        }
        check_alike(facts)
        if not _same_scores(self._settings.given_scores, other._settings.given_scores):
            raise ValueError(
                "H2OCache.insert: given_scores of both caches must be the same, got others in other"
            )
        for name, cache in (("this cache", self), ("other", other)):
            if cache.budgets is None:
                raise ValueError(
                    f"H2OCache.insert: {name} must have its memory, got one before any forward; "
                    "early_initialization() allocates it"
                )
        self._settle()
        other._settle()
        row, source = self._row("insert: row", row), other._row("insert: source", source)
        pairs = list(zip(self.layers, other.layers, strict=True))
        for layer, source_layer in pairs:
            layer.check_insertion(source_layer, source)
        if other is self and row == source:
            return
        with self._as_a_whole("insert"), torch.inference_mode(False), torch.no_grad():
            for layer, source_layer in pairs:
                layer.insert_row(row, source_layer, source)

    def release(self, row: int) -> None:
        """Forget what a row of a running batch has seen; no other row changes.

        The row stays in the batch: give it padding until `insert` fills it again, or new tokens, which
        start at position 0. Its budget stays.

        Raises
        ------
        TypeError
            row is no integer.
        IndexError
            There is no such row.
        """
        self._settle()
        row = self._row("release: row", row)
        with self._as_a_whole("release"), torch.inference_mode(False), torch.no_grad():
            for layer in self.layers:
                layer.release_row(row)

    def _row(self, argument: str, row: int) -> int:
        row = _count(f"H2OCache.{argument}", row)
        num_rows = self.layers[0].batch_size if self.layers[0].is_initialized else 0
        if not 0 <= row < num_rows:
            raise IndexError(f"H2OCache.{argument} must be in 0..{num_rows - 1}, got {row}")
        return row

    def fork(self, n: int) -> H2OCache:
        """Make a new cache in which each row stands `n` times, next to each other.

        The two share their memory until one of them writes into a layer, in a forward, say, or
        `crop`, `insert` or `set_budget`: then it copies its rows of that layer before, and the last
        one of all that hold them copies nothing. Moving rows before that copies nothing either. No
        cache notices what becomes of another.

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

        Notes
        -----
        `layers[i].k_cache` and the others show the values of the rows at any time, and are only to be
        read while `nbytes().shared` is not 0: then they may be memory of both caches, or a copy made
        for the reader.
        """
        n = _count("H2OCache.fork: n", n)
        if n < 1:
            raise ValueError(f"H2OCache.fork: n must be >= 1, got {n}")
        self._settle()
        copy = H2OCache.__new__(H2OCache)
        copy._begin(self._settings, self.compileable)
        for layer, source in zip(copy.layers, self.layers, strict=True):
            layer.share(source)
            if n > 1:
                layer.batch_repeat_interleave(n)
        copy._budget_events = list(self._budget_events)
        return copy

    def to(
        self, device: str | torch.device | None = None, dtype: torch.dtype | None = None
    ) -> H2OCache:
        """Move the cache to another device, or its keys and values to another dtype, in place.

        Scores become float64 with float64 keys and float32 with any other; everything else stays as
        it is. A dtype is from now on that of the cache, as if it had been made with it.

        Parameters
        ----------
        device : str or torch.device, optional
            "cpu", "cuda", "cuda:<index>" or "auto", of all layers. Before the first forward there is
            nothing to move: layers are where their first keys are.
        dtype : torch.dtype, optional
            As in H2OCache.

        Returns
        -------
        H2OCache
            This one.

        Raises
        ------
        TypeError, ValueError
            There is no such device or dtype, or neither is given.
        RuntimeError
            There is not so much memory. Nothing has changed.

        Notes
        -----
        What `crop` could take back is forgotten, since the steps that it would do again would have
        other last bits. Forks that share memory with this cache stay what and where they are.
        """
        if device is None and dtype is None:
            raise ValueError("H2OCache.to: device or dtype must be given, got neither")
        if isinstance(device, torch.dtype):
            raise TypeError(f"H2OCache.to: device must be one, got {device}; give it as dtype=")
        _check_dtype("H2OCache.to: dtype", dtype)
        if device is not None:
            device = resolve_device(device, name="H2OCache.to: device")
            device = torch.empty(0, device=device).device  # With its index.
        self._settle()
        self._check_in_step()
        moved = [layer.moved(device, dtype) for layer in self.layers]
        with self._as_a_whole("to"):
            if dtype is not None:
                self._settings = replace(self._settings, dtype=dtype)
            for layer, tensors in zip(self.layers, moved, strict=True):
                layer.settings = self._settings
                layer.move(tensors)
        return self

    def save(self, file: str | os.PathLike[str]) -> None:
        """Write everything that the cache holds to one safetensors file, to go on from it later.

        The file is written beside its final place and renamed when complete: an existing one is
        replaced as a whole or not at all.

        Parameters
        ----------
        file : str or path
            In a folder that exists.

        Raises
        ------
        SessionError
            The state is not one that a cache can be in, or it has given_scores.
        OSError
            The file cannot be written.
        """
        if self._settings.given_scores is not None:
            raise session.SessionError(
                "H2OCache.save: given_scores must be None, since a session does not hold them, got some"
            )
        self._settle()
        states = [layer.state() for layer in self.layers]
        session.save(file, self._settings, states, self.budget_events)

    @classmethod
    def load(
        cls,
        file: str | os.PathLike[str],
        config: Any,
        *,
        device: str | torch.device | None = None,
    ) -> H2OCache:
        """Make the cache that was saved: every next step equals, bit for bit, that of the saved one.

        Nothing in the file is executed, and nothing is allocated that is not in the file.

        Parameters
        ----------
        file : str or path
            Of `save`.
        config : PreTrainedConfig or PreTrainedModel
            `model.config` of the same model, or the model itself, which a cache of rolling positions
            needs. Weights are not looked at.
        device : str or torch.device, optional
            Where the tensors go, a device of `h2o_kv.models.resolve_device`. Default: where each
            layer was, and the CPU if PyTorch has no such device here.

        Raises
        ------
        SessionError
            The file is damaged, of a later format or no session, or it was saved with another model.
        OSError
            The file cannot be read.
        TypeError, ValueError
            `config` is none that H2OCache takes, or there is no such device.

        Examples
        --------
        >>> import tempfile
        >>> from pathlib import Path
        >>> from transformers import LlamaConfig
        >>> from h2o_kv import EvictionPolicy, H2OCache
        >>> config = LlamaConfig(num_hidden_layers=2)
        >>> cache = H2OCache(config, EvictionPolicy(num_heavy=4, num_recent=4))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     cache.save(Path(folder, "cache.safetensors"))
        ...     again = H2OCache.load(Path(folder, "cache.safetensors"), config)
        >>> again.policy == cache.policy
        True
        """
        return session.load(file, config, _decoder_config(config), cls, device)


def _do_all(changes: Sequence[Callable[[], None]]) -> None:
    for change in changes:
        change()


def _refuse(what: str) -> None:
    raise RuntimeError(f"H2OCache: {what} stopped half-way, and rows may be mixed up: reset()")


def _decoder_config(config: Any) -> Any:
    """Config of the decoder of a model, or of its config, if the cache can serve it."""
    if isinstance(config, PreTrainedModel):
        config = config.config
    if not isinstance(config, PretrainedConfig):
        raise TypeError(f"H2OCache: config must be that of a model, model.config, got {config!r}")
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


def _check_dtype(name: str, dtype: torch.dtype | None) -> None:
    if dtype is not None and dtype not in _DTYPES:
        error = ValueError if isinstance(dtype, torch.dtype) else TypeError
        names = ", ".join(map(str, _DTYPES))
        raise error(f"{name} must be one of {names}, got {dtype!r}")


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


def _given_scores(
    policy: EvictionPolicy, given: Sequence[Tensor] | None, num_layers: int
) -> tuple[Tensor, ...] | None:
    """The scores that positions come with, checked as far as it can be before the first keys."""
    if given is None:
        if policy.score_rule == "given" and policy.arguments["pattern_stride"] == 0:
            raise ValueError(
                'H2OCache: given_scores must be given with score_rule "given" and no pattern, got None'
            )
        return None
    if policy.score_rule != "given":
        raise ValueError(
            f'H2OCache: score_rule must be "given" with given_scores, got "{policy.score_rule}"'
        )
    if not isinstance(given, (Sequence, Tensor)):
        raise TypeError(f"H2OCache: given_scores must be a sequence of tensors, got {given!r}")
    scores = tuple(given)
    if len(scores) != num_layers:
        raise ValueError(
            f"H2OCache: given_scores must be one a layer = {num_layers}, got {len(scores)}"
        )
    for scores_of_layer in scores:
        if not isinstance(scores_of_layer, Tensor):
            raise TypeError(
                f"H2OCache: given_scores must be tensors, got {type(scores_of_layer).__name__}"
            )
        if scores_of_layer.dim() != 2 or scores_of_layer.shape[1] == 0:
            raise ValueError(
                "H2OCache: given_scores must be [num_kv_heads, length], length >= 1, got "
                f"{list(scores_of_layer.shape)}"
            )
    return scores


def _same_scores(mine: Sequence[Tensor] | None, theirs: Sequence[Tensor] | None) -> bool:
    """Whether two caches give their positions the same scores."""
    if mine is theirs:
        return True
    if mine is None or theirs is None:
        return False
    return all(torch.equal(a.to(b), b) for a, b in zip(mine, theirs, strict=True))


def _count(name: str, value: Any) -> int:
    """The value as an int, if it is an integer and no bool."""
    if not isinstance(value, bool):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise TypeError(f"{name} must be an integer, got {value!r}")


def _nbytes(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.nbytes
