"""What the benchmarks share: timing in turns, JSON lines, the machine and the commit."""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import platform
import random
import resource
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

import h2o_kv
from h2o_kv.generation import percentile

ROOT = Path(__file__).resolve().parents[1]
# Larger than the last-level cache of the machines at hand: what is swept before a cold call, and the
# least that takes turns.
WORKING_SET = 256 * 2**20

Call = Callable[[], object]
"""What is timed."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Attention shape of a named model.

    Attributes
    ----------
    name : str
    num_layers, num_q_heads, num_kv_heads, head_dim : int
    """

    name: str
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int


# The one table of shapes. llama-2-7b and opt-6.7b are alike in attention.
MODELS = {
    shape.name: shape
    for shape in (
        ModelShape(name="smollm2-135m", num_layers=30, num_q_heads=9, num_kv_heads=3, head_dim=64),
        ModelShape(name="llama-3-8b", num_layers=32, num_q_heads=32, num_kv_heads=8, head_dim=128),
        ModelShape(name="llama-2-7b", num_layers=32, num_q_heads=32, num_kv_heads=32, head_dim=128),
        ModelShape(name="opt-6.7b", num_layers=32, num_q_heads=32, num_kv_heads=32, head_dim=128),
        ModelShape(
            name="gpt-neox-20b", num_layers=44, num_q_heads=64, num_kv_heads=64, head_dim=96
        ),
    )
}


@dataclass(frozen=True)
class Spread:
    """Median, and the tenth and ninetieth percentile.

    Attributes
    ----------
    median, p10, p90 : float
    """

    median: float
    p10: float
    p90: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value."""
        return cls(*(percentile(values, percent) for percent in (50, 10, 90)))


@dataclass(frozen=True)
class Timing:
    """Milliseconds of repeated calls.

    Attributes
    ----------
    milliseconds : tuple of float
        Of each round that counted, in their order.
    """

    milliseconds: tuple[float, ...]

    @property
    def spread(self) -> Spread:
        """Of the milliseconds."""
        return Spread.of(self.milliseconds)

    def scaled(self, calls: int) -> Timing:
        """The time of one of the calls that were timed together."""
        return Timing(tuple(ms / calls for ms in self.milliseconds))

    def fields(self) -> dict[str, float]:
        """What a line of results says of it."""
        spread = self.spread
        return {
            "median_ms": round(spread.median, 6),
            "p10_ms": round(spread.p10, 6),
            "p90_ms": round(spread.p90, 6),
        }


def ratio(own: Timing, other: Timing) -> Spread:
    """How many times as long the other took as ours, round by round.

    Both were measured in turns: what slowed down a round is in both of its times. So the spread is
    that of the comparison, not that of the machine.

    >>> ratio(Timing((1.0, 2.0, 4.0)), Timing((3.0, 6.0, 12.0)))
    Spread(median=3.0, p10=3.0, p90=3.0)
    """
    return Spread.of(
        [theirs / ours for ours, theirs in zip(own.milliseconds, other.milliseconds, strict=True)]
    )


def ratio_fields(timings: Mapping[str, Timing], own: str = "h2o") -> dict[str, float]:
    """`x_<peer>`, `x_<peer>_p10` and `x_<peer>_p90` of all but our own: times as long as ours."""
    fields = {}
    for name, timing in timings.items():
        if name != own:
            fields |= spread_fields(f"x_{name}", ratio(timings[own], timing))
    return fields


def spread_fields(name: str, spread: Spread) -> dict[str, float]:
    """`<name>`, `<name>_p10` and `<name>_p90`, as a line of results has them."""
    values = {"": spread.median, "_p10": spread.p10, "_p90": spread.p90}
    return {name + end: round(value, 4) for end, value in values.items()}


def in_turns(calls: Sequence[Call]) -> Call:
    """One call that makes the next of them each time.

    >>> turn = in_turns([lambda: "a", lambda: "b"])
    >>> turn(), turn(), turn()
    ('a', 'b', 'a')
    """
    turns = itertools.cycle(calls)
    return lambda: next(turns)()


def measure(
    functions: Mapping[str, Call],
    *,
    repeats: int = 30,
    warmup: int = 3,
    device: str | torch.device = "cpu",
    cold: bool = False,
    prepare: Call | None = None,
    on_round: Callable[[int], object] | None = None,
    clock: Callable[[Any], float] | None = None,
) -> dict[str, Timing]:
    """Time functions that take turns, so that what else the machine does hits all of them alike.

    Each round has an order of its own, so that none always runs after the same other one. On the
    CPU the threads are woken before each call, as the operators around it do in a model.

    Parameters
    ----------
    functions : mapping of str to callable
        What to time, by name; called without arguments.
    repeats, warmup : int
        Rounds that count, and rounds before them that do not. repeats >= 1.
    device : str or torch.device
        On CUDA the time is between two events on the current stream, else of `perf_counter`.
    cold : bool
        Write over 256 MiB before each call, so that nothing is in the processor's caches.
    prepare : callable, optional
        Called before each call, outside the time (to put back what the last one changed).
    on_round : callable, optional
        Called with the number of rounds done, those of the warm-up included.
    clock : callable, optional
        Calls what it is given and returns the milliseconds, instead of the clock of `device`.

    Returns
    -------
    dict of str to Timing
    """
    if repeats < 1:
        raise ValueError(f"measure: repeats must be >= 1, got {repeats}")
    time_one = clock or (_time_cuda if torch.device(device).type == "cuda" else _time_cpu)
    sweep = torch.empty(WORKING_SET if cold else 0, dtype=torch.uint8, device=device)
    milliseconds: dict[str, list[float]] = {name: [] for name in functions}
    wake = torch.ones(0 if torch.device(device).type == "cuda" else 2**17)
    order = random.Random(0)
    for turn in range(warmup + repeats):
        for name in order.sample(list(functions), len(functions)):
            if prepare is not None:
                prepare()
            sweep.fill_(turn % 251)
            wake.sum()
            elapsed = time_one(functions[name])
            if turn >= warmup:
                milliseconds[name].append(elapsed)
        if on_round is not None:
            on_round(turn + 1)
    return {name: Timing(tuple(values)) for name, values in milliseconds.items()}


def _time_cpu(function: Call) -> float:
    start = time.perf_counter()
    function()
    return 1000 * (time.perf_counter() - start)


def _time_cuda(function: Call) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    function()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end))


class ResultWriter:
    """Writes one JSON line a measured point.

    Parameters
    ----------
    path : Path
        Written anew, after each point.

    Examples
    --------
    >>> with ResultWriter(Path("results.jsonl")) as writer:  # doctest: +SKIP
    ...     writer.write(op="h2o_evict", device="cpu", dtype="float32", shape={"capacity": 64},
    ...                  timing=timing, num_bytes=65536, baseline=sdpa, baseline_name="sdpa")
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w", encoding="utf-8")
        self._commit = commit()

    def __enter__(self) -> ResultWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def write(
        self,
        *,
        op: str,
        device: str,
        dtype: str,
        shape: Mapping[str, int],
        timing: Timing,
        num_bytes: int | None = None,
        baseline: Timing | None = None,
        baseline_name: str = "",
        **others: Any,
    ) -> dict[str, Any]:
        """Write one point; returns its fields.

        Parameters
        ----------
        op, device, dtype : str
        shape : mapping of str to int
            Sizes by their names in the glossary (num_q_heads, capacity, ...).
        timing : Timing
        num_bytes : int, optional
            Bytes that a call must read and write; gives GB/s at the median.
        baseline : Timing, optional
            Of what the point is compared with; gives the speed-up, the median of the rounds.
        baseline_name : str
        **others
            Further fields.
        """
        point: dict[str, Any] = {
            "op": op,
            "device": device,
            "dtype": dtype,
            **shape,
            **timing.fields(),
            "repeats": len(timing.milliseconds),
        }
        if num_bytes is not None:
            point["bytes"] = num_bytes
            point["gb_per_s"] = round(num_bytes / timing.spread.median / 1e6, 3)
        if baseline is not None:
            point["baseline"] = baseline_name
            point["baseline_ms"] = round(baseline.spread.median, 6)
            point["speedup"] = round(ratio(timing, baseline).median, 4)
        point.update(others, threads=torch.get_num_threads(), commit=self._commit)
        print(json.dumps(point), file=self._file, flush=True)
        return point


def resident_mib() -> float:
    """Resident memory of this process now, in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


@contextmanager
def peak_growth(device: str | torch.device = "cpu") -> Iterator[Callable[[], int]]:
    """Gives how much more memory than at its start was in use at once inside the `with`.

    On CUDA what PyTorch allocated, else resident memory of this process, as Linux counts it. What the
    allocator of C has kept of freed memory is given back first, so that it counts when used again.

    Yields
    ------
    callable
        The bytes so far.
    """
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        start = torch.cuda.memory_allocated(device)
        yield lambda: torch.cuda.max_memory_allocated(device) - start
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    start = _status_bytes("VmRSS")
    yield lambda: max(0, _status_bytes("VmHWM") - start)


def _status_bytes(field: str) -> int:
    """A size of this process, as Linux counts it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{field}:")).split()[1]) * 1024


def read_text(file: Path | None) -> str:
    """The text to continue; None is the one that ships with the package."""
    if file is not None:
        return file.read_text(encoding="utf-8")
    shipped = resources.files("h2o_kv").joinpath("prompts/genesis.txt")
    return shipped.read_text(encoding="utf-8")


def commit() -> str:
    """Short hash of the checkout's commit, "-dirty" behind it if files of it differ.

    Where there is no repository: what H2O_COMMIT says, else "unknown".
    """
    git = ["git", "-C", str(ROOT)]
    try:
        short = subprocess.run(
            [*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        changed = subprocess.run(
            [*git, "status", "--porcelain", "--untracked-files=no"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("H2O_COMMIT") or "unknown"
    return short + ("-dirty" if changed else "")


def machine_line(device: str | torch.device = "cpu") -> str:
    """One line about the machine, the versions and the load: it stands above every table."""
    device = torch.device(device)
    where = f"{_cpu_name()}, {os.cpu_count()} CPUs, {torch.get_num_threads()} threads"
    if device.type == "cuda":
        where = f"{torch.cuda.get_device_name(device)}; {where}"
    load = os.getloadavg()[0]
    return (
        f"{where}, {torch.backends.cpu.get_cpu_capability()}; torch {torch.__version__}, "
        f"h2o-kv {h2o_kv.__version__}, {platform.system()}; load {load:.1f}"
    )


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
