"""What the benchmarks share: timing in turns, JSON lines, the machine and the commit."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import torch

import h2o_kv
from h2o_kv.generation import percentile

ROOT = Path(__file__).resolve().parents[1]
# Larger than the last-level cache of the machines at hand.
_COLD_BYTES = 256 * 2**20


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


MODELS = {
    shape.name: shape
    for shape in (
        ModelShape(name="smollm2-135m", num_layers=30, num_q_heads=9, num_kv_heads=3, head_dim=64),
        ModelShape(name="opt-6.7b", num_layers=32, num_q_heads=32, num_kv_heads=32, head_dim=128),
        ModelShape(name="llama-3-8b", num_layers=32, num_q_heads=32, num_kv_heads=8, head_dim=128),
        ModelShape(name="qwen2-7b", num_layers=28, num_q_heads=28, num_kv_heads=4, head_dim=128),
    )
}


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Milliseconds of repeated calls.

    Attributes
    ----------
    median_ms, p10_ms, p90_ms : float
    repeats : int
    """

    median_ms: float
    p10_ms: float
    p90_ms: float
    repeats: int

    @classmethod
    def of(cls, milliseconds: list[float]) -> Timing:
        """Statistics of measured calls, at least one."""
        return cls(
            median_ms=percentile(milliseconds, 50),
            p10_ms=percentile(milliseconds, 10),
            p90_ms=percentile(milliseconds, 90),
            repeats=len(milliseconds),
        )


def measure(
    functions: Mapping[str, Callable[[], object]],
    *,
    repeats: int = 30,
    warmup: int = 3,
    device: str | torch.device = "cpu",
    cold: bool = False,
    prepare: Callable[[], object] | None = None,
    on_round: Callable[[int], object] | None = None,
) -> dict[str, Timing]:
    """Time functions that take turns, so that what else the machine does hits all of them alike.

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

    Returns
    -------
    dict of str to Timing
    """
    if repeats < 1:
        raise ValueError(f"measure: repeats must be >= 1, got {repeats}")
    time_one = _time_cuda if torch.device(device).type == "cuda" else _time_cpu
    sweep = torch.empty(_COLD_BYTES if cold else 0, dtype=torch.uint8, device=device)
    milliseconds: dict[str, list[float]] = {name: [] for name in functions}
    names = list(functions)
    for turn in range(warmup + repeats):
        start = turn % len(names)
        for name in names[start:] + names[:start]:
            if prepare is not None:
                prepare()
            sweep.fill_(turn % 251)
            elapsed = time_one(functions[name])
            if turn >= warmup:
                milliseconds[name].append(elapsed)
        if on_round is not None:
            on_round(turn + 1)
    return {name: Timing.of(values) for name, values in milliseconds.items()}


def _time_cpu(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return 1000 * (time.perf_counter() - start)


def _time_cuda(function: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    function()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end))


class ResultWriter:
    """Writes one JSON line a measured point, to standard output or to a file.

    Parameters
    ----------
    path : Path, optional
        The file is written anew; None is standard output.

    Examples
    --------
    >>> with ResultWriter() as writer:  # doctest: +SKIP
    ...     writer.write(op="h2o_evict", device="cpu", dtype="float32", shape={"capacity": 64},
    ...                  timing=timing, num_bytes=65536, baseline=sdpa, baseline_name="sdpa")
    """

    def __init__(self, path: Path | None = None) -> None:
        self._file: TextIO | None = None
        if path is not None:
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
        if self._file is not None:
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
    ) -> None:
        """Write one point.

        Parameters
        ----------
        op, device, dtype : str
        shape : mapping of str to int
            Sizes by their names in the glossary (num_q_heads, capacity, ...).
        timing : Timing
        num_bytes : int, optional
            Bytes that a call must read and write; gives GB/s at the median.
        baseline : Timing, optional
            Of what the point is compared with; gives the speed-up of the medians.
        baseline_name : str
        **others
            Further fields.
        """
        point: dict[str, Any] = {
            "op": op,
            "device": device,
            "dtype": dtype,
            **shape,
            "median_ms": round(timing.median_ms, 6),
            "p10_ms": round(timing.p10_ms, 6),
            "p90_ms": round(timing.p90_ms, 6),
            "repeats": timing.repeats,
        }
        if num_bytes is not None:
            point["bytes"] = num_bytes
            point["gb_per_s"] = round(num_bytes / timing.median_ms / 1e6, 3)
        if baseline is not None:
            point["baseline"] = baseline_name
            point["baseline_ms"] = round(baseline.median_ms, 6)
            point["speedup"] = round(baseline.median_ms / timing.median_ms, 3)
        point.update(others, threads=torch.get_num_threads(), commit=self._commit)
        print(json.dumps(point), file=self._file, flush=True)


def commit() -> str:
    """Short hash of the checkout's commit, "-dirty" behind it if files differ.

    Where there is no repository: what H2O_COMMIT says, else "unknown".
    """
    git = ["git", "-C", str(ROOT)]
    try:
        short = subprocess.run(
            [*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        changed = subprocess.run(
            [*git, "status", "--porcelain"], capture_output=True, text=True, check=True
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
