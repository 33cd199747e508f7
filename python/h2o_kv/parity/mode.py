"""What every parity mode is: a trace of recorded attention, and a model that runs so."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

__all__ = [
    "Counts",
    "ParityMode",
    "ParityTrace",
    "attention_weights",
    "causal",
    "check_count",
    "check_integer",
    "check_ratio",
    "check_replay",
    "group_sums",
    "highest",
    "ranked",
]


class Counts(NamedTuple):
    """A budget in tokens, as the scripts count it.

    Attributes
    ----------
    num_heavy : int
        For their score.
    num_recent : int
        For being the newest.
    """

    num_heavy: int
    num_recent: int


@dataclass(frozen=True, eq=False)
class ParityTrace:
    """What a mode does with recorded attention, query row by query row.

    `heads` are those of the logits; `score_heads` are as many, or one for each group of query heads
    where those share a score (`group_size`). Columns are token positions.

    Attributes
    ----------
    attended : Tensor, bool, [heads, seq_len, seq_len]
        [h, t, i]: whether token i is among those that row t attends.
    weights : Tensor, dtype of the logits, [heads, seq_len, seq_len]
        The softmax weights that the row's output is made with; 0 where not attended.
    scores : Tensor, dtype of the logits, [score_heads, seq_len, seq_len]
        [h, t, i]: score of token i after row t and what the mode does at its end, 0 if it has none.
        Rows inside a one-shot prompt end in nothing, so there it is what has been summed up so far.
    kept : Tensor, bool, [score_heads, seq_len, seq_len]
        [h, t, i]: whether the row after t attends token i, that row's own token apart.
    slots : Tensor, int64, [score_heads, seq_len, num_slots], or None
        Position in each slot after row t, -1 before the end of the prompt. Only where the order of
        slots settles ties (`FlexGen`).
    """

    attended: Tensor
    weights: Tensor
    scores: Tensor
    kept: Tensor
    slots: Tensor | None = None


class ParityMode(ABC):
    """One way in which H2O was run, with its budget in the units of the script.

    Attributes
    ----------
    name : str
        What it is called in commands and tables.
    source : str
        The file of FMInference/H2O that does so; "" = none.
    """

    name: ClassVar[str]
    source: ClassVar[str]

    @classmethod
    @abstractmethod
    def from_ratios(cls, heavy_ratio: float, recent_ratio: float, length: int) -> ParityMode:
        """The mode with these parts of `length` tokens: the prompt's, or the example's (lm_eval).

        Modes whose script takes ratios keep them and do not look at the length.

        Raises
        ------
        ValueError
            A ratio is out of 0..1, or the mode has no such budget.
        """

    @abstractmethod
    def counts(self, length: int) -> Counts:
        """The budget in tokens for a prompt (lm_eval: an example) of `length` tokens."""

    @abstractmethod
    def replay(self, logits: Tensor, prompt_len: int) -> ParityTrace:
        """Do with recorded attention what the mode does.

        Parameters
        ----------
        logits : Tensor, float, [heads, seq_len, seq_len]
            Scaled query . key of a teacher-forced run, before any mask; what is above the diagonal is
            not looked at. The dtype is that of the run: weights and scores are rounded to it, as the
            script rounds them. float64 rounds nothing that matters.
        prompt_len : int
            Rows that the script passes in one forward before it decodes. lm_eval modes take the whole
            example in one forward and do not look at it.

        Returns
        -------
        ParityTrace

        Raises
        ------
        TypeError, ValueError
            An argument has another type, shape or dtype, or is out of its range.
        """

    @abstractmethod
    def running(
        self, model: Any, prompt_len: int | None = None
    ) -> AbstractContextManager[dict[str, Any]]:
        """Run a transformers model in this mode inside a `with`.

        Parameters
        ----------
        model : PreTrainedModel
            In evaluation mode; unchanged afterwards.
        prompt_len : int, optional
            Tokens of the prompt. By default the first forward is the prompt.

        Returns
        -------
        context manager
            Gives the keyword arguments to pass to `generate` or to each forward of one sequence.
        """

    @torch.no_grad()
    def score_forward(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        prompt_lengths: int | Sequence[int] | None = None,
    ) -> Tensor:
        """Logits of whole examples, teacher-forced, each row as the script would run it alone.

        Parameters
        ----------
        model : PreTrainedModel
        input_ids : Tensor, int64, [batch, seq_len]
            Prompt and continuation.
        attention_mask : Tensor, [batch, seq_len], optional
            1 = real token, 0 = padding, on either side.
        prompt_lengths : int or sequence of int, optional
            Real tokens of the prompt, of every row or of each. lm_eval modes need none.

        Returns
        -------
        logits : Tensor, dtype of the model, [batch, seq_len, vocabulary]
            Zeros where a token is padding. Row t predicts token t + 1.

        Raises
        ------
        ValueError
            An argument does not fit, or the mode needs prompt_lengths.

        Notes
        -----
        Rows run one after the other: no script evaluated a batch.
        """
        real = _real_columns(self.name, input_ids, attention_mask)
        prompts = self._prompts(prompt_lengths, [int(row.sum()) for row in real])
        output: Tensor | None = None
        for row, prompt_len in enumerate(prompts):
            columns = real[row].nonzero()[:, 0].to(input_ids.device)
            logits = self._score_row(model, input_ids[row : row + 1, columns], prompt_len)[0]
            if output is None:
                output = logits.new_zeros(*input_ids.shape, logits.shape[-1])
            output[row, columns] = logits
        assert output is not None
        return output

    def _prompts(
        self, prompt_lengths: int | Sequence[int] | None, lengths: Sequence[int]
    ) -> Sequence[int]:
        """Tokens of the prompt of each row, checked."""
        if prompt_lengths is None:
            raise ValueError(f"{self.name}: prompt_lengths must be given, got None")
        if isinstance(prompt_lengths, int):
            prompt_lengths = [prompt_lengths] * len(lengths)
        if len(prompt_lengths) != len(lengths):
            raise ValueError(
                f"{self.name}: prompt_lengths must have one entry a row = {len(lengths)}, got "
                f"{len(prompt_lengths)}"
            )
        for row, (prompt_len, length) in enumerate(zip(prompt_lengths, lengths, strict=True)):
            if not 1 <= prompt_len <= length:
                raise ValueError(
                    f"{self.name}: prompt_lengths must be in 1..{length} (real tokens) in row {row}, "
                    f"got {prompt_len}"
                )
        return prompt_lengths

    @abstractmethod
    def _score_row(self, model: Any, input_ids: Tensor, prompt_len: int) -> Tensor:
        """Logits [1, seq_len, vocabulary] of one row without padding."""


def attention_weights(logits: Tensor, attended: Tensor) -> Tensor:
    """Softmax over what is attended, as the scripts do it.

    Parameters
    ----------
    logits : Tensor, float, [..., num_keys]
    attended : Tensor, bool, broadcasts to it

    Returns
    -------
    Tensor, as `logits`
        Computed in float32 or wider. Hidden logits become the lowest number of the dtype, not -inf:
        a row that attends nothing spreads evenly over all of its columns.
    """
    hidden = logits.masked_fill(~attended, torch.finfo(logits.dtype).min)
    wide = torch.promote_types(logits.dtype, torch.float32)
    return torch.softmax(hidden, dim=-1, dtype=wide).to(logits.dtype)


def causal(num_rows: int, num_keys: int, device: torch.device) -> Tensor:
    """What the last `num_rows` of `num_keys` tokens may attend, bool [num_rows, num_keys]."""
    ones = torch.ones(num_rows, num_keys, dtype=torch.bool, device=device)
    return ones.tril(num_keys - num_rows)


def ranked(scores: Tensor, count: int) -> Tensor:
    """Columns of the `count` highest of each row, from the highest on; of equal scores the later first.

    torch.topk, which the scripts call, leaves open which of equal scores it takes.
    """
    backwards = scores.flip(-1).argsort(dim=-1, descending=True, stable=True)
    return scores.shape[-1] - 1 - backwards[..., :count]


def highest(scores: Tensor, count: int) -> Tensor:
    """Mark what `ranked` names, bool, as `scores`."""
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, ranked(scores, count), True)


def group_sums(weights: Tensor, group_size: int) -> Tensor:
    """Sum [heads, ...] over the query heads that share a score, [heads / group_size, ...]."""
    return weights.reshape(-1, group_size, *weights.shape[1:]).sum(1)


def check_ratio(name: str, ratio: float) -> None:
    """Refuse what is no part of a length."""
    if isinstance(ratio, bool) or not isinstance(ratio, Real):
        raise TypeError(f"{name} must be a number, got {ratio!r}")
    if not 0 <= ratio <= 1:
        raise ValueError(f"{name} must be in 0..1, got {ratio}")


def check_count(name: str, count: int) -> None:
    """Refuse what is no number of tokens."""
    check_integer(name, count)
    if count < 0:
        raise ValueError(f"{name} must be >= 0, got {count}")


def check_integer(name: str, number: int) -> None:
    """Refuse what is no integer, bools among it."""
    if isinstance(number, bool) or not isinstance(number, Integral):
        raise TypeError(f"{name} must be an integer, got {number!r}")


def check_replay(name: str, logits: Tensor, prompt_len: int, group_size: int = 1) -> None:
    """Refuse what `ParityMode.replay` cannot take."""
    if logits.ndim != 3 or logits.shape[1] != logits.shape[2] or 0 in logits.shape:
        raise ValueError(
            f"{name}: logits must be [heads, seq_len, seq_len], got {list(logits.shape)}"
        )
    if not logits.is_floating_point():
        raise ValueError(f"{name}: logits must be of a float dtype, got {logits.dtype}")
    if not math.isfinite(logits.tril().double().abs().sum()):
        raise ValueError(f"{name}: logits must be finite up to the diagonal, got some that are not")
    check_integer(f"{name}: prompt_len", prompt_len)
    check_integer(f"{name}: group_size", group_size)
    if not 1 <= prompt_len <= logits.shape[1]:
        raise ValueError(
            f"{name}: prompt_len must be in 1..{logits.shape[1]} (seq_len), got {prompt_len}"
        )
    if group_size < 1 or logits.shape[0] % group_size:
        raise ValueError(
            f"{name}: group_size must divide heads = {logits.shape[0]}, got {group_size}"
        )


def _real_columns(name: str, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Which columns are no padding, bool [batch, seq_len]."""
    if input_ids.ndim != 2 or 0 in input_ids.shape:
        raise ValueError(f"{name}: input_ids must be [batch, seq_len], got {list(input_ids.shape)}")
    if attention_mask is None:
        return torch.ones_like(input_ids, dtype=torch.bool)
    if attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"{name}: attention_mask must be [batch, seq_len] = {list(input_ids.shape)}, got "
            f"{list(attention_mask.shape)}"
        )
    real = attention_mask.bool()
    if not bool(real.any(1).all()):
        raise ValueError(f"{name}: attention_mask must leave a token in each row, got none in some")
    return real
