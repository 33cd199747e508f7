"""Multiple choice in the prompt formats of lm-evaluation-harness, zero- and few-shot, from local files.

The formats are those of release 0.3, with which the tables of the paper (arXiv 2306.14048, Tables 1, 2
and 6) were made. A shot is the context of a row with its true continuation; shots and the example are
joined by an empty line.

Where we differ: the shots of an example are drawn with a seed made of the run's and the example's
index, so that they do not depend on which examples are run, or in what order.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from h2o_kv.eval.data import EvalError, Row, fingerprint, read_rows, value

__all__ = ["CHOICE_FORMATS", "POOL_ROWS", "ChoiceData", "ChoiceExample", "ChoiceFormat"]

Pairs = tuple[tuple[str, str], ...]
"""Context and continuation of each choice."""

POOL_ROWS = 32
"""Rows at the end of a file from which shots are drawn where there is no train file."""

_SEPARATOR = "\n\n"
_MAX_SHOTS = 10


@dataclass(frozen=True)
class ChoiceExample:
    """One question.

    Attributes
    ----------
    index : int
        Row of the file, from 0.
    pairs : tuple of (str, str)
        Context, with its shots, and continuation of each choice.
    label : int
        The true choice.
    """

    index: int
    pairs: Pairs
    label: int


@dataclass(frozen=True)
class ChoiceFormat:
    """How a row becomes a prompt.

    Attributes
    ----------
    file : str
        Of the examples, in the data folder.
    pool : str or None
        File with rows for shots; None = the last POOL_ROWS rows, or the last half of a file with fewer
        than twice as many, which then are not scored.
    pairs : callable
        Row to context and continuation of each choice.
    label : callable
        Row to the true choice, from 0.
    """

    file: str
    pool: str | None
    pairs: Callable[[Row], Pairs]
    label: Callable[[Row], int]


def _label(row: Row) -> int:
    label: int = value(row, "label", int)
    return label


def _texts(row: Row, field: str) -> list[str]:
    texts: list[str] = value(row, field, list)
    if not texts or not all(isinstance(text, str) for text in texts):
        raise EvalError(f"field {field!r} must be a list of texts, got {texts!r:.200}")
    return texts


def _asked(context: str, choices: Sequence[str]) -> Pairs:
    return tuple((context, f" {choice}") for choice in choices)


def _copa(row: Row) -> Pairs:
    words = {"cause": "because", "effect": "therefore"}
    question = value(row, "question", str)
    if question not in words:
        raise EvalError(f"field 'question' must be 'cause' or 'effect', got {question!r}")
    # Without the full stop.
    context = f"{value(row, 'premise', str).strip()[:-1]} {words[question]}"
    choices = (value(row, name, str) for name in ("choice1", "choice2"))
    return _asked(context, [choice[:1].lower() + choice[1:] for choice in choices])


def _piqa(row: Row) -> Pairs:
    choices = [value(row, name, str) for name in ("sol1", "sol2")]
    return _asked(f"Question: {value(row, 'goal', str)}\nAnswer:", choices)


def _open_book(row: Row) -> Pairs:
    return _asked(value(row, "question_stem", str), _texts(row, "choices"))


def _rte(row: Row) -> Pairs:
    premise, hypothesis = (value(row, name, str) for name in ("premise", "hypothesis"))
    question = f"{premise}\nQuestion: {hypothesis} True or False?\nAnswer:"
    return _asked(question, ["True", "False"])


def _rte_label(row: Row) -> int:
    labels = ["entailment", "not_entailment"]
    label = value(row, "label", str)
    if label not in labels:
        raise EvalError(f"field 'label' must be one of {labels}, got {label!r}")
    return labels.index(label)


def _winogrande(row: Row) -> Pairs:
    before, gap, after = value(row, "sentence", str).partition("_")
    if not gap:
        raise EvalError(f"field 'sentence' must have a _, got {row['sentence']!r}")
    # The same text is scored after each option (partial evaluation, arXiv 1806.02847).
    return tuple(
        (before + value(row, option, str), f" {after.strip()}") for option in ("option1", "option2")
    )


def _math_qa(row: Row) -> Pairs:
    return _asked(f"Question: {value(row, 'problem', str)}\nAnswer:", _texts(row, "options"))


def _hella_swag(row: Row) -> Pairs:
    return _asked(value(row, "ctx", str), _texts(row, "endings"))


def _arc(row: Row) -> Pairs:
    return _asked(f"Question: {value(row, 'question', str)}\nAnswer:", _texts(row, "choices"))


def _lambada(row: Row) -> Pairs:
    return _asked(value(row, "context", str), [value(row, "target", str)])


CHOICE_FORMATS: dict[str, ChoiceFormat] = {
    "copa": ChoiceFormat("copa/validation.jsonl", "copa/train.jsonl", _copa, _label),
    "copa_test": ChoiceFormat("copa/test.jsonl", "copa/train.jsonl", _copa, _label),
    "piqa": ChoiceFormat("piqa/validation.jsonl", None, _piqa, _label),
    "openbookqa": ChoiceFormat(
        "openbookqa/test.jsonl", "openbookqa/train_first200.jsonl", _open_book, _label
    ),
    "rte": ChoiceFormat("rte/validation.jsonl", "rte/train_first200.jsonl", _rte, _rte_label),
    "winogrande": ChoiceFormat("winogrande/validation.jsonl", None, _winogrande, _label),
    "mathqa": ChoiceFormat("mathqa/test.jsonl", None, _math_qa, _label),
    "hellaswag": ChoiceFormat("hellaswag/validation_every5th.jsonl", None, _hella_swag, _label),
    "arc_easy": ChoiceFormat("arc_easy/test.jsonl", None, _arc, _label),
    "lambada": ChoiceFormat("lambada/test.jsonl", None, _lambada, lambda row: 0),
}
"""The tasks that there are, by name. LAMBADA has one choice: the last word."""


class ChoiceData:
    """The examples of a task.

    Parameters
    ----------
    name : str
        Of CHOICE_FORMATS.
    folder : Path
        With the data; see `ChoiceFormat.file`.
    shots : int
        0 to 10: solved examples in front of each question.
    seed : int
        Of the draw of shots.

    Raises
    ------
    EvalError
        A file is missing or malformed, or there are too few rows to draw shots from.
    """

    def __init__(self, name: str, folder: Path, *, shots: int = 0, seed: int = 0) -> None:
        if not 0 <= shots <= _MAX_SHOTS:
            raise EvalError(f"shots must be in 0..{_MAX_SHOTS}, got {shots}")
        self.name, self.shots, self.seed = name, shots, seed
        self._format = form = CHOICE_FORMATS[name]
        self._file = folder / form.file
        files = [self._file]
        self._rows = read_rows(self._file)
        self._pool: list[Row] = []
        if shots > 0 and form.pool is not None:
            files.append(folder / form.pool)
            self._pool = read_rows(files[-1])
        elif shots > 0:
            num_pool = min(POOL_ROWS, len(self._rows) // 2)
            self._pool = self._rows[len(self._rows) - num_pool :]
            self._rows = self._rows[: len(self._rows) - num_pool]
        if shots > len(self._pool):
            raise EvalError(f"{files[-1]}: {shots} shots need as many rows, got {len(self._pool)}")
        for index, row in enumerate(self._rows):
            self._read(row, f"row {index}")
        for row in self._pool:
            self._solved(row)
        self.fingerprint = fingerprint(*files)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> ChoiceExample:
        """The example of row `index`."""
        drawn = random.Random(f"{self.seed} {index}").sample(self._pool, self.shots)
        prefix = "".join(self._solved(row) + _SEPARATOR for row in drawn)
        pairs, label = self._read(self._rows[index], f"row {index}")
        return ChoiceExample(index, tuple((prefix + c, text) for c, text in pairs), label)

    def _solved(self, row: Row) -> str:
        pairs, label = self._read(row, "a row for shots")
        return "".join(pairs[label])

    def _read(self, row: Row, where: str) -> tuple[Pairs, int]:
        try:
            pairs, label = self._format.pairs(row), self._format.label(row)
            if not 0 <= label < len(pairs):
                raise EvalError(f"field 'label' must be in 0..{len(pairs) - 1}, got {label}")
        except EvalError as error:
            raise EvalError(f"{self._file}: {where}: {error}") from error
        return pairs, label
