"""Policies x budgets x prefills x tasks, in one process or several; a finished line is not run again."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import h2o_kv
from h2o_kv.eval.caches import Setting
from h2o_kv.eval.data import EvalError
from h2o_kv.eval.registry import make_task
from h2o_kv.eval.results import ResultFile, key_of
from h2o_kv.eval.tasks import Task, TaskSpec
from h2o_kv.models import EMBEDDED_MODEL, load_model, load_tokenizer

__all__ = ["Plan", "run_sweep"]

Progress = Callable[[str, int, int], None]
"""Called with what is under way, and how many of how many lines there are."""

# Examples of a job: enough to fill batches, few enough to lose little.
_JOB_EXAMPLES = 16


@dataclass(frozen=True)
class Plan:
    """What is to be evaluated.

    Attributes
    ----------
    tasks : tuple of TaskSpec
    settings : tuple of Setting
    model : str, optional
        Folder, GGUF file or hub id; None is the installed default model.
    dtype, device : str
    limit : int, optional
        First examples of each task; None = all.
    threads : int, optional
        CPU threads of each process; None leaves PyTorch's choice.
    """

    tasks: tuple[TaskSpec, ...]
    settings: tuple[Setting, ...]
    model: str | None = None
    dtype: str = "float32"
    device: str = "cpu"
    limit: int | None = None
    threads: int | None = None


@dataclass(frozen=True)
class _Job:
    """Some examples of a task under settings that none of them has a line of yet."""

    spec: TaskSpec
    indices: tuple[int, ...]
    settings: tuple[Setting, ...]

    @property
    def num_lines(self) -> int:
        return len(self.indices) * len(self.settings)


def run_sweep(
    plan: Plan,
    file: Path,
    *,
    processes: int = 1,
    progress: Progress = lambda text, done, total: None,
    model: Any = None,
    tokenizer: Any = None,
) -> int:
    """Run what of a plan is not in the file yet, and append it.

    Parameters
    ----------
    plan : Plan
    file : Path
        Of results; its folder is made.
    processes : int
        Each loads the model and takes the next job.
    progress : callable
    model, tokenizer : optional
        Loaded already, to be used with one process instead of loading `plan.model`.

    Returns
    -------
    int
        Lines that were added.

    Raises
    ------
    EvalError
        A task or its data will not do, or a policy cannot run a task; found before anything is run.
    ModelLoadError
        The model cannot be loaded.
    """
    if tokenizer is None:
        tokenizer = load_tokenizer(plan.model)
    tasks = _tasks(plan, tokenizer)
    with ResultFile(file) as results:
        before = len(results.finished)
        jobs = list(_jobs(plan, tasks, results.finished))
        total = sum(job.num_lines for job in jobs)
        done = 0
        progress("lines", done, total)
        if processes > 1 and len(jobs) > 1:
            batches = _in_processes(plan, jobs, processes)
        else:
            batches = _in_this_process(plan, tasks, jobs, model)
        for text, rows in batches:
            results.append(rows)
            done += len(rows)
            progress(text, done, total)
        return len(results.finished) - before


def _tasks(plan: Plan, tokenizer: Any) -> dict[TaskSpec, Task]:
    """Those that differ in something that matters to them."""
    found: dict[str, tuple[TaskSpec, Task]] = {}
    for spec in plan.tasks:
        task = make_task(spec, tokenizer)
        if len(task) == 0:
            options = "".join(f", {name} {value}" for name, value in task.options.items())
            raise EvalError(f"{task.name}{options}: must have at least one example, got none")
        oracles = [setting.policy for setting in plan.settings if setting.needs_oracle]
        if task.generates and oracles:
            raise EvalError(
                f"{task.name}: policy must be one that does not need the whole text beforehand, got "
                f"{oracles[0]}"
            )
        found.setdefault(f"{task.name} {sorted(task.options.items())}", (spec, task))
    return dict(found.values())


def _jobs(plan: Plan, tasks: dict[TaskSpec, Task], finished: set[str]) -> Iterator[_Job]:
    for spec, task in tasks.items():
        count = len(task) if plan.limit is None else min(plan.limit, len(task))
        for start in range(0, count, _JOB_EXAMPLES):
            # Examples that lack the same settings go together: after an interrupt some lack fewer.
            groups: dict[tuple[Setting, ...], list[int]] = {}
            for index in range(start, min(start + _JOB_EXAMPLES, count)):
                lacking = tuple(
                    setting
                    for setting in plan.settings
                    if key_of(_names(plan, task, setting, index)) not in finished
                )
                groups.setdefault(lacking, []).append(index)
            for lacking, indices in groups.items():
                if lacking:
                    yield _Job(spec, tuple(indices), lacking)


def _names(plan: Plan, task: Task, setting: Setting, index: int) -> dict[str, Any]:
    """The fields of a line that its key is made of."""
    return {
        "model": plan.model or EMBEDDED_MODEL,
        "dtype": plan.dtype,
        "task": task.name,
        "options": task.options,
        "data": task.data,
        "policy": setting.policy,
        "ratio": setting.ratio,
        "prefill": setting.prefill,
        "index": index,
    }


def _lines(plan: Plan, task: Task, job: _Job, model: Any) -> Iterator[dict[str, Any]]:
    for index, setting, fields in task.run(model, job.indices, job.settings):
        yield {
            **_names(plan, task, setting, index),
            "prompt_format": task.prompt_format,
            "seed": job.spec.seed,
            "h2o_kv": h2o_kv.__version__,
            **fields,
        }


def _in_this_process(
    plan: Plan, tasks: dict[TaskSpec, Task], jobs: Sequence[_Job], model: Any
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    if jobs and model is None:
        model, _ = _load(plan)
    for job in jobs:
        for line in _lines(plan, tasks[job.spec], job, model):
            yield job.spec.name, [line]


def _in_processes(
    plan: Plan, jobs: Sequence[_Job], processes: int
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    # Not fork: threads of PyTorch do not survive it.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        min(processes, len(jobs)), mp_context=context, initializer=_begin, initargs=(plan,)
    ) as pool:
        futures = {pool.submit(_work, job): job for job in jobs}
        try:
            for future in as_completed(futures):
                yield futures[future].spec.name, future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


# What a worker process has loaded.
_worker: dict[str, Any] = {}


def _begin(plan: Plan) -> None:
    _worker["plan"] = plan
    _worker["model"], tokenizer = _load(plan)
    _worker["tasks"] = _tasks(plan, tokenizer)


def _work(job: _Job) -> list[dict[str, Any]]:
    task = _worker["tasks"][job.spec]
    return list(_lines(_worker["plan"], task, job, _worker["model"]))


def _load(plan: Plan) -> tuple[Any, Any]:
    if plan.threads is not None:
        torch.set_num_threads(plan.threads)
    return load_model(plan.model, dtype=plan.dtype, device=plan.device)
