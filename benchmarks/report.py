"""What the scripts of the operators share: options, progress, results.jsonl, the tables, the plots."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from common import (
    MODELS,
    ROOT,
    ModelShape,
    ResultWriter,
    Timing,
    commit,
    machine_line,
    measure,
    ratio_fields,
)
from op_cases import DTYPES
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from h2o_kv import figures

Point = dict[str, Any]
# OPT-6.7B has the heads of Llama-2-7B.
DEFAULT_MODELS = ("smollm2-135m", "llama-3-8b", "llama-2-7b", "gpt-neox-20b")
RESULTS = ROOT / "benchmarks" / "results"
COLOURS = {
    "h2o": "#1f77b4",
    "h2o all": "#17becf",
    "read": "#000000",
    "sdpa": "#7f7f7f",
    "full": "#7f7f7f",
}
_MORE_COLOURS = ("#d62728", "#ff7f0e", "#2ca02c", "#9467bd", "#8c564b")
NOTE = "x: how many times as long as h2o the other takes, median of the rounds (p10-p90)."


def markdown_table(
    head: Sequence[str], rows: Sequence[Sequence[str]], text_columns: int = 1
) -> str:
    """A table of Markdown whose first columns are text, and the others numbers."""
    lines = [head, ["---"] * text_columns + ["---:"] * (len(head) - text_columns), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


# --- options ------------------------------------------------------------------------------------


def make_parser(
    description: str | None, script: str, *, repeats: int, dtypes: Sequence[str] = tuple(DTYPES)
) -> argparse.ArgumentParser:
    """The options of every script."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--dtype", choices=dtypes, nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--repeats", type=int, default=repeats, help="rounds that count")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of the CPU")
    parser.add_argument(
        "--out",
        type=Path,
        default=RESULTS / script,
        metavar="DIR",
        help="for results.jsonl, results.md and the plots (default: benchmarks/results/<script>)",
    )
    parser.add_argument("--quick", action="store_true", help="few small points; other options win")
    return parser


def add_shape_options(
    parser: argparse.ArgumentParser, length: str, lengths: Sequence[int], *, caches: str
) -> None:
    """The options of scripts that call operators on random tensors; `length`: slots or tokens."""
    parser.add_argument(
        "--model", choices=MODELS, nargs="+", default=list(DEFAULT_MODELS), help="shapes"
    )
    parser.add_argument(
        length, dest="lengths", metavar="N", type=int, nargs="+", default=list(lengths)
    )
    parser.set_defaults(lengths_option=length)
    parser.add_argument("--batch", type=int, nargs="+", default=[1], help="rows")
    parser.add_argument(
        "--caches",
        choices=("turns", "cold", "warm"),
        default=caches,
        help="turns: several caches take turns, together larger than the processor's; cold: its\n"
        f"caches are swept before every call; warm: neither (default: {caches})",
    )


def shape_points(args: argparse.Namespace) -> list[tuple[ModelShape, str, int, int]]:
    """(shape, dtype, rows, slots or tokens) of each point that the options of shapes ask for."""
    shapes = [MODELS[name] for name in args.model]
    return list(itertools.product(shapes, args.dtype, args.batch, args.lengths))


def parse(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None, quick: Mapping[str, Any]
) -> argparse.Namespace:
    """Read the command line; `quick` are the defaults under --quick. Seeds torch, sets its threads."""
    args = parser.parse_args(argv)
    if args.quick:
        parser.set_defaults(**quick)
        args = parser.parse_args(argv)
    for name in ("repeats", "threads"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be >= 1, got {getattr(args, name)}")
    # A budget is half heavy, half recent, or a fifth of a prompt; eviction cuts it to half.
    for name, least in (("batch", 1), ("lengths", 2)):
        if min(getattr(args, name, [least])) < least:
            option = args.lengths_option if name == "lengths" else f"--{name}"
            parser.error(f"{option} must be >= {least}, got {min(getattr(args, name))}")
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    return args


# --- results ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Column:
    """A column of the tables: a field of the points and how it is written.

    Attributes
    ----------
    title, field, form : str
    spread : bool
        With `<field>_p10` in a point the spread is written behind it.
    """

    title: str
    field: str
    form: str = "{}"
    spread: bool = True

    def cell(self, point: Point) -> str:
        """The point's cell, "-" where it has no such field."""
        if point.get(self.field) is None:
            return "-"
        text = self.form.format(point[self.field])
        if self.spread and f"{self.field}_p10" in point:
            low, high = (self.form.format(point[f"{self.field}_{end}"]) for end in ("p10", "p90"))
            text += f" ({low}-{high})"
        return text


def times(title: str, peer: str) -> Column:
    """Column of a ratio."""
    return Column(title, f"x_{peer}", "{:.2f}")


def shape_columns(title: str, field: str) -> tuple[Column, ...]:
    """The columns that say which point it is; the last one is its slots or tokens."""
    return (
        Column("shape", "model"),
        Column("dtype", "dtype"),
        Column("batch", "batch", "{:,}"),
        Column(title, field, "{:,}"),
    )


class Report:
    """The points of one script: files in --out, progress while it measures, ratios at the end.

    Parameters
    ----------
    title : str
    args : argparse.Namespace
        Of `parse`.
    columns : sequence of Column
        Of both tables; the one in Markdown has the milliseconds too. Those without any value are
        left out.
    total : int
        Points to come.
    """

    def __init__(
        self, title: str, args: argparse.Namespace, columns: Sequence[Column], total: int
    ) -> None:
        self.title, self.args, self.columns = title, args, columns
        self.points: list[Point] = []
        self.notes: list[str] = []
        self._writer = ResultWriter(args.out / "results.jsonl")
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            refresh_per_second=2,
        )
        self._of_points = self._progress.add_task(title, total=total)
        self._of_rounds = self._progress.add_task("", total=1)

    def __enter__(self) -> Report:
        self.machine = machine_line()
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()
        self._writer.__exit__(kind, error, trace)
        if kind is None:
            self._write_markdown()
            self._print()

    def start(self, text: str, total: int = 1) -> Callable[[int], None]:
        """Show what goes on now; the result is called with how much of it is done."""
        self._progress.reset(self._of_rounds, description=text, total=total)
        return lambda done: self._progress.update(self._of_rounds, completed=done)

    def measure(
        self, name: str, functions: Mapping[str, Callable[[], object]], **options: Any
    ) -> dict[str, Timing]:
        """`common.measure` with the options of the command line and progress."""
        warmup = options.pop("warmup", min(3, self.args.repeats))
        show = self.start(name, warmup + self.args.repeats)
        return measure(
            functions,
            repeats=self.args.repeats,
            warmup=warmup,
            cold=getattr(self.args, "caches", "") == "cold",
            on_round=show,
            **options,
        )

    def add(
        self,
        *,
        timings: Mapping[str, Timing],
        baseline: str,
        baseline_name: str,
        own: str = "h2o",
        **others: Any,
    ) -> None:
        """A point: our time, every peer's, and how many times as long they take."""
        point = self._writer.write(
            device="cpu",
            timing=timings[own],
            baseline=timings.get(baseline),
            baseline_name=baseline_name,
            **ratio_fields(timings, own),
            peers={name: timing.fields() for name, timing in timings.items() if name != own},
            **others,
        )
        self.points.append(point)
        self._progress.advance(self._of_points)

    def note(self, text: str) -> None:
        """A line under the tables, such as a peer that is left out; once."""
        if text not in self.notes:
            self.notes.append(text)

    def _shown(self, columns: Sequence[Column]) -> list[Column]:
        return [c for c in columns if any(p.get(c.field) is not None for p in self.points)]

    def _print(self) -> None:
        # In a file nothing needs to be cut.
        console = Console(width=None if sys.stdout.isatty() else 160)
        shown = self._shown(self.columns)
        table = Table(title=self.title)
        for column in shown:
            left = column.form == "{}"
            table.add_column(column.title, justify="left" if left else "right", no_wrap=left)
        for point in self.points:
            cells = []
            for column in shown:
                cell, value = column.cell(point), point.get(column.field)
                is_ratio = column.field.startswith("x_") and value is not None
                cells.append(f"[{'green' if value >= 1 else 'red'}]{cell}[/]" if is_ratio else cell)
            table.add_row(*cells)
        console.print(self.machine, highlight=False)
        console.print(table)
        for line in [NOTE, *self.notes]:
            console.print(line, highlight=False)
        files = ", ".join(sorted(file.name for file in self.args.out.iterdir()))
        console.print(f"written to {self.args.out}: {files}", highlight=False)

    def _write_markdown(self) -> None:
        spread = (Column("", "median_ms", "{:.4g}"), Column("", "p10_ms", "{:.4g}"))
        spread += (Column("", "p90_ms", "{:.4g}"),)
        shown = self._shown(self.columns)
        lines = [f"# {self.title}", "", f"{self.machine}; commit {commit()}.", ""]
        lines.append("| " + " | ".join([*(c.title for c in shown), "ms (p10-p90)"]) + " |")
        lines.append("|" + "".join(" --- |" if c.form == "{}" else " ---: |" for c in shown))
        lines[-1] += " ---: |"
        for point in self.points:
            median, low, high = (column.cell(point) for column in spread)
            cells = [*(c.cell(point) for c in shown), f"{median} ({low}-{high})"]
            lines.append("| " + " | ".join(cells) + " |")
        lines += ["", *(f"- {note}" for note in [NOTE, *self.notes])]
        lines += [f"\n![]({file.name})" for file in sorted(self.args.out.glob("*.png"))]
        (self.args.out / "results.md").write_text("\n".join(lines) + "\n", encoding="utf-8")

    # --- plots ------------------------------------------------------------------------------

    def plot(self, name: str, draw: Callable[[Any, list[Point]], Any]) -> None:
        """Write <name>.png, the figure that `draw` makes of pyplot and the points."""
        pyplot = load_pyplot()
        if pyplot is None:
            self.note("no plots: matplotlib is not installed")
        elif self.points:
            figure = draw(pyplot, self.points)
            figure.suptitle(f"{self.title}\n{self.machine.partition(';')[0]}", fontsize=10)
            figure.savefig(self.args.out / f"{name}.png", dpi=120)
            pyplot.close(figure)


def load_pyplot() -> Any:
    """matplotlib.pyplot for files; None where it is not installed."""
    try:
        return figures.load_pyplot()
    except ImportError:
        return None


def colours(names: Sequence[str]) -> dict[str, str]:
    """The colour of each line or bar; ours, SDPA's and the limit's are the same in every plot."""
    more = iter(_MORE_COLOURS)
    return {name: COLOURS.get(name) or next(more) for name in names}


def values_of(points: Sequence[Point], field: str) -> list[Any]:
    """The different values of a field in the order in which they come."""
    return list(dict.fromkeys(point[field] for point in points if field in point))


def ratio_bars(
    pyplot: Any,
    points: Sequence[Point],
    peers: Mapping[str, str],
    label: Callable[[Point], str],
) -> Any:
    """Ratio bars: a panel a dtype, a group of bars a point, a bar a peer (name: text of the legend)."""
    dtypes = values_of(points, "dtype")
    labels = list(dict.fromkeys(map(label, points)))
    peers = {name: text for name, text in peers.items() if any(f"x_{name}" in p for p in points)}
    palette = colours(list(peers))
    height = 0.8 / len(peers)
    figure, axes = pyplot.subplots(
        1,
        len(dtypes),
        figsize=(2 + 4.5 * len(dtypes), 2 + 0.28 * len(labels) * max(2, len(peers))),
        sharex=True,
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for axis, dtype in zip(axes[0], dtypes, strict=True):
        for index, (name, text) in enumerate(peers.items()):
            found = [p for p in points if p["dtype"] == dtype and f"x_{name}" in p]
            ratios = [p[f"x_{name}"] for p in found]
            errors = [
                [max(0.0, p[f"x_{name}"] - p[f"x_{name}_p10"]) for p in found],
                [max(0.0, p[f"x_{name}_p90"] - p[f"x_{name}"]) for p in found],
            ]
            # From 1 on: to the right where h2o is faster, to the left where it is slower.
            bars = axis.barh(
                [labels.index(label(p)) + index * height for p in found],
                [value - 1 for value in ratios],
                height,
                left=1,
                xerr=errors,
                error_kw={"elinewidth": 0.8, "alpha": 0.6},
                color=palette[name],
                label=text,
            )
            axis.bar_label(bars, [f"{value:.2f}" for value in ratios], padding=3, fontsize=7)
        axis.axvline(1, color="black", linewidth=0.8)
        axis.set(xscale="log", title=dtype, xlabel="times as long as h2o")
        axis.margins(x=0.2)
        axis.xaxis.set_major_formatter(pyplot.FuncFormatter(lambda x, _: f"{x:g}"))
        axis.xaxis.set_major_locator(pyplot.LogLocator(subs=(1, 2, 5)))
        axis.xaxis.set_minor_formatter(pyplot.NullFormatter())
    axes[0][0].set_yticks(
        [i + 0.4 - height / 2 for i in range(len(labels))], labels=labels, fontsize=8
    )
    axes[0][0].invert_yaxis()
    legend(figure)
    return figure


def legend(figure: Any) -> None:
    """One legend below all panels, each name once."""
    entries = {}
    for axis in figure.axes:
        handles, names = axis.get_legend_handles_labels()
        entries |= dict(zip(names, handles, strict=True))
    figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=5)
