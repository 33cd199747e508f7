#!/usr/bin/env python3
"""Milliseconds of a model's decode step after N tokens of real text: full cache and H2O in turns.

h2o      H2OCache after one-shot prefill, a fifth of the prompt (--budget)
h2o all  H2OCache with room for every token: what the full cache computes, and scores
full     transformers' DynamicCache with sdpa attention
kvpress  ObservedAttentionPress at the prompt and at every step, of h2o's size (where it is installed)

First every cache must give the full cache's logits for the prompt, and h2o all for some tokens more.
Then all are fed the true text, one token each in turn. OpenVINO GenAI (where it is installed) runs the
GGUF file as it is, with other weights and another KV precision: it is compared with itself, with its
cache eviction and without.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from common import read_text
from engines import EngineUnavailable, KVPressSession, OpenVINOSession
from op_cases import check_close
from report import (
    Column,
    Point,
    Report,
    colours,
    legend,
    make_parser,
    parse,
    ratio_bars,
    times,
    values_of,
)
from torch import Tensor

from h2o_kv import EvictionPolicy
from h2o_kv.generation import CacheSession, CacheSpec, resolve_policy
from h2o_kv.models import EMBEDDED_MODEL, ModelLoadError, find_embedded_model, load_model

QUICK = {"tokens": [1500], "repeats": 10}
# Largest difference of two caches' logits, by the largest logit: what thirty layers make of rounding.
LOGIT_LIMIT = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}
# Tokens that are compared before any is timed.
_CHECKED_STEPS = 3
_WARMUP = 2
OPENVINO = "OpenVINO GenAI"
PEERS = {"full": "full cache", "kvpress": "kvpress"}
COLUMNS = (
    Column("cache", "what"),
    Column("dtype", "dtype"),
    Column("tokens seen", "seq_len", "{:,}"),
    Column("kept", "cache_len", "{:,}"),
    *(times(f"x {text}", peer) for peer, text in PEERS.items()),
    Column("prefill, x full", "prefill_x_full", "{:.2f}"),
    Column("KV memory, of full", "kv_share", "{:.1%}"),
)
Session = CacheSession | KVPressSession


def check_logits(name: str, logits: Tensor, expected: Tensor) -> None:
    """Stop where logits are not those of the full cache."""
    check_close(name, logits, expected.double(), LOGIT_LIMIT[logits.dtype])


def fed(session: Session, tokens: Sequence[int]) -> Callable[[], float]:
    """Feed the next token each time; the milliseconds it took."""
    coming = iter(tokens)

    def feed() -> float:
        session.feed(next(coming))
        return session.step_ms[-1]

    return feed


def start_sessions(
    model: Any, prompt: Sequence[int], new_tokens: int, policy: EvictionPolicy, report: Report
) -> dict[str, Session]:
    """Run the prompt under each cache; stop where its logits are not the full cache's."""
    whole = len(prompt) + new_tokens
    everything = EvictionPolicy(num_heavy=whole // 2, num_recent=whole - whole // 2)
    sessions: dict[str, Session] = {
        "full": CacheSession(model, CacheSpec(label="full")),
        "h2o": CacheSession(model, CacheSpec(label="h2o", policy=policy)),
        "h2o all": CacheSession(model, CacheSpec(label="h2o all", policy=everything)),
    }
    try:
        sessions["kvpress"] = KVPressSession(model, len(prompt), policy.budget().total)
    except EngineUnavailable as reason:
        report.note(str(reason))
    for spec in (CacheSpec(label="full"), CacheSpec(label="h2o", policy=everything)):
        CacheSession(model, spec).prefill(prompt[:64])  # whatever is set up at the first call
    logits = {}
    for name, session in sessions.items():
        show = report.start(f"{len(prompt):,} tokens: prefill, {name}", 100)
        if isinstance(session, CacheSession):
            logits[name] = session.prefill(prompt, lambda done, show=show: show(round(100 * done)))
        else:
            logits[name] = session.prefill(prompt)
        check_logits(f"prefill, {name}", logits[name], logits["full"])
    return sessions


def check_kept(name: str, session: Session, slots: int) -> None:
    """Stop where another number of tokens is kept."""
    if isinstance(session, CacheSession):
        kept = set(session.measurements()["tokens_kept"])
    else:
        kept = {session.tokens_kept}
    if kept != {slots}:
        raise SystemExit(f"{name}: keeps {sorted(kept)} tokens, must keep {slots}")


def bench_caches(
    model: Any,
    ids: Sequence[int],
    tokens: int,
    dtype: str,
    args: argparse.Namespace,
    report: Report,
) -> None:
    """Two points: h2o and h2o all, beside the full cache."""
    new_tokens = _CHECKED_STEPS + _WARMUP + args.repeats
    prompt, true_text = ids[:tokens], ids[tokens : tokens + new_tokens]
    share = EvictionPolicy(heavy_ratio=args.budget / 2, recent_ratio=args.budget / 2)
    policy = resolve_policy(share, tokens)
    sessions = start_sessions(model, prompt, new_tokens, policy, report)
    for token in true_text[:_CHECKED_STEPS]:
        logits = {name: session.feed(token) for name, session in sessions.items()}
        check_logits("h2o all", logits["h2o all"], logits["full"])
    clocks = {name: fed(session, true_text[_CHECKED_STEPS:]) for name, session in sessions.items()}
    name = f"{dtype}, {tokens:,} tokens"
    timings = report.measure(name, clocks, warmup=_WARMUP, clock=lambda feed: feed())
    seen = tokens + new_tokens
    for what, session in sessions.items():
        slots = policy.budget().total if what in ("h2o", "kvpress") else seen
        check_kept(what, session, slots)
        if session.tokens_seen != seen:
            raise SystemExit(f"{what}: has seen {session.tokens_seen} tokens, must have {seen}")
    peers = {name: timing for name, timing in timings.items() if name in PEERS}
    for what in ("h2o", "h2o all"):
        held = sessions[what].measurements()
        report.add(
            op="generate",
            dtype=dtype,
            shape=head_counts(model) | {"seq_len": seen, "cache_len": max(held["tokens_kept"])},
            timings={"h2o": timings[what], **peers},
            baseline="full",
            baseline_name="DynamicCache, sdpa",
            model=args.model or EMBEDDED_MODEL,
            what=what,
            prompt_tokens=tokens,
            prefill_s=round(held["prefill_s"], 4),
            prefill_x_full=round(sessions["full"].prefill_s / held["prefill_s"], 4),
            kv_bytes=held["kv_bytes"],
            kv_share=round(held["kv_bytes"] / held["full_kv_bytes"], 4),
        )


def head_counts(model: Any) -> dict[str, int]:
    """The model's shape, by the names in the glossary."""
    config = model.config.get_text_config(decoder=True)
    return {
        "batch": 1,
        "num_layers": config.num_hidden_layers,
        "num_q_heads": config.num_attention_heads,
        "num_kv_heads": getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
    }


def bench_openvino(
    gguf: Path,
    model: Any,
    ids: Sequence[int],
    tokens: int,
    args: argparse.Namespace,
    report: Report,
) -> None:
    """A point: OpenVINO GenAI with its eviction, beside the same without."""
    budget = OpenVINOSession.slots(args.budget * tokens)
    new_tokens = _WARMUP + args.repeats + 1
    sessions = {}
    for name, slots in (("full", None), ("evicting", budget)):
        report.start(f"OpenVINO GenAI, {tokens:,} tokens: prefill, {name}")
        sessions[name] = OpenVINOSession(str(gguf), tokens, new_tokens, args.threads, slots)
        sessions[name].prefill(ids[:tokens])
    timings = report.measure(
        f"OpenVINO GenAI, {tokens:,} tokens",
        {"h2o": sessions["evicting"].step, "full": sessions["full"].step},
        warmup=_WARMUP,
        clock=lambda step: step(),
    )
    for name, session in sessions.items():
        if (made := session.generated) != new_tokens:
            raise SystemExit(f"OpenVINO GenAI, {name}: {made} tokens, must be {new_tokens}")
    report.add(
        op="generate",
        dtype="OpenVINO's own",
        shape=head_counts(model) | {"seq_len": tokens + new_tokens, "cache_len": budget},
        timings=timings,
        baseline="full",
        baseline_name="OpenVINO GenAI without cache eviction",
        model=gguf.name,
        what=OPENVINO,
        prompt_tokens=tokens,
        prefill_s=round(sessions["evicting"].prefill_s, 4),
        prefill_x_full=round(sessions["full"].prefill_s / sessions["evicting"].prefill_s, 4),
    )


def lines_of(points: list[Point]) -> dict[str, list[tuple[int, Point]]]:
    """Tokens seen and times of each cache; the peers of h2o all are those of h2o."""
    lines: dict[str, list[tuple[int, Point]]] = {}
    for point in points:
        peers = {} if point["what"] == "h2o all" else point["peers"]
        for name, times_of in ((point["what"], point), *peers.items()):
            lines.setdefault(name, []).append((point["seq_len"], times_of))
    return lines


def draw_steps(pyplot: Any, points: list[Point]) -> Any:
    """Milliseconds a token against tokens seen, with the tenth and ninetieth percentile."""
    dtypes = values_of(points, "dtype")
    palette = colours(list(lines_of(points)))
    figure, axes = pyplot.subplots(
        1, len(dtypes), figsize=(1 + 4 * len(dtypes), 4), squeeze=False, layout="constrained"
    )
    for axis, dtype in zip(axes[0], dtypes, strict=True):
        for name, line in lines_of([p for p in points if p["dtype"] == dtype]).items():
            seen, times_of = [tokens for tokens, _ in line], [p for _, p in line]
            medians, low, high = (
                [p[field] for p in times_of] for field in ("median_ms", "p10_ms", "p90_ms")
            )
            text = PEERS.get(name, name)
            axis.plot(seen, medians, "o-", color=palette[name], label=text)
            axis.fill_between(seen, low, high, color=palette[name], alpha=0.15, linewidth=0)
        axis.set(title=dtype, xlabel="tokens seen", ylabel="ms per token")
        axis.set_xlim(0, 1.05 * max(p["seq_len"] for p in points))
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    legend(figure)
    return figure


def draw_ratios(pyplot: Any, points: list[Point]) -> Any:
    """What the peers take, by h2o's time."""
    ours = [p for p in points if p["what"] != OPENVINO]
    return ratio_bars(pyplot, ours, PEERS, lambda p: f"{p['what']}\n{p['prompt_tokens']:,} tokens")


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = make_parser(__doc__, "bench_generate", repeats=30)
    parser.add_argument("--model", help=f"folder, GGUF file or hub id (default: {EMBEDDED_MODEL})")
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[1000, 2000, 4000, 8000], help="of the prompt"
    )
    parser.add_argument("--budget", type=float, default=0.2, help="part of the prompt that is kept")
    parser.add_argument(
        "--prompt-file",
        type=Path,
        help="real text, repeated where too short (default: Genesis 1-4)",
    )
    args = parse(parser, argv, QUICK)
    if min(args.tokens) < 2:
        parser.error(f"--tokens must be >= 2, got {min(args.tokens)}")
    if not 0 < args.budget <= 1:
        parser.error(f"--budget must be above 0 and at most 1, got {args.budget}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write, print."""
    args = parse_arguments(argv)
    gguf = Path(args.model) if args.model else find_embedded_model()
    with_openvino = gguf is not None and gguf.suffix == ".gguf"
    total = (2 * len(args.dtype) + with_openvino) * len(args.tokens)
    longest = max(args.tokens) + _CHECKED_STEPS + _WARMUP + args.repeats
    with Report("Decode steps of a model", args, COLUMNS, total=total) as report:
        for dtype in args.dtype:
            report.start(f"loading, {dtype}")
            try:
                model, tokenizer = load_model(args.model, dtype=dtype)
            except ModelLoadError as error:
                raise SystemExit(str(error)) from error
            ids = tokenizer(read_text(args.prompt_file))["input_ids"]
            ids = (ids * -(-longest // len(ids)))[:longest]
            limit = model.config.get_text_config(decoder=True).max_position_embeddings
            if longest > limit:
                raise SystemExit(f"the model takes {limit} positions, {longest} are asked for")
            for tokens in args.tokens:
                bench_caches(model, ids, tokens, dtype, args, report)
        if with_openvino:
            report.note(f"{OPENVINO} is compared with itself, without eviction.")
            try:
                for tokens in args.tokens:
                    bench_openvino(gguf, model, ids, tokens, args, report)
            except EngineUnavailable as reason:
                report.note(str(reason))
        report.plot("ms_per_token", draw_steps)
        report.plot("ratios", draw_ratios)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
