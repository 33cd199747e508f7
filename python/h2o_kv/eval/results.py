"""The file of results: one JSON line an example and setting, appended as they come, never twice."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Collection, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

from h2o_kv.eval.data import EvalError, Row, read_rows, value

__all__ = ["KEY", "ResultFile", "key_of", "read_results"]

KEY = (
    *("model", "dtype", "task", "options", "data"),
    *("policy", "ratio", "prefill", "index"),
)
"""Fields that together name a line."""

# What a line must have; there may be more.
_FIELDS: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(KEY, str),
    "options": dict,
    "ratio": (float, int),
    "index": int,
    "prompt_format": str,
    "metrics": dict,
    "seen": list,
    "kept": list,
    "nothing_evicted": bool,
}


def key_of(row: Row) -> str:
    """The key of a line: what is run again only if one of these differs."""
    return json.dumps([row[name] for name in KEY], sort_keys=True)


def read_results(file: Path) -> list[Row]:
    """The complete lines of a file of results; none if there is no file.

    Raises
    ------
    EvalError
        A line is no result.
    """
    if not file.exists():
        return []
    rows = read_rows(file)
    for number, row in enumerate(rows, start=1):
        missing = [name for name in _FIELDS if name not in row]
        if missing:
            raise EvalError(f"{file}: result {number} must have {', '.join(missing)}, got none")
        try:
            for name, kind in _FIELDS.items():
                value(row, name, kind)
            _check_numbers("metrics", row["metrics"].values())
            for name in ("seen", "kept"):
                _check_numbers(name, row[name])
        except EvalError as error:
            raise EvalError(f"{file}: result {number}: {error}") from error
    return rows


def _check_numbers(name: str, numbers: Collection[Any]) -> None:
    wrong = [one for one in numbers if isinstance(one, bool) or not isinstance(one, (int, float))]
    if wrong or not numbers:
        got = repr(wrong[0]) if wrong else "none"
        raise EvalError(f"field {name!r} must be numbers, at least one, got {got}")


class ResultFile:
    """Appends to a file of results, which no other may do meanwhile.

    A run that was killed may have left the beginning of a line at the end, which is cut off.

    Attributes
    ----------
    finished : set of str
        Keys of the lines that it has.

    Raises
    ------
    EvalError
        Another run appends to the file, or a line of it is no result.
    """

    def __init__(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self._stream = file.open("a", encoding="utf-8")
        try:
            # The system gives the lock back when the run ends, however it ends.
            fcntl.flock(self._stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _cut_off_torn_line(file)
            self.finished = {key_of(row) for row in read_results(file)}
        except BlockingIOError as error:
            self._stream.close()
            raise EvalError(f"{file}: another run is writing to it") from error
        except BaseException:
            self._stream.close()
            raise

    def __enter__(self) -> ResultFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stream.close()

    def append(self, rows: Iterable[dict[str, Any]]) -> None:
        """Write rows that the file does not have yet."""
        for row in rows:
            key = key_of(row)
            if key in self.finished:
                continue
            self._stream.write(json.dumps(row, ensure_ascii=False) + "\n")
            self._stream.flush()
            self.finished.add(key)


def _cut_off_torn_line(file: Path) -> None:
    with file.open("rb+") as stream:
        content = stream.read()
        end = content.rfind(b"\n") + 1
        if end < len(content):
            stream.truncate(end)
