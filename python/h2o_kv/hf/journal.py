"""What a layer keeps of its latest forwards, so that they can be undone exactly.

A step overwrites the slot of the token that leaves and adds to every score. So that it can be taken
back, a forward leaves here a copy of scores and positions as they were before it, and the keys and
values that left (`k_evicted`, `v_evicted` of h2o_attention_decode). A forward of which some tokens
stay is undone as a whole, and those tokens go through the operator once more, which gives the same
bits again; so their queries, keys and values are kept too. While a budget moves (budgets.py) tokens
leave between steps as well, and memory may change its size: then all of the state is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Entry", "Forward", "Journal"]


class Forward(NamedTuple):
    """New tokens as the operator took them one by one, and what left at each."""

    query: Tensor  # [batch, num_q_heads, num_new, head_dim]
    key: Tensor  # [batch, num_kv_heads, num_new, head_dim], and so are value and v_evicted
    value: Tensor
    position: Tensor  # int32, [batch, num_new]; -1 = padding
    evicted: Tensor  # int32, [batch, num_kv_heads, num_new or, of a moving budget, more]; -1 = none
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


@dataclass
class Entry:
    """Forwards that follow each other, and the state of the layer before the first of them."""

    scores: Tensor  # [batch, num_kv_heads, capacity]
    positions: Tensor  # int32, [batch, num_kv_heads, capacity]
    tokens_seen: Tensor  # int32, [batch]
    # Copies of the layer's other tensors by their names, if its budget moved then.
    others: dict[str, Tensor] = field(default_factory=dict)
    forwards: list[Forward] = field(default_factory=list)
    num_columns: int = 0  # new tokens of each row, padding included

    def append(self, forward: Forward) -> None:
        """Add the forward that followed."""
        self.forwards.append(forward)
        self.num_columns += forward.num_columns

    def extend(self, later: Entry) -> None:
        """Add those of the entry that followed."""
        self.forwards += later.forwards
        self.num_columns += later.num_columns

    def keep_first(self, columns: int) -> None:
        """Drop all but the first `columns` tokens."""
        forwards, self.forwards, self.num_columns = self.forwards, [], 0
        for forward in forwards:
            if columns > self.num_columns:
                self.append(forward.first(columns - self.num_columns))

    def map(self, change: Callable[[Tensor], Tensor]) -> Entry:
        """The same with `change` of each tensor."""
        return Entry(
            scores=change(self.scores),
            positions=change(self.positions),
            tokens_seen=change(self.tokens_seen),
            others={name: change(tensor) for name, tensor in self.others.items()},
            forwards=[forward.map(change) for forward in self.forwards],
            num_columns=self.num_columns,
        )

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor held."""
        yield from (self.scores, self.positions, self.tokens_seen, *self.others.values())
        for forward in self.forwards:
            yield from forward[:-1]

    def restore(self, layer: Any) -> None:
        """Make the state of an H2OLayer what it was before these forwards, in place if it has its size.

        What slots hold that were empty is left as it is: nobody reads it.
        """
        before = {name: getattr(self, name) for name in ("scores", "positions", "tokens_seen")}
        before.update(self.others)
        if not self.others:
            self._bring_back(layer.keys, layer.values, layer.positions)
        for name, tensor in before.items():
            now = getattr(layer, name)
            if now is not None and now.shape == tensor.shape:
                now.copy_(tensor)
            else:
                setattr(layer, name, tensor.clone())

    def _bring_back(self, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        """Put keys and values that left into the slots where they were."""
        overwritten = (positions != self.positions) & (self.positions >= 0)
        index = row, head, _ = overwritten.nonzero(as_tuple=True)
        evicted, k_evicted, v_evicted = (
            torch.cat([getattr(forward, name) for forward in self.forwards], 2)
            for name in ("evicted", "k_evicted", "v_evicted")
        )
        # A position is in one slot only and never comes back, so it left once.
        left = evicted[row, head] == self.positions[index][:, None]
        column = left.to(torch.uint8).argmax(1)
        keys[index] = k_evicted[row, head, column]
        values[index] = v_evicted[row, head, column]


class Journal:
    """The latest forwards of a layer, of which the last `depth` tokens can be taken back.

    Parameters
    ----------
    depth : int, tokens

    Attributes
    ----------
    entries : list of Entry
        From the oldest to the latest. At most three, with at most 2 * depth tokens (depth + 1 where
        one forward has so many).
    unverified : int
        Tokens of the latest forward if they were too many to be recorded, else 0.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.entries: list[Entry] = []
        self.unverified = 0

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

    def add(self, entry: Entry) -> None:
        """Record what has just happened, and forget what is no longer needed."""
        entries = self.entries
        if len(entries) > 1 and entries[-2].num_columns + entries[-1].num_columns <= self.depth:
            # One copy of scores and positions serves for both: they are rarely undone.
            entries[-2].extend(entries.pop())
        entries.append(entry)
        while self.num_columns - entries[0].num_columns >= self.depth:
            del entries[0]
        self.unverified = 0

    def clear(self, unverified: int = 0) -> None:
        """Forget everything; `unverified` tokens have come that were too many."""
        self.entries.clear()
        self.unverified = unverified

    def take_back(self, columns: int, layer: Any) -> list[Forward]:
        """Undo the last `columns` tokens, and perhaps some before them, in the state of an H2OLayer.

        Returns
        -------
        forwards : list of Forward
            Those before them, which must go through the operator again. They are recorded already.
        """
        while columns > 0:
            entry = self.entries.pop()
            entry.restore(layer)
            columns -= entry.num_columns
        if columns == 0:
            return []
        entry.keep_first(-columns)
        self.entries.append(entry)
        return entry.forwards

    def map(self, change: Callable[[Tensor], Tensor]) -> Journal:
        """The same with `change` of each tensor; the first dimension of all of them is the rows."""
        journal = Journal(self.depth)
        journal.entries = [entry.map(change) for entry in self.entries]
        journal.unverified = self.unverified
        return journal
