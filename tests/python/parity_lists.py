"""The parity modes once more: one head, float64, lists and dicts, one token at a time.

Written from the description of what the official scripts do (docs/parity.md), to compare
`h2o_kv.parity` with; it shares nothing with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

# Row t of a head's logits; token i is at [t][i].
Logits = list[list[float]]


@dataclass
class Head:
    """What each row attends and leaves. Dicts are by position."""

    weights: list[dict[int, float]] = field(default_factory=list)
    scores: list[dict[int, float]] = field(default_factory=list)
    kept: list[set[int]] = field(default_factory=list)
    slots: list[list[int]] = field(default_factory=list)

    @property
    def attended(self) -> list[set[int]]:
        return [set(row) for row in self.weights]


def softmax(row: list[float], tokens: Iterable[int]) -> dict[int, float]:
    chosen = list(tokens)
    top = max(row[i] for i in chosen)
    shares = {i: math.exp(row[i] - top) for i in chosen}
    total = math.fsum(shares.values())
    return {i: share / total for i, share in shares.items()}


def best(scores: dict[int, float], among: Iterable[int], count: int) -> set[int]:
    ordered = sorted(among, key=lambda i: (-scores[i], -i))
    return set(ordered[:count])


def dense_rows(head: Head, logits: Logits, rows: int) -> dict[int, float]:
    """The first rows attend all before them; returns the sums of their columns."""
    scores = {i: 0.0 for i in range(rows)}
    for t in range(rows):
        weights = softmax(logits[t], range(t + 1))
        for i, weight in weights.items():
            scores[i] += weight
        head.weights.append(weights)
        head.scores.append({i: scores[i] for i in range(t + 1)})
        head.kept.append(set(range(t + 1)))
    return scores


def join(head: Head, scores: dict[int, float], t: int, weights: dict[int, float]) -> None:
    """Row t attends: its token gets a score, and all grow. What it leaves is not known yet."""
    scores[t] = 0.0
    for i, weight in weights.items():
        scores[i] += weight
    head.weights.append(weights)
    head.scores.append({})
    head.kept.append(set())


def drop(logits: Logits, prompt_len: int, num_heavy: int, num_recent: int) -> Head:
    """real_drop: what leaves is gone."""
    head = Head()
    scores = dense_rows(head, logits, prompt_len)
    for t in range(prompt_len - 1, len(logits)):
        if t >= prompt_len:
            weights = softmax(logits[t], [*scores, t])
            join(head, scores, t, weights)
        if len(scores) > num_heavy + num_recent:
            recent = set(sorted(scores)[len(scores) - num_recent :])
            stay = best(scores, set(scores) - recent, num_heavy) | recent
            scores = {i: score for i, score in scores.items() if i in stay}
        head.scores[t] = dict(scores)
        head.kept[t] = set(scores)
    return head


def flexgen(logits: Logits, prompt_len: int, k: int) -> Head:
    """2k - 1 slots, each a list [position, score]."""
    head = Head()
    scores = dense_rows(head, logits, prompt_len)
    early = range(prompt_len - k + 1)
    heavy = sorted(early, key=lambda i: (-scores[i], -i))[:k]
    slots = [[i, scores[i]] for i in [*heavy, *range(prompt_len - k + 1, prompt_len)]]
    head.scores[-1] = {int(i): score for i, score in slots}
    head.kept[-1] = {int(i) for i, _ in slots}
    head.slots = [[] for _ in range(prompt_len - 1)] + [[int(i) for i, _ in slots]]
    ring = 0
    for t in range(prompt_len, len(logits)):
        slots.append([t, 0.0])
        weights = softmax(logits[t], [int(i) for i, _ in slots])
        for slot in slots:
            slot[1] += weights[int(slot[0])]
        lowest = min(range(k), key=lambda place: slots[place][1])  # min takes the first.
        slots[lowest] = slots[k + ring]
        slots[k + ring] = slots.pop()
        ring = (ring + 1) % (k - 1)
        head.weights.append(weights)
        head.scores.append({int(i): score for i, score in slots})
        head.kept.append({int(i) for i, _ in slots})
        head.slots.append([int(i) for i, _ in slots])
    return head


def utils_hh(logits: Logits, prompt_len: int, num_heavy: int, num_recent: int) -> Head:
    """A mask for the next row, made at each; nothing is dropped."""
    head = Head()
    scores = dense_rows(head, logits, prompt_len)
    open_next: set[int] = set()
    for t in range(prompt_len - 1, len(logits)):
        if t >= prompt_len:
            weights = {i: 1 / (t + 1) for i in range(t + 1)}  # What hides everything hides nothing.
            if open_next:
                weights = softmax(logits[t], open_next)
            join(head, scores, t, weights)
        open_next = set(range(t + 2))
        if t + 1 > num_heavy + num_recent:
            recent = set(range(t + 2 - num_recent, t + 2))
            chosen = best(scores, range(t + 1 - num_recent), num_heavy)
            open_next = chosen | recent
            if num_recent > 0:
                with_score = chosen | set(range(t + 1 - num_recent, t + 1))
                scores = {i: s if i in with_score else 0.0 for i, s in scores.items()}
        head.scores[t] = dict(scores)
        head.kept[t] = (open_next or set(range(t + 1))) - {t + 1}
    return head


def lm_eval_local(logits: Logits, num_heavy: int, num_recent: int) -> Head:
    """Heavy hitters of each row from the rows before, and a band."""
    head, num = Head(), len(logits)
    full = [softmax(logits[t], range(t + 1)) for t in range(num)]
    scores: dict[int, float] = {}
    heavies = []
    for t in range(num + 1):
        if t < num_heavy:
            heavies.append(set(range(t + 1)))
        elif num_heavy == 0:
            heavies.append(set())
        else:
            heavies.append(best({i: scores.get(i, 0.0) for i in range(t)}, range(t), num_heavy - 1))
            heavies[-1].add(t)
        if t < num:
            grown = {i: scores.get(i, 0.0) + w for i, w in full[t].items()}
            scores = {i: s for i, s in grown.items() if i in heavies[t]}
            head.scores.append(dict(scores))
    band = [set(range(max(0, t - num_recent), t + 1)) for t in range(num + 1)]
    head.weights = [softmax(logits[t], heavies[t] | band[t]) for t in range(num)]
    head.kept = [(heavies[t + 1] | band[t + 1]) - {t + 1} for t in range(num)]
    return head


def lm_eval_oracle(logits: Logits, num_heavy: int, num_recent: int) -> Head:
    """One set for all rows, from all rows."""
    head, num = Head(), len(logits)
    full = [softmax(logits[t], range(t + 1)) for t in range(num)]
    sums = {i: math.fsum(full[t][i] for t in range(i, num)) for i in range(num)}
    chosen = best(sums, range(num), num_heavy)
    for t in range(num):
        row = {i for i in range(t + 1) if i in chosen or i >= t - num_recent}
        head.weights.append(softmax(logits[t], row))
        head.scores.append(sums)
        after = {i for i in range(t + 1) if i in chosen or i >= t + 1 - num_recent}
        head.kept.append(after)
    return head


def attended_output(head: Head, value: Tensor) -> Tensor:
    """Output [seq_len, head_dim] of one head with values [seq_len, head_dim]."""
    rows = []
    for weights in head.weights:
        tokens = list(weights)
        shares = torch.tensor([weights[i] for i in tokens], dtype=torch.float64)
        rows.append(shares @ value[tokens].double())
    return torch.stack(rows)


Replay = Callable[[Logits], Head]


def check(trace: Any, logits: Tensor, replay: Replay, *, tolerance: float = 1e-12) -> None:
    """A ParityTrace of logits [heads, seq_len, seq_len] is what `replay` says, head by head."""
    for index, rows in enumerate(logits.double().tolist()):
        head = replay(rows)
        for t in range(len(rows)):
            assert positions(trace.attended[index, t]) == head.attended[t], (index, t)
            assert positions(trace.kept[index, t]) == head.kept[t], (index, t)
            if trace.slots is not None and head.slots[t]:
                assert trace.slots[index, t].tolist() == head.slots[t]
        assert_by_position(trace.weights[index], head.weights, tolerance)
        assert_by_position(trace.scores[index], head.scores, tolerance)


def positions(mask: Tensor) -> set[int]:
    return {int(i) for i in mask.nonzero()[:, 0]}


def assert_by_position(got: Tensor, want: list[dict[int, float]], tolerance: float) -> None:
    """Rows of `got` are the dicts, 0 where they have nothing."""
    expected = [[row.get(i, 0.0) for i in range(got.shape[-1])] for row in want]
    wide = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(got.double(), wide, atol=tolerance, rtol=0)
