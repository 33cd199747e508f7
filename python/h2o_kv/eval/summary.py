"""Summaries of a file of results: tables in Markdown, and a plot of quality against budget."""

from __future__ import annotations

import json
import math
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from h2o_kv.eval.data import EvalError, Row
from h2o_kv.eval.intervals import RESAMPLES, Interval, bootstrap, wilson
from h2o_kv.eval.text_metrics import self_bleu
from h2o_kv.figures import load_pyplot, panel_grid
from h2o_kv.policies import POLICIES, named

__all__ = ["Group", "Point", "markdown", "plot", "summarise"]

# Metrics that are 0 or 1 of each example, so that their mean is a proportion.
_PROPORTIONS = frozenset({"acc", "acc_norm", "exact", "first"})
# Metrics that are of a setting and the full cache already.
_OF_BOTH = frozenset({"kl", "agreement"})
_FULL = "full"


@dataclass(frozen=True)
class Point:
    """All examples of a task under one setting.

    Attributes
    ----------
    policy, prefill : str
    ratio : float
    examples : int
    metrics : dict of str to Interval
        Means over the examples.
    differences : dict of str to Interval
        Means of (this setting - full cache), over the examples that both have; none without a full run.
    together : dict of str to float
        Of all examples at once, which none can be left out of or drawn twice for an interval.
    seen, kept : float, tokens
        Means over the texts that were run.
    nothing_evicted : int
        Examples of which nothing was evicted: they say nothing about the policy.
    """

    policy: str
    ratio: float
    prefill: str
    examples: int
    metrics: dict[str, Interval]
    differences: dict[str, Interval]
    together: dict[str, float]
    seen: float
    kept: float
    nothing_evicted: int


@dataclass(frozen=True)
class Group:
    """A task with its options, on one model: what may be compared.

    Attributes
    ----------
    model, dtype, task, data, prompt_format : str
    options : dict
    points : tuple of Point
        The full cache first, then by policy, prefill and falling budget.
    """

    model: str
    dtype: str
    task: str
    data: str
    prompt_format: str
    options: dict[str, Any]
    points: tuple[Point, ...]

    @property
    def title(self) -> str:
        """Task and options."""
        options = ", ".join(f"{name} {value}" for name, value in self.options.items())
        return self.task + (f" ({options})" if options else "")


def summarise(rows: Iterable[Row]) -> list[Group]:
    """Means and intervals of results, in the order in which tasks first came."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        names = [row[name] for name in ("model", "dtype", "task", "options", "data")]
        groups.setdefault(json.dumps(names, sort_keys=True), []).append(row)
    return [_group(members) for members in groups.values()]


def _group(rows: Sequence[Row]) -> Group:
    settings: dict[tuple[str, float, str], dict[int, Row]] = {}
    for row in rows:
        setting = (row["policy"], row["ratio"], row["prefill"])
        settings.setdefault(setting, {})[row["index"]] = row
    full = next((own for (_, _, prefill), own in settings.items() if prefill == _FULL), {})
    order = list(dict.fromkeys(policy for policy, _, _ in settings))
    ranked = sorted(
        settings,
        key=lambda setting: (setting[2] != _FULL, order.index(setting[0]), setting[2], -setting[1]),
    )
    first = rows[0]
    return Group(
        model=first["model"],
        dtype=first["dtype"],
        task=first["task"],
        data=first["data"],
        prompt_format=first["prompt_format"],
        options=first["options"],
        points=tuple(_point(*setting, settings[setting], full) for setting in ranked),
    )


def _point(
    policy: str, ratio: float, prefill: str, rows: dict[int, Row], full: dict[int, Row]
) -> Point:
    names = list(next(iter(rows.values()))["metrics"])
    metrics, differences, together = {}, {}, {}
    for name in names:
        metrics[name] = _interval(name, [row["metrics"][name] for row in rows.values()])
        pairs = [
            row["metrics"][name] - full[index]["metrics"][name]
            for index, row in rows.items()
            if index in full
        ]
        if pairs and prefill != _FULL and name not in _OF_BOTH:
            differences[name] = bootstrap(pairs)
    answers = [row["texts"][-1] for row in rows.values() if "texts" in row]
    if "distinct_2" in metrics and len(answers) > 1:
        together["self_bleu"] = self_bleu(answers)
    texts = [
        (seen, kept)
        for row in rows.values()
        for seen, kept in zip(row["seen"], row["kept"], strict=True)
    ]
    return Point(
        policy=policy,
        ratio=ratio,
        prefill=prefill,
        examples=len(rows),
        metrics=metrics,
        differences=differences,
        together=together,
        seen=sum(seen for seen, _ in texts) / len(texts),
        kept=sum(kept for _, kept in texts) / len(texts),
        nothing_evicted=sum(row["nothing_evicted"] for row in rows.values()),
    )


def _interval(name: str, values: Sequence[float]) -> Interval:
    if name in _PROPORTIONS:
        return wilson(round(sum(values)), len(values))
    return bootstrap(values)


def markdown(groups: Sequence[Group]) -> str:
    """A table a task, and what its columns mean."""
    parts = ["# Evaluation\n"]
    for group in groups:
        names = list(group.points[0].metrics)
        head = ["policy", "budget", "prefill", "examples", "seen", "kept", "not evicted"]
        compared = {name for point in group.points for name in point.differences}
        for name in names:
            head += [name, f"{name} - full"] if name in compared else [name]
        head += ["perplexity"] if "nll" in names else []
        head += list(group.points[0].together)
        lines = [head, ["---"] * 3 + ["---:"] * (len(head) - 3)]
        lines += [_cells(point, names, compared) for point in group.points]
        table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
        parts.append(
            f"## {group.title}\n\n{group.model}, {group.dtype}; prompts: {group.prompt_format}; "
            f"data {group.data}\n\n{table}\n"
        )
    parts.append(
        "In brackets: 95 % confidence intervals; Wilson's for proportions, else a percentile bootstrap "
        f'over examples with {RESAMPLES} resamples. "- full": mean difference to the full cache over '
        "the same examples, in pairs. seen, kept: tokens of a text, means; not evicted: examples "
        "that fit their budget, which say nothing about the policy.\n"
    )
    return "\n".join(parts)


def _reads_a_part(point: Point) -> bool:
    """Whether the policy need not evict to say something: it keeps everything and reads a part."""
    policy = named(point.policy).with_slots(1, length=1) if point.policy in POLICIES else None
    return policy is not None and policy.arguments["read_slots"] > 0


def _cells(point: Point, names: Sequence[str], compared: Container[str]) -> list[str]:
    full = point.prefill == _FULL
    cells = [
        point.policy,
        "all" if full else f"{100 * point.ratio:.4g}%",
        "" if full else point.prefill,
    ]
    cells += [f"{point.examples}", f"{point.seen:.1f}", f"{point.kept:.1f}"]
    cells.append("" if full or _reads_a_part(point) else f"{point.nothing_evicted}")
    for name in names:
        cells.append(_shown(point.metrics[name]))
        if name in compared:
            difference = point.differences.get(name)
            cells.append("" if difference is None else _shown(difference, "+"))
    if "nll" in names:
        cells.append(_shown(Interval(*(math.exp(end) for end in point.metrics["nll"]))))
    return cells + [f"{value:.3f}" for value in point.together.values()]


def _shown(interval: Interval, sign: str = "") -> str:
    mean, low, high = (f"{value:{sign}.3f}" for value in interval)
    return f"{mean} [{low}, {high}]"


def plot(groups: Sequence[Group], file: Path) -> None:
    """Draw the first metric of each task against the budget, one line a policy and prefill.

    Raises
    ------
    EvalError
        matplotlib is missing.
    """
    try:
        pyplot = load_pyplot()
    except ImportError as error:
        raise EvalError("plots need matplotlib: pip install matplotlib") from error
    figure, panels = panel_grid(pyplot, len(groups), 5.5, 4)
    for group, panel in zip(groups, panels, strict=True):
        _draw(group, panel)
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def _draw(group: Group, panel: Any) -> None:
    name = next(iter(group.points[0].metrics))
    lines: dict[tuple[str, str], list[Point]] = {}
    for point in group.points:
        lines.setdefault((point.policy, point.prefill), []).append(point)
    policies = list(dict.fromkeys(policy for policy, prefill in lines if prefill != _FULL))
    for (policy, prefill), points in lines.items():
        title = POLICIES[policy].title if policy in POLICIES else policy
        means = [point.metrics[name].mean for point in points]
        if prefill == _FULL:
            panel.axhline(means[0], color="#444444", linestyle=":", label=title)
            continue
        colour = f"C{policies.index(policy) % 10}"
        panel.errorbar(
            [100 * point.ratio for point in points],
            means,
            yerr=[
                [point.metrics[name].mean - point.metrics[name].low for point in points],
                [point.metrics[name].high - point.metrics[name].mean for point in points],
            ],
            color=colour,
            linestyle="--" if prefill == "one_shot" else "-",
            marker="o",
            markersize=3,
            elinewidth=0.6,
            capsize=2,
            label=f"{title}, {prefill.replace('_', '-')}",
        )
    panel.set_xscale("log")
    ratios = sorted({point.ratio for point in group.points if point.prefill != _FULL})
    panel.set_xticks([100 * ratio for ratio in ratios], [f"{100 * ratio:.4g}%" for ratio in ratios])
    panel.minorticks_off()
    panel.set(xlabel="slots, part of the example's tokens", ylabel=name, title=group.title)
    panel.legend(fontsize="small")
