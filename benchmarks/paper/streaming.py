"""Perplexity of a text that is far longer than the budget, positions rolling: by `stream_book.py`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import torch
from common import read_text
from report import markdown_table
from stream_book import TITLES, Stream, draw, make_streams, run_streams

from h2o_kv.generation import attention_restored
from h2o_kv.models import load_model
from paper.configs import StreamingTable, StreamingVariant, TableError
from paper.output import (
    Result,
    Run,
    beside,
    document,
    model_name,
    number,
    paper_cell,
    result,
    save,
    write,
)

QUICK = {"tokens": 192, "every": 64, "block": 32, "budget": 48}


def quick(variant: StreamingVariant) -> StreamingVariant:
    """The variant with a short text and few slots."""
    return variant.model_copy(update=QUICK)


def run_table(run: Run, table: StreamingTable, variant: StreamingVariant) -> str:
    """Stream and write; returns the Markdown.

    Raises
    ------
    TableError
        The text is too short, or the numbers do not go together.
    ModelLoadError, OSError
        A model or the text will not do.
    """
    if variant.every % variant.block:
        raise TableError(
            f"every: must be a multiple of block = {variant.block}, got {variant.every}"
        )
    if variant.sinks > variant.budget - 2:
        raise TableError(
            f"sinks: must be at most budget - 2 = {variant.budget - 2}, got {variant.sinks}"
        )
    results: list[Result] = []
    streams: list[Stream] = []
    for source in variant.models:
        streams = stream(run, variant, source)
        results += [own for stream in streams for own in of_stream(model_name(source), stream)]
    results = beside(results, table.paper_values)
    about = {
        "texts": ", ".join(variant.texts),
        "slots": f"{variant.budget:,}, {variant.sinks} of them sinks; H2O: half of the others heavy",
        "forwards": f"of {variant.block} tokens of which {variant.chunk} join together",
    }
    found = document(run, variant, about, results)
    return write(
        run,
        found,
        markdown(results),
        lambda file: save(file, table.title, lambda pyplot: draw(pyplot, streams)),
    )


def stream(run: Run, variant: StreamingVariant, source: str | None) -> list[Stream]:
    """The caches after they have seen the text."""
    model, tokenizer = load_model(source, dtype=variant.dtype, device=variant.device)
    text = "\n\n".join(read_text(run.data / file) for file in variant.texts)
    ids = tokenizer(text)["input_ids"]
    if len(ids) <= variant.tokens:
        raise TableError(
            f"texts: must have more than {variant.tokens} tokens together, got {len(ids)}"
        )
    streams = make_streams(
        model, variant.caches, budget=variant.budget, sinks=variant.sinks, chunk=variant.chunk
    )
    with attention_restored(model):
        run_streams(
            model,
            torch.tensor(ids[: variant.tokens + 1], device=model.device),
            streams,
            block=variant.block,
            every=variant.every,
            on_block=lambda done: run.progress(f"{run.name}: stream", done / variant.tokens),
        )
    return streams


def of_stream(model: str, stream: Stream) -> list[Result]:
    """Perplexity of the whole stream, with that of its stretches, and how long it was."""
    names = {"model": model, "cache": stream.name}
    stretches = [
        {name: row[name] for name in ("tokens", "perplexity", "largest_position", "kv_bytes")}
        for row in stream.rows
    ]
    return [
        result(
            {**names, "measure": "perplexity"},
            math.exp(fmean(stream.nll)),
            "",
            stretches=stretches,
        ),
        result({**names, "measure": "tokens"}, len(stream.nll), "tokens"),
    ]


def markdown(results: Sequence[Result]) -> str:
    """A table a model: the whole stream, then its stretches."""
    parts = []
    ours = [own for own in results if own["value"] is not None]
    for model in dict.fromkeys(own["of"]["model"] for own in ours):
        found: dict[tuple[str, str], Result] = {
            (own["of"]["cache"], own["of"]["measure"]): own
            for own in ours
            if own["of"]["model"] == model
        }
        caches = list(dict.fromkeys(cache for cache, _ in found))
        rows = []
        for cache in caches:
            perplexity, tokens = found[cache, "perplexity"], found[cache, "tokens"]
            cells = [TITLES[cache], number(perplexity["value"]), paper_cell(perplexity)]
            rows.append([*cells, f"{tokens['value']:,}", paper_cell(tokens)])
        head = ["cache", "perplexity", "paper", "tokens", "paper"]
        stretches: dict[int, dict[str, Any]] = {}
        for cache in caches:
            for row in found[cache, "perplexity"]["stretches"]:
                stretches.setdefault(row["tokens"], {})[cache] = row["perplexity"]
        lines = [
            [f"{tokens:,}", *(f"{own[cache]:,.2f}" if cache in own else "-" for cache in caches)]
            for tokens, own in stretches.items()
        ]
        parts.append(
            f"## {model}\n\n{markdown_table(head, rows)}\nPerplexity of each stretch:\n\n"
            f"{markdown_table(['tokens', *(TITLES[cache] for cache in caches)], lines)}"
        )
    return "\n".join(parts)
