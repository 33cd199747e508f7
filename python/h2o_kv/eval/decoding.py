"""Greedy text of a batch under any cache, through `model.generate`; several turns on one cache.

What `generate` appends to a row that has ended is padding to the caches here. The last token of a turn
always joins with the next turn, whether other rows went on or not: so each row is what it is alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from h2o_kv.eval.caches import CacheUse, Setting, attention_for, padded, policy_cache
from h2o_kv.eval.data import EvalError
from h2o_kv.generation import token_ids
from h2o_kv.hf import cache_kwarg

__all__ = ["Conversation", "end_tokens"]


def end_tokens(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Tokens that end a text: those of the model's generation config, and the tokenizer's."""
    configured = token_ids(model.generation_config.eos_token_id)
    return tuple(sorted(configured | token_ids(tokenizer.eos_token_id)))


def _until_text(tokens: list[int], stop: str, tokenizer: Any) -> list[int]:
    """The tokens up to the one that completes `stop`: what follows is padding, if other rows went on."""
    lengths = range(1, len(tokens) + 1)
    ends = (length for length in lengths if stop in tokenizer.decode(tokens[:length]))
    return tokens[: next(ends, len(tokens))]


@dataclass
class _RealTokens:
    """A forward pre-hook that marks the end of a row and what follows it as padding.

    `generate` extends the mask by ones for every row; the model gets this one instead.

    Attributes
    ----------
    ends : Tensor, int64, [end tokens]
    mask : Tensor, int64, [batch, columns]
        Of all columns that were fed, or are to be fed in the next forward.
    ended : Tensor, bool, [batch]
    """

    ends: Tensor
    mask: Tensor
    ended: Tensor
    started: bool = False

    def __call__(self, module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if self.started:
            self.ended |= torch.isin(kwargs["input_ids"][:, -1], self.ends)
            self.mask = torch.cat([self.mask, (~self.ended)[:, None].long()], 1)
        self.started = True
        return args, {**kwargs, "attention_mask": self.mask}


class Conversation:
    """A batch of texts that grow turn by turn on one cache.

    Parameters
    ----------
    model : transformers.PreTrainedModel
    prompts : sequence of sequence of int
        Token ids of the first turn of each row, at least one.
    num_tokens : sequence of int, tokens
        Of each row that the cache may see in all turns, of which budgets are parts.
    setting : Setting
        streamed: every token of every turn joins by
        the paper's step. one_shot: the tokens of a turn attend in full before anything leaves.
    ends : sequence of int
        Tokens that end a turn; they stay in the conversation.
    """

    def __init__(
        self,
        model: Any,
        prompts: Sequence[Sequence[int]],
        num_tokens: Sequence[int],
        setting: Setting,
        *,
        ends: Sequence[int],
    ) -> None:
        if not prompts or not all(prompts):
            raise EvalError("prompts must have at least one token each")
        self._model, self._setting = model, setting
        device = model.device
        self._ends = torch.tensor(list(ends), dtype=torch.long, device=device)
        self._ids = torch.empty(len(prompts), 0, dtype=torch.long, device=device)
        self._mask = torch.empty(len(prompts), 0, dtype=torch.long, device=device)
        self._unfed: list[list[int]] = [[] for _ in prompts]
        self._add(prompts)
        self.cache = policy_cache(model, num_tokens, setting)

    @classmethod
    def after(
        cls,
        model: Any,
        context: Sequence[int],
        cache: Any,
        setting: Setting,
        *,
        ends: Sequence[int],
    ) -> Conversation:
        """One text, on a cache that has seen all of it but its last token."""
        talk = cls(model, [context], [len(context)], setting, ends=ends)
        talk.cache = cache
        return talk

    @torch.inference_mode()
    def generate(
        self, new_tokens: int, *, stop: str | None = None, tokenizer: Any = None
    ) -> list[list[int]]:
        """The next turn of each row, with the token that ends it, of at most `new_tokens` tokens.

        `stop` is a text after which a row ends as well, which needs the tokenizer.
        """
        config = GenerationConfig(
            max_new_tokens=new_tokens,
            do_sample=False,
            stop_strings=None if stop is None else [stop],
            eos_token_id=self._ends.tolist() or None,
            pad_token_id=int(self._ends[0]) if len(self._ends) else 0,
        )
        ended = torch.zeros(len(self._ids), dtype=torch.bool, device=self._ids.device)
        hook = _RealTokens(self._ends, self._mask, ended)
        handle = self._model.register_forward_pre_hook(hook, with_kwargs=True)
        try:
            with attention_for(self._model, self._setting):
                whole = self._model.generate(
                    self._ids,
                    attention_mask=self._mask,
                    generation_config=config,
                    tokenizer=tokenizer,
                    **{cache_kwarg(self._model): self.cache},
                )
        finally:
            handle.remove()
        former, self._ids = self._ids.shape[1], whole
        new = [self._until_end(row) for row in whole[:, former:].tolist()]
        # All but the last column was fed.
        last = [int(len(row) == whole.shape[1] - former) for row in new]
        self._unfed = [[] if real else row[-1:] for row, real in zip(new, last, strict=True)]
        column = torch.tensor(last, device=whole.device)[:, None]
        self._mask = torch.cat([hook.mask, column], 1)
        return new if stop is None else [_until_text(row, stop, tokenizer) for row in new]

    def say(self, turns: Sequence[Sequence[int]]) -> None:
        """Append what the other side says: token ids of each row, at least one."""
        self._add([[*end, *turn] for end, turn in zip(self._unfed, turns, strict=True)])

    def uses(self) -> list[CacheUse]:
        """What the cache held of each row. The last token of a turn is not in it yet."""
        if self._setting.evicts:
            return CacheUse.of(self.cache)
        seen = self._mask[:, : self.cache.get_seq_length()].sum(1).tolist()
        return [CacheUse(number, number, 0) for number in seen]

    def _add(self, rows: Sequence[Sequence[int]]) -> None:
        ids, mask = padded(rows, self._ids.device)
        self._ids, self._mask = torch.cat([self._ids, ids], 1), torch.cat([self._mask, mask], 1)

    def _until_end(self, tokens: list[int]) -> list[int]:
        ends = set(self._ends.tolist())
        stop = next((place for place, token in enumerate(tokens) if token in ends), len(tokens))
        return tokens[: stop + 1]
