"""Teacher-forced likelihood of long texts: perplexity, KL divergence from the full cache, agreement.

A text is cut into segments of `prompt_tokens + new_tokens` tokens, each with a fresh cache; the last
`new_tokens` of a segment are scored. A segment never reaches over the end of a document.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from h2o_kv.eval.caches import CacheUse, Setting
from h2o_kv.eval.data import EvalError, fingerprint, read_text
from h2o_kv.eval.scoring import Request, continuation_logits, token_log_probs
from h2o_kv.eval.tasks import Result, TaskSpec, use_fields

__all__ = ["TEXTS", "PerplexityTask", "compare_logits", "documents"]

TEXTS = {
    "wikitext2": "wikitext/wikitext2_raw_test.txt",
    "pg18304": "books/pg18304_american_adventures.txt",
    "pg16215": "books/pg16215_jack_sheppard.txt",
    "pg14263": "books/pg14263_katrine.txt",
}
"""Files of the texts, by task. WikiText-2, and books of the kind of PG-19 by their Gutenberg number."""

# Title of an article of WikiText; sections have more signs.
_ARTICLE = re.compile(r" = [^=].*[^=] = ")
_FULL = Setting("full", 1.0, "full")


@dataclass(frozen=True)
class LogitsComparison:
    """How the predictions under a policy compare with those under the full cache, means over tokens.

    Attributes
    ----------
    nll : float, nats
        Negative log-likelihood of the true tokens.
    kl : float, nats
        KL(full || policy) of the whole distributions.
    agreement : float
        Part of the tokens of which both find the same one the most likely.
    """

    nll: float
    kl: float
    agreement: float


def compare_logits(teacher: Tensor, logits: Tensor, target: Tensor) -> LogitsComparison:
    """Compare predictions with those of the full cache.

    Parameters
    ----------
    teacher, logits : Tensor, [tokens, vocabulary]
        Under the full cache, and under a policy. Of any float dtype; computed in float32, or float64
        where they are.
    target : Tensor, int64, [tokens]
        The true tokens.
    """
    dtype = torch.promote_types(torch.float32, logits.dtype)
    ours, theirs = (one.to(dtype).log_softmax(-1) for one in (logits, teacher))
    divergence = torch.nn.functional.kl_div(ours, theirs, reduction="sum", log_target=True)
    agree = (logits.argmax(-1) == teacher.argmax(-1)).to(dtype)
    return LogitsComparison(
        nll=-float(token_log_probs(logits, target).mean()),
        kl=float(divergence) / len(target),
        agreement=float(agree.mean()),
    )


def documents(text: str) -> list[str]:
    """The articles of a WikiText file; any other text is one document."""
    found: list[list[str]] = [[]]
    for line in text.split("\n"):
        if _ARTICLE.fullmatch(line):
            found.append([])
        found[-1].append(line)
    return ["\n".join(lines) for lines in found if any(lines)]


class PerplexityTask:
    """Segments of one text.

    The full cache runs once a segment, beside all policies.
    """

    prompt_format = "text without special tokens, in segments with a fresh cache"
    generates = False

    def __init__(self, spec: TaskSpec, tokenizer: Any) -> None:
        if spec.prompt_tokens < 1 or spec.new_tokens < 1:
            raise EvalError(
                f"{spec.name}: prompt and new tokens must be >= 1, got {spec.prompt_tokens} and "
                f"{spec.new_tokens}"
            )
        file = spec.folder / TEXTS[spec.name]
        self.name = spec.name
        self.options = {"prompt_tokens": spec.prompt_tokens, "new_tokens": spec.new_tokens}
        self.data = fingerprint(file)
        self._prompt = spec.prompt_tokens
        self._length = spec.prompt_tokens + spec.new_tokens
        texts = documents(read_text(file))
        self._segments = list(self._cut(tokenizer, texts))

    def __len__(self) -> int:
        return len(self._segments)

    def run(
        self, model: Any, indices: Sequence[int], settings: Sequence[Setting]
    ) -> Iterator[Result]:
        """Run these segments, one after the other."""
        for index in indices:
            request = self._segments[index]
            target = torch.tensor(request.continuation, device=model.device)
            teacher, full = _logits(model, request, _FULL)
            for setting in settings:
                logits, use = (teacher, full)
                if setting.evicts:
                    logits, use = _logits(model, request, setting)
                comparison = compare_logits(teacher, logits, target)
                fields = {"metrics": dict(vars(comparison)), **use_fields([use])}
                yield Result(index, setting, fields)

    def _cut(self, tokenizer: Any, texts: Sequence[str]) -> Iterator[Request]:
        for text in texts:
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            for start in range(0, len(ids) - self._length + 1, self._length):
                segment = tuple(ids[start : start + self._length])
                yield Request(segment[: self._prompt], segment[self._prompt :])


def _logits(model: Any, request: Request, setting: Setting) -> tuple[Tensor, CacheUse]:
    [(_, logits, use)] = continuation_logits(model, [request], setting)
    return logits, use
