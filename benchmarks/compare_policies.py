#!/usr/bin/env python3
"""Full cache, H2O and a local window of H2O's size on real text.

Each continues the same prompt, and each predicts the text's true continuation one token at a time
through its cache. The three take turns token by token, so their times compare. Writes results.json,
results.md and results.png into --out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import commit, machine_line, read_text
from report import load_pyplot
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from torch.profiler import ProfilerActivity, profile

from h2o_kv import EvictionPolicy
from h2o_kv.cli.generate import parse_budget
from h2o_kv.generation import (
    CacheSession,
    CacheSpec,
    ContinuationScore,
    GenerationResult,
    compare_tokens,
    generate,
    percentile,
    resolve_policy,
    score_continuation,
)
from h2o_kv.models import DTYPES, EMBEDDED_MODEL, ModelLoadError, load_model

QUICK_PROMPT_TOKENS, QUICK_NEW_TOKENS = 200, 16
PROFILED_STEPS = 10
TITLES = {"full": "full cache", "h2o": "H2O", "local": "local window"}
COLOURS = {"full": "#444444", "h2o": "#1f77b4", "local": "#d62728"}


@dataclass(frozen=True)
class Comparison:
    """All that was measured; the tuples are in the order full, h2o, local."""

    setting: dict[str, Any]
    texts: tuple[GenerationResult, ...]
    scores: tuple[ContinuationScore, ...]
    true_text: str
    profiles: dict[str, str]

    def step_ms(self, index: int) -> list[float]:
        """Milliseconds of every decode step under one cache, generation and scoring together."""
        return [*self.texts[index].step_ms, *self.scores[index].step_ms]


def main() -> int:
    """Run the comparison; returns the exit status."""
    args = parse_arguments()
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    try:
        comparison = compare(args)
    except (ModelLoadError, ValueError, OSError) as error:
        sys.stderr.write(f"compare_policies: {error}\n")
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    results = args.out / "results.json"
    results.write_text(
        json.dumps(as_dict(comparison), ensure_ascii=False, indent=1) + "\n", encoding="utf-8"
    )
    report = markdown(comparison)
    (args.out / "results.md").write_text(report, encoding="utf-8")
    plotted = plot(comparison, args.out / "results.png")
    sys.stdout.write(report)
    sys.stderr.write(
        f"written to {args.out}: results.json, results.md"
        + (", results.png\n" if plotted else "; no results.png: matplotlib is not installed\n")
    )
    return 0


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help=f"folder, GGUF file or hub id (default: {EMBEDDED_MODEL})")
    parser.add_argument("--text", type=Path, help="text file (default: the package's Genesis 1-4)")
    parser.add_argument("--prompt-tokens", type=int, default=1500)
    parser.add_argument("--new-tokens", type=int, default=200)
    parser.add_argument("--heavy", type=parse_budget, default=0.1, help="count, or part (10%%)")
    parser.add_argument("--recent", type=parse_budget, default=0.1, help="count, or part (10%%)")
    parser.add_argument("--sink", type=int, default=0, help="count")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, help="CPU threads of PyTorch")
    parser.add_argument(
        "--profile",
        action="store_true",
        help="profile a few steps of each cache; done anyway where H2O is slower",
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/compare_policies"))
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"{QUICK_PROMPT_TOKENS} prompt tokens, {QUICK_NEW_TOKENS} new ones",
    )
    args = parser.parse_args()
    if args.quick:
        args.prompt_tokens, args.new_tokens = QUICK_PROMPT_TOKENS, QUICK_NEW_TOKENS
    if args.prompt_tokens < 1 or args.new_tokens < 2:
        parser.error("--prompt-tokens must be >= 1 and --new-tokens >= 2")
    if args.threads is not None and args.threads < 1:
        parser.error(f"--threads must be >= 1, got {args.threads}")
    return args


def compare(args: argparse.Namespace) -> Comparison:
    """Load model and text, generate, score, and profile where asked or where H2O is slower."""
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TimeElapsedColumn(),
        console=Console(file=sys.stderr),
        refresh_per_second=2,
    ) as progress:
        loading = progress.add_task("loading", total=100)
        model, tokenizer = load_model(
            args.model,
            dtype=args.dtype,
            device=args.device,
            progress=lambda text, done: progress.update(
                loading, description=text, completed=100 * done
            ),
        )
        ids = tokenizer(read_text(args.text))["input_ids"]
        needed = args.prompt_tokens + args.new_tokens
        if len(ids) < needed:
            raise ValueError(f"the text must have at least {needed} tokens, got {len(ids)}")
        prompt, continuation = ids[: args.prompt_tokens], ids[args.prompt_tokens : needed]
        specs = make_specs(args, len(prompt))

        prefills = progress.add_task("prefills", total=2 * len(specs))
        steps = progress.add_task("tokens", total=2 * args.new_tokens)

        def on_prefill(_: CacheSpec, done: float) -> None:
            if done == 1:
                progress.advance(prefills)

        texts = generate(
            model,
            tokenizer,
            prompt,
            specs,
            max_new_tokens=args.new_tokens,
            ignore_eos=True,
            on_prefill=on_prefill,
            on_token=lambda _: progress.advance(steps),
        )
        scores = score_continuation(
            model,
            prompt,
            continuation,
            specs,
            on_prefill=on_prefill,
            on_token=lambda _: progress.advance(steps),
        )
        medians = [
            statistics.median([*text.step_ms, *score.step_ms])
            for text, score in zip(texts, scores, strict=True)
        ]
        profiles = {}
        if args.profile or medians[1] > medians[0]:
            for spec in progress.track(specs, description="profiles"):
                profiles[spec.label] = profile_steps(model, prompt, spec)
    setting = {
        "model": args.model or EMBEDDED_MODEL,
        "dtype": args.dtype,
        "device": args.device,
        "text": args.text.name if args.text else "Genesis 1-4, King James version",
        "prompt_tokens": len(prompt),
        "new_tokens": args.new_tokens,
        "num_sink": args.sink,
        "budget": specs[1].policy.budget().total if specs[1].policy else 0,
        "machine": machine_line(args.device),
        "commit": commit(),
    }
    true_text = tokenizer.decode(continuation)
    return Comparison(setting, texts, scores, true_text, profiles)


def make_specs(args: argparse.Namespace, prompt_len: int) -> list[CacheSpec]:
    """The three caches: full, H2O, and a window with as many slots as H2O."""
    parts: dict[str, Any] = {}
    for name, value in (("heavy", args.heavy), ("recent", args.recent)):
        parts[f"num_{name}" if isinstance(value, int) else f"{name}_ratio"] = value
    h2o = resolve_policy(EvictionPolicy(num_sink=args.sink, **parts), prompt_len)
    local = EvictionPolicy(num_heavy=0, num_recent=h2o.budget().total)
    return [
        CacheSpec(label="full"),
        CacheSpec(label="h2o", policy=h2o),
        CacheSpec(label="local", policy=local),
    ]


def profile_steps(model: Any, prompt: Sequence[int], spec: CacheSpec) -> str:
    """Where the time of a decode step goes: PyTorch's profile of a few steps, by own time."""
    name = model.config._attn_implementation
    session = CacheSession(model, spec)
    token = int(session.prefill(prompt).argmax())
    activities = [ProfilerActivity.CPU]
    if model.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        for _ in range(PROFILED_STEPS):
            token = int(session.feed(token).argmax())
    model.set_attn_implementation(name)
    sort = "self_cuda_time_total" if model.device.type == "cuda" else "self_cpu_time_total"
    return str(profiler.key_averages().table(sort_by=sort, row_limit=8, max_name_column_width=40))


def running_mean(values: Sequence[float]) -> list[float]:
    """Mean of the values so far."""
    means, total = [], 0.0
    for count, value in enumerate(values, start=1):
        total += value
        means.append(total / count)
    return means


def as_dict(comparison: Comparison) -> dict[str, Any]:
    """Everything, as plain values for JSON."""
    runs = []
    for index, (text, score) in enumerate(zip(comparison.texts, comparison.scores, strict=True)):
        steps = comparison.step_ms(index)
        runs.append(
            {
                "label": text.label,
                "median_ms": statistics.median(steps),
                "p10_ms": percentile(steps, 10),
                "p90_ms": percentile(steps, 90),
                "mean_nll": score.mean_nll,
                "generation": text.as_dict(),
                "scoring": score.as_dict(),
            }
        )
    return {
        **comparison.setting,
        "runs": runs,
        "true_continuation": comparison.true_text,
        "profiles": comparison.profiles,
    }


def markdown(comparison: Comparison) -> str:
    """The report, with a table, the texts, and a profile if there is one."""
    setting = comparison.setting
    texts, scores = comparison.texts, comparison.scores
    steps = [comparison.step_ms(i) for i in range(len(texts))]
    full_ms, h2o_ms = (statistics.median(s) for s in steps[:2])

    def row(name: str, cells: Sequence[str]) -> str:
        return f"| {name} | " + " | ".join(cells) + " |\n"

    table = row("", [TITLES[t.label] for t in texts]) + row("---", ["---:"] * len(texts))
    table += row("tokens seen", [f"{t.tokens_seen:,}" for t in texts])
    table += row("tokens kept", [f"{max(t.tokens_kept):,}" for t in texts])
    table += row("KV bytes", [f"{t.kv_bytes:,}" for t in texts])
    table += row("of the full cache", [f"{t.kv_bytes / t.full_kv_bytes:.1%}" for t in texts])
    prefills = [min(t.prefill_s, s.prefill_s) for t, s in zip(texts, scores, strict=True)]
    table += row("prefill, s (best of 2)", [f"{seconds:.2f}" for seconds in prefills])
    table += row("ms per token, median", [f"{statistics.median(s):.1f}" for s in steps])
    table += row("p10 - p90", [f"{percentile(s, 10):.1f} - {percentile(s, 90):.1f}" for s in steps])
    table += row("NLL of the true text", [f"{s.mean_nll:.4f}" for s in scores])
    table += row("tokens as the full cache", [_agreement(texts[0], t) for t in texts])

    share = setting["budget"] / setting["prompt_tokens"]
    report = (
        "# Full cache, H2O and a local window\n\n"
        f"{setting['model']} ({setting['dtype']}, {setting['device']}), {setting['text']}: prompt of "
        f"{setting['prompt_tokens']:,} tokens, {setting['new_tokens']} more; H2O and the window keep "
        f"{setting['budget']} tokens ({share:.0%} of the prompt).\n"
        f"{setting['machine']}; commit {setting['commit']}.\n\n"
        f"{table}\n"
        f"A decode step takes {h2o_ms:.1f} ms under H2O and {full_ms:.1f} ms under the full cache: "
        f"{h2o_ms / full_ms:.2f} times as long.\n"
        "Times are of whole model steps, the caches in turns; NLL is in nats per token, each token "
        "predicted through the cache.\n"
    )
    for text in texts:
        report += f"\n## {TITLES[text.label]}: {len(text.token_ids)} tokens, greedy\n\n"
        report += _quote(text.text)
    report += f"\n## The true continuation\n\n{_quote(comparison.true_text)}"
    for label, lines in comparison.profiles.items():
        report += f"\n## Profile of {PROFILED_STEPS} steps: {TITLES[label]}\n\n```\n{lines}```\n"
    return report


def _agreement(full: GenerationResult, other: GenerationResult) -> str:
    agreement = compare_tokens(full.token_ids, other.token_ids)
    if agreement.first_difference is None:
        return "all"
    return f"first {agreement.equal_prefix}"


def _quote(text: str) -> str:
    return "".join(f"> {line}\n".replace("> \n", ">\n") for line in text.strip().splitlines())


def plot(comparison: Comparison, file: Path) -> bool:
    """Draw the running mean of the NLL and the ms of each token; False without matplotlib."""
    pyplot = load_pyplot()
    if pyplot is None:
        return False
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for index, score in enumerate(comparison.scores):
        style = {"color": COLOURS[score.label], "label": TITLES[score.label]}
        left.plot(range(1, len(score.nll) + 1), running_mean(score.nll), **style)
        steps = comparison.step_ms(index)
        right.plot(range(1, len(steps) + 1), steps, linewidth=0.6, alpha=0.5, **style)
        right.axhline(statistics.median(steps), color=COLOURS[score.label], linestyle="--")
    left.set(xlabel="tokens of the true continuation", ylabel="mean NLL so far, nats per token")
    right.set(xlabel="decode step", ylabel="ms per token (dashed: median)")
    # A machine that pauses must not flatten the rest.
    every_step = [ms for i in range(len(comparison.scores)) for ms in comparison.step_ms(i)]
    right.set_ylim(0, 1.3 * percentile(every_step, 95))
    left.legend()
    figure.suptitle(
        f"{comparison.setting['model']}, prompt of {comparison.setting['prompt_tokens']} tokens, "
        f"{comparison.setting['budget']} kept"
    )
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
    return True


if __name__ == "__main__":
    sys.exit(main())
