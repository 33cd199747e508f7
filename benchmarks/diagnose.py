#!/usr/bin/env python3
"""What attention looks like and what eviction does to it, on real text.

One pass of the full cache over the text gives the statistics of the H2O paper's section 3; evicting
caches of one size read the same tokens beside it, and what each dropped is weighed with the full
cache's attention. Writes results.json, results.md, evictions.jsonl and three plots into --out;
docs/diagnostics.md says what each number means.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from common import commit, machine_line, read_text
from report import RESULTS, load_pyplot, markdown_table
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from h2o_kv.cli.generate import parse_number
from h2o_kv.diagnostics import (
    AttentionStatistics,
    EvictionLog,
    PolicyReplay,
    kl_by_dropped,
    lifetimes,
    promotions,
    replay,
    slot_ages,
    summarise,
    token_classes,
    token_texts,
)
from h2o_kv.diagnostics.statistics import TOP
from h2o_kv.generation import CacheSpec
from h2o_kv.models import DTYPES, EMBEDDED_MODEL, ModelLoadError, load_model
from h2o_kv.policies import POLICIES, count_of, named

# H2O, section 3: of OPT on WikiText-103; "about" in the second.
CLAIMED_SPARSITY, CLAIMED_TOP_SHARE = 0.95, 0.9
EARLY = (0.1, 0.25, 0.5, 0.75)
SLICES = 16
QUICK = {"tokens": 256, "log_tokens": 128, "policies": ["h2o", "local"]}
COLOURS = {"h2o": "#1f77b4", "local": "#d62728", "heavy": "#ff7f0e", "streaming": "#2ca02c"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the diagnosis; returns the exit status."""
    args = parse_arguments(argv)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    try:
        results = diagnose(args)
    except (ModelLoadError, ValueError, NotImplementedError, OSError) as error:
        sys.stderr.write(f"diagnose: {error}\n")
        return 2
    text = json.dumps(results, ensure_ascii=False, indent=1)
    (args.out / "results.json").write_text(text + "\n", encoding="utf-8")
    report = markdown(results)
    (args.out / "results.md").write_text(report, encoding="utf-8")
    plotted = plot(results, args.out)
    sys.stdout.write(report)
    files = ", ".join(sorted(file.name for file in args.out.iterdir()))
    sys.stderr.write(f"written to {args.out}: {files}\n")
    if not plotted:
        sys.stderr.write("no plots: matplotlib is not installed\n")
    return 0


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("text", type=Path, nargs="?", help="file (default: the package's Genesis)")
    parser.add_argument("--model", help=f"folder, GGUF file or hub id (default: {EMBEDDED_MODEL})")
    parser.add_argument("--tokens", type=int, default=2048, help="of the text's start")
    parser.add_argument(
        "--policies",
        nargs="+",
        choices=[name for name in POLICIES if name != "full"],
        default=["h2o", "local", "streaming"],
    )
    parser.add_argument(
        "--ratio", type=parse_number, default=0.2, help="slots, as a part of --tokens"
    )
    parser.add_argument(
        "--row-stride", type=int, default=8, help="every so many rows are sorted one by one"
    )
    parser.add_argument(
        "--log-tokens",
        type=int,
        default=512,
        help="tokens of the eviction log, a step each; 0: none",
    )
    parser.add_argument(
        "--log-rate",
        type=parse_number,
        default=0.05,
        help="probability of each eviction to be logged",
    )
    parser.add_argument(
        "--log-layers", type=int, nargs="+", metavar="N", help="only these layers in the log"
    )
    parser.add_argument("--log-seed", type=int, default=0, help="of what is logged")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, help="CPU threads of PyTorch")
    parser.add_argument("--out", type=Path, default=RESULTS / "diagnose")
    parser.add_argument("--quick", action="store_true", help="few tokens; other options win")
    args = parser.parse_args(argv)
    if args.quick:
        parser.set_defaults(**QUICK)
        args = parser.parse_args(argv)
    for name, least in (("tokens", 32), ("row_stride", 1), ("log_tokens", 0), ("threads", 1)):
        value = getattr(args, name)
        if value is not None and value < least:
            parser.error(f"--{name.replace('_', '-')} must be >= {least}, got {value}")
    for name in ("ratio", "log_rate"):
        if not 0 < getattr(args, name) <= 1:
            parser.error(
                f"--{name.replace('_', '-')} must be > 0 and <= 1, got {getattr(args, name)}"
            )
    return args


def diagnose(args: argparse.Namespace) -> dict[str, Any]:
    """Load, run the caches, write the eviction log; everything that was measured, as plain values."""
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        console=Console(file=sys.stderr),
        refresh_per_second=2,
    ) as progress:

        def bar(name: str) -> Callable[[float], None]:
            task = progress.add_task(name, total=1.0)
            return lambda done: progress.update(task, completed=done)

        loaded = bar("loading")
        model, tokenizer = load_model(
            args.model, dtype=args.dtype, device=args.device, progress=lambda _, done: loaded(done)
        )
        ids = list(tokenizer(read_text(args.text))["input_ids"])
        if len(ids) <= args.tokens:
            raise ValueError(
                f"the text must have more than --tokens={args.tokens} tokens, got {len(ids)}"
            )
        ids = ids[: args.tokens + 1]
        slots = count_of(args.ratio, args.tokens)
        args.out.mkdir(parents=True, exist_ok=True)
        specs = [
            CacheSpec(
                label=name,
                policy=named(name).with_slots(slots),
                prefill="streaming",
                prefill_chunk=1,
            )
            for name in args.policies
        ]
        points = sorted({count_of(part, args.tokens) for part in EARLY})
        statistics = AttentionStatistics(early=points, row_stride=args.row_stride)
        run = replay(
            model, ids, specs, observers=[statistics], progress=bar("full and evicting caches")
        )
        classes = token_classes(tokenizer, ids[:-1])
        if args.log_tokens:
            write_log(args, model, tokenizer, ids, specs[0], bar("eviction log"))
    results = {
        "model": args.model or EMBEDDED_MODEL,
        "dtype": args.dtype,
        "text": args.text.name if args.text else "Genesis 1-4, King James version",
        "tokens": args.tokens,
        "slots": slots,
        "row_stride": args.row_stride,
        "machine": machine_line(args.device),
        "commit": commit(),
        "full_nll": float(run.full.nll.mean()),
        "layers": statistics.result(),
        "policies": {label: of_policy(policy, classes) for label, policy in run.policies.items()},
    }
    plain_results: dict[str, Any] = plain(results)
    return plain_results


def write_log(
    args: argparse.Namespace,
    model: Any,
    tokenizer: Any,
    ids: list[int],
    spec: CacheSpec,
    progress: Callable[[float], None],
) -> None:
    """Run the first policy once more, a step a forward, over the text's start, and log evictions."""
    ids = ids[: min(args.log_tokens, args.tokens) + 1]
    slots = count_of(args.ratio, len(ids) - 1)
    spec = dataclasses.replace(spec, policy=named(spec.label).with_slots(slots))
    about = {"policy": spec.label, "slots": slots, "tokens": len(ids) - 1}
    texts, classes = token_texts(tokenizer, ids), token_classes(tokenizer, ids)
    with EvictionLog(
        args.out / "evictions.jsonl",
        ids,
        texts,
        classes,
        rate=args.log_rate,
        layers=args.log_layers,
        seed=args.log_seed,
        about=about,
    ) as log:
        replay(
            model,
            ids,
            [spec],
            on_step={spec.label: log},
            layers={spec.label: log.layers},
            progress=progress,
        )


def of_policy(policy: PolicyReplay, classes: Sequence[str]) -> dict[str, Any]:
    """What one evicting cache dropped, and whether it froze."""
    budget = policy.budget
    steps = policy.dropped.shape[-1]
    cuts = [round(budget.total + (steps - budget.total) * i / SLICES) for i in range(SLICES + 1)]
    freeze = [
        {
            "step": stop - 1,
            "promotion_rate": promotions(policy.departures, budget, start, stop).rate,
            "median_age": fmean(
                layer.median for layer in slot_ages(policy.departures, stop - 1, budget)
            ),
        }
        for start, stop in pairwise(cuts)
        if start < stop
    ]
    rates = promotions(policy.departures, budget, budget.total, steps)
    kl = policy.predictions.kl
    return {
        "budget": {
            "num_sink": budget.num_sink,
            "num_heavy": budget.num_heavy,
            "num_recent": budget.num_recent,
        },
        "nll": float(policy.predictions.nll.mean()),
        "kl": float(kl[budget.total :].mean()),
        "dropped": summarise(policy.dropped, budget.total, num_slices=SLICES),
        "kl_by_dropped": kl_by_dropped(policy.dropped, kl[budget.total :], budget.total),
        "promotion_rate": rates.rate,
        "promotion_rates": rates.rates,
        "freeze": freeze,
        "sampled_steps": policy.sampled_steps,
        "lowest_heavy": policy.lowest_heavy.mean((1, 2)),
        "lifetimes": lifetimes(policy.departures, classes),
    }


def plain(value: Any) -> Any:
    """Values that JSON has; what is not finite is None."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, torch.Tensor):
        return plain(value.tolist())
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


# ---- The report.


def of_layers(results: dict[str, Any]) -> dict[str, list[float]]:
    """One number a layer, by what it is: means over heads where nothing else is said."""
    layers: list[dict[str, Any]] = results["layers"]

    def over_heads(name: str) -> list[float]:
        return [fmean(head[name] for head in layer["heads"]) for layer in layers]

    def over_groups(name: str) -> list[float]:
        return [fmean(group[name] for group in layer["groups"]) for layer in layers]

    return {
        "sparsity": [layer["sparsity"] for layer in layers],
        "sparsity, whole square": [layer["sparsity_square"] for layer in layers],
        "mass of the top 20 % tokens": over_heads("top_share"),
        "mass of the top 20 % of a row": [
            fmean(head["rows_top_share"]["mean"] for head in layer["heads"]) for layer in layers
        ],
        "P5 of that over rows": [
            fmean(head["rows_top_share"]["p5"] for head in layer["heads"]) for layer in layers
        ],
        "mass of the first 4 tokens": over_heads("sink_share"),
        "tokens for 90 %, share": [n / results["tokens"] for n in over_heads("tokens_90")],
        "tokens for 95 %, share": [n / results["tokens"] for n in over_heads("tokens_95")],
        "power law, slope": [
            fmean(head["power_law"]["slope"] for head in layer["heads"]) for layer in layers
        ],
        "power law, R2": [
            fmean(head["power_law"]["r2"] for head in layer["heads"]) for layer in layers
        ],
        "Gini": over_heads("gini"),
        "overlap of heads, mean": [layer["overlap"]["overlap_mean"] for layer in layers],
        "overlap of heads, worst pair": [layer["overlap"]["overlap_min"] for layer in layers],
        "Jaccard of heads, mean": [layer["overlap"]["jaccard_mean"] for layer in layers],
        "GQA: sum and max, overlap": over_groups("sum_max_overlap"),
        "GQA: coverage by sum, mean": over_groups("sum_mean"),
        "GQA: coverage by sum, worst head": over_groups("sum_worst"),
        "GQA: coverage by max, worst head": over_groups("max_worst"),
        "GQA: coverage by own sets": over_groups("own_mean"),
        "GQA: coverage by the union": over_groups("union_mean"),
        **{
            f"heavy after {n['tokens']:,} tokens, still at the end": [
                layer["stability"][i]["in_final"] for layer in layers
            ]
            for i, n in enumerate(layers[0]["stability"])
        },
    }


def markdown(results: dict[str, Any]) -> str:
    """The report."""
    rows = []
    for name, values in of_layers(results).items():
        given = [(v, i) for i, v in enumerate(values) if v is not None and not math.isnan(v)]
        if given:
            low, high = min(given), max(given)
            mean = fmean(value for value, _ in given)
            rows.append(
                [name, f"{mean:.3f}", f"{low[0]:.3f} ({low[1]})", f"{high[0]:.3f} ({high[1]})"]
            )
    policies: dict[str, dict[str, Any]] = results["policies"]
    dropped = []
    for name, policy in policies.items():
        kept = policy["dropped"]["kept"]
        shares = [f"{kept[key]:.3f}" for key in ("mean", "p5", "p1", "low")]
        dropped.append([name, f"{policy['nll']:.3f}", f"{policy['kl']:.4f}", *shares])
    report = (
        "# Attention, and what eviction drops of it\n\n"
        f"{results['model']} ({results['dtype']}), {results['tokens']:,} tokens of "
        f"{results['text']}; caches of {results['slots']:,} slots, streaming from token 0 one by one.\n"
        f"{results['machine']}; commit {results['commit']}.\n\n"
        "## The full cache, by layer\n\n"
        f"{markdown_table(['', 'mean over layers', 'lowest (layer)', 'highest (layer)'], rows)}\n"
        f"The paper, of OPT on WikiText-103: sparsity above {CLAIMED_SPARSITY:.0%}, about "
        f"{CLAIMED_TOP_SHARE:.0%} of the mass on {TOP:.0%} of the tokens.\n\n"
        "## Kept attention, 1 - m_drop, over layers, heads and steps with a full cache\n\n"
        f"The full cache's NLL is {results['full_nll']:.3f}.\n\n"
    )
    head = ["", "NLL", "KL to full", "kept, mean", "P5", "P1", "lowest"]
    report += markdown_table(head, dropped)
    report += "\nSteps by their mean m_drop, in quarters: mean m_drop and mean KL.\n\n"
    report += markdown_table(
        ["", "least", "", "", "most"],
        [
            [name, *(f"{q['dropped']:.3f}: {q['kl']:.4f}" for q in policy["kl_by_dropped"])]
            for name, policy in policies.items()
        ],
    )
    report += "\n## Freezing\n\n"
    lines = []
    for name, policy in policies.items():
        for token_class, life in policy["lifetimes"].items():
            median = life["lifetime"]["median"]
            lines.append(
                [
                    f"{name}, {token_class}",
                    f"{policy['promotion_rate']:.3f}",
                    f"{life['count']:,}",
                    f"{life['stayed']:.1%}",
                    "-" if median is None else f"{median:.0f}",
                    f"{life['so_far']['mean']:.0f}",
                ]
            )
    head = ["", "promotion rate", "tokens x heads", "stayed", "median life of those that left"]
    report += markdown_table([*head, "mean life so far, all"], lines)
    return report


# ---- The plots.


def plot(results: dict[str, Any], out: Path) -> bool:
    """Draw attention.png, dropped.png and freeze.png; False without matplotlib."""
    pyplot = load_pyplot()
    if pyplot is None:
        return False
    title = f"{results['model']}, {results['tokens']:,} tokens of {results['text']}"
    for name, draw in (
        ("attention", draw_attention),
        ("dropped", draw_dropped),
        ("freeze", draw_freeze),
    ):
        figure = draw(pyplot, results)
        figure.suptitle(title, fontsize=10)
        figure.savefig(out / f"{name}.png", dpi=120)
        pyplot.close(figure)
    return True


def draw_attention(
    pyplot: Any,
    results: dict[str, Any],
    sparsity: float = CLAIMED_SPARSITY,
    top_share: float = CLAIMED_TOP_SHARE,
) -> Any:
    """Sparsity, mass of the top tokens and overlap of heads, by layer, beside what is claimed."""
    layers = of_layers(results)
    figure, axes = pyplot.subplots(1, 3, figsize=(14, 4), layout="constrained")
    panels = (
        (("sparsity", "sparsity, whole square"), sparsity, f"paper: > {sparsity:.0%}"),
        (
            (
                "mass of the top 20 % tokens",
                "mass of the top 20 % of a row",
                "P5 of that over rows",
                "mass of the first 4 tokens",
            ),
            top_share,
            f"paper: about {top_share:.0%}",
        ),
        (
            ("overlap of heads, mean", "overlap of heads, worst pair", "Jaccard of heads, mean"),
            results["layers"][0]["overlap"]["by_chance"],
            "overlap by chance",
        ),
    )
    for axis, (names, line, text) in zip(axes, panels, strict=True):
        for name in names:
            values = [math.nan if v is None else v for v in layers[name]]
            axis.plot(range(len(values)), values, marker=".", label=name)
        axis.axhline(line, color="black", linestyle="--", linewidth=1, label=text)
        axis.set(xlabel="layer", ylim=(0, 1.02))
        axis.legend(fontsize=7)
    return figure


def draw_dropped(pyplot: Any, results: dict[str, Any]) -> Any:
    """Kept attention by position, its mean and P1, and KL beside m_drop."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for name, policy in results["policies"].items():
        slices = policy["dropped"]["slices"]
        steps = [(first + last) / 2 for first, last, _ in slices]
        colour = COLOURS[name]
        left.plot(steps, [kept["mean"] for *_, kept in slices], color=colour, label=f"{name}, mean")
        left.plot(
            steps, [kept["p1"] for *_, kept in slices], color=colour, ls=":", label=f"{name}, P1"
        )
        quarters = policy["kl_by_dropped"]
        right.plot(
            [q["dropped"] for q in quarters],
            [q["kl"] for q in quarters],
            marker="o",
            color=colour,
            label=name,
        )
    left.set(xlabel="step", ylabel="kept attention, 1 - m_drop", ylim=(0, 1.02))
    right.set(xlabel="mean m_drop of a quarter of the steps", ylabel="mean KL to full, nats")
    left.legend(fontsize=7)
    right.legend(fontsize=7)
    return figure


def draw_freeze(pyplot: Any, results: dict[str, Any]) -> Any:
    """Lowest heavy score, age of the heavy hitters and promotion rate, by step."""
    figure, axes = pyplot.subplots(1, 3, figsize=(14, 4), layout="constrained")
    for name, policy in results["policies"].items():
        if not policy["budget"]["num_heavy"]:
            continue
        scores = [math.nan if v is None else v for v in policy["lowest_heavy"]]
        axes[0].plot(policy["sampled_steps"], scores, color=COLOURS[name], label=name)
        for axis, key in ((axes[1], "median_age"), (axes[2], "promotion_rate")):
            values = [math.nan if f[key] is None else f[key] for f in policy["freeze"]]
            axis.plot(
                [f["step"] for f in policy["freeze"]], values, color=COLOURS[name], label=name
            )
    names = (
        "lowest heavy score, mean over heads",
        "age of heavy hitters, median",
        "promotion rate",
    )
    for axis, name in zip(axes, names, strict=True):
        axis.set(xlabel="step", ylabel=name)
        axis.legend(fontsize=7)
    return figure


if __name__ == "__main__":
    sys.exit(main())
