"""Which cache an evaluation runs under, at a part of each example's tokens, and what it held."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache

from h2o_kv._C import EvictionPolicy
from h2o_kv.eval.data import EvalError
from h2o_kv.hf import H2OCache, enable_alibi
from h2o_kv.hf.settings import ALIBI_MODELS, ATTENTION_NAME
from h2o_kv.policies import count_of, named, rules_of

__all__ = [
    "PREFILLS",
    "CacheUse",
    "Setting",
    "attention_for",
    "padded",
    "policy_cache",
    "settings",
]

PREFILLS = ("streamed", "one_shot")
"""How the tokens of an example join an evicting cache; see `Setting`."""

_FULL = "full"
# Of H2OCache.
_OPTIONS: dict[str, dict[str, Any]] = {
    "streamed": {"prefill": "streaming", "prefill_chunk": 1},
    "one_shot": {"prefill": "one_shot"},
}


@dataclass(frozen=True)
class Setting:
    """A policy at a budget.

    Attributes
    ----------
    policy : str
        Name in `h2o_kv.policies`.
    ratio : float
        Slots of a row, as a part of the real tokens of its example.
    prefill : {"streamed", "one_shot", "full"}
        streamed: every token joins by the paper's step, one after the other, so that eviction
        happens within the example. one_shot: the context attends in full, then the policy chooses from
        it, and the tokens after it are streamed. full: of a policy that evicts nothing.
    """

    policy: str
    ratio: float
    prefill: str

    @property
    def evicts(self) -> bool:
        """Whether there is a budget at all."""
        return self.prefill != _FULL

    @property
    def needs_oracle(self) -> bool:
        """Whether the policy must know the scores of the full cache."""
        return self.evicts and named(self.policy).needs_oracle

    def slots(self, num_tokens: int) -> int:
        """Slots of an example with so many real tokens: max(1, floor(ratio * num_tokens + 1e-9))."""
        return count_of(self.ratio, num_tokens)

    def policies(self, num_tokens: Iterable[int]) -> list[EvictionPolicy]:
        """The policy of each example."""
        policy = named(self.policy)
        found = [policy.with_slots(self.slots(number), length=number) for number in num_tokens]
        return [one for one in found if one is not None]

    def alike(self, num_tokens: Sequence[int]) -> list[list[int]]:
        """Indices of the examples that one batch may hold: their policies differ in counts alone."""
        if not self.evicts:
            return [list(range(len(num_tokens)))]
        groups: dict[str, list[int]] = {}
        for index, policy in enumerate(self.policies(num_tokens)):
            groups.setdefault(repr(sorted(rules_of(policy).items())), []).append(index)
        return list(groups.values())


def settings(
    policies: Iterable[str], ratios: Iterable[float], prefills: Iterable[str]
) -> list[Setting]:
    """All of these policies at all of these budgets, in order; the full cache stands first, once.

    Raises
    ------
    EvalError
        There is no such policy or prefill, a ratio is not in (0, 1], or a policy has none of the
        prefills.
    """
    ratios, prefills = list(ratios), list(prefills)
    for ratio in ratios:
        if not 0 < ratio <= 1:
            raise EvalError(f"budgets must be parts in (0, 1], got {ratio:g}")
    for prefill in prefills:
        if prefill not in PREFILLS:
            raise EvalError(f"prefill must be one of {', '.join(PREFILLS)}, got {prefill!r}")
    found: list[Setting] = []
    for name in policies:
        try:
            policy = named(name)
        except ValueError as error:
            raise EvalError(str(error)) from error
        if policy.with_slots(1, length=1) is None:
            found.insert(0, Setting(name, 1.0, _FULL))
            continue
        possible = [
            prefill for prefill in prefills if _OPTIONS[prefill]["prefill"] in policy.prefills
        ]
        if not possible:
            has = [
                prefill for prefill in PREFILLS if _OPTIONS[prefill]["prefill"] in policy.prefills
            ]
            raise EvalError(
                f"prefill must have {' or '.join(has)} for the policy {name}, got "
                f"{', '.join(prefills)}"
            )
        found += [Setting(name, ratio, prefill) for prefill in possible for ratio in ratios]
    return list(dict.fromkeys(found))


def policy_cache(
    model: Any, num_tokens: Sequence[int], setting: Setting, **options: Any
) -> H2OCache | DynamicCache:
    """An empty cache for rows whose budgets are parts of so many tokens.

    Parameters
    ----------
    model : transformers.PreTrainedModel
    num_tokens : sequence of int
        Of the whole example of each row.
    setting : Setting
    **options
        Of H2OCache, besides those of the setting; a full cache takes none.

    Raises
    ------
    EvalError
        The policy needs to know the scores of the full cache, and they are not given.
    """
    if not setting.evicts:
        return DynamicCache()
    policy = named(setting.policy)
    if policy.needs_oracle and "given_scores" not in options:
        raise EvalError(
            f"policy must be one that does not need the whole text beforehand, got {policy.name}"
        )
    options = {**_OPTIONS[setting.prefill], **policy.cache_options, **options}
    return H2OCache(model, setting.policies(num_tokens), **options)


@dataclass(frozen=True)
class CacheUse:
    """What a cache held of one row when it had seen all of it.

    Attributes
    ----------
    seen : int, tokens
    kept : int, tokens
        In the layer and KV head that kept the most.
    evicted : int, tokens
        seen - kept. 0: the budget was never reached, and the row says nothing about the policy.
    sinks, heavy, recent : int, slots
        Of the policy; 0 where nothing is evicted.
    """

    seen: int
    kept: int
    evicted: int
    sinks: int = 0
    heavy: int = 0
    recent: int = 0

    def as_dict(self) -> dict[str, int]:
        """As a line of results has it."""
        return asdict(self)

    @classmethod
    def of(cls, cache: H2OCache) -> list[CacheUse]:
        """Of each row of a cache that has seen tokens."""
        budgets = cache.budgets
        assert budgets is not None
        kept = [
            max(row) for row in zip(*(n.amax(1).tolist() for n in cache.tokens_kept()), strict=True)
        ]
        seen = cache.layers[0].tokens_seen
        assert seen is not None
        return [
            cls(number, most, number - most, *budget)
            for number, most, budget in zip(seen.tolist(), kept, budgets, strict=True)
        ]


@contextmanager
def attention_for(model: Any, setting: Setting) -> Iterator[None]:
    """Run the model under the attention that the setting needs; afterwards it is as it was.

    Under the full cache it is transformers' default for the model. BLOOM and MPT stay enabled for our
    cache, which changes nothing under others.
    """
    if model.config.model_type in ALIBI_MODELS:
        if setting.evicts:
            enable_alibi(model)  # With another cache their own attention runs, bit for bit.
        yield
        return
    former = model.config._attn_implementation
    wanted = former
    if setting.evicts:
        wanted = ATTENTION_NAME
    elif former == ATTENTION_NAME:
        wanted = "sdpa"
    if wanted != former:
        model.set_attn_implementation(wanted)
    try:
        yield
    finally:
        if wanted != former:
            model.set_attn_implementation(former)


def padded(
    rows: Sequence[Sequence[int]], device: torch.device, side: str = "left"
) -> tuple[Tensor, Tensor]:
    """Ids and mask (1 = real), int64 [rows, longest], of token ids padded on the "left" or "right"."""
    each = [torch.tensor(list(row), dtype=torch.long) for row in rows]
    ids, mask = (
        pad_sequence(tensors, batch_first=True, padding_side=side)
        for tensors in (each, [torch.ones_like(row) for row in each])
    )
    return ids.to(device), mask.to(device)
