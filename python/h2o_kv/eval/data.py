"""Local evaluation files: JSON lines and plain text; errors name the file and the line."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

__all__ = ["EvalError", "Row", "fingerprint", "read_rows", "read_text", "value"]

Row = dict[str, Any]
"""A line of a file."""


class EvalError(ValueError):
    """An evaluation cannot be run as it was asked for; the message is one line."""


def read_rows(file: Path) -> list[Row]:
    """The objects of a file with one JSON object a line; empty lines are skipped.

    Raises
    ------
    EvalError
        The file cannot be read, or a line is no JSON object.
    """
    rows = []
    # Not str.splitlines: it also breaks at letters that JSON texts may hold.
    for number, line in enumerate(read_text(file).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise EvalError(f"{file}: line {number} must be JSON: {error}") from error
        if not isinstance(row, dict):
            raise EvalError(f"{file}: line {number} must be a JSON object, got {line[:40]!r}")
        rows.append(row)
    return rows


def read_text(file: Path) -> str:
    """The text of a UTF-8 file.

    Raises
    ------
    EvalError
        The file cannot be read, or is no UTF-8.
    """
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise EvalError(f"{file}: {error.strerror}") from error
    except UnicodeError as error:
        raise EvalError(f"{file}: no UTF-8 text: {error}") from error


def fingerprint(*files: Path) -> str:
    """First 12 digits of the SHA-256 of these files: it says which data a result is from."""
    digest = hashlib.sha256()
    for file in files:
        try:
            digest.update(file.read_bytes())
        except OSError as error:
            raise EvalError(f"{file}: {error.strerror}") from error
    return digest.hexdigest()[:12]


def value(row: Row, field: str, kind: type | tuple[type, ...]) -> Any:
    """A field of a row, of that type, or one of those.

    Raises
    ------
    EvalError
        There is none, or it is of another type.
    """
    found = row.get(field)
    # A bool is an int to Python, and no number in JSON.
    if not isinstance(found, kind) or (isinstance(found, bool) and kind is not bool):
        name = " or ".join(one.__name__ for one in (kind if isinstance(kind, tuple) else (kind,)))
        raise EvalError(f"field {field!r} must be {name}, got {found!r} in {row!r:.200}")
    return found
