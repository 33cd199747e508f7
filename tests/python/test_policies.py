"""Policies by name: equal slots, and under a model what the reference says."""

from __future__ import annotations

import doctest
from pathlib import Path
from typing import Any

import pytest
import torch

import h2o_kv.policies
from h2o_kv import EvictionPolicy, H2OCache
from h2o_kv.hf.session import SessionError
from h2o_kv.policies import POLICIES, NamedPolicy, named, rules_of
from hf_models import (
    check_against_reference,
    forward,
    generate,
    kept,
    left_padded,
    recorded,
    tiny_model,
    tokens,
)

LENGTH = 40
EVICTING = [policy for policy in POLICIES.values() if policy.name != "full"]
KEEP_ALL = ("top-k", "quest")
ids_of = [policy.name for policy in EVICTING]


def cache_of(model: Any, policy: NamedPolicy, total: int, length: int = LENGTH) -> H2OCache:
    """A cache of the named policy, which streams one token at a time where it may."""
    made = policy.with_slots(total, length)
    assert made is not None
    options: dict[str, Any] = {"prefill": "one_shot"}
    if "streaming" in policy.prefills:
        options = {"prefill": "streaming", "prefill_chunk": 1}
    if policy.needs_oracle:
        draws = torch.Generator().manual_seed(0)
        heads = model.config.num_key_value_heads
        options["given_scores"] = [
            torch.rand(heads, length, generator=draws)
            for _ in range(model.config.num_hidden_layers)
        ]
    return H2OCache(model, made, **options, **policy.cache_options)


@pytest.mark.parametrize("total", [1, 2, 3, 5, 8, 64, 300])
@pytest.mark.parametrize("policy", EVICTING, ids=ids_of)
def test_every_policy_has_the_same_slots(policy: NamedPolicy, total: int) -> None:
    made = policy.with_slots(total, 1000)
    assert made is not None
    if policy.name in KEEP_ALL:
        assert made.budget().total == 1000
    else:
        assert made.budget().total == total


@pytest.mark.parametrize("total", [1, 2, 5, 16, 20, 31, 32, 300])
def test_a_policy_that_reads_pages_reads_no_more_than_its_slots(total: int) -> None:
    for name, slots in (("top-k", total), ("quest", total), ("h2o+quest", max(1, total // 2))):
        made = named(name).with_slots(total, 1000)
        assert made is not None
        rules = made.arguments
        # h2o_attention_decode reads whole pages.
        read = -(-rules["read_slots"] // rules["read_page"]) * rules["read_page"]
        assert slots - rules["read_page"] < read <= slots
        assert rules["read_page"] == (1 if name == "top-k" else min(16, slots))


def test_the_full_cache_is_no_policy() -> None:
    assert named("full").with_slots(3) is None


def test_the_split_of_some_policies_by_hand() -> None:
    assert named("h2o").with_slots(9) == EvictionPolicy(num_heavy=4, num_recent=5)
    assert named("streaming").with_slots(9) == EvictionPolicy(num_heavy=0, num_recent=5, num_sink=4)
    assert named("strided").with_slots(10, 100) == EvictionPolicy(
        num_heavy=5, num_recent=5, score_rule="given", pattern_stride=20, pattern_columns=1
    )
    # 20 slots for columns of 1,000 tokens: 1.28 of every 64.
    assert named("fixed").with_slots(40, 1000) == EvictionPolicy(
        num_heavy=20, num_recent=20, score_rule="given", pattern_stride=64, pattern_columns=1
    )
    assert named("strided+h2").with_slots(20, 100) == EvictionPolicy(
        num_heavy=15, num_recent=5, pattern_stride=20, pattern_columns=1
    )
    assert named("snapkv").with_slots(100) == EvictionPolicy(
        num_heavy=68, num_recent=32, score_rule="prompt", score_queries=32, score_pool=5
    )
    assert named("random").with_slots(5, seed=9) == EvictionPolicy(
        num_heavy=4, num_recent=1, score_rule="random", score_seed=9
    )


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match=r"policy must be one of full, h2o, .*, got 'h3o'"):
        named("h3o")
    with pytest.raises(ValueError, match="total must be >= 1, got 0"):
        named("h2o").with_slots(0)
    with pytest.raises(ValueError, match='length must be >= 1 for "strided", got None'):
        named("strided").with_slots(8)


def test_rules_are_what_is_not_as_in_h2o() -> None:
    assert rules_of(EvictionPolicy(heavy_ratio=0.5, num_recent=3, gqa_reduce="max")) == {}
    policy = EvictionPolicy(num_heavy=2, num_recent=3, score_rule="decay", score_decay=0.5)
    assert rules_of(policy) == {"score_rule": "decay", "score_decay": 0.5}


def test_a_policy_with_other_arguments() -> None:
    policy = EvictionPolicy(heavy_ratio=0.1, num_recent=3, score_rule="mean")
    assert policy.replace(num_heavy=7) == EvictionPolicy(
        num_heavy=7, num_recent=3, score_rule="mean"
    )
    assert policy.replace(recent_ratio=0.2, score_rule="sum") == EvictionPolicy(
        heavy_ratio=0.1, recent_ratio=0.2
    )
    assert EvictionPolicy(**policy.arguments) == policy
    with pytest.raises(TypeError, match="keywords must be among"):
        policy.replace(heavy=3)


REPLAYED = [
    policy
    for policy in EVICTING
    # Rolling has its own comparison (test_hf_rolling.py), the oracle its own scores (below).
    if policy.name not in ("streaming-rolling", "oracle")
]


@pytest.mark.parametrize("family", ["llama", "opt"])
@pytest.mark.parametrize("policy", REPLAYED, ids=[policy.name for policy in REPLAYED])
def test_under_a_model_every_step_is_the_references(policy: NamedPolicy, family: str) -> None:
    model = tiny_model(family, dtype=torch.float64)
    cache = cache_of(model, policy, 9)
    with recorded() as recording:
        forward(model, tokens(2, 30, seed=3), cache)
        for i in range(6):
            forward(model, tokens(2, 1, seed=50 + i), cache)
    budget = tuple(cache.policy.budget())
    evictions = check_against_reference(recording, cache, [budget] * 2)
    assert (evictions > 0) == (policy.name not in KEEP_ALL)


@pytest.mark.parametrize("policy", EVICTING, ids=ids_of)
def test_a_padded_row_keeps_what_it_keeps_alone(policy: NamedPolicy) -> None:
    model = tiny_model("llama", dtype=torch.float64)
    prompts = [tokens(1, 13, seed=1)[0], tokens(1, 26, seed=2)[0]]
    ids, mask = left_padded(prompts)
    together = cache_of(model, policy, 8)
    forward(model, ids, together, mask)
    for row, prompt in enumerate(prompts):
        alone = cache_of(model, policy, 8)
        forward(model, prompt[None], alone)
        assert kept(together, row) == kept(alone, 0)


@pytest.mark.parametrize("policy", EVICTING, ids=ids_of)
def test_generate_keeps_to_the_slots(policy: NamedPolicy) -> None:
    model = tiny_model("llama")
    cache = cache_of(model, policy, 8, length=60)
    generate(model, tokens(2, 30), cache, new=12, num_beams=2)
    most = 60 if policy.name in KEEP_ALL else 8
    assert all(int(layer.max()) <= most for layer in cache.tokens_kept())
    assert cache.get_seq_length() == 41


def test_layers_draw_different_numbers() -> None:
    model = tiny_model("llama")
    cache = cache_of(model, named("random"), 8)
    forward(model, tokens(1, 8), cache)
    first, second = (layer.scores for layer in cache.layers)
    assert not set(first.flatten().tolist()) & set(second.flatten().tolist())


def test_the_oracle_keeps_what_it_is_given() -> None:
    model = tiny_model("llama")
    scores = [torch.rand(2, LENGTH, generator=torch.Generator().manual_seed(i)) for i in (0, 1)]
    policy = EvictionPolicy(num_heavy=5, num_recent=3, score_rule="given")
    cache = H2OCache(
        model.config, policy, prefill="streaming", prefill_chunk=1, given_scores=scores
    )
    forward(model, tokens(1, LENGTH), cache)
    for layer, given in zip(kept(cache, 0), scores, strict=True):
        for head, own in zip(layer, given, strict=True):
            best = own[: LENGTH - 3].topk(5).indices.tolist()
            assert head == sorted([*best, *range(LENGTH - 3, LENGTH)])
    with pytest.raises(SessionError, match="given_scores must be None"):
        cache.save("anything")


def test_a_row_is_inserted_only_where_positions_have_the_same_scores() -> None:
    model = tiny_model("llama")
    policy = EvictionPolicy(
        num_heavy=3, num_recent=2, score_rule="given", pattern_stride=8, pattern_columns=1
    )
    scores = torch.rand(2, 30, generator=torch.Generator().manual_seed(0))

    def filled(given: list[torch.Tensor] | None) -> H2OCache:
        cache = H2OCache(model.config, policy, given_scores=given)
        forward(model, tokens(2, 12), cache)
        return cache

    filled([scores] * 2).insert(0, filled([scores.clone()] * 2))
    for mine, theirs in (
        ([scores] * 2, [scores, -scores]),
        ([scores] * 2, None),
        (None, [scores] * 2),
    ):
        cache = filled(mine)
        before = [layer.positions.clone() for layer in cache.layers]
        with pytest.raises(
            ValueError, match="insert: given_scores of both caches must be the same"
        ):
            cache.insert(0, filled(theirs), 1)
        assert all(map(torch.equal, before, [layer.positions for layer in cache.layers]))


def test_given_scores_that_do_not_fit_are_refused() -> None:
    config = tiny_model("llama").config
    policy = EvictionPolicy(num_heavy=5, num_recent=3, score_rule="given")
    scores = torch.rand(2, 5)
    with pytest.raises(ValueError, match=r'score_rule must be "given" .*, got "sum"'):
        H2OCache(config, policy.replace(score_rule="sum"), given_scores=[scores] * 2)
    with pytest.raises(ValueError, match="given_scores must be given with .* got None"):
        H2OCache(config, policy)
    with pytest.raises(ValueError, match="given_scores must be one a layer = 2, got 3"):
        H2OCache(config, policy, given_scores=[scores] * 3)
    with pytest.raises(ValueError, match=r"must be \[num_kv_heads, length\].*got \[5\]"):
        H2OCache(config, policy, given_scores=[scores[0]] * 2)
    with pytest.raises(TypeError, match="given_scores must be tensors, got list"):
        H2OCache(config, policy, given_scores=[[[0.5]]] * 2)  # type: ignore[list-item]
    with pytest.raises(TypeError, match="given_scores must be a sequence of tensors, got 5"):
        H2OCache(config, policy, given_scores=5)  # type: ignore[arg-type]
    model = tiny_model("llama")
    cache = H2OCache(model.config, policy, given_scores=[torch.rand(3, 9)] * 2)
    message = r"given_scores must be \[num_kv_heads = 2, length\], got \[3, 9\] in layer 0"
    with pytest.raises(ValueError, match=message):
        forward(model, tokens(1, 4), cache)


@pytest.mark.parametrize("name", ["mean", "decay", "random", "strided+h2", "h2o+quest"])
def test_a_saved_session_goes_on_by_its_rules(name: str, tmp_path: Path) -> None:
    model = tiny_model("llama")
    cache = cache_of(model, named(name), 8)
    forward(model, tokens(1, 20), cache)
    cache.save(tmp_path / "session")
    loaded = H2OCache.load(tmp_path / "session", model.config)
    assert loaded.policy == cache.policy
    for i in range(5):
        step = tokens(1, 1, seed=i)
        assert torch.equal(forward(model, step, cache), forward(model, step, loaded))
    assert kept(loaded, 0) == kept(cache, 0)


def test_a_smaller_budget_lets_go_by_the_rule() -> None:
    """Two caches with the same sums; the one by mean lets other tokens go."""
    model = tiny_model("llama", dtype=torch.float64)
    left = {}
    for name in ("h2o", "mean"):
        cache = cache_of(model, named(name), 40)
        forward(model, tokens(1, 30), cache)
        layer = cache.layers[0]
        assert layer.scores is not None and layer.positions is not None
        scores, positions = layer.scores[0, 0], layer.positions[0, 0]
        order = scores / (30 - positions) if name == "mean" else scores
        may_leave = (positions >= 0) & (positions <= 26)
        expected = positions[may_leave][order[may_leave].argsort()][:20].tolist()
        cache.set_budget(num_heavy=7, num_recent=3)
        assert layer.last_evicted is not None
        left[name] = layer.last_evicted[0, 0].tolist()
        assert left[name] == expected
    assert left["h2o"] != left["mean"]


def test_the_docs_have_a_row_for_every_policy() -> None:
    docs = (Path(__file__).parents[2] / "docs" / "policies.md").read_text(encoding="utf-8")
    table = docs.partition("| --- ")[2]
    missing = [name for name in POLICIES if f"`{name}`" not in table]
    assert not missing


def test_examples() -> None:
    assert doctest.testmod(h2o_kv.policies).failed == 0
