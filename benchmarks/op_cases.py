"""What the benchmarks of the operators share: full caches, and the checks before the timing."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from common import WORKING_SET, Call, ModelShape, in_turns
from torch import Tensor

from h2o_kv import ops, reference

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
State = tuple[Tensor, Tensor, Tensor, Tensor]  # k_cache, v_cache, scores, positions

# Largest error of a result, by the largest value in it, that the checks let pass.
ERROR_LIMIT = {torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 4e-2}
# Decisions by less than this are not compared.
_CLEAR_MARGIN = {torch.float32: 1e-5, torch.bfloat16: 1e-3, torch.float16: 1e-3}


def full_caches(
    count: int,
    batch: int,
    num_kv_heads: int,
    capacity: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> tuple[State, list[State]]:
    """Full caches of `count` layers: all of them as four tensors [count, ...], and one by one.

    They hold the same, each in memory of its own.
    """
    sizes = (batch, num_kv_heads, capacity)
    k, v = (torch.randn(*sizes, head_dim, dtype=dtype, device=device) for _ in range(2))
    positions = torch.arange(capacity, dtype=torch.int32, device=device).expand(sizes)
    state = (k, v, torch.rand(sizes, device=device), positions)
    k, v, scores, positions = (t.expand(count, *t.shape).clone() for t in state)
    together = (k, v, scores, positions)
    return together, [(k[i], v[i], scores[i], positions[i]) for i in range(count)]


def halves(capacity: int) -> tuple[int, int, int]:
    """A budget of the whole capacity, half of it heavy and half recent."""
    return 0, capacity // 2, capacity - capacity // 2


class CachesInTurns:
    """Full caches of a shape and the new tokens that join them, one position after the other.

    Parameters
    ----------
    shape : ModelShape
    batch, capacity : int
    dtype : torch.dtype
    several : bool
        As many caches as are together larger than the last-level cache, at least 2; else one.

    Attributes
    ----------
    states : list of State
    query, new : Tensor
        [batch, heads, 1, head_dim]; `new` is the new token's key and its value.
    at : Tensor, int64, [batch, 1]
        Its position.
    counts : tuple of int
        The budget.
    sizes : dict of str to int
        By their names in the glossary.
    """

    def __init__(
        self, shape: ModelShape, batch: int, capacity: int, dtype: torch.dtype, several: bool
    ) -> None:
        sizes = (batch, shape.num_kv_heads, capacity, shape.head_dim)
        of_one = 2 * math.prod(sizes) * dtype.itemsize
        count = max(2, min(64, WORKING_SET // of_one)) if several else 1
        _, self.states = full_caches(count, *sizes, dtype)
        self.query, self.new = (
            torch.randn(batch, heads, 1, shape.head_dim).to(dtype)
            for heads in (shape.num_q_heads, shape.num_kv_heads)
        )
        self.at = torch.full((batch, 1), capacity)
        self.counts = halves(capacity)
        self.sizes = {
            "batch": batch,
            "num_q_heads": shape.num_q_heads,
            "num_kv_heads": shape.num_kv_heads,
            "head_dim": shape.head_dim,
            "capacity": capacity,
        }

    def advance(self) -> None:
        """Move on to the next position."""
        self.at += 1

    def in_turns(self, call_of: Callable[[State], Call]) -> Call:
        """A call on the next cache each time."""
        return in_turns([call_of(state) for state in self.states])


def decode_bytes(state: State) -> int:
    """Bytes that a step must move: K, V and positions once, scores twice; new tokens are nothing."""
    return sum(t.numel() * t.element_size() for t in (*state, state[2]))


def dtype_name(tensor: Tensor) -> str:
    """Its name in DTYPES."""
    return str(tensor.dtype).removeprefix("torch.")


def kv_bytes(state: State) -> int:
    """Bytes of K and V."""
    return state[0].nbytes + state[1].nbytes


# --- checks: each ends the script with one line where a result is not the reference's -------------


def check_close(name: str, result: Tensor, expected: Tensor, limit: float) -> None:
    """Stop where sizes differ, or a value by more than that part of the largest one."""
    if result.shape != expected.shape:
        raise SystemExit(f"{name}: gives {[*result.shape]}, the reference {[*expected.shape]}")
    error = float((result.cpu().double() - expected).abs().max() / expected.abs().max())
    if not error <= limit:
        raise SystemExit(f"{name}: differs from the reference, error {error:.2g}")


def _in_float64(state: State) -> list[Tensor]:
    """A copy of the last row, for the reference to write into."""
    last = (t[-1:].cpu() for t in state)
    return [t.double() if t.is_floating_point() else t.clone() for t in last]


@dataclass(frozen=True)
class ReferenceStep:
    """The step of a full cache's last row by the float64 reference, at the position behind it.

    Attributes
    ----------
    steps : list of reference.Step
        One for each KV head.
    output : Tensor, optional
        None where nothing attends.
    """

    steps: list[reference.Step]
    output: Tensor | None = None

    @classmethod
    def of_decode(cls, state: State, query: Tensor, new: Tensor) -> ReferenceStep:
        """Of h2o_attention_decode; `state` stays as it is."""
        capacity, steps = state[0].shape[2], list[reference.Step]()
        row, token = (t[-1:].cpu().double() for t in (query, new))
        at = torch.tensor([[capacity]])
        output, _ = reference.attention_decode(
            row, *_in_float64(state), token, token, at, *halves(capacity), trace=steps
        )
        return cls(steps, output)

    @classmethod
    def of_evict(cls, state: State, new: Tensor, score: Tensor) -> ReferenceStep:
        """Of h2o_evict with one scored token; `state` stays as it is."""
        capacity, steps = state[0].shape[2], list[reference.Step]()
        token, its_score = (t[-1:].cpu().double() for t in (new, score))
        at = torch.tensor([[capacity]])
        reference.evict(
            *_in_float64(state), token, token, its_score, at, *halves(capacity), trace=steps
        )
        return cls(steps)

    @classmethod
    def of_shrink(cls, state: State, num_heavy: int, num_recent: int) -> ReferenceStep:
        """Of h2o_evict without a new token; `state` stays as it is."""
        none, at = state[0][-1:, :, :0].cpu().double(), torch.zeros(1, 0, dtype=torch.long)
        steps: list[reference.Step] = []
        reference.evict(
            *_in_float64(state), none, none, none[..., 0], at, 0, num_heavy, num_recent, trace=steps
        )
        return cls(steps)

    def check(
        self,
        name: str,
        dtype: torch.dtype,
        kept: Tensor,
        scores: Tensor,
        output: Tensor | None = None,
    ) -> None:
        """Compare the last rows of what was kept and its scores [batch, num_kv_heads, ...].

        `kept` are positions, -1 = none, which in a full cache are the indices of the candidates.
        """
        if self.output is not None and output is not None:
            check_close(name, output[-1:], self.output, ERROR_LIMIT[dtype])
        for step, held, score in zip(self.steps, kept[-1].cpu(), scores[-1].cpu(), strict=True):
            own = held[held >= 0].tolist()
            if len(own) != len(step.kept):
                raise SystemExit(f"{name}: keeps {len(own)} tokens, the reference {len(step.kept)}")
            other = sorted(set(own) ^ set(step.kept))
            if other and step.margin > _CLEAR_MARGIN[dtype]:
                raise SystemExit(f"{name}: head {step.head} decides otherwise on tokens {other}")
            check_close(f"{name}, scores", score[held >= 0], step.scores[own], ERROR_LIMIT[dtype])


def check_step(name: str, state: State, query: Tensor, new: Tensor) -> ReferenceStep:
    """Do a step on `state`; stop where its last row is not the reference's, which is returned."""
    expected = ReferenceStep.of_decode(state, query, new)
    capacity = state[0].shape[2]
    at = torch.full((query.shape[0], 1), capacity, device=query.device)
    output, _ = ops.attention_decode(query, *state, new, new, at, *halves(capacity))
    expected.check(name, query.dtype, state[3], state[2], output)
    return expected


def check_attention(name: str, state: State, query: Tensor, output: Tensor) -> None:
    """Stop where the output is not attention over all that the last row of the cache holds."""
    k, v, row = (t[-1].cpu().double() for t in (*state[:2], query))
    grouped = row.view(k.shape[0], -1, k.shape[2])
    weights = torch.softmax(grouped @ k.transpose(1, 2) * k.shape[2] ** -0.5, -1)
    check_close(name, output[-1], (weights @ v).view_as(row), ERROR_LIMIT[query.dtype])


def check_selection(name: str, query: Tensor, key: Tensor, counts: tuple[int, int, int]) -> None:
    """Stop where the selection of one KV head's first 1,024 tokens is not the reference's."""
    group = query.shape[1] // key.shape[1]
    query, key = query[:1, :group, :1024], key[:1, :1, :1024]
    at = torch.arange(key.shape[2])[None]
    steps: list[reference.Step] = []
    reference.prefill_select(query.cpu().double(), key.cpu().double(), at, *counts, trace=steps)
    selected, scores = ops.prefill_select(query, key, at.to(query.device), *counts)
    ReferenceStep(steps).check(name, query.dtype, selected, scores)
