"""FlexGen's H2O: the throughput tables. A set of 2k - 1 slots, overwritten in place.

k heavy hitters, then a ring of the k - 1 latest. Each decoded token is attended as slot 2k - 1; then
the oldest token of the ring moves into the slot of the heavy hitter that leaves, and the new one into
the ring.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from h2o_kv._C import EvictionPolicy
from h2o_kv.hf import H2OCache
from h2o_kv.parity.caching import CachingMode
from h2o_kv.parity.mode import (
    Counts,
    ParityTrace,
    attention_weights,
    causal,
    check_integer,
    check_ratio,
    check_replay,
    group_sums,
    ranked,
)

__all__ = ["FlexGen"]


@dataclass(frozen=True)
class FlexGen(CachingMode):
    """`h2o_flexgen` with `--hh-all`: heavy hitters and a ring in 2k - 1 slots.

    From its own prefill on it is our order with num_heavy = k - 1 and num_recent = k, ties apart: of
    equal scores the lowest slot leaves, and the prefill fills slots from the highest score down.

    Attributes
    ----------
    hh_ratio : float
        As the flag `--hh-ratio`: k = int(prompt * hh_ratio).
    """

    name: ClassVar[str] = "flexgen"
    source: ClassVar[str] = "h2o_flexgen/flexgen/pytorch_backend.py, flex_opt.py"

    hh_ratio: float = 0.1

    def __post_init__(self) -> None:
        check_ratio(f"{self.name}: hh_ratio", self.hh_ratio)

    @classmethod
    def from_ratios(cls, heavy_ratio: float, recent_ratio: float, length: int) -> FlexGen:
        """See `ParityMode.from_ratios`; the two ratios must be equal: FlexGen has one."""
        if heavy_ratio != recent_ratio:
            raise ValueError(
                f"{cls.name}: heavy_ratio and recent_ratio must be equal, since it has one hh_ratio, "
                f"got {heavy_ratio} and {recent_ratio}"
            )
        return cls(heavy_ratio)

    def k(self, prompt_len: int) -> int:
        """Heavy hitters that a prompt of so many tokens leaves.

        Raises
        ------
        ValueError
            FlexGen itself fails there: a ring of k - 1 = 0 slots divides by zero, and a prompt of
            fewer than 2k - 1 tokens does not fill the slots that decoding reads.
        """
        k = int(prompt_len * self.hh_ratio)
        if not 3 <= 2 * k - 1 <= prompt_len:
            raise ValueError(
                f"{self.name}: k = int(prompt_len * hh_ratio) must be >= 2, and 2k - 1 <= prompt_len, "
                f"got k={k} of prompt_len={prompt_len}, hh_ratio={self.hh_ratio}"
            )
        return k

    def counts(self, length: int) -> Counts:
        """Our budget that equals it while it decodes: k - 1 and k."""
        k = self.k(length)
        return Counts(k - 1, k)

    def replay(
        self, logits: Tensor, prompt_len: int, *, group_size: int = 1, num_pads: int = 0
    ) -> ParityTrace:
        """Replay recorded attention; see `ParityMode.replay`, and `Fixed.replay` for group_size.

        Parameters
        ----------
        logits, prompt_len, group_size
            As there; prompt_len counts padding, as the script does.
        num_pads : int
            Padding on the left. As in the script, a pad attends all of the prompt evenly, is scored,
            and may stay; what is decoded attends the pads that stayed.
        """
        check_replay(self.name, logits, prompt_len, group_size)
        k = self.k(prompt_len)
        check_integer(f"{self.name}: num_pads", num_pads)
        if not 0 <= num_pads < prompt_len:
            raise ValueError(
                f"{self.name}: num_pads must be in 0..{prompt_len - 1} (prompt_len - 1), got {num_pads}"
            )
        heads, seq_len, _ = logits.shape
        score_heads = heads // group_size
        trace = ParityTrace(
            attended=torch.zeros_like(logits, dtype=torch.bool),
            weights=torch.zeros_like(logits),
            scores=logits.new_zeros(score_heads, seq_len, seq_len),
            kept=torch.zeros(score_heads, seq_len, seq_len, dtype=torch.bool, device=logits.device),
            slots=torch.full((score_heads, seq_len, 2 * k - 1), -1, device=logits.device),
        )
        slots, acc = self._prefill(trace, logits[:, :prompt_len, :prompt_len], k, num_pads)
        _note(trace, prompt_len - 1, slots, acc)
        for row in range(prompt_len, seq_len):
            slots[:, -1] = row
            by_head = slots.repeat_interleave(group_size, 0)
            row_logits = logits[:, row].gather(-1, by_head)
            weights = attention_weights(row_logits, torch.ones_like(by_head, dtype=torch.bool))
            trace.weights[:, row].scatter_(-1, by_head, weights)
            trace.attended[:, row].scatter_(-1, by_head, True)
            acc[:, -1] = 0
            acc += group_sums(weights, group_size)
            victim = acc[:, :k].argmin(-1, keepdim=True)  # The first of equals.
            oldest = k + (row - prompt_len) % (k - 1)
            for each in (slots, acc):
                each.scatter_(-1, victim, each[:, oldest : oldest + 1].clone())
                each[:, oldest] = each[:, -1]
            _note(trace, row, slots, acc)
        return trace

    def _prefill(
        self, trace: ParityTrace, logits: Tensor, k: int, num_pads: int
    ) -> tuple[Tensor, Tensor]:
        """Positions and scores by slot, [score_heads, 2k]; the last slot is that of the new token."""
        prompt_len = logits.shape[1]
        score_heads = trace.scores.shape[0]
        visible = causal(prompt_len, prompt_len, logits.device)
        visible[:, :num_pads] = False  # A pad's row has nothing left, and spreads evenly.
        weights = attention_weights(logits, visible)
        rows = slice(0, prompt_len)
        trace.weights[:, rows, rows] = weights
        trace.attended[:, rows, rows] = visible | ~visible.any(-1, keepdim=True)
        added = group_sums(weights, logits.shape[0] // score_heads)
        trace.scores[:, rows, rows] = added.cumsum(1)
        trace.kept[:, rows, rows] = causal(prompt_len, prompt_len, logits.device)
        score = added.sum(1)
        last_heavy = prompt_len - (k - 1)
        heavy = ranked(score[:, :last_heavy], k)
        ring = torch.arange(last_heavy, prompt_len + 1, device=logits.device).expand(
            score_heads, -1
        )
        slots = torch.cat([heavy, ring], -1)
        acc = torch.nn.functional.pad(score, (0, 1)).gather(-1, slots)
        return slots, acc

    def cache(self, model: Any, prompt_len: int | None = None) -> H2OCache:
        """See `CachingMode.cache`; as the prefill needs it, so `running` turns k, k - 1 round after it.

        A one-shot prefill that keeps k for their score and k - 1 recent ones leaves FlexGen's set.
        """
        if prompt_len is None:
            raise ValueError(
                f"{self.name}: prompt_len must be given, since k comes from it, got None"
            )
        num_heavy, num_recent = self.counts(prompt_len)
        return H2OCache(model.config, EvictionPolicy(num_heavy=num_recent, num_recent=num_heavy))

    @contextmanager
    def running(self, model: Any, prompt_len: int | None = None) -> Iterator[dict[str, Any]]:
        """Run a model with a new cache of this mode; see `CachingMode.running`.

        The first forward must be the whole prompt of `prompt_len` tokens; padding stays out, unlike
        FlexGen's.
        """
        with super().running(model, prompt_len) as options:
            (cache,) = options.values()
            assert prompt_len is not None  # Or there would be no cache.
            num_heavy, num_recent = self.counts(prompt_len)

            def turn_round(*_: Any) -> None:
                seen = cache.get_seq_length()
                if cache.budget_events or seen == 0:
                    return
                if seen != prompt_len:
                    raise ValueError(
                        f"{self.name}: the first forward must be the prompt of {prompt_len} tokens, "
                        f"got {seen}"
                    )
                cache.set_budget(num_heavy=num_heavy, num_recent=num_recent)

            hook = model.register_forward_hook(turn_round)
            try:
                yield options
            finally:
                hook.remove()


def _note(trace: ParityTrace, row: int, slots: Tensor, acc: Tensor) -> None:
    """Write what the slots hold after a row, the new token's apart."""
    assert trace.slots is not None
    held = slots[:, :-1]
    trace.slots[:, row] = held
    trace.scores[:, row] = 0
    trace.scores[:, row].scatter_(-1, held, acc[:, :-1])
    trace.kept[:, row] = False
    trace.kept[:, row].scatter_(-1, held, True)
