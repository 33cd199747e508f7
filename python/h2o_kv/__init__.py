"""A KV cache of fixed size for language models, by Heavy-Hitter Oracle eviction (H2O, arXiv 2306.14048).

Three names, one meaning each: ``libh2o.so`` is the shared library, ``torch.ops.h2o`` are the
operators that it registers, ``h2o_kv`` is this package (distribution ``h2o-kv``). Importing the
package loads the library and registers ``attn_implementation="h2o"`` with transformers.
"""

import torch  # noqa: F401  (before anything that links to it)

from . import _library

LIBRARY_PATH = _library.load()

from ._C import Budget, EvictionPolicy, build_info  # noqa: E402
from ._C import version as _version  # noqa: E402

_library.check_torch_version(build_info()["torch"])
__version__ = _version()

from . import ops  # noqa: E402
from .config import load_config  # noqa: E402
from .hf import H2OCache  # noqa: E402

__all__ = [
    "LIBRARY_PATH",
    "Budget",
    "EvictionPolicy",
    "H2OCache",
    "__version__",
    "build_info",
    "load_config",
    "ops",
]
