"""Eviction policies by name, each at the same total number of slots: what comparisons are made of.

docs/policies.md has a table of what each keeps, reads and costs, and where it differs from its paper.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from h2o_kv._C import EvictionPolicy

__all__ = ["DEFAULT_SINKS", "POLICIES", "NamedPolicy", "count_of", "named", "rules_of"]

DEFAULT_SINKS = 4
"""Sinks of StreamingLLM (arXiv 2309.17453), section 3.2."""
QUEST_PAGE = 16
"""Slots of a page of Quest (arXiv 2406.10774), section 4."""
SNAPKV_WINDOW, SNAPKV_POOL = 32, 5
"""Observation window and pooling kernel of SnapKV (arXiv 2404.14469), as its code has them."""
SCISSORHANDS_WINDOW = 10
"""Tokens that Scissorhands (arXiv 2305.17118), section 5.1, always keeps."""
VOTING_QUERIES = 64
"""Queries at the end of a prompt that the windowed sum goes over."""
DECAY = 0.99
"""Factor per query of the decayed sum: half of a weight is forgotten after 69 tokens."""

_USUAL = EvictionPolicy(num_heavy=1, num_recent=1).arguments
_COUNTS = ("num_heavy", "num_recent", "num_sink", "heavy_ratio", "recent_ratio", "gqa_reduce")


def count_of(part: float, tokens: int) -> int:
    """Tokens that a part of `tokens` is, as ratios of a policy are resolved: at least one.

    >>> count_of(0.29, 100), count_of(0.2, 4)
    (29, 1)
    """
    return EvictionPolicy(num_heavy=0, recent_ratio=part).resolve(tokens).num_recent


def rules_of(policy: EvictionPolicy) -> dict[str, Any]:
    """How a policy scores and reads where that is not as in H2O: arguments of h2o_attention_decode."""
    return {
        name: value
        for name, value in policy.arguments.items()
        if name not in _COUNTS and value != _USUAL[name]
    }


@dataclass(frozen=True)
class NamedPolicy:
    """A way to spend a number of slots.

    Attributes
    ----------
    name : str
        What it is called in commands, files and tables.
    title : str
        What it is called in plots.
    source : str
        The paper that it is from, and where in it; "" for the full cache.
    needs_length : bool
        Whether `with_slots` must know how many tokens there will be.
    prefills : tuple of str
        What an H2OCache may have as `prefill`; with "streaming" alone prefill_chunk must be 1.
    cache_options : dict
        Other keyword arguments for H2OCache.
    needs_oracle : bool
        Whether H2OCache must get `given_scores`: those of the full cache at the end of the text.
    """

    name: str
    title: str
    source: str
    _split: Callable[[int, int], EvictionPolicy | None]
    needs_length: bool = False
    prefills: tuple[str, ...] = ("one_shot", "streaming")
    cache_options: dict[str, Any] = field(default_factory=dict)
    needs_oracle: bool = False

    def with_slots(
        self, total: int, length: int | None = None, seed: int = 0
    ) -> EvictionPolicy | None:
        """The policy that spends `total` slots of each row and KV head; None = the full cache.

        Parameters
        ----------
        total : int, tokens
            Kept, or with a policy that keeps everything read in a step; at least 1.
        length : int, tokens, optional
            That there will be in all, generated ones included.
        seed : int
            Of a policy that draws.

        Raises
        ------
        ValueError
            total is below 1, or a length is needed and not given or below 1.
        """
        if total < 1:
            raise ValueError(f"NamedPolicy.with_slots: total must be >= 1, got {total}")
        if self.needs_length and (length is None or length < 1):
            raise ValueError(
                f'NamedPolicy.with_slots: length must be >= 1 for "{self.name}", got {length}'
            )
        policy = self._split(total, length or 0)
        if policy is not None and policy.score_rule == "random":
            return policy.replace(score_seed=seed)
        return policy


def _h2o(total: int, length: int = 0) -> EvictionPolicy:
    # Of one slot the window has it: a cache without the newest token is of no use.
    heavy = total // 2
    return EvictionPolicy(num_heavy=heavy, num_recent=total - heavy)


def _variant(**rules: Any) -> Callable[[int, int], EvictionPolicy]:
    """H2O's split with another score."""
    return lambda total, length: _h2o(total).replace(**rules)


def _local(total: int, length: int = 0) -> EvictionPolicy:
    return EvictionPolicy(num_heavy=0, num_recent=total)


def _heavy(total: int, length: int) -> EvictionPolicy:
    return EvictionPolicy(num_heavy=total, num_recent=0)


def _streaming(total: int, length: int) -> EvictionPolicy:
    sinks = min(DEFAULT_SINKS, total - 1)
    return EvictionPolicy(num_heavy=0, num_recent=total - sinks, num_sink=sinks)


def _random(total: int, length: int) -> EvictionPolicy:
    return EvictionPolicy(num_heavy=total - 1, num_recent=1, score_rule="random")


def _sparse(columns_of_block: bool, with_heavy: bool) -> Callable[[int, int], EvictionPolicy]:
    """Sparse Transformer's patterns, with half of the slots for heavy hitters or with none."""

    def split(total: int, length: int) -> EvictionPolicy:
        window = max(1, total // 4 if with_heavy else total // 2)
        in_pattern = max(1, window if with_heavy else total - window)
        stride, columns = -(-length // in_pattern), 1
        if columns_of_block:
            stride = max(2, min(64, length // 4))
            columns = min(stride, max(1, in_pattern * stride // length))
        return EvictionPolicy(
            num_heavy=total - window,
            num_recent=window,
            score_rule="sum" if with_heavy else "given",
            pattern_stride=stride,
            pattern_columns=columns,
        )

    return split


def _scissorhands(total: int, length: int) -> EvictionPolicy:
    recent = min(SCISSORHANDS_WINDOW, total - total // 2)
    return EvictionPolicy(num_heavy=total - recent, num_recent=recent, score_rule="misses")


def _snapkv(total: int, length: int) -> EvictionPolicy:
    recent = min(SNAPKV_WINDOW, total - total // 2)
    return EvictionPolicy(
        num_heavy=total - recent,
        num_recent=recent,
        score_rule="prompt",
        score_queries=recent,
        score_pool=SNAPKV_POOL,
    )


def _read(policy: EvictionPolicy, slots: int, page: int) -> EvictionPolicy:
    """Read in whole pages no more than so many slots: fewer than a page are one smaller page."""
    page = min(page, slots)
    return policy.replace(read_slots=slots // page * page, read_page=page)


def _reading(page: int) -> Callable[[int, int], EvictionPolicy]:
    return lambda total, length: _read(_local(max(length, total)), total, page)


def _h2o_quest(total: int, length: int) -> EvictionPolicy:
    return _read(_h2o(total), max(1, total // 2), QUEST_PAGE)


_H2O = "H2O, arXiv 2306.14048"
_SPARSE = "Sparse Transformer, arXiv 1904.10509, section 4.3"
_STREAMING_LLM = "StreamingLLM, arXiv 2309.17453"
POLICIES: dict[str, NamedPolicy] = {
    policy.name: policy
    for policy in (
        NamedPolicy("full", "full cache", "", lambda total, length: None),
        NamedPolicy("h2o", "H2O", f"{_H2O}, Algorithm 1", _h2o),
        NamedPolicy("local", "local window", f"{_H2O}, section 5", _local),
        NamedPolicy("heavy", "heavy hitters only", f"{_H2O}, Table 9", _heavy),
        NamedPolicy("streaming", "sinks and window", _STREAMING_LLM, _streaming),
        NamedPolicy(
            "streaming-rolling",
            "sinks and window, rolling",
            f"{_STREAMING_LLM}, section 3.2",
            _streaming,
            cache_options={"positions": "rolling"},
        ),
        NamedPolicy("random", "random", "", _random),
        NamedPolicy("strided", "strided", _SPARSE, _sparse(False, False), needs_length=True),
        NamedPolicy("fixed", "fixed columns", _SPARSE, _sparse(True, False), needs_length=True),
        NamedPolicy(
            "strided+h2",
            "strided with heavy hitters",
            f"{_H2O}, Table 2",
            _sparse(False, True),
            needs_length=True,
        ),
        NamedPolicy(
            "fixed+h2",
            "fixed columns with heavy hitters",
            f"{_H2O}, Table 2",
            _sparse(True, True),
            needs_length=True,
        ),
        NamedPolicy("top-k", "Top-K", f"{_H2O}, section 5", _reading(1), needs_length=True),
        NamedPolicy(
            "quest", "Quest", "Quest, arXiv 2406.10774", _reading(QUEST_PAGE), needs_length=True
        ),
        NamedPolicy("h2o+quest", "H2O, read by Quest", "", _h2o_quest),
        NamedPolicy(
            "scissorhands",
            "Scissorhands",
            "Scissorhands, arXiv 2305.17118, Algorithm 2",
            _scissorhands,
            prefills=("streaming",),
        ),
        NamedPolicy(
            "snapkv",
            "SnapKV",
            "SnapKV, arXiv 2404.14469, section 4",
            _snapkv,
            prefills=("one_shot",),
        ),
        NamedPolicy("decay", "decayed sum", "", _variant(score_rule="decay", score_decay=DECAY)),
        NamedPolicy(
            "window",
            "windowed sum",
            "",
            _variant(score_queries=VOTING_QUERIES),
            prefills=("one_shot",),
        ),
        NamedPolicy("mean", "mean weight", "", _variant(score_rule="mean")),
        NamedPolicy("value", "weight times |v|", "", _variant(score_rule="value")),
        NamedPolicy(
            "oracle",
            "full cache's scores",
            "",
            _variant(score_rule="given"),
            needs_oracle=True,
        ),
    )
}
"""The policies that there are, by name."""


def named(name: str) -> NamedPolicy:
    """The policy of this name.

    Raises
    ------
    ValueError
        There is none.
    """
    if name not in POLICIES:
        raise ValueError(f"policy must be one of {', '.join(POLICIES)}, got {name!r}")
    return POLICIES[name]
