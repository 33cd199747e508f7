"""Retrieval: whether what is asked for late still comes out, and whether the cache still has it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

from h2o_kv.eval.caches import Setting
from h2o_kv.eval.data import EvalError, fingerprint, read_rows
from h2o_kv.eval.decoding import end_tokens
from h2o_kv.eval.prefix import Prefix
from h2o_kv.eval.probes import PROBES, Haystack, Probe, ruler_probe
from h2o_kv.eval.scoring import Request, encode_pair
from h2o_kv.eval.tasks import Result, TaskSpec, use_fields

__all__ = ["RETRIEVAL_TASKS", "RetrievalTask"]

_RULER = "ruler_multikey"
_RULER_FILE = "ruler/niah_multikey_3_4096_first100.jsonl"
RETRIEVAL_TASKS = (*PROBES, _RULER)
"""Names of the tasks; see probes.py for what each asks."""

_NUM_PROBES = 100
# What a model may say before and between answers.
_SPARE_TOKENS = 8


class RetrievalTask:
    """Probes, each under one cache that its alternatives and its generated answer start from.

    Metrics: `exact`, all that is wanted is in the greedy answer; `first`, the true answer has the
    highest log-probability among the alternatives; `rank` of it, from 1; `evidence_kept`, the part of
    the evidence's tokens that layers and KV heads hold when the question has been read. A wrong answer
    whose evidence was kept is not the policy's choice of tokens.
    """

    generates = True

    def __init__(self, spec: TaskSpec, tokenizer: Any) -> None:
        self.name = spec.name
        self._tokenizer, self._spec = tokenizer, spec
        if spec.name == _RULER:
            file = spec.folder / _RULER_FILE
            self._rows = read_rows(file)
            self.options: dict[str, Any] = {"seed": spec.seed}
            self.prompt_format = "RULER"
            for index in range(len(self)):
                try:
                    self.probe(index)
                except EvalError as error:
                    raise EvalError(f"{file}: row {index}: {error}") from error
        else:
            if spec.prompt_tokens < 1:
                raise EvalError(
                    f"{spec.name}: prompt tokens must be >= 1, got {spec.prompt_tokens}"
                )
            file = spec.folder / Haystack.FILE
            self._haystack = Haystack(spec.folder, tokenizer)
            self.options = {"prompt_tokens": spec.prompt_tokens, "seed": spec.seed}
            self.prompt_format = "probes of h2o_kv.eval"
        self.data = fingerprint(file)

    def __len__(self) -> int:
        return len(self._rows) if self.name == _RULER else _NUM_PROBES

    def probe(self, index: int) -> Probe:
        """The probe of this index; the same whatever else is run."""
        draw = random.Random(f"{self.name} {self._spec.seed} {index}")
        if self.name == _RULER:
            return ruler_probe(self._rows[index], draw)
        return PROBES[self.name](self._haystack, self._spec.prompt_tokens, index, draw)

    def run(
        self, model: Any, indices: Sequence[int], settings: Sequence[Setting]
    ) -> Iterator[Result]:
        """Run these probes one by one: their contexts are long."""
        ends = end_tokens(model, self._tokenizer)
        for index in indices:
            probe = self.probe(index)
            requests = [
                encode_pair(self._tokenizer, probe.prompt, text)
                for text in (probe.answer, *probe.alternatives)
            ]
            evidence = self._tokens_of(probe, requests)
            for setting in settings:
                yield Result(
                    index, setting, self._ask(model, probe, requests, evidence, setting, ends)
                )

    def _ask(
        self,
        model: Any,
        probe: Probe,
        requests: Sequence[Request],
        evidence: Sequence[int],
        setting: Setting,
        ends: Sequence[int],
    ) -> dict[str, Any]:
        answers = [request.continuation for request in requests]
        longest = max(map(len, answers))
        prefix = Prefix(model, requests[0].context, requests[0].num_tokens, longest, setting)
        kept = prefix.share_kept(evidence)
        log_probs = prefix.log_probs(answers)
        new = prefix.generate(longest + _SPARE_TOKENS, ends)
        text: str = self._tokenizer.decode(new, skip_special_tokens=True)
        rank = 1 + sum(other >= log_probs[0] for other in log_probs[1:])
        return {
            "metrics": {
                "exact": float(all(part in text for part in probe.wanted)),
                "first": float(rank == 1),
                "rank": float(rank),
                "evidence_kept": kept,
            },
            "texts": [text],
            "answer": probe.answer,
            **use_fields([prefix.use()]),
        }

    def _tokens_of(self, probe: Probe, requests: Sequence[Request]) -> list[int]:
        """Places of the tokens that hold the evidence."""
        if any(request.context != requests[0].context for request in requests):
            raise EvalError(
                f"{self.name}: the tokens of a prompt must not depend on what follows it"
            )
        encoded = self._tokenizer(
            probe.prompt, add_special_tokens=False, return_offsets_mapping=True
        )
        return [
            place
            for place, (start, end) in enumerate(encoded["offset_mapping"])
            if any(start < last and first < end for first, last in probe.evidence)
        ]
