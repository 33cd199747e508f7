"""H2O under unmodified Hugging Face models: a cache, an attention function and a mask function.

Importing this registers the attention implementation "h2o" with transformers; no transformers class
is changed. `settings.py` is what a cache is made with, `memory.py` what one decoder layer holds,
`sharing.py` how forks share it, `budgets.py` how its budget moves, `layer.py` its step: one call of
the operator; `journal.py` is what it keeps to undo steps, `cache.py` the cache that consists of
layers, `session.py` saves and loads it, `attention.py` is the only file that knows what transformers
passes to an attention function, `alibi.py` brings BLOOM and MPT to call it, and `rolling.py` counts
positions by rank.
"""

from __future__ import annotations

import transformers

from h2o_kv.hf.versions import TRANSFORMERS_BELOW, TRANSFORMERS_MIN, check_transformers

check_transformers(transformers.__version__)

from h2o_kv.hf.alibi import disable_alibi, enable_alibi  # noqa: E402
from h2o_kv.hf.attention import cache_kwarg, register  # noqa: E402
from h2o_kv.hf.budgets import BudgetEvent  # noqa: E402
from h2o_kv.hf.cache import CacheBytes, H2OCache  # noqa: E402
from h2o_kv.hf.layer import H2OLayer  # noqa: E402
from h2o_kv.hf.rolling import ROLLING_MODELS  # noqa: E402
from h2o_kv.hf.session import SessionError  # noqa: E402

register()

__all__ = [
    "ROLLING_MODELS",
    "TRANSFORMERS_BELOW",
    "TRANSFORMERS_MIN",
    "BudgetEvent",
    "CacheBytes",
    "H2OCache",
    "H2OLayer",
    "SessionError",
    "cache_kwarg",
    "disable_alibi",
    "enable_alibi",
]
