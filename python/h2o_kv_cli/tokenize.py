"""`h2o-kv tokenize`: the token ids of prompts, as JSON."""

from __future__ import annotations

import argparse
import json
import sys

from h2o_kv_cli import STDIN, UserError, one_line, read_text, utf8
from h2o_kv_cli.text_tokens import open_tokenizer

DESCRIPTION = (
    "Write the token ids of one prompt or several as a line of JSON, as h2o-generate reads them: "
    '{"tokens": [[...], ...]}, one list a prompt.'
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `h2o-kv tokenize` to its parser."""
    text = parser.add_mutually_exclusive_group()
    text.add_argument(
        "text", nargs="?", metavar="TEXT", help="the prompt; - (the default) is standard input"
    )
    text.add_argument("--file", metavar="FILE", help="file with the prompt, UTF-8")
    add_model_argument(parser)
    parser.add_argument(
        "--chat", action="store_true", help="wrap each prompt in the model's chat template"
    )
    parser.add_argument("--lines", action="store_true", help="each line is a prompt of its own")


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    """Add `--model`, which says whose tokenizer is meant."""
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="model folder (quickest), GGUF file or hub id (default: the installed model)",
    )


def main(args: argparse.Namespace) -> int:
    """Run `h2o-kv tokenize`; returns the exit status.

    Raises
    ------
    UserError
        The text cannot be read, a prompt has no token, or the model will not do.
    """
    name = args.file or (STDIN if args.text in (None, STDIN) else "TEXT")
    try:
        text = utf8("TEXT", lambda: str(args.text)) if name == "TEXT" else read_text(name)
    except (ValueError, OSError) as error:
        raise UserError(one_line(error)) from error
    # Not splitlines(): a form feed or a Unicode separator is text.
    prompts = text.removesuffix("\n").split("\n") if args.lines else [text]
    tokenizer = open_tokenizer(args.model, chat=args.chat)
    rows = []
    for number, prompt in enumerate(prompts, 1):
        rows.append(tokenizer.encode(prompt) if prompt else [])
        if not rows[-1]:
            what = f"line {number}" if args.lines else "the prompt"
            raise UserError(f"{what} must have at least one token, got {prompt!r}")
    sys.stdout.write(json.dumps({"tokens": rows}) + "\n")
    return 0
