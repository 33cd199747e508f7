"""A replayed answer: where the evidence was, layer by layer, when the answer was given."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from h2o_kv.diagnostics.departures import STAYED
from h2o_kv.diagnostics.replay import PolicyReplay, Replay, replay
from h2o_kv.diagnostics.steps import ObservedStep, Victim
from h2o_kv.diagnostics.verdict import (
    Answers,
    SpanFacts,
    overall,
    span_state,
    span_verdict,
)
from h2o_kv.generation import CacheSpec

__all__ = ["Explanation", "HeadEvidence", "Span", "SpanExplanation", "TokenEvidence", "explain"]


@dataclass(frozen=True)
class Span:
    """Evidence: the tokens first .. last - 1 of the prompt.

    Attributes
    ----------
    first, last : int
    text : str
    """

    first: int
    last: int
    text: str


@dataclass(frozen=True)
class TokenEvidence:
    """One token of a span in one KV head.

    Attributes
    ----------
    position : int
    left_at : int or None
        Step at which it left; None = it is still there at the end.
    score : float
        When it left, that step included; else at the end.
    margin : float or None
        What the policy compares of the lowest unprotected one that stayed, less its own; None where
        no other could have left, and of a token that is still there.
    """

    position: int
    left_at: int | None
    score: float
    margin: float | None


@dataclass(frozen=True)
class HeadEvidence:
    """A span in one KV head.

    Attributes
    ----------
    layer, head : int
    attention_mean, attention_max : float
        Full cache's attention on the whole span, over the query heads of the group and the steps of
        the answer.
    tokens : tuple of TokenEvidence
    """

    layer: int
    head: int
    attention_mean: float
    attention_max: float
    tokens: tuple[TokenEvidence, ...]

    @property
    def kept(self) -> int:
        """Tokens that are still there at the end."""
        return sum(token.left_at is None for token in self.tokens)


@dataclass(frozen=True, eq=False)
class SpanExplanation:
    """What became of one span.

    Attributes
    ----------
    span : Span
    facts : SpanFacts
    state, verdict : str
        See verdict.py.
    heads : tuple of HeadEvidence
        Of every layer and KV head.
    held : Tensor, float64, [num_layers, steps]
        Share of (KV head, token) that still held it, for the steps from its last token's on.
    """

    span: Span
    facts: SpanFacts
    state: str
    verdict: str
    heads: tuple[HeadEvidence, ...]
    held: Tensor


@dataclass(frozen=True, eq=False)
class Explanation:
    """A replayed answer.

    Attributes
    ----------
    replay : Replay
    policy : PolicyReplay
    answer_ids : tuple of int
    answers : Answers
    answer_dropped : tuple of float
        m_t^drop at each token of the answer: the mean over all heads.
    answer_dropped_worst : tuple of float
        The highest of any head.
    spans : tuple of SpanExplanation
    verdict : str
    """

    replay: Replay
    policy: PolicyReplay
    answer_ids: tuple[int, ...]
    answers: Answers
    answer_dropped: tuple[float, ...]
    answer_dropped_worst: tuple[float, ...]
    spans: tuple[SpanExplanation, ...]
    verdict: str


def explain(
    model: Any,
    prompt_ids: Sequence[int],
    answer_ids: Sequence[int],
    spec: CacheSpec,
    spans: Sequence[Span],
    *,
    expected: bool = True,
    progress: Callable[[float], None] | None = None,
) -> Explanation:
    """Replay an answer, teacher forced, and say what became of the evidence.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        As `Teacher` takes.
    prompt_ids, answer_ids : sequence of int
        At least one token each.
    spec : CacheSpec
        The evicting cache.
    spans : sequence of Span
        At least one, inside the prompt.
    expected : bool
        Whether the answer is the right one, from outside; False: it is the full cache's own.
    progress : callable, optional
        Called with the fraction that is done.

    Returns
    -------
    Explanation

    Raises
    ------
    ValueError
        An argument is out of its range, or the cache does not evict.
    NotImplementedError
        The model's attention cannot be observed.
    """
    for name, given in (("prompt_ids", prompt_ids), ("answer_ids", answer_ids), ("spans", spans)):
        if not given:
            raise ValueError(f"explain: {name} must have at least one element, got 0")
    for span in spans:
        if not 0 <= span.first < span.last <= len(prompt_ids):
            raise ValueError(
                f"explain: a span must be tokens of the prompt, 0 <= first < last <= "
                f"{len(prompt_ids)}, got {span.first}:{span.last}"
            )
    prompt_tokens = len(prompt_ids)
    on_spans = [_SpanAttention(span, prompt_tokens - 1) for span in spans]
    victims: dict[tuple[int, int, int], Victim] = {}
    wanted = {position for span in spans for position in range(span.first, span.last)}

    def note(step: ObservedStep) -> None:
        for victim in step.victims():
            if victim.position in wanted:
                victims[victim.layer, victim.head, victim.position] = victim

    replayed = replay(
        model,
        [*prompt_ids, *answer_ids],
        [spec],
        prompt_tokens=prompt_tokens,
        observers=on_spans,
        on_step={spec.label: note},
        progress=progress,
    )
    policy = replayed.policies[spec.label]
    explained = tuple(
        _explain_span(span, attention.collected(), policy, victims, prompt_tokens - 1)
        for span, attention in zip(spans, on_spans, strict=True)
    )
    dropped = policy.dropped[..., prompt_tokens - 1 :].flatten(0, 2).double()
    answers = _compare(answer_ids, replayed, policy, dropped, expected)
    return Explanation(
        replay=replayed,
        policy=policy,
        answer_ids=tuple(answer_ids),
        answers=answers,
        answer_dropped=tuple(dropped.mean(0).tolist()),
        answer_dropped_worst=tuple(dropped.amax(0).tolist()),
        spans=explained,
        verdict=overall(answers, [span.facts for span in explained]),
    )


class _SpanAttention:
    """Collects the full cache's attention on a span in the answer's steps: an AttentionObserver."""

    def __init__(self, span: Span, first_step: int) -> None:
        self._span, self._first_step = span, first_step
        self._layers: dict[int, list[Tensor]] = {}

    def observe(self, layer: int, first: int, weights: Tensor) -> None:
        """See `AttentionObserver.observe`."""
        rows = weights[:, :, max(0, self._first_step - first) :, self._span.first : self._span.last]
        if rows.shape[2]:
            self._layers.setdefault(layer, []).append(rows.double().cpu())

    def collected(self) -> Tensor:
        """Float64 [num_layers, num_kv_heads, group_size, steps, span tokens]."""
        return torch.stack([torch.cat(self._layers[i], 2) for i in sorted(self._layers)])


def _compare(
    answer_ids: Sequence[int],
    replayed: Replay,
    policy: PolicyReplay,
    dropped: Tensor,
    expected: bool,
) -> Answers:
    right = torch.tensor(answer_ids)
    wrong = (policy.predictions.top != right).nonzero()[:, 0].tolist()
    at = slice(wrong[0], wrong[0] + 1) if wrong else slice(None)
    return Answers(
        expected=expected,
        full_right=bool((replayed.full.top == right).all()),
        policy_right=not wrong,
        first_wrong=wrong[0] if wrong else None,
        dropped=float(dropped[:, at].mean()),
        kl=float(policy.predictions.kl[at].mean()),
    )


def _explain_span(
    span: Span,
    attention: Tensor,
    policy: PolicyReplay,
    victims: dict[tuple[int, int, int], Victim],
    first_step: int,
) -> SpanExplanation:
    left_at = policy.departures.left_at[:, :, span.first : span.last]
    steps = torch.arange(first_step, first_step + attention.shape[3])
    gone = left_at[:, :, None, None] < steps[:, None]
    total = attention.sum()
    early = left_at < steps[-1]
    on_span = attention.sum(-1)
    margins = [
        victim.margin / abs(victim.compared + victim.margin)
        for victim in (victims[place] for place in _places(early, span.first))
        if math.isfinite(victim.margin) and victim.compared + victim.margin != 0
    ]
    facts = SpanFacts(
        lost_share=float((attention * gone).sum() / total) if total > 0 else 0.0,
        attention_max=float(on_span.max()),
        left=int(early.sum()),
        places=early.numel(),
        first_step=int(left_at[early].min()) if early.any() else None,
        last_step=int(left_at[early].max()) if early.any() else None,
        relative_margin=median(margins) if margins else None,
    )
    num_layers, num_kv_heads = left_at.shape[:2]
    heads = tuple(
        HeadEvidence(
            layer=layer,
            head=head,
            attention_mean=float(on_span[layer, head].mean()),
            attention_max=float(on_span[layer, head].max()),
            tokens=tuple(
                _token(policy, victims, layer, head, position)
                for position in range(span.first, span.last)
            ),
        )
        for layer in range(num_layers)
        for head in range(num_kv_heads)
    )
    return SpanExplanation(
        span=span,
        facts=facts,
        state=span_state(facts),
        verdict=span_verdict(facts),
        heads=heads,
        held=policy.departures.held_share(span.first, span.last),
    )


def _places(chosen: Tensor, first: int) -> list[tuple[int, int, int]]:
    """(layer, head, position) of each True of bool [layers, heads, tokens from `first` on]."""
    return [(layer, head, first + i) for layer, head, i in chosen.nonzero().tolist()]


def _token(
    policy: PolicyReplay,
    victims: dict[tuple[int, int, int], Victim],
    layer: int,
    head: int,
    position: int,
) -> TokenEvidence:
    left_at = int(policy.departures.left_at[layer, head, position])
    if left_at != STAYED:
        victim = victims[layer, head, position]
        margin = victim.margin if math.isfinite(victim.margin) else None
        return TokenEvidence(position, left_at, victim.score, margin)
    state = policy.cache.layers[layer]
    assert state.positions is not None
    assert state.scores is not None
    slot = state.positions[0, head] == position
    return TokenEvidence(position, None, float(state.scores[0, head][slot]), None)
