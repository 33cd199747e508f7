"""Evicting caches beside the full one: dropped attention, evictions with margins, freezing, KL."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from h2o_kv import Budget, EvictionPolicy, H2OCache, reference
from h2o_kv.diagnostics import (
    STAYED,
    Departures,
    DroppedMass,
    EvictionLog,
    ObservedStep,
    Victim,
    kl_by_dropped,
    lifetimes,
    promotions,
    replay,
    slot_ages,
    summarise,
)
from h2o_kv.diagnostics.freeze import lowest_heavy
from h2o_kv.generation import CacheSpec
from h2o_kv.hf import cache_kwarg
from h2o_kv.policies import rules_of
from hf_models import Call, recorded, set_attention, tiny_model, tokens

LENGTH, PROMPT = 61, 24
TEXT = tokens(1, LENGTH, seed=5)[0].tolist()
STEPS = LENGTH - 1
HALVES = {"num_heavy": 6, "num_recent": 3}


def close(value: float) -> Any:
    return pytest.approx(value, abs=1e-12)


def spec(
    label: str = "h2o", prefill: str = "streaming", chunk: int = 1, **counts: Any
) -> CacheSpec:
    counts = counts or {"num_heavy": 6, "num_recent": 5, "num_sink": 1}
    return CacheSpec(
        label=label, policy=EvictionPolicy(**counts), prefill=prefill, prefill_chunk=chunk
    )


def model(family: str = "llama") -> Any:
    return tiny_model(family, dtype=torch.float64)


def forwards(of: CacheSpec, prompt: int) -> list[tuple[int, int]]:
    """First and last + 1 of the tokens that join together, one step a forward."""
    width = of.prefill_chunk if of.prefill == "streaming" else prompt
    cuts = [*range(0, prompt, width), *range(prompt, STEPS + 1)]
    return list(pairwise(cuts))


@torch.no_grad()
def kept_after(net: Any, of: CacheSpec, prompt: int) -> tuple[list[list[list[set[int]]]], Tensor]:
    """What the cache kept after each forward, [forward][layer][head], and the logits."""
    set_attention(net, "h2o")
    assert of.policy is not None
    cache = H2OCache(net.config, of.policy, prefill=of.prefill, prefill_chunk=of.prefill_chunk)
    kept, logits = [], []
    for first, last in forwards(of, prompt):
        ids = torch.tensor(TEXT[first:last])[None]
        logits.append(net(ids, **{cache_kwarg(net): cache}).logits[0])
        kept.append(
            [
                [{p for p in head if p >= 0} for head in layer.positions[0].tolist()]
                for layer in cache.layers
            ]
        )
    return kept, torch.cat(logits)


@torch.no_grad()
def full(net: Any) -> tuple[list[Tensor], Tensor]:
    """Attention [heads, steps, steps] of each layer, and logits."""
    ids = torch.tensor(TEXT[:-1])[None]
    set_attention(net, "eager")
    attentions = net(ids, output_attentions=True).attentions
    set_attention(net, "sdpa")  # eager attention's softmax is in float32
    return [weights[0] for weights in attentions], net(ids).logits[0]


# ---- Dropped attention and KL, beside a plain run of cache and model.


@pytest.mark.parametrize("family", ["llama", "opt"])
@pytest.mark.parametrize(
    ("of", "prompt"),
    [
        (spec(), 1),
        (spec(), PROMPT),
        (spec(prefill="one_shot"), PROMPT),
        (spec(prefill="one_shot", num_heavy=0, num_recent=9), PROMPT),
        (spec(chunk=7), PROMPT),
        (spec(num_heavy=9, num_recent=0), 1),
    ],
)
def test_dropped_attention_is_what_the_full_cache_gives_to_what_is_gone(
    family: str, of: CacheSpec, prompt: int
) -> None:
    net = model(family)
    done: list[float] = []
    run = replay(net, TEXT, [of], prompt_tokens=prompt, segment=13, progress=done.append)
    got = run.policies[of.label]
    kept, logits = kept_after(net, of, prompt)
    attention, right = full(net)
    num_heads, num_kv_heads = len(attention[0]), len(kept[0][0])
    for layer, weights in enumerate(attention):
        before: list[set[int]] = [set() for _ in range(num_kv_heads)]
        for (first, last), after in zip(forwards(of, prompt), kept, strict=True):
            for head in range(num_heads):
                kv_head = head * num_kv_heads // num_heads
                for t in range(first, last):
                    # The cache, and the tokens that joined with this one, up to it.
                    there = sorted(before[kv_head] | set(range(first, t + 1)))
                    dropped = 1 - float(weights[head, t, there].sum())
                    mine = float(got.dropped[layer].flatten(0, 1)[head, t])
                    assert mine == pytest.approx(dropped, abs=3e-6)
            before = after[layer]
    assert got.dropped.max() > 0.05
    assert run.first_prediction == prompt - 1
    log_p, log_q = right.log_softmax(-1)[prompt - 1 :], logits.log_softmax(-1)[prompt - 1 :]
    kl = torch.nn.functional.kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1)
    torch.testing.assert_close(got.predictions.kl, kl, atol=1e-9, rtol=0)
    following = torch.tensor(TEXT[prompt:])
    nll = torch.nn.functional.cross_entropy(logits[prompt - 1 :], following, reduction="none")
    torch.testing.assert_close(got.predictions.nll, nll, atol=1e-9, rtol=0)
    assert got.predictions.top.tolist() == logits[prompt - 1 :].argmax(-1).tolist()
    assert run.full.top.tolist() == right[prompt - 1 :].argmax(-1).tolist()
    assert run.full.kl.abs().max() == 0
    assert done[-1] == 1


def test_nothing_is_dropped_while_nothing_has_left() -> None:
    ample = spec("ample", num_heavy=40, num_recent=40)
    tight = spec("tight", num_heavy=10, num_recent=10)
    run = replay(model(), TEXT, [ample, tight])
    assert run.policies["ample"].dropped.abs().max() == 0
    assert run.policies["ample"].predictions.kl.abs().max() < 1e-9
    assert bool((run.policies["ample"].departures.left_at == STAYED).all())
    # At step 20 somebody leaves, who was still there for it.
    dropped = run.policies["tight"].dropped
    assert dropped[..., :21].abs().max() == 0
    assert dropped[..., 21].min() > 0


def test_one_forward_of_many_tokens_and_one_a_step_are_the_same() -> None:
    seen: list[ObservedStep] = []
    together = replay(model(), TEXT, [spec()], segment=20)
    apart = replay(model(), TEXT, [spec()], segment=7, on_step={"h2o": seen.append})
    a, b = together.policies["h2o"], apart.policies["h2o"]
    assert torch.equal(a.departures.left_at, b.departures.left_at)
    assert len(seen) == 2 * STEPS
    assert a.sampled_steps == (0, 20, 40, 59)
    torch.testing.assert_close(a.dropped, b.dropped, atol=1e-9, rtol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"prompt_tokens": 0},
            "prompt_tokens must be >= 1 and below the number of ids, got 0 and 61",
        ),
        ({"prompt_tokens": 61}, "got 61 and 61 ids"),
        ({"segment": 0}, "segment must be >= 1, got 0"),
        ({"specs": [spec(), spec()]}, r"labels of specs must differ, got \['h2o', 'h2o'\]"),
        ({"specs": [CacheSpec(label="full")]}, "must evict, got 'full' without a policy"),
        (
            {"specs": [spec(num_heavy=9, num_recent=3, read_slots=4)]},
            r"must read all that it keeps \(read_slots 0\), got .*read_slots=4",
        ),
    ],
)
def test_replay_refuses_bad_arguments(options: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"specs": [spec()], **options}
    with pytest.raises(ValueError, match=message):
        replay(model(), TEXT, **arguments)


# ---- Sums over steps.


def test_departures_of_chunks_leave_at_their_ends() -> None:
    departures = Departures(1, 2, 8)
    nobody = [-1, -1, -1, -1, -1]
    # Five tokens from position 3 on, two at a time: steps 4, 6 and 7.
    departures.record(0, torch.tensor([[0, 1, 3, -1, 2], nobody], dtype=torch.int32), 3, 2)
    assert departures.left_at[0, 0].tolist() == [4, 4, 7, 6, *[STAYED] * 4]
    assert departures.left_at[0, 1].tolist() == [STAYED] * 8
    gone = departures.gone(0, 4, 3, 4)
    assert gone[0].tolist() == [
        [False, False, False, False],
        [True, True, False, False],
        [True, True, False, False],
    ]
    # Of tokens 1 and 2 in two heads, from step 2: 1 leaves at 4, which still has it, 2 at 7.
    assert departures.held_share(1, 3).tolist() == [[1, 1, 1, 0.75, 0.75, 0.75]]


def test_dropped_mass_of_hand_made_attention() -> None:
    departures = Departures(1, 1, 3)
    departures.left_at[0, 0, 0] = 1
    dropped = DroppedMass(departures)
    rows = torch.tensor([[[1.0, 0, 0], [0.75, 0.25, 0], [0.5, 0.375, 0.125]]])
    dropped.observe(0, 0, torch.stack([rows[:, :2, :2], torch.eye(2)[None]], 1))
    assert dropped.mass[0, 0, :, :2].tolist() == [[0, 0], [0, 0]]
    assert bool(dropped.mass[..., 2].isnan().all())
    dropped.observe(0, 2, torch.stack([rows[:, 2:], torch.tensor([[[0, 0, 1.0]]])], 1))
    assert dropped.mass[0, 0, :, 2].tolist() == [0.5, 0]


def test_kept_attention_is_summed_up_from_where_something_can_be_missing() -> None:
    mass = torch.tensor([[0.0, 0.0, 0.1, 0.2, 0.3, 0.4], [0.0, 0.0, 0.5, 0.6, 0.7, 1.0000001]])
    summary = summarise(mass.view(2, 1, 1, 6), 2, num_slices=2)
    assert summary.kept.count == 8
    assert summary.kept.mean == pytest.approx(1 - 3.8 / 8)
    assert summary.kept.low == 0
    assert [layer.mean for layer in summary.layers] == pytest.approx([0.75, 0.3])
    assert [(first, last) for first, last, _ in summary.slices] == [(2, 4), (4, 6)]
    assert [kept.median for *_, kept in summary.slices] == pytest.approx([0.65, 0.45])
    table = kl_by_dropped(mass.view(2, 1, 1, 6), torch.tensor([4.0, 1.0, 3.0, 2.0]), 2, parts=2)
    assert [row["steps"] for row in table] == [2, 2]
    assert [row["dropped"] for row in table] == pytest.approx([0.35, 0.6])
    assert [row["kl"] for row in table] == [2.5, 2.5]


# ---- Evictions, beside the reference.


def reference_victims(calls: Sequence[Call], of: CacheSpec, layer: int) -> list[Victim]:
    """What h2o_kv.reference does with the recorded queries and keys of one layer."""
    assert of.policy is not None
    budget, rules = of.policy.budget(), rules_of(of.policy)
    if of.policy.score_rule == "random":
        rules["score_seed"] = of.policy.layer_seed(layer)
    heads, head_dim = calls[0].key.shape[1], calls[0].key.shape[3]
    room = (1, heads, budget.total)
    state = (
        torch.zeros(*room, head_dim).double(),
        torch.zeros(*room, head_dim).double(),
        torch.zeros(room).double(),
        torch.full(room, -1, dtype=torch.int32),
    )
    found, seen = [], 0
    for call in calls:
        new = call.key.shape[2]
        trace: list[reference.Step] = []
        reference.attention_decode(
            call.query,
            *state,
            call.key,
            call.value,
            torch.arange(seen, seen + new)[None],
            *budget,
            gqa_reduce=of.policy.gqa_reduce,
            scale=call.scale,
            chunk=new,
            trace=trace,
            **rules,
        )
        seen += new
        for step in trace:
            scores = dict(zip(step.candidates, step.scores.tolist(), strict=True))
            order = dict(zip(step.candidates, step.compared, strict=True))
            # The reference's margin is that of the last one who leaves.
            lowest = order[step.victims[-1]] + step.margin if step.victims else math.inf
            found += [
                Victim(seen - 1, layer, step.head, v, scores[v], lowest - order[v], order[v])
                for v in step.victims
            ]
    return found


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
@pytest.mark.parametrize(
    "of",
    [
        spec(),
        spec(num_heavy=6, num_recent=4, gqa_reduce="max"),
        spec(num_heavy=9, num_recent=0),
        spec(num_heavy=0, num_recent=9),
        spec(chunk=7),
        spec(prefill="one_shot"),
        spec(**HALVES, score_rule="decay", score_decay=0.75),
        spec(**HALVES, score_rule="mean"),
        spec(**HALVES, score_rule="value", chunk=7),
        spec(**HALVES, score_rule="misses"),
        spec(**HALVES, score_rule="random", score_seed=3),
        spec(**HALVES, pattern_stride=12, pattern_columns=1),
        spec(
            prefill="one_shot",
            **HALVES,
            score_rule="prompt",
            score_queries=4,
            score_pool=3,
        ),
    ],
)
def test_victims_have_the_scores_and_margins_of_the_reference(family: str, of: CacheSpec) -> None:
    steps: list[ObservedStep] = []
    with recorded() as recording:
        run = replay(model(family), TEXT, [of], prompt_tokens=PROMPT, on_step={"h2o": steps.append})
    got = sorted(
        (victim for step in steps for victim in step.victims()),
        key=lambda v: (v.layer, v.step, v.head),
    )
    want = [
        victim
        for layer, calls in sorted(recording.calls.items())
        for victim in reference_victims(calls, of, layer)
    ]
    assert len(got) == len(want) > 100
    for mine, theirs in zip(got, want, strict=True):
        where = (mine.step, mine.layer, mine.head, mine.position)
        assert where == (theirs.step, theirs.layer, theirs.head, theirs.position)
        assert mine.score == pytest.approx(theirs.score, abs=1e-9)
        assert mine.compared == pytest.approx(theirs.compared, abs=1e-9)
        assert mine.margin == pytest.approx(theirs.margin, abs=1e-9)
        left_at = run.policies["h2o"].departures.left_at
        assert left_at[mine.layer, mine.head, mine.position] == mine.step
    assert int((run.policies["h2o"].departures.left_at != STAYED).sum()) == len(got)
    finite = any(math.isfinite(victim.margin) for victim in got)
    assert finite == (of.policy is not None and of.policy.num_heavy != 0)


def test_observing_changes_nothing_and_ends() -> None:
    net = model()
    seen = replay(net, TEXT, [spec()], on_step={"h2o": lambda step: None}).policies["h2o"]
    plain = replay(net, TEXT, [spec()]).policies["h2o"]
    assert torch.equal(seen.departures.left_at, plain.departures.left_at)
    assert all("attend" not in vars(layer) for layer in seen.cache.layers)
    assert net.config._attn_implementation == "h2o"


def test_victims_of_a_step_by_hand() -> None:
    scores = torch.tensor(
        [
            [0.1, 0.0, 0.75, 0.5, 0.2, 0.875],
            [0.1, 0.0, 0.75, 0.5, 0.2, 0.0],
            [0.1, 0.0, 0.5, 0.5, 0.2, 1.0],
        ]
    )
    step = ObservedStep(
        layer=3,
        step=9,
        budget=Budget(num_sink=1, num_heavy=2, num_recent=2),
        positions=torch.tensor([[9, 0, 4, 2, 8, 6], [9, 0, 4, 2, 8, -1], [9, 0, 4, 2, 8, 6]]),
        scores=scores,
        compared=scores,
        evicted=torch.tensor([[2], [-1], [2]], dtype=torch.int32),
    )
    # Neither the sink's 0 nor the recent 0.2 could have left.
    first, second = step.victims()
    assert first == Victim(9, 3, 0, 2, 0.5, 0.25, compared=0.5)
    assert (first.age, first.tied) == (7, False)
    assert second == Victim(9, 3, 2, 2, 0.5, 0.0, compared=0.5)
    assert second.tied


# ---- The log.


def write_log(path: Path, **options: Any) -> list[dict[str, Any]]:
    texts = [f"<{token}>" for token in TEXT]
    classes = ["sink" if i < 4 else "content" for i in range(LENGTH)]
    with EvictionLog(path, TEXT, texts, classes, **options) as log:
        layers = {"h2o": log.layers}
        replay(model(), TEXT, [spec()], on_step={"h2o": log}, layers=layers)
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_the_log_has_every_eviction(tmp_path: Path) -> None:
    steps: list[ObservedStep] = []
    replay(model(), TEXT, [spec()], on_step={"h2o": steps.append})
    victims = [victim for step in steps for victim in step.victims()]
    first, *lines, last = write_log(tmp_path / "log.jsonl", about={"policy": "h2o"})
    assert first == {"event": "run", "rate": 1.0, "seed": 0, "layers": None, "policy": "h2o"}
    assert last == {"event": "end", "evictions": len(victims), "written": len(victims)}
    assert len(victims) == 2 * 2 * (STEPS - 12)  # layers, KV heads, steps past the budget
    for line, victim in zip(lines, victims, strict=True):
        position = victim.position
        assert line == {
            "event": "eviction",
            "step": victim.step,
            "layer": victim.layer,
            "head": victim.head,
            "position": position,
            "token_id": TEXT[position],
            "token": f"<{TEXT[position]}>",
            "class": "sink" if position < 4 else "content",
            "age": victim.step - position,
            "score": victim.score,
            "margin": victim.margin,
            "tied": False,
        }


def test_the_log_is_sampled_by_rate_seed_and_layer(tmp_path: Path) -> None:
    _, *every, _ = write_log(tmp_path / "a")
    _, *some, end = write_log(tmp_path / "b", rate=0.25)
    assert end == {"event": "end", "evictions": len(every), "written": len(some)}
    assert 0.15 < len(some) / len(every) < 0.35
    assert [line for line in every if line in some] == some
    _, *again, _ = write_log(tmp_path / "c", rate=0.25)
    assert again == some
    _, *other, _ = write_log(tmp_path / "d", rate=0.25, seed=1)
    assert other != some
    head, *second, end = write_log(tmp_path / "e", rate=0.25, layers=[1])
    assert second == [line for line in some if line["layer"] == 1]
    assert (head["layers"], end["evictions"]) == ([1], len(every) // 2)


def test_a_margin_that_nobody_gave_is_null(tmp_path: Path) -> None:
    with EvictionLog(tmp_path / "log", [7, 8], ["a", "b"], ["content"] * 2) as log:
        log(
            ObservedStep(
                layer=0,
                step=1,
                budget=Budget(num_recent=1),
                positions=torch.tensor([[0, 1]]),
                scores=torch.tensor([[0.5, 0.5]]),
                compared=torch.tensor([[0.5, 0.5]]),
                evicted=torch.tensor([[0]], dtype=torch.int32),
            )
        )
    line = json.loads((tmp_path / "log").read_text().splitlines()[1])
    assert (line["margin"], line["tied"], line["age"]) == (None, False, 1)


@pytest.mark.parametrize("rate", [0, -0.5, 1.5, math.nan])
def test_the_log_refuses_a_rate_that_is_none(tmp_path: Path, rate: float) -> None:
    with pytest.raises(ValueError, match=rf"rate must be in \(0, 1\], got {rate}"):
        EvictionLog(tmp_path / "log", [], [], [], rate=rate)
    assert not (tmp_path / "log").exists()


# ---- Freezing, by hand: one layer, two KV heads, eight tokens, budget 1 sink + 2 heavy + 2 recent.

BUDGET = Budget(num_sink=1, num_heavy=2, num_recent=2)


def frozen() -> Departures:
    departures = Departures(1, 2, 8)
    # The first head keeps 1 and 2 for good: 3 leaves when it leaves the window, and so do 4 and 5.
    # The second takes in 3 for 1, then 4 for 2, and lets 5 go.
    for head, pairs in enumerate((((3, 5), (4, 6), (5, 7)), ((1, 5), (2, 6), (5, 7)))):
        for position, step in pairs:
            departures.left_at[0, head, position] = step
    return departures


def test_promotions() -> None:
    found = promotions(frozen(), BUDGET, 0, 8)
    assert (found.left_window.tolist(), found.promoted.tolist()) == ([6], [2])
    assert found.rate == close(1 / 3)
    assert found.rates.tolist() == [close(1 / 3)]
    assert promotions(frozen(), BUDGET, 5, 7).rate == 0.5
    assert promotions(frozen(), BUDGET, 7, 8).rate == 0
    # While the cache filled up, nobody had to leave.
    assert math.isnan(promotions(frozen(), BUDGET, 0, 5).rate)


def test_without_a_window_a_new_token_competes_at_once() -> None:
    departures = Departures(1, 1, 4)
    departures.left_at[0, 0, 2], departures.left_at[0, 0, 0] = 2, 3
    found = promotions(departures, Budget(num_heavy=2), 0, 4)
    assert (found.left_window.tolist(), found.promoted.tolist()) == ([2], [1])


def test_slot_ages() -> None:
    (ages,) = slot_ages(frozen(), 6, BUDGET)  # 1 and 2; 3 and 4
    assert (ages.count, ages.mean, ages.low, ages.high) == (4, 3.5, 2, 5)
    (ages,) = slot_ages(frozen(), 5, BUDGET)  # 1 and 2; 2 and 3
    assert (ages.count, ages.mean) == (4, (4 + 3 + 3 + 2) / 4)
    assert slot_ages(frozen(), 1, BUDGET)[0].count == 0


def test_lowest_heavy() -> None:
    positions = torch.tensor([[6, 0, 2, 1, 5], [6, 0, -1, -1, 5]], dtype=torch.int32)
    scores = torch.tensor([[0.1, 0.2, 3.0, 2.5, 0.3], [0.1, 0.2, 0.0, 0.0, 0.3]])
    low, none = lowest_heavy(positions, scores, BUDGET, 6).tolist()
    assert low == 2.5
    assert math.isnan(none)


def test_lowest_heavy_of_a_run_is_that_of_its_cache() -> None:
    got = replay(model(), TEXT, [spec()], segment=60).policies["h2o"]
    last = got.lowest_heavy[-1]
    assert got.sampled_steps == (0, 59)
    assert bool(got.lowest_heavy[0].isnan().all())
    for number, layer in enumerate(got.cache.layers):
        for head in range(2):
            pairs = zip(
                layer.positions[0, head].tolist(), layer.scores[0, head].tolist(), strict=True
            )
            assert last[number, head] == min(s for p, s in pairs if 1 <= p <= 54)


def test_lifetimes_by_class() -> None:
    found = lifetimes(frozen(), ["sink", "content", "content", "mark", "content", *["mark"] * 3])
    assert list(found) == ["sink", "content", "mark"]
    assert (found["sink"].count, found["sink"].stayed, found["sink"].lifetime.count) == (2, 1, 0)
    assert found["sink"].so_far.mean == 7
    # 1, 2, 4: stayed, stayed, left after 2; left after 4, left after 4, stayed.
    content = found["content"]
    assert (content.count, content.stayed) == (6, 0.5)
    assert (content.lifetime.count, content.lifetime.mean) == (3, close(10 / 3))
    assert content.so_far.mean == close((6 + 5 + 2 + 4 + 4 + 3) / 6)
    # 3, 5, 6, 7: left after 2, after 2, stayed, stayed; stayed, left after 2, stayed, stayed.
    assert (found["mark"].stayed, found["mark"].lifetime.mean) == (5 / 8, 2)
