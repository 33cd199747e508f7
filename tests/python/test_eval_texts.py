"""Texts: conversations of batches, prompts of summaries and dialogues, and their metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from h2o_kv import EvictionPolicy, H2OCache
from h2o_kv.eval import EvalError, Setting, TaskSpec, make_task, markdown, settings, summarise
from h2o_kv.eval.decoding import Conversation
from h2o_kv.eval.text_metrics import distinct, longest_repeat, rouge, self_bleu
from hf_models import forward, generate, kept, tiny_model, tokens
from model_files import CHAT_TEMPLATE, tiny_llama, tiny_tokenizer
from test_eval_choices import write

FULL = Setting("full", 1.0, "full")


def greedy(model: Any, cache: H2OCache, ids: list[int], limit: int, end: int) -> list[int]:
    """What follows `ids` on a cache, a token at a time through `forward`."""
    logits, new = forward(model, torch.tensor([ids]), cache)[0, -1], []
    while True:
        new.append(int(logits.argmax()))
        if len(new) == limit or new[-1] == end:
            return new
        logits = forward(model, torch.tensor([new[-1:]]), cache)[0, -1]


@pytest.mark.parametrize("prefill", ["one_shot", "streamed"])
def test_a_row_that_ends_early_goes_on_as_it_would_alone(prefill: str) -> None:
    model = tiny_model("llama", dtype=torch.float64)
    prompts = [tokens(1, length, seed=length)[0].tolist() for length in (12, 25, 7)]
    second = [tokens(1, length, seed=30 + length)[0].tolist() for length in (3, 5, 9)]
    setting, sizes = Setting("h2o", 0.25, prefill), [40, 60, 24]
    options: dict[str, Any] = {"prefill": "one_shot"}
    if prefill == "streamed":
        options = {"prefill": "streaming", "prefill_chunk": 1}

    def alone(row: int, end: int) -> tuple[list[int], list[int], H2OCache]:
        slots = sizes[row] // 4
        policy = EvictionPolicy(num_heavy=slots // 2, num_recent=slots - slots // 2)
        cache = H2OCache(model.config, policy, **options)
        first = greedy(model, cache, prompts[row], 10, end)
        return first, greedy(model, cache, [first[-1], *second[row]], 10, end), cache

    # A token that ends the rows at different times.
    lengths: dict[int, list[int]] = {
        end: [len(alone(row, end)[0]) for row in range(3)]
        for end in {token for row in range(3) for token in alone(row, -1)[0]}
    }
    end = max(lengths, key=lambda token: len(set(lengths[token])))
    assert len(set(lengths[end])) >= 2

    talk = Conversation(model, prompts, sizes, setting, ends=[end])
    turns = [talk.generate(10)]
    talk.say(second)
    turns.append(talk.generate(10))
    for row in range(3):
        first, then, cache = alone(row, end)
        assert [turn[row] for turn in turns] == [first, then]
        use = talk.uses()[row]
        assert (use.kept, use.seen) == (sizes[row] // 4, int(cache.layers[0].tokens_seen))
        assert kept(talk.cache, row) == kept(cache, 0)


def test_a_full_cache_talks_as_transformers_does() -> None:
    model = tiny_model("llama", dtype=torch.float64)
    prompts = [tokens(1, length, seed=length)[0].tolist() for length in (12, 25)]
    talk = Conversation(model, prompts, [1, 1], FULL, ends=[])
    got = talk.generate(8)
    model.set_attn_implementation("sdpa")
    for prompt, new in zip(prompts, got, strict=True):
        want = generate(model, torch.tensor([prompt]), None, new=8, eos_token_id=None)
        assert new == want[0].tolist()
    assert [use.seen for use in talk.uses()] == [19, 32]


def test_rows_of_a_full_cache_do_not_see_each_other_s_padding() -> None:
    model = tiny_model("llama", dtype=torch.float64)
    prompts = [tokens(1, length, seed=length)[0].tolist() for length in (12, 25)]
    free = Conversation(model, prompts, [1, 1], FULL, ends=[]).generate(10)
    ends = [free[0][2]]
    batch = Conversation(model, prompts, [1, 1], FULL, ends=ends)
    turns = [batch.generate(10)]
    batch.say([[7, 8], [9]])
    turns.append(batch.generate(10))
    for row, said in enumerate(([7, 8], [9])):
        alone = Conversation(model, [prompts[row]], [1], FULL, ends=ends)
        assert [turns[0][row]] == alone.generate(10)
        alone.say([said])
        assert [turns[1][row]] == alone.generate(10)
        assert batch.uses()[row] == alone.uses()[0]


@pytest.mark.parametrize("ends", [[2], []])
def test_a_row_that_a_text_stops_is_what_it_is_alone(ends: list[int]) -> None:
    tokenizer = tiny_tokenizer()
    model = tiny_llama(tokenizer)
    texts = ("In the beginning God", "And the earth was without form", "light darkness")
    prompts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]

    def said(rows: list[list[int]], **stop: Any) -> list[list[int]]:
        talk = Conversation(model, rows, [40] * len(rows), FULL, ends=ends)
        return talk.generate(12, **stop)

    free = [said([prompt])[0] for prompt in prompts]
    # A token of one row alone that is a text for itself: it stops that row, and the others go on.
    row, place = next(
        (row, place)
        for row, tokens in enumerate(free)
        for place, token in enumerate(tokens[:8])
        if tokenizer.decode([token]).strip().isalpha()
        and sum(tokenizer.decode([token]) in tokenizer.decode(other) for other in free) == 1
    )
    expected = list(free)
    expected[row] = free[row][: place + 1]
    stop = tokenizer.decode(free[row][place : place + 1])
    assert said(prompts, stop=stop, tokenizer=tokenizer) == expected


def test_empty_prompts_are_refused() -> None:
    model = tiny_model("llama")
    for prompts in ([], [[5], []]):
        with pytest.raises(EvalError, match="at least one token each"):
            Conversation(model, prompts, [1, 1], FULL, ends=[])


# ---- Metrics


def test_rouge_by_hand() -> None:
    pytest.importorskip("rouge_score")
    reference = "the cat sat on the mat"
    got = rouge("the cat sat", [reference])
    # Precision 1 and recall 3/6; 2 of 2 and 2 of 5 pairs; the longest common sequence has 3 words.
    assert got == pytest.approx({"rouge1": 2 / 3, "rouge2": 4 / 7, "rougeL": 2 / 3})
    assert rouge("the cats sat", [reference])["rouge1"] == pytest.approx(2 / 3)  # stemmed
    best = rouge("a dog", [reference, "a dog ran"])
    assert best["rouge1"] == pytest.approx(0.8)


def test_self_bleu_by_hand() -> None:
    pytest.importorskip("sacrebleu")
    assert self_bleu(["a b c d e"] * 3) == pytest.approx(100)
    # 3/4, 2/3, 1/2 and, of one 4-gram that is not there, 1/2 after smoothing.
    want = 100 * (3 / 4 * 2 / 3 * 1 / 2 * 1 / 2) ** 0.25
    assert self_bleu(["a b c d", "a b c e"]) == pytest.approx(want)
    with pytest.raises(EvalError, match="at least two texts, got 1"):
        self_bleu(["a"])


def test_repetition_by_hand() -> None:
    assert distinct("a b a b", 1) == 0.5
    assert distinct("a b a b", 2) == pytest.approx(2 / 3)
    assert distinct("a", 2) == 1.0
    assert longest_repeat("the cat sat on the cat sat") == 3
    assert longest_repeat("a a a a") == 3
    assert longest_repeat("all words differ") == 0
    assert longest_repeat("") == 0


# ---- Tasks


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rows = [
        {"article": f"###\nArticle: light {i}.\n\nSum.\n", "summary_gt": "the light"}
        for i in range(2)
    ]
    write(tmp_path, "xsum/xsum_0shot_first200.jsonl", rows)
    write(
        tmp_path,
        "cnn_dailymail/validation_15.jsonl",
        [{"article": "Waters.", "highlights": "the waters"}],
    )
    turns = [["And God said", "light"], ["the heaven and the earth", "was without form"], ["void"]]
    write(tmp_path, "mt_bench/question.jsonl", [{"turns": turn} for turn in turns])
    return tmp_path


def test_summaries_are_asked_for_as_in_helm(data: Path) -> None:
    tokenizer = tiny_tokenizer()
    task: Any = make_task(TaskSpec("cnn_dailymail", data), tokenizer)
    said = task._format.turns(task._rows[0])
    assert said == ["###\nArticle: Waters.\n\nSummarize the above article in 3 sentences.\n"]
    assert tokenizer.decode(task._first(said[0])) == said[0]
    task = make_task(TaskSpec("xsum", data), tokenizer)
    assert task._format.turns(task._rows[1]) == ["###\nArticle: light 1.\n\nSum.\n"]
    assert task._text(tokenizer(" a summary. ### Article")["input_ids"]) == "a summary."


def test_summaries_have_rouge(data: Path) -> None:
    pytest.importorskip("rouge_score")
    tokenizer = tiny_tokenizer()
    task = make_task(TaskSpec("xsum", data, new_tokens=5), tokenizer)
    results = list(
        task.run(tiny_llama(tokenizer), [0, 1], settings(["full", "h2o"], [0.2], ["streamed"]))
    )
    assert sorted((one.example, one.setting.policy) for one in results) == [
        (0, "full"),
        (0, "h2o"),
        (1, "full"),
        (1, "h2o"),
    ]
    for one in results:
        assert one.fields["metrics"] == {
            **rouge(one.fields["texts"][0], ["the light"]),
            "new_tokens": one.fields["metrics"]["new_tokens"],
        }
        assert 1 <= one.fields["metrics"]["new_tokens"] <= 5
        assert (one.fields["evicted"][0] > 0) == (one.setting.policy == "h2o")


@pytest.mark.parametrize("template", [None, CHAT_TEMPLATE])
def test_dialogues_go_through_the_chat_template(data: Path, template: str | None) -> None:
    pytest.importorskip("sacrebleu")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    task: Any = make_task(TaskSpec("mt_bench", data, new_tokens=6), tokenizer)
    first = tokenizer.decode(task._first("And God said"))
    then = tokenizer.decode(task._next("light", [5], [2]))
    assert (first, then) == (
        ("And God said", "\nlight\n") if template is None else ("<s>And God said", "<s>light")
    )
    model = tiny_llama(tokenizer)
    rows = []
    for one in task.run(model, [0, 1, 2], settings(["full", "h2o"], [0.3], ["one_shot"])):
        turns = 1 if one.example == 2 else 2
        assert len(one.fields["texts"]) == turns
        names = {"model": "tiny", "dtype": "float32", "task": "mt_bench", "data": "0"}
        setting = {name: getattr(one.setting, name) for name in ("policy", "ratio", "prefill")}
        rows.append(
            {
                **names,
                **setting,
                "options": {},
                "prompt_format": "",
                "index": one.example,
                **one.fields,
            }
        )
    [group] = summarise(rows)
    answers = [row["texts"][-1] for row in rows if row["policy"] == "full"]
    assert group.points[0].together["self_bleu"] == pytest.approx(self_bleu(answers))
    assert f"| {self_bleu(answers):.3f} |" in markdown([group])


def test_a_template_s_end_of_an_answer_is_said_once(data: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}<s>{{ m['content'] }}</s>{% endfor %}"
    task: Any = make_task(TaskSpec("mt_bench", data), tokenizer)
    assert tokenizer.decode(task._next("light", [9, 2], [2])) == "<s>light</s>"
    assert tokenizer.decode(task._next("light", [9, 8], [2])) == "</s><s>light</s>"


def test_bad_rows_and_lengths_are_named(data: Path) -> None:
    tokenizer = tiny_tokenizer()
    with pytest.raises(EvalError, match="new tokens must be >= 1, got 0"):
        make_task(TaskSpec("xsum", data, new_tokens=0), tokenizer)
    write(data, "mt_bench/question.jsonl", [{"turns": []}])
    with pytest.raises(
        EvalError, match=r"question.jsonl: row 0: field 'turns' must be a list of texts"
    ):
        make_task(TaskSpec("mt_bench", data), tokenizer)
