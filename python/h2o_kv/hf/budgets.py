"""Budgets that move: a layer that grows, or shrinks at once or a few tokens a step.

What leaves is chosen by the operator alone. A layer whose budget is on the way has two numbers for
each row: `row_budget` is in force, what the operator is given, and `row_target` is where it goes.
Sinks and recent tokens are those of the target from the first step on; the surplus is lowered
through `num_heavy` after each step, and h2o_evict lets the lowest scores go.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from h2o_kv._C import Budget, EvictionPolicy
from h2o_kv.hf.memory import LayerMemory
from h2o_kv.policies import rules_of

__all__ = ["BudgetEvent", "MovableBudget", "given_policies", "requested_budgets"]

_LOGGER = logging.getLogger(__name__)
# The one overload, found once.
_evict = torch.ops.h2o.h2o_evict.default
# Positions are int32.
_MAX_TOKENS = 2**31 - 1


@dataclass(frozen=True)
class BudgetEvent:
    """One call of `H2OCache.set_budget`.

    Attributes
    ----------
    position : int
        Columns that the cache had seen (`get_seq_length`).
    time : float
        Seconds since the epoch.
    old, new : tuple of Budget
        Of each row, before and after.
    max_evictions_per_step : int or None
        None = all that is above the new budget left at once.
    held_at : int or None
        Columns that the cache had seen when every row was within its new budget; None = not yet, or
        another budget came first.
    """

    position: int
    time: float
    old: tuple[Budget, ...]
    new: tuple[Budget, ...]
    max_evictions_per_step: int | None
    held_at: int | None = None

    def log(self) -> None:
        """Tell it to the logger `h2o_kv.hf.budgets`."""
        pace = "at once"
        if self.max_evictions_per_step is not None:
            pace = f"at most {self.max_evictions_per_step} evictions a step"
        _LOGGER.info(
            "budget set after %d tokens, %s: %s -> %s",
            self.position,
            pace,
            _summary(self.old),
            _summary(self.new),
        )


def _summary(budgets: Sequence[Budget]) -> str:
    """As short as it can be said."""
    alike = len(set(budgets)) == 1
    return repr(budgets[0]) if alike else repr(list(budgets))


def given_policies(policy: Any) -> tuple[EvictionPolicy, tuple[EvictionPolicy, ...] | None]:
    """The policy of a cache, and those of its rows where each has its own.

    Parameters
    ----------
    policy : EvictionPolicy, or a sequence of them with one a row
        As H2OCache is given it.

    Returns
    -------
    policy : EvictionPolicy
        The one that is given, or the one with the most slots.
    row_policies : tuple of EvictionPolicy or None

    Raises
    ------
    TypeError, ValueError
        It is no policy, or policies of rows differ in more than their counts.
    """
    if isinstance(policy, EvictionPolicy):
        return policy, None
    if not isinstance(policy, Sequence) or isinstance(policy, str):
        raise TypeError(
            "H2OCache: policy must be an EvictionPolicy, or a sequence with one a row, got "
            f"{policy!r}"
        )
    policies = tuple(policy)
    if not policies:
        raise ValueError("H2OCache: policy must have one entry a row, got none")
    for row, one in enumerate(policies):
        if not isinstance(one, EvictionPolicy):
            raise TypeError(f"H2OCache: policy of row {row} must be an EvictionPolicy, got {one!r}")
        if one.has_ratio:
            raise ValueError(
                f"H2OCache: policy of row {row} must be of counts where rows have policies of their "
                f"own, got {one!r}"
            )
        if _rule(one) != _rule(policies[0]):
            raise ValueError(
                "H2OCache: policies of rows must be alike but for their counts, got "
                f"{policies[0]!r} and {one!r}"
            )
    return max(policies, key=lambda one: one.budget().total), policies


def _rule(policy: EvictionPolicy) -> tuple[Any, ...]:
    """All of a policy of counts but them."""
    return policy.gqa_reduce, rules_of(policy)


def requested_budgets(
    old: Sequence[Budget],
    budget: Any,
    counts: dict[str, int | None],
    policy: EvictionPolicy,
) -> tuple[Budget, ...]:
    """The new budget of each row, from the arguments of `H2OCache.set_budget`.

    Parameters
    ----------
    old : sequence of Budget
        Of each row.
    budget : Budget, EvictionPolicy, sequence of them with one a row, or None
    counts : dict of str to int
        num_sink, num_heavy and num_recent; None = as it is. All are None where `budget` is given.
    policy : EvictionPolicy
        Of the cache.

    Raises
    ------
    TypeError, ValueError
        Something is no budget of the cache.
    """
    name = "H2OCache.set_budget"
    given = {key: count for key, count in counts.items() if count is not None}
    if (budget is None) == (not given):
        raise ValueError(
            f"{name}: either a budget or counts must be given, got "
            + (f"{budget!r} and {given}" if given else "neither")
        )
    if budget is None:
        new = [{**_counts(before), **given} for before in old]
    else:
        each = [budget] * len(old)
        if isinstance(budget, Sequence):
            each = list(budget)
        if len(each) != len(old):
            raise ValueError(f"{name}: budgets must be one a row = {len(old)}, got {len(each)}")
        new = [_counts(_budget(name, one, policy)) for one in each]
    for row in new:
        for key, count in row.items():
            if count < 0:
                raise ValueError(f"{name}: {key} must be >= 0, got {count}")
        if not 1 <= sum(row.values()) <= _MAX_TOKENS:
            raise ValueError(
                f"{name}: num_sink + num_heavy + num_recent must be in 1..{_MAX_TOKENS}, got {row}"
            )
    return tuple(Budget(**row) for row in new)


def _counts(budget: Budget) -> dict[str, int]:
    return dict(zip(("num_sink", "num_heavy", "num_recent"), budget, strict=True))


def _budget(name: str, value: Any, policy: EvictionPolicy) -> Budget:
    if isinstance(value, Budget):
        return value
    if not isinstance(value, EvictionPolicy):
        raise TypeError(f"{name}: budget must be a Budget or an EvictionPolicy, got {value!r}")
    if value.has_ratio:
        raise ValueError(
            f"{name}: budget must be of counts, since ratios are of a prompt, got {value!r}"
        )
    if value.gqa_reduce != policy.gqa_reduce:
        raise ValueError(
            f'{name}: gqa_reduce must be that of the cache = "{policy.gqa_reduce}", got '
            f'"{value.gqa_reduce}"'
        )
    if rules_of(value) != rules_of(policy):
        raise ValueError(
            f"{name}: the rules of a policy must be those of the cache = {rules_of(policy)}, got "
            f"{rules_of(value)}"
        )
    return value.budget()


class MovableBudget(LayerMemory):
    """The memory of a layer whose budget can be set to another one while it runs."""

    @property
    def _order(self) -> dict[str, Any]:
        """What h2o_evict compares, where it is not the score."""
        rules = rules_of(self.settings.policy)
        names = ("score_rule", "pattern_stride", "pattern_columns")
        return {name: rules[name] for name in names if name in rules}

    def _rows_changed(self) -> None:
        super()._rows_changed()
        self._note_arrival(self.columns_seen)

    def make_room(self, budgets: Sequence[Budget]) -> None:
        """Grow the memory for the largest of `budgets`, where it is too small; changes nothing else.

        Raises
        ------
        MemoryError
            There is not so much.
        """
        assert self.capacity is not None
        with torch.inference_mode(False), torch.no_grad():
            self._resize(max(self.capacity, *(budget.total for budget in budgets)))

    def set_budgets(self, budgets: Sequence[Budget], per_step: int | None) -> None:
        """Keep to `budgets`, one a row, from now on; there is room for them.

        Parameters
        ----------
        budgets : sequence of Budget
        per_step : int, optional
            Tokens of a row and KV head that leave after each step, besides those that made room for
            new ones; None = all that are above the budget leave now.
        """
        if self.journal is not None:
            self.journal = self.journal.cleared()
        self.own()
        with torch.inference_mode(False), torch.no_grad():
            kept = zip(self.most_kept(), budgets, strict=True)
            above = [max(0, n - budget.total) for n, budget in kept]
            surplus = above if per_step else [0] * len(above)
            in_force = [
                Budget(num_sink=sink, num_heavy=heavy + more, num_recent=recent)
                for (sink, heavy, recent), more in zip(budgets, surplus, strict=True)
            ]
            row_budget = self._per_row(in_force)
            self.last_evicted = self._evict(row_budget, 0 if per_step else max(above))
            self.budget = max(budgets, key=lambda budget: budget.total)
            self.row_budget = row_budget
            paces = [(per_step or 0) * (more > 0) for more in surplus]
            self._aim(torch.cat([self._per_row(budgets), self._per_row(paces)[:, None]], 1))
            self.held_at = None
            if any(surplus):
                self._resize(max(budget.total for budget in in_force))
            else:
                self._arrive(self.columns_seen)

    def _advance(self, added: Tensor | int, seen: int) -> None:
        """After a step of a layer whose budget moves: bring every row that took part nearer to it.

        Parameters
        ----------
        added : Tensor, [batch] or [1], or int
            Real tokens of each row in this step.
        seen : int
            Columns seen, with those of this step.
        """
        assert self.row_budget is not None
        assert self.row_target is not None
        assert self.last_evicted is not None
        with torch.inference_mode(False), torch.no_grad():
            sink, heavy, recent = self.row_budget.unbind(1)
            nearer = heavy - self.row_target[:, 3] * (added > 0)
            heavy = torch.maximum(nearer, self.row_target[:, 1])
            self.row_budget = torch.stack([sink, heavy, recent], 1)
            evicted = self._evict(self.row_budget, self._pace)
            self.last_evicted = torch.cat([self.last_evicted, evicted], 2)
            # A graph cannot look: what comes next and is not compiled finds out.
            if not torch.compiler.is_compiling():
                self._note_arrival(seen)

    def _note_arrival(self, seen: int) -> None:
        """See whether every row is within the budget that it moves to: then nothing moves any more."""
        if self.row_target is None:
            return
        assert self.row_budget is not None
        if (self.row_budget[:, 1] > self.row_target[:, 1]).any():
            return
        self._arrive(seen)
        if self.layer_idx == self.settings.config.num_hidden_layers - 1:
            _LOGGER.info("budget holds after %d tokens", seen)

    def _arrive(self, seen: int) -> None:
        """Keep to the budgets that rows moved to; memory becomes what they need."""
        assert self.row_target is not None
        rows = self.row_target[:, :3].tolist()
        self._keep_to([Budget(num_sink=s, num_heavy=h, num_recent=r) for s, h, r in rows])
        self._aim(None)
        assert self.budget is not None
        self._resize(self.budget.total)
        if self.held_at is None:
            self.held_at = seen

    def _evict(self, row_budget: Tensor, width: int) -> Tensor:
        """Let go what is above `row_budget`: positions, int32 [batch, num_kv_heads, width]."""
        assert self.keys is not None
        assert self.values is not None
        assert self.scores is not None
        batch, num_kv_heads, _, head_dim = self.keys.shape
        nothing = self.keys.new_empty(batch, num_kv_heads, 0, head_dim)
        evicted: Tensor = _evict(
            self.keys,
            self.values,
            self.scores,
            self.positions,
            nothing,
            nothing,
            self.scores.new_empty(batch, num_kv_heads, 0),
            row_budget.new_empty(batch, 0),
            *self._counts,
            row_budget=row_budget,
            **self._order,
        )
        return evicted[:, :, :width].clone()

    def _copies_of_move(self) -> dict[str, Tensor]:
        """What undoing a step needs beside scores and positions: nothing, unless a budget moves."""
        if self.row_target is None:
            return {}
        names = ("keys", "values", "row_budget", "row_target")
        return {name: getattr(self, name).clone() for name in names}
