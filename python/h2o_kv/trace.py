"""Worked cases, replayed on the reference and shown step by step.

A case is a JSON file in `cases/` beside this module: queries, keys and values of one sequence, the
budget, sometimes a filled cache to start from, and what must come out. The tests compare with what
must come out; here only the inputs are read, and the steps are what the reference does with them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from . import reference
from .reference import Step

__all__ = ["Case", "list_cases", "load_case", "render", "replay", "run_case", "to_json"]

CASES_FOLDER = Path(__file__).parent / "cases"
_CONFIG_KEYS = ("sink", "heavy", "recent", "gqa", "scale", "chunk")
_STYLES = {"victim": "bold red", "recent": "blue", "sink": "cyan", "kept": "yellow"}


@dataclass(frozen=True, eq=False)
class Case:
    """Inputs of one worked case; batch is 1 and every float is float64.

    Attributes
    ----------
    name, description : str
        What it is called, and what it shows in one sentence.
    num_sink, num_heavy, num_recent : int
        The budget, in slots.
    gqa_reduce : str
        "sum" or "max" over the query heads of a group.
    scale : float or None
        Factor on query . key; None = head_dim ** -0.5.
    chunk : int
        Tokens that join together.
    query : Tensor, float64, [1, num_q_heads, num_new, head_dim]
    k_new, v_new : Tensor, float64, [1, num_kv_heads, num_new, head_dim]
    position_new : Tensor, int64, [1, num_new]
    k_cache, v_cache, scores, positions : Tensor
        The cache before the first step: float64, float64, float64 and int32, shapes as in
        `reference.attention_decode`.
    """

    name: str
    description: str
    num_sink: int
    num_heavy: int
    num_recent: int
    gqa_reduce: str
    scale: float | None
    chunk: int
    query: Tensor
    k_new: Tensor
    v_new: Tensor
    position_new: Tensor
    k_cache: Tensor
    v_cache: Tensor
    scores: Tensor
    positions: Tensor

    @property
    def budget(self) -> int:
        """Slots that the policy keeps."""
        return self.num_sink + self.num_heavy + self.num_recent


def list_cases() -> dict[str, str]:
    """Name and description of every case that comes with the package."""
    return {
        path.stem: json.loads(path.read_text(encoding="utf-8"))["description"]
        for path in sorted(CASES_FOLDER.glob("*.json"))
    }


def load_case(name_or_path: str | Path) -> Case:
    """Read a case that comes with the package, by name, or another one, by path (`*.json`).

    Raises
    ------
    ValueError
        There is no such case or file, or the file is no case; the message says which names there
        are, or which file and key is wrong.
    """
    path = Path(name_or_path)
    if path.suffix != ".json":
        names = sorted(p.stem for p in CASES_FOLDER.glob("*.json"))
        if str(name_or_path) not in names:
            raise ValueError(
                f"trace: case must be one of {', '.join(names)}, or the path of a .json file, "
                f"got {str(name_or_path)!r}"
            )
        path = CASES_FOLDER / f"{name_or_path}.json"
    try:
        case = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"trace: cannot read case file {path}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"trace: case file {path} is not JSON: {error}") from error
    try:
        return _parse(case)
    except KeyError as error:
        raise ValueError(f"trace: case file {path} lacks key {error}") from error
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        raise ValueError(f"trace: case file {path} is not a case: {error}") from error


def _parse(case: Mapping[str, Any]) -> Case:
    config = case["config"]
    unknown = sorted(set(config) - set(_CONFIG_KEYS))
    if unknown:
        raise ValueError(f"config must have only {', '.join(_CONFIG_KEYS)}, got {unknown[0]!r}")
    sink, heavy, recent = config.get("sink", 0), config["heavy"], config["recent"]
    query, key, value = (_with_batch(case[name]) for name in ("query", "key", "value"))
    num_kv_heads, num_new, head_dim = key.shape[1:]
    if value.shape != key.shape or query.shape[2:] != key.shape[2:]:
        raise ValueError(
            "query, key and value must have the same number of tokens and head_dim, got "
            f"query {[*query.shape[1:]]}, key {[*key.shape[1:]]}, value {[*value.shape[1:]]}"
        )
    if query.shape[1] % num_kv_heads:
        raise ValueError(
            f"num_q_heads must be a multiple of num_kv_heads, got num_q_heads={query.shape[1]}, "
            f"num_kv_heads={num_kv_heads}"
        )
    if "state" in case:
        state = case["state"]
        k_cache, v_cache = _with_batch(state["key"]), _with_batch(state["value"])
        scores = _with_batch(state["scores"])
        positions = torch.tensor(state["positions"], dtype=torch.int32)[None]
        position_new = torch.arange(case["position"], case["position"] + num_new)[None]
    else:
        capacity = sink + heavy + recent
        k_cache = torch.zeros(1, num_kv_heads, capacity, head_dim, dtype=torch.float64)
        v_cache = torch.zeros_like(k_cache)
        scores = torch.zeros(1, num_kv_heads, capacity, dtype=torch.float64)
        positions = torch.full((1, num_kv_heads, capacity), -1, dtype=torch.int32)
        position_new = torch.arange(num_new)[None]
    return Case(
        name=case["name"],
        description=case["description"],
        num_sink=sink,
        num_heavy=heavy,
        num_recent=recent,
        gqa_reduce=config.get("gqa", "sum"),
        scale=config.get("scale"),
        chunk=config.get("chunk", 1),
        query=query,
        k_new=key,
        v_new=value,
        position_new=position_new,
        k_cache=k_cache,
        v_cache=v_cache,
        scores=scores,
        positions=positions,
    )


def _with_batch(values: Sequence[Any]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)[None]


def replay(case: Case) -> list[Step]:
    """Run a case on the reference; the case itself is left as it is."""
    steps: list[Step] = []
    reference.attention_decode(
        case.query,
        case.k_cache.clone(),
        case.v_cache.clone(),
        case.scores.clone(),
        case.positions.clone(),
        case.k_new,
        case.v_new,
        case.position_new,
        case.num_sink,
        case.num_heavy,
        case.num_recent,
        gqa_reduce=case.gqa_reduce,
        scale=case.scale,
        chunk=case.chunk,
        trace=steps,
    )
    return steps


def run_case(name_or_path: str | Path, console: Console | None = None) -> list[Step]:
    """Load a case, replay it, and print it to `console` (default: standard output).

    Raises
    ------
    ValueError
        As `load_case`.
    """
    case = load_case(name_or_path)
    steps = replay(case)
    render(case, steps, Console(highlight=False) if console is None else console)
    return steps


def to_json(case: Case, steps: Sequence[Step]) -> dict[str, Any]:
    """The trace as plain values for JSON; a margin of infinity, or a score of NaN, is None."""
    return {
        "name": case.name,
        "description": case.description,
        "num_sink": case.num_sink,
        "num_heavy": case.num_heavy,
        "num_recent": case.num_recent,
        "gqa_reduce": case.gqa_reduce,
        "chunk": case.chunk,
        "steps": [
            {
                "row": step.row,
                "head": step.head,
                "positions": list(step.positions),
                "candidates": list(step.candidates),
                "slots": list(step.slots),
                "scores_before": _finite(step.scores_before.tolist()),
                "weights": _finite([weight.tolist() for weight in step.weights]),
                "scores": _finite(step.scores.tolist()),
                "recent": list(step.recent),
                "victims": list(step.victims),
                "margin": _finite(step.margin),
                "kept": list(step.kept),
                "stored": [list(pair) for pair in step.stored],
                "output": _finite(step.output.tolist()),
            }
            for step in steps
        ],
    }


def _finite(value: Any) -> Any:
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return value if math.isfinite(value) else None


def render(case: Case, steps: Sequence[Step], console: Console) -> None:
    """Print each step: a table of the candidates, then who leaves and who takes which slot."""
    num_q_heads, num_kv_heads = case.query.shape[1], case.k_new.shape[1]
    _say(console, f"{case.name}: {case.description}")
    _say(
        console,
        f"budget {case.budget} = {case.num_sink} sink + {case.num_heavy} heavy + "
        f"{case.num_recent} recent; query heads {num_q_heads}, KV heads {num_kv_heads}, "
        f"gqa_reduce {case.gqa_reduce}, chunk {case.chunk}",
    )
    for index, step in enumerate(steps):
        where = f", KV head {step.head}" if num_kv_heads > 1 else ""
        joins = "joins" if len(step.positions) == 1 else "join"
        title = f"step {index // num_kv_heads}{where}: {_positions(step.positions)} {joins}"
        console.print()
        _say(console, title, style="bold")
        console.print(_table(case, step))
        _say(console, f"recent window: {_positions(step.recent)}")
        for line in _explain(case, step):
            _say(console, line)
        _say(console, f"kept: {_positions(step.kept)}")


def _table(case: Case, step: Step) -> Table:
    table = Table("position", "slot", "weight", "score before", "score after", "state")
    for column in table.columns[:-1]:
        column.justify = "right"
    received = torch.zeros_like(step.scores)
    for weight in step.weights:
        reduced = weight.sum(0) if case.gqa_reduce == "sum" else weight.amax(0)
        received[: reduced.shape[0]] += reduced
    slot_after = dict(step.stored)
    for i in sorted(range(len(step.candidates)), key=lambda i: step.candidates[i]):
        position = step.candidates[i]
        slot = str(step.slots[i])
        if step.slots[i] < 0:
            slot = f"-> {slot_after[position]}" if position in slot_after else "-"
        state = _state(case, step, position)
        table.add_row(
            str(position),
            slot,
            f"{received[i].item():.4f}",
            f"{step.scores_before[i].item():.4f}",
            f"{step.scores[i].item():.4f}",
            state,
            style=_STYLES.get(state),
        )
    return table


def _state(case: Case, step: Step, position: int) -> str:
    if position in step.victims:
        return "victim"
    if position < case.num_sink:
        return "sink"
    if position in step.recent:
        return "recent"
    return "kept" if step.victims else "candidate"


def _explain(case: Case, step: Step) -> list[str]:
    """Sentences on who was compared, who left and who took which slot."""
    occupied = len(step.candidates)
    taken_by = {slot: position for position, slot in step.stored}
    lines = []
    if step.victims:
        score = dict(zip(step.candidates, step.scores.tolist(), strict=True))
        rivals = sorted(
            (p for p in step.kept if _state(case, step, p) == "kept"), key=lambda p: (score[p], p)
        )
        compared = ", ".join(f"{p} ({score[p]:.4g})" for p in (*step.victims, *rivals))
        lines.append(
            f"{occupied} candidates, budget {case.budget}: {len(step.victims)} must leave, "
            f"lowest score first: {compared}"
        )
        for victim in step.victims:
            text = f"position {victim} leaves (score {score[victim]:.4g}"
            if victim == step.victims[-1]:
                text += f", margin {step.margin:.4g} to the next" if rivals else ", no other could"
            slot = step.slots[step.candidates.index(victim)]
            newcomer = taken_by.pop(slot, None)
            if slot < 0:
                text += "); it was never stored"
            elif newcomer is not None:
                text += f"); position {newcomer} takes its slot"
            lines.append(text)
    else:
        lines.append(f"{occupied} candidates, budget {case.budget}: nobody leaves")
    lines += [f"position {p} takes empty slot {slot}" for slot, p in taken_by.items()]
    return lines


def _positions(positions: Sequence[int]) -> str:
    if not positions:
        return "no position"
    noun = "position" if len(positions) == 1 else "positions"
    return f"{noun} {', '.join(map(str, positions))}"


def _say(console: Console, text: str, style: str | None = None) -> None:
    # One sentence is one line, whatever the width, so that it can be searched for.
    console.print(text, style=style, markup=False, soft_wrap=True)
