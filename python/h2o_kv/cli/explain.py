"""`h2o-kv explain`: whether an answer's evidence was evicted, when, and why."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from h2o_kv import _C
from h2o_kv.cli.bars import Bars
from h2o_kv.cli.generate import (
    Settings,
    check_context,
    open_model,
    parse_number,
    policy_as_dict,
    read_prompt,
    read_settings,
)
from h2o_kv.diagnostics import Explanation, Span, explain, find_span
from h2o_kv.diagnostics.explain import HeadEvidence, SpanExplanation
from h2o_kv.diagnostics.plots import plot_spans
from h2o_kv.diagnostics.texts import decode
from h2o_kv.figures import load_pyplot
from h2o_kv.generation import PREFILL_MODES, CacheSpec, generate, resolve_policy
from h2o_kv.models import DTYPES, EMBEDDED_MODEL
from h2o_kv.policies import POLICIES, count_of, named
from h2o_kv_cli import UserError, one_line, printable, utf8, write_json
from h2o_kv_cli.text_tokens import chat_tokens

DESCRIPTION = (
    "Replay an answer under an evicting cache beside the full cache, and say of each piece of "
    "evidence in the prompt where it was still kept, when it left, by how much, and whether that "
    "explains the answer. docs/diagnostics.md says what the numbers mean."
)
_NEW_TOKENS = 16
_RATIO = 0.2
_WIDTH = 120
# Those whose cache reads all that it keeps, by positions and scores of its own.
_POLICIES = [
    name
    for name, policy in POLICIES.items()
    if not policy.needs_oracle
    and not policy.cache_options
    and (made := policy.with_slots(2, length=2)) is not None
    and made.arguments["read_slots"] == 0
]
# Options of `generate` that have no say here, so that settings are read in one place.
_NOT_HERE = ("heavy", "recent", "sink", "gqa_reduce", "temperature", "top_p", "seed")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `h2o-kv explain` to its parser."""
    parser.set_defaults(quick=False, **dict.fromkeys(_NOT_HERE))
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help=f"model folder, GGUF file or hub id (default: the installed {EMBEDDED_MODEL})",
    )
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="the prompt; - reads standard input")
    prompt.add_argument(
        "--prompt-file", metavar="FILE", help="file with the prompt, UTF-8; - reads standard input"
    )
    parser.add_argument(
        "--chat", action="store_true", help="wrap the prompt in the model's chat template"
    )
    evidence = parser.add_argument_group("evidence", "At least one; both options may be repeated.")
    evidence.add_argument(
        "--evidence",
        dest="evidence",
        action="append",
        metavar="TEXT",
        help="a piece of the prompt that the answer needs; it must be there once",
    )
    evidence.add_argument(
        "--evidence-tokens",
        dest="evidence",
        action="append",
        type=_parse_range,
        metavar="FIRST:LAST",
        help="the tokens FIRST to LAST - 1 of the prompt",
    )
    answer = parser.add_argument_group("answer")
    answer.add_argument(
        "--answer",
        metavar="TEXT",
        help="the right answer, as it follows the prompt, its leading space included (default: "
        "what the full cache says)",
    )
    answer.add_argument(
        "--max-new-tokens",
        type=int,
        metavar="N",
        help=f"tokens of the full cache's answer, without --answer (default: {_NEW_TOKENS})",
    )
    cache = parser.add_argument_group("cache", "--policy, or --config with a policy in it.")
    cache.add_argument(
        "--policy",
        choices=_POLICIES,
        help="a policy by name",
    )
    slots = cache.add_mutually_exclusive_group()
    slots.add_argument("--slots", type=int, metavar="N", help="tokens that the policy keeps")
    slots.add_argument(
        "--ratio",
        type=parse_number,
        metavar="PART",
        help=f"the same as a part of the prompt, 0 to 1 (default: {_RATIO:g})",
    )
    cache.add_argument(
        "--prefill",
        choices=PREFILL_MODES,
        help="of the prompt, as in h2o-kv generate (default: one_shot)",
    )
    cache.add_argument(
        "--prefill-chunk", type=int, metavar="N", help="tokens of a chunk of a streaming prefill"
    )
    cache.add_argument("--config", metavar="FILE", help="JSON file with settings")

    machine = parser.add_argument_group("machine")
    machine.add_argument("--dtype", choices=tuple(DTYPES), help="(default: float32)")
    machine.add_argument("--device", metavar="DEVICE", help="cpu, cuda, cuda:1 or auto")
    machine.add_argument("--threads", type=int, metavar="N", help="CPU threads of PyTorch")

    output = parser.add_argument_group("output")
    output.add_argument("--heads", action="store_true", help="a line a KV head, not a line a layer")
    output.add_argument("--json", action="store_true", help="print JSON instead of tables")
    output.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="heat map, layer by step: the share of KV heads that still held the evidence",
    )


@dataclass(frozen=True)
class _Answered:
    """An explanation, with the texts around it."""

    explanation: Explanation
    prompt_tokens: int
    answer: str
    free: dict[str, str]  # what each cache says when it is free, by label


def main(args: argparse.Namespace) -> int:
    """Run `h2o-kv explain`; returns the exit status.

    Raises
    ------
    UserError
        A setting, file, model or piece of evidence will not do.
    """
    if args.policy is None and args.config is None:
        raise UserError("--policy or --config must be given, got neither")
    if args.policy is None and (args.slots, args.ratio) != (None, None):
        raise UserError("--slots and --ratio are of a --policy, got none")
    if args.ratio is not None and not 0 < args.ratio <= 1:
        raise UserError(f"--ratio must be > 0 and <= 1, got {args.ratio:g}")
    if args.slots is not None and args.slots < 1:
        raise UserError(f"--slots must be >= 1, got {args.slots}")
    if not args.evidence:
        raise UserError("--evidence or --evidence-tokens must be given, got neither")
    try:
        settings = read_settings(args)
        prompt = read_prompt(args)
        if args.plot is not None:
            load_pyplot()
            if not args.plot.absolute().parent.is_dir():
                raise ValueError(
                    f"--plot must be a file in a folder that is there, got {args.plot}"
                )
    except (ValueError, OSError, ImportError) as error:
        raise UserError(one_line(error)) from error
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    screen = Console(file=sys.stderr, highlight=False, markup=False)
    bars = Bars(screen)
    try:
        answered = _answer(args, settings, str(prompt), bars, screen)
    except (ValueError, NotImplementedError, MemoryError, torch.OutOfMemoryError) as error:
        raise UserError(one_line(error)) from error
    finally:
        bars.hide()
    if args.plot is not None:
        try:
            plot_spans(args.plot, answered.explanation.spans, answered.prompt_tokens)
        except (ValueError, OSError) as error:
            raise UserError(f"--plot: {one_line(error)}") from error
    if args.json:
        write_json(_as_dict(settings, answered))
    else:
        _print(settings, answered, by_head=args.heads)
    return 0


def _answer(
    args: argparse.Namespace, settings: Settings, prompt: str, bars: Bars, screen: Console
) -> _Answered:
    model, tokenizer = open_model(settings, bars)
    ids = chat_tokens(tokenizer, prompt) if args.chat else list(tokenizer(prompt)["input_ids"])
    if not ids:
        raise UserError("the prompt must have at least one token, got an empty text")
    spans = [_span(tokenizer, ids, given) for given in args.evidence]
    answer_ids: list[int] = []
    count = args.max_new_tokens or _NEW_TOKENS
    if args.answer is not None:
        text = utf8("--answer", lambda: str(args.answer))
        answer_ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        if not answer_ids:
            raise UserError("--answer must have at least one token, got an empty text")
        count = len(answer_ids)
    check_context(
        lambda text: screen.print(f"note: {text}", style="yellow"), model, len(ids) + count - 1
    )
    spec = _spec(args, settings, len(ids), len(ids) + count)
    free = generate(
        model,
        tokenizer,
        ids,
        [CacheSpec(label="full"), spec],
        max_new_tokens=count,
        on_prefill=lambda which, done: bars.update(which.label, f"{which.label}, prompt", done),
    )
    explanation = explain(
        model,
        ids,
        answer_ids or free[0].token_ids,
        spec,
        spans,
        expected=bool(answer_ids),
        progress=lambda done: bars.update("replay", "replay", done),
    )
    return _Answered(
        explanation=explanation,
        prompt_tokens=len(ids),
        answer=decode(tokenizer, explanation.answer_ids),
        free={result.label: result.text for result in free},
    )


def _parse_range(text: str) -> tuple[int, int]:
    """Two numbers with a colon between them.

    Raises
    ------
    argparse.ArgumentTypeError
        It is something else.

    Examples
    --------
    >>> _parse_range("12:15")
    (12, 15)
    """
    try:
        first, last = map(int, text.split(":"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be FIRST:LAST, as in 12:15, got {text!r}") from None
    return first, last


def _span(tokenizer: Any, ids: Sequence[int], given: str | tuple[int, int]) -> Span:
    if isinstance(given, str):
        text = utf8("--evidence", lambda: given)
        first, last = find_span(tokenizer, ids, text, name="--evidence")
        return Span(first, last, text)
    first, last = given
    if not 0 <= first < last <= len(ids):
        raise UserError(
            f"--evidence-tokens must be 0 <= FIRST < LAST <= {len(ids)}, the prompt's tokens, got "
            f"{first}:{last}"
        )
    return Span(first, last, decode(tokenizer, ids[first:last]))


def _spec(
    args: argparse.Namespace, settings: Settings, prompt_tokens: int, tokens: int
) -> CacheSpec:
    spec = CacheSpec(
        label=args.policy or "policy",
        policy=resolve_policy(settings.policy, prompt_tokens),
        prefill=settings.prefill,
        prefill_chunk=settings.prefill_chunk,
    )
    if args.policy is None:
        return spec
    ratio = _RATIO if args.ratio is None else args.ratio
    slots = count_of(ratio, prompt_tokens) if args.slots is None else args.slots
    policy = named(args.policy)
    one_by_one = policy.prefills == ("streaming",)
    if spec.prefill not in policy.prefills or (one_by_one and spec.prefill_chunk != 1):
        rule, got = " or ".join(policy.prefills), spec.prefill
        if one_by_one:
            rule, got = f"{rule} and --prefill-chunk 1", f"{got} and {spec.prefill_chunk}"
        raise UserError(f"--prefill must be {rule} with --policy {policy.name}, got {got}")
    return replace(spec, policy=policy.with_slots(slots, length=tokens))


# ---- What is shown.


def _as_dict(settings: Settings, answered: _Answered) -> dict[str, Any]:
    explanation = answered.explanation
    run, policy = explanation.replay, explanation.policy
    assert policy.spec.policy is not None
    answers = {"full": run.full, "policy": policy.predictions}
    return {
        "h2o_kv": _C.version(),
        "torch": torch.__version__,
        "model": {"source": settings.model or EMBEDDED_MODEL, "dtype": settings.dtype},
        "policy": {
            "name": policy.spec.label,
            **policy_as_dict(policy.spec.policy),
            "prefill": policy.spec.prefill,
            "prefill_chunk": policy.spec.prefill_chunk,
        },
        "prompt_tokens": answered.prompt_tokens,
        "answer": {
            "expected": explanation.answers.expected,
            "text": answered.answer,
            "token_ids": list(explanation.answer_ids),
            "full_right": explanation.answers.full_right,
            "policy_right": explanation.answers.policy_right,
            "first_wrong": explanation.answers.first_wrong,
            **{f"{name}_nll": values.nll.tolist() for name, values in answers.items()},
            "full_free": answered.free["full"],
            "policy_free": answered.free[policy.spec.label],
            "kl": policy.predictions.kl.tolist(),
            "dropped": list(explanation.answer_dropped),
            "dropped_worst": list(explanation.answer_dropped_worst),
        },
        "spans": [_span_as_dict(span) for span in explanation.spans],
        "verdict": explanation.verdict,
    }


def _span_as_dict(explained: SpanExplanation) -> dict[str, Any]:
    return {
        **asdict(explained.span),
        **asdict(explained.facts),
        "state": explained.state,
        "verdict": explained.verdict,
        "heads": [{**asdict(head), "kept": head.kept} for head in explained.heads],
    }


def _print(settings: Settings, answered: _Answered, *, by_head: bool) -> None:
    out = Console(highlight=False, markup=False, soft_wrap=True)
    if not out.is_terminal:
        out.width = _WIDTH  # In a file nothing needs to be cut.
    explanation = answered.explanation
    policy, answers = explanation.policy, explanation.answers
    budget = policy.budget
    label = policy.spec.label
    out.print(
        f"{settings.model or EMBEDDED_MODEL}, {settings.dtype}: prompt of "
        f"{answered.prompt_tokens} tokens; {label} keeps {budget.total} = {budget.num_sink} sink + "
        f"{budget.num_heavy} heavy + {budget.num_recent} recent ({policy.spec.prefill} prefill)",
        style="dim",
    )
    source = "expected" if answers.expected else "of the full cache"
    out.print(f"answer ({source}): {_quoted(answered.answer)}")
    nll = {"full": explanation.replay.full.nll, label: policy.predictions.nll}
    for name, right in (("full", answers.full_right), (label, answers.policy_right)):
        out.print(
            f"  {name}: {'prefers it' if right else 'prefers another'}, NLL "
            f"{float(nll[name].mean()):.3f} a token; free, it says {_quoted(answered.free[name])}"
        )
    out.print(
        "  full cache's attention on dropped tokens: mean over heads "
        f"{_range(explanation.answer_dropped)}, worst head "
        f"{_range(explanation.answer_dropped_worst)}; KL {_range(policy.predictions.kl.tolist())}"
    )
    for explained in explanation.spans:
        span = explained.span
        out.print()
        out.print(f"evidence {_quoted(span.text)}, tokens {span.first}:{span.last}", style="bold")
        out.print(_table(explained, by_head=by_head))
        out.print(explained.verdict)
    out.print()
    out.print(f"verdict: {explanation.verdict}", style="bold")


def _table(explained: SpanExplanation, *, by_head: bool) -> Table:
    """A line for each layer, or for each of its KV heads."""
    names = ["layer", *(["KV head"] if by_head else [])]
    columns = (*names, "kept", "left at step", "score", "margin", "full attention")
    table = Table(*columns, box=box.SIMPLE_HEAD)
    for column in table.columns:
        column.justify, column.no_wrap = "right", True
    groups: dict[tuple[int, ...], list[HeadEvidence]] = {}
    for head in explained.heads:
        key: tuple[int, ...] = (head.layer, head.head) if by_head else (head.layer,)
        groups.setdefault(key, []).append(head)
    for key, heads in groups.items():
        tokens = [token for head in heads for token in head.tokens]
        left = [token for token in tokens if token.left_at is not None]
        margins = [token.margin for token in left if token.margin is not None]
        table.add_row(
            *map(str, key),
            f"{len(tokens) - len(left)} of {len(tokens)}",
            _range([token.left_at for token in left if token.left_at is not None]),
            _range([token.score for token in left]),
            _range(margins),
            _range([head.attention_max for head in heads]),
        )
    return table


def _range(values: Sequence[float]) -> str:
    """Lowest and highest."""
    if not values:
        return "-"
    low, high = (
        f"{value}" if isinstance(value, int) else f"{value:.3g}"
        for value in (
            min(values),
            max(values),
        )
    )
    return low if low == high else f"{low} to {high}"


def _quoted(text: str) -> str:
    return repr(printable(text))
