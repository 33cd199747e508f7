"""Eviction policies by name, each at the same total number of slots: what comparisons are made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from h2o_kv._C import EvictionPolicy

__all__ = ["DEFAULT_SINKS", "POLICIES", "NamedPolicy", "named"]

DEFAULT_SINKS = 4
"""Sinks of StreamingLLM (arXiv 2309.17453), section 3.2."""


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
        The paper that it is from, and where in it.
    """

    name: str
    title: str
    source: str
    _split: Callable[[int], EvictionPolicy | None]

    def with_slots(self, total: int) -> EvictionPolicy | None:
        """The policy that keeps `total` tokens of each row and KV head; None = it keeps all.

        Raises
        ------
        ValueError
            total is below 1.
        """
        if total < 1:
            raise ValueError(f"NamedPolicy.with_slots: total must be >= 1, got {total}")
        return self._split(total)


def _h2o(total: int) -> EvictionPolicy:
    # Of one slot the window has it: a cache without the newest token is of no use.
    heavy = total // 2
    return EvictionPolicy(num_heavy=heavy, num_recent=total - heavy)


def _streaming(total: int) -> EvictionPolicy:
    sinks = min(DEFAULT_SINKS, total - 1)
    return EvictionPolicy(num_heavy=0, num_recent=total - sinks, num_sink=sinks)


_H2O = "H2O, arXiv 2306.14048"
POLICIES: dict[str, NamedPolicy] = {
    policy.name: policy
    for policy in (
        NamedPolicy("full", "full cache", "", lambda total: None),
        NamedPolicy("h2o", "H2O", f"{_H2O}, Algorithm 1", _h2o),
        NamedPolicy(
            "local",
            "local window",
            f"{_H2O}, section 5",
            lambda total: EvictionPolicy(num_heavy=0, num_recent=total),
        ),
        NamedPolicy(
            "heavy",
            "heavy hitters only",
            f"{_H2O}, Table 9",
            lambda total: EvictionPolicy(num_heavy=total, num_recent=0),
        ),
        NamedPolicy("streaming", "sinks and window", "StreamingLLM, arXiv 2309.17453", _streaming),
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
