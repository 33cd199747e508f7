"""A long context under a cache, and what may follow it, each from a copy of that cache."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from h2o_kv.eval.caches import CacheUse, Setting, attention_for, policy_cache
from h2o_kv.eval.decoding import Conversation
from h2o_kv.eval.scoring import Rows, token_log_probs

__all__ = ["Prefix"]


class Prefix:
    """A context whose last token is fed with what follows it.

    Parameters
    ----------
    model : transformers.PreTrainedModel
    context : sequence of int
        Token ids, at least two.
    num_tokens : int, tokens
        Of the whole example, of which the budget is a part.
    longest : int, tokens
        The most that follow.
    setting : Setting
        one_shot: all of the context but its last token attends in full before anything leaves.
    """

    @torch.inference_mode()
    def __init__(
        self, model: Any, context: Sequence[int], num_tokens: int, longest: int, setting: Setting
    ) -> None:
        self._model, self._setting, self._context = model, setting, list(context)
        options: dict[str, Any] = {}
        if setting.prefill == "one_shot":
            # Recorded forwards past the prompt are steps, one token after the other.
            options = {"prompt_length": len(context) - 1, "max_rollback": longest}
        self._cache: Any = policy_cache(model, [num_tokens], setting, **options)
        with attention_for(model, setting):
            Rows(model, self._cache).forward([self._context[:-1]], 1)

    def use(self) -> CacheUse:
        """What the cache holds of the context but its last token."""
        if self._setting.evicts:
            return CacheUse.of(self._cache)[0]
        seen = self._cache.get_seq_length()
        return CacheUse(seen, seen, 0)

    def share_kept(self, tokens: Sequence[int]) -> float:
        """Part of these tokens of the context that layers and KV heads still hold, their mean."""
        if not self._setting.evicts:
            return 1.0
        wanted = torch.tensor(list(tokens), device=self._model.device)
        held = [
            (layer.positions[0, :, :, None] == wanted).any(1).double().mean()
            for layer in self._cache.layers
        ]
        return float(torch.stack(held).mean())

    @torch.inference_mode()
    def log_probs(self, continuations: Sequence[Sequence[int]]) -> list[float]:
        """Sum of the log-probabilities of each continuation, nats."""
        cache = self._copies(len(continuations))
        seen = torch.ones(
            len(continuations), len(self._context) - 1, dtype=torch.long, device=self._model.device
        )
        keep = max(map(len, continuations))
        rows = [[self._context[-1], *tokens[:-1]] for tokens in continuations]
        with attention_for(self._model, self._setting):
            logits: Tensor = Rows(self._model, cache, seen).forward(rows, keep)
        sums = []
        for row, tokens in zip(logits, continuations, strict=True):
            target = torch.tensor(list(tokens), device=row.device)
            sums.append(float(token_log_probs(row[keep - len(tokens) :], target).sum()))
        return sums

    def generate(self, new_tokens: int, ends: Sequence[int]) -> list[int]:
        """Greedy text after the context."""
        talk = Conversation.after(
            self._model, self._context, self._copies(1), self._setting, ends=ends
        )
        return talk.generate(new_tokens)[0]

    def _copies(self, number: int) -> Any:
        if self._setting.evicts:
            return self._cache.fork(number)
        cache = copy.deepcopy(self._cache)
        cache.batch_repeat_interleave(number)
        return cache
