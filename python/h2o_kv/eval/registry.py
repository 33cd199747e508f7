"""All tasks, by name."""

from __future__ import annotations

from collections.abc import Callable

from h2o_kv.eval.choices import CHOICE_FORMATS
from h2o_kv.eval.data import EvalError
from h2o_kv.eval.tasks import ChoiceTask, Task, TaskSpec

__all__ = ["TASKS", "make_task"]

TASKS: dict[str, Callable[[TaskSpec], Task]] = {
    **dict.fromkeys(CHOICE_FORMATS, ChoiceTask),
}
"""What makes the task of each name."""


def make_task(spec: TaskSpec) -> Task:
    """The task that is meant, its files read.

    Raises
    ------
    EvalError
        There is no such task, or its files will not do.
    """
    if spec.name not in TASKS:
        raise EvalError(f"task must be one of {', '.join(TASKS)}, got {spec.name!r}")
    return TASKS[spec.name](spec)
