"""h2o_prefill_select: column sums of the causal attention, and who stays."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from h2o_kv import trace
from op_helpers import (
    DTYPES,
    LAYOUTS,
    Counts,
    State,
    Tokens,
    assert_bitwise,
    assert_close,
    assert_not_flat,
    budgets,
    check_selection,
    decode,
    is_emulated,
    laid_out,
    pad,
    planted_tokens,
    reference_select,
    select,
)


def column_sums(tokens: Tokens, reduce: str = "sum", scale: float | None = None) -> Tensor:
    """[batch, kv_heads, num] of unpadded tokens, from the whole matrix, in float64."""
    batch, _, num, head_dim = tokens.query.shape
    query = tokens.query.double().view(batch, tokens.key.shape[1], -1, num, head_dim)
    logits = query @ tokens.key.double()[:, :, None].transpose(-1, -2)
    logits = logits * (head_dim**-0.5 if scale is None else scale)
    logits.masked_fill_(torch.ones(num, num, dtype=torch.bool).triu(1), -math.inf)
    weights = torch.softmax(logits, -1)
    return (weights.sum(2) if reduce == "sum" else weights.amax(2)).sum(-2)


def equal_logits(num: int, pads: int = 0) -> Tokens:
    zeros = torch.zeros(1, 1, num, 2)
    position = torch.tensor([[-1] * pads + list(range(num - pads))])
    return Tokens(zeros, zeros, zeros, position)


# --- worked by hand -----------------------------------------------------------------------------


def test_equal_logits_give_the_causal_column_sums(device: torch.device) -> None:
    # Row i gives 1/(i+1) to each of its tokens; what later rows see must not leak into earlier ones.
    selected, scores = select(equal_logits(6), (0, 6, 0), device)
    assert selected.tolist() == [[[0, 1, 2, 3, 4, 5]]]
    expected = torch.tensor([[[2.45, 1.45, 0.95, 37 / 60, 11 / 30, 1 / 6]]])
    assert_close(scores, expected, 1e-6)


def test_padded_rows_give_no_mass(device: torch.device) -> None:
    selected, scores = select(equal_logits(6, pads=2), (0, 6, 0), device)
    assert selected.tolist() == [[[2, 3, 4, 5, -1, -1]]]  # padding is never kept
    assert_close(scores, torch.tensor([[[25 / 12, 13 / 12, 7 / 12, 0.25, 0, 0]]]), 1e-6)


def test_max_is_taken_in_each_row_and_then_summed(device: torch.device) -> None:
    # Two query heads of one KV head, two tokens; the second row's weights are (.9, .1) and (.2, .8).
    key = torch.tensor([[0.9, 0.2], [0.1, 0.8]]).log().view(1, 1, 2, 2)
    query = torch.eye(2)[None, :, None].expand(1, 2, 2, 2)
    tokens = Tokens(query, key, key, torch.tensor([[3, 8]]))
    _, scores = select(tokens, (0, 2, 0), device, scale=1.0, gqa_reduce="max")
    assert_close(scores, torch.tensor([[[1 + 0.9, 0.8]]]), 1e-6)
    _, scores = select(tokens, (0, 2, 0), device, scale=1.0, gqa_reduce="sum")
    assert_close(scores, torch.tensor([[[2 + 1.1, 0.9]]]), 1e-6)


def test_ties_keep_the_larger_position(device: torch.device) -> None:
    # Four tokens that each attend to themselves alone: every score is exactly 1.
    key = 200 * torch.eye(4).view(1, 1, 4, 4)
    tokens = Tokens(key, key, key, torch.arange(4)[None])
    selected, scores = select(tokens, (0, 2, 1), device)
    assert selected.tolist() == [[[1, 2, 3]]]
    assert scores.tolist() == [[[1.0, 1.0, 1.0]]]
    selected, _ = select(tokens, (1, 1, 1), device)
    assert selected.tolist() == [[[0, 2, 3]]]
    selected, _ = select(tokens, (2, 0, 1), device)
    assert selected.tolist() == [[[0, 1, 3]]]


@pytest.mark.parametrize("name", sorted(trace.list_cases()))
def test_worked_case_equals_the_reference(name: str, device: torch.device) -> None:
    case = trace.load_case(name)
    tokens = Tokens(case.query, case.k_new, case.v_new, case.position_new)
    counts = (case.num_sink, case.num_heavy, case.num_recent)
    selected, scores = select(tokens, counts, device, gqa_reduce=case.gqa_reduce, scale=case.scale)
    true_selected, true_scores, _ = reference_select(
        tokens, counts, gqa_reduce=case.gqa_reduce, scale=case.scale
    )
    assert torch.equal(selected, true_selected)
    assert_close(scores, true_scores, 1e-12)


# --- against the reference ----------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    batch: int
    kv_heads: int
    group: int
    head_dim: int
    seq_len: int
    dtype: torch.dtype
    counts: Counts
    row_budget: tuple[Counts, ...] | None
    position_dtype: torch.dtype
    padded: bool
    gaps: bool
    gqa_reduce: str
    sharpness: float | None  # the scale, in units of the default one
    alibi: bool
    layout: str
    seed: int


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    batch, total = draw(st.integers(1, 3)), draw(st.integers(1, 24))
    counts = draw(budgets(total))
    return Problem(
        batch=batch,
        kv_heads=draw(st.integers(1, 3)),
        group=draw(st.sampled_from([1, 2, 3, 4, 7, 8])),
        head_dim=draw(st.sampled_from([1, 2, 5, 8, 17, 64, 80])),
        seq_len=draw(st.integers(0, 40)),
        dtype=draw(st.sampled_from(DTYPES)),
        counts=counts,
        row_budget=draw(st.none() | st.tuples(*[budgets(sum(counts))] * batch)),
        position_dtype=draw(st.sampled_from([torch.int32, torch.int64])),
        padded=draw(st.booleans()),
        gaps=draw(st.booleans()),
        gqa_reduce=draw(st.sampled_from(["sum", "max"])),
        sharpness=draw(st.sampled_from([None, 0.5, 1.5])),
        alibi=draw(st.booleans()),
        layout=draw(st.sampled_from(LAYOUTS)),
        seed=draw(st.integers(0, 2**16)),
    )


@given(problem=problems())
@settings(deadline=None, derandomize=True, max_examples=300)
def test_equals_the_reference(problem: Problem) -> None:
    p = problem
    q_heads = p.kv_heads * p.group
    tokens = planted_tokens(p.batch, q_heads, p.kv_heads, p.seq_len, p.head_dim, p.dtype, p.seed)
    position = tokens.position * (3 if p.gaps else 1) + (5 if p.gaps else 0)
    tokens = tokens._replace(position=position.to(p.position_dtype))
    if p.padded:
        g = torch.Generator().manual_seed(p.seed)
        tokens = pad(tokens, (torch.rand(p.batch, p.seq_len, generator=g) < 0.7).tolist())
    tokens = tokens._replace(
        query=laid_out(tokens.query, p.layout), key=laid_out(tokens.key, p.layout)
    )
    slopes = torch.linspace(0.01, 0.3, q_heads) if p.alibi else None
    row_budget = None if p.row_budget is None else torch.tensor(p.row_budget)
    check_selection(
        tokens,
        p.counts,
        clear_share=0,
        gqa_reduce=p.gqa_reduce,
        scale=None if p.sharpness is None else p.sharpness * p.head_dim**-0.5,
        alibi_slopes=slopes,
        row_budget=row_budget,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gqa_reduce", ["sum", "max"])
def test_column_sums_equal_the_whole_matrix(
    dtype: torch.dtype, gqa_reduce: str, device: torch.device
) -> None:
    tokens = planted_tokens(2, 8, 2, 512, 64, dtype)
    selected, scores = select(tokens, (0, 512, 0), device, gqa_reduce=gqa_reduce)
    expected = column_sums(tokens, gqa_reduce)
    assert torch.equal(selected, torch.arange(512).expand(2, 2, 512))
    assert_close(scores, expected, 1e-9 if dtype == torch.float64 else 1e-4)
    assert_not_flat(scores, selected)
    total = expected.sum(-1) if gqa_reduce == "max" else torch.full((2, 2), 4.0 * 512)
    assert_close(scores.double().sum(-1), total, 1e-2)


@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "num", "head_dim"),
    [(8, 2, 700, 128), (2, 2, 130, 512), (71, 1, 40, 16), (5, 5, 300, 33), (130, 2, 66, 8)],
)
def test_large_shapes(
    q_heads: int, kv_heads: int, num: int, head_dim: int, device: torch.device
) -> None:
    tokens = planted_tokens(1, q_heads, kv_heads, num, head_dim, torch.float32)
    _, scores = check_selection(tokens, (4, 20, 16), device)
    assert_not_flat(scores, torch.zeros(scores.shape))


def test_a_very_large_batch(device: torch.device) -> None:
    batch = 3_000 if is_emulated() else 70_000
    tokens = planted_tokens(batch, 1, 1, 3, 2, torch.float32)
    selected, scores = select(tokens, (0, 1, 1), device)
    expected = column_sums(tokens)
    first = expected[..., :2].argmax(-1)
    apart = (expected[..., 0] - expected[..., 1]).abs() > 1e-5
    assert apart.sum() > 0.99 * batch
    assert torch.equal(selected[..., 0][apart], first[apart])
    assert (selected[..., 1] == 2).all()
    assert_close(scores[apart], expected[apart].gather(1, selected[apart]), 1e-5)


def test_per_row_lengths_and_budgets(device: torch.device) -> None:
    # Lengths 3, 700, 17 and 1 with budgets 2, 64, 16 and 1 in one call, each row padded differently.
    lengths, kept = [3, 700, 17, 1], [2, 64, 16, 1]
    tokens = planted_tokens(4, 2, 1, 700, 8)
    real = torch.zeros(4, 700, dtype=torch.bool)
    real[0, -3:], real[1], real[2, 5:22], real[3, 0] = True, True, True, True
    tokens = pad(tokens, real.tolist())
    row_budget = torch.tensor([[0, k, 0] for k in kept])
    selected, scores = check_selection(tokens, (0, 64, 0), device, row_budget=row_budget)
    assert (selected >= 0).sum(-1).flatten().tolist() == kept
    for row, length in enumerate(lengths):
        columns = selected[row, 0][selected[row, 0] >= 0]
        assert real[row, columns].all()
        alone = Tokens(
            *(t[row : row + 1, :, real[row]] for t in tokens[:3]), torch.arange(length)[None]
        )
        own, own_scores = select(alone, (0, kept[row], 0), device)
        inside = torch.nonzero(real[row]).flatten()
        assert torch.equal(inside[own[0, 0]], columns)
        assert_bitwise([own_scores[0, 0]], [scores[row, 0, : kept[row]]])


def test_a_prompt_shorter_than_the_budget_stays_whole(device: torch.device) -> None:
    tokens = planted_tokens(2, 2, 1, 3, 4, torch.float32)
    selected, scores = select(tokens, (2, 3, 3), device)
    assert selected.tolist() == [[[0, 1, 2] + [-1] * 5]] * 2
    assert (scores[..., 3:] == 0).all()
    assert_close(scores[..., :3], column_sums(tokens), 1e-6)


@pytest.mark.parametrize("batch", [0, 2])
def test_no_tokens(batch: int, device: torch.device) -> None:
    tokens = planted_tokens(batch, 4, 2, 0, 8, torch.bfloat16)
    selected, scores = select(tokens, (1, 2, 3), device)
    assert selected.shape == scores.shape == (batch, 2, 6)
    assert (selected == -1).all()
    assert (scores == 0).all()


def test_a_row_of_padding_alone_keeps_nothing(device: torch.device) -> None:
    tokens = pad(planted_tokens(2, 2, 1, 5, 4), [[False] * 5, [True] * 5])
    selected, scores = check_selection(tokens, (1, 1, 1), device)
    assert selected[0].tolist() == [[-1, -1, -1]]
    assert (scores[0] == 0).all()


def test_fp16_logits_above_the_fp16_range(device: torch.device) -> None:
    # q . k is 288,000 and 32,199 after scaling; fp16 ends at 65,504.
    sign = torch.tensor([1.0, 1.0, -1.0]).view(1, 1, 3, 1)
    key = (60 * sign.expand(1, 1, 3, 80)).half()
    query = torch.full((1, 1, 3, 80), 60.0).half()
    tokens = Tokens(query, key, key, torch.arange(3)[None])
    _, scores = select(tokens, (0, 3, 0), device)
    assert scores.tolist() == [[[2.0, 1.0, 0.0]]]


# --- one-shot prefill in two ways ---------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gqa_reduce", ["sum", "max"])
@pytest.mark.parametrize("chunk", [33, 1000])
def test_a_chunk_of_the_whole_prompt_is_the_same_selection(
    dtype: torch.dtype, gqa_reduce: str, chunk: int, device: torch.device
) -> None:
    counts, slopes = (2, 5, 4), torch.linspace(0.01, 0.1, 6)
    tokens = planted_tokens(2, 6, 2, 33, 16, dtype)
    tokens = pad(tokens, [[False] * 6 + [True] * 27, [True] * 33])
    options = {"gqa_reduce": gqa_reduce, "alibi_slopes": slopes}
    selected, scores = select(tokens, counts, device, **options)
    state = State.empty(2, 2, 13, 16, dtype)
    decode(state, tokens, counts, device, chunk=chunk, **options)
    assert_not_flat(state.scores, state.positions)
    for row in range(2):
        for head in range(2):
            columns = selected[row, head]
            kept = tokens.position[row, columns].tolist()
            assert state.kept(row, head) == kept
            by_position = state.score_of(row, head)
            own = torch.tensor([by_position[p] for p in kept], dtype=scores.dtype)
            if dtype.itemsize == 2:  # CUDA computes a whole prompt's logits on tensor cores
                torch.testing.assert_close(own, scores[row, head], rtol=1e-5, atol=1e-6)
            else:
                assert_bitwise([own], [scores[row, head]])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_alignment_changes_no_bit(dtype: torch.dtype, device: torch.device) -> None:
    tokens = planted_tokens(2, 6, 2, 70, 32, dtype)
    expected = select(tokens, (2, 9, 5), device)
    shifted = []
    for tensor in tokens[:2]:
        buffer = torch.zeros(tensor.numel() + 1, dtype=dtype, device=device)
        shifted.append(buffer[1:].view(tensor.shape).copy_(tensor))
    moved = tokens._replace(query=shifted[0], key=shifted[1])
    assert_bitwise(select(moved, (2, 9, 5), device), expected)


# --- the same bits every time -------------------------------------------------------------------


def test_results_do_not_depend_on_batch_threads_or_repetition() -> None:
    tokens = planted_tokens(3, 6, 2, 150, 24, torch.float32)
    tokens = pad(
        tokens, [[True] * 150, [False] * 40 + [True] * 110, [i % 3 > 0 for i in range(150)]]
    )
    torch.set_num_threads(1)
    first = select(tokens, (3, 20, 10))
    for threads in (1, 2, 2, 2):
        torch.set_num_threads(threads)
        assert_bitwise(select(tokens, (3, 20, 10)), first)
    for row in range(3):
        alone = select(tokens.row(row), (3, 20, 10))
        assert_bitwise(alone, [t[row : row + 1] for t in first])


def test_inputs_are_left_as_they_are() -> None:
    tokens = planted_tokens(2, 4, 2, 30, 8, torch.float16)
    copies = [t.clone() for t in tokens]
    select(tokens, (1, 4, 4))
    assert all(torch.equal(a, b) for a, b in zip(tokens, copies, strict=True))


def test_expanded_inputs(device: torch.device) -> None:
    tokens = planted_tokens(1, 4, 2, 20, 8, torch.float32)
    expanded = Tokens(*(t.expand(3, *t.shape[1:]) for t in tokens))
    assert expanded.key.stride(0) == 0
    alone, together = select(tokens, (1, 4, 4), device), select(expanded, (1, 4, 4), device)
    for own, all_rows in zip(alone, together, strict=True):
        assert_bitwise([all_rows], [own.expand(3, -1, -1).contiguous()])


_MEMORY = """
import resource, torch, h2o_kv
torch.set_num_threads(2)
query = torch.randn(1, 8, 8192, 64)
key = torch.randn(1, 8, 8192, 64)
position = torch.arange(8192)[None]
h2o_kv.ops.prefill_select(query[:, :, :64], key[:, :, :64], position[:, :64], 0, 8, 8)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
selected, scores = h2o_kv.ops.prefill_select(query, key, position, 4, 1000, 600)
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert selected.shape == (1, 8, 1604)
print((after - before) * 1024)

# The same as one chunk of h2o_attention_decode, with fewer heads.
k, v = torch.zeros(2, 1, 1, 1604, 64)
scores, positions = torch.zeros(1, 1, 1604), torch.full((1, 1, 1604), -1, dtype=torch.int32)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
h2o_kv.ops.attention_decode(
    query[:, :2], k, v, scores, positions, key[:, :1], key[:, :1], position, 4, 1000, 600, chunk=8192
)
assert (positions >= 0).all()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


def test_memory_of_a_long_prompt_is_linear() -> None:
    # The attention matrix alone would be 2 GiB. ru_maxrss is in KiB on Linux, where CI runs.
    done = subprocess.run(
        [sys.executable, "-c", _MEMORY], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    by_select, by_decode = (int(line) for line in done.stdout.split())
    assert by_select < 256e6
    assert by_decode < 64e6
