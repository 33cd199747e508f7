"""`h2o-kv generate`: continue a prompt with an H2O cache, beside a full cache if asked."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import resources
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from h2o_kv import _C, EvictionPolicy
from h2o_kv.cli.bars import Bars
from h2o_kv.config import Config, load_config, parse_config
from h2o_kv.generation import (
    PREFILL_MODES,
    CacheSpec,
    GenerationResult,
    GenerationRun,
    SamplingOptions,
    compare_tokens,
    generate,
    resolve_policy,
)
from h2o_kv.models import (
    DTYPES,
    EMBEDDED_MODEL,
    ModelLoadError,
    load_model,
    resolve_device,
)
from h2o_kv.policies import rules_of
from h2o_kv_cli import STDIN, UserError, one_line, printable, read_text, utf8, write_json
from h2o_kv_cli.text_tokens import chat_tokens

DESCRIPTION = (
    "Continue a prompt with a KV cache of fixed size (Heavy-Hitter Oracle eviction), and show what "
    "it cost. Options given here override those of --config."
)
_QUICK_PROMPT_TOKENS = 256
_QUICK_NEW_TOKENS = 16
# Slots; with fewer, models hardly form sentences.
_SMALL_BUDGET = 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `h2o-kv generate` to its parser."""
    default = parse_config("{}", "defaults")
    run = default.run
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help=f"model folder, GGUF file or hub id (default: the installed {EMBEDDED_MODEL})",
    )
    # Without either, a text that ships with the package is taken.
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument(
        "--prompt",
        metavar="TEXT",
        help="the prompt; - reads standard input (default: a demonstration text)",
    )
    prompt.add_argument(
        "--prompt-file", metavar="FILE", help="file with the prompt, UTF-8; - reads standard input"
    )
    parser.add_argument(
        "--chat", action="store_true", help="wrap the prompt in the model's chat template"
    )

    cache = parser.add_argument_group(
        "cache", "A number of tokens is a count (128) or a part of the prompt (0.1 or 10%)."
    )
    cache.add_argument(
        "--heavy",
        type=parse_budget,
        metavar="N|PART",
        help="tokens kept for the attention they received; 0 is a sliding window "
        f"(default: {_show_part(default.policy.num_heavy, default.policy.heavy_ratio)})",
    )
    cache.add_argument(
        "--recent",
        type=parse_budget,
        metavar="N|PART",
        help="newest tokens, always kept "
        f"(default: {_show_part(default.policy.num_recent, default.policy.recent_ratio)})",
    )
    cache.add_argument(
        "--sink",
        type=int,
        metavar="N",
        help=f"first tokens, always kept; a count (default: {default.policy.num_sink})",
    )
    cache.add_argument(
        "--gqa-reduce",
        choices=("sum", "max"),
        help="how the query heads of one KV head share a score "
        f"(default: {default.policy.gqa_reduce})",
    )
    cache.add_argument(
        "--prefill",
        choices=PREFILL_MODES,
        help="one_shot: full attention over the prompt, then one selection; streaming: chunks that "
        f"are evicted as they come (default: {run.prefill})",
    )
    cache.add_argument(
        "--prefill-chunk",
        type=int,
        metavar="N",
        help=f"tokens of a chunk of a streaming prefill (default: {run.prefill_chunk})",
    )

    text = parser.add_argument_group("generation")
    text.add_argument(
        "--max-new-tokens", type=int, metavar="N", help=f"(default: {run.max_new_tokens})"
    )
    text.add_argument(
        "--ignore-eos", action="store_true", help="go on after an end-of-sequence token"
    )
    text.add_argument(
        "--temperature",
        type=parse_number,
        metavar="T",
        help=f"0 is greedy (default: {run.temperature:g})",
    )
    text.add_argument(
        "--top-p", type=parse_number, metavar="P", help=f"nucleus sampling (default: {run.top_p:g})"
    )
    text.add_argument("--seed", type=int, metavar="N", help=f"(default: {run.seed})")

    machine = parser.add_argument_group("machine")
    machine.add_argument("--dtype", choices=tuple(DTYPES), help=f"(default: {default.model.dtype})")
    machine.add_argument(
        "--device", metavar="DEVICE", help=f"cpu, cuda, cuda:1 or auto (default: {run.device})"
    )
    machine.add_argument("--threads", type=int, metavar="N", help="CPU threads of PyTorch")

    parser.add_argument(
        "--compare",
        nargs="?",
        const="full",
        choices=("full", "local"),
        help="run a full cache beside H2O, token by token in turns; local: a sliding window of "
        "H2O's size as well",
    )
    parser.add_argument("--config", metavar="FILE", help="JSON file with settings")
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"try it: the prompt's first {_QUICK_PROMPT_TOKENS} tokens and, if not told "
        f"otherwise, {_QUICK_NEW_TOKENS} new ones",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text and tables")


def main(args: argparse.Namespace) -> int:
    """Run `h2o-kv generate`; returns the exit status.

    Raises
    ------
    UserError
        A setting, file or model will not do.
    """
    try:
        settings = read_settings(args)
        prompt = read_prompt(args)
    except (ValueError, OSError) as error:
        raise UserError(one_line(error)) from error
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    screen = _Screen(as_json=args.json)
    with screen.progress() as bars:
        start = time.perf_counter()
        model, tokenizer = open_model(settings, bars)
        load_s = time.perf_counter() - start
        prompt_ids = _encode(args, tokenizer, prompt, screen)
        check_context(screen.note, model, len(prompt_ids) + settings.max_new_tokens - 1)
        policy = resolve_policy(settings.policy, len(prompt_ids))
        try:
            specs = _specs(settings, policy, args.compare)
        except ValueError as error:
            raise UserError(one_line(error)) from error
        screen.announce(settings, policy, len(prompt_ids))
        display = screen.display(specs)
        try:
            results = generate(
                model,
                tokenizer,
                prompt_ids,
                specs,
                max_new_tokens=settings.max_new_tokens,
                sampling=settings.sampling,
                ignore_eos=args.ignore_eos,
                on_prefill=lambda spec, done: bars.update(
                    spec.label, f"prompt, {_NAMES[spec.label]}", done
                ),
                on_token=lambda runs: display.show(runs, bars),
            )
        except (MemoryError, torch.OutOfMemoryError) as error:
            raise UserError(one_line(error)) from error
        finally:
            display.close()
    if not args.json:
        screen.report(results)
        screen.note_small_budget(settings.policy, len(prompt_ids))
        return 0
    report = {
        "h2o_kv": _C.version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "model": {
            "source": settings.model or EMBEDDED_MODEL,
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": str(model.device),
            "load_s": load_s,
        },
        "prompt": {
            "tokens": len(prompt_ids),
            "text": str(tokenizer.decode(prompt_ids, clean_up_tokenization_spaces=False)),
        },
        "policy": policy_as_dict(policy),
        "prefill": settings.prefill,
        "prefill_chunk": settings.prefill_chunk,
        "sampling": asdict(settings.sampling),
        "runs": [_result_as_dict(result, results) for result in results],
    }
    write_json(report)
    return 0


def parse_budget(text: str) -> int | float:
    """Number of tokens as the command line writes it: a count, or a part of the prompt.

    An integer is a count (int); a text with a point or a percent sign is a part (float). The text
    decides, never the size: 1 is one token and 1.0 the whole prompt.

    Raises
    ------
    argparse.ArgumentTypeError
        The text is neither.

    Examples
    --------
    >>> parse_budget("128"), parse_budget("0.1"), parse_budget("10%")
    (128, 0.1, 0.1)
    """
    try:
        if text.endswith("%"):
            return parse_number(text[:-1]) / 100
        return parse_number(text) if "." in text else int(text)
    except (ValueError, argparse.ArgumentTypeError):
        raise argparse.ArgumentTypeError(
            f"must be a count (128) or a part of the prompt (0.1 or 10%), got {text!r}"
        ) from None


def parse_number(text: str) -> float:
    """A number, but neither infinity nor NaN.

    Raises
    ------
    argparse.ArgumentTypeError
        The text is something else.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"must be a finite number, got {text!r}")
    return value


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is run: the config file (or the defaults) with the options of the command line on top.

    Attributes
    ----------
    model : str, optional
        None is the installed default model.
    dtype, device : str
        The device is resolved: never "auto".
    policy : EvictionPolicy
    prefill : {"one_shot", "streaming"}
    prefill_chunk, max_new_tokens : int
    sampling : SamplingOptions
    threads : int, optional
        None leaves PyTorch's choice.
    """

    model: str | None
    dtype: str
    device: str
    policy: EvictionPolicy
    prefill: str
    prefill_chunk: int
    max_new_tokens: int
    sampling: SamplingOptions
    threads: int | None


def read_settings(args: argparse.Namespace) -> Settings:
    """Merge config file and command line.

    Raises
    ------
    ValueError, OSError
        A setting is out of range, or the config file cannot be read.
    """
    _check_options(args)
    config: Config = load_config(args.config) if args.config else parse_config("{}", "defaults")
    run = config.run
    device_name = f"{args.config}: run.device" if args.device is None else "--device"
    return Settings(
        model=_given(args.model, config.model.name),
        dtype=_given(args.dtype, config.model.dtype),
        device=str(resolve_device(_given(args.device, run.device), name=device_name)),
        policy=_override_policy(config.policy, args),
        prefill=_given(args.prefill, run.prefill),
        prefill_chunk=_given(args.prefill_chunk, run.prefill_chunk),
        max_new_tokens=_given(
            args.max_new_tokens, _QUICK_NEW_TOKENS if args.quick else run.max_new_tokens
        ),
        sampling=SamplingOptions(
            temperature=_given(args.temperature, run.temperature),
            top_p=_given(args.top_p, run.top_p),
            seed=_given(args.seed, run.seed),
        ),
        threads=_given(args.threads, run.threads),
    )


def _check_options(args: argparse.Namespace) -> None:
    """Hold the options against the rules of the config parser, one by one, under their names."""

    def check(name: str, section: str, settings: Callable[[Any], dict[str, Any]]) -> None:
        value = getattr(args, name)
        if value is not None:
            text = json.dumps({section: settings(value)})
            parse_config(text, "--" + name.replace("_", "-"))

    def amount(value: int | float) -> dict[str, Any]:
        return {"size" if isinstance(value, int) else "ratio": value}

    check("heavy", "policy", lambda value: {"heavy": amount(value), "recent": amount(1)})
    check("recent", "policy", lambda value: {"heavy": amount(1), "recent": amount(value)})
    rest = {"heavy": amount(1), "recent": amount(1)}
    check("sink", "policy", lambda value: {"num_sink": value, **rest})
    check("prefill_chunk", "run", lambda value: {"prefill_chunk": value})
    check("max_new_tokens", "run", lambda value: {"max_new_tokens": value})
    check("temperature", "run", lambda value: {"temperature": value})
    check("top_p", "run", lambda value: {"top_p": value})
    check("seed", "run", lambda value: {"seed": value})
    check("threads", "run", lambda value: {"threads": value})


def _given(option: Any, otherwise: Any) -> Any:
    return otherwise if option is None else option


def _override_policy(policy: EvictionPolicy, args: argparse.Namespace) -> EvictionPolicy:
    """The policy with what the command line says in place of its own parts."""
    changes: dict[str, Any] = {
        "num_sink": _given(args.sink, policy.num_sink),
        "gqa_reduce": _given(args.gqa_reduce, policy.gqa_reduce),
    }
    for part, value in (("heavy", args.heavy), ("recent", args.recent)):
        if value is not None:
            changes |= _as_keyword(part, value)
    return policy.replace(**changes)


def _as_keyword(part: str, value: int | float) -> dict[str, Any]:
    return {f"num_{part}": value} if isinstance(value, int) else {f"{part}_ratio": value}


def _specs(settings: Settings, policy: EvictionPolicy, compare: str | None) -> list[CacheSpec]:
    cache: dict[str, Any] = {"prefill": settings.prefill, "prefill_chunk": settings.prefill_chunk}
    specs = [CacheSpec(label="h2o", policy=policy, **cache)]
    if compare is not None:
        specs.insert(0, CacheSpec(label="full"))
    if compare == "local":
        window = EvictionPolicy(num_heavy=0, num_recent=policy.budget().total)
        specs.append(CacheSpec(label="local", policy=window, **cache))
    return specs


def read_prompt(args: argparse.Namespace) -> str | None:
    """The prompt that the options name; None if they name none."""
    if STDIN in (args.prompt, args.prompt_file):
        return read_text(STDIN)
    if args.prompt_file is not None:
        return read_text(args.prompt_file)
    if args.prompt is not None:
        return utf8("--prompt", lambda: str(args.prompt))
    return None


def demo_prompt() -> str:
    """Return the text that ships with the package: Jonah, to be told again in other words."""
    return resources.files("h2o_kv").joinpath("prompts/demo.txt").read_text(encoding="utf-8")


def open_model(settings: Settings, bars: Bars) -> tuple[Any, Any]:
    """The model and the tokenizer of the settings.

    Raises
    ------
    UserError
        There is no such model.
    """
    try:
        return load_model(
            settings.model,
            dtype=settings.dtype,
            attn_implementation="h2o",
            device=settings.device,
            # In a log, an error about the model is to be the only line about it.
            progress=(lambda text, done: bars.update("load", text, done)) if bars.drawn else None,
        )
    except ModelLoadError as error:
        raise UserError(one_line(error)) from error


def _encode(
    args: argparse.Namespace, tokenizer: Any, prompt: str | None, screen: _Screen
) -> list[int]:
    """Token ids of the prompt, at least one; without a prompt, of the demonstration text."""
    chat = args.chat
    if prompt is None:
        screen.note("no --prompt or --prompt-file: taking the text of h2o_kv/prompts/demo.txt")
        prompt = demo_prompt()
        # It ends in a task: for those models that were taught to take one.
        chat = chat or bool(tokenizer.chat_template)
    ids = chat_tokens(tokenizer, prompt) if chat else list(tokenizer(prompt)["input_ids"])
    if not ids:
        raise UserError("the prompt must have at least one token, got an empty text")
    return ids[:_QUICK_PROMPT_TOKENS] if args.quick else ids


def check_context(note: Callable[[str], None], model: Any, num_tokens: int) -> None:
    """Note, or refuse, a sequence of more positions than the model was made for.

    Raises
    ------
    UserError
        The model has a table of positions, and it ends before.
    """
    config = model.config.get_text_config(decoder=True)
    context = getattr(config, "max_position_embeddings", num_tokens)
    if num_tokens <= context:
        return
    what = f"prompt and new tokens are {num_tokens}, more than the {context} positions"
    has_table = any(name.endswith("embed_positions") for name, _ in model.named_modules())
    if has_table:
        raise UserError(f"{what} that this model has")
    note(f"{what} this model was made for: eviction does not renumber positions")


def policy_as_dict(policy: EvictionPolicy) -> dict[str, Any]:
    """The counts of a policy, their sum and gqa_reduce, as plain values."""
    budget = policy.budget()
    return {
        "num_sink": budget.num_sink,
        "num_heavy": budget.num_heavy,
        "num_recent": budget.num_recent,
        "budget": budget.total,
        "gqa_reduce": policy.gqa_reduce,
        **rules_of(policy),
    }


def _result_as_dict(
    result: GenerationResult, results: Sequence[GenerationResult]
) -> dict[str, Any]:
    values = result.as_dict()
    full = next((r for r in results if r.label == "full"), None)
    values["first_difference"] = values["equal_prefix"] = None
    if full is not None:
        agreement = compare_tokens(full.token_ids, result.token_ids)
        values["first_difference"] = agreement.first_difference
        values["equal_prefix"] = agreement.equal_prefix
    return values


_NAMES = {"full": "full cache", "h2o": "H2O", "local": "local window"}


class _Screen:
    """What the user sees: progress and notes on standard error, the rest on standard output."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._out = Console(highlight=False, markup=False)
        # The stream of now: libraries that load a model may have theirs redirected meanwhile.
        self._err = Console(file=sys.stderr, highlight=False, markup=False)

    @contextmanager
    def progress(self) -> Iterator[Bars]:
        bars = Bars(self._err)
        try:
            yield bars
        finally:
            bars.hide()

    def note(self, text: str) -> None:
        self._err.print(f"note: {text}", style="yellow")

    def announce(self, settings: Settings, policy: EvictionPolicy, prompt_len: int) -> None:
        if self._as_json:
            return
        budget = policy.budget()
        rules = "".join(f", {name} {value}" for name, value in rules_of(policy).items())
        self._out.print(
            f"{settings.model or EMBEDDED_MODEL}, {settings.dtype}, {settings.device}: prompt of "
            f"{prompt_len} tokens; H2O keeps {budget.total} = {budget.num_sink} sink + "
            f"{budget.num_heavy} heavy + {budget.num_recent} recent ({settings.prefill} prefill{rules})",
            style="dim",
        )

    def display(self, specs: Sequence[CacheSpec]) -> _Display:
        if self._as_json:
            return _Display()
        if len(specs) == 1:
            return _TextDisplay(self._out)
        return _SideBySideDisplay(self._out)

    def report(self, results: Sequence[GenerationResult]) -> None:
        if len(results) > 1:
            self._out.print(_panels([(r.label, _marked_text(r, results)) for r in results]))
        self._out.print(_table(results))
        for result in results:
            if result.label != "full" and max(result.tokens_kept) == result.tokens_seen:
                self.note(f"{_NAMES[result.label]}: the budget held every token, none was evicted")

    def note_small_budget(self, policy: EvictionPolicy, prompt_len: int) -> None:
        """Say so where parts of a short prompt leave next to nothing."""
        total = policy.resolve(prompt_len).total
        if policy.has_ratio and total < _SMALL_BUDGET:
            self.note(
                f"H2O: the budget was {total} tokens, as it is a part of a prompt of {prompt_len}; "
                "a count, as in --heavy 128 --recent 128, does not depend on the prompt"
            )


class _Display:
    """Shows runs as they grow; this one shows nothing."""

    def show(self, runs: Sequence[GenerationRun], bars: Bars) -> None:
        bars.hide()

    def close(self) -> None:
        """Finish what is on the screen."""


class _TextDisplay(_Display):
    """Streams the text of one run."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown = 0

    def show(self, runs: Sequence[GenerationRun], bars: Bars) -> None:
        bars.hide()
        text = printable(runs[0].text)
        # A character may take several tokens; until it is whole, the decoder puts U+FFFD.
        if not text.endswith("\N{REPLACEMENT CHARACTER}") or runs[0].finished:
            self._console.out(text[self._shown :], end="", highlight=False)
            self._console.file.flush()
            self._shown = len(text)

    def close(self) -> None:
        self._console.print("\n")


class _SideBySideDisplay(_Display):
    """Shows several runs in columns while they grow; on a terminal only."""

    def __init__(self, console: Console) -> None:
        self._console = console
        # Drawn between the steps, not by a thread beside them.
        self._live: Live | None = None

    def show(self, runs: Sequence[GenerationRun], bars: Bars) -> None:
        bars.hide()
        if not self._console.is_terminal:
            return
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        texts = []
        for run in runs:
            text = _tail(printable(run.text), self._console, len(runs))
            texts.append((run.spec.label, Text(text, overflow="fold")))
        self._live.update(_panels(texts), refresh=True)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()


def _tail(text: str, console: Console, columns: int) -> str:
    """The last part of a text that fits beside others on the screen."""
    width = max(console.width // columns - 4, 8)
    lines = Text(text).wrap(console, width)
    return "\n".join(line.plain for line in lines[-max(console.height - 6, 4) :])


def _panels(texts: Sequence[tuple[str, Text]]) -> Table:
    grid = Table.grid(expand=True)
    for _ in texts:
        grid.add_column(ratio=1)
    grid.add_row(*(Panel(text, title=_NAMES[label]) for label, text in texts))
    return grid


def _marked_text(result: GenerationResult, results: Sequence[GenerationResult]) -> Text:
    """The text of a run; what comes after the first token unlike the full cache's is coloured."""
    text = Text(printable(result.text), overflow="fold")
    full = next((r for r in results if r.label == "full"), result)
    if result.text != full.text:
        text.stylize("yellow", compare_tokens(printable(full.text), text.plain).equal_prefix)
    return text


def _table(results: Sequence[GenerationResult]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("")
    for result in results:
        table.add_column(_NAMES[result.label], justify="right")
    full = next((r for r in results if r.label == "full"), None)

    def row(name: str, values: Sequence[str]) -> None:
        table.add_row(name, *values)

    row("tokens seen", [f"{r.tokens_seen:,}" for r in results])
    row("tokens kept", [_show_range(r.tokens_kept) for r in results])
    row("KV bytes, all tokens", [_show_bytes(r.full_kv_bytes) for r in results])
    row("KV bytes, kept", [_show_bytes(r.kv_bytes) for r in results])
    row("kept, of all", [f"{r.kv_bytes / r.full_kv_bytes:.1%}" for r in results])
    row("prefill, s", [f"{r.prefill_s:.2f}" for r in results])
    row("new tokens", [f"{len(r.token_ids)}" for r in results])
    row("ms per token (median)", [_show_number(r.median_ms) for r in results])
    row("tokens per s", [_show_number(r.tokens_per_s) for r in results])
    if full is not None:
        row("same tokens as full", [_show_agreement(full, r) for r in results])
    return table


def _show_agreement(full: GenerationResult, result: GenerationResult) -> str:
    if result is full:
        return ""
    agreement = compare_tokens(full.token_ids, result.token_ids)
    if agreement.first_difference is None:
        return f"all {agreement.compared}"
    return f"first {agreement.equal_prefix} of {agreement.compared}"


def _show_range(kept: Sequence[int]) -> str:
    low, high = min(kept), max(kept)
    return f"{low:,}" if low == high else f"{low:,}-{high:,}"


def _show_bytes(num_bytes: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes} B"


def _show_number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _show_part(count: int | None, ratio: float | None) -> str:
    # argparse formats help with %.
    return str(count) if ratio is None else f"{ratio:.4g} of the prompt"
