"""Log-likelihoods of whole batches against a loop that feeds one token at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from h2o_kv import EvictionPolicy, H2OCache
from h2o_kv.eval import (
    EvalError,
    Request,
    Setting,
    caches,
    continuation_logits,
    score,
    scoring,
    settings,
)
from hf_models import KINDS, VOCABULARY, forward, kept, set_attention, tiny_model, tokens
from model_files import tiny_llama, tiny_tokenizer

FULL = Setting("full", 1.0, "full")
LENGTHS = ((9, 6), (21, 1), (3, 8), (14, 14), (2, 30))


def requests_of(lengths: tuple[tuple[int, int], ...] = LENGTHS) -> list[Request]:
    found = []
    for seed, (context, continuation) in enumerate(lengths):
        ids = tokens(1, context + continuation, seed=seed)[0].tolist()
        found.append(Request(tuple(ids[:context]), tuple(ids[context:])))
    return found


def h2o_counts(ratio: float, num_tokens: int) -> EvictionPolicy:
    """Half heavy and half recent; the odd slot and a single one are recent."""
    total = max(1, int(ratio * num_tokens + 1e-9))
    return EvictionPolicy(num_heavy=total // 2, num_recent=total - total // 2)


def stepwise(model: Any, request: Request, ratio: float, prefill: str) -> tuple[float, Any]:
    """Sum of log-probabilities, and the cache, token by token through the model."""
    cache = H2OCache(model.config, h2o_counts(ratio, request.num_tokens))
    ids = [*request.context, *request.continuation]
    fed = 1 if prefill == "streamed" else len(request.context)
    total, seen = 0.0, 0
    while seen < len(ids) - 1:
        logits = forward(model, torch.tensor([ids[seen : seen + fed]]), cache)[0, -1]
        seen, fed = seen + fed, 1
        if seen >= len(request.context):
            total += float(logits.log_softmax(-1)[ids[seen]])
    return total, cache


@pytest.mark.parametrize("prefill", ["streamed", "one_shot"])
@pytest.mark.parametrize("family", KINDS)
def test_a_batch_is_scored_as_one_token_at_a_time(
    family: str, prefill: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(family, dtype=torch.float64)
    made: list[H2OCache] = []

    class Recorded(H2OCache):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            made.append(self)

    monkeypatch.setattr(caches, "H2OCache", Recorded)
    setting, requests = Setting("h2o", 0.3, prefill), requests_of()
    scores = score(model, requests, setting)
    [cache] = made
    # The batch has the longest first.
    order = sorted(range(len(requests)), key=lambda index: -requests[index].num_tokens)
    for row, index in enumerate(order):
        total, alone = stepwise(model, requests[index], 0.3, prefill)
        assert scores[index].log_prob == pytest.approx(total, abs=1e-8)
        assert kept(cache, row) == kept(alone, 0)
        use, seen = scores[index].use, requests[index].num_tokens - 1
        slots = int(0.3 * requests[index].num_tokens)
        assert (use.seen, use.kept, use.evicted) == (seen, slots, seen - slots)
        assert (use.sinks, use.heavy, use.recent) == (0, slots // 2, slots - slots // 2)


@pytest.mark.parametrize("family", KINDS)
def test_the_full_cache_is_a_plain_forward(family: str) -> None:
    model, requests = tiny_model(family, dtype=torch.float64), requests_of()
    scores = score(model, requests, FULL)
    # All that is needed fits: an evicting cache of every token is the full cache.
    whole = score(model, requests, Setting("h2o", 1.0, "streamed"))
    assert model.config._attn_implementation == tiny_model(family).config._attn_implementation
    set_attention(model, "sdpa" if family not in ("bloom", "mpt") else "eager")
    for request, one, other in zip(requests, scores, whole, strict=True):
        ids = torch.tensor([[*request.context, *request.continuation]])
        with torch.no_grad():
            log_probs = model(ids).logits.log_softmax(-1)[0, len(request.context) - 1 : -1]
        target = torch.tensor(request.continuation)
        want = float(log_probs.gather(1, target[:, None]).sum())
        assert one.log_prob == pytest.approx(want, abs=1e-5)
        assert other.log_prob == pytest.approx(want, abs=1e-5)
        assert one.is_greedy == bool((log_probs.argmax(-1) == target).all())
        assert (one.use.evicted, other.use.evicted) == (0, 0)
        assert one.use.seen == one.use.kept == request.num_tokens - 1


@pytest.mark.parametrize("setting", [FULL, *settings(["h2o"], [0.2], ["streamed", "one_shot"])])
def test_scores_do_not_depend_on_the_batch(setting: Setting) -> None:
    model, requests = tiny_model("llama", dtype=torch.float64), requests_of()
    whole = score(model, requests, setting)
    alone = [score(model, [request], setting)[0] for request in requests]
    pairs = score(model, requests, setting, batch_tokens=40)
    for one, other, third in zip(whole, alone, pairs, strict=True):
        assert one.log_prob == pytest.approx(other.log_prob, abs=1e-9)
        assert one.log_prob == pytest.approx(third.log_prob, abs=1e-9)
        assert one.use == other.use == third.use


def test_batches_keep_to_their_tokens() -> None:
    requests = requests_of(((5, 5), (5, 4), (5, 3), (50, 2)))
    assert list(scoring._batches(requests, 20, VOCABULARY, 9)) == [[3], [0, 1], [2]]
    # Two rows of 5 scored tokens are more than 2**26 logits of such a vocabulary.
    assert list(scoring._batches(requests[:2], 99, 2**23, 9)) == [[0], [1]]


def test_a_greedy_continuation_is_called_so() -> None:
    tokenizer = tiny_tokenizer()
    model = tiny_llama(tokenizer)
    context = tokenizer("And God said", add_special_tokens=False)["input_ids"]
    ids = torch.tensor([context])
    with torch.no_grad():
        best = [int(model(ids).logits[0, -1].argmax())]
        best.append(int(model(torch.tensor([[*context, *best]])).logits[0, -1].argmax()))
    greedy = Request(tuple(context), tuple(best))
    other = Request(tuple(context), (best[0], best[1] ^ 1))
    assert [one.is_greedy for one in score(model, [greedy, other], FULL)] == [True, False]


def test_logits_are_those_of_the_continuation() -> None:
    model, requests = tiny_model("llama", dtype=torch.float64), requests_of()
    found = {
        index: logits
        for index, logits, _ in continuation_logits(
            model, requests, Setting("local", 0.3, "one_shot")
        )
    }
    for index, request in enumerate(requests):
        assert found[index].shape == (len(request.continuation), VOCABULARY)


def test_budgets_are_parts_of_an_example() -> None:
    setting = Setting("h2o", 0.29, "streamed")
    assert [setting.slots(n) for n in (1, 3, 7, 100)] == [1, 1, 2, 29]
    found = settings(["h2o", "full", "local"], [1.0, 0.2], ["streamed", "one_shot"])
    assert found[0] == FULL
    assert len(found) == 9
    assert found[1:5] == [
        Setting("h2o", ratio, prefill)
        for prefill in ("streamed", "one_shot")
        for ratio in (1.0, 0.2)
    ]


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ((["h3o"], [0.2], ["streamed"]), "policy must be one of full, .*, got 'h3o'"),
        ((["h2o"], [0.0], ["streamed"]), r"budgets must be parts in \(0, 1\], got 0"),
        ((["h2o"], [1.5], ["streamed"]), r"budgets must be parts in \(0, 1\], got 1.5"),
        ((["h2o"], [0.2], ["streaming"]), "prefill must be one of streamed, one_shot"),
    ],
)
def test_bad_settings_are_named(arguments: Any, match: str) -> None:
    with pytest.raises(EvalError, match=match):
        settings(*arguments)


def test_a_request_longer_than_the_context_is_named() -> None:
    model = tiny_model("llama", max_position_embeddings=20)
    with pytest.raises(
        EvalError, match="request 1 must fit the model's context of 20 tokens, got 21"
    ):
        score(model, requests_of(((10, 11), (10, 12))), FULL)
