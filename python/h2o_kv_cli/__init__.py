"""The program `h2o-kv`: one module a command, imported when the command is asked for.

A package of its own, since importing `h2o_kv` loads torch and transformers: what is here starts
without them. The commands that need them all the time are in `h2o_kv.cli`.
"""

from __future__ import annotations

import argparse
import importlib
import io
import json
import os
import sys
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

__all__ = [
    "STDIN",
    "Parser",
    "UserError",
    "main",
    "one_line",
    "printable",
    "read_text",
    "utf8",
    "write_json",
]

STDIN = "-"
"""The name of standard input where a file is asked for."""

_PROGRAM = "h2o-kv"
# Module and one-line summary of each command; the summaries stand here so that `h2o-kv --help` does
# not import them all.
_COMMANDS = {
    "generate": ("h2o_kv.cli.generate", "continue a prompt with an H2O cache"),
    "convert": ("h2o_kv_cli.convert", "write any model as a plain Hugging Face folder"),
    "tokenize": ("h2o_kv_cli.tokenize", "turn text into token ids for a C++ program"),
    "detokenize": ("h2o_kv_cli.detokenize", "turn a C++ program's token ids into text"),
    "eval": ("h2o_kv.cli.eval", "compare the quality of policies on local data"),
    "report": ("h2o_kv_cli.report", "join result folders into one HTML page"),
    "explain": ("h2o_kv.cli.explain", "say whether an answer's evidence was evicted, and why"),
    "trace": ("h2o_kv.cli.trace", "show a worked case of the algorithm step by step"),
    "info": ("h2o_kv.cli.info", "show versions, devices and what was built"),
}
_EXIT_USER_ERROR = 2
_EXIT_INTERRUPTED = 130


class UserError(Exception):
    """A mistake of the user: shown as one line, without a traceback, with exit status 2."""


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line; the usage is a `--help` away."""

    def error(self, message: str) -> NoReturn:
        """Print the message and end with exit status 2."""
        self.exit(_EXIT_USER_ERROR, f"{self.prog}: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run `h2o-kv`.

    Parameters
    ----------
    argv : sequence of str, optional
        Arguments after the program's name; those of the process when left out.

    Returns
    -------
    int
        Exit status: 0, 2 for a mistake of the user, 130 when interrupted.
    """
    program = [_PROGRAM]  # and the command, once it is known: who complains
    try:
        if sys.stdout is None:
            raise UserError("standard output is closed")
        # What the encoding of standard output has no letter for is escaped, not fatal.
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")
        try:
            return _run(list(sys.argv[1:] if argv is None else argv), program)
        finally:
            sys.stdout.flush()  # a reader that has gone shows here, not at exit
    except UserError as error:
        return _refuse(program, str(error))
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader (`| head`) has gone
        _discard_output()
        return 1
    except OSError as error:
        # Files have names and their errors are the commands' business.
        if error.filename is not None:
            raise
        _discard_output()
        return _refuse(program, f"cannot write standard output: {error.strerror}")


def write_json(value: Any) -> None:
    """Write JSON to standard output; letters that its encoding lacks are escaped as JSON does."""
    text = json.dumps(value, ensure_ascii=False, indent=2)
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        text = json.dumps(value, indent=2)
    sys.stdout.write(text + "\n")


def read_text(file: str) -> str:
    """The text of a file, or of standard input for "-".

    Raises
    ------
    ValueError, OSError
        It is no UTF-8, standard input is closed, or the file cannot be read.
    """
    if file != STDIN:
        return utf8(file, lambda: Path(file).read_text(encoding="utf-8"))
    if sys.stdin is None:
        raise ValueError("standard input is closed")
    return utf8("standard input", sys.stdin.read)


def utf8(name: str, read: Callable[[], str]) -> str:
    """What `read` gives, if it is text; bytes that are none may come as lone surrogates.

    Raises
    ------
    ValueError
        It is none.
    """
    try:
        text = read()
        text.encode("utf-8")
    except UnicodeError as error:
        raise ValueError(f"{name} is no UTF-8 text: {error}") from None
    return text


def printable(text: str) -> str:
    """The text without control characters: a model may write any, and a terminal obeys some."""
    return "".join(c for c in text if c in "\n\t" or unicodedata.category(c) != "Cc")


def one_line(error: BaseException) -> str:
    """What an error says, as one line."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split())


def _run(arguments: list[str], program: list[str]) -> int:
    parser = _top_parser()
    options = parser.parse_args(arguments[:1])
    if options.command is None:
        parser.print_help()
        return 0
    program.append(options.command)
    _spin_briefly()
    module = importlib.import_module(_COMMANDS[options.command][0])
    command = Parser(prog=" ".join(program), description=module.DESCRIPTION)
    module.add_arguments(command)
    return module.main(command.parse_args(arguments[1:])) or 0


def _spin_briefly() -> None:
    """Have threads that wait for work sleep soon, before OpenMP is loaded (docs/cpu.md).

    For as long as they spin by default, they hold up those that work where the cores are shared.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "3000")


def _refuse(program: list[str], message: str) -> int:
    if sys.stderr is not None:
        sys.stderr.write(f"{' '.join(program)}: {message}\n")
    return _EXIT_USER_ERROR


def _discard_output() -> None:
    """Send what Python still holds nowhere; at exit it would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _top_parser() -> Parser:
    parser = Parser(
        prog=_PROGRAM,
        description="Text generation with a KV cache of fixed size (Heavy-Hitter Oracle eviction).",
        epilog="commands:\n"
        + "".join(f"  {name:<10} {summary}\n" for name, (_, summary) in _COMMANDS.items())
        + f"\n{_PROGRAM} <command> --help shows the options of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_ShowVersion, nargs=0, help="show the version and stop")
    parser.add_argument(
        "command", nargs="?", choices=list(_COMMANDS), metavar="command", help="see below"
    )
    return parser


class _ShowVersion(argparse.Action):
    """Like argparse's "version", but the library is asked only now."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from h2o_kv import _C

        sys.stdout.write(f"{_PROGRAM} {_C.version()}\n")
        parser.exit()
