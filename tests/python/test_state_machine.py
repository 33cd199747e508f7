"""Long random walks through all three operators, beside the reference in float64."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from op_helpers import (
    Counts,
    State,
    Tokens,
    assert_bitwise,
    assert_close,
    cache_laid_out,
    decode,
    evict,
    pad,
    planted_tokens,
    reference_decode,
    reference_evict,
    reference_select,
    select,
)

WALK = 450  # operations of each walk


@dataclass
class Walk:
    """One cache, kept twice: by the operators (in a strided view) and by the reference.

    Whatever happens, after each operation both hold the same tokens in the same slots, with equal
    keys and values, and scores that differ by no more than rounding.
    """

    seed: int
    batch: int
    kv_heads: int
    group: int
    head_dim: int
    capacity: int
    cache_layout: str
    gqa_reduce: str
    log: list[str] = field(default_factory=list)
    evictions: int = 0

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        shape = (self.batch, self.kv_heads, self.capacity, self.head_dim)
        self.expected = State.empty(*shape)
        self.view = cache_laid_out(self.expected, self.cache_layout)
        self.actual = self.view.state
        self.next_position = [0] * self.batch  # of each row
        self.counts = self.random_counts()

    # --- what an operation needs

    def random_counts(self, at_most: int | None = None) -> Counts:
        total = self.rng.randint(1, at_most or self.capacity)
        sink = self.rng.randint(0, min(3, total))
        recent = self.rng.randint(0, total - sink)
        return sink, total - sink - recent, recent

    def row_budget(self) -> Tensor | None:
        if self.rng.random() < 0.7:
            return None
        return torch.tensor([self.random_counts() for _ in range(self.batch)])

    def new_tokens(self, num: int) -> Tokens:
        tokens = planted_tokens(
            self.batch,
            self.kv_heads * self.group,
            self.kv_heads,
            num,
            self.head_dim,
            seed=self.rng.randrange(2**31),
        )
        share = self.rng.choice([0.0, 0.0, 0.4, 1.0])
        real = [[self.rng.random() >= share for _ in range(num)] for _ in range(self.batch)]
        tokens = pad(tokens, real)
        for row in range(self.batch):
            gap = self.rng.choice([0, 0, 0, 3])  # positions may leave some out
            offset = self.next_position[row] + gap
            tokens.position[row] += torch.where(tokens.position[row] >= 0, offset, 0)
            if any(real[row]):
                self.next_position[row] = int(tokens.position[row].max()) + 1
        dtype = self.rng.choice([torch.int32, torch.int64])
        return tokens._replace(position=tokens.position.to(dtype))

    # --- the operations

    def decode(self) -> None:
        tokens = self.new_tokens(self.rng.choice([1, 1, 1, 2, 5, 9, self.capacity // 2]))
        slopes = torch.linspace(0.01, 0.2, self.kv_heads * self.group)
        options = {
            "chunk": self.rng.choice([1, 1, 1, 2, 4, 100]),
            "gqa_reduce": self.gqa_reduce,
            "scale": self.rng.choice([None, 0.7 * self.head_dim**-0.5]),
            "alibi_slopes": self.rng.choice([None, slopes]),
            "row_budget": self.row_budget(),
        }
        self.log.append(f"decode {tokens.position.tolist()} {self.counts} {options}")
        true_output, true_evicted, steps = reference_decode(
            self.expected, tokens, self.counts, **options
        )
        assert all(step.margin > 1e-9 for step in steps), "a tie: choose another seed"
        output, evicted = decode(self.actual, tokens, self.counts, **options)
        assert_close(output, true_output, 1e-11)
        assert torch.equal(evicted, true_evicted)
        self.evictions += int((evicted >= 0).sum())

    def evict(self, num: int | None = None) -> None:
        tokens = self.new_tokens(self.rng.choice([0, 0, 1, 4]) if num is None else num)
        sizes = tokens.key.shape[:3]
        g = torch.Generator().manual_seed(self.rng.randrange(2**31))
        scores_new = torch.rand(sizes, generator=g, dtype=torch.float64) * 2
        row_budget = self.row_budget()
        self.log.append(f"evict {tokens.position.tolist()} {self.counts} {row_budget}")
        true_evicted, _ = reference_evict(
            self.expected, tokens, scores_new, self.counts, row_budget
        )
        evicted = evict(self.actual, tokens, scores_new, self.counts, row_budget=row_budget)
        assert torch.equal(evicted, true_evicted)
        self.evictions += int((evicted >= 0).sum())

    def change_budget(self) -> None:
        self.counts = self.random_counts()
        self.log.append(f"budget {self.counts}")
        if self.rng.random() < 0.5:
            self.evict(0)

    def reset_row(self) -> None:
        row = self.rng.randrange(self.batch)
        self.log.append(f"reset row {row}")
        for state in (self.actual, self.expected):
            state.positions[row] = -1
            state.scores[row] = 0
        self.next_position[row] = 0

    def prefill(self) -> None:
        """A prompt for all rows: h2o_prefill_select, then h2o_evict places what it chose."""
        for row in range(self.batch):
            self.next_position[row] = 0
        for state in (self.actual, self.expected):
            state.positions.fill_(-1)
            state.scores.fill_(0)
        tokens = self.new_tokens(self.rng.choice([1, 6, 25, self.capacity + 10]))
        row_budget = self.row_budget()
        if row_budget is not None and int(row_budget.sum(-1).max()) > sum(self.counts):
            row_budget = None
        options = {"gqa_reduce": self.gqa_reduce, "row_budget": row_budget}
        self.log.append(f"prefill {tokens.position.tolist()} {self.counts} {options}")
        true_selected, true_scores, steps = reference_select(tokens, self.counts, **options)
        assert all(step.margin > 1e-9 for step in steps), "a tie: choose another seed"
        selected, scores = select(tokens, self.counts, **options)
        assert torch.equal(selected, true_selected)
        assert_close(scores, true_scores, 1e-11)
        # What is kept differs from head to head and h2o_evict takes the same positions for all
        # heads of a row, so each head is placed alone.
        for head in range(self.kv_heads):
            columns = selected[:, head].clamp(min=0)
            position = tokens.position.gather(1, columns).masked_fill(selected[:, head] < 0, -1)
            index = columns[:, None, :, None].expand(-1, 1, -1, self.head_dim)
            only = slice(head, head + 1)
            chosen = Tokens(
                tokens.query[:, :0],
                tokens.key[:, only].gather(2, index),
                tokens.value[:, only].gather(2, index),
                position,
            )
            part = State(*(tensor[:, only] for tensor in self.actual))
            left = evict(part, chosen, scores[:, only], self.counts, row_budget=row_budget)
            assert (left == -1).all()
            part = State(*(tensor[:, only] for tensor in self.expected))
            reference_evict(part, chosen, true_scores[:, only], self.counts, row_budget)

    # --- what must hold after each

    def check(self) -> None:
        actual, expected = self.actual, self.expected
        assert torch.equal(actual.positions, expected.positions)
        occupied = actual.positions >= 0
        assert_bitwise(
            [actual.k_cache[occupied], actual.v_cache[occupied]],
            [expected.k_cache[occupied], expected.v_cache[occupied]],
        )
        assert_close(actual.scores, expected.scores, 1e-9)
        assert (actual.scores[~occupied] == 0).all()
        for row in range(self.batch):
            for head in range(self.kv_heads):
                kept = [p for p in actual.positions[row, head].tolist() if p >= 0]
                assert len(set(kept)) == len(kept), "one token in two slots"
                assert max(kept, default=-1) < self.next_position[row]

    def run(self, steps: int) -> None:
        operations = [self.decode, self.evict, self.change_budget, self.reset_row, self.prefill]
        for _ in range(steps):
            operation = self.rng.choices(operations, weights=[60, 15, 8, 4, 3])[0]
            try:
                operation()
                self.check()
            except AssertionError as error:
                recent = "\n".join(self.log[-5:])
                raise AssertionError(
                    f"seed {self.seed}, operation {len(self.log)}; the last ones:\n{recent}"
                ) from error
        self.view.assert_rest_untouched()


# 8 walks of 450 operations: 3,600.
@pytest.mark.parametrize(
    ("seed", "batch", "kv_heads", "group", "head_dim", "capacity", "layout", "gqa_reduce"),
    [
        (0, 1, 1, 1, 8, 6, "contiguous", "sum"),
        (1, 2, 2, 4, 16, 12, "transposed", "sum"),
        (2, 3, 1, 3, 5, 9, "interleaved", "max"),
        (3, 2, 3, 2, 17, 16, "inside", "max"),
        (4, 1, 2, 7, 33, 20, "transposed", "sum"),
        (5, 2, 1, 8, 64, 32, "interleaved", "sum"),
        (6, 3, 2, 1, 3, 2, "inside", "sum"),
        (7, 1, 1, 2, 80, 140, "contiguous", "max"),
    ],
)
def test_operators_and_reference_walk_together(
    seed: int,
    batch: int,
    kv_heads: int,
    group: int,
    head_dim: int,
    capacity: int,
    layout: str,
    gqa_reduce: str,
) -> None:
    walk = Walk(seed, batch, kv_heads, group, head_dim, capacity, layout, gqa_reduce)
    walk.run(WALK)
    assert walk.evictions > WALK  # it was not a walk among caches with room for all
