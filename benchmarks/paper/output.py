"""What every table leaves: results with the paper's value beside each, table.md, and a plot."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from common import commit, machine_line
from report import load_pyplot

from h2o_kv.models import EMBEDDED_MODEL
from paper.configs import PaperValue, Table, Variant

Names = Mapping[str, Any]
Result = dict[str, Any]
Progress = Callable[[str, float], None]
"""Called with what is under way and the fraction of it that is done."""


@dataclass(frozen=True)
class Run:
    """What a table is made with.

    Attributes
    ----------
    name : str
        Of the table.
    table : Table
    variant : str
    data, out : Path
        Folder with the data; the table's own folder, for what it leaves.
    processes : int
        Of a sweep.
    threads : int or None
    parity : bool
        Whether the official scripts' modes are run beside.
    memory : str or None
        Instead of the variant's limit.
    quick : bool
        Whether it is to show that everything runs, and no result.
    progress : callable
    """

    name: str
    table: Table
    variant: str
    data: Path
    out: Path
    processes: int = 1
    threads: int | None = None
    parity: bool = False
    memory: str | None = None
    quick: bool = False
    progress: Progress = lambda text, done: None


def model_name(model: str | None) -> str:
    """What a model is called in results."""
    return model or EMBEDDED_MODEL


def result(of: Names, value: float | None, unit: str, **others: Any) -> Result:
    """A result: what it is of, its value in a unit, and what else is known of it."""
    return {"of": dict(of), "value": value, "unit": unit, **others}


def beside(results: Iterable[Result], paper: Sequence[PaperValue]) -> list[Result]:
    """Give each result the paper's value, or None; what the paper has beyond them comes last.

    A value of the paper stands beside each result whose names have all of its names. In a result of
    the second kind `value` is None: it was not run here.
    """
    found, used = [], set()
    for own in results:
        fitting = [
            place for place, value in enumerate(paper) if value.of.items() <= own["of"].items()
        ]
        used |= set(fitting)
        found.append({**own, "paper": _plain(paper[fitting[0]]) if fitting else None})
    for place, value in enumerate(paper):
        if place not in used:
            found.append({**result(value.of, None, value.unit), "paper": _plain(value)})
    return found


def _plain(value: PaperValue) -> dict[str, Any]:
    return value.model_dump(exclude={"of"})


def document(
    run: Run, variant: Variant, settings: Names, results: Sequence[Result]
) -> dict[str, Any]:
    """Everything that results.json has; `settings` are those beside models, dtype and device."""
    common = {
        "models": ", ".join(model_name(model) for model in variant.models),
        "dtype": variant.dtype,
        "device": variant.device,
    }
    if run.quick:
        common = {"QUICK RUN": "few, short examples; shows that it runs, no result", **common}
    return {
        "table": run.name,
        "title": run.table.title,
        "variant": run.variant,
        "date": datetime.now(timezone.utc).isoformat(timespec="minutes"),
        "machine": machine_line(variant.device),
        "commit": commit(),
        "settings": {**common, **settings},
        "notes": list(run.table.notes),
        "results": list(results),
    }


def write(run: Run, found: Mapping[str, Any], body: str, draw: Callable[[Path], None]) -> str:
    """Write results.json, table.md and <table>.png into `run.out`; returns the Markdown.

    Parameters
    ----------
    run : Run
    found : dict
        Of `document`.
    body : str
        Markdown of the tables.
    draw : callable
        Called with the file of the plot, if matplotlib is there.
    """
    run.out.mkdir(parents=True, exist_ok=True)
    plot = run.out / f"{run.name}.png"
    plot.unlink(missing_ok=True)
    if load_pyplot() is not None:
        draw(plot)
    text = _markdown(found, body, plot.name if plot.exists() else None)
    (run.out / "table.md").write_text(text, encoding="utf-8")
    (run.out / "results.json").write_text(
        json.dumps(found, ensure_ascii=False, indent=1) + "\n", encoding="utf-8"
    )
    return text


def save(file: Path, title: str, make: Callable[[Any], Any]) -> None:
    """Save the figure that `make` makes of pyplot."""
    pyplot = load_pyplot()
    figure = make(pyplot)
    figure.suptitle(title, fontsize=10)
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def _markdown(found: Mapping[str, Any], body: str, plot: str | None) -> str:
    settings = "; ".join(f"{name}: {value}" for name, value in found["settings"].items())
    sources = [one["paper"] for one in found["results"] if one["paper"] is not None]
    lines = [
        f"# {found['title']}",
        "",
        f"Variant {found['variant']}. {settings}.",
        f"{found['machine']}; commit {found['commit']}; {found['date']}.",
        "",
        body.rstrip(),
        "",
    ]
    missing = [one for one in found["results"] if one["value"] is None and one["paper"]]
    if missing:
        lines += ["In the paper, not run here:", ""]
        lines += [
            f"- {described(one['of'])}: {number(one['paper']['value'], one['unit'])}"
            for one in missing
        ]
        lines.append("")
    if sources:
        where = dict.fromkeys(
            f"{one['source']} ({one['model'] or 'model not stated in what we have of it'})"
            for one in sources
        )
        lines += [f'"paper" is {"; ".join(where)}.', ""]
    lines += [f"- {note}" for note in found["notes"]]
    lines += ["", f"![]({plot})"] if plot else []
    return "\n".join(lines).rstrip() + "\n"


def described(of: Names) -> str:
    """What a result is of, in words."""
    return ", ".join(f"{name} {value}" for name, value in of.items())


def number(value: float | None, unit: str = "") -> str:
    """A value with its unit, four digits or a whole number; "-" for None.

    >>> number(80.09, "%"), number(74800.0, "MB"), number(None)
    ('80.09 %', '74,800 MB', '-')
    """
    if value is None:
        return "-"
    return (f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}") + f" {unit}".rstrip()


def paper_cell(own: Result) -> str:
    """The paper's value beside a result, for a table; "" where there is none."""
    return "" if own["paper"] is None else number(own["paper"]["value"])
