"""Attention statistics: literal values of hand-made attention; the teacher beside eager attention."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from h2o_kv.diagnostics import AttentionStatistics, Distribution, Teacher, attention_statistics
from h2o_kv.diagnostics.concentration import gini, power_law, tokens_for, top_share
from h2o_kv.diagnostics.overlap import (
    group_sharing,
    head_overlap,
    jaccard,
    overlap_coefficient,
    top_set,
)
from h2o_kv.diagnostics.teacher import TEACHER_ATTENTION
from h2o_kv.policies import count_of
from hf_models import set_attention, tiny_model, tokens

# Rows of one KV head with two query heads: the first reads early tokens, the second only itself.
READS = [
    [1.0, 0.0, 0.0, 0.0, 0.0],
    [0.999, 0.001, 0.0, 0.0, 0.0],
    [0.5, 0.5, 0.0, 0.0, 0.0],
    [0.25, 0.25, 0.25, 0.25, 0.0],
    [0.6, 0.0, 0.396, 0.004, 0.0],
]
HAND = torch.stack([torch.tensor(READS, dtype=torch.float64), torch.eye(5).double()])[None]


def close(value: float) -> Any:
    return pytest.approx(value, abs=1e-12)


def set_of(members: Tensor) -> set[int]:
    return set(members.nonzero()[:, 0].tolist())


# ---- Concentration.


def test_a_part_of_the_tokens_is_rounded_down_and_at_least_one() -> None:
    assert [count_of(0.2, n) for n in (1, 4, 5, 9, 10, 15)] == [1, 1, 1, 1, 2, 3]
    assert count_of(0.29, 100) == 29


def test_top_share_and_tokens_for_a_share() -> None:
    scores = torch.tensor([[1.0, 5.0, 0.0, 2.0, 2.0], [1.0, 1.0, 1.0, 1.0, 1.0]])
    assert top_share(scores, 0.4).tolist() == pytest.approx([0.7, 0.4])
    assert top_share(scores, 0.2).tolist() == pytest.approx([0.5, 0.2])
    # 5 and 2 are exactly 70 %; 5, 2 and 2 are 90 %; five equal ones reach 90 % with the fifth.
    assert tokens_for(scores, 0.7).tolist() == [2, 4]
    assert tokens_for(scores, 0.9).tolist() == [3, 5]
    assert tokens_for(scores, 0.95).tolist() == [4, 5]


def test_gini() -> None:
    assert float(gini(torch.tensor([3.0, 3.0, 3.0]))) == close(0)
    assert float(gini(torch.tensor([0.0, 8.0, 0.0, 0.0]))) == close(0.75)
    # Half of the mean difference over the mean: (1 + 2 + 1) * 2 / 9 / 2 / 2.
    assert float(gini(torch.tensor([3.0, 1.0, 2.0]))) == close(2 / 9)


def test_power_law() -> None:
    exact = power_law(torch.tensor([7 * rank**-1.5 for rank in (3, 1, 4, 2)], dtype=torch.float64))
    assert (exact.slope, exact.r2, exact.ranks) == (close(-1.5), close(1), 4)
    scores = [9.0, 0.0, 4.0, 0.5, 4.0]
    x, y = np.log([1, 2, 3, 4]), np.log([9.0, 4.0, 4.0, 0.5])
    slope, constant = np.polyfit(x, y, 1)
    rest = ((y - slope * x - constant) ** 2).sum() / ((y - y.mean()) ** 2).sum()
    fitted = power_law(torch.tensor(scores))
    assert (fitted.slope, fitted.r2, fitted.ranks) == (close(slope), close(1 - rest), 4)
    flat = power_law(torch.ones(3))
    assert flat.slope == 0
    assert math.isnan(flat.r2)


def test_distribution_leaves_nan_out() -> None:
    values = torch.cat([torch.arange(101.0).flip(0), torch.tensor([torch.nan])]).view(2, 51)
    assert Distribution.of(values) == Distribution(101, 50.0, 0.0, 1.0, 5.0, 50.0, 95.0, 100.0)
    between = Distribution.of(torch.tensor([1.0, 2.0, 4.0]))
    assert (between.p1, between.p5, between.p95) == (close(1.02), close(1.1), close(3.8))
    nothing = Distribution.of(torch.tensor([torch.nan]))
    assert nothing.count == 0
    assert math.isnan(nothing.mean)
    assert math.isnan(nothing.p1)


# ---- Overlap.


def test_of_equal_scores_the_later_token_is_in_the_set() -> None:
    scores = torch.tensor([[2.0, 1.0, 2.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    assert [set_of(row) for row in top_set(scores, 3)] == [{0, 2, 4}, {2, 3, 4}]


def test_overlap_of_three_heads() -> None:
    scores = torch.tensor([[4.0, 3.0, 0, 0], [0, 3.0, 4.0, 0], [4.0, 3.0, 0, 0]])
    found = head_overlap(scores, 2)
    # {0, 1}, {1, 2}, {0, 1}: pairs share 1, 2 and 1 of their 2 tokens.
    assert found.overlap_mean == close(2 / 3)
    assert found.overlap_min == 0.5
    assert found.jaccard_mean == close((1 / 3 + 1 + 1 / 3) / 3)
    assert found.jaccard_min == close(1 / 3)
    assert found.by_chance == 0.5
    assert math.isnan(head_overlap(scores[:1], 2).overlap_mean)
    small, large = (torch.tensor(x) for x in ([1, 0, 0, 0], [1, 1, 1, 0]))
    assert overlap_coefficient(small.bool(), large.bool()) == 1
    assert jaccard(small.bool(), large.bool()) == close(1 / 3)


def test_what_heads_lose_by_sharing() -> None:
    # The first head has all on token 0; the others share token 1 between them.
    scores = torch.tensor([[10.0, 0, 0], [0, 6.0, 4.0], [0, 5.0, 5.0]], dtype=torch.float64)
    shared = group_sharing(scores, torch.tensor([10.0, 6.0, 5.0]), 1)
    assert shared.sum_max_overlap == 0  # {1} by 11, {0} by 10
    assert shared.sum_mean == close((0 + 0.6 + 0.5) / 3)
    assert shared.sum_worst == 0
    assert shared.max_mean == close(1 / 3)
    assert shared.max_worst == 0
    assert shared.own_mean == close((1 + 0.6 + 0.5) / 3)
    assert shared.own_worst == close(0.5)
    assert shared.union_tokens == 3  # {0}, {1}, and of the equal ones {2}
    assert (shared.union_mean, shared.union_worst) == (close(1), close(1))


# ---- The statistics of one layer, from literal attention.


@pytest.mark.parametrize("cuts", [(5,), (2, 5), (1, 2, 3, 4, 5)])
def test_statistics_of_hand_made_attention(cuts: tuple[int, ...]) -> None:
    collected = AttentionStatistics(early=[2], row_stride=1)
    first = 0
    for stop in cuts:
        collected.observe(0, first, HAND[:, :, first:stop, :stop].clone())
        first = stop
    (layer,) = collected.result()
    reads, itself = layer.heads
    # Below 1 % of the maximum: 0.001, a 0, and 0, 0.004, 0; under the diagonal of the other all 10.
    assert (reads.sparsity, itself.sparsity) == (close(5 / 15), close(10 / 15))
    assert layer.sparsity == close(15 / 30)
    assert layer.sparsity_square == close((7.5 + 10) / 25)
    # Columns: 3.349, 0.751, 0.646, 0.254, 0.
    assert (reads.top_share, itself.top_share) == (close(3.349 / 5), close(0.2))
    assert (reads.sink_share, itself.sink_share) == (close(1), close(0.8))
    assert (reads.tokens_90, reads.tokens_95) == (3, 4)
    assert (itself.tokens_90, itself.tokens_95) == (5, 5)
    # Only the last row has 5 tokens, of which 20 % are one.
    assert reads.rows_top_share.count == itself.rows_top_share.count == 1
    assert (reads.rows_top_share.mean, itself.rows_top_share.mean) == (close(0.6), close(1))
    assert (reads.rows_tokens_90.mean, itself.rows_tokens_95.mean) == (2, 1)
    assert itself.gini == close(0)
    assert reads.power_law.ranks == 4
    # {0} and, of five equal ones, {4}.
    assert (layer.overlap.overlap_mean, layer.overlap.by_chance) == (0, close(0.2))
    (group,) = layer.groups
    assert (group.sum_max_overlap, group.union_tokens) == (1, 2)
    assert (group.sum_mean, group.sum_worst) == (close((0.6698 + 0.2) / 2), close(0.2))
    assert (group.union_mean, group.union_worst) == (close((0.6698 + 0.4) / 2), close(0.4))
    # After two tokens {0} and {1}; at the end {0} and {4}, of the first two {0} and {1}.
    (early,) = layer.stability
    assert (early.tokens, early.in_final, early.same_tokens) == (2, 0.5, 1)


def test_rows_are_sampled_by_stride() -> None:
    weights = torch.full((1, 1, 30, 30), 1.0).tril()
    weights = weights / weights.sum(-1, keepdim=True)
    for stride, rows in ((1, 26), (4, 7), (7, 4)):  # of rows 4 to 29, with 5 tokens or more
        collected = AttentionStatistics(row_stride=stride)
        for first, stop in ((0, 11), (11, 30)):
            collected.observe(0, first, weights[:, :, first:stop, :stop])
        assert collected.result()[0].heads[0].rows_top_share.count == rows


def test_the_maximum_is_taken_in_each_row() -> None:
    # Token 1 is read by both heads, in turns; token 0 by both, a little more in all.
    first = [[1.0, 0, 0, 0], [0.5, 0.5, 0, 0], [0, 1.0, 0, 0], [0.25, 0, 0, 0.75]]
    second = [[1.0, 0, 0, 0], [0.5, 0.5, 0, 0], [0.25, 0, 0.75, 0], [0, 1.0, 0, 0]]
    collected = AttentionStatistics(row_stride=1)
    for start, stop in ((0, 3), (3, 4)):
        collected.observe(0, start, torch.tensor([[first, second]])[:, :, start:stop, :stop])
    (group,) = collected.result()[0].groups
    # Sums 3.5 and 3, and 1.75 and 1.5 of either head; maxima 1 + 0.5 + 0.25 + 0.25 and 0.5 + 1 + 1.
    assert group.sum_max_overlap == 0
    assert (group.sum_mean, group.max_mean) == (close(1.75 / 4), close(1.5 / 4))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"row_stride": 0}, "row_stride must be >= 1, got 0"),
        ({"early": [4, 2]}, r"early must be ascending and >= 1, got \[4, 2\]"),
        ({"early": [0]}, r"early must be ascending and >= 1, got \[0\]"),
    ],
)
def test_statistics_refuse_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AttentionStatistics(**options)


def test_one_token_has_no_statistics() -> None:
    with pytest.raises(ValueError, match="at least 2 tokens"):
        AttentionStatistics().result()


# ---- The teacher.


class Whole:
    """Puts the blocks together again, [heads, tokens, tokens] of each layer."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.layers: dict[int, Tensor] = {}
        self.rows: dict[int, list[int]] = {}

    def observe(self, layer: int, first: int, weights: Tensor) -> None:
        rows, keys = weights.shape[2:]
        assert keys == first + rows
        whole = self.layers.setdefault(
            layer, weights.new_zeros(*weights.shape[:2], self.length, self.length)
        )
        whole[:, :, first : first + rows, :keys] = weights
        self.rows.setdefault(layer, []).extend(range(first, first + rows))


@pytest.mark.parametrize("family", ["llama", "opt", "gpt_neox"])
def test_the_teacher_is_eager_attention(family: str) -> None:
    ids = tokens(1, 150)[0]
    model = tiny_model(family, attention="eager", dtype=torch.float64)
    with torch.no_grad():
        # Its softmax is in float32; that of sdpa is not.
        attentions = model(ids[None], output_attentions=True).attentions
        set_attention(model, "sdpa")
        expected = model(ids[None]).logits[0]
    whole = Whole(len(ids))
    teacher = Teacher(model, [whole])
    # Longer than a block, and several blocks; then few logits of the last ones.
    logits = [
        teacher.feed(ids[:100]),
        teacher.feed(ids[100:101]),
        teacher.feed(ids[101:], keep_logits=3),
    ]
    assert model.config._attn_implementation == TEACHER_ATTENTION
    torch.testing.assert_close(logits[0], expected[:100], atol=1e-10, rtol=0)
    torch.testing.assert_close(logits[2], expected[-3:], atol=1e-10, rtol=0)
    for layer, weights in enumerate(attentions):
        assert whole.rows[layer] == list(range(150))
        got = whole.layers[layer].flatten(0, 1)
        torch.testing.assert_close(got, weights[0], atol=1e-6, rtol=0)


def test_statistics_of_a_model_are_those_of_its_eager_attention() -> None:
    def near(value: Any) -> Any:
        return pytest.approx(value, abs=1e-6)  # eager attention's softmax is in float32

    ids = tokens(1, 90)[0]
    model = tiny_model("llama", attention="eager", dtype=torch.float64)
    with torch.no_grad():
        attentions = model(ids[None], output_attentions=True).attentions
    done: list[float] = []
    layers = attention_statistics(model, ids, early=(0.5,), row_stride=5, progress=done.append)
    assert model.config._attn_implementation == "eager"
    assert done == [1.0]
    assert len(layers) == 2
    for layer, weights in zip(layers, attentions, strict=True):
        small = 0
        for number, head in enumerate(layer.heads):
            matrix = weights[0, number].numpy()
            below = sum(
                int((matrix[t, : t + 1] < 0.01 * matrix[t, : t + 1].max()).sum()) for t in range(90)
            )
            small += below
            assert head.sparsity == near(below / (90 * 91 / 2))
            columns = np.sort(matrix.sum(0))[::-1]
            assert head.top_share == near(columns[:18].sum() / 90)
            assert head.tokens_90 == int(np.argmax(columns.cumsum() >= 81)) + 1
            assert head.sink_share == near(matrix[:, :4].sum() / 90)
            rows = [
                np.sort(matrix[t, : t + 1])[::-1][: (t + 1) // 5].sum() for t in range(5, 90, 5)
            ]
            assert head.rows_top_share.count == 17
            assert head.rows_top_share.mean == near(np.mean(rows))
            assert head.rows_top_share.p5 == near(np.percentile(rows, 5))
        assert layer.sparsity == near(small / (4 * 90 * 91 / 2))
        columns = weights[0].sum(1).numpy()
        top = [set(np.argsort(-c)[:18]) for c in columns]
        shared = [len(top[a] & top[b]) / 18 for a in range(4) for b in range(a)]
        assert layer.overlap.overlap_mean == near(np.mean(shared))
        for group, pair in zip(layer.groups, (slice(0, 2), slice(2, 4)), strict=True):
            by_sum = list(np.argsort(-columns[pair].sum(0))[:18])
            covered = [c[by_sum].sum() / 90 for c in columns[pair]]
            assert group.sum_worst == near(min(covered))
            maxima = weights[0, pair].amax(0).sum(0).numpy()
            by_max = set(np.argsort(-maxima)[:18])
            assert group.sum_max_overlap == near(len(by_max & set(by_sum)) / 18)
        then = [set(np.argsort(-m[:45].sum(0)[:45])[:9]) for m in weights[0].numpy()]
        in_final = [len(a & b) / 9 for a, b in zip(then, top, strict=True)]
        assert layer.stability[0].tokens == 45
        assert layer.stability[0].in_final == near(np.mean(in_final))


def test_the_teacher_refuses_what_it_cannot_observe() -> None:
    with pytest.raises(NotImplementedError, match="BLOOM and MPT is not, got model_type='bloom'"):
        Teacher(tiny_model("bloom"))
    windowed = tiny_model("mistral", sliding_window=8)
    with pytest.raises(NotImplementedError, match="sliding|causal over all tokens"):
        Teacher(windowed).feed(tokens(1, 20)[0])


def test_the_teachers_attention_is_not_for_other_use() -> None:
    model = tiny_model("llama")
    set_attention(model, TEACHER_ATTENTION)
    with pytest.raises(RuntimeError, match=r"for h2o_kv.diagnostics alone; call model.set_attn"):
        model(tokens(1, 4))
