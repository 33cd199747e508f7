"""Retrieval: probes, one context with several continuations, and what of the evidence is kept."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from h2o_kv import EvictionPolicy, H2OCache
from h2o_kv.eval import EvalError, Request, Setting, TaskSpec, make_task, score, settings
from h2o_kv.eval.prefix import Prefix
from h2o_kv.eval.probes import NUM_ALTERNATIVES, PROBES, ruler_probe
from hf_models import forward, tiny_model, tokens
from model_files import tiny_llama, tiny_tokenizer
from test_eval_choices import write
from test_eval_texts import greedy

ESSAY = "And God said, Let there be light. It was good! Was it day? The earth had no form. "


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write(tmp_path, "needle_haystack/paul_graham_essays.jsonl", [{"text": ESSAY * 9}] * 2)
    return tmp_path


def ids_of(length: int, seed: int) -> list[int]:
    ids: list[int] = tokens(1, length, seed=seed)[0].tolist()
    return ids


@pytest.mark.parametrize("prefill", ["streamed", "one_shot"])
@pytest.mark.parametrize("family", ["llama", "opt"])
def test_what_follows_a_prefix_is_what_follows_the_whole(family: str, prefill: str) -> None:
    model = tiny_model(family, dtype=torch.float64)
    context, answers = ids_of(30, 1), [ids_of(4, seed) for seed in (2, 3, 4)]
    setting = Setting("h2o", 0.25, prefill)
    prefix = Prefix(model, context, 34, 4, setting)
    options: dict[str, Any] = {"prefill": "one_shot"}
    if prefill == "streamed":
        options = {"prefill": "streaming", "prefill_chunk": 1}
    policy = EvictionPolicy(num_heavy=4, num_recent=4)

    def fresh() -> H2OCache:
        cache = H2OCache(model.config, policy, **options)
        forward(model, torch.tensor([context[:-1]]), cache)
        return cache

    for answer, got in zip(answers, prefix.log_probs(answers), strict=True):
        cache, want = fresh(), 0.0
        for token, following in zip([context[-1], *answer], answer, strict=False):
            logits = forward(model, torch.tensor([[token]]), cache)[0, -1]
            want += float(logits.log_softmax(-1)[following])
        assert got == pytest.approx(want, abs=1e-8)
    assert prefix.generate(9, [96]) == greedy(model, fresh(), context[-1:], 9, 96)
    use = prefix.use()
    assert (use.seen, use.kept, use.evicted, use.heavy, use.recent) == (29, 8, 21, 4, 4)
    held = [set(head) for layer in fresh().layers for head in layer.positions[0].tolist()]
    places = [0, 5, 9, 27]
    share = sum(place in head for head in held for place in places) / len(held) / 4
    assert prefix.share_kept(places) == pytest.approx(share)
    assert 0.25 <= share < 1  # the newest is always there


def test_a_full_prefix_is_a_plain_forward() -> None:
    model = tiny_model("gpt_neox", dtype=torch.float64)
    context, answers = ids_of(20, 1), [ids_of(3, 2), ids_of(6, 3), ids_of(1, 4)]
    full = Setting("full", 1.0, "full")
    prefix = Prefix(model, context, 26, 6, full)
    want = score(model, [Request(tuple(context), tuple(answer)) for answer in answers], full)
    assert prefix.log_probs(answers) == pytest.approx([one.log_prob for one in want], abs=1e-8)
    assert prefix.log_probs(answers[:1]) == pytest.approx([want[0].log_prob], abs=1e-8)
    assert prefix.share_kept([0, 1]) == 1.0


# ---- Probes


@pytest.mark.parametrize("name", PROBES)
def test_a_probe_can_be_answered_from_its_prompt(name: str, data: Path) -> None:
    tokenizer = tiny_tokenizer()
    task: Any = make_task(TaskSpec(name, data, prompt_tokens=150, seed=3), tokenizer)
    probes = [task.probe(index) for index in range(5)]
    for probe in probes:
        assert [probe.prompt[start:end] for start, end in probe.evidence] == list(probe.wanted)
        assert probe.answer == " " + ", ".join(probe.wanted)
        assert (
            len(probe.alternatives)
            == NUM_ALTERNATIVES
            == len({*probe.alternatives} - {probe.answer})
        )
        assert all(len(other) == len(probe.answer) for other in probe.alternatives)
        asked = probe.prompt.rindex("\n")
        assert not any(text in probe.prompt[asked:] for text in probe.wanted)
        assert 150 < len(tokenizer(probe.prompt)["input_ids"]) < 800
    assert len({probe.answer for probe in probes}) == 5
    again: Any = make_task(TaskSpec(name, data, prompt_tokens=150, seed=3), tokenizer)
    assert again.probe(3) == probes[3]
    other: Any = make_task(TaskSpec(name, data, prompt_tokens=150, seed=4), tokenizer)
    assert other.probe(3) != probes[3]
    longer: Any = make_task(TaskSpec(name, data, prompt_tokens=600), tokenizer)
    assert len(longer.probe(0).prompt) > len(probes[0].prompt) + 400


def test_needles_go_deeper_and_delayed_ids_stand_first(data: Path) -> None:
    tokenizer = tiny_tokenizer()
    task: Any = make_task(TaskSpec("needle", data, prompt_tokens=300), tokenizer)
    depths = []
    for index in range(5):
        probe = task.probe(index)
        depths.append(probe.evidence[0][0] / len(probe.prompt))
    assert depths == sorted(depths)
    assert depths[-1] - depths[0] > 0.4
    task = make_task(TaskSpec("delayed_reference", data, prompt_tokens=300), tokenizer)
    assert task.probe(0).prompt.startswith(f"The id of this document is{task.probe(0).answer}.\n")


def test_a_stage_asks_for_one_group_and_the_question_for_the_other(data: Path) -> None:
    task: Any = make_task(TaskSpec("stage_switch", data, prompt_tokens=300), tiny_tokenizer())
    probe = task.probe(0)
    [wanted] = probe.wanted
    facts, *stage, question = probe.prompt.split("\n")
    assert probe.prompt.count(wanted) == 1
    assert facts.count("The code of ") == 6
    asked = {line.rpartition("Answer: ")[2].rstrip(".") for line in stage}
    assert len(asked) == 3
    assert wanted not in asked
    assert question.startswith("Question: What is the code of ")


def uuid(number: int) -> str:
    return f"{number:08x}-0000-4000-8000-{number:012x}"


def test_ruler_s_rows(tmp_path: Path) -> None:
    lines = [
        f"One of the special magic uuids for {uuid(i)} is: {uuid(100 + i)}." for i in range(12)
    ]
    row = {"input": "\n".join(lines) + " What is it for 3? It is", "outputs": [uuid(103)]}
    probe = ruler_probe(row, random.Random(0))
    assert probe.answer == f" {uuid(103)}"
    assert {*probe.alternatives} < {f" {uuid(100 + i)}" for i in range(12) if i != 3}
    write(tmp_path, "ruler/niah_multikey_3_4096_first100.jsonl", [row])
    assert len(make_task(TaskSpec("ruler_multikey", tmp_path), tiny_tokenizer())) == 1
    with pytest.raises(EvalError, match="'outputs' must be one text of the input"):
        ruler_probe({**row, "outputs": ["x"]}, random.Random(0))
    short = {"input": "\n".join(lines[:4]), "outputs": [uuid(103)]}
    with pytest.raises(EvalError, match="must have more than 9 uuids, got 3"):
        ruler_probe(short, random.Random(0))


def test_a_retrieval_s_metrics(data: Path) -> None:
    tokenizer = tiny_tokenizer()
    model = tiny_llama(tokenizer)
    task: Any = make_task(TaskSpec("needle", data, prompt_tokens=60), tokenizer)
    probe = task.probe(1)
    wanted = settings(["full", "h2o"], [0.2], ["streamed"])
    results = {one.setting.policy: one.fields for one in task.run(model, [1], wanted)}
    assert results["full"]["metrics"]["evidence_kept"] == 1.0
    fields, metrics = results["h2o"], results["h2o"]["metrics"]
    assert 0 <= metrics["evidence_kept"] < 1
    assert metrics["first"] == float(metrics["rank"] == 1.0)
    assert 1 <= metrics["rank"] <= 1 + NUM_ALTERNATIVES
    assert metrics["exact"] == float(probe.wanted[0] in fields["texts"][0])
    ids = tokenizer(probe.prompt)["input_ids"]
    assert fields["seen"] == [len(ids) - 1]
    places = task._tokens_of(probe, [Request((1,), (2,))])
    assert tokenizer.decode([ids[place] for place in places]).strip() == probe.wanted[0]


def test_bad_haystacks_are_named(tmp_path: Path) -> None:
    write(tmp_path, "needle_haystack/paul_graham_essays.jsonl", [{"text": "no end"}])
    with pytest.raises(EvalError, match="must hold sentences, got none"):
        make_task(TaskSpec("needle", tmp_path), tiny_tokenizer())
    with pytest.raises(EvalError, match="prompt tokens must be >= 1, got 0"):
        make_task(TaskSpec("needle", tmp_path, prompt_tokens=0), tiny_tokenizer())
