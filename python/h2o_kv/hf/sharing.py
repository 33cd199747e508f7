"""Memory that layers share until one of them writes: what a fork costs before it goes its own way.

A fork holds the tensors of the layer that it came from, read-only, and which of their rows are its
own. Whoever writes first, fork or origin, copies its rows before; the last who holds the tensors as
they are has them to itself and copies nothing.

The copy is of a layer and of all rows of the writer. The operator takes the rows of a layer as one
tensor [batch, ...], with one address and a stride, and a step writes into every row that has a new
token: rows of one tensor cannot lie in two places, and those left behind would be copied one step
later. Layers are tensors of their own, so each is copied when the forward gets to it.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from h2o_kv.hf.journal import Journal

__all__ = ["SLOT_STATE", "SharableMemory"]

# Tensors of a layer with one entry a slot.
SLOT_STATE = ("keys", "values", "scores", "positions")
# What a fork shares; the rest of a layer is a few bytes a row.
_SHARED = (*SLOT_STATE, "last_evicted")


class _Shared:
    """Tensors that nobody writes into, and the holds on them."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors
        # Weak, so that a cache that is dropped gives its hold back by itself.
        self.holds: weakref.WeakSet[Hold] = weakref.WeakSet()


class Hold:
    """A layer's share of tensors whose first dimension is the rows.

    Parameters
    ----------
    tensors : dict of str to Tensor
        Of a layer, which gives them up to the hold.

    Attributes
    ----------
    rows : Tensor, int64, [rows of the layer], or None
        Which rows of the tensors are the layer's; None = all, in order.
    """

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._join(_Shared(tensors), None)

    def _join(self, shared: _Shared, rows: Tensor | None) -> None:
        self.rows = rows
        self._shared = shared
        self._is_held = True
        shared.holds.add(self)

    def another(self) -> Hold:
        """A hold of the same rows, for a fork."""
        hold = Hold.__new__(Hold)
        hold._join(self._shared, self.rows)
        return hold

    def take_rows(self, index: Tensor) -> None:
        """Row i becomes the former row index[i]; nothing is copied."""
        self.rows = index if self.rows is None else self.rows.index_select(0, index)

    def held(self, name: str) -> Tensor | None:
        """The shared tensor itself, with all of its rows."""
        return self._shared.tensors.get(name)

    def read(self, name: str) -> Tensor | None:
        """The layer's rows: the shared tensor where it is the same, else a copy made for this call."""
        tensor = self.held(name)
        return tensor if tensor is None or self.rows is None else self.copied(tensor)

    def copied(self, tensor: Tensor) -> Tensor:
        """The layer's rows of any tensor of so many rows, in memory of their own."""
        return tensor.clone() if self.rows is None else tensor.index_select(0, self.rows)

    @property
    def is_shared(self) -> bool:
        """Whether another layer holds the tensors, too."""
        return any(hold._is_held and hold is not self for hold in self._shared.holds)

    @property
    def owns(self) -> bool:
        """Whether the tensors are what the layer needs, and nobody else needs them."""
        # A graph is not to depend on what others hold: there, all is copied.
        return not torch.compiler.is_compiling() and self.rows is None and not self.is_shared

    def end(self) -> None:
        """The layer needs the tensors no more."""
        self._is_held = False


class SharedTensor:
    """Attribute of a SharableMemory: a tensor of its own, or its rows of a shared one."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name, self._own_name = name, f"_{name}"

    def __get__(self, layer: Any, owner: type) -> Tensor | None:
        hold: Hold | None = layer._hold
        tensor: Tensor | None
        tensor = getattr(layer, self._own_name) if hold is None else hold.read(self._name)
        return tensor

    def __set__(self, layer: Any, tensor: Tensor | None) -> None:
        if layer._hold is not None:
            layer.own()
        setattr(layer, self._own_name, tensor)


class SharableMemory(CacheLayerMixin):  # type: ignore[misc]
    """The tensors of a layer's slots, of which a fork needs no copy before one of the two writes.

    Whatever writes into them calls `own()` before; to read them needs nothing.
    """

    keys = SharedTensor()
    values = SharedTensor()
    scores = SharedTensor()
    positions = SharedTensor()
    last_evicted = SharedTensor()
    journal: Journal | None
    _hold: Hold | None = None  # While they are shared.
    # What undoes a step (rollback.py), made for the tensors of slots that there are.
    step_room: Any = None

    def held(self, name: str) -> Tensor | None:
        """A tensor of slots as it lies in memory; while it is shared, with rows of others."""
        tensor: Tensor | None = getattr(self, name) if self._hold is None else self._hold.held(name)
        return tensor

    @property
    def is_shared(self) -> bool:
        """Whether another layer, of a fork or of the cache that this one came from, holds them too."""
        return self._hold is not None and self._hold.is_shared

    def _share_slots(self, other: SharableMemory) -> None:
        """Hold what `other` has in its slots."""
        hold = other._hold
        if hold is None:
            tensors = {name: getattr(other, name) for name in _SHARED}
            hold = Hold({name: tensor for name, tensor in tensors.items() if tensor is not None})
            # At once, as in own().
            nothing = {f"_{name}": None for name in _SHARED}
            other.__dict__.update(nothing, _hold=hold, step_room=None)
        self._hold = hold.another()

    def own(self) -> None:
        """Have the memory of slots to itself: a copy of its rows, unless nobody else holds them."""
        hold = self._hold
        if hold is None:
            return
        tensors, journal = {name: hold.held(name) for name in _SHARED}, self.journal
        if not hold.owns:
            with torch.inference_mode(False), torch.no_grad():
                for name, tensor in tensors.items():
                    tensors[name] = None if tensor is None else hold.copied(tensor)
                journal = None if journal is None else journal.map(hold.copied)
        # At once: an interrupt finds the layer shared, or with memory of its own.
        own = {f"_{name}": tensor for name, tensor in tensors.items()}
        self.__dict__.update(own, _hold=None, journal=journal, step_room=None)
        hold.end()

    def let_go(self) -> None:
        """Give up what the layer has in its slots; who else holds it keeps it."""
        hold = self._hold
        nothing = {f"_{name}": None for name in _SHARED}
        self.__dict__.update(
            nothing, _hold=None, tokens_seen=None, step_room=None, is_initialized=False
        )
        if hold is not None:
            hold.end()

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles, which share nothing."""
        state = self.__dict__.copy()
        if self._hold is not None:
            state.update({f"_{name}": getattr(self, name) for name in _SHARED}, _hold=None)
            if self.journal is not None and self._hold.rows is not None:
                state["journal"] = self.journal.map(self._hold.copied)
        return state
