"""Finds and loads libh2o.so, which registers ``torch.ops.h2o``; says what to run where it cannot."""

from __future__ import annotations

from pathlib import Path

import torch

_FOLDER = Path(__file__).parent
_REBUILD = (
    "build it with the torch that is installed: "
    "`pip install --no-build-isolation --force-reinstall --no-deps .` in a checkout of h2o-kv"
)


def _registered_from() -> str | None:
    """The file whose operators this process has already, if any."""
    loaded: set[str] = torch.ops.loaded_libraries
    for path in loaded:
        if Path(path).name == "libh2o.so":
            return path
    return "another library" if hasattr(torch.ops.h2o, "h2o_attention_decode") else None


def load() -> Path:
    """Load libh2o.so once per process and return its path.

    Raises
    ------
    ImportError
        The library was not built, was built with another torch, or another copy of it is loaded
        already: a second copy would register every operator twice, which ends the process.
    """
    library = _FOLDER / "libh2o.so"
    if not library.exists():
        raise ImportError(f"h2o_kv: {library} does not exist; {_REBUILD}")
    first = _registered_from()
    if first is not None:
        if first != "another library" and Path(first).resolve() == library.resolve():
            return library
        raise ImportError(
            f"h2o_kv: torch.ops.h2o is registered already by {first}; a process can load one copy "
            f"of libh2o, this one is {library}"
        )
    try:
        torch.ops.load_library(library)  # type: ignore[no-untyped-call]
    except OSError as error:
        raise ImportError(f"h2o_kv: {library} does not load ({error}); {_REBUILD}") from error
    return library


def check_torch_version(built_with: str) -> None:
    """Raise ImportError where torch is not the one (major.minor) that the library was built with."""
    installed = torch.__version__.split("+")[0]
    if installed.split(".")[:2] != built_with.split(".")[:2]:
        raise ImportError(
            f"h2o_kv was built with torch {built_with}, but this is torch {installed}; {_REBUILD}"
        )
