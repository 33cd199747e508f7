"""What the numbers of an explanation mean, in one sentence each.

The reasoning: where the full cache is wrong, too, the model is the cause. Where the evidence left early,
it was the scores or the budget, and the margin says which. Where the evidence is still there, it was
what the dropped tokens did to the softmax, or the model's own indecision.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["GONE", "KEPT", "Answers", "SpanFacts", "overall", "span_state", "span_verdict"]

GONE = 0.5
"""From this lost share of the full cache's attention on a span, the span counts as gone."""
KEPT = 0.1
"""Below this lost share a span counts as kept."""
UNREAD = 0.01
"""Below this weight in every head, the full cache does not read a span."""
NEAR, FAR = 0.1, 0.5
"""Parts of the lowest score that stayed: a margin below the first is small, above the second large."""
DROPPED = 0.1
"""From this mean m_t^drop, other dropped tokens matter."""


@dataclass(frozen=True)
class SpanFacts:
    """What is known of one span when the answer is given.

    Attributes
    ----------
    lost_share : float
        Of the full cache's attention on the span in the answer's steps, the share in heads, and at
        steps, from which the token was gone.
    attention_max : float
        Highest weight of the span in any query head at any step of the answer.
    left, places : int
        (layer, KV head, token) that left before the last step of the answer, of all there are.
    first_step, last_step : int or None
        Steps at which the first and the last of these left.
    relative_margin : float or None
        Median over them of the margin, as a part of the lowest score that stayed; None where no score
        had a say.
    """

    lost_share: float
    attention_max: float
    left: int
    places: int
    first_step: int | None
    last_step: int | None
    relative_margin: float | None


@dataclass(frozen=True)
class Answers:
    """How the two caches answered.

    Attributes
    ----------
    expected : bool
        Whether the answer was given; else it is the full cache's own.
    full_right, policy_right : bool
        Whether every token of the answer was the most likely one, teacher forced.
    first_wrong : int or None
        Token of the answer, from 0, at which the policy first preferred another one.
    dropped, kl : float
        Mean m_t^drop over heads, and KL (nats) to the full cache, at that token; of all tokens, the
        means, where there is none.
    """

    expected: bool
    full_right: bool
    policy_right: bool
    first_wrong: int | None
    dropped: float
    kl: float


def span_state(facts: SpanFacts) -> str:
    """One of "gone", "partly gone", "kept" and "unread"."""
    if facts.attention_max < UNREAD:
        return "unread"
    if facts.lost_share >= GONE:
        return "gone"
    return "kept" if facts.lost_share < KEPT else "partly gone"


def span_verdict(facts: SpanFacts) -> str:
    """What became of a span, and why."""
    where = f"left {facts.left} of {facts.places} (layer, KV head, token) places"
    if facts.first_step is not None:
        where += f", first at step {facts.first_step}, last at step {facts.last_step}"
    state = span_state(facts)
    if state == "unread":
        return (
            f"unread: no head of the full cache gives it {UNREAD:.0%} of its attention at the answer "
            f"(at most {facts.attention_max:.2%}); it {where}"
        )
    if state == "kept":
        return f"kept where it is read ({facts.lost_share:.1%} of that attention lost); it {where}"
    return f"{state}: {facts.lost_share:.1%} of that attention lost; it {where}; {_why(facts)}"


def _why(facts: SpanFacts) -> str:
    margin = facts.relative_margin
    if margin is None:
        return (
            "no score had a say, the window passed over it: budget, or a policy with heavy hitters"
        )
    text = f"its score was {margin:.0%} below the lowest that stayed (median): "
    if margin < NEAR:
        return text + "near the cutoff, a little more budget keeps it"
    if margin > FAR:
        return text + "far below the cutoff, hardly read before it was asked for: the scores lag"
    return text + "budget and scores both"


def overall(answers: Answers, spans: list[SpanFacts]) -> str:
    """What the cause is."""
    if not answers.full_right:
        return "the model: the full cache prefers another answer, too, so eviction is not the cause"
    if answers.policy_right:
        lost = any(span_state(span) in ("gone", "partly gone") for span in spans)
        return "no fault: the evicting cache prefers the same answer" + (
            ", although evidence was lost" if lost else ""
        )
    at = f"at token {answers.first_wrong} of the answer (KL {answers.kl:.3g} nats)"
    states = [span_state(span) for span in spans]
    if "gone" in states:
        return f"scores or budget: evidence had left before it was asked for; they part {at}"
    dropped = f"{answers.dropped:.1%} of the full cache's attention there was on dropped tokens"
    if "partly gone" in states:
        return f"scores or budget, in part: some heads had lost evidence; they part {at}; {dropped}"
    if answers.dropped >= DROPPED:
        return (
            f"renormalisation: the evidence was still there where it is read, but {dropped}, and what "
            f"is left was weighed up; they part {at}"
        )
    return (
        f"not the evidence: it was still there where it is read, and only {dropped}; few values with a "
        f"direction of their own, earlier differences, or a model that is undecided; they part {at}"
    )
