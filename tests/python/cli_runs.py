"""Calls of the command line that must fail, and what they say."""

from __future__ import annotations

import re

import pytest

from h2o_kv_cli import main


def error_line(arguments: list[str], capsys: pytest.CaptureFixture[str], status: int = 2) -> str:
    """What a call that must fail with `status` says: one line on standard error, nothing else."""
    try:
        got = main(arguments)
    except SystemExit as stop:  # argparse leaves this way
        got = stop.code  # type: ignore[assignment]
    assert got == status
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert len(lines) == 1, captured.err
    return lines[0]


def assert_matches(pattern: str, line: str) -> None:
    assert re.fullmatch(pattern, line), line
