"""Twenty thousand operations in the lives of caches, beside a model that keeps each row apart.

The model is plain numpy in float64: for each row and KV head the tokens that it keeps, after each
operation a new value, so that taking back is going back. It shares no code with h2o_kv.
"""

from __future__ import annotations

import copy
import math
import pickle
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from h2o_kv import Budget, EvictionPolicy, H2OCache
from hf_models import tiny_config

Q_HEADS, HEADS, DIM = 4, 2, 4
GROUP = Q_HEADS // HEADS
MOST_ROWS, MOST_CACHES, MOST_TOKENS = 4, 4, 4
TOLERANCE = 1e-9


# ---- The model.


@dataclass(frozen=True)
class Head:
    """What a (row, KV head) keeps, in order of position."""

    positions: tuple[int, ...] = ()
    scores: Any = field(default_factory=lambda: np.zeros(0))
    keys: Any = field(default_factory=lambda: np.zeros((0, DIM)))
    values: Any = field(default_factory=lambda: np.zeros((0, DIM)))

    def join(
        self, query: Any, keys: Any, values: Any, positions: list[int], reduce: str
    ) -> tuple[Head, Any]:
        """New tokens attend, are scored and join; query [GROUP, n, DIM], output as it."""
        keys, values = np.concatenate([self.keys, keys]), np.concatenate([self.values, values])
        scores = np.concatenate([self.scores, np.zeros(len(positions))])
        output = np.zeros_like(query)
        for i in range(len(positions)):
            visible = len(self.positions) + i + 1
            logits = query[:, i] @ keys[:visible].T / math.sqrt(DIM)
            weights = np.exp(logits - logits.max(1, keepdims=True))
            weights /= weights.sum(1, keepdims=True)
            scores[:visible] += weights.sum(0) if reduce == "sum" else weights.max(0)
            output[:, i] = weights @ values[:visible]
        return Head((*self.positions, *positions), scores, keys, values), output

    def evict(self, budget: tuple[int, int, int]) -> tuple[Head, list[int]]:
        """Lowest scores leave until the budget holds; the positions that left, in order."""
        excess = len(self.positions) - sum(budget)
        if excess <= 0:
            return self, []
        sink, _, recent = budget
        newest = self.positions[-1]
        free = [
            (self.scores[i], position, i)
            for i, position in enumerate(self.positions)
            if sink <= position <= newest - recent
        ]
        victims = sorted(free)[:excess]
        assert len(victims) == excess
        stay = sorted({*range(len(self.positions))} - {i for _, _, i in victims})
        head = Head(
            tuple(self.positions[i] for i in stay),
            self.scores[stay],
            self.keys[stay],
            self.values[stay],
        )
        return head, [position for _, position, _ in victims]

    def rounded(self) -> Head:
        """As float32 holds it."""
        return replace(
            self,
            **{
                name: getattr(self, name).astype(np.float32).astype(np.float64)
                for name in ("scores", "keys", "values")
            },
        )


@dataclass(frozen=True)
class Row:
    seen: int
    heads: tuple[Head, ...]
    force: tuple[int, int, int]  # (sink, heavy, recent) that the next step keeps to
    target: tuple[int, int, int]
    pace: int = 0

    @classmethod
    def empty(cls, budget: tuple[int, int, int]) -> Row:
        return cls(0, (Head(),) * HEADS, budget, budget)

    def evict(self, budget: tuple[int, int, int]) -> tuple[Row, list[list[int]]]:
        """To a budget; who left each head."""
        done = [head.evict(budget) for head in self.heads]
        row = replace(self, heads=tuple(head for head, _ in done), force=budget)
        return row, [left for _, left in done]

    def nearer(self) -> tuple[Row, list[list[int]]]:
        """After a step of a budget that moves."""
        sink, heavy, recent = self.force
        return self.evict((sink, max(heavy - self.pace, self.target[1]), recent))


@dataclass(frozen=True)
class State:
    """A cache at some time."""

    rows: tuple[Row, ...] = ()
    columns: int = 0
    capacity: int = 0
    moves: bool = False
    held_at: int | None = None
    evicted: Any = None  # int [rows, HEADS, ...], of the step that led here

    def arrived(self) -> State:
        """The same, or where all rows are within the budgets that they move to."""
        if not self.moves or any(row.force != row.target for row in self.rows):
            return self
        rows = tuple(replace(row, pace=0) for row in self.rows)
        capacity = max(sum(row.target) for row in rows)
        held_at = self.columns if self.held_at is None else self.held_at
        return replace(self, rows=rows, moves=False, capacity=capacity, held_at=held_at)


@dataclass(frozen=True)
class Undo:
    before: State
    forward: int  # number of the forward
    evicted: Any


@dataclass
class Model:
    """What a cache must be."""

    policy: EvictionPolicy
    depth: int
    chunk: int | None  # None = one shot
    state: State = field(default_factory=State)
    events: list[tuple[int, Any, Any, int | None, int | None]] = field(default_factory=list)
    undo: list[Undo] = field(default_factory=list)
    records: bool = False
    forwards: int = 0

    def fork(self, n: int) -> Model:
        other = replace(self, events=list(self.events), undo=list(self.undo))
        other.take_rows([row for row in range(len(self.state.rows)) for _ in range(n)])
        return other

    def take_rows(self, index: list[int]) -> None:
        def taken(state: State) -> State:
            evicted = None if state.evicted is None else state.evicted[index]
            return replace(state, rows=tuple(state.rows[i] for i in index), evicted=evicted)

        self.state = taken(self.state).arrived()
        self.undo = [
            Undo(taken(each.before), each.forward, each.evicted[index]) for each in self.undo
        ]

    def join(self, q: Any, k: Any, v: Any, real: Any) -> Any:
        """Columns join together, as a prefill or one by one; the output."""
        batch, num_new = real.shape
        state, output = self.state, np.zeros_like(q)
        evicted = np.full((batch, HEADS, num_new), -1)
        rows = list(state.rows)
        for i, row in enumerate(rows):
            columns = np.flatnonzero(real[i])
            chunk = num_new if self.chunk is None or num_new == 1 else self.chunk
            for start in range(0, len(columns), chunk):
                some = columns[start : start + chunk]
                positions = [row.seen + j for j in range(len(some))]
                heads = []
                for h, head in enumerate(row.heads):
                    group = slice(h * GROUP, (h + 1) * GROUP)
                    head, out = head.join(
                        q[i, group][:, some], k[i, h, some], v[i, h, some], positions,
                        self.policy.gqa_reduce,
                    )  # fmt: skip
                    output[i, group, some] = out.transpose(1, 0, 2)
                    head, left = head.evict(row.force)
                    evicted[i, h, some[0] : some[0] + len(left)] = left
                    heads.append(head)
                row = replace(row, heads=tuple(heads), seen=row.seen + len(some))
            rows[i] = row
        state = replace(state, rows=tuple(rows), columns=state.columns + num_new)
        if state.moves:
            width = min(max(row.pace for row in rows), state.capacity)
            more = np.full((batch, HEADS, width), -1)
            for i, row in enumerate(rows):
                if real[i].any():
                    rows[i], left = row.nearer()
                    for h in range(HEADS):
                        more[i, h, : len(left[h])] = left[h]
            evicted = np.concatenate([evicted, more], 2)
            state = replace(state, rows=tuple(rows)).arrived()
        self.state = replace(state, evicted=evicted)
        return output

    def forward(self, q: Any, k: Any, v: Any, real: Any) -> Any:
        self.forwards += 1
        num_new = real.shape[1]
        if not self.records or num_new > self.depth + 1:
            self.undo.clear()
            return self.join(q, k, v, real)
        outputs, evicted = [], []
        apart = self.state.moves  # Then each token is a step for itself.
        for i in range(num_new):
            before, one = self.state, slice(i, i + 1)
            outputs.append(self.join(q[:, :, one], k[:, :, one], v[:, :, one], real[:, one]))
            self.forwards += apart
            evicted.append(self.state.evicted)
            self.undo.append(Undo(before, self.forwards, evicted[-1]))
        self.state = replace(self.state, evicted=np.concatenate(evicted, 2))
        return np.concatenate(outputs, 2)

    def crop(self, columns: int) -> None:
        self.state = self.undo[-columns].before
        del self.undo[-columns:]
        evicted = None
        if self.undo:
            last = self.undo[-1].forward
            evicted = np.concatenate([u.evicted for u in self.undo if u.forward == last], 2)
        self.state = replace(self.state, evicted=evicted).arrived()

    def set_budget(self, budgets: list[tuple[int, int, int]], most: int | None) -> None:
        state, rows, evicted = self.state, [], []
        old = tuple(row.target for row in state.rows)
        self.close_event()
        self.events.append((state.columns, old, tuple(budgets), most, None))
        for row, target in zip(state.rows, budgets, strict=True):
            sink, heavy, recent = target
            above = max(0, len(row.heads[0].positions) - sum(target))
            if most is None:
                row, left = row.evict(target)
                above = 0
            else:
                left = [[]] * HEADS
            pace = 0 if most is None or above == 0 else most - 1
            force = (sink, heavy + above, recent)
            rows.append(replace(row, force=force, target=target, pace=pace))
            evicted.append(left)
        width = max(len(left) for row in evicted for left in row)
        gone = [[left + [-1] * (width - len(left)) for left in row] for row in evicted]
        capacity = max(sum(row.force) for row in rows)
        state = replace(state, rows=tuple(rows), capacity=capacity, moves=True, held_at=None)
        evicted_array = np.array(gone, dtype=int).reshape(len(rows), HEADS, width)
        self.state = replace(state, evicted=evicted_array).arrived()
        self.undo.clear()

    def close_event(self) -> None:
        if self.events:
            self.events[-1] = (*self.events[-1][:4], self.state.held_at)

    def release(self, row: int) -> None:
        rows = list(self.state.rows)
        rows[row] = replace(Row.empty(rows[row].target), pace=rows[row].pace)
        self.state = replace(self.state, rows=tuple(rows), evicted=None).arrived()
        self.undo.clear()

    def insert(self, row: int, other: Model, source: int) -> None:
        rows, guest = list(self.state.rows), other.state.rows[source]
        comes_moving = guest.force != guest.target
        rows[row] = replace(guest, pace=guest.pace if comes_moving else 0)
        self.state = replace(
            self.state,
            rows=tuple(rows),
            moves=self.state.moves or comes_moving,
            columns=max(self.state.columns, other.state.columns),
            evicted=None,
        ).arrived()
        self.undo.clear()


def counts(budget: Budget) -> tuple[int, int, int]:
    return budget.num_sink, budget.num_heavy, budget.num_recent


# ---- Beside a cache.


def assert_equal(cache: H2OCache, model: Model) -> None:
    """No difference in positions, scores, keys, values, counts, budgets and who left."""
    (layer,), state = cache.layers, model.state
    assert layer.columns_seen == state.columns
    if not state.rows:
        assert state.columns == 0
        return
    assert layer.tokens_seen.tolist() == [row.seen for row in state.rows]
    if state.columns:
        assert cache.budgets is not None
        assert [counts(budget) for budget in cache.budgets] == [row.target for row in state.rows]
        in_force = [counts(layer.budget_in_force(i)) for i in range(len(state.rows))]
        assert in_force == [row.force for row in state.rows]
        assert (layer.row_target is not None) == state.moves
    assert tuple(layer.positions.shape) == (len(state.rows), HEADS, state.capacity)
    positions, scores, keys, values = (
        getattr(layer, name).numpy() for name in ("positions", "scores", "k_cache", "v_cache")
    )
    order = positions.argsort(-1)
    for i, row in enumerate(state.rows):
        for h, head in enumerate(row.heads):
            n = len(head.positions)
            slots = order[i, h, state.capacity - n :]
            assert tuple(positions[i, h, slots]) == head.positions, (i, h)
            if n < state.capacity:
                assert positions[i, h, order[i, h, state.capacity - n - 1]] == -1, (i, h)
            assert np.abs(scores[i, h, slots] - head.scores).max(initial=0) < TOLERANCE, (i, h)
            assert np.array_equal(keys[i, h, slots], head.keys), (i, h)
            assert np.array_equal(values[i, h, slots], head.values), (i, h)
    if state.evicted is None:
        assert layer.last_evicted is None
    else:
        assert layer.last_evicted.tolist() == state.evicted.tolist()
    model.close_event()
    events = [
        (
            event.position,
            tuple(map(counts, event.old)),
            tuple(map(counts, event.new)),
            event.max_evictions_per_step,
            event.held_at,
        )
        for event in cache.budget_events
    ]
    assert events == model.events
    assert layer.is_croppable == model.records
    if layer.journal is not None:
        held = layer.journal.num_columns
        assert held >= min(model.depth, len(model.undo))
        assert held <= len(model.undo)
        del model.undo[: len(model.undo) - held]


class Walk:
    """Caches with their models, and operations drawn from a seed."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.rng = random.Random(seed)
        self.arrays = np.random.default_rng(seed)
        self.file = folder / "session"
        self.config = tiny_config("llama", num_hidden_layers=1, num_attention_heads=Q_HEADS)
        self.log: list[str] = []
        self.done: dict[str, int] = {}
        self.caches: list[tuple[H2OCache, Model]] = []
        rng = self.rng
        self.policy = EvictionPolicy(
            **self.budget_of(rng.randint(2, 8)), gqa_reduce=rng.choice(["sum", "max"])
        )
        self.options: dict[str, Any] = {"max_rollback": rng.choice([None, 1, 3, 6])}
        if rng.random() < 0.5:
            self.options.update(prefill="streaming", prefill_chunk=rng.randint(2, 3))
        self.new()

    def budget_of(self, total: int) -> dict[str, int]:
        sink = self.rng.choice([0, 0, 1])
        recent = self.rng.choice([0, 1, total // 2, total - sink])
        recent = min(recent, total - sink)
        return {
            "num_sink": sink,
            "num_recent": recent,
            "num_heavy": total - sink - recent,
        }

    def new(self) -> None:
        cache = H2OCache(self.config, self.policy, **self.options)
        depth = self.options["max_rollback"]
        chunk = self.options.get("prefill_chunk")
        model = Model(self.policy, 32 if depth is None else depth, chunk, records=bool(depth))
        self.caches.append((cache, model))

    # ---- Operations; each returns what it says of itself, or None where it does not fit.

    def step(self, cache: H2OCache, model: Model) -> str:
        rng, first = self.rng, model.state.columns == 0
        batch = len(model.state.rows)
        if first and (batch == 0 or rng.random() < 0.5):
            batch = rng.randint(1, MOST_ROWS - 1)
        num_new = rng.choice([1, 1, 1, rng.randint(1, MOST_TOKENS)])
        if first:
            num_new = 1 if model.records else rng.randint(1, 12)
        real = np.ones((batch, num_new), dtype=bool)
        if rng.random() < 0.4:
            real = self.arrays.random((batch, num_new)) < 0.7
        if first:
            budget = counts(self.policy.budget())
            model.state = replace(
                model.state,
                rows=tuple(Row.empty(budget) for _ in range(batch)),
                capacity=sum(budget),
            )
        q, k, v = (
            self.arrays.standard_normal((batch, heads, num_new, DIM))
            for heads in (Q_HEADS, HEADS, HEADS)
        )
        k *= np.where(self.arrays.random((1, 1, num_new, 1)) < 0.3, 2.5, 1.0)
        mask = None if real.all() and rng.random() < 0.5 else torch.from_numpy(real)
        new = (torch.from_numpy(array.copy()) for array in (q, k, v))
        got = cache.layers[0].attend(*new, None if mask is None else mask[:, None, None], None)
        want = model.forward(q, k, v, real)
        assert np.abs(got.numpy() - want.transpose(0, 2, 1, 3)).max(initial=0) < TOLERANCE
        return f"step({real.astype(int).tolist()})"

    def reorder(self, cache: H2OCache, model: Model) -> str:
        rows = range(len(model.state.rows))
        index = [self.rng.choice(rows) for _ in rows]
        cache.reorder_cache(torch.tensor(index))
        model.take_rows(index)
        return f"reorder_cache({index})"

    def repeat(self, cache: H2OCache, model: Model) -> str | None:
        batch = len(model.state.rows)
        n = self.rng.randint(1, 3)
        if batch * n > MOST_ROWS:
            return None
        cache.batch_repeat_interleave(n)
        model.take_rows([row for row in range(batch) for _ in range(n)])
        return f"batch_repeat_interleave({n})"

    def select(self, cache: H2OCache, model: Model) -> str:
        batch = len(model.state.rows)
        index = self.rng.choices(range(batch), k=self.rng.randint(1, batch))
        indices = torch.tensor(index)
        if self.rng.random() < 0.5:
            index = sorted(set(index))
            indices = torch.tensor([row in index for row in range(batch)])
        cache.batch_select_indices(indices)
        model.take_rows(index)
        return f"batch_select_indices({indices.tolist()})"

    def fork(self, cache: H2OCache, model: Model) -> str | None:
        n = self.rng.randint(1, max(1, MOST_ROWS // max(1, len(model.state.rows))))
        self.caches.append((cache.fork(n), model.fork(n)))
        return f"fork({n})"

    def drop(self, cache: H2OCache, model: Model) -> str | None:
        if len(self.caches) < 2:
            return None
        self.caches = [pair for pair in self.caches if pair[0] is not cache]
        return "dropped"

    def copied(self, cache: H2OCache, model: Model) -> str:
        how = self.rng.choice([copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
        self.caches.append((how(cache), model.fork(1)))
        return "copied"

    def crop(self, cache: H2OCache, model: Model) -> str | None:
        (layer,) = cache.layers
        if layer.journal is None or layer.journal.unverified:
            return None
        most = min(model.depth, layer.journal.num_columns)
        if most == 0:
            return None
        columns = self.rng.randint(1, most)
        cache.crop(-columns)
        model.crop(columns)
        # A budget that came to hold is reached once more, by the rows that there are now.
        smallest = max(sum(row.force) for row in model.state.rows)
        if layer.positions.shape[2] == smallest:
            model.state = replace(model.state, capacity=smallest)
        return f"crop(-{columns})"

    def save(self, cache: H2OCache, model: Model) -> str:
        cache.save(self.file)
        loaded = H2OCache.load(self.file, self.config)
        other = model.fork(1)
        other.undo.clear()
        other.records = bool(self.options["max_rollback"])
        self.caches.append((loaded, other))
        return "save and load"

    def set_budget(self, cache: H2OCache, model: Model) -> str:
        rng, rows = self.rng, model.state.rows
        most = rng.choice([None, 2, 2, 3, 5])
        kind = rng.randrange(4)
        if kind == 0:
            given: dict[str, Any] = {"num_heavy": rng.randint(1, 6)}
            new = [(row.target[0], given["num_heavy"], row.target[2]) for row in rows]
        elif kind == 1:
            given = self.budget_of(rng.randint(1, 10))
            new = [(given["num_sink"], given["num_heavy"], given["num_recent"])] * len(rows)
        else:
            each = [Budget(**self.budget_of(rng.randint(1, 9))) for _ in rows]
            given, new = {"budget": each}, [counts(budget) for budget in each]
        cache.set_budget(**given, max_evictions_per_step=most)
        model.set_budget(new, most)
        return f"set_budget({given}, max_evictions_per_step={most})"

    def insert(self, cache: H2OCache, model: Model) -> str | None:
        others = [
            (number, source)
            for number, (other, theirs) in enumerate(self.caches)
            if other is not cache and theirs.state.columns
            for source, row in enumerate(theirs.state.rows)
            if sum(row.force) <= model.state.capacity
        ]
        if not others:
            return None
        number, source = self.rng.choice(others)
        other, theirs = self.caches[number]
        row = self.rng.randrange(len(model.state.rows))
        cache.insert(row, other, source)
        model.insert(row, theirs, source)
        return f"insert({row}, caches[{number}], {source})"

    def release(self, cache: H2OCache, model: Model) -> str:
        row = self.rng.randrange(len(model.state.rows))
        cache.release(row)
        model.release(row)
        return f"release({row})"

    def reset(self, cache: H2OCache, model: Model) -> str:
        cache.reset()
        model.undo.clear()
        model.events.clear()
        model.state = State()
        model.records = bool(self.options["max_rollback"])
        return "reset()"

    def to(self, cache: H2OCache, model: Model) -> str:
        """Through float32, which rounds, to where it was."""
        cache.to("cpu", torch.float32)
        assert cache.layers[0].scores.dtype == torch.float32
        cache.to(dtype=torch.float64)
        rows = (
            replace(row, heads=tuple(head.rounded() for head in row.heads))
            for row in model.state.rows
        )
        model.state = replace(model.state, rows=tuple(rows))
        model.undo.clear()
        return "to(float32), to(float64)"

    def record(self, cache: H2OCache, model: Model) -> str:
        if model.records:
            cache.deactivate_past_recording()
        else:
            cache.activate_past_recording()
        model.records = not model.records
        model.undo.clear()
        return f"records: {model.records}"

    # ---- The walk.

    def operations(self) -> dict[Callable[[H2OCache, Model], str | None], int]:
        return {
            self.step: 100,
            self.reorder: 6,
            self.repeat: 4,
            self.select: 4,
            self.fork: 8,
            self.drop: 6,
            self.copied: 4,
            self.crop: 20,
            self.save: 2,
            self.set_budget: 14,
            self.insert: 8,
            self.release: 4,
            self.reset: 1,
            self.to: 2,
            self.record: 3,
        }

    def run(self, operations: int) -> None:
        """Draw and do them; after each the cache that it was about is compared, and often all are."""
        choices = self.operations()
        on_empty = {self.step, self.fork, self.drop, self.save, self.copied}
        number = 0
        while number < operations:
            operation = self.rng.choices(list(choices), weights=list(choices.values()))[0]
            which = self.rng.randrange(len(self.caches))
            if self.rng.random() < 0.3:  # What a fork does first is where it could go wrong.
                which = len(self.caches) - 1
            cache, model = self.caches[which]
            if model.state.columns == 0 and operation not in on_empty:
                continue
            self.log.append(f"{number}: caches[{which}].{operation.__name__}")
            said = operation(cache, model)
            if said is None:
                self.log.pop()
                continue
            self.log[-1] = f"{number}: caches[{which}].{said}"
            number += 1
            self.done[operation.__name__] = self.done.get(operation.__name__, 0) + 1
            if len(self.caches) > MOST_CACHES:
                del self.caches[self.rng.randrange(len(self.caches))]
            everyone = number % 2 == 0 or number == operations
            for each, its_model in self.caches:
                if everyone or each is cache:
                    assert_equal(each, its_model)


STRETCHES, OPERATIONS = 40, 500


@pytest.mark.parametrize("seed", range(STRETCHES))
def test_any_life_of_a_cache_is_that_of_its_rows(seed: int, tmp_path: Path) -> None:
    """To replay a failing stretch: `Walk(seed, folder).run(operations)`."""
    walk = Walk(seed, tmp_path)
    try:
        walk.run(OPERATIONS)
    except BaseException as error:
        print(f"seed {seed}, {walk.policy!r}, {walk.options}: {error}", *walk.log, sep="\n")
        raise
    assert walk.done["step"] > OPERATIONS // 3
    for name in ("fork", "set_budget", "insert", "reorder"):
        assert walk.done[name] > 5, name
