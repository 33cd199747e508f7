"""Tasks whose answer is a text: summaries, free generation, and dialogues of several turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from h2o_kv.eval.caches import Setting
from h2o_kv.eval.data import EvalError, Row, fingerprint, read_rows, value
from h2o_kv.eval.decoding import Conversation, end_tokens
from h2o_kv.eval.tasks import Result, TaskSpec, use_fields
from h2o_kv.eval.text_metrics import distinct, longest_repeat, rouge

__all__ = ["TEXT_FORMATS", "TextFormat", "TextTask"]

_STOP = "###"
_MARKER = "[the answer]"


@dataclass(frozen=True)
class TextFormat:
    """How a row becomes what is said, and what the answer is held against.

    Attributes
    ----------
    file : str
    source : str
        Where the format is from.
    turns : callable
        Row to what is said, turn by turn.
    references : callable or None
        Row to the summaries to compare with by ROUGE.
    chat : bool
        Whether turns go through the chat template of the tokenizer, if it has one.
    """

    file: str
    source: str
    turns: Callable[[Row], list[str]]
    references: Callable[[Row], list[str]] | None = None
    chat: bool = False


def _xsum(row: Row) -> list[str]:
    return [value(row, "article", str)]


def _news(row: Row) -> list[str]:
    article = value(row, "article", str)
    return [f"###\nArticle: {article}\n\nSummarize the above article in 3 sentences.\n"]


def _said(row: Row) -> list[str]:
    turns: list[str] = value(row, "turns", list)
    if not turns or not all(isinstance(turn, str) for turn in turns):
        raise EvalError(f"field 'turns' must be a list of texts, got {turns!r:.200}")
    return turns


_HELM = "HELM, as in the scripts of H2O"
_CHAT = "chat template of the tokenizer; plain text where it has none"
TEXT_FORMATS = {
    "xsum": TextFormat(
        "xsum/xsum_0shot_first200.jsonl",
        _HELM,
        _xsum,
        lambda row: [value(row, "summary_gt", str)],
    ),
    "cnn_dailymail": TextFormat(
        "cnn_dailymail/validation_15.jsonl",
        _HELM,
        _news,
        lambda row: [value(row, "highlights", str)],
    ),
    "cnn_dailymail_train": TextFormat(
        "cnn_dailymail/train_100.jsonl",
        _HELM,
        _news,
        lambda row: [value(row, "highlights", str)],
    ),
    "mt_bench": TextFormat("mt_bench/question.jsonl", _CHAT, _said, chat=True),
    "vicuna_bench": TextFormat("vicuna_bench/question.jsonl", _CHAT, _said, chat=True),
    "alpaca_eval": TextFormat(
        "alpaca_eval/instructions_805.jsonl",
        _CHAT,
        lambda row: [value(row, "instruction", str)],
        chat=True,
    ),
}
"""The tasks that there are, by name. MT-bench has two turns."""


class TextTask:
    """Greedy answers of at most `new_tokens` tokens a turn, several rows in a batch.

    Metrics: ROUGE where there are references; else repetition. Everything else of the text is for the
    summary of all texts, or for reading: each line of results has the answers.
    """

    generates = True

    def __init__(self, spec: TaskSpec, tokenizer: Any) -> None:
        if spec.new_tokens < 1:
            raise EvalError(f"{spec.name}: new tokens must be >= 1, got {spec.new_tokens}")
        self._format = TEXT_FORMATS[spec.name]
        file = spec.folder / self._format.file
        self.name, self.prompt_format = spec.name, self._format.source
        self.options = {"new_tokens": spec.new_tokens}
        self.data = fingerprint(file)
        self._rows = read_rows(file)
        self._tokenizer, self._spec = tokenizer, spec
        for index, row in enumerate(self._rows):
            try:
                self._format.turns(row)
                if self._format.references is not None:
                    self._format.references(row)
            except EvalError as error:
                raise EvalError(f"{file}: row {index}: {error}") from error

    def __len__(self) -> int:
        return len(self._rows)

    def run(
        self, model: Any, indices: Sequence[int], settings: Sequence[Setting]
    ) -> Iterator[Result]:
        """Generate in batches of rows with as many turns, one setting after the other."""
        said = {index: self._format.turns(self._rows[index]) for index in indices}
        for batch in self._batches(said):
            for setting in settings:
                for group in setting.alike([self._size(said[index]) for index in batch]):
                    rows = {batch[i]: said[batch[i]] for i in group}
                    yield from self._generate(model, rows, setting)

    def _batches(self, said: dict[int, list[str]]) -> Iterator[list[int]]:
        sizes = {index: len(self._first(turns[0])) for index, turns in said.items()}
        order = sorted(said, key=lambda index: (len(said[index]), -sizes[index]))
        batch: list[int] = []
        for index in order:
            longest = sizes[batch[0]] if batch else sizes[index]
            full = (len(batch) + 1) * (longest + self._spec.new_tokens) > self._spec.batch_tokens
            if batch and (full or len(said[index]) != len(said[batch[0]])):
                yield batch
                batch = []
            batch.append(index)
        if batch:
            yield batch

    def _size(self, turns: Sequence[str]) -> int:
        """All that the cache may see: a policy has the same slots however long answers become."""
        return sum(self._spec.new_tokens + len(self._first(text)) for text in turns)

    def _generate(
        self, model: Any, said: dict[int, list[str]], setting: Setting
    ) -> Iterator[Result]:
        ends, limit = end_tokens(model, self._tokenizer), self._spec.new_tokens
        turns = list(said.values())
        sizes = [self._size(own) for own in turns]
        talk = Conversation(
            model, [self._first(own[0]) for own in turns], sizes, setting, ends=ends
        )
        stop = None if self._format.chat else _STOP
        answers: list[list[list[int]]] = [[] for _ in turns]
        for turn in range(len(turns[0])):
            if turn > 0:
                pairs = zip(turns, answers, strict=True)
                talk.say([self._next(own[turn], answer[-1], ends) for own, answer in pairs])
            for own, new in zip(
                answers, talk.generate(limit, stop=stop, tokenizer=self._tokenizer), strict=True
            ):
                own.append(new)
        for index, own, use in zip(said, answers, talk.uses(), strict=True):
            texts = [self._text(tokens) for tokens in own]
            fields = {
                "metrics": self._metrics(self._rows[index], texts, own),
                "texts": texts,
                **use_fields([use]),
            }
            yield Result(index, setting, fields)

    def _metrics(
        self, row: Row, texts: Sequence[str], answers: Sequence[Sequence[int]]
    ) -> dict[str, float]:
        length = {"new_tokens": float(sum(map(len, answers)))}
        if self._format.references is not None:
            return {**rouge(texts[-1], self._format.references(row)), **length}
        return {
            "distinct_2": sum(distinct(text, 2) for text in texts) / len(texts),
            "longest_repeat": float(max(map(longest_repeat, texts))),
            **length,
        }

    def _text(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        if not self._format.chat:
            text = text.partition(_STOP)[0]
        return text.strip()

    def _first(self, text: str) -> list[int]:
        """Tokens of the first thing that is said."""
        if self._has_template:
            text = self._templated([{"role": "user", "content": text}])
        return self._ids(text)

    def _next(self, text: str, answer: Sequence[int], ends: Sequence[int]) -> list[int]:
        """Tokens of what is said after an answer, and of its end if it was cut at the limit."""
        if not self._has_template:
            return self._ids(f"\n{text}\n")
        # What the template puts behind an answer, whatever it begins a conversation with.
        whole = self._templated(
            [
                {"role": "user", "content": ""},
                {"role": "assistant", "content": _MARKER},
                {"role": "user", "content": text},
            ]
        )
        ids = self._ids(whole.partition(_MARKER)[2])
        return ids[1:] if ids[0] in ends and answer[-1] in ends else ids

    @property
    def _has_template(self) -> bool:
        return self._format.chat and bool(self._tokenizer.chat_template)

    def _templated(self, messages: list[dict[str, str]]) -> str:
        text: str = self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        return text

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids
