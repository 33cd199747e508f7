# ruff: noqa: E402
"""Our model of lm-evaluation-harness, through its own tasks, beside its own model and our scores."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

lm_eval = pytest.importorskip("lm_eval")

from lm_eval.api.registry import get_model
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from h2o_kv.eval import EvalError, Request, Setting, encode_pair, score, settings
from h2o_kv.eval.decoding import Conversation
from h2o_kv.eval.lm_eval_model import H2OLM
from model_files import TEXT, save_tiny_model, tiny_llama, tiny_tokenizer
from test_eval_choices import write

WORDS = ("light", "darkness", "the deep", "waters", "heaven and the earth", "form")
CHOICE = """
task: tiny_choice
dataset_path: json
dataset_kwargs:
  data_files: {test: FILE}
  cache_dir: CACHE
test_split: test
output_type: multiple_choice
doc_to_text: "And God called the {{first}}"
doc_to_choice: "{{choices}}"
doc_to_target: label
metric_list:
  - metric: acc
  - metric: acc_norm
"""
ROLLING = """
task: tiny_rolling
dataset_path: json
dataset_kwargs:
  data_files: {test: FILE}
  cache_dir: CACHE
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - metric: word_perplexity
"""
UNTIL = """
task: tiny_until
dataset_path: json
dataset_kwargs:
  data_files: {test: FILE}
  cache_dir: CACHE
test_split: test
output_type: generate_until
doc_to_text: "And God called the {{first}}"
doc_to_target: "{{first}}"
generation_kwargs: {until: ["~"], max_gen_toks: 6, do_sample: false}
metric_list:
  - metric: exact_match
"""


@pytest.fixture(scope="module")
def task_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    rows: list[dict[str, Any]] = [
        {
            "first": WORDS[i],
            "choices": [*WORDS[i % 3 : i % 3 + 3]],
            "label": i % 3,
            "text": TEXT[: 60 + 9 * i],
        }
        for i in range(6)
    ]
    file = write(folder, "rows.jsonl", rows)
    for text in (CHOICE, ROLLING, UNTIL):
        name = text.split()[1]
        text = text.replace("FILE", str(file)).replace("CACHE", str(folder / "cache"))
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def tasks(task_folder: Path) -> TaskManager:
    return TaskManager(include_path=str(task_folder), include_defaults=False)


@pytest.fixture(scope="module")
def parts() -> dict[str, Any]:
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    return {"pretrained": tiny_llama(tokenizer), "tokenizer": tokenizer}


def run(model: Any, manager: TaskManager, name: str) -> Any:
    return lm_eval.simple_evaluate(
        model=model,
        tasks=[name],
        task_manager=manager,
        log_samples=True,
        bootstrap_iters=0,
        batch_size=3,
    )


def responses(results: Any, name: str) -> list[Any]:
    samples = sorted(results["samples"][name], key=lambda sample: sample["doc_id"])
    return [response for sample in samples for response in sample["filtered_resps"]]


@pytest.mark.parametrize("name", ["tiny_choice", "tiny_rolling"])
def test_a_full_cache_gives_what_their_model_gives(
    name: str, tasks: TaskManager, parts: dict[str, Any]
) -> None:
    theirs = run(HFLM(**parts, batch_size=3), tasks, name)
    ours = run(H2OLM(**parts, policy="full", batch_size=3), tasks, name)
    for mine, other in zip(responses(ours, name), responses(theirs, name), strict=True):
        if name == "tiny_rolling":
            mine, other = (mine, None), (other, None)
        assert mine[0] == pytest.approx(other[0], abs=2e-4)
        assert mine[1] == other[1]
    for metric, value in theirs["results"][name].items():
        if isinstance(value, float):
            assert ours["results"][name][metric] == pytest.approx(value, rel=1e-4)


def test_a_full_cache_is_their_code_in_16_bits_too() -> None:
    """Their sums are rounded there, and `max_length` may be beyond the model's config."""
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    options = {
        "pretrained": tiny_llama(tokenizer).bfloat16(),
        "tokenizer": tokenizer,
        "max_length": 700,
    }
    requests = [(None, [5, 9, 7] * length, [5, 6, 7]) for length in (3, 100, 200)]
    theirs, ours = (
        model._loglikelihood_tokens(requests, disable_tqdm=True)
        for model in (HFLM(**options), H2OLM(**options, policy="full"))
    )
    assert ours == theirs


@pytest.mark.parametrize("policy", ["top-k", "strided", "h2o"])
def test_texts_of_a_batch_are_those_of_each_row(
    policy: str, tasks: TaskManager, parts: dict[str, Any]
) -> None:
    """Rows of other lengths read another number of slots, or have another stride."""
    alone, together = (
        run(H2OLM(**parts, policy=policy, ratio=0.4, batch_size=size), tasks, "tiny_until")
        for size in (1, 4)
    )
    assert responses(alone, "tiny_until") == responses(together, "tiny_until")


def test_texts_of_a_full_cache_are_theirs(tasks: TaskManager, parts: dict[str, Any]) -> None:
    theirs = run(HFLM(**parts, batch_size=3), tasks, "tiny_until")
    ours = run(H2OLM(**parts, policy="full", batch_size=3), tasks, "tiny_until")
    assert responses(ours, "tiny_until") == responses(theirs, "tiny_until")


@pytest.mark.parametrize("prefill", ["streamed", "one_shot"])
def test_a_policy_gives_what_our_scores_are(
    prefill: str, tasks: TaskManager, parts: dict[str, Any]
) -> None:
    results = run(H2OLM(**parts, policy="h2o", ratio=0.4, prefill=prefill), tasks, "tiny_choice")
    [setting] = settings(["h2o"], [0.4], [prefill])
    requests = [
        encode_pair(parts["tokenizer"], f"And God called the {WORDS[i]}", f" {choice}")
        for i in range(6)
        for choice in WORDS[i % 3 : i % 3 + 3]
    ]
    want = score(parts["pretrained"], requests, setting)
    assert all(one.use.evicted > 0 for one in want)
    for got, one in zip(responses(results, "tiny_choice"), want, strict=True):
        assert got[0] == pytest.approx(one.log_prob, abs=1e-4)
        assert got[1] == one.is_greedy


def test_texts_of_a_policy_are_those_of_a_conversation(
    tasks: TaskManager, parts: dict[str, Any]
) -> None:
    ours = run(H2OLM(**parts, policy="h2o", ratio=0.4), tasks, "tiny_until")
    tokenizer = parts["tokenizer"]
    for word, got in zip(WORDS, responses(ours, "tiny_until"), strict=True):
        ids = tokenizer(f"And God called the {word}", add_special_tokens=False)["input_ids"]
        setting = Setting("h2o", 0.4, "streamed")
        talk = Conversation(parts["pretrained"], [ids], [len(ids) + 6], setting, ends=[2])
        [new] = talk.generate(6)
        assert got == tokenizer.decode(new, skip_special_tokens=True)


def test_a_long_context_is_cut_on_the_left(parts: dict[str, Any]) -> None:
    model = H2OLM(**parts, policy="h2o", ratio=0.4, max_length=20)
    context, rest = list(range(3, 40)), [5, 6]
    [(got, _)] = model._loglikelihood_tokens([(None, context, rest)], disable_tqdm=True)
    request = Request(tuple(context[-19:]), tuple(rest))
    [want] = score(parts["pretrained"], [request], model.setting)
    assert got == pytest.approx(want.log_prob, abs=1e-4)


def test_a_continuation_longer_than_the_model_is_refused(parts: dict[str, Any]) -> None:
    model = H2OLM(**parts, policy="h2o", ratio=0.4, max_length=20)
    with pytest.raises(EvalError, match="must be <= max_length = 20 tokens, got 21"):
        model._loglikelihood_tokens([(None, [3], list(range(3, 24)))], disable_tqdm=True)


def test_their_command_line_runs_it(task_folder: Path, tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "h2o_kv.eval.lm_eval_model", "run", "--model", "h2o"),
            *("--model_args", f"pretrained={folder},policy=h2o,ratio=0.4,batch_tokens=100"),
            *("--tasks", "tiny_choice", "--include_path", str(task_folder)),
            *("--device", "cpu", "--limit", "2"),
        ],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "|tiny_choice|" in done.stdout
    assert "'policy': 'h2o', 'ratio': 0.4" in done.stdout


def test_it_is_registered_and_refuses_what_is_no_setting(parts: dict[str, Any]) -> None:
    assert get_model("h2o") is H2OLM
    with pytest.raises(EvalError, match="got 'h3o'"):
        H2OLM(**parts, policy="h3o")
    with pytest.raises(EvalError, match=r"in \(0, 1\], got 2"):
        H2OLM(**parts, ratio=2)
