"""Evaluation of KV-cache policies: quality at equal slots, on local data (docs/eval.md)."""

from h2o_kv.eval.caches import CacheUse, Setting, settings
from h2o_kv.eval.data import EvalError
from h2o_kv.eval.registry import TASKS, make_task
from h2o_kv.eval.results import read_results
from h2o_kv.eval.scoring import Request, Score, continuation_logits, encode_pair, score
from h2o_kv.eval.summary import markdown, plot, summarise
from h2o_kv.eval.sweep import Plan, run_sweep
from h2o_kv.eval.tasks import Task, TaskSpec

__all__ = [
    "TASKS",
    "CacheUse",
    "EvalError",
    "Plan",
    "Request",
    "Score",
    "Setting",
    "Task",
    "TaskSpec",
    "continuation_logits",
    "encode_pair",
    "make_task",
    "markdown",
    "plot",
    "read_results",
    "run_sweep",
    "score",
    "settings",
    "summarise",
]
