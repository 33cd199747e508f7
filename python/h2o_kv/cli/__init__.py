"""The command line `h2o-kv`: one module a command, imported when the command is asked for.

A command's module has `DESCRIPTION`, `add_arguments(parser)` and `main(args)`, which returns the
exit status: 0, or 2 for a mistake of the user, told in one line.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

__all__ = ["Parser", "UserError", "main"]

_PROGRAM = "h2o-kv"
# Module and one-line summary of each command; the summaries stand here so that `h2o-kv --help` does
# not import them all.
_COMMANDS = {
    "generate": ("h2o_kv.cli.generate", "continue a prompt with an H2O cache"),
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
    parser = _top_parser()
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = parser.parse_args(arguments[:1])
    if options.command is None:
        parser.print_help()
        return 0
    module = importlib.import_module(_COMMANDS[options.command][0])
    command = Parser(prog=f"{_PROGRAM} {options.command}", description=module.DESCRIPTION)
    module.add_arguments(command)
    try:
        status: int = module.main(command.parse_args(arguments[1:])) or 0
        sys.stdout.flush()  # a reader that has gone shows here, not at exit
        return status
    except UserError as error:
        sys.stderr.write(f"{command.prog}: {error}\n")
        return _EXIT_USER_ERROR
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader (`| head`) has gone; what Python still holds must not fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _top_parser() -> Parser:
    parser = Parser(
        prog=_PROGRAM,
        description="Text generation with a KV cache of fixed size (Heavy-Hitter Oracle eviction).",
        epilog="commands:\n"
        + "".join(f"  {name:<10} {summary}\n" for name, (_, summary) in _COMMANDS.items())
        + f"\n{_PROGRAM} <command> --help shows the options of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"{_PROGRAM} {_version()}")
    parser.add_argument(
        "command", nargs="?", choices=list(_COMMANDS), metavar="command", help="see below"
    )
    return parser


def _version() -> str:
    from h2o_kv import _C

    return _C.version()
