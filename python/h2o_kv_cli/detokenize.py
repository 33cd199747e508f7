"""`h2o-kv detokenize`: the text of token ids that a C++ program writes."""

from __future__ import annotations

import argparse
import io
import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from h2o_kv_cli import STDIN, UserError, one_line, printable
from h2o_kv_cli.text_tokens import GrowingText, TextTokenizer, open_tokenizer
from h2o_kv_cli.tokenize import add_model_argument

DESCRIPTION = (
    "Write the text of token ids: of the lines of h2o-generate as they come, of what h2o-kv "
    "tokenize writes, or of a bare JSON list. Special tokens are left out."
)
_TOKEN_LIMIT = 2**31


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `h2o-kv detokenize` to its parser."""
    parser.add_argument(
        "file", nargs="?", default=STDIN, metavar="FILE", help="- (the default) is standard input"
    )
    add_model_argument(parser)
    parser.add_argument(
        "--stream",
        action="store_true",
        help="write each token's text at once; of several rows, whole ones at the end all the same",
    )


def main(args: argparse.Namespace) -> int:
    """Run `h2o-kv detokenize`; returns the exit status.

    Raises
    ------
    UserError
        The input cannot be read or is none of the three forms, or the model will not do.
    """
    tokenizer = open_tokenizer(args.model)
    name = "standard input" if args.file == STDIN else args.file
    writer = _Writer(tokenizer, stream=args.stream)
    try:
        with _open(args.file) as lines:
            for row, token_id in _tokens(name, lines):
                writer.add(row, token_id)
    except OSError as error:
        if error.filename is None:  # of the output
            raise
        raise UserError(one_line(error)) from error
    except UnicodeError as error:
        raise UserError(f"{name} is no UTF-8 text: {error}") from error
    finally:
        # What came before a broken line is worth reading.
        writer.finish()
    return 0


class _Writer:
    """Writes rows of tokens as text.

    Parameters
    ----------
    tokenizer : TextTokenizer
    stream : bool
        Write a single row's text as it comes. Whether it is single shows with the second token, so
        the first one waits for it.
    """

    def __init__(self, tokenizer: TextTokenizer, *, stream: bool) -> None:
        self._tokenizer = tokenizer
        self._stream = stream
        self._rows: dict[int, GrowingText] = {}
        self._texts: dict[int, list[str]] = {}
        self._written = 0
        # A terminal obeys some control characters; a file gets them all.
        self._clean = printable if sys.stdout.isatty() else str

    def add(self, row: int, token_id: int) -> None:
        """Take the next token of a row."""
        if row not in self._rows:
            self._rows[row] = GrowingText(self._tokenizer.decode)
            self._texts[row] = []
        text = self._rows[row].add(token_id)
        self._texts[row].append(text)
        if self._stream and len(self._rows) == 1 and len(self._rows[row]) > 1:
            self._write_rest(row)

    def finish(self) -> None:
        """Write what has not been written yet."""
        for row, growing in self._rows.items():
            self._texts[row].append(growing.finish())
        if len(self._rows) == 1:
            self._write_rest(next(iter(self._rows)))
            sys.stdout.write("\n")
        elif self._rows:
            if self._written:  # rows that begin late; the first one is told again, whole
                sys.stdout.write("\n\n")
            paragraphs = (
                f"row {row}:\n{self._clean(''.join(texts))}\n"
                for row, texts in sorted(self._texts.items())
            )
            sys.stdout.write("\n".join(paragraphs))
        sys.stdout.flush()

    def _write_rest(self, row: int) -> None:
        """Write those pieces of a row that are new."""
        pieces = self._texts[row]
        sys.stdout.write(self._clean("".join(pieces[self._written :])))
        sys.stdout.flush()
        self._written = len(pieces)


@contextmanager
def _open(file: str) -> Iterator[Iterable[str]]:
    """The lines of a file, each as soon as it is there."""
    if file != STDIN:
        with Path(file).open(encoding="utf-8") as lines:
            yield lines
        return
    if sys.stdin is None:
        raise UserError("standard input is closed")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="strict")
    yield sys.stdin


def _tokens(name: str, lines: Iterable[str]) -> Iterator[tuple[int, int]]:
    """Row and id of each token of the input."""
    numbered = ((number, line) for number, line in enumerate(lines, 1) if line.strip())
    first = next(numbered, None)
    if first is None:
        raise UserError(f"{name} must hold token ids, got nothing")
    number, line = first
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        # One value over several lines; a line of h2o-generate is whole.
        text = "\n" * (number - 1) + line + "".join(line for _, line in numbered)
        value = _parse(name, 1, text)
    if isinstance(value, dict) and "event" in value:
        yield from _event_tokens(name, number, value, numbered)
        return
    yield from _listed_tokens(f"{name}, line {number}", value)
    for number, _ in numbered:
        raise UserError(f"{name}, line {number}: nothing may follow the token ids")


def _event_tokens(
    name: str, number: int, event: Any, numbered: Iterator[tuple[int, str]]
) -> Iterator[tuple[int, int]]:
    """Row and id of each token of h2o-generate's lines; other events than tokens are passed over."""
    counts: dict[int, int] = {}
    while True:
        where = f"{name}, line {number}"
        if not isinstance(event, dict) or "event" not in event:
            raise UserError(f'{where}: must be an object with "event", got {_short(event)}')
        if event["event"] == "done":
            return
        if event["event"] == "token":
            row, token = _integer(where, event, "row"), _integer(where, event, "token")
            index = _integer(where, event, "index")
            if index != counts.get(row, 0):
                raise UserError(
                    f"{where}: index of row {row} must be {counts.get(row, 0)}, got {index}"
                )
            counts[row] = index + 1
            yield row, token
        following = next(numbered, None)
        if following is None:
            raise UserError(f'{name} must end with "done", but ends after line {number}')
        number, line = following
        event = _parse(name, number, line)


def _listed_tokens(where: str, value: Any) -> Iterator[tuple[int, int]]:
    """Row and id of each token of {"tokens": ...} or of a bare list."""
    rows = value.get("tokens") if isinstance(value, dict) else value
    if isinstance(rows, list) and not any(isinstance(row, list) for row in rows):
        rows = [rows]
    if not isinstance(rows, list) or not all(isinstance(row, list) and row for row in rows):
        raise UserError(
            f'{where}: must be an event, {{"tokens": [[...], ...]}} or a list of token ids, '
            f"got {_short(value)}"
        )
    for index in range(max(map(len, rows))):  # step by step, as h2o-generate has them
        for row, token_ids in enumerate(rows):
            if index < len(token_ids):
                yield row, _integer(where, {"token": token_ids[index]}, "token")


def _parse(name: str, number: int, line: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        number += error.lineno - 1
        raise UserError(f"{name}, line {number}: must be JSON: {error.msg}") from error
    except (ValueError, RecursionError) as error:  # thousands of digits, or of brackets
        raise UserError(f"{name}, line {number}: cannot be read: {one_line(error)}") from error


def _integer(where: str, event: dict[str, Any], key: str) -> int:
    value = event.get(key)
    if type(value) is not int or not 0 <= value < _TOKEN_LIMIT:
        raise UserError(
            f"{where}: {key} must be an integer from 0 to {_TOKEN_LIMIT - 1}, got {_short(value)}"
        )
    return value


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
