"""Every named policy in the evaluation: which prefills it has, what a batch may hold, the oracle."""

from __future__ import annotations

import pytest
import torch

from h2o_kv import EvictionPolicy, H2OCache
from h2o_kv.eval import EvalError, Request, Setting, score, settings
from h2o_kv.eval.caches import policy_cache
from h2o_kv.policies import POLICIES
from hf_models import forward, kept, tiny_model, tokens

REQUESTS = [
    Request(tuple(row[:-4]), tuple(row[-4:]))
    for row in (tokens(1, length, seed=length)[0].tolist() for length in (21, 33, 27, 21))
]
SETTINGS = [
    Setting(policy.name, 0.4, prefill)
    for policy in POLICIES.values()
    if policy.name != "full"
    for prefill, has in (("streamed", "streaming"), ("one_shot", "one_shot"))
    if has in policy.prefills
]


@pytest.mark.parametrize("setting", SETTINGS, ids=[f"{s.policy}-{s.prefill}" for s in SETTINGS])
def test_a_text_in_a_batch_is_scored_as_alone(setting: Setting) -> None:
    model = tiny_model("llama", dtype=torch.float64)
    together = score(model, REQUESTS, setting)
    for request, own in zip(REQUESTS, together, strict=True):
        [alone] = score(model, [request], setting)
        assert own.log_prob == pytest.approx(alone.log_prob, abs=1e-9)
        assert own.use == alone.use
        reads = setting.policy in ("top-k", "quest")
        assert own.use.kept <= (request.num_tokens if reads else setting.slots(request.num_tokens))


def test_a_batch_holds_what_differs_in_counts_alone() -> None:
    lengths = [10, 20, 30, 40]
    assert Setting("h2o", 0.2, "streamed").alike(lengths) == [[0, 1, 2, 3]]
    assert Setting("full", 1.0, "full").alike(lengths) == [[0, 1, 2, 3]]
    # Of each it reads another number of slots.
    assert Setting("top-k", 0.2, "streamed").alike([10, 20, 10]) == [[0, 2], [1]]


def test_the_oracle_keeps_what_the_full_cache_looked_at() -> None:
    """The scores are column sums of the whole attention, of later queries too."""
    model = tiny_model("llama", dtype=torch.float64)
    ids = tokens(1, 30, seed=4)
    whole = H2OCache(model.config, EvictionPolicy(num_heavy=30, num_recent=0))
    forward(model, ids, whole)
    setting = Setting("oracle", 0.4, "streamed")
    given = [layer.scores[0].clone() for layer in whole.layers]  # type: ignore[index]
    cache = policy_cache(model, [30], setting, given_scores=given)
    forward(model, ids, cache)
    request = Request(tuple(ids[0, :20].tolist()), tuple(ids[0, 20:].tolist()))
    [own] = score(model, [request], setting)
    logits = forward(model, ids[:, :-1], policy_cache(model, [30], setting, given_scores=[
        _scores_of_all_but_the_last(model, ids)[i] for i in range(2)
    ]))  # fmt: skip
    expected = logits[0, 19:].log_softmax(-1).gather(-1, ids[0, 20:, None]).sum()
    assert own.log_prob == pytest.approx(float(expected), abs=1e-9)
    for layer, scores in zip(kept(cache, 0), given, strict=True):
        for head, of_head in zip(layer, scores, strict=True):
            best = of_head[:24].topk(6).indices.tolist()
            assert head == sorted([*best, *range(24, 30)])


def _scores_of_all_but_the_last(model: object, ids: torch.Tensor) -> list[torch.Tensor]:
    """Column sums of the tokens that are fed."""
    whole = H2OCache(model, EvictionPolicy(num_heavy=30, num_recent=0))
    forward(model, ids[:, :-1], whole)
    return [layer.scores[0, :, :29].clone() for layer in whole.layers]  # type: ignore[index]


def test_a_policy_runs_in_a_prefill_that_it_has() -> None:
    found = settings(["snapkv", "scissorhands"], [0.2], ["streamed", "one_shot"])
    assert found == [
        Setting("snapkv", 0.2, "one_shot"),
        Setting("scissorhands", 0.2, "streamed"),
    ]
    message = "prefill must have one_shot for the policy snapkv, got streamed"
    with pytest.raises(EvalError, match=message):
        settings(["snapkv"], [0.2], ["streamed"])


def test_the_oracle_cannot_generate() -> None:
    model = tiny_model("llama")
    message = "policy must be one that does not need the whole text beforehand, got oracle"
    with pytest.raises(EvalError, match=message):
        policy_cache(model, [20], Setting("oracle", 0.2, "streamed"))
