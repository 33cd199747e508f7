"""Which transformers this package works with, checked when `h2o_kv.hf` is imported.

The cache interface of transformers changes between releases (argument names, abstract methods, what
an attention function receives), so the range is stated, tested at both ends, and enforced.
"""

from __future__ import annotations

from packaging.version import Version

__all__ = ["TRANSFORMERS_BELOW", "TRANSFORMERS_MIN", "check_transformers"]

TRANSFORMERS_MIN = "4.57"
TRANSFORMERS_BELOW = "6"


def check_transformers(version: str) -> None:
    """Refuse a transformers release that this package was not made for.

    Parameters
    ----------
    version : str
        `transformers.__version__`.

    Raises
    ------
    ImportError
        Outside TRANSFORMERS_MIN <= version < TRANSFORMERS_BELOW. Development versions count as the
        release that they lead to.
    """
    release = Version(version).release
    if not Version(TRANSFORMERS_MIN).release <= release < Version(TRANSFORMERS_BELOW).release:
        needed = f"transformers>={TRANSFORMERS_MIN},<{TRANSFORMERS_BELOW}"
        raise ImportError(
            f"h2o_kv.hf needs {needed}, got transformers {version}; "
            f'install one with: pip install "{needed}"'
        )
