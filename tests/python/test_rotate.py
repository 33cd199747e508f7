"""h2o_rotate, and h2o_attention_decode on keys that it rotates by their rank (position rolling)."""

from __future__ import annotations

import doctest
from typing import Any

import pytest
import torch
from torch import Tensor

from h2o_kv import ops
from op_helpers import (
    DTYPES,
    LAYOUTS,
    Counts,
    State,
    assert_bitwise,
    check_calls,
    decode,
    laid_out,
    pad,
    planted_tokens,
    random_state,
    rank_angles,
    rotated,
    runs_cuda_operators,
    score_dtype,
)

# Half of a unit in the last place of a number near 4, and what the products lose.
TOLERANCE = {
    torch.float64: 1e-14,
    torch.float32: 2e-6,
    torch.float16: 2e-3,
    torch.bfloat16: 1.6e-2,
}


def normal(*sizes: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed)).to(dtype)


def angles(num: int, pairs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    both = rank_angles(num, pairs, dtype)
    return both["rope_cos"], both["rope_sin"]


# ---- h2o_rotate


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("head_dim", "pairs"),
    [(2, 1), (8, 4), (15, 7), (64, 32), (64, 8), (80, 40), (128, 37), (512, 256)],
)
def test_each_pair_is_turned_by_its_angle(
    head_dim: int, pairs: int, dtype: torch.dtype, device: torch.device
) -> None:
    vectors = normal(2, 3, 5, head_dim, dtype=dtype)
    cos, sin = angles(9, pairs, dtype)
    index = torch.tensor([0, 8, 3, 3, 1])
    got = ops.rotate(*(t.to(device) for t in (vectors, index[None, None], cos, sin))).cpu()
    assert got.dtype == dtype
    want = rotated(vectors.double(), index, cos.double(), sin.double())
    assert (got.double() - want).abs().max() <= TOLERANCE[dtype]
    assert_bitwise([got[..., 2 * pairs :]], [vectors[..., 2 * pairs :]])


@pytest.mark.parametrize("sizes", [(2, 3, 300), (1, 3, 300), (2, 1, 300), (1, 1, 300)])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_rows_and_heads_may_share_an_index(
    sizes: tuple[int, int, int], index_dtype: torch.dtype, device: torch.device
) -> None:
    vectors = normal(2, 3, 300, 16, dtype=torch.float32)
    cos, sin = angles(500, 8, torch.float32)
    index = torch.randint(500, sizes, generator=torch.Generator().manual_seed(1))
    got = ops.rotate(*(t.to(device) for t in (vectors, index.to(index_dtype), cos, sin))).cpu()
    whole = index.expand(2, 3, 300)
    for row in range(2):
        for head in range(3):
            want = rotated(vectors[row, head], whole[row, head], cos, sin)
            torch.testing.assert_close(got[row, head], want, atol=2e-6, rtol=0)


def test_a_negative_index_gives_zeros(device: torch.device) -> None:
    vectors = torch.full((1, 2, 3, 8), torch.nan)
    vectors[:, :, 1] = 1
    cos, sin = angles(2, 4, torch.float32)
    index = torch.tensor([[[-1, 0, -5]]])
    got = ops.rotate(*(t.to(device) for t in (vectors, index, cos, sin))).cpu()
    assert got[:, :, [0, 2]].count_nonzero() == 0
    torch.testing.assert_close(got[:, :, 1], 1.1 * torch.ones(1, 2, 8))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides(layout: str, device: torch.device) -> None:
    vectors = normal(2, 3, 5, 16, dtype=torch.bfloat16)
    cos, sin = angles(5, 8, torch.bfloat16)
    index = torch.arange(5)[None, None]
    want = ops.rotate(vectors, index, cos, sin)
    strided = laid_out(vectors.to(device), layout)
    # Every second of twice as many.
    index, cos, sin = (torch.stack([t, t], -1).to(device)[..., 0] for t in (index, cos, sin))
    got = ops.rotate(strided, index, cos, sin)
    assert got.is_contiguous()
    torch.testing.assert_close(got.cpu(), want, atol=0.02, rtol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_negative_sine_undoes_it(dtype: torch.dtype) -> None:
    vectors = normal(1, 2, 50, 32, dtype=dtype)
    frequencies = torch.linspace(1, 0.01, 16, dtype=score_dtype(dtype))
    turn = torch.arange(50)[:, None] * frequencies
    index = torch.arange(50)[None, None]
    there = ops.rotate(vectors, index, turn.cos(), turn.sin())
    back = ops.rotate(there, index, turn.cos(), -turn.sin())
    assert (back - vectors).abs().max() <= 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("sizes", [(0, 2, 3, 8), (2, 0, 3, 8), (2, 2, 0, 8)])
def test_nothing_to_rotate(sizes: tuple[int, ...], device: torch.device) -> None:
    cos, sin = angles(2, 4, torch.float32)
    index = torch.zeros(1, 1, sizes[2], dtype=torch.int32)
    got = ops.rotate(*(t.to(device) for t in (torch.zeros(sizes), index, cos, sin)))
    assert got.shape == sizes


GOOD: dict[str, Any] = {
    "input": torch.zeros(2, 3, 4, 8),
    "index": torch.zeros(2, 1, 4, dtype=torch.int64),
    "cos": torch.ones(5, 4),
    "sin": torch.zeros(5, 4),
}
WRONG = [
    (
        {"input": torch.zeros(3, 4, 8)},
        r"input must be \[batch, heads, n, head_dim\], got \[3, 4, 8\]",
    ),
    ({"input": torch.zeros(2, 3, 4, 8).int()}, r"input must be float32, float16, .*, got Int"),
    ({"index": torch.zeros(2, 2, 4).long()}, r"index must be .* = \[2, 3, 4\], got \[2, 2, 4\]"),
    ({"index": torch.zeros(2, 1, 4)}, r"index must be int32 or int64, got Float"),
    ({"cos": torch.ones(4)}, r"cos must be \[num_angles, pairs\], got \[4\]"),
    ({"sin": torch.ones(5, 3)}, r"sin must be .* = \[5, 4\], got \[5, 3\]"),
    ({"cos": torch.ones(5, 4).double()}, r"cos must be float32, got Double"),
    ({"input": torch.zeros(2, 3, 4, 8).double()}, r"cos must be float64, got Float"),
    (
        {"cos": torch.ones(5, 5), "sin": torch.ones(5, 5)},
        r"cos must have 1..head_dim / 2 pairs, got 5 with head_dim=8",
    ),
    ({"cos": torch.ones(0, 4), "sin": torch.ones(0, 4)}, r"cos must have at least one row, got 0"),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG)
@pytest.mark.parametrize("place", ["cpu", "meta"])
def test_what_is_wrong_is_named(wrong: dict[str, Any], message: str, place: str) -> None:
    call = {name: tensor.to(place) for name, tensor in {**GOOD, **wrong}.items()}
    with pytest.raises(RuntimeError, match=f"^h2o_rotate: {message}"):
        torch.ops.h2o.h2o_rotate(**call)


def test_an_index_without_an_angle_is_refused_on_the_cpu(device: torch.device) -> None:
    call = {**GOOD, "index": torch.full((2, 1, 4), 5)}
    if runs_cuda_operators(device):  # Nobody looks at it: the last one.
        result = torch.ops.h2o.h2o_rotate(**{name: t.to(device) for name, t in call.items()})
        assert result.isfinite().all()
        return
    with pytest.raises(RuntimeError, match=r"index must be < the rows of cos = 5, got 5"):
        torch.ops.h2o.h2o_rotate(**call)


def test_opcheck() -> None:
    call = [normal(2, 3, 4, 8, dtype=torch.float32), torch.zeros(2, 1, 4, dtype=torch.int64)]
    torch.library.opcheck(torch.ops.h2o.h2o_rotate.default, (*call, *angles(5, 4, torch.float32)))


def test_a_backward_pass_raises() -> None:
    vectors = normal(1, 1, 2, 4, dtype=torch.float32).requires_grad_()
    output = ops.rotate(vectors, torch.zeros(1, 1, 2).long(), *angles(2, 2, torch.float32))
    with pytest.raises(RuntimeError, match="not implemented"):
        output.sum().backward()


def test_the_example_in_the_documentation_is_right() -> None:
    (test,) = (t for t in doctest.DocTestFinder().find(ops.rotate, globs={}) if t.examples)
    assert doctest.DocTestRunner().run(test).failed == 0


# ---- h2o_attention_decode with rope_cos and rope_sin


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "head_dim", "pairs", "counts", "width"),
    [
        (4, 2, 16, 8, (2, 4, 4), 1),
        (3, 1, 17, 4, (0, 0, 5), 1),
        (2, 2, 8, 4, (0, 5, 0), 1),
        (8, 2, 64, 32, (2, 6, 8), 7),
        (3, 1, 80, 10, (1, 3, 5), 16),
    ],
)
def test_a_stream_equals_the_reference_at_every_step(
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    pairs: int,
    counts: Counts,
    width: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    tokens = planted_tokens(2, q_heads, kv_heads, 40, head_dim, dtype, seed=head_dim)
    tokens = pad(tokens, [[False] * 4 + [True] * 36, [True] * 40])
    state = State.empty(2, kv_heads, sum(counts) + 2, head_dim, dtype)
    clear = 0.0 if dtype.itemsize == 2 else 0.9
    ropes = rank_angles(sum(counts) + 2 + width, pairs, dtype)
    steps = check_calls(state, tokens, counts, width, device, clear_share=clear, **ropes)
    assert sum(len(step.victims) for step in steps) == 2 * kv_heads * (38 - sum(counts))


@pytest.mark.parametrize("chunk", [1, 3])
def test_one_call_is_many_calls_in_every_bit(chunk: int, device: torch.device) -> None:
    tokens = planted_tokens(2, 4, 2, 13, 16, torch.float32, seed=3)
    ropes = rank_angles(20, 8, torch.float32)
    counts = (1, 3, 2)
    whole, apart = (State.empty(2, 2, 7, 16, torch.float32, fill=0) for _ in range(2))
    output, evicted = decode(whole, tokens, counts, device, chunk=chunk, **ropes)
    parts = [
        decode(apart, tokens.columns(i, min(i + chunk, 13)), counts, device, chunk=chunk, **ropes)
        for i in range(0, 13, chunk)
    ]
    assert_bitwise(whole, apart)
    assert_bitwise([output, evicted], [torch.cat(t, 2) for t in zip(*parts, strict=True)])


def test_nothing_evicted_is_the_rotation_of_positions(device: torch.device) -> None:
    """While ranks are positions, rolling is the operator on keys that were rotated before."""
    tokens = planted_tokens(1, 4, 2, 10, 16, torch.float64)
    ropes = rank_angles(12, 8, torch.float64)
    index = torch.arange(10)
    before = tokens._replace(
        query=rotated(tokens.query, index, *ropes.values()),
        key=rotated(tokens.key, index, *ropes.values()),
    )
    states = [State.empty(1, 2, 12, 16, fill=0) for _ in range(2)]
    got, _ = decode(states[0], tokens, (2, 6, 4), device, **ropes)
    want, _ = decode(states[1], before, (2, 6, 4), device)
    torch.testing.assert_close(got, want, atol=1e-12, rtol=0)
    torch.testing.assert_close(states[0].scores, states[1].scores, atol=1e-12, rtol=0)
    assert_bitwise([states[0].k_cache[:, :, :10]], [tokens.key])


def test_new_keys_may_be_views_of_the_cache() -> None:
    state = random_state(1, 2, 6, 8, torch.float32, newest=9, full=True)
    tokens = planted_tokens(1, 2, 2, 4, 8, torch.float32, start=9)
    ropes = rank_angles(12, 4, torch.float32)
    apart, shared = state.clone(), state.clone()
    key = shared.k_cache[:, :, 1:5]
    want, _ = decode(apart, tokens._replace(key=key.clone()), (0, 3, 3), **ropes)
    got, _ = decode(shared, tokens._replace(key=key), (0, 3, 3), **ropes)
    assert_bitwise([got, *shared], [want, *apart])


def call(**changes: Any) -> dict[str, Any]:
    state = State.empty(1, 2, 6, 8, torch.float32, fill=0)
    tokens = planted_tokens(1, 4, 2, 3, 8, torch.float32)
    query, key, value, position = tokens
    counts = {"num_sink": 1, "num_heavy": 2, "num_recent": 3}
    new = {"query": query, "k_new": key, "v_new": value, "position_new": position}
    return {**state._asdict(), **new, **counts, **rank_angles(9, 4, torch.float32), **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_sin": None}, "rope_cos and rope_sin must be given together, got rope_cos alone"),
        ({"rope_cos": None}, "rope_cos and rope_sin must be given together, got rope_sin alone"),
        ({"alibi_slopes": torch.ones(4)}, "rope_cos and alibi_slopes must not be given together"),
        ({"rope_cos": torch.ones(9, 3)}, r"rope_sin must be .* = \[9, 3\], got \[9, 4\]"),
        ({"rope_sin": torch.ones(9, 4).half()}, "rope_sin must be float32, got Half"),
        (
            {"rope_cos": torch.ones(9, 5), "rope_sin": torch.ones(9, 5)},
            r"rope_cos must have 1..head_dim / 2 pairs, got 5 with head_dim=8",
        ),
        (
            rank_angles(2, 4, torch.float32),
            r"rope_cos must have an angle for each rank, got 2 rows for 0 tokens kept and 3 new ones "
            "in row 0, chunk=1",
        ),
    ],
)
def test_wrong_angles_raise_before_anything_is_written(changes: Any, message: str) -> None:
    arguments = call(**changes)
    before = {name: arguments[name].clone() for name in State._fields}
    with pytest.raises(RuntimeError, match=f"^h2o_attention_decode: {message}"):
        torch.ops.h2o.h2o_attention_decode(**arguments)
    assert_bitwise([arguments[name] for name in before], [*before.values()])


def test_a_rank_without_an_angle_takes_the_last_one_on_cuda(device: torch.device) -> None:
    if not runs_cuda_operators(device):
        pytest.skip("on the CPU it is refused")
    arguments = call(**rank_angles(2, 4, torch.float32))
    moved = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in arguments.items()}
    output, _ = torch.ops.h2o.h2o_attention_decode(**moved)
    assert output.isfinite().all()


@pytest.mark.parametrize("num_new", [1, 3])
def test_opcheck_of_decode(num_new: int) -> None:
    arguments = call()
    for name, axis in (("query", 2), ("k_new", 2), ("v_new", 2), ("position_new", 1)):
        arguments[name] = arguments[name].narrow(axis, 0, num_new)
    torch.library.opcheck(torch.ops.h2o.h2o_attention_decode.default, (), arguments)
