"""utils_hh: the masking simulation of HELM and of text generation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from h2o_kv.parity.masking import LayerMask, RatioMode
from h2o_kv.parity.mode import (
    Counts,
    ParityTrace,
    attention_weights,
    causal,
    check_replay,
    highest,
)

__all__ = ["UtilsHH", "UtilsHHMask"]


@dataclass(frozen=True)
class UtilsHH(RatioMode):
    """`utils_hh`: each forward makes the mask of the next one.

    The budgets are parts of the prompt, which attends in full. A later token attends num_heavy +
    num_recent tokens, itself among the recent ones; the one that has just left the window is hidden for
    one step before it may come back as a heavy hitter. Tokens that are hidden lose their score, but
    for that one; with num_recent = 0 nobody does, and a token does not even attend itself.

    Attributes
    ----------
    heavy_ratio, recent_ratio : float
        As the flags of `run_helm.py` and `run_text_generation.py`, whose scripts pass 0.1 and 0.1 (H2O)
        or 0 and 0.2 (local).
    """

    name: ClassVar[str] = "utils_hh"
    source: ClassVar[str] = "h2o_hf/utils_hh/modify_llama.py, modify_opt.py, modify_gptneox.py"

    def begin(self, prompt_len: int | None = None) -> UtilsHHMask:
        """See `MaskingMode.begin`."""
        return UtilsHHMask(self, prompt_len)

    def replay(self, logits: Tensor, prompt_len: int) -> ParityTrace:
        """Replay recorded attention; see `ParityMode.replay`."""
        check_replay(self.name, logits, prompt_len)
        seq_len = logits.shape[1]
        trace = ParityTrace(
            attended=torch.zeros_like(logits, dtype=torch.bool),
            weights=torch.zeros_like(logits),
            scores=torch.zeros_like(logits),
            kept=torch.zeros_like(logits, dtype=torch.bool),
        )
        mask = self.begin()
        allowed: Tensor | None = None
        for start, stop in [(0, prompt_len), *((t, t + 1) for t in range(prompt_len, seq_len))]:
            rows, columns = slice(start, stop), slice(0, stop)
            visible = (
                causal(stop - start, stop, logits.device) if allowed is None else allowed[:, None]
            )
            weights = mask.attend(logits[:, rows, columns])
            assert mask.scores is not None
            assert mask.next_mask is not None
            # A row that may attend nothing spreads over everything.
            allowed = mask.next_mask | ~mask.next_mask.any(-1, keepdim=True)
            trace.attended[:, rows, columns] = visible
            trace.weights[:, rows, columns] = weights
            if start == 0:
                trace.scores[:, rows, columns] = weights.cumsum(1)
                trace.kept[:, rows, columns] = visible
            trace.scores[:, stop - 1, columns] = mask.scores
            trace.kept[:, stop - 1, columns] = allowed[:, :-1]
        return trace


class UtilsHHMask(LayerMask):
    """State of one layer.

    Attributes
    ----------
    scores : Tensor, [..., seen], or None
        Of every token, 0 where it was lost.
    next_mask : Tensor, bool, [..., seen + 1], or None
        What the next token attends, its own column last.
    """

    def __init__(self, mode: UtilsHH, prompt_len: int | None) -> None:
        self._mode = mode
        self._prompt_len = prompt_len
        self._counts: Counts | None = None
        self.scores: Tensor | None = None
        self.next_mask: Tensor | None = None

    def attend(self, logits: Tensor) -> Tensor:
        """See `LayerMask.attend`: what is left of the prompt is one step, each later token another."""
        num_new, num_keys = logits.shape[-2:]
        if self.seen == 0 and self._prompt_len is not None and num_new < self._prompt_len:
            raise ValueError(
                f"{self._mode.name}: the first forward must be the whole prompt of "
                f"{self._prompt_len} tokens, got {num_new}"
            )
        first = 1
        if self.seen == 0:
            first = num_new if self._prompt_len is None else self._prompt_len
        offset = num_keys - num_new
        weights = torch.zeros_like(logits)
        for start, stop in [(0, first), *((row, row + 1) for row in range(first, num_new))]:
            columns = slice(0, offset + stop)
            weights[..., start:stop, columns] = self._step(logits[..., start:stop, columns])
        return weights

    def _step(self, logits: Tensor) -> Tensor:
        """One forward of the script."""
        num_new, num_keys = logits.shape[-2:]
        visible = causal(num_new, num_keys, logits.device)
        if self.next_mask is not None:
            visible = self.next_mask[..., None, :]
        weights = attention_weights(logits, visible)
        scores = weights.sum(-2)
        if self.scores is not None:
            scores[..., :-1] += self.scores
        if self._counts is None:
            self._counts = self._mode.counts(num_keys)
        self.next_mask, with_score = self._choose(scores, *self._counts)
        self.scores = scores * with_score
        self.seen = num_keys
        return weights

    def _choose(self, scores: Tensor, num_heavy: int, num_recent: int) -> tuple[Tensor, Tensor]:
        """What the next token attends, [..., num + 1], and who keeps its score, [..., num]."""
        num = scores.shape[-1]
        next_mask = scores.new_ones(*scores.shape[:-1], num + 1, dtype=torch.bool)
        if num <= num_heavy + num_recent:
            return next_mask, next_mask[..., :-1]
        # The window is counted with the next token in it, the candidates without: one falls between.
        next_mask[..., : num + 1 - num_recent] = False
        candidates = scores[..., : num - num_recent]
        next_mask[..., : num - num_recent] |= highest(candidates, num_heavy)
        with_score = next_mask[..., :-1].clone()
        # In the script a slice from -num_recent, which for 0 is everything.
        with_score[..., num - num_recent if num_recent else 0 :] = True
        return next_mask, with_score
