"""`h2o-kv explain`: evidence in a prompt, when it left, verdicts, output, and one-line errors."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cli_runs import assert_matches, error_line
from h2o_kv import EvictionPolicy, H2OCache
from h2o_kv.cli import main
from h2o_kv.cli.explain import _parse_range
from h2o_kv.diagnostics import Span, explain, find_span, token_classes, token_texts
from h2o_kv.diagnostics.texts import decode
from h2o_kv.diagnostics.verdict import Answers, SpanFacts, overall, span_state, span_verdict
from h2o_kv.generation import CacheSpec
from h2o_kv.hf import cache_kwarg
from h2o_kv.policies import named, rules_of
from hf_models import set_attention, tiny_model, tokens
from model_files import TEXT, save_tiny_model, tiny_tokenizer

PROMPT = TEXT + "The first day was good."
EVIDENCE = "without form, and void"


# ---- Text and tokens.


@pytest.mark.parametrize(
    "piece", ["the earth was", "G", "created the heav", "é, ", "ñé", "x", "day"]
)
def test_a_piece_of_text_is_the_fewest_tokens_that_hold_it(piece: str) -> None:
    tokenizer = tiny_tokenizer()
    text = "In the beginning God created the heaven, and the earth was ñé, x day"
    ids = tokenizer(text)["input_ids"]
    whole, start = decode(tokenizer, ids), text.index(piece)
    assert whole == text
    first, last = find_span(tokenizer, ids, piece, name="piece")
    assert piece in decode(tokenizer, ids[first:last])
    # Byte-level tokens: the bytes before the first, and up to the last, say where each begins.
    sizes = [len(tokenizer.convert_ids_to_tokens(token)) for token in ids]
    begin = len(text[:start].encode())
    end = begin + len(piece.encode())
    assert sum(sizes[:first]) <= begin < sum(sizes[: first + 1])
    assert sum(sizes[: last - 1]) < end <= sum(sizes[:last])


def test_a_piece_that_is_not_there_once_is_refused() -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer("light: and light")["input_ids"]
    places = [i for i, text in enumerate(token_texts(tokenizer, ids)) if "l" in text]
    with pytest.raises(
        ValueError, match=r"piece must be in the prompt once, got 'l', .*tokens (.*)"
    ) as e:
        find_span(tokenizer, ids, "l", name="piece")
    assert [int(n) for n in re.findall(r"(\d+):", str(e.value))] == places
    with pytest.raises(ValueError, match="piece must be a piece of the prompt, got 'dark'"):
        find_span(tokenizer, ids, "dark", name="piece")
    with pytest.raises(ValueError, match="piece must not be empty"):
        find_span(tokenizer, ids, "", name="piece")


def test_token_classes() -> None:
    tokenizer = tiny_tokenizer()
    ids = [1, *tokenizer("God,\n 7 é; +")["input_ids"], 2]
    texts = token_texts(tokenizer, ids)
    found = token_classes(tokenizer, ids, sinks=2)
    assert found[:2] == ["sink", "sink"]
    assert found[-1] == "punctuation"  # the end of the text
    for text, name in zip(texts[2:-1], found[2:-1], strict=True):
        marks = {",": True, "\n": True, ";": True, "+": True, " ": True}.get(text.strip(" ") or " ")
        assert name == ("punctuation" if marks else "content"), text
    assert "content" in found and found.count("punctuation") >= 5
    assert token_classes(tokenizer, ids, sinks=0)[0] == "punctuation"  # the start of a text


# ---- Verdicts.

FACTS = SpanFacts(
    lost_share=0.8,
    attention_max=0.3,
    left=9,
    places=10,
    first_step=40,
    last_step=70,
    relative_margin=0.7,
)
ANSWERS = Answers(
    expected=True, full_right=True, policy_right=False, first_wrong=2, dropped=0.02, kl=1.5
)


@pytest.mark.parametrize(
    ("change", "state"),
    [
        ({}, "gone"),
        ({"lost_share": 0.5}, "gone"),
        ({"lost_share": 0.49}, "partly gone"),
        ({"lost_share": 0.1}, "partly gone"),
        ({"lost_share": 0.09}, "kept"),
        ({"attention_max": 0.009}, "unread"),
        ({"attention_max": 0.01}, "gone"),
    ],
)
def test_the_state_of_a_span(change: dict[str, Any], state: str) -> None:
    facts = replace(FACTS, **change)
    assert span_state(facts) == state
    assert span_verdict(facts).startswith(state)


@pytest.mark.parametrize(
    ("margin", "why"),
    [
        (0.05, "5% below the lowest that stayed (median): near the cutoff, a little more budget"),
        (0.3, "30% below the lowest that stayed (median): budget and scores both"),
        (0.7, "70% below the lowest that stayed (median): far below the cutoff"),
        (None, "no score had a say, the window passed over it"),
    ],
)
def test_why_a_span_left(margin: float | None, why: str) -> None:
    sentence = span_verdict(replace(FACTS, relative_margin=margin))
    assert "80.0% of that attention lost; it left 9 of 10" in sentence
    assert "first at step 40, last at step 70" in sentence
    assert why in sentence


@pytest.mark.parametrize(
    ("answers", "lost_share", "cause"),
    [
        ({"full_right": False}, 0.8, "the model:"),
        ({"full_right": False, "policy_right": True}, 0.0, "the model:"),
        ({"policy_right": True}, 0.0, "no fault: the evicting cache prefers the same answer"),
        ({"policy_right": True}, 0.8, "no fault: .*although evidence was lost"),
        ({}, 0.8, "scores or budget: evidence had left .* at token 2 of the answer .KL 1.5 nats"),
        ({}, 0.3, "scores or budget, in part"),
        ({"dropped": 0.1}, 0.0, "renormalisation: .* but 10.0% of the full cache's attention"),
        ({}, 0.0, "not the evidence: .* only 2.0%"),
    ],
)
def test_the_cause(answers: dict[str, Any], lost_share: float, cause: str) -> None:
    spans = [replace(FACTS, lost_share=0.0), replace(FACTS, lost_share=lost_share)]
    assert re.match(cause, overall(replace(ANSWERS, **answers), spans))


# ---- An explanation beside a plain run.


@pytest.mark.parametrize("prefill", ["one_shot", "streaming"])
def test_an_explanation_says_what_the_cache_did(prefill: str) -> None:
    net = tiny_model("llama", dtype=torch.float64)
    ids = tokens(1, 48, seed=2)[0].tolist()
    prompt, answer = ids[:40], ids[40:]
    policy = EvictionPolicy(num_heavy=10, num_recent=8)
    spec = CacheSpec(label="mine", policy=policy, prefill=prefill, prefill_chunk=6)
    spans = [Span(4, 7, "a"), Span(33, 35, "b"), Span(0, 40, "all")]
    found = explain(net, prompt, answer, spec, spans, expected=True)

    set_attention(net, "h2o")
    cache = H2OCache(net.config, policy, prefill=prefill, prefill_chunk=6)
    width = 40 if prefill == "one_shot" else 6
    left: dict[tuple[int, int, int], int] = {}
    with torch.no_grad():
        for first, last in [
            *((i, min(i + width, 40)) for i in range(0, 40, width)),
            *((i, i + 1) for i in range(40, 47)),
        ]:
            net(torch.tensor(ids[first:last])[None], **{cache_kwarg(net): cache})
            for number, layer in enumerate(cache.layers):
                for head, evicted in enumerate(layer.last_evicted[0].tolist()):
                    left |= {(number, head, p): last - 1 for p in evicted if p >= 0}
    set_attention(net, "eager")
    with torch.no_grad():
        attentions = net(torch.tensor(ids[:-1])[None], output_attentions=True).attentions

    for span, explained in zip(spans, found.spans, strict=True):
        lost = total = 0.0
        for at in explained.heads:
            heads = attentions[at.layer][0, 2 * at.head : 2 * at.head + 2, 39:]
            on_span = heads[..., span.first : span.last].sum(-1)
            assert at.attention_mean == pytest.approx(float(on_span.mean()), abs=1e-6)
            assert at.attention_max == pytest.approx(float(on_span.max()), abs=1e-6)
            assert [token.position for token in at.tokens] == list(range(span.first, span.last))
            for token in at.tokens:
                step = left.get((at.layer, at.head, token.position))
                assert token.left_at == step
                read = heads[..., token.position].sum(0)
                total += float(read.sum())
                if step is not None:
                    lost += float(read[max(0, step + 1 - 39) :].sum())
                    assert token.margin is not None and token.margin > 0
                else:
                    state = cache.layers[at.layer]
                    slot = state.positions[0, at.head].tolist().index(token.position)
                    assert token.score == pytest.approx(float(state.scores[0, at.head, slot]))
                    assert token.margin is None
        steps = [s for (_, _, p), s in left.items() if span.first <= p < span.last and s < 46]
        facts = explained.facts
        assert facts.lost_share == pytest.approx(lost / total, abs=1e-6)
        assert (facts.left, facts.places) == (len(steps), 4 * (span.last - span.first))
        assert (facts.first_step, facts.last_step) == (
            (min(steps), max(steps)) if steps else (None, None)
        )
        held = explained.held
        assert held.shape == (2, 47 - span.last + 1)
        # Those that left with the last step were still there for it.
        for number in range(2):
            gone = [
                step
                for (layer_idx, _, position), step in left.items()
                if layer_idx == number and span.first <= position < span.last and step < 46
            ]
            share = 1 - len(gone) / (2 * (span.last - span.first))
            assert float(held[number, -1]) == pytest.approx(share)
    assert any(span.facts.left for span in found.spans)
    assert 46 in left.values()
    assert len(found.answer_dropped) == len(found.answer_dropped_worst) == 8
    assert found.answers.full_right == (found.replay.full.top.tolist() == answer)


def test_with_room_for_all_nothing_is_lost_and_the_answers_are_the_same() -> None:
    net = tiny_model("llama", dtype=torch.float64)
    prompt = tokens(1, 30)[0].tolist()
    spec = CacheSpec(label="ample", policy=EvictionPolicy(num_heavy=30, num_recent=30))
    first = explain(net, prompt, [5, 6, 7], spec, [Span(2, 4, "")])
    # The model's own answer, token by token, since its greedy text is what it prefers.
    answer = [int(first.replay.full.top[0])]
    for _ in range(2):
        answer.append(
            int(explain(net, prompt, [*answer, 5], spec, [Span(2, 4, "")]).replay.full.top[-1])
        )
    found = explain(net, prompt, answer, spec, [Span(2, 4, "")], expected=False)
    assert found.verdict == "no fault: the evicting cache prefers the same answer"
    assert found.answer_dropped == (0, 0, 0)
    assert found.spans[0].state in ("kept", "unread")
    assert all(head.kept == 2 for head in found.spans[0].heads)
    assert bool((found.spans[0].held == 1).all())


@pytest.mark.parametrize(
    ("prompt", "answer", "spans", "message"),
    [
        ([], [1], [Span(0, 1, "")], "prompt_ids must have at least one element, got 0"),
        ([1], [], [Span(0, 1, "")], "answer_ids must have at least one element, got 0"),
        ([1], [1], [], "spans must have at least one element, got 0"),
        ([1, 2], [1], [Span(1, 3, "")], "0 <= first < last <= 2, got 1:3"),
        ([1, 2], [1], [Span(1, 1, "")], "got 1:1"),
    ],
)
def test_explain_refuses_bad_arguments(
    prompt: list[int], answer: list[int], spans: list[Span], message: str
) -> None:
    spec = CacheSpec(label="h2o", policy=EvictionPolicy(num_heavy=1, num_recent=1))
    with pytest.raises(ValueError, match=message):
        explain(tiny_model("llama"), prompt, answer, spec, spans)


# ---- The command.


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("model")))


def arguments(folder: str, *options: str) -> list[str]:
    return ["explain", "--model", folder, "--prompt", PROMPT, *options]


def run_json(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    assert main([*options, "--json"]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def test_the_report_in_json(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--evidence", EVIDENCE, "--evidence-tokens", "3:5", "--answer", " And God")
    report = run_json(capsys, *arguments(folder, *options, "--policy", "h2o", "--slots", "20"))
    tokenizer = tiny_tokenizer()
    ids = tokenizer(PROMPT)["input_ids"]
    assert report["prompt_tokens"] == len(ids)
    assert report["policy"] == {
        "name": "h2o",
        "num_sink": 0,
        "num_heavy": 10,
        "num_recent": 10,
        "budget": 20,
        "gqa_reduce": "sum",
        "prefill": "one_shot",
        "prefill_chunk": 64,
    }
    answer = report["answer"]
    assert answer["token_ids"] == tokenizer(" And God")["input_ids"]
    assert (answer["expected"], answer["text"]) == (True, " And God")
    count = len(answer["token_ids"])
    for name in ("full_nll", "policy_nll", "kl", "dropped", "dropped_worst"):
        assert len(answer[name]) == count
    assert answer["dropped"][0] == 0  # a one-shot prefill sees all of the prompt
    assert answer["kl"][0] == pytest.approx(0, abs=1e-5)
    first, second = report["spans"]
    assert (first["text"], second["first"], second["last"]) == (EVIDENCE, 3, 5)
    assert EVIDENCE in decode(tokenizer, ids[first["first"] : first["last"]])
    assert [(h["layer"], h["head"]) for h in first["heads"]] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for head in first["heads"]:
        assert head["kept"] == sum(token["left_at"] is None for token in head["tokens"])
        for token in head["tokens"]:
            assert (token["margin"] is None) == (token["left_at"] is None)
            assert token["left_at"] in (None, *range(len(ids) - 1, len(ids) + count))
    assert report["verdict"].startswith("the model:") == (not answer["full_right"])


def test_without_an_answer_it_is_the_full_caches(
    folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--evidence", EVIDENCE, "--policy", "streaming", "--max-new-tokens", "5")
    report = run_json(capsys, *arguments(folder, *options))
    assert report["answer"]["expected"] is False
    assert report["answer"]["full_right"] is True
    assert len(report["answer"]["token_ids"]) <= 5
    assert report["policy"]["num_sink"] == 4
    assert report["policy"]["budget"] == report["prompt_tokens"] // 5  # a ratio of 0.2


def test_a_config_has_the_policy(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.json"
    policy = {"num_sink": 1, "heavy": {"size": 6}, "recent": {"ratio": 0.1}, "gqa_reduce": "max"}
    run = {"prefill": "streaming", "prefill_chunk": 8}
    config.write_text(
        json.dumps({"model": {"name": folder}, "policy": policy, "run": run}), encoding="utf-8"
    )
    options = (
        "--prompt",
        PROMPT,
        "--evidence",
        EVIDENCE,
        "--answer",
        " a",
        "--config",
        str(config),
    )
    report = run_json(capsys, "explain", *options)
    found = report["policy"]
    recent = report["prompt_tokens"] // 10
    assert (found["num_sink"], found["num_heavy"], found["num_recent"]) == (1, 6, recent)
    assert (found["prefill"], found["prefill_chunk"]) == ("streaming", 8)
    named = run_json(capsys, "explain", *options, "--policy", "local", "--ratio", "0.1")["policy"]
    assert (named["num_heavy"], named["num_recent"]) == (0, recent)
    assert named["prefill_chunk"] == 8


def test_the_tables(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = arguments(folder, "--evidence", EVIDENCE, "--answer", " And God", "--policy", "local")
    report = run_json(capsys, *options)
    assert main(options) == 0
    by_layer = capsys.readouterr().out
    assert main([*options, "--heads"]) == 0
    by_head = capsys.readouterr().out
    (span,) = report["spans"]
    for out, rows in ((by_layer, 2), (by_head, 4)):
        assert f"evidence '{EVIDENCE}', tokens {span['first']}:{span['last']}" in out
        assert span["verdict"] in out
        assert f"verdict: {report['verdict']}" in out
        cells = re.findall(r"^ +\d+ .*\d+ of \d+ .*$", out, re.MULTILINE)
        assert len(cells) == rows
    assert re.search(r"^ +0 +0 of \d+ ", by_layer, re.MULTILINE)  # all of it left
    assert "answer (expected): ' And God'" in by_layer


def test_a_plot(folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "plot.png"
    # A dollar sign would begin a formula in a title.
    options = ("--prompt", TEXT + "$x_{ and $", "--evidence", "$x_{", "--answer", " a")
    assert (
        main(["explain", "--model", folder, *options, "--policy", "h2o", "--plot", str(file)]) == 0
    )
    assert file.read_bytes().startswith(b"\x89PNG")
    options = arguments(folder, "--evidence", EVIDENCE, "--answer", " a", "--policy", "h2o")
    capsys.readouterr()
    line = _last_error([*options, "--plot", str(tmp_path / "plot.nothing")], capsys)
    assert_matches(r"h2o-kv explain: --plot: Format 'nothing' is not supported .*", line)
    line = _last_error([*options, "--plot", str(tmp_path / "none" / "plot.png")], capsys)
    assert_matches(
        r"h2o-kv explain: --plot must be a file in a folder that is there, got .*none/plot.png",
        line,
    )


def test_a_plot_without_matplotlib(
    folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    options = arguments(folder, "--evidence", EVIDENCE, "--policy", "h2o", "--plot", "x.png")
    line = error_line(options, capsys)
    assert line == 'h2o-kv explain: plots need matplotlib: pip install "h2o-kv[bench]"'


def _last_error(options: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What a call that must fail says after its progress."""
    assert main(options) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--policy or --config must be given, got neither"),
        (["--slots", "4"], "--policy or --config must be given, got neither"),
        *(
            (["--policy", name], f"argument --policy: invalid choice: '{re.escape(name)}' .*")
            for name in ("full", "oracle", "streaming-rolling", "top-k", "quest", "h2o+quest")
        ),
        (["--policy", "h2o", "--slots", "0"], "--slots must be >= 1, got 0"),
        (["--policy", "h2o", "--ratio", "1.5"], "--ratio must be > 0 and <= 1, got 1.5"),
        (["--policy", "h2o", "--ratio", "0.1", "--slots", "3"], "argument --slots: not allowed .*"),
        (["--policy", "h2o"], "--evidence or --evidence-tokens must be given, got neither"),
        (
            ["--policy", "h2o", "--evidence-tokens", "3"],
            "argument --evidence-tokens: must be FIRST:LAST, as in 12:15, got '3' .*",
        ),
        (
            ["--policy", "h2o", "--evidence", "x", "--max-new-tokens", "0"],
            "--max-new-tokens: run.max_new_tokens must be .*, got 0",
        ),
        (
            ["--policy", "h2o", "--evidence", "x", "--prefill-chunk", "0"],
            "--prefill-chunk: run.prefill_chunk must be .*, got 0",
        ),
        (
            ["--config", "/no/file", "--slots", "3"],
            "--slots and --ratio are of a --policy, got none",
        ),
    ],
)
def test_a_wrong_option_is_one_line(
    options: list[str], message: str, folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_matches(f"h2o-kv explain: {message}", error_line(arguments(folder, *options), capsys))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--evidence", "no such words"],
            "--evidence must be a piece of the prompt, got 'no such words'",
        ),
        (
            ["--evidence", "God"],
            r"--evidence must be in the prompt once, got 'God', .* \d+:\d+, \d+.*",
        ),
        (
            ["--evidence-tokens", "5:5"],
            r"--evidence-tokens must be 0 <= FIRST < LAST <= \d+, .* 5:5",
        ),
        (["--evidence-tokens", "5:9999"], r"--evidence-tokens must be .* got 5:9999"),
        (["--evidence", "void", "--answer", ""], "--answer must have at least one token, .*"),
    ],
)
def test_wrong_evidence_is_one_line(
    options: list[str], message: str, folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = error_line(arguments(folder, "--policy", "h2o", *options), capsys)
    assert_matches(f"h2o-kv explain: {message}", line)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["scissorhands"],
            "--prefill must be streaming and --prefill-chunk 1 with --policy scissorhands, got "
            "one_shot and 64",
        ),
        (
            ["scissorhands", "--prefill", "streaming"],
            "--prefill must be streaming and --prefill-chunk 1 with --policy scissorhands, got "
            "streaming and 64",
        ),
        (
            ["snapkv", "--prefill", "streaming"],
            "--prefill must be one_shot with --policy snapkv, got streaming",
        ),
    ],
)
def test_a_prefill_that_a_policy_does_not_have_is_one_line(
    options: list[str], message: str, folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = arguments(folder, "--evidence", EVIDENCE, "--policy", *options)
    assert error_line(options, capsys) == f"h2o-kv explain: {message}"


@pytest.mark.parametrize("name", ["strided", "fixed+h2", "mean"])
def test_a_policy_of_a_pattern_or_with_another_order(
    name: str, folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = arguments(folder, "--evidence", EVIDENCE, "--policy", name, "--slots", "9", "--json")
    assert main(options) == 0
    report = json.loads(capsys.readouterr().out)
    made = named(name).with_slots(9, length=report["prompt_tokens"] + 16)
    assert made is not None
    rules = rules_of(made)
    assert {key: report["policy"][key] for key in rules} == rules
    left = [
        token
        for head in report["spans"][0]["heads"]
        for token in head["tokens"]
        if token["margin"] is not None
    ]
    assert left and all(token["margin"] >= 0 for token in left)


def test_a_prompt_must_be_given(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = error_line(["explain", "--model", folder, "--policy", "h2o"], capsys)
    assert "one of the arguments --prompt --prompt-file is required" in line


def test_a_range() -> None:
    assert _parse_range("12:15") == (12, 15)
    for text in ("", "1", "1:2:3", "a:b"):
        with pytest.raises(argparse.ArgumentTypeError, match="must be FIRST:LAST"):
            _parse_range(text)


# ---- The script.


@pytest.mark.skipif(
    not (Path(__file__).parents[2] / "benchmarks").exists(), reason="there are no benchmarks here"
)
def test_the_script_writes_what_it_measures(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    text = tmp_path / "text.txt"
    text.write_text(PROMPT * 2, encoding="utf-8")
    out = tmp_path / "out"
    script = importlib.import_module("diagnose")
    options = [str(text), "--model", folder, "--quick", "--tokens", "60", "--log-tokens", "40"]
    assert script.main([*options, "--log-rate", "1", "--out", str(out)]) == 0
    report = capsys.readouterr().out
    assert (out / "results.md").read_text(encoding="utf-8") == report
    results = json.loads((out / "results.json").read_text(encoding="utf-8"))
    assert (results["tokens"], results["slots"], len(results["layers"])) == (60, 12, 2)
    assert list(results["policies"]) == ["h2o", "local"]
    assert results["policies"]["local"]["promotion_rate"] == 0
    assert 0 < results["policies"]["h2o"]["promotion_rate"] < 1
    # Steps 12 to 59, two layers of four heads.
    kept = results["policies"]["h2o"]["dropped"]["kept"]
    assert (kept["count"], kept["low"] <= kept["p1"] <= kept["mean"]) == (48 * 8, True)
    sparsity = sum(layer["sparsity"] for layer in results["layers"]) / 2
    assert f"| sparsity | {sparsity:.3f} |" in report
    *_, last = (out / "evictions.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(last) == {"event": "end", "evictions": 4 * 32, "written": 4 * 32}
    if importlib.util.find_spec("matplotlib"):
        assert sorted(f.stem for f in out.glob("*.png")) == ["attention", "dropped", "freeze"]
    short = [*options, "--tokens", "9999", "--out", str(tmp_path / "none")]
    assert script.main(short) == 2
    assert "the text must have more than --tokens=9999 tokens" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
