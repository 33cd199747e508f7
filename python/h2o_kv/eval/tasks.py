"""What the tasks of an evaluation have in common, and the multiple-choice ones.

A task is made of a `TaskSpec` and a tokenizer. It knows its examples by their index, and runs some of
them under some settings; what it yields becomes a line of results (sweep.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from h2o_kv.eval.caches import CacheUse, Setting
from h2o_kv.eval.choices import ChoiceData
from h2o_kv.eval.scoring import Request, Score, encode_pair, score

__all__ = ["ChoiceTask", "Result", "Task", "TaskSpec", "choice_metrics", "use_fields"]


@dataclass(frozen=True)
class TaskSpec:
    """Which task, on which data, in which size; a task looks at those numbers that it has a use for.

    Attributes
    ----------
    name : str
    folder : Path
        With the data.
    shots : int
        Solved examples in front of each question.
    seed : int
    prompt_tokens, new_tokens : int, tokens
        Of texts that are cut to a length, and of what is scored or generated after them.
    batch_tokens : int
        Tokens of a batch, padding included.
    """

    name: str
    folder: Path
    shots: int = 0
    seed: int = 0
    prompt_tokens: int = 512
    new_tokens: int = 64
    batch_tokens: int = 2048


class Result(NamedTuple):
    """What came of one example under one setting; `fields` go into its line."""

    example: int
    setting: Setting
    fields: dict[str, Any]


class Task(Protocol):
    """A task of an evaluation.

    Attributes
    ----------
    name : str
    options : dict
        The settings of the spec that matter to it; they are part of the key of a result.
    data : str
        Fingerprint of its files.
    prompt_format : str
        Where its prompts come from.
    generates : bool
        Whether its texts are generated, so that no policy can know the whole of them beforehand.
    """

    name: str
    options: dict[str, Any]
    data: str
    prompt_format: str
    generates: bool

    def __len__(self) -> int:
        """Examples that there are."""
        ...

    def run(
        self, model: Any, indices: Sequence[int], settings: Sequence[Setting]
    ) -> Iterator[Result]:
        """Run each of these examples under each of these settings, in any order."""
        ...


def use_fields(uses: Sequence[CacheUse]) -> dict[str, Any]:
    """What a line of results says of the caches of the texts that an example consists of."""
    dicts = [use.as_dict() for use in uses]
    fields: dict[str, Any] = {name: [each[name] for each in dicts] for name in dicts[0]}
    return {**fields, "nothing_evicted": not any(use.evicted for use in uses)}


class ChoiceTask:
    """Multiple choice by log-likelihood, or the last word of a text (LAMBADA, a single choice).

    Metrics are lm-evaluation-harness's: `acc`, the choice with the highest sum of log-probabilities is
    the true one; `acc_norm`, the same with the sum divided by the letters of the choice, its first space
    not counted. For a single choice: `acc`, every token of it is the most likely one; `nll`.
    """

    prompt_format = "lm-evaluation-harness 0.3"
    generates = False

    def __init__(self, spec: TaskSpec, tokenizer: Any) -> None:
        self.name = spec.name
        self._tokenizer = tokenizer
        self._examples = ChoiceData(spec.name, spec.folder, shots=spec.shots, seed=spec.seed)
        self.options = {"shots": spec.shots, "seed": spec.seed}
        self.data = self._examples.fingerprint
        self._batch_tokens = spec.batch_tokens

    def __len__(self) -> int:
        return len(self._examples)

    def run(
        self, model: Any, indices: Sequence[int], settings: Sequence[Setting]
    ) -> Iterator[Result]:
        """Score all choices of these examples in batches, one setting after the other."""
        examples = [self._examples[index] for index in indices]
        requests: list[Request] = [
            encode_pair(self._tokenizer, *pair) for example in examples for pair in example.pairs
        ]
        for setting in settings:
            scores = score(model, requests, setting, batch_tokens=self._batch_tokens)
            rest = iter(scores)
            for example in examples:
                own = [next(rest) for _ in example.pairs]
                lengths = [len(text) - 1 for _, text in example.pairs]
                fields = {
                    "metrics": _metrics(own, lengths, example.label),
                    "log_probs": [one.log_prob for one in own],
                    "label": example.label,
                    **use_fields([one.use for one in own]),
                }
                yield Result(example.index, setting, fields)


def _metrics(scores: Sequence[Score], lengths: Sequence[int], label: int) -> dict[str, float]:
    if len(scores) == 1:
        return {"acc": float(scores[0].is_greedy), "nll": -scores[0].log_prob}
    return choice_metrics([one.log_prob for one in scores], lengths, label)


def choice_metrics(sums: Sequence[float], lengths: Sequence[int], label: int) -> dict[str, float]:
    """`acc` and `acc_norm` of several choices.

    Parameters
    ----------
    sums : sequence of float, nats
        Log-probability of each choice.
    lengths : sequence of int
        Letters of each, its first space not counted.
    label : int
        The true choice.
    """
    # An empty choice would be a division by nothing; lm-evaluation-harness lets it win.
    means = [
        total / length if length else math.inf for total, length in zip(sums, lengths, strict=True)
    ]
    return {
        "acc": float(sums.index(max(sums)) == label),
        "acc_norm": float(means.index(max(means)) == label),
    }
