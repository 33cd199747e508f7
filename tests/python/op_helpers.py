"""What the tests of the operators share: caches, tokens with heavy hitters, and comparisons.

An operator is always compared with `h2o_kv.reference`, which runs in float64 on the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from h2o_kv import ops, reference
from h2o_kv.reference import Step

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
# Scores are summed in float32 (float64 for float64 caches): error of one step per token and head.
SCORE_TOLERANCE = {
    torch.float64: 1e-11,
    torch.float32: 2e-6,
    torch.float16: 2e-6,
    torch.bfloat16: 2e-6,
}
# Beside twice the error of PyTorch in the same dtype: about one rounding of an output near 1.
OUTPUT_ATOL = {
    torch.float64: 1e-11,
    torch.float32: 5e-6,
    torch.float16: 1e-3,
    torch.bfloat16: 8e-3,
}

Counts = tuple[int, int, int]  # num_sink, num_heavy, num_recent

# Values of the `device` fixture (conftest.py), for tests of the CUDA operators alone.
CUDA = pytest.param("cuda", marks=pytest.mark.cuda)
EMULATED = pytest.param("emulated", marks=pytest.mark.emulated)

OPERATORS = {"decode": "h2o_attention_decode", "evict": "h2o_evict", "select": "h2o_prefill_select"}


def operator(op: str) -> Any:
    """The operator under test: torch.ops.h2o is another namespace in a test on "emulated"."""
    return getattr(torch.ops.h2o, OPERATORS[op])


def is_emulated() -> bool:
    """Whether the operators are CUDA's, run on the CPU (see conftest.py): a thousand times slower."""
    return bool(torch.ops.h2o.name == "h2o_emulated")


def runs_cuda_operators(device: torch.device) -> bool:
    """Whether the operators are CUDA's, on a GPU or emulated."""
    return device.type == "cuda" or is_emulated()


def score_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def rank_angles(num_ranks: int, pairs: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """`rope_cos` and `rope_sin` for a cache of `dtype`, of a model whose angles are scaled."""
    frequencies = 100.0 ** (-torch.arange(pairs, dtype=torch.float64) / pairs)
    angles = torch.arange(num_ranks)[:, None] * frequencies
    return {
        "rope_cos": 1.1 * angles.cos().to(score_dtype(dtype)),
        "rope_sin": 1.1 * angles.sin().to(score_dtype(dtype)),
    }


# --- state and tokens ---------------------------------------------------------------------------


class State(NamedTuple):
    """The four tensors of a cache, in the order in which every operator takes them."""

    k_cache: Tensor
    v_cache: Tensor
    scores: Tensor
    positions: Tensor

    @classmethod
    def empty(
        cls,
        batch: int = 1,
        heads: int = 1,
        capacity: int = 4,
        head_dim: int = 8,
        dtype: torch.dtype = torch.float64,
        fill: float = math.nan,
    ) -> State:
        """`fill` in every slot: by default NaN, since nobody may read a slot that is empty."""
        nothing = torch.full((batch, heads, capacity, head_dim), fill, dtype=dtype)
        scores = torch.zeros(batch, heads, capacity, dtype=score_dtype(dtype))
        positions = torch.full((batch, heads, capacity), -1, dtype=torch.int32)
        return cls(nothing, nothing.clone(), scores, positions)

    def clone(self) -> State:
        """A contiguous copy."""
        return State(*(t.clone(memory_format=torch.contiguous_format) for t in self))

    def to(self, device: torch.device | str) -> State:
        return State(*(tensor.to(device) for tensor in self))

    def row(self, row: int) -> State:
        """A copy of one row, as a batch of 1."""
        return State(*(tensor[row : row + 1].clone() for tensor in self))

    def kept(self, row: int = 0, head: int = 0) -> list[int]:
        return sorted(p for p in self.positions[row, head].tolist() if p >= 0)

    def score_of(self, row: int = 0, head: int = 0) -> dict[int, float]:
        pairs = zip(
            self.positions[row, head].tolist(), self.scores[row, head].tolist(), strict=True
        )
        return {p: s for p, s in pairs if p >= 0}


class Tokens(NamedTuple):
    """New tokens: query, key, value and position of each."""

    query: Tensor
    key: Tensor
    value: Tensor
    position: Tensor

    @property
    def num(self) -> int:
        return int(self.position.shape[1])

    def columns(self, begin: int, end: int) -> Tokens:
        return Tokens(
            self.query[:, :, begin:end],
            self.key[:, :, begin:end],
            self.value[:, :, begin:end],
            self.position[:, begin:end],
        )

    def row(self, row: int) -> Tokens:
        return Tokens(*(tensor[row : row + 1] for tensor in self))

    def to(self, device: torch.device | str) -> Tokens:
        return Tokens(*(tensor.to(device) for tensor in self))


def planted_tokens(
    batch: int = 1,
    q_heads: int = 1,
    kv_heads: int = 1,
    num: int = 8,
    head_dim: int = 8,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    start: int = 0,
    position_dtype: torch.dtype = torch.int64,
) -> Tokens:
    """Random tokens with planted heavy hitters: queries share a direction, some keys point along it.

    Which tokens are heavy differs from head to head, and how heavy they are differs from token to
    token, so that scores are far from flat and far from each other. Values are about 1 in size.
    """
    g = torch.Generator().manual_seed(seed)

    def randn(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=g, dtype=torch.float64)

    direction = randn(batch, kv_heads, 1, head_dim)
    direction /= direction.norm(dim=-1, keepdim=True)
    group = q_heads // kv_heads
    scale = head_dim**0.25  # with the default scale, logits do not depend on head_dim
    noise = 2 * head_dim**-0.5
    query = noise * randn(batch, q_heads, num, head_dim)
    query = query + 2 * direction.repeat_interleave(group, 1)
    key = noise * randn(batch, kv_heads, num, head_dim)
    heavy = torch.rand(batch, kv_heads, num, 1, generator=g, dtype=torch.float64)
    key = key + direction * torch.where(heavy < 0.3, 1 + 4 * heavy, 0)
    value = randn(batch, kv_heads, num, head_dim)
    position = torch.arange(start, start + num, dtype=position_dtype).repeat(batch, 1)
    return Tokens((query * scale).to(dtype), (key * scale).to(dtype), value.to(dtype), position)


def random_state(
    batch: int,
    heads: int,
    capacity: int,
    head_dim: int,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    newest: int = 0,
    full: bool = False,
) -> State:
    """A cache in use: slots in any order, some of them empty (NaN there), positions below `newest`.

    Each (row, KV head) has its own positions; their number may be anything from none to capacity.
    """
    g = torch.Generator().manual_seed(seed)
    state = State.empty(batch, heads, capacity, head_dim, dtype)
    tokens = planted_tokens(batch, heads, heads, capacity, head_dim, dtype, seed)
    for row in range(batch):
        for head in range(heads):
            most = min(capacity, newest)
            count = most if full else int(torch.randint(0, most + 1, (1,), generator=g))
            slots = torch.randperm(capacity, generator=g)[:count]
            positions = torch.randperm(newest, generator=g)[:count]
            scores = torch.rand(count, generator=g, dtype=torch.float64) * 3
            state.k_cache[row, head, slots] = tokens.key[row, head, :count]
            state.v_cache[row, head, slots] = tokens.value[row, head, :count]
            state.scores[row, head, slots] = scores.to(state.scores.dtype)
            state.positions[row, head, slots] = positions.to(torch.int32)
    return state


def pad(tokens: Tokens, real: Sequence[Sequence[bool]]) -> Tokens:
    """The same tokens where columns with real[row][column] False are padding, full of NaN."""
    mask = torch.tensor(real, dtype=torch.bool).view(tokens.position.shape)
    position = torch.full_like(tokens.position, -1)
    for row in range(mask.shape[0]):
        count = int(mask[row].sum())
        position[row, mask[row]] = tokens.position[row, :count]
    hidden = ~mask[:, None, :, None]
    return Tokens(*(t.masked_fill(hidden, math.nan) for t in tokens[:3]), position)


def assert_not_flat(scores: Tensor, positions: Tensor) -> None:
    """Among the tokens kept somewhere, some score is far above the median: the input has power."""
    occupied = scores[positions >= 0].double()
    assert occupied.max() > 2 * occupied.median(), occupied


@st.composite
def budgets(draw: st.DrawFn, capacity: int) -> Counts:
    """A budget of 1..capacity slots, each part of which may be 0."""
    total = draw(st.integers(1, capacity))
    sink = draw(st.integers(0, total))
    heavy = draw(st.integers(0, total - sink))
    return sink, heavy, total - sink - heavy


# --- memory layouts -----------------------------------------------------------------------------

LAYOUTS = ("contiguous", "transposed", "fused", "last_stride_2", "head_dim_outside", "offset")


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """A tensor equal to `tensor` [batch, heads, num, head_dim] in another layout of memory."""
    batch, heads, num, head_dim = tensor.shape
    if layout == "contiguous":
        return tensor.contiguous()
    if layout == "transposed":  # from [batch, num, heads, head_dim], as Hugging Face layers pass it
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "fused":  # a slice of one tensor that holds query, key and value
        fused = tensor.new_full((batch, num, 3, heads, head_dim), math.nan)
        view = fused[:, :, 1].transpose(1, 2)
    elif layout == "last_stride_2":
        view = tensor.new_full((batch, heads, num, 2 * head_dim), math.nan)[..., ::2]
    elif layout == "head_dim_outside":  # dense, but the last stride is num
        view = tensor.new_empty(batch, heads, head_dim, num).transpose(2, 3)
    elif layout == "offset":
        view = tensor.new_full((batch + 1, heads + 1, num + 2, head_dim + 3), math.nan)
        view = view[1:, 1:, 1:-1, 2:-1]
    else:
        raise ValueError(layout)
    return view.copy_(tensor)


CACHE_LAYOUTS = ("contiguous", "transposed", "interleaved", "inside")


_FILL = 7


@dataclass(frozen=True)
class CacheView:
    """A state that lies in larger buffers, which are full of sevens around it."""

    state: State
    buffers: tuple[Tensor, ...]

    def assert_rest_untouched(self) -> None:
        for buffer in self.buffers:
            rest = torch.ones_like(buffer, dtype=torch.bool)
            for view in self.state:
                if view.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr():
                    rest.as_strided(view.size(), view.stride(), view.storage_offset()).fill_(False)
            assert (buffer[rest] == _FILL).all()


def cache_laid_out(state: State, layout: str) -> CacheView:
    """The same state as views that head_dim has stride 1 in."""
    batch, heads, capacity, head_dim = state.k_cache.shape

    def buffer(like: Tensor, sizes: Sequence[int]) -> Tensor:
        return torch.full(sizes, _FILL, dtype=like.dtype, device=like.device)

    if layout == "contiguous":
        views = buffers = [torch.empty_like(t) for t in state]
    elif layout == "transposed":  # slots outside heads
        buffers = [buffer(t, t.transpose(1, 2).shape) for t in state]
        views = [b.transpose(1, 2) for b in buffers]
    elif layout == "interleaved":  # K and V of a slot side by side; slots of scores far apart
        both = buffer(state.k_cache, (batch, heads, capacity, 2, head_dim))
        buffers = [both, *(buffer(t, (*t.shape, 3)) for t in state[2:])]
        views = [both[..., 0, :], both[..., 1, :], *(b[..., 1] for b in buffers[1:])]
    elif layout == "inside":
        outer = (batch + 1, heads + 2, capacity + 3)
        buffers = [buffer(t, (*outer, head_dim + 5)) for t in state[:2]]
        buffers += [buffer(t, outer) for t in state[2:]]
        views = [b[1:, 1:-1, 2:-1] for b in buffers]
        views[:2] = [view[..., 3:-2] for view in views[:2]]
    else:
        raise ValueError(layout)
    for view, tensor in zip(views, state, strict=True):
        view.copy_(tensor)
    return CacheView(State(*views), tuple(buffers))


# --- comparisons --------------------------------------------------------------------------------


def bitwise_equal(a: Tensor, b: Tensor) -> bool:
    """Equal in every bit: NaN equals the same NaN, -0.0 differs from 0.0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.contiguous().view(integers), b.contiguous().view(integers))


def assert_bitwise(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert bitwise_equal(a, b), f"tensor {i} differs:\n{a}\n{b}"


def assert_close(actual: Tensor, expected: Tensor, atol: float) -> None:
    torch.testing.assert_close(
        actual.double().cpu(), expected.double().cpu(), rtol=0, atol=atol, equal_nan=True
    )


def decode(
    state: State,
    tokens: Tokens,
    counts: Counts,
    device: torch.device | str = "cpu",
    layouts: tuple[str, str] | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Run the operator on `device`; `state`, wherever it is, is what it was left in, and so are
    `k_evicted` and `v_evicted`.

    `layouts`: one of LAYOUTS and one of CACHE_LAYOUTS, that the operator gets tokens and cache in.
    """
    moved = state if state.k_cache.device.type == torch.device(device).type else state.to(device)
    query, key, value, position = tokens.to(device)
    view = None
    if layouts is not None:
        query, key, value = (laid_out(t, layouts[0]) for t in (query, key, value))
        view = cache_laid_out(moved, layouts[1])
        moved = view.state
    for name in ("alibi_slopes", "row_budget", "rope_cos", "rope_sin", "score_new"):
        if options.get(name) is not None:
            options[name] = options[name].to(device)
    room = {name: options[name] for name in ("k_evicted", "v_evicted") if name in options}
    options.update({name: tensor.to(device) for name, tensor in room.items()})
    result = ops.attention_decode(query, *moved, key, value, position, *counts, **options)
    for name, tensor in room.items():
        tensor.copy_(options[name])
    if view is not None:
        view.assert_rest_untouched()
    if moved is not state:
        for tensor, written in zip(state, moved, strict=True):
            tensor.copy_(written)
    return result[0].cpu(), result[1].cpu()


def reference_decode(
    state: State, tokens: Tokens, counts: Counts, **options: Any
) -> tuple[Tensor, Tensor, list[Step]]:
    steps: list[Step] = []
    query, key, value, position = tokens
    output, evicted = reference.attention_decode(
        query, *state, key, value, position, *counts, trace=steps, **options
    )
    return output, evicted, steps


def evict(
    state: State,
    tokens: Tokens,
    scores_new: Tensor,
    counts: Counts,
    device: torch.device | str = "cpu",
    row_budget: Tensor | None = None,
) -> Tensor:
    """Run the operator on `device`; `state`, wherever it is, is what it was left in."""
    moved = state if state.k_cache.device.type == torch.device(device).type else state.to(device)
    _, key, value, position = tokens.to(device)
    budget = None if row_budget is None else row_budget.to(device)
    evicted = ops.evict(
        *moved, key, value, scores_new.to(device), position, *counts, row_budget=budget
    )
    if moved is not state:
        for tensor, written in zip(state, moved, strict=True):
            tensor.copy_(written)
    return evicted.cpu()


def reference_evict(
    state: State,
    tokens: Tokens,
    scores_new: Tensor,
    counts: Counts,
    row_budget: Tensor | None = None,
) -> tuple[Tensor, list[Step]]:
    steps: list[Step] = []
    evicted = reference.evict(
        *state,
        tokens.key,
        tokens.value,
        scores_new,
        tokens.position,
        *counts,
        row_budget=row_budget,
        trace=steps,
    )
    return evicted, steps


def select(
    tokens: Tokens, counts: Counts, device: torch.device | str = "cpu", **options: Any
) -> tuple[Tensor, Tensor]:
    query, key, _, position = tokens.to(device)
    for name in ("alibi_slopes", "row_budget"):
        if options.get(name) is not None:
            options[name] = options[name].to(device)
    selected, scores = ops.prefill_select(query, key, position, *counts, **options)
    return selected.cpu(), scores.cpu()


def reference_select(
    tokens: Tokens, counts: Counts, **options: Any
) -> tuple[Tensor, Tensor, list[Step]]:
    steps: list[Step] = []
    query, key, _, position = tokens
    selected, scores = reference.prefill_select(
        query, key, position, *counts, trace=steps, **options
    )
    return selected, scores, steps


def check_selection(
    tokens: Tokens,
    counts: Counts,
    device: torch.device | str = "cpu",
    clear_share: float = 1.0,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Run h2o_prefill_select and the reference, and compare as `check_calls` does."""
    selected, scores = select(tokens, counts, device, **options)
    true_selected, true_scores, steps = reference_select(tokens, counts, **options)
    assert selected.dtype == torch.int64
    assert scores.dtype == score_dtype(tokens.key.dtype)
    group = tokens.query.shape[1] // tokens.key.shape[1]
    decided = 0
    for step in steps:
        largest = step.scores.abs().max().item()
        tolerance = SCORE_TOLERANCE[tokens.key.dtype] * (group + largest)
        if step.margin <= 2 * tolerance:
            continue
        decided += 1
        at = step.row, step.head
        assert torch.equal(selected[at], true_selected[at]), at
        assert_close(scores[at], true_scores[at], tolerance)
    assert decided >= clear_share * len(steps), f"{decided} of {len(steps)} were clear"
    return selected, scores


def full_attention(
    tokens: Tokens, scale: float | None = None, alibi_slopes: Tensor | None = None
) -> Tensor:
    """Causal attention of the tokens among themselves by PyTorch's SDPA in float64."""
    query, key, value = (t.double() for t in tokens[:3])
    num = tokens.num
    bias = torch.zeros(query.shape[1], num, num, dtype=torch.float64)
    if alibi_slopes is not None:
        position = torch.arange(num)
        bias += alibi_slopes.double()[:, None, None] * (position[None] - position[:, None])
    bias.masked_fill_(torch.ones(num, num, dtype=torch.bool).triu(1), -math.inf)
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=bias[None], scale=scale, enable_gqa=True
    )


def rotated(vectors: Tensor, index: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Vectors [..., n, head_dim] turned by the angles of rows `index` [n], in their own dtype."""
    pairs = cos.shape[1]
    turn = torch.polar(torch.ones_like(cos), torch.atan2(sin, cos)) * (cos**2 + sin**2).sqrt()
    halves = vectors[..., : 2 * pairs].to(cos.dtype).unflatten(-1, (2, pairs))
    turned = torch.complex(halves[..., 0, :], halves[..., 1, :]) * turn[index]
    both = torch.cat([turned.real, turned.imag], -1).to(vectors.dtype)
    return torch.cat([both, vectors[..., 2 * pairs :]], -1)


def pytorch_output(
    before: State,
    tokens: Tokens,
    step: Step,
    scale: float | None = None,
    alibi_slopes: Tensor | None = None,
    rope_cos: Tensor | None = None,
    rope_sin: Tensor | None = None,
) -> Tensor:
    """What PyTorch in the tensors' own dtype gives for the step of one row and head.

    [group_size, tokens of the step, head_dim]; `before` is the cache before the step.
    """
    row, head = step.row, step.head
    columns = [tokens.position[row].tolist().index(p) for p in step.positions]
    slots = [slot for slot in step.slots if slot >= 0]
    keys = torch.cat([before.k_cache[row, head, slots], tokens.key[row, head, columns]])
    values = torch.cat([before.v_cache[row, head, slots], tokens.value[row, head, columns]])
    group = tokens.query.shape[1] // tokens.key.shape[1]
    queries = tokens.query[row, head * group : (head + 1) * group][:, columns]
    if rope_cos is not None and rope_sin is not None:
        order = torch.tensor(step.candidates).argsort().argsort()
        keys = rotated(keys, order, rope_cos, rope_sin)
        queries = rotated(queries, order[len(slots) :], rope_cos, rope_sin)
    logits = queries @ keys.T * (queries.shape[-1] ** -0.5 if scale is None else scale)
    if alibi_slopes is not None:
        distance = torch.tensor(step.candidates)[None] - torch.tensor(step.positions)[:, None]
        slopes = alibi_slopes[head * group : (head + 1) * group, None, None]
        logits = logits + (slopes * distance).to(logits.dtype)
    order = torch.arange(len(step.candidates))[None] - len(slots)
    hidden = order > torch.arange(len(columns))[:, None]
    weights = torch.softmax(logits.masked_fill(hidden, -math.inf).float(), -1)
    return weights.to(values.dtype) @ values


def check_calls(
    state: State,
    tokens: Tokens,
    counts: Counts,
    width: int,
    device: torch.device | str = "cpu",
    scale: float | None = None,
    alibi_slopes: Tensor | None = None,
    clear_share: float = 0.9,
    layouts: tuple[str, str] | None = None,
    **options: Any,
) -> list[Step]:
    """Feed `width` columns at a time to the operator as one chunk, and to the reference the same.

    Before each call the reference gets what the operator has in its cache, so a comparison is of one
    step. Victims and slots must be the same in every (row, head) where the reference's decision
    was not within the error of the scores, which `clear_share` of them must be; scores and outputs
    by error. Returns all steps.
    """
    dtype = state.k_cache.dtype
    group = tokens.query.shape[1] // tokens.key.shape[1]
    options.update(scale=scale, alibi_slopes=alibi_slopes)
    rope = [options.get(name) for name in ("rope_cos", "rope_sin")]
    score_tolerance = SCORE_TOLERANCE[dtype]
    if rope[0] is not None and dtype.itemsize == 2:
        score_tolerance = 2e-3  # Rotated numbers may be rounded to either neighbour.
    all_steps: list[Step] = []
    decided = 0
    for begin in range(0, tokens.num, width):
        new = tokens.columns(begin, min(begin + width, tokens.num))
        before, expected = state.clone(), state.clone()
        output, evicted = decode(
            state, new, counts, device, chunk=width, layouts=layouts, **options
        )
        _, true_evicted, steps = reference_decode(expected, new, counts, chunk=width, **options)
        largest = max((s.scores.abs().max().item() for s in steps), default=0.0)
        tolerance = score_tolerance * (group * width + 0.1 * largest)
        padded = new.position < 0
        assert not output.transpose(1, 2)[padded].any(), "the output of padding must be 0"
        if not steps:
            assert_bitwise(state, before)
        for step in steps:
            row, head = step.row, step.head
            all_steps.append(step)
            columns = [new.position[row].tolist().index(p) for p in step.positions]
            heads = slice(head * group, (head + 1) * group)
            true = step.output
            error = (output[row, heads][:, columns].double() - true).abs().max()
            by_pytorch = pytorch_output(before, new, step, scale, alibi_slopes, *rope)
            allowed = 2 * (by_pytorch.double() - true).abs().max() + OUTPUT_ATOL[dtype]
            assert error <= allowed, f"output of row {row}, head {head}: {error} > {allowed}"
            where = f"row {row}, head {head}, tokens {step.positions}"
            if step.margin <= 2 * tolerance:  # others than the reference's may leave, but near them
                left = [p for p in evicted[row, head].tolist() if p >= 0]
                assert len(left) == len(step.victims), where
                score = dict(zip(step.candidates, step.compared, strict=True))
                highest = score[step.victims[-1]] + 2 * tolerance
                assert all(score[p] <= highest for p in left), where
                continue
            decided += 1
            assert torch.equal(evicted[row, head], true_evicted[row, head]), where
            assert torch.equal(state.positions[row, head], expected.positions[row, head]), where
            for own, other in (
                (state.k_cache, expected.k_cache),
                (state.v_cache, expected.v_cache),
            ):
                assert bitwise_equal(own[row, head], other[row, head]), where
            assert_close(state.scores[row, head], expected.scores[row, head], tolerance)
    assert decided >= clear_share * len(all_steps), f"{decided} of {len(all_steps)} were clear"
    return all_steps
