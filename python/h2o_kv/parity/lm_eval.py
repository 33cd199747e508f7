"""utils_lm_eval: the accuracy tables. A whole example in one forward, masked."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from h2o_kv.parity.masking import LayerMask, RatioMode
from h2o_kv.parity.mode import (
    ParityTrace,
    attention_weights,
    causal,
    check_replay,
    highest,
)

__all__ = ["LmEvalLocal", "LmEvalMode", "LmEvalOracle"]


@dataclass(frozen=True)
class LmEvalMode(RatioMode):
    """A mask over a whole example, from its attention without eviction.

    The budgets are parts of the example: prompt and continuation.

    Attributes
    ----------
    heavy_ratio, recent_ratio : float
        As the flags of `run_lm_eval_harness.py`, whose scripts pass 0.1 and 0.1 (H2O) or 0 and 0.2
        (local).
    """

    @abstractmethod
    def heavy_hitters(self, full: Tensor, num_heavy: int) -> tuple[Tensor, Tensor]:
        """Heavy hitters of each row, and the scores that say so.

        Parameters
        ----------
        full : Tensor, [..., seq_len, seq_len]
            Causal softmax weights without eviction.
        num_heavy : int

        Returns
        -------
        mask : Tensor, bool, [..., seq_len + 1, seq_len]
            The last row is that of a token after the example.
        scores : Tensor, as `full`
            After each row.
        """

    def begin(self, prompt_len: int | None = None) -> LayerMask:
        """See `MaskingMode.begin`; the prompt has no say."""
        return _WholeExample(self)

    def replay(self, logits: Tensor, prompt_len: int) -> ParityTrace:
        """Replay recorded attention; see `ParityMode.replay`. prompt_len has no say."""
        check_replay(self.name, logits, prompt_len)
        weights, mask, scores = self._masked(logits)
        attended = mask[..., :-1, :]
        num_rows = logits.shape[-1]
        # What the next row attends, without that row's own token.
        kept = mask[..., 1:, :] & causal(num_rows, num_rows, logits.device)
        return ParityTrace(attended, weights, scores, kept)

    def _masked(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Weights, what each row and one more attends, and the scores."""
        num = logits.shape[-1]
        num_heavy, num_recent = self.counts(num)
        visible = causal(num, num, logits.device)
        heavy, scores = self.heavy_hitters(attention_weights(logits, visible), num_heavy)
        rows = torch.arange(num + 1, device=logits.device)[:, None]
        columns = torch.arange(num, device=logits.device)
        # num_recent before a row, and the row itself. The scripts' band may reach past it, where
        # causality hides it.
        band = (columns <= rows) & (columns >= rows - num_recent)
        mask = (heavy | band) & (columns <= rows)
        return attention_weights(logits, mask[..., :-1, :]), mask, scores

    def _prompts(
        self, prompt_lengths: int | Sequence[int] | None, lengths: Sequence[int]
    ) -> Sequence[int]:
        return lengths


class _WholeExample(LayerMask):
    """The one forward of an example."""

    def __init__(self, mode: LmEvalMode) -> None:
        self._mode = mode

    def attend(self, logits: Tensor) -> Tensor:
        num_new, num_keys = logits.shape[-2:]
        if num_new != num_keys:
            raise ValueError(
                f"{self._mode.name}: a forward must be a whole example, got {num_new} tokens after "
                f"{num_keys - num_new}"
            )
        self.seen = num_keys
        return self._mode._masked(logits)[0]


@dataclass(frozen=True)
class LmEvalLocal(LmEvalMode):
    """`local_heavy_hitter_mask`, as OPT and GPT-NeoX ran it: scores of the past, row by row.

    The first num_heavy rows are dense. Then a row attends the num_heavy - 1 highest and itself, and a
    band of num_recent before it. Only the heavy ones carry a score on; it grows by the row of the
    attention without eviction. So a token that is only recent has nothing when it leaves the band.
    """

    name: ClassVar[str] = "lm_eval_local"
    source: ClassVar[str] = "h2o_hf/utils_lm_eval/modify_opt.py, modify_gptneox.py"

    def heavy_hitters(self, full: Tensor, num_heavy: int) -> tuple[Tensor, Tensor]:
        """See `LmEvalMode.heavy_hitters`."""
        num = full.shape[-1]
        mask = full.new_zeros(*full.shape[:-2], num + 1, num, dtype=torch.bool)
        scores = torch.zeros_like(full)
        if num_heavy == 0:
            return mask, scores
        mask[..., :num_heavy, :num_heavy] = True
        scores[..., :num_heavy, :] = full[..., :num_heavy, :].cumsum(-2)
        score = full[..., :num_heavy, :].sum(-2)
        scores[..., num_heavy - 1, :] = score
        for row in range(num_heavy, num + 1):
            heavy = mask[..., row, :]
            heavy[..., :row] = highest(score[..., :row], num_heavy - 1)
            if row < num:
                heavy[..., row] = True
                score = (score + full[..., row, :]) * heavy
                scores[..., row, :] = score
        return mask, scores


@dataclass(frozen=True)
class LmEvalOracle(LmEvalMode):
    """What the LLaMA script runs: one set, from the column sums over all rows, those to come included.

    The mask of `LmEvalLocal` is commented out there.
    """

    name: ClassVar[str] = "lm_eval_oracle"
    source: ClassVar[str] = "h2o_hf/utils_lm_eval/modify_llama.py"

    def heavy_hitters(self, full: Tensor, num_heavy: int) -> tuple[Tensor, Tensor]:
        """See `LmEvalMode.heavy_hitters`; the scores are the sums, after every row the same."""
        score = full.sum(-2)
        heavy = highest(score, num_heavy)[..., None, :]
        num = full.shape[-1]
        return heavy.expand(*full.shape[:-2], num + 1, num), score[..., None, :].expand_as(full)
