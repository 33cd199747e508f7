"""How scores come about and what is compared, in float64: the rules of `reference.py`.

Written to be read, and shared with nothing: the operators' rules are in csrc/h2o/kernels/score_rule.h.
docs/policies.md says which policy is made of which.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Rules"]

_MASK = 2**64 - 1


@dataclass(frozen=True)
class Rules:
    """The arguments of h2o_attention_decode that say how tokens are scored and read.

    Attributes
    ----------
    score_rule : str
        "sum", "decay", "mean", "value", "misses", "prompt", "random" or "given".
    score_decay : float
        "decay": what a query leaves of the scores that it finds.
    score_seed : int
        "random".
    score_queries : int
        Of tokens that join together, the last so many score; 0 = all of them.
    score_pool : int
        The first scores of tokens that join together are means over so many neighbours.
    pattern_stride, pattern_columns : int
        Tokens at the last columns of every stride leave after all others.
    read_slots, read_page : int
        With a chunk of 1 a token attends to itself and to so many slots, whole pages of them.
    """

    score_rule: str = "sum"
    score_decay: float = 1.0
    score_seed: int = 0
    score_queries: int = 0
    score_pool: int = 1
    pattern_stride: int = 0
    pattern_columns: int = 0
    read_slots: int = 0
    read_page: int = 1

    def after_query(
        self, scores: Tensor, mass: Tensor, norms: Tensor, even_share: float, query: int, of: int
    ) -> Tensor:
        """Scores of the tokens that query number `query` of `of` sees, itself the last of them.

        Parameters
        ----------
        scores, mass, norms : Tensor, float64, [visible]
            What they were, what the query gives, and the sum of |v| of each.
        even_share : float
            What each would have got if all got the same.
        """
        if self.score_queries > 0 and query < of - self.score_queries:
            mass = torch.zeros_like(mass)
        match self.score_rule:
            case "sum" | "mean":
                return scores + mass
            case "decay":
                return scores * self.score_decay + mass
            case "value":
                return scores + mass * norms
            case "misses":
                return scores - (mass < even_share).double()
            case "prompt":
                return scores + mass if of > 1 else scores
            case "random" | "given":
                return scores
        raise ValueError(
            f"reference: score_rule must be one that there is, got {self.score_rule!r}"
        )

    def pooled(self, scores: Tensor, positions: list[int], newest: int, num_recent: int) -> Tensor:
        """First scores of tokens that joined together, [num_new]."""
        old = sum(position <= newest - num_recent for position in positions)
        reach = self.score_pool // 2
        result = scores.clone()
        for i in range(old):
            neighbours = scores[max(0, i - reach) : min(old, i + reach + 1)]
            result[i] = neighbours.sum() / self.score_pool
        return result

    def drawn(self, head: int, position: int) -> float:
        """Score of a token with "random": SplitMix64 of seed, head and position, in [0, 1)."""
        bits = 0
        for word in (self.score_seed & _MASK, head, position):
            bits = ((bits ^ word) + 0x9E3779B97F4A7C15) & _MASK
            bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
            bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & _MASK
            bits ^= bits >> 31
        return (bits >> 40) / 2**24

    def compared(self, score: float, position: int, newest: int) -> float:
        """What the token is ordered by while the newest is at `newest`."""
        if self.pattern_stride > 0:
            column = position % self.pattern_stride
            if column >= self.pattern_stride - self.pattern_columns:
                return math.inf
        return score / max(1, newest - position + 1) if self.score_rule == "mean" else score

    def read(self, queries: Tensor, keys: Tensor, logits: Tensor, cached: list[int]) -> Tensor:
        """Which candidates each query head reads, bool [group_size, candidates]; the last is new.

        Parameters
        ----------
        queries : Tensor, float64, [group_size, head_dim]
        keys : Tensor, float64, [candidates, head_dim]
        logits : Tensor, float64, [group_size, candidates]
        cached : list of int
            Position in each slot of the cache, -1 = empty. The cached candidates are the occupied
            slots, in their order.
        """
        if self.read_slots == 0:
            return torch.ones_like(logits, dtype=torch.bool)
        occupied = [slot for slot, position in enumerate(cached) if position >= 0]
        pages: dict[int, list[int]] = {}
        for candidate, slot in enumerate(occupied):
            pages.setdefault(slot // self.read_page, []).append(candidate)
        newest = {page: max(cached[occupied[i]] for i in own) for page, own in pages.items()}
        read = torch.zeros_like(logits, dtype=torch.bool)
        read[:, -1] = True
        for g, query in enumerate(queries):
            bounds = {}
            for page, own in pages.items():
                if self.read_page == 1:
                    bounds[page] = logits[g, own[0]].item()
                else:
                    least, most = keys[own].amin(0), keys[own].amax(0)
                    bounds[page] = torch.maximum(query * least, query * most).sum().item()
            if self.read_page > 1 and pages:
                bounds[max(newest, key=lambda page: newest[page])] = math.inf
            in_order = sorted(pages, key=lambda page: (-bounds[page], -newest[page]))
            for page in in_order[: -(-self.read_slots // self.read_page)]:
                read[g, pages[page]] = True
        return read
