"""What can be known of the CUDA kernels without a GPU: registers, spills, occupancy, bytes moved.

Registers, stack and 16-byte loads are read from the library with NVIDIA's `cuobjdump` (it comes with
torch's Triton and with the CUDA Toolkit). Launches, shared memory and the bytes that a decode step
moves are counted while the kernels run in the checked build of `tests/cuda_emulation`, which
`make test-cpp` builds.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from common import ROOT
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

import h2o_kv

EMULATED = ROOT / "build/cmake/tests/cuda_emulation/libh2o_emulated_checked.so"
# Of an sm_90 multiprocessor (CUDA C++ Programming Guide, "Compute Capabilities").
_REGISTERS, _SHARED_BYTES, _THREADS, _BLOCKS = 65536, 228 * 1024, 2048, 32
_RESERVED_SHARED_BYTES = 1024  # that each block takes besides its own


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One kernel as it lies in the library.

    Attributes
    ----------
    name : str
        With its template arguments: decode_step<float, 4, 1>.
    arch : str
        "sm_90".
    registers : int
        Of a thread.
    stack_bytes : int
        Of a thread; what was spilled lies there.
    wide_loads, spill_instructions : int
        Instructions that load 16 bytes from device memory, and that touch the stack.
    """

    name: str
    arch: str
    registers: int
    stack_bytes: int
    wide_loads: int
    spill_instructions: int


@dataclass(frozen=True, kw_only=True)
class Step:
    """One emulated decode step.

    Attributes
    ----------
    kernel : str
    dtype : str
    group_size, head_dim, capacity, row_heads : int
        row_heads is batch * num_kv_heads.
    launches, blocks, threads, shared_bytes : int
        Launches of the step, and the size of the last.
    blocks_per_multiprocessor : int
        That an sm_90 holds at once.
    read_bytes, written_bytes : int
        Sectors of 32 bytes that requests to device memory touched, in bytes.
    floor_bytes : int
        K and V of every slot, read once.
    score_bytes : int
        The score of every slot, read and written once.
    """

    kernel: str
    dtype: str
    group_size: int
    head_dim: int
    capacity: int
    row_heads: int
    launches: int
    blocks: int
    threads: int
    shared_bytes: int
    blocks_per_multiprocessor: int
    read_bytes: int
    written_bytes: int
    floor_bytes: int
    score_bytes: int

    @property
    def ratio(self) -> float:
        """Bytes moved besides the scores, over the floor."""
        return (self.read_bytes + self.written_bytes - self.score_bytes) / self.floor_bytes


def find_cuobjdump() -> Path | None:
    """NVIDIA's disassembler: on PATH, in the CUDA Toolkit, or in Triton's wheel."""
    on_path = shutil.which("cuobjdump") or shutil.which("/usr/local/cuda/bin/cuobjdump")
    if on_path is not None:
        return Path(on_path)
    triton = importlib.util.find_spec("triton")
    if triton is None or triton.origin is None:
        return None
    of_triton = Path(triton.origin).parent / "backends/nvidia/bin/cuobjdump"
    return of_triton if of_triton.exists() else None


def short_name(name: str) -> str:
    """A demangled name without namespaces, return type and parameters."""
    name = re.sub(r"(void |h2o::cuda::|h2o::|c10::|\(anonymous namespace\)::)", "", name)
    name = re.sub(r"\((?:int|long)\)", "", name).replace("> >", ">>")
    depth = 0
    for i, character in enumerate(name):
        depth += {"<": 1, ">": -1}.get(character, 0)
        if character == "(" and depth == 0:
            return name[:i]
    return name


def read_kernels(library: Path, cuobjdump: Path, arch: str = "sm_90") -> list[Kernel]:
    """The kernels of one architecture in a library.

    Parameters
    ----------
    library : Path
    cuobjdump : Path
    arch : str

    Returns
    -------
    list of Kernel
        By name.
    """
    usage = _run(cuobjdump, "-res-usage", "-arch", arch, library)
    found = re.findall(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    wide, spills = Counter[str](), Counter[str]()
    function = ""
    for line in _run(cuobjdump, "-sass", "-arch", arch, library).splitlines():
        if match := re.search(r"Function : (\S+)", line):
            function = match[1]
        elif re.search(r"\bLDG\.E(\.\w+)*\.128", line):
            wide[function] += 1
        elif re.search(r"\b(STL|LDL)\b", line):
            spills[function] += 1
    names = dict(zip((row[0] for row in found), _demangled(row[0] for row in found), strict=True))
    kernels = [
        Kernel(
            name=short_name(names[mangled]),
            arch=arch,
            registers=int(registers),
            stack_bytes=int(stack) + int(local),
            wide_loads=wide[mangled],
            spill_instructions=spills[mangled],
        )
        for mangled, registers, stack, local in found
    ]
    return sorted(kernels, key=lambda kernel: kernel.name)


def _run(*command: object) -> str:
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, check=True
    )
    return done.stdout


def _demangled(names: Iterable[str]) -> list[str]:
    done = subprocess.run(
        ["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


def blocks_per_multiprocessor(registers: int, threads: int, shared_bytes: int) -> int:
    """How many blocks of a kernel an sm_90 multiprocessor holds at once.

    Parameters
    ----------
    registers : int
        Of a thread; they are given out to a warp 256 at a time.
    threads, shared_bytes : int
        Of a block.
    """
    warps = -(-threads // 32)
    of_warp = -(-registers * 32 // 256) * 256
    return min(
        _REGISTERS // (of_warp * warps),
        _SHARED_BYTES // (shared_bytes + _RESERVED_SHARED_BYTES),
        _THREADS // (32 * warps),
        _BLOCKS,
    )


def count_step(
    kernels: Sequence[Kernel],
    *,
    dtype: torch.dtype,
    group_size: int,
    head_dim: int,
    capacity: int,
    row_heads: int,
) -> Step:
    """Run one decode step of a full cache in the emulation and count.

    Parameters
    ----------
    kernels : sequence of Kernel
        As `read_kernels` gives them, for the occupancy.
    dtype : torch.dtype
    group_size, head_dim, capacity, row_heads : int

    Returns
    -------
    Step

    Raises
    ------
    KeyError
        The library holds no kernel of the name that ran.
    """
    emulated = torch.ops.h2o_emulated
    emulated.device_memory(True)
    try:
        slots = (1, row_heads, capacity)
        cache = [torch.randn(*slots, head_dim).to(dtype) for _ in range(2)]
        cache += [torch.rand(slots), torch.arange(capacity).int().expand(slots).clone()]
        query = torch.randn(1, row_heads * group_size, 1, head_dim).to(dtype)
        key, value = (torch.randn(1, row_heads, 1, head_dim).to(dtype) for _ in range(2))
        position = torch.full((1, 1), capacity)
        emulated.clear_launch_log()
        emulated.clear_traffic()
        emulated.h2o_attention_decode(
            query, *cache, key, value, position, 4, capacity // 2, capacity - capacity // 2 - 4
        )
        names, sizes = emulated.launch_log()
        moved = [
            32 * sum(sectors for _, _, sectors in emulated.traffic(writes).values())
            for writes in (False, True)
        ]
    finally:
        emulated.device_memory(False)
    blocks, threads, shared_bytes = sizes[-3:]
    name = short_name(names[-1])
    registers = {kernel.name: kernel.registers for kernel in kernels}
    return Step(
        kernel=name,
        dtype=str(dtype).removeprefix("torch."),
        group_size=group_size,
        head_dim=head_dim,
        capacity=capacity,
        row_heads=row_heads,
        launches=len(names),
        blocks=blocks,
        threads=threads,
        shared_bytes=shared_bytes,
        blocks_per_multiprocessor=blocks_per_multiprocessor(registers[name], threads, shared_bytes),
        read_bytes=moved[0],
        written_bytes=moved[1],
        floor_bytes=2 * row_heads * capacity * head_dim * dtype.itemsize,
        score_bytes=2 * row_heads * capacity * 4,
    )


def _steps(kernels: Sequence[Kernel], quick: bool, console: Console) -> list[Step]:
    shapes = [(4, 128)] if quick else [(1, 128), (4, 64), (4, 80), (4, 96), (4, 128), (4, 256)]
    shapes += [] if quick else [(8, 128)]
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    cases = [(dtype, *shape, 512) for dtype in dtypes for shape in shapes]
    # Tensor cores. In float32 values are read once for every 8 heads, from the caches.
    cases += [] if quick else [(dtype, 16, 128, 2048) for dtype in dtypes[1:]]
    steps = []
    for dtype, group_size, head_dim, capacity in track(cases, "emulated steps", console=console):
        # One block for each (row, KV head), and then several.
        for multiprocessors in (1, 132):
            torch.ops.h2o_emulated.set_device(multiprocessors)
            steps.append(
                count_step(
                    kernels,
                    dtype=dtype,
                    group_size=group_size,
                    head_dim=head_dim,
                    capacity=capacity,
                    row_heads=2,
                )
            )
    return steps


def _kernel_table(kernels: Iterable[Kernel]) -> Table:
    table = Table(
        "kernel", "arch", "registers", "stack B", "spills", "16-byte loads", box=box.MARKDOWN
    )
    for kernel in kernels:
        numbers = (
            kernel.registers,
            kernel.stack_bytes,
            kernel.spill_instructions,
            kernel.wide_loads,
        )
        table.add_row(kernel.name, kernel.arch, *map(str, numbers))
    return table


def _step_table(steps: Iterable[Step]) -> Table:
    table = Table(
        "kernel", "dtype", "group", "head_dim", "slots", "launches", "blocks / head", "shared KiB",
        "blocks / SM", "warps / SM", "bytes / floor", box=box.MARKDOWN,
    )  # fmt: skip
    for step in steps:
        table.add_row(
            step.kernel,
            step.dtype,
            str(step.group_size),
            str(step.head_dim),
            str(step.capacity),
            str(step.launches),
            str(step.blocks // step.row_heads),
            f"{step.shared_bytes / 1024:.1f}",
            str(step.blocks_per_multiprocessor),
            str(step.blocks_per_multiprocessor * step.threads // 32),
            f"{step.ratio:.3f}",
        )
    return table


def main() -> int:
    """Print the report; the command line is `--help`'s."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one shape of decode steps")
    parser.add_argument(
        "--arch", nargs="+", default=["sm_80", "sm_90"], help="(default: %(default)s)"
    )
    parser.add_argument("--emulated", type=Path, default=EMULATED, help="(default: %(default)s)")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    args = parser.parse_args()
    console = Console(width=190)  # the tables are Markdown
    library = Path(h2o_kv.__file__).parent / "libh2o.so"
    cuobjdump = find_cuobjdump()
    if not h2o_kv.build_info()["cuda"]:
        parser.error(f"{library} was built without CUDA")
    if cuobjdump is None:
        parser.error("there is no cuobjdump: install triton or the CUDA Toolkit")
    kernels = [k for arch in args.arch for k in read_kernels(library, cuobjdump, arch)]
    console.print(_kernel_table(kernels))
    console.print(f"{library.name}: {library.stat().st_size / 2**20:.1f} MiB")
    result: dict[str, Any] = {"kernels": [asdict(kernel) for kernel in kernels]}
    if args.emulated.exists():
        torch.ops.load_library(args.emulated)
        steps = _steps([k for k in kernels if k.arch == "sm_90"], args.quick, console)
        console.print(_step_table(steps))
        result["steps"] = [asdict(step) | {"ratio": step.ratio} for step in steps]
    else:
        console.print(f"{args.emulated} is not there (make test-cpp): no steps were counted")
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
