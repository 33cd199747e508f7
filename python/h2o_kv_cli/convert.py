"""`h2o-kv convert`: a model of any source as a plain Hugging Face folder."""

from __future__ import annotations

import argparse
import sys

from h2o_kv_cli import UserError, one_line, write_json

DESCRIPTION = (
    "Write a GGUF file, a model folder, a model of the hub or (without SOURCE) the installed "
    "default model as a plain Hugging Face folder: config.json, generation_config.json, "
    ".safetensors and the tokenizer's files, as from_pretrained and C++ programs read them."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `h2o-kv convert` to its parser."""
    parser.add_argument(
        "source",
        nargs="?",
        metavar="SOURCE",
        help="GGUF file, model folder or hub id (default: the installed model)",
    )
    parser.add_argument("folder", metavar="FOLDER", help="what is written; new or empty")
    parser.add_argument(
        "--dtype",
        default="auto",
        metavar="DTYPE",
        help="of the weights: float32, bfloat16, float16, float64, or auto, as in the source and "
        "float32 of a GGUF file (default: %(default)s)",
    )
    parser.add_argument(
        "--max-shard-size",
        default="5GB",
        metavar="SIZE",
        help="of one .safetensors file, as in 200MB (default: %(default)s)",
    )
    parser.add_argument(
        "--force", action="store_true", help="replace FOLDER if it holds a model already"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a sentence")


def main(args: argparse.Namespace) -> int:
    """Run `h2o-kv convert`; returns the exit status.

    Raises
    ------
    UserError
        An option, the source or the folder will not do.
    """
    from rich.console import Console

    from h2o_kv.cli.bars import Bars
    from h2o_kv.models import ModelLoadError, convert_model

    bars = Bars(Console(file=sys.stderr, highlight=False, markup=False))
    try:
        written = convert_model(
            args.source,
            args.folder,
            dtype=args.dtype,
            max_shard_size=args.max_shard_size,
            force=args.force,
            # In a log, an error is to be the only line.
            progress=(lambda text, done: bars.update("convert", text, done))
            if bars.drawn
            else None,
        )
    except (ModelLoadError, ValueError) as error:
        raise UserError(one_line(error)) from error
    finally:
        bars.hide()
    if args.json:
        write_json(written)
    else:
        sys.stdout.write(
            f"{written['folder']}: {written['architecture']}, {written['dtype']}, "
            f"{written['weights']:,} weights in {len(written['files'])} .safetensors\n"
        )
    return 0
