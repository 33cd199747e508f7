"""What a layer of an H2OCache holds: its tensors, and what moves rows of them.

Whatever moves a slot or a row moves all of its parts together; the step itself is layer.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.sym_node import DynamicInt

from h2o_kv._C import Budget
from h2o_kv.hf.journal import State
from h2o_kv.hf.settings import Settings
from h2o_kv.hf.sharing import SLOT_STATE, SharableMemory

__all__ = ["STATE_TENSORS", "LayerMemory", "LayerState", "Variable", "check_alike"]

# Tensors of a layer with one entry a row, and all: the one that every step makes anew, too.
_ROW_STATE = (*SLOT_STATE, "tokens_seen", "row_budget", "row_target")
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


class LayerMemory(SharableMemory):
    """The tensors of one decoder layer. None before the first forward, which allocates them."""

    batch_size: int

    def __init__(self, settings: Settings, layer_idx: int) -> None:
        super().__init__()
        self.settings = settings
        self.layer_idx = layer_idx
        self.scores = None
        self.positions = None
        self.tokens_seen: Tensor | None = None
        self.columns_seen = 0
        self.budget = None
        self.row_budget: Tensor | None = None
        self.row_target: Tensor | None = None
        self.held_at: int | None = None
        self._pace = 0  # The most of any row in row_target; 0 = no budget moves.
        self.last_evicted = None
        self.journal = None
        self._in_prompt = False  # While recording: whether some row's prompt may still go on.
        self._window: int | None = None
        self._alibi_slopes: Tensor | None = None  # [num_q_heads]: those of the latest step
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
        """Budget of every row, or the largest one where they differ; where one moves, its target."""
        return self._budget

    @budget.setter
    def budget(self, budget: Budget | None) -> None:
        self._budget = budget
        # As the operator takes it: a step does not ask C++ for each.
        self._counts: tuple[int, ...] = () if budget is None else tuple(budget)

    @property
    def capacity(self) -> int | None:
        """Slots of each row and KV head."""
        positions = self.held("positions")
        return None if positions is None else positions.shape[2]

    def most_kept(self) -> list[int]:
        """Tokens that each row keeps, in the KV head that keeps most; asks the device."""
        assert self.positions is not None
        kept: list[int] = (self.positions >= 0).sum(-1).amax(1).tolist()
        return kept

    # ---- Allocation.

    def _allocate(self, key: Tensor, value: Tensor, lengths: Sequence[int] | None) -> None:
        """Resolve the budget of each row and make empty tensors, or keep those that fit."""
        self.own()
        batch, num_kv_heads, _, head_dim = key.shape
        if value.shape[3] != head_dim:
            raise ValueError(
                "H2OCache: keys and values must have the same head_dim, got "
                f"{head_dim} and {value.shape[3]}"
            )
        if lengths is None:
            lengths = self._given_lengths(batch)
        dtype = self.settings.dtype or torch.promote_types(key.dtype, value.dtype)
        # Made as ordinary tensors even under inference_mode, so that the cache can be used outside.
        with torch.inference_mode(False):
            self.device = key.device
            policies = zip(self.settings.policies(batch), lengths, strict=True)
            self._keep_to([policy.resolve(length) for policy, length in policies])
            assert self.budget is not None
            shape = (batch, num_kv_heads, self.budget.total)
            if (
                self.keys is not None
                and self.keys.shape == (*shape, head_dim)
                and self.keys.dtype == dtype
                and self.keys.device == key.device
            ):
                return
            score_dtype = torch.float64 if dtype == torch.float64 else torch.float32
            with _asking_for(self.budget.total, 2 * math.prod((*shape, head_dim)) * dtype.itemsize):
                keys = torch.zeros(*shape, head_dim, dtype=dtype, device=key.device)
                values = torch.zeros(*shape, head_dim, dtype=dtype, device=key.device)
                scores = torch.zeros(shape, dtype=score_dtype, device=key.device)
                positions = torch.full(shape, -1, dtype=torch.int32, device=key.device)
            self.keys, self.values, self.scores, self.positions = keys, values, scores, positions
            self.tokens_seen = torch.zeros(batch, dtype=torch.int32, device=key.device)
            self._note_tensors()

    def _keep_to(self, budgets: Sequence[Budget]) -> None:
        """Set the budget of each row."""
        self.row_budget = None
        if budgets:
            self.budget = max(budgets, key=lambda budget: budget.total)
            if any(budget != self.budget for budget in budgets):
                self.row_budget = self._per_row(budgets)

    def _per_row(self, numbers: Sequence[Any]) -> Tensor:
        """Numbers of each row, or a budget of each, as the operator takes them."""
        rows = [tuple(one) if isinstance(one, Budget) else one for one in numbers]
        return torch.tensor(rows, dtype=torch.int32, device=self.device)

    def _aim(self, row_target: Tensor | None) -> None:
        """Set where budgets that move go."""
        self.row_target = row_target
        moves = row_target is not None and row_target.shape[0] > 0
        self._pace = int(row_target[:, 3].max()) if moves else 0  # type: ignore[index]

    def _resize(self, capacity: int) -> None:
        """Give each row and KV head so many slots, at least as many as it fills."""
        former = self.capacity
        if capacity == former:
            return
        self.own()
        assert self.keys is not None
        assert self.positions is not None
        assert former is not None
        resized = {}
        front = None if capacity > former else _front(self.positions, capacity)
        num_bytes = 2 * self.keys[:, :, 0].nbytes * capacity
        with _asking_for(capacity, num_bytes):
            for name in SLOT_STATE:
                old = getattr(self, name)
                if front is not None:
                    resized[name] = _taken(old, front)
                    continue
                shape = (*old.shape[:2], capacity, *old.shape[3:])
                resized[name] = old.new_full(shape, -1 if name == "positions" else 0)
                resized[name][:, :, :former] = old
        # At once, since an interrupt must not find sizes that differ.
        self.__dict__.update({f"_{name}": t for name, t in resized.items()}, step_room=None)
        self._have_angles()

    def _note_tensors(self) -> None:
        """Set what follows from the tensors."""
        keys = self.held("keys")
        assert keys is not None
        self.device = keys.device
        self.batch_size = keys.shape[0]
        self._one = torch.ones(1, dtype=torch.int32, device=self.device)
        self.is_initialized = True
        self._have_angles()

    def _have_angles(self) -> None:
        """With rolling positions, have the angles of decode steps: a compiled step cannot make them."""
        rolling, keys = self.settings.rolling, self.held("keys")
        if rolling is not None and keys is not None:
            rolling.prepare(keys)

    def _given_lengths(self, batch: int) -> Sequence[int]:
        lengths = self.settings.prompt_length
        if not isinstance(lengths, tuple):
            return [lengths or 0] * batch
        if len(lengths) != batch:
            raise ValueError(
                f"H2OCache: prompt_length must have one entry a row = {batch}, got {len(lengths)}"
            )
        return lengths

    def _may_be_in_prompt(self) -> bool:
        """Whether every row is within its prompt, whose length is known, or nothing was seen."""
        if self.columns_seen == 0:
            return True
        lengths, seen = self.settings.prompt_length, self.tokens_seen
        if lengths is None or seen is None:
            return False
        if isinstance(lengths, tuple) and len(lengths) != len(seen):
            return False  # Rows came or went since.
        return bool((seen.cpu() < torch.tensor(lengths)).all())

    # ---- Rows.

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes the former row beam_idx[i]. In place."""
        self._take_rows(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row becomes `repeats` rows next to each other."""
        if self.is_initialized:
            rows = torch.arange(self.batch_size, device=self.device)
            self._take_rows(rows.repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices`: integers, or a bool for each row."""
        if self.is_initialized:
            rows = torch.arange(self.batch_size, device=self.device)
            self._take_rows(rows[indices.to(rows.device)])

    def _take_rows(self, index: Tensor) -> None:
        if not self.is_initialized:
            return
        same_batch = index.shape[0] == self.batch_size
        with torch.inference_mode(False), torch.no_grad():
            index = index.to(self.device)
            for name in _ROW_STATE:
                state = None if self._hold and name in SLOT_STATE else getattr(self, name)
                if state is None:
                    continue
                rows = state.index_select(0, index)
                if same_batch:
                    state.copy_(rows)
                else:
                    setattr(self, name, rows)
            if self._hold is not None:
                self._hold.take_rows(index)
            elif self.last_evicted is not None:
                self.last_evicted = self.last_evicted.index_select(0, index)
            if self.journal is not None and self._hold is None:
                self.journal = self.journal.map(lambda tensor: tensor.index_select(0, index))
            self.batch_size = index.shape[0]
            self._rows_changed()

    def _rows_changed(self) -> None:
        """Set what follows from budgets of rows."""
        self._aim(self.row_target)

    def insert_row(self, row: int, other: LayerMemory, source: int) -> None:
        """Row `row` becomes row `source` of `other`; `check_insertion` says whether it can."""
        self._forget_row(row)
        assert self.positions is not None
        assert self.tokens_seen is not None
        assert other.tokens_seen is not None
        assert other.positions is not None
        # What a larger cache holds may lie anywhere in it, and moves to the front.
        front = _front(other.positions[source], self.positions.shape[2])
        for name in SLOT_STATE:
            theirs = _taken(getattr(other, name)[source], front)
            getattr(self, name)[row][:, : theirs.shape[1]] = theirs
        self.tokens_seen[row] = other.tokens_seen[source]
        self._give_budget(row, other, source)
        self.columns_seen = max(self.columns_seen, other.columns_seen)
        self._window = other._window
        self._rows_changed()

    def _give_budget(self, row: int, other: LayerMemory, source: int) -> None:
        """Let row `row` keep to the budget of row `source` of `other`, and move as it does."""
        assert self.budget is not None
        assert self.tokens_seen is not None
        budget, in_force = other.budget_of(source), other.budget_in_force(source)
        every = [self.budget] * self.tokens_seen.shape[0]
        if self.row_budget is None:
            if budget == in_force == self.budget:
                return
            self.row_budget = self._per_row(every)
        self.row_budget[row] = self._per_row([in_force])[0]
        self.budget = max(self.budget, budget, key=lambda budget: budget.total)
        pace = 0
        if in_force != budget:
            assert other.row_target is not None
            pace = int(other.row_target[source, 3])
        if pace > 0 and self.row_target is None:
            self.row_target = torch.nn.functional.pad(self.row_budget, (0, 1))
        if self.row_target is not None:
            self.row_target[row] = self._per_row([*budget, pace])

    def release_row(self, row: int) -> None:
        """Forget what row `row` has seen; its budget stays. What `crop` could undo is forgotten too."""
        self._forget_row(row)
        if self.row_target is not None:
            assert self.row_budget is not None
            self.row_budget[row] = self.row_target[row, :3]
            self._rows_changed()

    def _forget_row(self, row: int) -> None:
        self.own()
        if self.journal is not None:
            self.journal = self.journal.cleared()
        self._empty(row)
        self.last_evicted = None

    def _empty(self, rows: int | slice) -> None:
        """Make these rows what they were when they were allocated."""
        for name in (*SLOT_STATE, "tokens_seen"):
            getattr(self, name)[rows].fill_(-1 if name == "positions" else 0)

    def budget_of(self, row: int) -> Budget:
        """The budget of this row, or the one that it moves to."""
        return self._budget_in(self.row_budget if self.row_target is None else self.row_target, row)

    def budget_in_force(self, row: int) -> Budget:
        """What this row keeps to in the next step."""
        return self._budget_in(self.row_budget, row)

    def _budget_in(self, rows: Tensor | None, row: int) -> Budget:
        assert self.budget is not None
        if rows is None:
            return self.budget
        num_sink, num_heavy, num_recent = rows[row, :3].tolist()
        return Budget(num_sink=num_sink, num_heavy=num_heavy, num_recent=num_recent)

    def check_insertion(self, other: LayerMemory, source: int) -> None:
        """Raise where this layer cannot take row `source` of `other`.

        Raises
        ------
        ValueError
            Shape, dtype or device differ, or the row's budget is larger than the capacity here.
        """
        keys, other_keys = self.held("keys"), other.held("keys")
        assert keys is not None
        assert other_keys is not None
        facts = {
            "number of KV heads": (keys.shape[1], other_keys.shape[1]),
            "head_dim": (keys.shape[3], other_keys.shape[3]),
            "dtype": (keys.dtype, other_keys.dtype),
            "device": (keys.device, other_keys.device),
        }
        check_alike(facts, f", layer {self.layer_idx}")
        budget, capacity = other.budget_in_force(source), keys.shape[2]
        if budget.total > capacity:
            raise ValueError(
                f"H2OCache.insert: the row's budget must be <= capacity = {capacity}, got "
                f"{budget.total} tokens, layer {self.layer_idx}"
            )

    # ---- The whole.

    def share(self, other: LayerMemory) -> None:
        """Become what `other` is; the two share the memory of slots until one of them writes."""
        self.columns_seen = other.columns_seen
        self.budget = other.budget
        self.held_at = other.held_at
        self._window = other._window
        self._in_prompt = other._in_prompt
        self._alibi_slopes = other._alibi_slopes
        self.journal = other.journal  # A value: nobody writes into its tensors.
        if not other.is_initialized:
            return
        self._share_slots(other)
        with torch.inference_mode(False), torch.no_grad():
            for name in ("tokens_seen", "row_budget", "row_target"):
                tensor = getattr(other, name)
                setattr(self, name, None if tensor is None else tensor.clone())
            self._note_tensors()
            self.batch_size = other.batch_size
            self._aim(self.row_target)

    def step_state(self) -> State:
        """The tensors that a step changes."""
        assert self.keys is not None
        assert self.values is not None
        assert self.scores is not None
        assert self.positions is not None
        assert self.tokens_seen is not None
        return State(self.keys, self.values, self.scores, self.positions, self.tokens_seen)

    def state(self) -> LayerState:
        """What `restore` needs; its tensors are the layer's own."""
        named = {name: getattr(self, name) for name in STATE_TENSORS}
        tensors = {name: tensor for name, tensor in named.items() if tensor is not None}
        return LayerState(self.columns_seen, self.budget, self._window, tensors)

    def moved(self, device: torch.device | None, dtype: torch.dtype | None) -> dict[str, Tensor]:
        """Its tensors on that device, keys and values of that dtype; none where they are so already."""
        keys = self.held("keys")
        if keys is None or (device in (None, keys.device) and dtype in (None, keys.dtype)):
            return {}
        dtypes = {}
        if dtype is not None:
            scores = torch.float64 if dtype == torch.float64 else torch.float32
            dtypes = {"keys": dtype, "values": dtype, "scores": scores}
        is_held = self._hold is not None  # What others may hold, too, is not moved itself.
        with torch.inference_mode(False), torch.no_grad():
            return {
                name: tensor.to(device=device, dtype=dtypes.get(name), copy=is_held)
                for name, tensor in self.state().tensors.items()
            }

    def move(self, tensors: dict[str, Tensor]) -> None:
        """Go on with these tensors of `moved`; what `crop` could undo is forgotten."""
        if not tensors:
            return
        self.let_go()
        for name, tensor in tensors.items():
            setattr(self, name, tensor)
        if self.journal is not None:
            self.journal = self.journal.cleared()
        with torch.inference_mode(False):
            self._note_tensors()

    def restore(self, state: LayerState) -> None:
        """Make a new layer the one that `state` was taken of; its tensors become the layer's own."""
        for name in STATE_TENSORS:
            setattr(self, name, state.tensors.get(name))
        # As a prompt leaves it, for a step that is compiled after this.
        self.columns_seen = Variable(state.columns_seen) if state.columns_seen else 0
        self.budget = state.budget
        self._aim(self.row_target)
        self._window = state.window
        self._in_prompt = self.journal is not None and self._may_be_in_prompt()
        if self.keys is not None:
            with torch.inference_mode(False):
                self._note_tensors()


def check_alike(facts: Mapping[str, tuple[Any, Any]], where: str = "") -> None:
    """Refuse an insertion unless each fact, (here, in the other cache), is the same."""
    for name, (mine, theirs) in facts.items():
        if mine != theirs:
            raise ValueError(
                f"H2OCache.insert: {name} of both caches must be the same, got {mine} here and "
                f"{theirs} in other{where}"
            )


def _front(positions: Tensor, num_slots: int) -> Tensor:
    """Slots [..., num_slots or fewer] of positions [..., capacity]: those in use first, in order."""
    in_use = (positions >= 0).to(torch.uint8)
    return torch.argsort(in_use, dim=-1, descending=True, stable=True)[..., :num_slots]


def _taken(tensor: Tensor, slots: Tensor) -> Tensor:
    """What a tensor [..., capacity] or [..., capacity, head_dim] holds in these slots."""
    if tensor.ndim > slots.ndim:
        return tensor.take_along_dim(slots[..., None], -2)
    return tensor.take_along_dim(slots, -1)


@contextmanager
def _asking_for(budget: int, num_bytes: int) -> Iterator[None]:
    """Say of what there is not enough memory."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise  # A device's own error says how much there is.
    except RuntimeError as error:
        raise MemoryError(
            f"H2OCache: the budget must fit into memory, got {budget} tokens: "
            f"{num_bytes / 1e9:.1f} GB of keys and values in each layer"
        ) from error
