"""Where attention lies, layer by layer, beside the paper's claims: by `h2o_kv.diagnostics`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from common import read_text
from diagnose import draw_attention, of_layers, plain
from report import markdown_table

from h2o_kv.diagnostics import attention_statistics
from h2o_kv.models import load_model
from paper.configs import SparsityTable, SparsityVariant, TableError
from paper.output import (
    Result,
    Run,
    beside,
    document,
    model_name,
    paper_cell,
    result,
    save,
    write,
)

QUICK = {"tokens": 64}
SPARSITY, TOP_TOKENS = "sparsity", "mass of the top 20 % tokens"
_SHOWN = (
    SPARSITY,
    "sparsity, whole square",
    TOP_TOKENS,
    "mass of the top 20 % of a row",
    "mass of the first 4 tokens",
    "overlap of heads, mean",
    "overlap of heads, worst pair",
)


def quick(variant: SparsityVariant) -> SparsityVariant:
    """The variant with a short text."""
    return variant.model_copy(update=QUICK)


def run_table(run: Run, table: SparsityTable, variant: SparsityVariant) -> str:
    """Measure and write; returns the Markdown.

    Raises
    ------
    TableError
        The text is too short.
    ModelLoadError, OSError
        A model or the text will not do.
    """
    results: list[Result] = []
    layers: dict[str, dict[str, Any]] = {}
    for source in variant.models:
        name = model_name(source)
        model, tokenizer = load_model(source, dtype=variant.dtype, device=variant.device)
        ids = tokenizer(read_text(run.data / variant.text))["input_ids"]
        if len(ids) < variant.tokens:
            raise TableError(
                f"{run.data / variant.text}: must have at least {variant.tokens} tokens, got {len(ids)}"
            )
        found = attention_statistics(
            model,
            torch.tensor(ids[: variant.tokens], device=model.device),
            row_stride=variant.row_stride,
            progress=lambda done: run.progress(f"{run.name}: attention", done),
        )
        layers[name] = {"tokens": variant.tokens, "layers": plain(found)}
        by_layer = of_layers(layers[name])
        for measure in _SHOWN:
            shares = [100 * share for share in by_layer[measure]]
            of = {"model": name, "measure": measure}
            results.append(result(of, fmean(shares), "%", by_layer=shares))
    results = beside(results, table.paper_values)
    about = {
        "text": f"first {variant.tokens:,} tokens of {variant.text}",
    }
    found = document(run, variant, about, results)
    return write(run, found, markdown(results), lambda file: draw(file, table, layers, results))


def markdown(results: Sequence[Result]) -> str:
    """A table a model: mean over the layers, lowest and highest, the paper's claim."""
    parts = []
    for model in dict.fromkeys(own["of"].get("model") for own in results):
        rows = []
        for own in results:
            if own["value"] is None or own["of"]["model"] != model:
                continue
            shares = own["by_layer"]
            low, high = (f"{end(shares):.1f} ({shares.index(end(shares))})" for end in (min, max))
            rows.append([own["of"]["measure"], f"{own['value']:.1f}", low, high, paper_cell(own)])
        if rows:
            head = ["%", "mean over layers", "lowest (layer)", "highest (layer)", "paper"]
            parts.append(f"## {model}\n\n{markdown_table(head, rows)}")
    return "\n".join(parts)


def draw(
    file: Path, table: SparsityTable, layers: dict[str, dict[str, Any]], results: Sequence[Result]
) -> None:
    """The panels of `diagnose.py`, of the last model, with the paper's claims as lines."""
    claims = {own["of"]["measure"]: own["paper"]["value"] / 100 for own in results if own["paper"]}
    name, found = list(layers.items())[-1]
    lines = {
        option: claims[measure]
        for option, measure in (("sparsity", SPARSITY), ("top_share", TOP_TOKENS))
        if measure in claims
    }
    save(file, f"{table.title}: {name}", lambda pyplot: draw_attention(pyplot, found, **lines))
