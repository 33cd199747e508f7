#!/usr/bin/env python3
"""A book, token after token, through a model: perplexity of a full cache, StreamingLLM and H2O.

Every token of the text is predicted from what the cache holds when it comes. The caches take turns,
block after block; the full cache leaves when its perplexity has exploded. StreamingLLM is sinks and a
window, H2O is sinks, heavy hitters and a window of the same size in all; both roll positions, so a
stream has no end. Writes results.jsonl, results.md and a plot into --out.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from common import commit, machine_line, read_text, resident_mib
from report import RESULTS, load_pyplot
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from transformers import DynamicCache

from h2o_kv import EvictionPolicy, H2OCache
from h2o_kv.hf import cache_kwarg
from h2o_kv.models import DTYPES, EMBEDDED_MODEL, ModelLoadError, load_model

TITLES = {
    "full": "full cache",
    "streaming_llm": "StreamingLLM (sinks + window)",
    "h2o": "H2O (sinks + heavy + window), rolling",
}
COLOURS = {"full": "#7f7f7f", "streaming_llm": "#d62728", "h2o": "#1f77b4"}
# Times its best perplexity at which a full cache has failed.
EXPLODED = 5.0
QUICK = {"every": 256, "tokens": 1024, "block": 64, "budget": 96}


@dataclass
class Stream:
    """One cache on its way through the text."""

    name: str
    cache: Any
    seconds: float = 0.0
    nll: list[float] = field(default_factory=list)  # of each token
    rows: list[dict[str, Any]] = field(default_factory=list)  # of each stretch of --every tokens
    alive: bool = True

    def feed(self, model: Any, block: torch.Tensor, following: torch.Tensor) -> None:
        """Run a block through the model, and note the NLL of the token after each of its tokens."""
        attention = "sdpa" if self.name == "full" else "h2o"
        if model.config._attn_implementation != attention:
            model.set_attn_implementation(attention)
        began = time.perf_counter()
        with torch.no_grad():
            logits = model(block[None], **{cache_kwarg(model): self.cache}).logits[0].float()
        self.seconds += time.perf_counter() - began
        self.nll += torch.nn.functional.cross_entropy(logits, following, reduction="none").tolist()

    def kv_bytes(self) -> int:
        """Bytes of keys and values."""
        if isinstance(self.cache, H2OCache):
            return self.cache.nbytes().kv
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.cache.layers)

    def close_stretch(self, every: int) -> dict[str, Any]:
        """Sum up the last `every` tokens."""
        seen = len(self.nll)
        largest = seen - 1
        if isinstance(self.cache, H2OCache):
            kept = max(int(layer.max()) for layer in self.cache.tokens_kept())
            largest = kept + self.cache.prefill_chunk - 1  # Of the last token that joins the kept.
        self.rows.append(
            {
                "cache": self.name,
                "tokens": seen,
                "perplexity": round(math.exp(sum(self.nll[-every:]) / every), 3),
                "largest_position": largest,
                "kv_bytes": self.kv_bytes(),
                "resident_mib": round(resident_mib(), 1),
                "tokens_per_second": round(seen / self.seconds, 1),
            }
        )
        perplexity = [row["perplexity"] for row in self.rows]
        if self.name == "full" and perplexity[-1] > EXPLODED * min(perplexity):
            self.alive, self.cache = False, None
        return self.rows[-1]


def main() -> int:
    """Run the streams; returns the exit status."""
    args = parse_arguments()
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    screen = Console(file=sys.stderr)
    try:
        model, tokenizer = load_model(args.model, dtype=args.dtype)
        text = "\n\n".join(read_text(file) for file in args.text or [None])
        ids = torch.tensor(tokenizer(text)["input_ids"])
        streams = make_streams(
            model, args.caches, budget=args.budget, sinks=args.sinks, chunk=args.chunk
        )
    except (ModelLoadError, ValueError, OSError) as error:
        sys.stderr.write(f"stream_book: {error}\n")
        return 2
    if len(ids) <= args.every:
        sys.stderr.write(
            f"stream_book: the text must have more than --every={args.every} tokens, got {len(ids)}\n"
        )
        return 2
    tokens = min(args.tokens, len(ids) - 1)
    setting = {
        "model": args.model or EMBEDDED_MODEL,
        "dtype": args.dtype,
        "text": [file.name for file in args.text] if args.text else ["Genesis 1-4"],
        "text_tokens": len(ids),
        "context": model.config.max_position_embeddings,
        "budget": args.budget,
        "sinks": args.sinks,
        "block": args.block,
        "machine": machine_line("cpu"),
        "commit": commit(),
    }
    args.out.mkdir(parents=True, exist_ok=True)
    with (
        (args.out / "results.jsonl").open("w", encoding="utf-8") as lines,
        Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:,.0f}/{task.total:,.0f} tokens"),
            TimeElapsedColumn(),
            console=screen,
            refresh_per_second=1,
        ) as progress,
    ):
        task = progress.add_task("stream", total=tokens)

        def on_row(row: dict[str, Any]) -> None:
            print(json.dumps(row), file=lines, flush=True)
            screen.print(
                f"{row['tokens']:>9,} {row['cache']:14} perplexity {row['perplexity']:10.2f}"
            )

        run_streams(
            model,
            ids[: tokens + 1],
            streams,
            block=args.block,
            every=args.every,
            minutes=args.minutes,
            on_block=lambda done: progress.update(task, completed=done),
            on_row=on_row,
        )
    report = markdown(setting, streams, args)
    (args.out / "results.md").write_text(report, encoding="utf-8")
    plot(streams, args.out / "perplexity.png")
    sys.stdout.write(report)
    return 0


def run_streams(
    model: Any,
    ids: torch.Tensor,
    streams: Sequence[Stream],
    *,
    block: int,
    every: int,
    minutes: float = math.inf,
    on_block: Callable[[int], object] = lambda done: None,
    on_row: Callable[[dict[str, Any]], object] = lambda row: None,
) -> None:
    """Feed all tokens of a text but the last to caches that take turns, block after block.

    Parameters
    ----------
    model : transformers.PreTrainedModel
    ids : Tensor, int64, [tokens]
    streams : sequence of Stream
    block, every : int
        Tokens of a forward, and between two results: a multiple of it.
    minutes : float
        Stop after so many.
    on_block, on_row : callable
        Called with the tokens so far, and with each result.
    """
    began = time.perf_counter()
    for start in range(0, len(ids) - 1, block):
        end = min(start + block, len(ids) - 1)
        for stream in streams:
            if stream.alive:
                stream.feed(model, ids[start:end], ids[start + 1 : end + 1])
        on_block(end)
        if end // every > start // every:
            for stream in [s for s in streams if s.alive]:
                on_row(stream.close_stretch(every))
        if time.perf_counter() - began > 60 * minutes:
            return


def make_streams(
    model: Any, names: Sequence[str], *, budget: int, sinks: int, chunk: int
) -> list[Stream]:
    """The caches of these names, each of `budget` tokens, `sinks` of them sinks."""
    options: dict[str, Any] = {
        "prefill": "streaming",
        "prefill_chunk": chunk,
        "positions": "rolling",
    }
    window = budget - sinks
    heavy = window // 2
    policies = {
        "streaming_llm": EvictionPolicy(num_sink=sinks, num_heavy=0, num_recent=window),
        "h2o": EvictionPolicy(num_sink=sinks, num_heavy=heavy, num_recent=window - heavy),
    }
    caches: dict[str, Any] = {"full": DynamicCache()}
    for name, policy in policies.items():
        caches[name] = H2OCache(model, policy, **options)
    return [Stream(name, caches[name]) for name in names]


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help=f"folder, GGUF file or hub id (default: {EMBEDDED_MODEL})")
    parser.add_argument(
        "--text",
        type=Path,
        nargs="+",
        help="text files, one after the other (default: Genesis 1-4)",
    )
    parser.add_argument("--caches", choices=TITLES, nargs="+", default=list(TITLES))
    parser.add_argument("--budget", type=int, default=1024, help="tokens kept, sinks among them")
    parser.add_argument("--sinks", type=int, default=4)
    parser.add_argument("--every", type=int, default=10_000, help="tokens between two results")
    parser.add_argument("--tokens", type=int, default=10**9, help="stop after so many")
    parser.add_argument("--minutes", type=float, default=20.0, help="stop after so many")
    parser.add_argument("--block", type=int, default=256, help="tokens of a forward")
    parser.add_argument(
        "--chunk", type=int, default=1, help="that join together; 1: the paper's step"
    )
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bfloat16")
    parser.add_argument("--threads", type=int, help="CPU threads of PyTorch")
    parser.add_argument("--out", type=Path, default=RESULTS / "stream_book")
    parser.add_argument("--quick", action="store_true", help="1,024 tokens, a budget of 96")
    args = parser.parse_args()
    if args.quick:
        for name, value in QUICK.items():
            setattr(args, name, value)
    for name in ("every", "tokens", "block", "chunk"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be >= 1, got {getattr(args, name)}")
    if args.every % args.block:
        args.every -= args.every % args.block
        if args.every == 0:
            parser.error("--every must be >= --block")
    if not 0 <= args.sinks <= args.budget - 2:
        parser.error(f"--sinks must be in 0..budget - 2 = {args.budget - 2}, got {args.sinks}")
    return args


def markdown(setting: dict[str, Any], streams: list[Stream], args: argparse.Namespace) -> str:
    """The report: perplexity of each stretch, and what the caches held."""
    stretches = sorted({row["tokens"] for stream in streams for row in stream.rows})
    lines = [
        "# A book through a model",
        "",
        f"{setting['model']} ({setting['dtype']}; context {setting['context']:,}), "
        f"{', '.join(setting['text'])} ({setting['text_tokens']:,} tokens), in forwards of "
        f"{setting['block']} tokens of which {args.chunk} join together. Budget {setting['budget']:,}, "
        f"{setting['sinks']} of them sinks; H2O: half of the rest heavy, half recent.",
        f"{setting['machine']}; commit {setting['commit']}.",
        "",
        f"Perplexity of the last {args.every:,} tokens:",
        "",
        "| tokens | " + " | ".join(TITLES[s.name] for s in streams) + " |",
        "| ---: | " + " | ".join("---:" for _ in streams) + " |",
    ]
    for stretch in stretches:
        cells = []
        for stream in streams:
            found = [row["perplexity"] for row in stream.rows if row["tokens"] == stretch]
            cells.append(f"{found[0]:,.2f}" if found else "-")
        lines.append(f"| {stretch:,} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "| | largest position | KV MB, first and last | resident MiB, first and last | tokens/s |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for stream in (s for s in streams if s.rows):
        first, last = stream.rows[0], stream.rows[-1]
        largest = max(row["largest_position"] for row in stream.rows)
        lines.append(
            f"| {TITLES[stream.name]} | {largest:,} | {first['kv_bytes'] / 1e6:.1f}, "
            f"{last['kv_bytes'] / 1e6:.1f} | {first['resident_mib']:,.0f}, "
            f"{last['resident_mib']:,.0f} | {last['tokens_per_second']:,.0f} |"
        )
    return "\n".join(lines) + "\n"


def plot(streams: list[Stream], file: Path) -> None:
    """Draw perplexity by tokens, if matplotlib is there."""
    pyplot = load_pyplot()
    if pyplot is None:
        return
    figure = draw(pyplot, streams)
    figure.savefig(file, dpi=150)
    pyplot.close(figure)


def draw(pyplot: Any, streams: Sequence[Stream]) -> Any:
    """Perplexity of each stretch by tokens."""
    figure, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
    for stream in streams:
        axes.plot(
            [row["tokens"] for row in stream.rows],
            [row["perplexity"] for row in stream.rows],
            color=COLOURS[stream.name],
            label=TITLES[stream.name],
            marker=".",
        )
    axes.set(xlabel="tokens of the text", ylabel="perplexity of the last stretch", yscale="log")
    axes.legend()
    return figure


if __name__ == "__main__":
    raise SystemExit(main())
