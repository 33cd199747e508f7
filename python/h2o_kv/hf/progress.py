"""How far a forward has come through the layers of a cache, and how one that stops is undone.

A forward runs through the layers one by one, and an error, or Ctrl-C at any bytecode, may stop it in
between. So each layer leaves an `Undo` here before it changes anything. The last layer drops them all
in one assignment: before it the forward has not happened, after it it has. What a stopped forward
left is applied by the next use of the cache; doing that twice, or again after a part of it, gives the
same, so it may be stopped as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from h2o_kv.hf.journal import Before, State
from h2o_kv.hf.memory import LayerMemory

__all__ = ["Copies", "Progress", "Room", "StepRoom", "Undo"]


@dataclass
class Room:
    """What undoes new tokens that overwrite some slots: small copies, and room for what leaves.

    Attributes
    ----------
    results : list of (output, evicted)
        What the operator returned, put there by the call itself: between a call and the next bytecode
        an interrupt would lose it.
    """

    before: Before
    k_evicted: Tensor
    v_evicted: Tensor
    results: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    @classmethod
    def of(cls, state: State, key: Tensor) -> Room:
        """Room for new tokens of these keys, [batch, num_kv_heads, num_new, head_dim]."""
        return cls(Before.of(state), key.new_empty(key.shape), key.new_empty(key.shape))

    def restore(self, state: State) -> None:
        """Make the state, in place, what it was."""
        if self.results:
            _, evicted = self.results[-1]
            self.before.restore(state, evicted, self.k_evicted, self.v_evicted)


@dataclass
class Copies:
    """What undoes new tokens that may overwrite everything."""

    copies: State

    @classmethod
    def of(cls, state: State) -> Copies:
        """Copies of the state as it is."""
        return cls(State(*(tensor.clone() for tensor in state)))

    @property
    def before(self) -> Before:
        """The small tensors."""
        return Before(*self.copies[2:])

    def restore(self, state: State) -> None:
        """Make the state, in place, what it was."""
        for tensor, copy in zip(state, self.copies, strict=True):
            tensor.copy_(copy)


class StepRoom:
    """What undoes one new token a row: the same as `Room`, in memory that every step uses anew."""

    def __init__(self, state: State) -> None:
        # Ordinary tensors even under inference_mode, so that steps outside can use them.
        with torch.inference_mode(False), torch.no_grad():
            self.before = Before.of(state)
            self.k_evicted, self.v_evicted = (torch.zeros_like(t[:, :, :1]) for t in state[:2])
            self._state = state
            # Of one dtype, for which a device needs one kernel.
            self._from = [tensor.view(torch.int32) for tensor in state[2:]]
            self._to = [tensor.view(torch.int32) for tensor in self.before]

    def fits(self, layer: LayerMemory) -> bool:
        """Whether it was made for the tensors that the layer has now."""
        keys, values, scores, positions, tokens_seen = self._state
        return (
            layer.keys is keys
            and layer.values is values
            and layer.scores is scores
            and layer.positions is positions
            and layer.tokens_seen is tokens_seen
        )

    def take(self) -> None:
        """Copy the small tensors as they are."""
        torch._foreach_copy_(self._to, self._from)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(t.nbytes for t in (*self.before, self.k_evicted, self.v_evicted))

    def restore(self, state: State) -> None:
        """Make the state, in place, what it was."""
        self.before.restore(state, None, self.k_evicted, self.v_evicted)


@dataclass(slots=True)
class Undo:
    """What a layer was before the forward that is under way.

    Attributes
    ----------
    attributes : dict
        All attributes of the layer.
    saved : Room, Copies, StepRoom or None
        What undoes its step in place; None while there was none, and for a layer that was empty.
    """

    attributes: dict[str, Any]
    saved: Room | Copies | StepRoom | None = None


class Progress:
    """What the layers of a cache share.

    Attributes
    ----------
    awaiting : int or None
        The layer that returned its keys from `update` and was not found by an attention function yet.
    undo : dict of int to Undo
        Of the layers that a forward under way, or one that stopped, has come to.
    pending : callable or None
        A change of the whole cache that has begun. Calling it finishes the change, or says why not.
    compileable : bool
        Whether generate() may compile the decode step.
    """

    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers
        self.awaiting: int | None = None
        self.undo: dict[int, Undo] = {}
        self.pending: Callable[[], None] | None = None
        self.compileable = False
        self._stopped: tuple[int, int | None] | None = None

    def begin(self, layer_idx: int, attributes: dict[str, Any]) -> Undo:
        """Note what a layer is before it changes anything."""
        undo = self.undo[layer_idx] = Undo(attributes.copy())
        return undo

    def end(self, layer_idx: int) -> None:
        """Note that a layer has done its step; with the last one the forward has happened."""
        if layer_idx == self.num_layers - 1:
            self._stopped = None
            self.undo = {}

    def change(self, operation: Callable[[], None]) -> None:
        """Do what must be done as a whole: if it is stopped, the next use does it again."""
        self.pending = operation
        self.finish()

    def finish(self) -> None:
        """Finish the change that has begun, if there is one."""
        if self.pending is not None:
            self.pending()
            self.pending = None

    def stops_again(self) -> bool:
        """Note where a forward stopped; whether the one before it stopped in the same place."""
        stopped = len(self.undo), self.awaiting
        again = stopped == self._stopped
        self._stopped = stopped
        return again
