"""Prompts of the multiple-choice tasks, letter by letter, and their shots."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from h2o_kv.eval import EvalError, TaskSpec, encode_pair, make_task
from h2o_kv.eval.choices import CHOICE_FORMATS, ChoiceData
from model_files import tiny_tokenizer

# Row, then context and continuation of each choice, and the true one.
FORMATS: dict[str, tuple[dict[str, Any], list[tuple[str, str]], int]] = {
    "copa": (
        {
            "premise": "The man turned on the faucet.",
            "choice1": "The toilet filled with water.",
            "choice2": "Water flowed from the spout.",
            "question": "effect",
            "label": 1,
        },
        [
            ("The man turned on the faucet therefore", " the toilet filled with water."),
            ("The man turned on the faucet therefore", " water flowed from the spout."),
        ],
        1,
    ),
    "piqa": (
        {"goal": "boil eggs", "sol1": "use water.", "sol2": "use sand.", "label": 0},
        [
            ("Question: boil eggs\nAnswer:", " use water."),
            ("Question: boil eggs\nAnswer:", " use sand."),
        ],
        0,
    ),
    "openbookqa": (
        {"question_stem": "The sun is", "choices": ["a star", "a fish"], "label": 0},
        [("The sun is", " a star"), ("The sun is", " a fish")],
        0,
    ),
    "rte": (
        {"premise": "It rained.", "hypothesis": "It was wet.", "label": "not_entailment"},
        [
            ("It rained.\nQuestion: It was wet. True or False?\nAnswer:", " True"),
            ("It rained.\nQuestion: It was wet. True or False?\nAnswer:", " False"),
        ],
        1,
    ),
    "winogrande": (
        {
            "sentence": "Ann beat Bea so _ got the prize.",
            "option1": "Ann",
            "option2": "Bea",
            "label": 0,
        },
        [("Ann beat Bea so Ann", " got the prize."), ("Ann beat Bea so Bea", " got the prize.")],
        0,
    ),
    "mathqa": (
        {"problem": "2 + 2 = ?", "options": ["3", "4"], "label": 1},
        [("Question: 2 + 2 = ?\nAnswer:", " 3"), ("Question: 2 + 2 = ?\nAnswer:", " 4")],
        1,
    ),
    "hellaswag": (
        {"ctx": "Roof removal: A man sits. he", "endings": ["rips tiles.", "skis."], "label": 0},
        [
            ("Roof removal: A man sits. he", " rips tiles."),
            ("Roof removal: A man sits. he", " skis."),
        ],
        0,
    ),
    "arc_easy": (
        {"question": "What is ice?", "choices": ["water", "fire", "sand"], "label": 0},
        [
            ("Question: What is ice?\nAnswer:", " water"),
            ("Question: What is ice?\nAnswer:", " fire"),
            ("Question: What is ice?\nAnswer:", " sand"),
        ],
        0,
    ),
    "lambada": (
        {"context": "He read the", "target": "signs"},
        [("He read the", " signs")],
        0,
    ),
}


def write(folder: Path, file: str, rows: list[dict[str, Any]]) -> Path:
    path = folder / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize("name", FORMATS)
def test_prompts_are_those_of_lm_evaluation_harness(name: str, tmp_path: Path) -> None:
    row, pairs, label = FORMATS[name]
    write(tmp_path, CHOICE_FORMATS[name].file, [row])
    example = ChoiceData(name, tmp_path)[0]
    assert list(example.pairs) == pairs
    assert example.label == label


def test_every_task_has_its_format_here() -> None:
    assert FORMATS.keys() | {"copa_test"} == CHOICE_FORMATS.keys()


def test_a_cause_is_asked_for_with_because(tmp_path: Path) -> None:
    row = {**FORMATS["copa"][0], "question": "cause", "premise": "It broke. "}
    write(tmp_path, "copa/validation.jsonl", [row])
    assert ChoiceData("copa", tmp_path)[0].pairs[0][0] == "It broke because"


def numbered(count: int) -> list[dict[str, Any]]:
    return [
        {"question_stem": f"Q{i}", "choices": [f"a{i}", f"b{i}"], "label": i % 2}
        for i in range(count)
    ]


def test_shots_are_solved_rows_of_the_train_file(tmp_path: Path) -> None:
    write(tmp_path, "openbookqa/test.jsonl", FORMATS["openbookqa"][:1] * 3)  # type: ignore[arg-type]
    write(tmp_path, "openbookqa/train_first200.jsonl", numbered(5))
    solved = {f"Q{i} {'ab'[i % 2]}{i}" for i in range(5)}
    data = ChoiceData("openbookqa", tmp_path, shots=2, seed=7)
    prefixes = []
    for index in range(3):
        contexts = [context for context, _ in data[index].pairs]
        *shots, question = contexts[0].split("\n\n")
        assert question == "The sun is"
        assert len(shots) == 2
        assert len(set(shots) & solved) == 2
        assert len(set(contexts)) == 1
        prefixes.append(shots)
    assert len(data) == 3
    again = ChoiceData("openbookqa", tmp_path, shots=2, seed=7)
    assert [c.split("\n\n")[:-1] for c in (again[i].pairs[0][0] for i in range(3))] == prefixes
    other = ChoiceData("openbookqa", tmp_path, shots=2, seed=8)
    assert [c.split("\n\n")[:-1] for c in (other[i].pairs[0][0] for i in range(3))] != prefixes


def test_without_a_train_file_shots_are_the_last_rows_which_are_not_scored(tmp_path: Path) -> None:
    rows = [{"question": f"Q{i}", "choices": ["x", "y"], "label": 0} for i in range(70)]
    write(tmp_path, "arc_easy/test.jsonl", rows)
    assert len(ChoiceData("arc_easy", tmp_path)) == 70
    data = ChoiceData("arc_easy", tmp_path, shots=10)
    assert len(data) == 38
    shots = {shot for index in range(38) for shot in data[index].pairs[0][0].split("\n\n")[:-1]}
    assert shots == {f"Question: Q{i}\nAnswer: x" for i in range(38, 70)}
    # Of a short file half is left to be scored.
    write(tmp_path, "arc_easy/test.jsonl", rows[:9])
    assert len(ChoiceData("arc_easy", tmp_path, shots=4)) == 5


def test_a_shot_of_winogrande_is_the_sentence_with_the_right_name(tmp_path: Path) -> None:
    row = FORMATS["winogrande"][0]
    write(tmp_path, "winogrande/validation.jsonl", [row, {**row, "label": 1}])
    data = ChoiceData("winogrande", tmp_path, shots=1)
    assert data[0].pairs[1][0] == "Ann beat Bea so Bea got the prize.\n\nAnn beat Bea so Bea"


def test_the_fingerprint_is_that_of_the_data(tmp_path: Path) -> None:
    write(tmp_path, "openbookqa/test.jsonl", numbered(3))
    before = ChoiceData("openbookqa", tmp_path).fingerprint
    assert before == ChoiceData("openbookqa", tmp_path).fingerprint
    write(tmp_path, "openbookqa/test.jsonl", numbered(4))
    assert ChoiceData("openbookqa", tmp_path).fingerprint != before


@pytest.mark.parametrize(
    ("name", "text", "match"),
    [
        ("copa", None, r"validation.jsonl: No such file"),
        ("copa", "{", r"line 1 must be JSON"),
        ("copa", "[" * 100_000, r"line 1 must be JSON"),
        ("copa", "[1]", r"line 1 must be a JSON object"),
        ("copa", '{"premise": 3}', r"row 0: field 'question' must be str, got None"),
        ("rte", '{"premise": "a", "hypothesis": "b", "label": "maybe"}', "'label' must be one of"),
        ("lambada", '{"context": "a"}', "field 'target' must be str"),
        ("winogrande", '{"sentence": "no gap", "label": 0}', "'sentence' must have a _"),
        ("mathqa", '{"problem": "p", "options": [], "label": 0}', "'options' must be a list of"),
        ("mathqa", '{"problem": "p", "options": ["1"], "label": 1}', r"'label' must be in 0..0"),
    ],
)
def test_bad_files_are_named(name: str, text: str | None, match: str, tmp_path: Path) -> None:
    if text is not None:
        file = tmp_path / CHOICE_FORMATS[name].file
        file.parent.mkdir()
        file.write_text(text + "\n", encoding="utf-8")
    with pytest.raises(EvalError, match=match):
        ChoiceData(name, tmp_path)[0]


def test_bad_shots_are_named(tmp_path: Path) -> None:
    write(tmp_path, "openbookqa/test.jsonl", numbered(3))
    write(tmp_path, "openbookqa/train_first200.jsonl", numbered(2))
    with pytest.raises(EvalError, match=r"shots must be in 0..10, got 11"):
        ChoiceData("openbookqa", tmp_path, shots=11)
    with pytest.raises(EvalError, match="3 shots need as many rows, got 2"):
        ChoiceData("openbookqa", tmp_path, shots=3)


def test_an_unknown_task_is_named(tmp_path: Path) -> None:
    with pytest.raises(EvalError, match="task must be one of copa, .*, got 'mmlu'"):
        make_task(TaskSpec("mmlu", tmp_path), tiny_tokenizer())


def test_pairs_are_tokenised_as_one_text_and_spaces_move() -> None:
    tokenizer = tiny_tokenizer()
    plain = encode_pair(tokenizer, "And God said", " light")
    moved = encode_pair(tokenizer, "And God said ", "light")
    assert plain == moved
    assert list(plain.context) == tokenizer("And God said", add_special_tokens=False).input_ids
    whole = tokenizer("And God said light", add_special_tokens=False).input_ids
    assert [*plain.context, *plain.continuation] == whole
    with pytest.raises(EvalError, match="at least one token of context and one of continuation"):
        encode_pair(tokenizer, "", " light")
