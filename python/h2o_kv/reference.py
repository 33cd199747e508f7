"""The algorithm in plain PyTorch and float64: what every operator of this project must equal.

It is written to be read. One (row, KV head) at a time, one token at a time, in the order of the
paper's Algorithm 1:

    candidates = cache + new token       D_t, what the query may look at
    weights = softmax(query . keys)      a_t,i, one for each query head and candidate
    output = weights . values            o_t, over all candidates, also the one about to leave
    scores += weights                    s_i, summed (or maximised) over the query heads of a group
    recent = positions > t - num_recent  R_t, moves before anything is compared
    victim = lowest unprotected score    u, only if the candidates are more than the budget
    cache = candidates - victim          C_t (S_t in the paper); what the next token finds

Nothing here is shared with the operators, and nothing in the product runs on it: tests and
benchmarks compare with it, and `h2o-kv trace` prints its steps.

Source: H2O (Zhang et al., NeurIPS 2023, arXiv 2306.14048), Algorithm 1. Differs: sinks may be
protected, several tokens may join at once (`chunk`), query heads may share a KV head, and ties are
settled: of equal scores the smaller position leaves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from h2o_kv.reference_scoring import Rules

__all__ = ["Step", "attention_decode", "evict", "prefill_select"]


@dataclass(frozen=True, eq=False)
class Step:
    """What happened to one (row, KV head) when one chunk of tokens joined.

    Candidates are listed as the cached tokens by slot, then the new tokens by column; `slots`,
    `scores_before` and `scores` follow that order. Tensors are float64 on the CPU.

    Attributes
    ----------
    row, head : int
        Which batch row and which KV head.
    positions : tuple of int
        The new tokens of this chunk.
    candidates : tuple of int
        Positions of the cached and the new tokens (D_t).
    slots : tuple of int
        Slot of each candidate before the step, -1 for a new token.
    scores_before : Tensor, float64, [candidates]
        Scores before the step; 0 for a new token (for `evict`: the scores that it was given).
    weights : tuple of Tensor, float64, [group_size, visible]
        For each new token the softmax weights of its query heads over the candidates that it sees:
        the first `visible` ones. Empty for `evict` and `prefill_select`.
    scores : Tensor, float64, [candidates]
        Scores after attention, in the precision in which they are stored.
    compared : tuple of float, [candidates]
        What the order of eviction compares: the scores, by H2O's rule.
    recent : tuple of int
        Candidates inside the recent window, ascending (R_t).
    victims : tuple of int
        Positions that left, in the order in which they left.
    margin : float
        What is compared of the lowest unprotected token that stayed, less that of the last victim:
        how far this decision was from another one. inf when nobody left or nobody else could have.
    kept : tuple of int
        Positions in the cache after the step, ascending (C_t).
    stored : tuple of (int, int)
        (position, slot) of each new token that stayed. Empty for `prefill_select`.
    output : Tensor, float64, [group_size, num_new, head_dim]
        Attention output of the chunk. Empty for `evict` and `prefill_select`.
    """

    row: int
    head: int
    positions: tuple[int, ...]
    candidates: tuple[int, ...]
    slots: tuple[int, ...]
    scores_before: Tensor
    weights: tuple[Tensor, ...]
    scores: Tensor
    compared: tuple[float, ...]
    recent: tuple[int, ...]
    victims: tuple[int, ...]
    margin: float
    kept: tuple[int, ...]
    stored: tuple[tuple[int, int], ...]
    output: Tensor


@torch.no_grad()
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
    score_new: Tensor | None = None,
    trace: list[Step] | None = None,
    **rules: Any,
) -> tuple[Tensor, Tensor]:
    """Attend, score, evict and store: steps 1 to 6 for each new token, or chunk of new tokens.

    Parameters
    ----------
    query : Tensor, float, [batch, num_q_heads, num_new, head_dim]
        Rotated already. num_q_heads is a multiple of num_kv_heads.
    k_cache, v_cache : Tensor, float, [batch, num_kv_heads, capacity, head_dim]
        What each slot holds. Written in place.
    scores : Tensor, float, [batch, num_kv_heads, capacity]
        Attention mass received so far. Written in place.
    positions : Tensor, int32, [batch, num_kv_heads, capacity]
        Token position in each slot, -1 = empty. Written in place.
    k_new, v_new : Tensor, float, [batch, num_kv_heads, num_new, head_dim]
        Keys and values of the new tokens.
    position_new : Tensor, int32 or int64, [batch, num_new]
        Increasing along a row; -1 = padding, which is not attended, scored or stored.
    num_sink, num_heavy, num_recent : int
        Slots for the first positions, for high scores and for the newest positions.
    gqa_reduce : str
        "sum" or "max" over the query heads of a group.
    scale : float, optional
        Factor on query . key. Default head_dim ** -0.5.
    chunk : int
        Tokens that join together. Counted in the real tokens of each row, so that a padded row is
        cut where the row alone is cut.
    alibi_slopes : Tensor, float, [num_q_heads], optional
        Adds slope * (key position - query position) to each logit.
    row_budget : Tensor, int, [batch, 3], optional
        (num_sink, num_heavy, num_recent) of each row, in place of the three numbers.
    k_evicted, v_evicted : Tensor, as `k_new`, optional, both or neither
        Key and value of the token that `evicted` names in each column, if it was in a slot. Other
        columns are left as they are. Written in place.
    rope_cos, rope_sin : Tensor, float, [num_ranks, pairs], optional, both or neither
        Position rolling: query and keys are not rotated, and turned here by the angles of their
        ranks: of a cached token among those of its KV head, of new ones after them. Rounded to the
        dtype of the cache then.
    score_new : Tensor, dtype of `scores`, [batch, num_kv_heads, num_new], optional
        Added to the first score of each new token.
    **rules
        How tokens are scored and read, if not as in H2O: the fields of `Rules`.
    trace : list of Step, optional
        One Step is appended for each row, chunk and KV head, in this order.

    Returns
    -------
    output : Tensor, as `query`
        Attention over all candidates; zeros where the token is padding.
    evicted : Tensor, int32, [batch, num_kv_heads, num_new]
        Positions that left, those of a chunk from its first real column on, then -1.

    Raises
    ------
    ValueError
        gqa_reduce, chunk or a budget is out of its range.

    Notes
    -----
    Computed in float64. After each chunk scores, keys and values are written in the dtype of their
    tensor and read again, and victims are chosen by the written scores; so several tokens with
    chunk = 1 are the same as one call for each.
    """
    if chunk < 1:
        raise ValueError(f"reference.attention_decode: chunk must be >= 1, got {chunk}")
    batch, num_q_heads, num_new, head_dim = query.shape
    num_kv_heads, capacity = positions.shape[1:]
    group_size = num_q_heads // num_kv_heads
    reduce = _gqa_reduce("attention_decode", gqa_reduce)
    scale = head_dim**-0.5 if scale is None else scale
    slopes = _alibi_slopes(alibi_slopes, num_q_heads)
    counts = (num_sink, num_heavy, num_recent)
    budgets = _budgets("attention_decode", batch, counts, capacity, row_budget)
    scoring = Rules(**rules)
    output = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
    evicted = torch.full((batch, num_kv_heads, num_new), -1, dtype=torch.int32)

    for row in range(batch):
        for columns, new_positions in _chunks(position_new[row], chunk):
            for head in range(num_kv_heads):
                group = slice(head * group_size, (head + 1) * group_size)
                cache = _HeadCache(
                    k_cache[row, head], v_cache[row, head], scores[row, head], positions[row, head]
                )
                slots, cached_positions = cache.occupied()
                candidates = cached_positions + new_positions
                new_keys, new_values = k_new[row, head, columns], v_new[row, head, columns]
                keys = torch.cat([_float64(cache.keys[slots]), _float64(new_keys)])
                values = torch.cat([_float64(cache.values[slots]), _float64(new_values)])
                queries = _float64(query[row, group][:, columns])
                if rope_cos is not None and rope_sin is not None:
                    angles = _float64(rope_cos), _float64(rope_sin)
                    in_order = sorted(candidates)
                    ranks = [in_order.index(position) for position in candidates]
                    keys = _rotated(keys, ranks, *angles, k_cache.dtype)
                    queries = _rotated(queries, ranks[len(slots) :], *angles, k_cache.dtype)
                score_before = torch.cat(
                    [_float64(cache.scores[slots]), torch.zeros(len(columns), dtype=torch.float64)]
                )

                # 1. to 3. Each new token sees the cache, the new tokens before it, and itself.
                score = score_before.clone()
                key_positions = torch.tensor(candidates, dtype=torch.float64)
                norms = values.abs().sum(-1)
                weights, outputs = [], []
                for i in range(len(columns)):
                    visible = len(slots) + i + 1
                    weight = _attention_weights(
                        queries[:, i : i + 1],
                        keys[:visible],
                        key_positions[visible - 1 : visible],
                        key_positions[:visible],
                        scale,
                        slopes[group],
                    )
                    if scoring.read_slots > 0 and chunk == 1:
                        read = scoring.read(
                            queries[:, 0], keys, weight[:, 0].log(), cache.positions.tolist()
                        )
                        weight = weight.masked_fill(~read[:, None], 0.0)
                        weight /= weight.sum(-1, keepdim=True)
                    mass = reduce(weight)[0]
                    even_share = reduce(torch.full((group_size,), 1 / visible)).item()
                    score[:visible] = scoring.after_query(
                        score[:visible], mass, norms[:visible], even_share, i, len(columns)
                    )
                    outputs.append(weight @ values[:visible])
                    weights.append(weight[:, 0])
                first = score[len(slots) :]
                if scoring.score_rule == "random":
                    first += torch.tensor([scoring.drawn(head, p) for p in new_positions])
                if score_new is not None:
                    first += _float64(score_new[row, head, columns])
                if len(columns) > 1:
                    recent = budgets[row].num_recent
                    first[:] = scoring.pooled(first, new_positions, new_positions[-1], recent)
                score = _float64(score.to(scores.dtype))
                head_output = torch.cat(outputs, dim=1)
                output[row, group][:, columns] = head_output.to(output)

                # 4. and 5. At most as many leave as have joined: an over-full cache stays as it is.
                decision = _decide(
                    candidates,
                    slots,
                    score,
                    new_positions[-1],
                    budgets[row],
                    scoring,
                    at_most=len(columns),
                )
                left = decision.left
                evicted[row, head, columns[0] : columns[0] + len(left)] = torch.tensor(left)
                if k_evicted is not None and v_evicted is not None:
                    for column, victim in enumerate(decision.victims, columns[0]):
                        if victim < len(slots):
                            k_evicted[row, head, column] = cache.keys[slots[victim]]
                            v_evicted[row, head, column] = cache.values[slots[victim]]

                # 6.
                stored = _place(cache, decision, new_keys, new_values)
                if trace is not None:
                    trace.append(
                        _step(row, head, decision, score_before, stored, weights, head_output)
                    )
    return output, evicted.to(positions.device)


@torch.no_grad()
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
    trace: list[Step] | None = None,
    **rules: Any,
) -> Tensor:
    """Place scored tokens and evict until the budget holds: steps 4 to 6 alone.

    Parameters
    ----------
    k_cache, v_cache, scores, positions, k_new, v_new, position_new : Tensor
        As in `attention_decode`; the first four are written in place. There may be no new tokens;
        then a cache is cut to a smaller budget.
    scores_new : Tensor, dtype of `scores`, [batch, num_kv_heads, num_new]
        Scores with which the new tokens come.
    num_sink, num_heavy, num_recent, row_budget, trace, **rules
        As in `attention_decode`; of the rules only what is compared matters.

    Returns
    -------
    evicted : Tensor, int32, [batch, num_kv_heads, capacity + num_new]
        Positions that left, in order, then -1.

    Raises
    ------
    ValueError
        A budget is out of its range.

    Notes
    -----
    The recent window ends at the largest position present. A slot that is freed and not filled
    again gets position -1 and score 0; its key and value stay as they are.
    """
    batch, num_kv_heads, capacity = positions.shape
    counts = (num_sink, num_heavy, num_recent)
    budgets = _budgets("evict", batch, counts, capacity, row_budget)
    width = capacity + position_new.shape[1]
    evicted = torch.full((batch, num_kv_heads, width), -1, dtype=torch.int32)

    for row in range(batch):
        columns, new_positions = _real_tokens(position_new[row])
        for head in range(num_kv_heads):
            cache = _HeadCache(
                k_cache[row, head], v_cache[row, head], scores[row, head], positions[row, head]
            )
            slots, cached_positions = cache.occupied()
            candidates = cached_positions + new_positions
            score = torch.cat(
                [_float64(cache.scores[slots]), _float64(scores_new[row, head, columns])]
            )
            newest = max(candidates, default=-1)
            decision = _decide(candidates, slots, score, newest, budgets[row], Rules(**rules))
            evicted[row, head, : len(decision.left)] = torch.tensor(decision.left)
            stored = _place(cache, decision, k_new[row, head, columns], v_new[row, head, columns])
            if trace is not None:
                trace.append(_step(row, head, decision, score, stored))
    return evicted.to(positions.device)


@torch.no_grad()
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
    trace: list[Step] | None = None,
) -> tuple[Tensor, Tensor]:
    """Which tokens of a prompt stay after exact causal attention over all of it (one-shot prefill).

    Parameters
    ----------
    query : Tensor, float, [batch, num_q_heads, seq_len, head_dim]
        Queries of the whole prompt, rotated already.
    key : Tensor, float, [batch, num_kv_heads, seq_len, head_dim]
        Keys of the whole prompt, rotated already.
    position : Tensor, int32 or int64, [batch, seq_len]
        Increasing along a row; -1 = padding.
    num_sink, num_heavy, num_recent, gqa_reduce, scale, alibi_slopes, row_budget, trace
        As in `attention_decode`. The three numbers also fix the width of the result, so no row of
        row_budget may be above their sum.

    Returns
    -------
    selected : Tensor, int64, [batch, num_kv_heads, budget]
        Indices into seq_len, ascending; -1 where fewer than budget stay.
    scores : Tensor, float32 (float64 for float64 keys), [batch, num_kv_heads, budget]
        Score of each, 0 where selected is -1.

    Raises
    ------
    ValueError
        gqa_reduce or a budget is out of its range.

    Notes
    -----
    A score is the column sum of the softmax weights over all prompt rows; "max" is taken in each
    row, then summed. Builds the seq_len x seq_len matrix: float64, 8 bytes an element, one group of
    query heads at a time.
    """
    batch, num_q_heads, _, head_dim = query.shape
    num_kv_heads = key.shape[1]
    group_size = num_q_heads // num_kv_heads
    reduce = _gqa_reduce("prefill_select", gqa_reduce)
    scale = head_dim**-0.5 if scale is None else scale
    slopes = _alibi_slopes(alibi_slopes, num_q_heads)
    width = num_sink + num_heavy + num_recent
    counts = (num_sink, num_heavy, num_recent)
    budgets = _budgets("prefill_select", batch, counts, width, row_budget)
    dtype = torch.float64 if key.dtype == torch.float64 else torch.float32
    selected = torch.full((batch, num_kv_heads, width), -1, dtype=torch.int64)
    selected_scores = torch.zeros(batch, num_kv_heads, width, dtype=dtype)

    for row in range(batch):
        columns, candidates = _real_tokens(position[row])
        if not columns:
            continue
        token_positions = torch.tensor(candidates, dtype=torch.float64)
        causal = torch.ones(len(columns), len(columns), dtype=torch.bool).tril()
        for head in range(num_kv_heads):
            group = slice(head * group_size, (head + 1) * group_size)
            weights = _attention_weights(
                _float64(query[row, group][:, columns]),
                _float64(key[row, head, columns]),
                token_positions,
                token_positions,
                scale,
                slopes[group],
                causal,
            )
            score = _float64(reduce(weights).sum(0).to(dtype))
            decision = _decide(candidates, [], score, candidates[-1], budgets[row], Rules())
            stay = decision.staying
            selected[row, head, : len(stay)] = torch.tensor([columns[i] for i in stay])
            selected_scores[row, head, : len(stay)] = score[stay].to(dtype)
            if trace is not None:
                trace.append(_step(row, head, decision, torch.zeros_like(score)))
    return selected.to(key.device), selected_scores.to(key.device)


@dataclass(frozen=True)
class _Budget:
    num_sink: int
    num_heavy: int
    num_recent: int

    @property
    def total(self) -> int:
        return self.num_sink + self.num_heavy + self.num_recent

    def protects(self, position: int, newest: int) -> bool:
        """Whether `position` is a sink, or inside the recent window that ends at `newest`."""
        return position < self.num_sink or position > newest - self.num_recent


@dataclass(frozen=True, eq=False)
class _HeadCache:
    """The four tensors of one (row, KV head): views, so a write reaches the cache."""

    keys: Tensor  # [capacity, head_dim]
    values: Tensor  # [capacity, head_dim]
    scores: Tensor  # [capacity]
    positions: Tensor  # [capacity]

    def occupied(self) -> tuple[list[int], list[int]]:
        """Occupied slots, ascending, and the position in each."""
        return _real_tokens(self.positions)


def _attention_weights(
    query: Tensor,
    keys: Tensor,
    query_positions: Tensor,
    key_positions: Tensor,
    scale: float,
    slopes: Tensor,
    visible: Tensor | None = None,
) -> Tensor:
    """Softmax weights [group_size, num_queries, num_keys] of one group of query heads.

    query is [group_size, num_queries, head_dim], keys [num_keys, head_dim], slopes [group_size],
    visible bool [num_queries, num_keys].
    """
    logits = scale * (query @ keys.T)
    distance = key_positions[None, :] - query_positions[:, None]
    logits = logits + slopes[:, None, None] * distance
    if visible is None:
        return torch.softmax(logits, dim=-1)
    weights = torch.softmax(logits.masked_fill(~visible, -math.inf), dim=-1)
    return weights.masked_fill(~visible, 0.0)  # A NaN in a row is a NaN in what that row sees.


@dataclass(frozen=True, eq=False)
class _Decision:
    """Who leaves among the candidates: the cached tokens, in `slots`, then the new ones."""

    candidates: list[int]  # position of each
    slots: list[int]  # slot of each cached one
    scores: Tensor  # [candidates]
    newest: int  # t, where the recent window ends
    budget: _Budget
    compared: list[float]  # what each is ordered by: its score, by H2O's rule
    victims: list[int]  # indices into candidates, in the order in which they leave

    @property
    def left(self) -> list[int]:
        """Positions of the victims."""
        return [self.candidates[i] for i in self.victims]

    @property
    def staying(self) -> list[int]:
        """Indices of the candidates that stay, ascending."""
        victims = set(self.victims)
        return [i for i in range(len(self.candidates)) if i not in victims]


def _decide(
    candidates: list[int],
    slots: list[int],
    scores: Tensor,
    newest: int,
    budget: _Budget,
    rules: Rules,
    at_most: int | None = None,
) -> _Decision:
    """Choose who leaves until the budget holds, or until `at_most` have left. Writes nothing."""
    excess = max(0, len(candidates) - budget.total)
    if at_most is not None:
        excess = min(excess, at_most)
    score = [
        rules.compared(own, position, newest)
        for own, position in zip(scores.tolist(), candidates, strict=True)
    ]
    unprotected = [i for i, p in enumerate(candidates) if not budget.protects(p, newest)]
    victims = sorted(unprotected, key=lambda i: (_rank(score[i]), candidates[i]))[:excess]
    # Sinks and recent tokens fit into the budget, so there are enough unprotected ones, unless the
    # positions were not increasing. Then the newcomers give way, the last one first.
    for i in reversed(range(len(candidates))):
        if len(victims) < excess and i not in victims:
            victims.append(i)
    return _Decision(candidates, slots, scores, newest, budget, score, victims)


def _rank(score: float) -> tuple[bool, float]:
    """Sort key of a score: NaN before every number, -0.0 with 0.0."""
    return (False, 0.0) if math.isnan(score) else (True, score)


def _place(
    cache: _HeadCache, decision: _Decision, new_keys: Tensor, new_values: Tensor
) -> tuple[tuple[int, int], ...]:
    """Write what was decided into the cache; returns (position, slot) of the new tokens that stay.

    They take, in order of position, the slots that were freed (lowest first), then the empty ones.
    """
    slots = decision.slots
    freed = sorted(slots[i] for i in decision.victims if i < len(slots))
    empty = [slot for slot, p in enumerate(cache.positions.tolist()) if p < 0]
    cache.scores[slots] = decision.scores[: len(slots)].to(cache.scores)
    cache.scores[freed] = 0
    cache.positions[freed] = -1

    newcomers = [i for i in decision.staying if i >= len(slots)]
    newcomers.sort(key=lambda i: decision.candidates[i])
    stored = []
    for i, slot in zip(newcomers, freed + empty, strict=False):
        cache.keys[slot] = new_keys[i - len(slots)]
        cache.values[slot] = new_values[i - len(slots)]
        cache.scores[slot] = decision.scores[i]
        cache.positions[slot] = decision.candidates[i]
        stored.append((decision.candidates[i], slot))
    return tuple(stored)


def _step(
    row: int,
    head: int,
    decision: _Decision,
    scores_before: Tensor,
    stored: tuple[tuple[int, int], ...] = (),
    weights: Sequence[Tensor] = (),
    output: Tensor | None = None,
) -> Step:
    candidates, slots = decision.candidates, decision.slots
    new_positions = candidates[len(slots) :]
    window_start = decision.newest - decision.budget.num_recent
    return Step(
        row=row,
        head=head,
        positions=tuple(new_positions),
        candidates=tuple(candidates),
        slots=tuple(slots) + (-1,) * len(new_positions),
        scores_before=scores_before,
        weights=tuple(weights),
        scores=decision.scores,
        compared=tuple(decision.compared),
        recent=tuple(sorted(p for p in candidates if p > window_start)),
        victims=tuple(decision.left),
        margin=_margin(decision),
        kept=tuple(sorted(candidates[i] for i in decision.staying)),
        stored=stored,
        output=torch.zeros(0, dtype=torch.float64) if output is None else output,
    )


def _margin(decision: _Decision) -> float:
    """How far the last victim's score is below the lowest one that could have left instead."""
    rivals = [
        decision.compared[i]
        for i in decision.staying
        if not decision.budget.protects(decision.candidates[i], decision.newest)
    ]
    if not decision.victims or not rivals:
        return math.inf
    last, lowest = decision.compared[decision.victims[-1]], min(rivals, key=_rank)
    if _rank(last) == _rank(lowest):
        return 0.0
    return math.inf if math.isnan(last) else lowest - last


def _real_tokens(positions: Tensor) -> tuple[list[int], list[int]]:
    """Indices and values of the positions that are not -1."""
    real = [(i, p) for i, p in enumerate(positions.tolist()) if p >= 0]
    return [i for i, _ in real], [p for _, p in real]


def _chunks(position_new: Tensor, chunk: int) -> Iterator[tuple[list[int], list[int]]]:
    """Columns and positions of the real tokens of one row, `chunk` at a time."""
    columns, positions = _real_tokens(position_new)
    for start in range(0, len(columns), chunk):
        yield columns[start : start + chunk], positions[start : start + chunk]


def _float64(tensor: Tensor) -> Tensor:
    return tensor.to(device="cpu", dtype=torch.float64)


def _rotated(
    vectors: Tensor, ranks: list[int], cos: Tensor, sin: Tensor, dtype: torch.dtype
) -> Tensor:
    """Vectors [..., n, head_dim], each turned by the angles of its rank: element i with i + pairs.

    Rounded to `dtype`, as models round what they rotate.
    """
    pairs = cos.shape[1]
    x, y = vectors[..., :pairs], vectors[..., pairs : 2 * pairs]
    c, s = cos[ranks], sin[ranks]
    turned = torch.cat([x * c - y * s, y * c + x * s, vectors[..., 2 * pairs :]], -1)
    return _float64(turned.to(dtype))


def _gqa_reduce(name: str, gqa_reduce: str) -> Callable[[Tensor], Tensor]:
    """Reduction of weights [group_size, ...] over the query heads of a group."""
    if gqa_reduce == "sum":
        return lambda weights: weights.sum(0)
    if gqa_reduce == "max":
        return lambda weights: weights.amax(0)
    raise ValueError(f'reference.{name}: gqa_reduce must be "sum" or "max", got "{gqa_reduce}"')


def _alibi_slopes(alibi_slopes: Tensor | None, num_q_heads: int) -> Tensor:
    if alibi_slopes is None:
        return torch.zeros(num_q_heads, dtype=torch.float64)
    return _float64(alibi_slopes)


def _budgets(
    name: str, batch: int, counts: tuple[int, int, int], capacity: int, row_budget: Tensor | None
) -> list[_Budget]:
    """The budget of each row; each must be in 1 .. capacity."""
    if row_budget is None:
        budgets = [_Budget(*counts)] * batch
    else:
        budgets = [_Budget(*row) for row in row_budget.tolist()]
    for row, budget in enumerate(budgets):
        if min(budget.num_sink, budget.num_heavy, budget.num_recent) < 0:
            raise ValueError(f"reference.{name}: counts must be >= 0, got {budget} in row {row}")
        if not 1 <= budget.total <= capacity:
            raise ValueError(
                f"reference.{name}: budget must be in 1..{capacity}, "
                f"got {budget.total} in row {row}"
            )
    return budgets
