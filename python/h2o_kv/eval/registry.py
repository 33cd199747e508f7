"""All tasks, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from h2o_kv.eval.choices import CHOICE_FORMATS
from h2o_kv.eval.data import EvalError
from h2o_kv.eval.perplexity import TEXTS, PerplexityTask
from h2o_kv.eval.retrieval import RETRIEVAL_TASKS, RetrievalTask
from h2o_kv.eval.tasks import ChoiceTask, Task, TaskSpec
from h2o_kv.eval.texts import TEXT_FORMATS, TextTask

__all__ = ["TASKS", "make_task"]

TASKS: dict[str, Callable[[TaskSpec, Any], Task]] = {
    **dict.fromkeys(CHOICE_FORMATS, ChoiceTask),
    **dict.fromkeys(TEXTS, PerplexityTask),
    **dict.fromkeys(TEXT_FORMATS, TextTask),
    **dict.fromkeys(RETRIEVAL_TASKS, RetrievalTask),
}
"""What makes the task of each name."""


def make_task(spec: TaskSpec, tokenizer: Any) -> Task:
    """The task that is meant, its files read.

    Raises
    ------
    EvalError
        There is no such task, or its files will not do.
    """
    if spec.name not in TASKS:
        raise EvalError(f"task must be one of {', '.join(TASKS)}, got {spec.name!r}")
    return TASKS[spec.name](spec, tokenizer)
