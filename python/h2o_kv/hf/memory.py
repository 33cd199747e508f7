"""What a layer of an H2OCache holds: its tensors, and what moves rows of them.

Whatever moves a slot or a row moves all of its parts together; the step itself is layer.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.fx.experimental.sym_node import DynamicInt
from transformers.cache_utils import CacheLayerMixin

from h2o_kv._C import Budget
from h2o_kv.hf.journal import Journal
from h2o_kv.hf.settings import Settings

__all__ = ["STATE_TENSORS", "LayerMemory", "LayerState", "Variable"]

# Tensors of a layer with one entry a slot, and with one entry a row.
_SLOT_STATE = ("keys", "values", "scores", "positions")
_ROW_STATE = (*_SLOT_STATE, "tokens_seen", "row_budget")
# With the one that every step makes anew, all tensors of a layer: what is copied and saved.
STATE_TENSORS = (*_ROW_STATE, "last_evicted")


class Variable(DynamicInt):
    """An int that torch.compile does not take for a constant: the next one needs no other graph.

    Elsewhere an int like any other, and so is what is computed from it.
    """

    __add__ = int.__add__
    __sub__ = int.__sub__
    __repr__ = int.__repr__


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


class LayerMemory(CacheLayerMixin):  # type: ignore[misc]
    """The tensors of one decoder layer. None before the first forward, which allocates them."""

    def __init__(self, settings: Settings, layer_idx: int) -> None:
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
        self._window: int | None = None
        self._one: Tensor | None = None  # int32, [1]: torch adds it faster than a number.

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

    # ---- Allocation.

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

    # ---- Rows.

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

    def insert_row(self, row: int, other: LayerMemory, source: int) -> None:
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
            self.journal = self.journal.cleared()
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

    def check_insertion(self, other: LayerMemory, source: int) -> None:
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

    def copy_from(self, other: LayerMemory) -> None:
        """Become a copy of `other` that shares no memory with it."""
        state = other.state()
        with torch.inference_mode(False), torch.no_grad():
            copies = {name: tensor.clone() for name, tensor in state.tensors.items()}
            self.restore(replace(state, tensors=copies))
            self.journal = None if other.journal is None else other.journal.map(torch.clone)
        self._in_prompt = other._in_prompt

    # ---- The whole.

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
        self.columns_seen = Variable(state.columns_seen) if state.columns_seen else 0
        self.budget = state.budget
        self._window = state.window
        # Where its length is known, the next forward finds out by itself.
        self._in_prompt = self.journal is not None and (
            not state.columns_seen or self.settings.prompt_length is not None
        )
        if self.keys is not None:
            with torch.inference_mode(False):
                self._note_tensors()
