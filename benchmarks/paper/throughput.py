"""Tables of speed and memory: the full cache and H2O, in three columns that are never mixed.

Single request: seconds of one text. Fixed batch: the same batch under both caches. Largest batch: what
fits each cache in the same memory; a gain there is one of capacity, not of a kernel.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from bench_generate import check_logits
from common import Spread, measure, peak_growth, read_text
from report import markdown_table

from h2o_kv import EvictionPolicy
from h2o_kv.eval.caches import Setting, attention_for
from h2o_kv.eval.data import read_rows, value
from h2o_kv.eval.decoding import policy_cache
from h2o_kv.eval.scoring import Rows
from h2o_kv.hf import H2OCache
from h2o_kv.models import load_model
from paper.configs import TableError, ThroughputTable, ThroughputVariant, parse_bytes
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

QUICK = {
    "lengths": ((24, 8),),
    "batch": 2,
    "max_batch": 4,
    "repeats": 1,
}
SINGLE, FIXED, LARGEST = COLUMNS = ("single request", "fixed batch", "largest batch")
_FULL = Setting("full", 1.0, "full")
_CHECKED_TOKENS = 64
# Measures of a column, and of the memory at its end, with their units.
_SPEED = {"batch": "", "seconds": "s", "tokens/s": "tokens/s", "prefill": "s"}
_MEMORY = ("peak", "weights", "KV", "scores and positions", "workspace")
_MB = 1e6


@dataclass(frozen=True)
class Generation:
    """A batch of texts, generated once.

    Attributes
    ----------
    batch : int
    seconds, prefill_s : float
        Of all; of the prompts alone.
    tokens_per_s : float
        New tokens of all rows over all seconds.
    kv, bookkeeping : int, bytes
        That the cache holds at the end: keys and values; scores, positions and what undoes a step.
    growth : int, bytes
        The most that was in use at once beyond what was there before: cache and workspace.
    """

    batch: int
    seconds: float
    prefill_s: float
    tokens_per_s: float
    kv: int
    bookkeeping: int
    growth: int


def quick(variant: ThroughputVariant) -> ThroughputVariant:
    """The variant with short texts and small batches."""
    return variant.model_copy(update=QUICK)


def run_table(run: Run, table: ThroughputTable, variant: ThroughputVariant) -> str:
    """Measure and write; returns the Markdown.

    Raises
    ------
    TableError
        The model's positions end before the texts, or there are none.
    EvalError, ModelLoadError
        Data or a model will not do.
    """
    memory = parse_bytes(run.memory or variant.memory)
    results: list[Result] = []
    for source in variant.models:
        run.progress(f"{run.name}: loading", 0.0)
        model, tokenizer = load_model(source, dtype=variant.dtype, device=variant.device)
        for prompt, new in variant.lengths:
            check_length(model, prompt + new)
            texts = prompts(run, variant, tokenizer, prompt)
            check(model, texts(1)[0])
            names = {"model": model_name(source), "lengths": f"{prompt}+{new}"}
            bench = Bench(run, model, texts, new, variant, memory)
            results += [
                {**own, "of": {**names, **own["of"]}}
                for own in (*bench.in_turns(), *bench.largest())
            ]
        del model
    results = beside(results, table.paper_values)
    about = {
        "prompts": variant.texts or "pieces of one text, all of full length",
        "H2O": f"slots {variant.ratio:.4g} of prompt and new tokens, half heavy, one-shot prefill",
        "memory": f"{memory:,} bytes",
        "largest batch tried": variant.max_batch,
        "rounds": variant.repeats,
    }
    found = document(run, variant, about, results)
    return write(
        run,
        found,
        markdown(results),
        lambda file: save(file, table.title, lambda pyplot: draw(pyplot, results)),
    )


def check_length(model: Any, tokens: int) -> None:
    """Refuse texts that are longer than a learned table of positions."""
    cache = H2OCache(model, EvictionPolicy(num_heavy=1, num_recent=1))
    if cache.max_positions is not None and tokens > cache.max_positions:
        raise TableError(
            f"lengths: must fit the model's {cache.max_positions} learned positions, got {tokens}"
        )


def prompts(
    run: Run, variant: ThroughputVariant, tokenizer: Any, length: int
) -> Callable[[int], list[list[int]]]:
    """Token ids of so many prompts of at most `length` tokens."""
    if variant.texts is None:
        ids = tokenizer(read_text(None))["input_ids"]
        ids = ids * -(-2 * length // len(ids))
        # Each begins a little later in the same text.
        starts = range(len(ids) - length)
        return lambda count: [
            ids[(start := starts[17 * row % len(starts)]) : start + length] for row in range(count)
        ]
    file = run.data / variant.texts
    texts = [value(row, variant.field, str) for row in read_rows(file)]
    if not texts:
        raise TableError(f"{file}: must have at least one row, got none")
    rows = [tokenizer(text)["input_ids"][:length] for text in texts]
    return lambda count: [rows[row % len(rows)] for row in range(count)]


@torch.inference_mode()
def check(model: Any, prompt: Sequence[int]) -> None:
    """Stop where H2O with room for everything does not give the full cache's logits."""
    prompt = list(prompt[:_CHECKED_TOKENS])
    everything = Setting("h2o", 1.0, "one_shot")
    found = []
    for setting in (_FULL, everything):
        with attention_for(model, setting):
            rows = Rows(model, policy_cache(model, [len(prompt) + 1], setting))
            found.append([rows.forward([prompt], 1)[0, -1], rows.forward([prompt[:1]], 1)[0, -1]])
    for own, full in zip(found[1], found[0], strict=True):
        check_logits("h2o with room for everything", own, full)


@torch.inference_mode()
def generate(
    model: Any, texts: Sequence[Sequence[int]], new_tokens: int, setting: Setting
) -> Generation:
    """Continue each text greedily by `new_tokens` tokens, whatever they are.

    Raises
    ------
    SystemExit
        The cache does not keep as many tokens as it must.
    """
    sizes = [len(text) + new_tokens for text in texts]
    cache = policy_cache(model, sizes, setting)
    with peak_growth(model.device) as growth, attention_for(model, setting):
        rows = Rows(model, cache)
        start = time.perf_counter()
        # Reading the tokens waits for the device.
        tokens = rows.forward(texts, 1)[:, -1].argmax(-1).tolist()
        prefill_s = time.perf_counter() - start
        for _ in range(new_tokens - 1):
            tokens = rows.forward([[token] for token in tokens], 1)[:, -1].argmax(-1).tolist()
        seconds = time.perf_counter() - start
        grown = growth()
    kv, bookkeeping = cache_bytes(cache)
    if isinstance(cache, H2OCache):
        kept = cache.tokens_kept()[0].amax(1).tolist()
        # The last token is not fed.
        wanted = [min(setting.slots(size), size - 1) for size in sizes]
        if kept != wanted:
            raise SystemExit(f"h2o: keeps {kept} tokens, must keep {wanted}")
    return Generation(
        batch=len(texts),
        seconds=seconds,
        prefill_s=prefill_s,
        tokens_per_s=len(texts) * new_tokens / seconds,
        kv=kv,
        bookkeeping=bookkeeping,
        growth=grown,
    )


def cache_bytes(cache: Any) -> tuple[int, int]:
    """Bytes of K and V, and of everything else that the cache holds."""
    if isinstance(cache, H2OCache):
        held = cache.nbytes()
        return held.kv, held.total - held.kv
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers), 0


def largest_batch(fits: Callable[[int], bool], most: int) -> int:
    """The largest batch of 1..most that fits, if what is smaller than one that fits does, too; 0: none.

    >>> largest_batch(lambda batch: batch <= 11, 64)
    11
    """
    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


class Bench:
    """The columns of one model at one pair of lengths.

    Parameters
    ----------
    run : Run
    model : transformers.PreTrainedModel
    texts : callable
        Number of rows to their prompts.
    new_tokens : int
    variant : ThroughputVariant
    memory : int, bytes
    """

    def __init__(
        self,
        run: Run,
        model: Any,
        texts: Callable[[int], list[list[int]]],
        new_tokens: int,
        variant: ThroughputVariant,
        memory: int,
    ) -> None:
        self._run, self._model, self._texts, self._new = run, model, texts, new_tokens
        self._variant, self._memory = variant, memory
        self._weights = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
        self._settings = {"full": _FULL, "h2o": Setting("h2o", variant.ratio, "one_shot")}

    def in_turns(self) -> Iterator[Result]:
        """One request, then the fixed batch: both caches in turns."""
        for column, batch in ((SINGLE, 1), (FIXED, self._variant.batch)):
            runs: dict[str, list[Generation]] = {name: [] for name in self._settings}

            def once(name: str, batch: int = batch, runs: Any = runs) -> float:
                runs[name].append(self._generate(name, batch))
                return 1000 * float(runs[name][-1].seconds)

            timings = measure(
                {name: lambda name=name: once(name) for name in self._settings},
                repeats=self._variant.repeats,
                warmup=1,
                clock=lambda call: call(),
                on_round=lambda done, column=column: self._run.progress(
                    f"{self._run.name}: {column}", done / (1 + self._variant.repeats)
                ),
            )
            for name, timing in timings.items():
                # The first round warms up.
                own = sorted(runs[name][1:], key=lambda one: one.seconds)
                spread = Spread.of([ms / 1000 for ms in timing.milliseconds])
                yield from self._results(column, name, own[len(own) // 2], spread)

    def largest(self) -> Iterator[Result]:
        """The largest batch of each cache, and what it takes."""
        for name in self._settings:
            runs: dict[int, Generation] = {}

            def fits(batch: int, name: str = name, runs: Any = runs) -> bool:
                self._run.progress(f"{self._run.name}: {name}, a batch of {batch}", 0.0)
                try:
                    runs[batch] = self._generate(name, batch)
                except torch.cuda.OutOfMemoryError:
                    torch.cuda.empty_cache()
                    return False
                return bool(self._weights + runs[batch].growth <= self._memory)

            batch = largest_batch(fits, self._variant.max_batch)
            if batch == 0:
                yield result({"column": LARGEST, "cache": name, "measure": "batch"}, 0, "")
                continue
            yield from self._results(LARGEST, name, runs[batch])

    def _generate(self, name: str, batch: int) -> Generation:
        return generate(self._model, self._texts(batch), self._new, self._settings[name])

    def _results(
        self, column: str, name: str, own: Generation, spread: Spread | None = None
    ) -> Iterator[Result]:
        speed = {
            "batch": own.batch,
            "seconds": own.seconds,
            "tokens/s": own.tokens_per_s,
            "prefill": own.prefill_s,
        }
        for measure_name, found in speed.items():
            of = {"column": column, "cache": name, "measure": measure_name}
            others = {}
            if spread is not None and measure_name == "seconds":
                others = {"low": spread.p10, "high": spread.p90}
            yield result(of, found, _SPEED[measure_name], **others)
        parts = (
            self._weights + own.growth,
            self._weights,
            own.kv,
            own.bookkeeping,
            # Of the peak; in a one-shot prefill it comes before the cache is full, so below 0 is 0.
            max(0, own.growth - own.kv - own.bookkeeping),
        )
        for measure_name, size in zip(_MEMORY, parts, strict=True):
            of = {"column": column, "cache": name, "measure": f"{measure_name} memory"}
            yield result(of, size / _MB, "MB")


# ---- The table and the plot.


def markdown(results: Sequence[Result]) -> str:
    """A table of speed and one of memory for each column, model and pair of lengths."""
    parts = []
    for model, lengths, column in _groups(results):
        own = _named(results, model=model, lengths=lengths, column=column)
        caches = list(dict.fromkeys(one["of"]["cache"] for one in own))
        rows = [_speed_row(cache, _named(own, cache=cache)) for cache in caches]
        head = ["cache", "batch", "seconds", "paper", "tokens/s", "paper", "prefill, s"]
        memory = [_memory_row(cache, _named(own, cache=cache)) for cache in caches]
        parts.append(
            f"## {column[0].upper()}{column[1:]}: {lengths} tokens, {model}\n\n"
            f"{markdown_table(head, rows)}\n"
            f"{markdown_table(['MB', *_MEMORY, 'paper, peak'], memory)}"
        )
    parts.append(
        "seconds: prompts and new tokens of the whole batch, median of the rounds (largest batch: of "
        "one run). tokens/s: new tokens of all rows over these seconds. Peak: weights and the most "
        "that was in use beside them at once; workspace: what of it is neither weights nor cache.\n"
    )
    return "\n".join(parts)


def _groups(results: Sequence[Result]) -> list[tuple[str, str, str]]:
    return list(
        dict.fromkeys(
            (own["of"]["model"], own["of"]["lengths"], own["of"]["column"])
            for own in results
            if own["value"] is not None
        )
    )


def _named(results: Sequence[Result], **names: str) -> list[Result]:
    return [
        own for own in results if own["value"] is not None and names.items() <= own["of"].items()
    ]


def _speed_row(cache: str, own: Sequence[Result]) -> list[str]:
    found = {one["of"]["measure"]: one for one in own}
    cells = [cache, f"{found['batch']['value']}"]
    for name in ("seconds", "tokens/s"):
        one = found.get(name)
        cells += ["-", ""] if one is None else [number(one["value"]), paper_cell(one)]
    return [*cells, "-" if "prefill" not in found else number(found["prefill"]["value"])]


def _memory_row(cache: str, own: Sequence[Result]) -> list[str]:
    found = {one["of"]["measure"]: one for one in own}
    sizes = [found.get(f"{name} memory") for name in _MEMORY]
    cells = ["-" if one is None else f"{one['value']:,.1f}" for one in sizes]
    return [cache, *cells, "" if sizes[0] is None else paper_cell(sizes[0])]


def draw(pyplot: Any, results: Sequence[Result]) -> Any:
    """Tokens a second in each column, never in one panel, and the parts of memory."""
    groups = _groups(results)
    figure, axes = pyplot.subplots(
        2, len(groups), figsize=(3.6 * len(groups), 6.5), layout="constrained", squeeze=False
    )
    for (model, lengths, column), (upper, lower) in zip(groups, axes.T, strict=True):
        own = _named(results, model=model, lengths=lengths, column=column)
        speed = _named(own, measure="tokens/s")
        names = [one["of"]["cache"] for one in speed]
        if speed:
            drawn = upper.bar(names, [one["value"] for one in speed], color=["#7f7f7f", "#1f77b4"])
            upper.bar_label(drawn, [f"{one['value']:.3g}" for one in speed], fontsize=8)
        upper.set(title=f"{column}\n{lengths}, {model}", ylabel="new tokens/s")
        upper.title.set_fontsize(8)
        bottom = [0.0] * len(names)
        # Weights are the same in all, and would hide the rest.
        for part in _MEMORY[2:]:
            sizes = [one["value"] for one in _named(own, measure=f"{part} memory")]
            lower.bar(names, sizes, bottom=bottom, label=part)
            bottom = [sum(pair) for pair in zip(bottom, sizes, strict=True)]
        lower.set(ylabel="MB at the peak, beside the weights")
        lower.legend(fontsize=6)
    return figure
