"""lm-evaluation-harness on our cache: its Hugging Face model, its requests under a policy.

Importing this registers the model "h2o" with lm-evaluation-harness 0.4 (extra `lm-eval`). Its command
line does not import it, so `python -m h2o_kv.eval.lm_eval_model` is that command line with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from h2o_kv.eval.caches import attention_for, policy_cache, settings
from h2o_kv.eval.data import EvalError
from h2o_kv.eval.scoring import BATCH_TOKENS, Request, scores
from h2o_kv.hf import cache_kwarg

try:
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
except ImportError as error:
    raise ImportError(
        "h2o_kv.eval.lm_eval_model needs lm-evaluation-harness: pip install 'h2o-kv[lm-eval]'"
    ) from error

__all__ = ["H2OLM"]


@register_model("h2o")
class H2OLM(HFLM):  # type: ignore[misc]
    """A causal model of transformers whose requests run under a policy.

    Parameters
    ----------
    pretrained : str or PreTrainedModel
    policy : str
        Name in `h2o_kv.policies`. With "full" all that is computed is computed by HFLM.
    ratio : float
        Slots, as a part of the real tokens of each request: context and continuation, or the prompt and
        the most tokens that may be generated.
    prefill : {"streamed", "one_shot"}
        See `h2o_kv.eval.Setting`.
    batch_tokens : int
        Tokens of a batch of log-likelihoods, padding included; HFLM's batch_size is for texts.
    **options
        Of HFLM.

    Raises
    ------
    EvalError
        There is no such policy or prefill, the ratio is not in (0, 1], or the model is not causal.

    Examples
    --------
    >>> import lm_eval  # doctest: +SKIP
    >>> from h2o_kv.eval.lm_eval_model import H2OLM
    >>> model = H2OLM("path", policy="h2o", ratio=0.2, device="cpu")  # doctest: +SKIP
    >>> lm_eval.simple_evaluate(model=model, tasks=["copa"])  # doctest: +SKIP
    """

    def __init__(
        self,
        pretrained: Any,
        *,
        policy: str = "h2o",
        ratio: float = 0.2,
        prefill: str = "streamed",
        batch_tokens: int = BATCH_TOKENS,
        **options: Any,
    ) -> None:
        [self.setting] = settings([policy], [float(ratio)], [prefill])
        self._batch_tokens = int(batch_tokens)
        super().__init__(pretrained, **options)
        if self.backend != "causal":
            raise EvalError(f"H2OLM: the model must be causal, got {self.backend}")

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        """(log-probability, is greedy) of each (texts, context, continuation); a long context is cut.

        Raises
        ------
        EvalError
            A continuation is longer than `max_length`.
        """
        if not self.setting.evicts:
            with attention_for(self.model, self.setting):
                theirs: list[tuple[float, bool]] = super()._loglikelihood_tokens(
                    requests, disable_tqdm, override_bs
                )
            return theirs
        wanted = [self._request(context, rest) for _, context, rest in requests]
        found: dict[int, tuple[float, bool]] = {}
        with tqdm(
            total=len(wanted),
            disable=disable_tqdm or self.rank != 0,
            desc="Running loglikelihood requests",
        ) as bar:
            for index, one in scores(
                self.model, wanted, self.setting, batch_tokens=self._batch_tokens
            ):
                found[index] = one.log_prob, one.is_greedy
                if requests[index][0] is not None:
                    self.cache_hook.add_partial("loglikelihood", requests[index][0], found[index])
                bar.update()
        return [found[index] for index in range(len(wanted))]

    def _request(self, context: list[int], continuation: list[int]) -> Request:
        # Of which the last token is not fed, as in HFLM.
        room = self.max_length + 1 - len(continuation)
        if room < 1:
            raise EvalError(
                f"H2OLM: a continuation must be <= max_length = {self.max_length} tokens, got "
                f"{len(continuation)}"
            )
        return Request(tuple(context[-room:]), tuple(continuation))

    def _model_generate(
        self, context: Tensor, max_length: int, stop: list[str], **generation_kwargs: Any
    ) -> Tensor:
        """Generate as HFLM does, on caches of the setting.

        Rows whose policies differ in more than their counts are batches of their own.
        """
        new_tokens = max_length - context.shape[1]
        mask: Tensor = generation_kwargs.pop("attention_mask")
        sizes = [length + new_tokens for length in mask.sum(1).tolist()]
        output = context.new_full((len(context), max_length), self.tokenizer.pad_token_id)
        longest = 0
        for rows in self.setting.alike(sizes):
            cache = policy_cache(self.model, [sizes[row] for row in rows], self.setting)
            with attention_for(self.model, self.setting), torch.inference_mode():
                texts: Tensor = super()._model_generate(
                    context[rows],
                    max_length,
                    stop,
                    attention_mask=mask[rows],
                    **generation_kwargs,
                    **{cache_kwarg(self.model): cache},
                )
            longest = max(longest, texts.shape[1])
            output[rows, : texts.shape[1]] = texts
        return output[:, :longest]


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
