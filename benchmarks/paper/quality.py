"""Tables of accuracy, ROUGE and perplexity: policies at equal slots, by `h2o_kv.eval`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from report import markdown_table

from h2o_kv.eval import (
    Plan,
    TaskSpec,
    plot,
    read_results,
    run_sweep,
    settings,
    summarise,
)
from h2o_kv.eval.caches import Setting
from h2o_kv.eval.data import Row
from h2o_kv.eval.intervals import Interval
from h2o_kv.eval.summary import Group, Point
from h2o_kv.figures import panel_grid
from h2o_kv.parity import MODES
from h2o_kv.policies import POLICIES
from paper.configs import QualityTable, QualityTask, QualityVariant, TableError
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
from paper.parity_rows import run_parity

QUICK = {"limit": 2, "prompt_tokens": 64, "new_tokens": 8}
# Shown in percent, as in the paper.
_PERCENT = ("acc", "acc_norm")
_PERPLEXITY = "perplexity"
_FULL = "full"


def quick(variant: QualityVariant) -> QualityVariant:
    """The variant with few examples, short ones where they can be cut, at few budgets."""
    tasks = tuple(task.model_copy(update=QUICK) for task in variant.tasks)
    return variant.model_copy(update={"tasks": tasks, "ratios": variant.ratios[-2:]})


def run_table(run: Run, table: QualityTable, variant: QualityVariant) -> str:
    """Run what is not in rows.jsonl yet, and write all of it; returns the Markdown.

    Raises
    ------
    TableError
        A task has no such metric, or `--parity` is asked for where there is none.
    EvalError, ModelLoadError
        Data or a model will not do.
    """
    if run.parity and table.parity is None:
        raise TableError(f"--parity: {run.name} must have parity in its config, got none")
    chosen = settings(variant.policies, variant.ratios, variant.prefills)
    file = run.out / "rows.jsonl"
    for model in variant.models:
        for plan in plans(run, variant, model, chosen):
            run_sweep(
                plan,
                file,
                processes=run.processes,
                progress=lambda text, done, total: run.progress(
                    f"{run.name}: {text}", done / max(1, total)
                ),
            )
    rows = [row for row in read_results(file) if is_wanted(row, run, variant, chosen)]
    check_data(run, rows)
    others = run_parity(run, table.parity, variant) if run.parity and table.parity else []
    groups = summarise([*rows, *others])
    results = [
        own
        for group in groups
        for own in of_group(group, task_of(group.task, group.options, run, variant))
    ]
    if table.one_sided:
        results += losses(results, table.one_sided)
    results = beside(results, table.paper_values)
    about = {
        "policies": ", ".join(variant.policies),
        "slots": ", ".join(f"{ratio:.4g}" for ratio in variant.ratios) + " of an example",
        "prefill": ", ".join(variant.prefills),
    }
    found = document(run, variant, about, results)

    def draw(file: Path) -> None:
        if len(variant.ratios) > 1:
            plot(groups, file)
        else:
            save(file, table.title, lambda pyplot: draw_bars(pyplot, results))

    return write(run, found, markdown(results), draw)


def plans(
    run: Run, variant: QualityVariant, model: str | None, chosen: Sequence[Setting]
) -> Iterator[Plan]:
    """What to sweep: the tasks of each limit together."""
    for limit in dict.fromkeys(task.limit for task in variant.tasks):
        yield Plan(
            tasks=tuple(spec_of(run, task) for task in variant.tasks if task.limit == limit),
            settings=tuple(chosen),
            model=model,
            dtype=variant.dtype,
            device=variant.device,
            limit=limit,
            threads=run.threads,
        )


def spec_of(run: Run, task: QualityTask) -> TaskSpec:
    """The task as `h2o_kv.eval` wants it."""
    return TaskSpec(
        task.name,
        run.data,
        shots=task.shots,
        prompt_tokens=task.prompt_tokens,
        new_tokens=task.new_tokens,
    )


def task_of(
    name: str, options: Mapping[str, Any], run: Run, variant: QualityVariant
) -> QualityTask | None:
    """The variant's task that lines with these options are of."""
    for task in variant.tasks:
        spec = spec_of(run, task)
        if name == task.name and all(
            getattr(spec, option, value) == value for option, value in options.items()
        ):
            return task
    return None


def is_wanted(row: Row, run: Run, variant: QualityVariant, chosen: Sequence[Setting]) -> bool:
    """Whether a line of rows.jsonl is of what is asked for now."""
    task = task_of(row["task"], row["options"], run, variant)
    return (
        task is not None
        and (task.limit is None or row["index"] < task.limit)
        and row["model"] in [model_name(model) for model in variant.models]
        and row["dtype"] == variant.dtype
        and Setting(row["policy"], row["ratio"], row["prefill"]) in chosen
    )


def of_group(group: Group, task: QualityTask | None) -> Iterator[Result]:
    """The results of one task on one model.

    Raises
    ------
    TableError
        The task has no such metric.
    """
    assert task is not None
    for point in group.points:
        of = {
            "model": group.model,
            "task": group.task,
            **group.options,
            "metric": task.metric,
            "policy": point.policy,
            "ratio": point.ratio,
            "prefill": point.prefill,
        }
        interval, difference, unit = measured(point, task)
        yield result(
            of,
            interval.mean,
            unit,
            low=interval.low,
            high=interval.high,
            minus_full=None if difference is None else list(difference),
            examples=point.examples,
            seen=point.seen,
            kept=point.kept,
            nothing_evicted=point.nothing_evicted,
            data=group.data,
        )


def measured(point: Point, task: QualityTask) -> tuple[Interval, Interval | None, str]:
    """A metric's interval, that of its difference to the full cache, and their unit."""
    if task.metric == _PERPLEXITY and "nll" in point.metrics:
        return Interval(*(math.exp(end) for end in point.metrics["nll"])), None, ""
    if task.metric not in point.metrics:
        known = ", ".join([*point.metrics, *([_PERPLEXITY] if "nll" in point.metrics else [])])
        raise TableError(f"{task.name}: metric must be one of {known}, got {task.metric!r}")
    scale, unit = (100.0, "%") if task.metric in _PERCENT else (1.0, "")
    intervals = (point.metrics[task.metric], point.differences.get(task.metric))
    own, difference = (
        None if one is None else Interval(*(scale * end for end in one)) for one in intervals
    )
    assert own is not None
    return own, difference, unit


def check_data(run: Run, rows: Sequence[Row]) -> None:
    """Refuse to put results of different files into one table."""
    data: dict[str, str] = {}
    for row in rows:
        task = row["task"]
        if data.setdefault(task, row["data"]) != row["data"]:
            raise TableError(
                f"{run.out}: must have results of {task} on one data file, got two: use another --out"
            )


def losses(results: Sequence[Result], policies: Sequence[str]) -> Iterator[Result]:
    """The smallest and the largest loss of these policies against the full cache, over all tasks.

    Of what the algorithm does, not of the official scripts' modes.
    """
    for model in dict.fromkeys(own["of"]["model"] for own in results):
        lost = [
            0.0 - own["minus_full"][0]
            for own in results
            if own["of"]["model"] == model
            and own["of"]["policy"] in policies
            and own["of"]["prefill"] not in MODES
            and own["minus_full"] is not None
        ]
        for measure, value in (("smallest", min(lost)), ("largest", max(lost))):
            of = {"model": model, "measure": f"{measure} loss of one side alone"}
            yield result(of, value, "points")


# ---- The table and the plot.


def markdown(results: Sequence[Result]) -> str:
    """A table a model: ours, the official scripts' where they ran, the paper's."""
    parts = []
    for model in dict.fromkeys(own["of"].get("model") for own in results):
        if model is None:
            continue
        own_results = [own for own in results if own["of"].get("model") == model]
        single = [own for own in own_results if "measure" not in own["of"]]
        modes = [mode for mode in MODES if any(own["of"]["prefill"] == mode for own in single)]
        head = ["task", "policy", "slots", "prefill", "ours", "- full"]
        head += [f"as {mode}" for mode in modes] + ["paper", "examples", "not evicted"]
        rows = [
            _cells(own, [_same_but(single, own, mode) for mode in modes])
            for own in single
            if own["of"]["prefill"] not in modes
        ]
        parts.append(f"## {model}\n\n{markdown_table(head, rows, text_columns=4)}")
        parts += [
            f"{own['of']['measure']}: {number(own['value'], own['unit'])}"
            + (f" (paper: {paper_cell(own)})" if own["paper"] else "")
            + ".\n"
            for own in own_results
            if "measure" in own["of"]
        ]
    parts.append(
        'In brackets: 95 % confidence intervals. "- full": mean difference to the full cache over the '
        "same examples, in pairs. not evicted: examples that fit their budget, which say nothing "
        "about the policy.\n"
    )
    return "\n".join(parts)


def _cells(own: Result, as_scripts: Sequence[Result | None]) -> list[str]:
    of = own["of"]
    full = of["prefill"] == _FULL
    shots = f", {of['shots']} shots" if of.get("shots") else ""
    cells = [f"{of['task']}{shots} ({of['metric']})", POLICIES[of["policy"]].title]
    cells += ["all" if full else f"{100 * of['ratio']:.4g} %", "" if full else of["prefill"]]
    cells.append(_shown([own["value"], own["low"], own["high"]], own["unit"]))
    cells.append("" if own["minus_full"] is None else _shown(own["minus_full"], own["unit"], "+"))
    for other in as_scripts:
        cells.append(
            ""
            if other is None
            else _shown([other["value"], other["low"], other["high"]], other["unit"])
        )
    cells += [paper_cell(own), f"{own['examples']}", "" if full else f"{own['nothing_evicted']}"]
    return cells


def _shown(ends: Sequence[float], unit: str, sign: str = "") -> str:
    digits = ".1f" if unit == "%" else ".3f"
    mean, low, high = (f"{end:{sign}{digits}}" for end in ends)
    return f"{mean} [{low}, {high}]"


def _same_but(results: Sequence[Result], own: Result, prefill: str) -> Result | None:
    """The result of the same names under another prefill."""
    of = {**own["of"], "prefill": prefill}
    return next((other for other in results if other["of"] == of), None)


def draw_bars(pyplot: Any, results: Sequence[Result]) -> Any:
    """A panel a task and model: a bar a policy with its interval, and the paper's values."""
    panels: dict[tuple[str, str], list[Result]] = {}
    for own in results:
        if own["value"] is not None and "task" in own["of"]:
            panels.setdefault((own["of"]["model"], own["of"]["task"]), []).append(own)
    figure, axes = panel_grid(pyplot, len(panels), 4.5, 3.5)
    for axis, ((model, task), own) in zip(axes, panels.items(), strict=True):
        names = [_bar_name(one) for one in own]
        errors = [
            [one["value"] - one["low"] for one in own],
            [one["high"] - one["value"] for one in own],
        ]
        axis.bar(names, [one["value"] for one in own], yerr=errors, capsize=2, color="#1f77b4")
        known = [(_bar_name(one), one["paper"]["value"]) for one in own if one["paper"]]
        if known:
            axis.plot(*zip(*known, strict=True), "D", color="black", label="paper (its model)")
            axis.legend(fontsize="small")
        axis.set(title=f"{model}\n{task}", ylabel=f"{own[0]['of']['metric']} {own[0]['unit']}")
        axis.tick_params(axis="x", rotation=60, labelsize=7)
    return figure


def _bar_name(own: Result) -> str:
    of = own["of"]
    usual = of["prefill"] in (_FULL, "streamed")
    return of["policy"] if usual else f"{of['policy']}, {of['prefill']}"
