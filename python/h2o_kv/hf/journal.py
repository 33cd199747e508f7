"""What a layer keeps of its latest forwards, so that they can be undone exactly.

A step overwrites the slot of the token that leaves and adds to every score. So that it can be taken
back, a forward leaves here a copy of scores and positions as they were before it, and the keys and
values that left (`k_evicted`, `v_evicted` of h2o_attention_decode). A forward of which some tokens
stay is undone as a whole, and those tokens go through the operator once more, which gives the same
bits again; so their queries, keys and values are kept too. While a budget moves (budgets.py) tokens
leave between steps as well, and memory may change its size: then all of the state is copied.

Everything here is a value: what changes a journal makes a new one, so that a forward that stops
half-way leaves the layer with the journal that it had.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Before", "Entry", "Forward", "Journal", "State", "TakenBack"]


class State(NamedTuple):
    """What a step changes in place: a layer's own tensors."""

    keys: Tensor  # [batch, num_kv_heads, capacity, head_dim], and so are values
    values: Tensor
    scores: Tensor  # [batch, num_kv_heads, capacity]
    positions: Tensor  # int32, [batch, num_kv_heads, capacity]; -1 = empty
    tokens_seen: Tensor  # int32, [batch]


class Before(NamedTuple):
    """Copies of what a step changes everywhere; the rest is in the slots that it overwrites."""

    scores: Tensor
    positions: Tensor
    tokens_seen: Tensor

    @classmethod
    def of(cls, state: State) -> Before:
        """Copies of the state as it is."""
        return cls(state.scores.clone(), state.positions.clone(), state.tokens_seen.clone())

    def restore(
        self, state: State, evicted: Tensor | None, k_evicted: Tensor, v_evicted: Tensor
    ) -> None:
        """Make the state, in place, what it was before the new tokens whose evictions these are.

        What slots hold that were empty is left as it is: nobody reads it. Doing it twice, or once
        more after a part of it, does no harm.

        Parameters
        ----------
        state : State
        evicted : Tensor, int32, [batch, num_kv_heads, num_new], or None
            Position of the token in each column of the other two; None where there is one column.
        k_evicted, v_evicted : Tensor, [batch, num_kv_heads, num_new, head_dim]
        """
        overwritten = (state.positions != self.positions) & (self.positions >= 0)
        index = row, head, _ = overwritten.nonzero(as_tuple=True)
        column: Tensor | int = 0
        if evicted is not None:
            # A position is in one slot only and never comes back, so it left once.
            left = evicted[row, head] == self.positions[index][:, None]
            column = left.to(torch.uint8).argmax(1)
        state.keys[index] = k_evicted[row, head, column]
        state.values[index] = v_evicted[row, head, column]
        state.scores.copy_(self.scores)
        state.positions.copy_(self.positions)
        state.tokens_seen.copy_(self.tokens_seen)


class Forward(NamedTuple):
    """New tokens as the operator took them one by one, and what left at each."""

    query: Tensor  # [batch, num_q_heads, num_new, head_dim]
    key: Tensor  # [batch, num_kv_heads, num_new, head_dim], and so are value and v_evicted
    value: Tensor
    position: Tensor  # int32, [batch, num_new]; -1 = padding
    evicted: Tensor  # int32, [batch, num_kv_heads, num_new]; -1 = none
    k_evicted: Tensor
    v_evicted: Tensor
    scale: float | None

    @property
    def num_columns(self) -> int:
        """New tokens of each row, padding included."""
        return self.position.shape[1]

    def map(self, change: Callable[[Tensor], Tensor]) -> Forward:
        """The same with `change` of each tensor."""
        return Forward(
            query=change(self.query),
            key=change(self.key),
            value=change(self.value),
            position=change(self.position),
            evicted=change(self.evicted),
            k_evicted=change(self.k_evicted),
            v_evicted=change(self.v_evicted),
            scale=self.scale,
        )

    def first(self, columns: int) -> Forward:
        """The first `columns`, in memory of their own; all, if there are no more."""
        if columns >= self.num_columns:
            return self
        return self.map(lambda tensor: tensor.narrow(min(2, tensor.ndim - 1), 0, columns).clone())


@dataclass(frozen=True)
class Entry:
    """Forwards that follow each other, and the state of the layer before the first of them."""

    before: Before
    forwards: tuple[Forward, ...]
    # Copies of the layer's other tensors by their names, if its budget moved then.
    others: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def num_columns(self) -> int:
        """New tokens of each row, padding included."""
        return sum(forward.num_columns for forward in self.forwards)

    def followed_by(self, later: Entry) -> Entry:
        """Join this one and the one that followed."""
        return replace(self, forwards=self.forwards + later.forwards)

    def first(self, columns: int) -> Entry:
        """The same with the first `columns` tokens alone."""
        forwards: list[Forward] = []
        for forward in self.forwards:
            if columns > 0:
                forwards.append(forward.first(columns))
                columns -= forward.num_columns
        return replace(self, forwards=tuple(forwards))

    def map(self, change: Callable[[Tensor], Tensor]) -> Entry:
        """The same with `change` of each tensor."""
        forwards = tuple(forward.map(change) for forward in self.forwards)
        others = {name: change(tensor) for name, tensor in self.others.items()}
        return Entry(Before(*map(change, self.before)), forwards, others)

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor held."""
        yield from self.before
        yield from self.others.values()
        for forward in self.forwards:
            yield from forward[:-1]

    def restore(self, layer: Any) -> None:
        """Make an H2OLayer what it was before these forwards: in place, if its memory has its size."""
        if not self.others:
            evicted, k_evicted, v_evicted = (
                torch.cat([getattr(forward, name) for forward in self.forwards], 2)
                for name in ("evicted", "k_evicted", "v_evicted")
            )
            self.before.restore(layer.step_state(), evicted, k_evicted, v_evicted)
            return
        for name, tensor in {**self.before._asdict(), **self.others}.items():
            now = getattr(layer, name)
            if now is not None and now.shape == tensor.shape:
                now.copy_(tensor)
            else:
                setattr(layer, name, tensor.clone())


class TakenBack(NamedTuple):
    """How tokens are taken back."""

    undone: Entry  # Forwards to be undone together.
    again: tuple[Forward, ...]  # Those of them that go through the operator once more.
    journal: Journal  # Afterwards.


@dataclass(frozen=True)
class Journal:
    """The latest forwards of a layer, of which the last `depth` tokens can be taken back.

    Attributes
    ----------
    depth : int, tokens
    entries : tuple of Entry
        From the oldest to the latest. At most three, with at most 2 * depth tokens (depth + 1 where
        one forward has so many).
    unverified : int
        Tokens of the latest forward if they were too many to be recorded, else 0.
    """

    depth: int
    entries: tuple[Entry, ...] = ()
    unverified: int = 0

    @property
    def num_columns(self) -> int:
        """Tokens held, padding included."""
        return sum(entry.num_columns for entry in self.entries)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(tensor.nbytes for entry in self.entries for tensor in entry.tensors())

    def takes(self, columns: int) -> bool:
        """Whether a forward of so many tokens is recorded: drafts and the token before them."""
        return columns <= self.depth + 1

    def with_entry(self, entry: Entry) -> Journal:
        """The journal after what has just happened, without what is no longer needed."""
        entries = list(self.entries)
        if len(entries) > 1 and entries[-2].num_columns + entries[-1].num_columns <= self.depth:
            # One copy of scores and positions serves for both: they are rarely undone.
            entries[-2:] = [entries[-2].followed_by(entries[-1])]
        entries.append(entry)
        while sum(entry.num_columns for entry in entries[1:]) >= self.depth:
            del entries[0]
        return Journal(self.depth, tuple(entries))

    def cleared(self, unverified: int = 0) -> Journal:
        """The journal after `unverified` tokens that were too many, or after what nobody undoes."""
        return Journal(self.depth, unverified=unverified)

    def take_back(self, columns: int) -> TakenBack:
        """Say how the last `columns` tokens are taken back: >= 1, of those held."""
        entries = list(self.entries)
        undone = entries.pop()
        while undone.num_columns < columns:
            undone = entries.pop().followed_by(undone)
        again = undone.first(undone.num_columns - columns)
        if again.forwards:
            entries.append(again)
        return TakenBack(undone, again.forwards, Journal(self.depth, tuple(entries)))

    def map(self, change: Callable[[Tensor], Tensor]) -> Journal:
        """The same with `change` of each tensor; the first dimension of all of them is the rows."""
        return replace(self, entries=tuple(entry.map(change) for entry in self.entries))
