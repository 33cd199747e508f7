"""The operators of ``torch.ops.h2o``, documented; each function calls the operator of its name.

Sizes by name: ``batch`` rows, ``num_q_heads`` query heads, ``num_kv_heads`` KV heads (a divisor of
``num_q_heads``), ``capacity`` slots per (row, KV head), ``num_new`` new tokens, ``head_dim`` in 1..512.
The state of a layer is four tensors that move together:

===================== ============================================= ==================================
``k_cache, v_cache``  [batch, num_kv_heads, capacity, head_dim]     what each slot holds
``scores``            [batch, num_kv_heads, capacity], float32      attention mass received so far
                      (float64 for a float64 cache)
``positions``         [batch, num_kv_heads, capacity], int32        which token it is; -1 = empty slot
===================== ============================================= ==================================

All tensors are on one device (CPU or CUDA) and of one dtype (float32, float16, bfloat16 or float64),
where nothing else is said; accumulation is in float32 (float64 for float64). Inputs may have any
strides. The four state tensors are written in place, through views too; head_dim must have stride 1
there. Everything that is wrong raises before the first write: RuntimeError for tensors, ValueError
for numbers and names, with the argument, the rule and the values in the message. The operators are
for inference: a backward pass from an output or scores that they return raises, and what they write
into the state carries no gradient, so a loss of k_cache, v_cache or scores does not reach their inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["attention_decode", "evict", "prefill_select", "rotate"]


def attention_decode(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    scores: Tensor,
    positions: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    position_new: Tensor,
    num_sink: int,
    num_heavy: int,
    num_recent: int,
    *,
    gqa_reduce: str = "sum",
    scale: float | None = None,
    chunk: int = 1,
    alibi_slopes: Tensor | None = None,
    row_budget: Tensor | None = None,
    k_evicted: Tensor | None = None,
    v_evicted: Tensor | None = None,
    rope_cos: Tensor | None = None,
    rope_sin: Tensor | None = None,
    score_rule: str = "sum",
    score_decay: float = 1.0,
    score_seed: int = 0,
    score_queries: int = 0,
    score_pool: int = 1,
    score_new: Tensor | None = None,
    pattern_stride: int = 0,
    pattern_columns: int = 0,
    read_slots: int = 0,
    read_page: int = 1,
) -> tuple[Tensor, Tensor]:
    """Attend, score, evict and store, for each new token in turn.

    Parameters
    ----------
    query : Tensor, [batch, num_q_heads, num_new, head_dim]
        Rotated already, at the tokens' original positions.
    k_cache, v_cache, scores, positions : Tensor
        The state of the layer, written in place.
    k_new, v_new : Tensor, [batch, num_kv_heads, num_new, head_dim]
        Keys (rotated already) and values of the new tokens.
    position_new : Tensor, int32 or int64, [batch, num_new]
        Position of each new token, increasing along a row; negative = padding, which is never
        attended, scored or stored and whose output is zeros.
    num_sink, num_heavy, num_recent : int, slots
        The budget of every row, together in 1..capacity: positions below ``num_sink`` and the
        ``num_recent`` newest never leave; ``num_heavy`` others stay for their score.
    gqa_reduce : "sum" or "max"
        How the weights of the query heads of a KV head become one score.
    scale : float, optional
        Factor on q . k; ``head_dim ** -0.5`` by default, as in torch's SDPA.
    chunk : int, tokens
        1 is the paper's decode. With more, that many tokens of a row join together, attend causally,
        are scored row by row, and then as many leave as the budget demands (at most as many as
        joined). ``chunk >= num_new`` on an empty cache is the whole one-shot prefill.
    alibi_slopes : Tensor, float32 or float64, [num_q_heads], optional
        Adds ``slope * (key position - query position)`` to the logits. Finite, which is looked at on
        the CPU alone.
    row_budget : Tensor, int32 or int64, [batch, 3], optional
        (num_sink, num_heavy, num_recent) of each row, instead of the three numbers, which must be a
        budget all the same.
    k_evicted, v_evicted : Tensor, sizes and dtype of ``k_new``, optional, both or neither
        Written in place: in each column the key and the value of the token that ``evicted`` names
        there, as its slot held them, so that a step can be undone. A column stays as it is where
        nobody left, or where the token that left had joined with this very chunk and so never was in
        a slot (with ``chunk = 1``: where a new token itself left). head_dim must have stride 1.
    rope_cos, rope_sin : Tensor, float32 (float64 for a float64 cache), [num_ranks, pairs], optional
        Both or neither: position rolling. Query, ``k_new`` and the keys in the cache are not rotated
        then; in the step each is, as `rotate` does it, by the row of its rank: that of a cached token
        among those that its KV head keeps, those of new tokens after them. On the CPU a rank without
        a row is refused; on CUDA, where nobody looks, it takes the last one. What is rotated is
        rounded to its own dtype, as in a model. Not with ``alibi_slopes``.
    score_rule : str
        What a query with weight w (of the group: summed or maximised) does to the score s of a token
        that it sees. Everything but "sum" is another policy than H2O (docs/policies.md):

        - "sum": s + w.
        - "decay": s * score_decay + w.
        - "mean": s + w, and compared is s / age, age = newest position - own position + 1.
        - "value": s + w * (sum of |v| of the token's value).
        - "misses": s - 1 if w is less than an even share (1 / tokens seen, times the group's heads
          with "sum"), else s. Tokens must join one by one then.
        - "prompt": s + w where the query's token joined together with others, else s.
        - "random": s, which is a number in [0, 1) of ``score_seed``, KV head and position.
        - "given": s.
    score_decay : float
        With "decay"; 0 < score_decay <= 1.
    score_seed : int
        With "random".
    score_queries : int
        Of tokens that join together, only the last so many of a row's chunk give weights; 0 = all.
    score_pool : int
        Odd. After a chunk of several tokens, the first scores of those of them that are not recent
        are replaced by the mean over so many neighbours among them, with zeros beyond the ends.
    score_new : Tensor, dtype of ``scores``, [batch, num_kv_heads, num_new], optional
        Added to each new token's first score.
    pattern_stride, pattern_columns : int
        Tokens at positions p with ``p % pattern_stride >= pattern_stride - pattern_columns`` leave
        after all others that may, the oldest first; a stride of 0 means none.
    read_slots, read_page : int
        With ``read_slots > 0`` and ``chunk = 1`` a token attends to itself and, in each query head, to
        the so many slots of the highest logits, or with ``read_page > 1`` to ceil(read_slots /
        read_page) pages of neighbouring slots, that of the newest token and those whose keys'
        extremes allow the highest logit. Others get weight 0. Only with "sum". Slow: made of ATen's
        operators, for comparisons of quality.

    Returns
    -------
    output : Tensor
        Sizes, dtype and layout of ``query``. Attends to the cache and the new token together, so the
        token that leaves at this step still counts.
    evicted : Tensor, int32, [batch, num_kv_heads, num_new]
        The position that left at each token, -1 = none. With ``chunk > 1``: those that left with a
        chunk, in the order they left, from the column of its first token.

    Notes
    -----
    H2O (arXiv 2306.14048), Algorithm 1. The scores are updated before the eviction, the new token's
    first score is its own weight in this step, and among equal scores the smaller position leaves
    (the paper says nothing of ties). Sinks are StreamingLLM's (arXiv 2309.17453) and 0 in plain H2O.

    Examples
    --------
    >>> import torch, h2o_kv
    >>> k, v = torch.zeros(2, 1, 1, 4, 8)  # two caches of one row, one head, four slots
    >>> scores, positions = torch.zeros(1, 1, 4), torch.full((1, 1, 4), -1, dtype=torch.int32)
    >>> new = torch.ones(1, 1, 6, 8)  # six equal tokens: the oldest gather the most attention
    >>> _, evicted = h2o_kv.ops.attention_decode(
    ...     new, k, v, scores, positions, new, new, torch.arange(6)[None], 0, 2, 2)
    >>> evicted.tolist(), positions.tolist()
    ([[[-1, -1, -1, -1, 2, 3]]], [[[0, 1, 4, 5]]])
    """
    result: tuple[Tensor, Tensor] = torch.ops.h2o.h2o_attention_decode.default(
        query,
        k_cache,
        v_cache,
        scores,
        positions,
        k_new,
        v_new,
        position_new,
        num_sink,
        num_heavy,
        num_recent,
        gqa_reduce=gqa_reduce,
        scale=scale,
        chunk=chunk,
        alibi_slopes=alibi_slopes,
        row_budget=row_budget,
        k_evicted=k_evicted,
        v_evicted=v_evicted,
        rope_cos=rope_cos,
        rope_sin=rope_sin,
        score_rule=score_rule,
        score_decay=score_decay,
        score_seed=score_seed,
        score_queries=score_queries,
        score_pool=score_pool,
        score_new=score_new,
        pattern_stride=pattern_stride,
        pattern_columns=pattern_columns,
        read_slots=read_slots,
        read_page=read_page,
    )
    return result


def evict(
    k_cache: Tensor,
    v_cache: Tensor,
    scores: Tensor,
    positions: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    scores_new: Tensor,
    position_new: Tensor,
    num_sink: int,
    num_heavy: int,
    num_recent: int,
    *,
    row_budget: Tensor | None = None,
    score_rule: str = "sum",
    pattern_stride: int = 0,
    pattern_columns: int = 0,
) -> Tensor:
    """Store tokens that have a score already and evict until the budget holds.

    The second half of :func:`attention_decode` alone. With ``num_new`` = 0 it shrinks a cache.

    Parameters
    ----------
    k_cache, v_cache, scores, positions : Tensor
        The state of the layer, written in place.
    k_new, v_new : Tensor, [batch, num_kv_heads, num_new, head_dim]
        Keys and values of the new tokens.
    scores_new : Tensor, dtype of ``scores``, [batch, num_kv_heads, num_new]
        Their scores.
    position_new : Tensor, int32 or int64, [batch, num_new]
        Their positions, increasing along a row; negative = padding, which is not stored.
    num_sink, num_heavy, num_recent : int, slots
        As in :func:`attention_decode`. The recent window ends at the largest position present in the
        (row, KV head).
    row_budget : Tensor, int32 or int64, [batch, 3], optional
        The budget of each row, instead of the three numbers, which must be a budget all the same.
    score_rule, pattern_stride, pattern_columns
        What the scores are, as in :func:`attention_decode`: of the rules "mean" alone matters here.

    Returns
    -------
    evicted : Tensor, int32, [batch, num_kv_heads, capacity + num_new]
        The positions that left, in the order they left (lowest score first), then -1.
    """
    evicted: Tensor = torch.ops.h2o.h2o_evict.default(
        k_cache,
        v_cache,
        scores,
        positions,
        k_new,
        v_new,
        scores_new,
        position_new,
        num_sink,
        num_heavy,
        num_recent,
        row_budget=row_budget,
        score_rule=score_rule,
        pattern_stride=pattern_stride,
        pattern_columns=pattern_columns,
    )
    return evicted


def prefill_select(
    query: Tensor,
    key: Tensor,
    position: Tensor,
    num_sink: int,
    num_heavy: int,
    num_recent: int,
    *,
    gqa_reduce: str = "sum",
    scale: float | None = None,
    alibi_slopes: Tensor | None = None,
    row_budget: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Which tokens of a prompt stay after one-shot prefill, and their scores.

    The scores are the column sums of the full causal attention (``"max"`` is taken per query row, then
    summed); sinks, recent window and the ``num_heavy`` highest others stay, among equal scores the
    larger position. The attention matrix is never built: memory is linear in ``seq_len``.

    Parameters
    ----------
    query : Tensor, [batch, num_q_heads, seq_len, head_dim]
        Rotated already.
    key : Tensor, [batch, num_kv_heads, seq_len, head_dim]
        Rotated already.
    position : Tensor, int32 or int64, [batch, seq_len]
        Increasing along a row; negative = padding, which neither gives nor receives a score.
    num_sink, num_heavy, num_recent : int, slots
        The budget, together at least 1; it may be larger than ``seq_len``.
    gqa_reduce, scale, alibi_slopes, row_budget
        As in :func:`attention_decode`; the three numbers together are the width of the results and
        so the most that a row's budget may be.

    Returns
    -------
    selected : Tensor, int64, [batch, num_kv_heads, budget]
        Indices into ``seq_len``, ascending, then -1 where fewer than ``budget`` tokens stay.
    scores : Tensor, float32 (float64 for float64 inputs), [batch, num_kv_heads, budget]
        Accumulated score of each, 0 where ``selected`` is -1.
    """
    result: tuple[Tensor, Tensor] = torch.ops.h2o.h2o_prefill_select.default(
        query,
        key,
        position,
        num_sink,
        num_heavy,
        num_recent,
        gqa_reduce=gqa_reduce,
        scale=scale,
        alibi_slopes=alibi_slopes,
        row_budget=row_budget,
    )
    return result


def rotate(input: Tensor, index: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate vectors by angles that are looked up: rotary position embeddings.

    With p pairs, the elements i and i + p of a vector are turned together by the angle i (the layout
    of LLaMA and GPT-NeoX), and elements from 2 * p on stay as they are. With ``sin`` negated it is
    undone.

    Parameters
    ----------
    input : Tensor, [batch, heads, n, head_dim]
    index : Tensor, int32 or int64, [batch or 1, heads or 1, n]
        By which row of ``cos`` and ``sin``; negative = the result is zeros. On the CPU an index
        without a row is refused; on CUDA, where nobody looks, it takes the last one.
    cos, sin : Tensor, float32 (float64 for float64 vectors), [num_angles, p]
        2 * p <= head_dim.

    Returns
    -------
    output : Tensor
        Sizes and dtype of ``input``, contiguous.

    Notes
    -----
    RoPE (Su et al., arXiv 2104.09864). Computed in the dtype of the angles.

    Examples
    --------
    >>> import torch, h2o_kv
    >>> angles = torch.arange(4.0)[:, None] * torch.tensor([1.0, 0.1])  # of four positions
    >>> ones = torch.ones(1, 1, 4, 4)
    >>> turned = h2o_kv.ops.rotate(ones, torch.arange(4)[None, None], angles.cos(), angles.sin())
    >>> torch.allclose(turned[0, 0, 0], ones[0, 0, 0]), torch.allclose(turned.norm(), ones.norm())
    (True, True)
    """
    result: Tensor = torch.ops.h2o.h2o_rotate.default(input, index, cos, sin)
    return result
