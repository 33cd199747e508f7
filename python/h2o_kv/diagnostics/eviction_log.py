"""A sampled log of evictions, one JSON line each.

Lines: `{"event": "run", ...}` first, then `{"event": "eviction", ...}`, and `{"event": "end", ...}` with
how many evictions there were and how many were written. What a line of an eviction has is `Victim`, with
the token as text; a margin that no other token could have given is null.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from h2o_kv.diagnostics.steps import ObservedStep, Victim

__all__ = ["EvictionLog"]


class EvictionLog:
    """Writes evictions to a file as `observed_steps` shows them; a context manager.

    Parameters
    ----------
    path : Path
        Written anew.
    token_ids : sequence of int
        The text.
    token_texts : sequence of str
        Text of each of its tokens.
    token_classes : sequence of str
        Class of each.
    rate : float
        In (0, 1]: the probability with which an eviction is written.
    layers : iterable of int, optional
        Only these layers; all where left out.
    seed : int
        Of the draws. Each layer has its own, so the choice of layers does not change what of a layer
        is written.
    about : mapping, optional
        More of the first line.

    Raises
    ------
    ValueError
        rate is out of its range.
    """

    def __init__(
        self,
        path: Path,
        token_ids: Sequence[int],
        token_texts: Sequence[str],
        token_classes: Sequence[str],
        *,
        rate: float = 1.0,
        layers: Iterable[int] | None = None,
        seed: int = 0,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        if not 0 < rate <= 1:
            raise ValueError(f"EvictionLog: rate must be in (0, 1], got {rate}")
        self._tokens = list(zip(token_ids, token_texts, token_classes, strict=True))
        self._rate, self._seed = rate, seed
        self.layers = None if layers is None else frozenset(layers)
        self._draws: dict[int, random.Random] = {}
        self.seen = self.written = 0
        self._file = path.open("w", encoding="utf-8")
        shown = None if self.layers is None else sorted(self.layers)
        self._write("run", {"rate": rate, "seed": seed, "layers": shown, **(about or {})})

    def __enter__(self) -> EvictionLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self._write("end", {"evictions": self.seen, "written": self.written})
        self._file.close()

    def __call__(self, step: ObservedStep) -> None:
        """Take one step of one layer."""
        if self.layers is not None and step.layer not in self.layers:
            return
        draw = self._draws.setdefault(step.layer, random.Random(f"{self._seed} {step.layer}"))
        for victim in step.victims():
            self.seen += 1
            if draw.random() < self._rate:
                self.written += 1
                self._write("eviction", self._fields(victim))

    def _fields(self, victim: Victim) -> dict[str, Any]:
        token_id, text, token_class = self._tokens[victim.position]
        return {
            "step": victim.step,
            "layer": victim.layer,
            "head": victim.head,
            "position": victim.position,
            "token_id": token_id,
            "token": text,
            "class": token_class,
            "age": victim.age,
            "score": victim.score,
            "margin": victim.margin if math.isfinite(victim.margin) else None,
            "tied": victim.tied,
        }

    def _write(self, event: str, fields: Mapping[str, Any]) -> None:
        print(json.dumps({"event": event, **fields}, ensure_ascii=False), file=self._file)
