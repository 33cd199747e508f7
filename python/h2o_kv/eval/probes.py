"""Prompts whose answer lies far back: needles, stage switches, delayed references, and RULER's files.

All synthetic ones are seeded; their haystack is the essays of the needle test. What each is for:

needle, multi_needle
    One fact, or four facts of one key, at depths that rise with the index of the probe.
delayed_reference
    A random id at the very start, then a long text that has nothing to do with it, then the question:
    before it is asked for, nothing attends to the id (failure of the first kind in the notes on H2O:
    what leaves the recent window without attention is gone).
stage_switch
    Two groups of facts at the start; a first stage asks for those of one group again and again, then
    comes a question about the other: heavy hitters of the first stage still hold the slots.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from h2o_kv.eval.data import EvalError, Row, read_rows, value

__all__ = ["PROBES", "Haystack", "Probe", "ruler_probe"]

NUM_ALTERNATIVES = 9
"""Wrong answers beside the true one: chance is one in ten."""

_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_DEPTHS = 5
_KEYS = (
    *("harbor", "violin", "meadow", "lantern", "copper", "orchard", "glacier", "pepper"),
    *("saddle", "walnut", "ribbon", "tunnel", "falcon", "marble", "cactus", "anchor"),
)


@dataclass(frozen=True)
class Probe:
    """A prompt, its answer, and where in the prompt the answer stands.

    Attributes
    ----------
    prompt : str
    answer : str
        What follows it, with its first space.
    wanted : tuple of str
        What a generated answer must contain.
    alternatives : tuple of str
        Wrong answers of the same form.
    evidence : tuple of (int, int)
        Letters of the prompt, from and up to, that hold what is wanted.
    """

    prompt: str
    answer: str
    wanted: tuple[str, ...]
    alternatives: tuple[str, ...]
    evidence: tuple[tuple[int, int], ...]


class Haystack:
    """Pieces of the essays of the needle test.

    Parameters
    ----------
    folder : Path
        With `needle_haystack/paul_graham_essays.jsonl`.
    tokenizer
    """

    FILE = "needle_haystack/paul_graham_essays.jsonl"

    def __init__(self, folder: Path, tokenizer: Any) -> None:
        rows = read_rows(folder / self.FILE)
        text = " ".join(" ".join(value(row, "text", str).split()) for row in rows)
        self._sentences = re.findall(r"[^.!?]+[.!?]+", text)
        if not self._sentences:
            raise EvalError(f"{folder / self.FILE}: must hold sentences, got none")
        self._tokenizer = tokenizer

    def sentences(self, num_tokens: int, draw: random.Random) -> list[str]:
        """Sentences one after another, from a drawn place on, of about so many tokens."""
        place, total = draw.randrange(len(self._sentences)), 0
        found: list[str] = []
        while True:
            sentence = self._sentences[place % len(self._sentences)].strip()
            total += len(self._tokenizer(" " + sentence, add_special_tokens=False)["input_ids"])
            if found and total > num_tokens:
                return found
            found.append(sentence)
            place += 1


def _numbers(count: int, draw: random.Random) -> list[str]:
    return [str(number) for number in draw.sample(range(10_000, 100_000), count)]


def _spans(prompt: str, wanted: Sequence[str]) -> tuple[tuple[int, int], ...]:
    places = [(prompt.index(text), len(text)) for text in wanted]
    return tuple((start, start + length) for start, length in places)


def _with_needles(
    haystack: Haystack, num_tokens: int, index: int, draw: random.Random, needles: int
) -> Probe:
    """RULER's form of the needle test (arXiv 2404.06654), with numbers."""
    key = draw.choice(_KEYS)
    numbers = _numbers(needles + NUM_ALTERNATIVES, draw)
    wanted, others = numbers[:needles], numbers[needles:]
    sentences = haystack.sentences(num_tokens, draw)
    first = (index % _DEPTHS) / (_DEPTHS - 1)
    depths = [first] if needles == 1 else [place / (needles - 1) for place in range(needles)]
    # From the back, so that what is put in moves no later place.
    for depth, number in sorted(zip(depths, wanted, strict=True), reverse=True):
        needle = f"One of the special magic numbers for {key} is: {number}."
        sentences.insert(round(depth * len(sentences)), needle)
    what = "number for" if needles == 1 else "numbers for"
    verb = "is" if needles == 1 else "are"
    prompt = (
        "Some special magic numbers are hidden within the following text. Make sure to memorize "
        f"them. I will quiz you about the numbers afterwards.\n{' '.join(sentences)}\n"
        f"What {verb} the special magic {what} {key} mentioned in the provided text? The special "
        f"magic {what} {key} mentioned in the provided text {verb}"
    )
    wrong = []
    for other in others:
        changed = list(wanted)
        changed[draw.randrange(needles)] = other
        wrong.append(" " + ", ".join(changed))
    return Probe(
        prompt, " " + ", ".join(wanted), tuple(wanted), tuple(wrong), _spans(prompt, wanted)
    )


def _needle(haystack: Haystack, num_tokens: int, index: int, draw: random.Random) -> Probe:
    return _with_needles(haystack, num_tokens, index, draw, 1)


def _multi_needle(haystack: Haystack, num_tokens: int, index: int, draw: random.Random) -> Probe:
    return _with_needles(haystack, num_tokens, index, draw, 4)


def _delayed_reference(
    haystack: Haystack, num_tokens: int, index: int, draw: random.Random
) -> Probe:
    wanted, *others = _numbers(1 + NUM_ALTERNATIVES, draw)
    text = " ".join(haystack.sentences(num_tokens, draw))
    prompt = f"The id of this document is {wanted}.\n{text}\nThe id of this document is"
    return Probe(
        prompt,
        f" {wanted}",
        (wanted,),
        tuple(f" {other}" for other in others),
        _spans(prompt, [wanted]),
    )


def _stage_switch(haystack: Haystack, num_tokens: int, index: int, draw: random.Random) -> Probe:
    keys = draw.sample(_KEYS, 6)
    numbers = _numbers(1 + NUM_ALTERNATIVES, draw)
    facts = dict(zip(keys, numbers, strict=False))
    first, second = keys[:3], keys[3:]
    listed = list(keys)
    draw.shuffle(listed)
    opening = " ".join(f"The code of {key} is {facts[key]}." for key in listed)
    asked = second[index % len(second)]
    # A question has about as many tokens as a sentence.
    stage = [
        f"{sentence} Question: What is the code of {first[turn % len(first)]}? "
        f"Answer: {facts[first[turn % len(first)]]}."
        for turn, sentence in enumerate(haystack.sentences(num_tokens // 2, draw))
    ]
    prompt = "\n".join([opening, *stage, f"Question: What is the code of {asked}? Answer:"])
    wrong = [number for number in numbers if number != facts[asked]]
    return Probe(
        prompt,
        f" {facts[asked]}",
        (facts[asked],),
        tuple(f" {number}" for number in wrong),
        _spans(prompt, [facts[asked]]),
    )


Build = Callable[[Haystack, int, int, random.Random], Probe]
PROBES: dict[str, Build] = {
    "needle": _needle,
    "multi_needle": _multi_needle,
    "delayed_reference": _delayed_reference,
    "stage_switch": _stage_switch,
}
"""The synthetic ones, by name: made of a haystack, its tokens, an index and a seeded generator."""


def ruler_probe(row: Row, draw: random.Random) -> Probe:
    """A row of RULER's niah_multikey_3: a uuid among uuids.

    Raises
    ------
    EvalError
        The row has no uuid for an answer, or too few others.
    """
    prompt, outputs = value(row, "input", str), value(row, "outputs", list)
    if len(outputs) != 1 or not isinstance(outputs[0], str) or outputs[0] not in prompt:
        raise EvalError(f"field 'outputs' must be one text of the input, got {outputs!r:.200}")
    answer: str = outputs[0]
    others = sorted(set(_values(prompt)) - {answer})
    if len(others) < NUM_ALTERNATIVES:
        raise EvalError(
            f"field 'input' must have more than {NUM_ALTERNATIVES} uuids, got {len(others)}"
        )
    wrong = draw.sample(others, NUM_ALTERNATIVES)
    return Probe(
        prompt,
        f" {answer}",
        (answer,),
        tuple(f" {other}" for other in wrong),
        _spans(prompt, [answer]),
    )


def _values(prompt: str) -> Iterator[str]:
    for match in re.finditer(rf"is: ({_UUID.pattern})", prompt):
        yield match.group(1)
