"""Multiple choice as the paper's scripts scored it: `h2o_kv.parity` on the tasks of `h2o_kv.eval`.

The same examples, prompts and metrics as in rows.jsonl; only the attention is that of the script. Lines
go to parity.jsonl in the format of rows.jsonl, with the mode in place of the prefill.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

import h2o_kv
from h2o_kv import parity
from h2o_kv.eval import Request, encode_pair
from h2o_kv.eval.choices import CHOICE_FORMATS, ChoiceData
from h2o_kv.eval.data import Row
from h2o_kv.eval.results import ResultFile, key_of, read_results
from h2o_kv.eval.scoring import token_log_probs
from h2o_kv.eval.tasks import ChoiceTask, choice_metrics
from h2o_kv.models import load_model
from paper.configs import ParityBudgets, QualityTask, QualityVariant
from paper.output import Run, model_name


def run_parity(run: Run, budgets: ParityBudgets, variant: QualityVariant) -> list[Row]:
    """Score all choice tasks of a variant under all modes; what is in parity.jsonl is not run again.

    Parameters
    ----------
    run : Run
    budgets : ParityBudgets
        Modes, and the flags of each policy; policies that the variant does not run are left out.
    variant : QualityVariant

    Returns
    -------
    list of dict
        The lines that the variant asks for.

    Raises
    ------
    EvalError, ModelLoadError, ValueError
        Data or a model will not do, or the model cannot run in a mode.
    """
    file = run.out / "parity.jsonl"
    # With one choice (the last word of a text) there is nothing to choose from.
    tasks = [task for task in variant.tasks if task.name in CHOICE_FORMATS.keys() - {"lambada"}]
    ratios = {name: own for name, own in budgets.ratios.items() if name in variant.policies}
    wanted: list[str] = []
    with ResultFile(file) as results:
        for source in variant.models:
            loaded: tuple[Any, Any] | None = None
            for task in tasks:
                data = ChoiceData(task.name, run.data, shots=task.shots)
                lines = list(_lines(model_name(source), variant, data, task, budgets, ratios))
                wanted += [key_of(line) for line in lines]
                lacking = [line for line in lines if key_of(line) not in results.finished]
                for done, line in enumerate(lacking):
                    run.progress(f"{run.name}: {task.name}, {line['prefill']}", done / len(lacking))
                    if loaded is None:
                        loaded = load_model(source, dtype=variant.dtype, device=variant.device)
                    results.append([_scored(*loaded, data, line, ratios[line["policy"]])])
    return [row for row in read_results(file) if key_of(row) in set(wanted)]


def _lines(
    model: str,
    variant: QualityVariant,
    data: ChoiceData,
    task: QualityTask,
    budgets: ParityBudgets,
    ratios: dict[str, tuple[float, float]],
) -> Iterator[dict[str, Any]]:
    """The names of all lines of a task."""
    count = len(data) if task.limit is None else min(task.limit, len(data))
    for index in range(count):
        for mode in budgets.modes:
            for policy, own in ratios.items():
                yield {
                    "model": model,
                    "dtype": variant.dtype,
                    "task": data.name,
                    "options": {"shots": data.shots, "seed": data.seed},
                    "data": data.fingerprint,
                    "policy": policy,
                    "ratio": round(sum(own), 9),
                    "prefill": mode,
                    "index": index,
                }


def _scored(
    model: Any,
    tokenizer: Any,
    data: ChoiceData,
    line: dict[str, Any],
    ratios: tuple[float, float],
) -> dict[str, Any]:
    """A whole line of results."""
    example = data[line["index"]]
    requests = [encode_pair(tokenizer, *pair) for pair in example.pairs]
    scored = [score_request(model, request, line["prefill"], ratios) for request in requests]
    lengths = [request.num_tokens for request in requests]
    counts = [
        parity.from_ratios(line["prefill"], *ratios, length=length).counts(length)
        for length in lengths
    ]
    return {
        **line,
        "prompt_format": ChoiceTask.prompt_format,
        "h2o_kv": h2o_kv.__version__,
        "metrics": choice_metrics(
            scored, [len(text) - 1 for _, text in example.pairs], example.label
        ),
        "log_probs": scored,
        "label": example.label,
        "seen": lengths,
        # The scripts hide tokens and keep them all; this is what a row attends at most.
        "kept": [min(sum(own), length) for own, length in zip(counts, lengths, strict=True)],
        "nothing_evicted": False,
    }


def score_request(model: Any, request: Request, mode: str, ratios: tuple[float, float]) -> float:
    """Sum of the log-probabilities of a continuation under a mode, nats."""
    whole = torch.tensor([[*request.context, *request.continuation]], device=model.device)
    own = parity.from_ratios(mode, *ratios, length=len(request.context))
    logits = own.score_forward(model, whole, prompt_lengths=len(request.context))[0]
    start = len(request.context)
    return float(token_log_probs(logits[start - 1 : -1], whole[0, start:]).sum())
