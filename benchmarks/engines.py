"""Engines that run token by token beside our caches: kvpress and OpenVINO GenAI."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers import __version__ as transformers_version

from h2o_kv.hf import cache_kwarg


class EngineUnavailable(RuntimeError):
    """The engine cannot run here; the message is one line."""


def need(package: str, name: str) -> None:
    """Raise EngineUnavailable where a package is not installed."""
    if importlib.util.find_spec(package) is None:
        raise EngineUnavailable(f"{name} is left out: it is not installed")


class KVPressSession:
    """A sequence under kvpress, as `h2o_kv.generation.CacheSession` has one under a cache.

    ObservedAttentionPress, which kvpress relates to H2O, cuts the prompt to the budget, then every step
    back to it. It needs eager attention, weighs a step by that step's attention alone, and keeps no
    recent window.

    Raises
    ------
    EngineUnavailable
        kvpress is not installed, or its hooks do not fit the transformers that is: those of 0.5 read
        two arguments that attention modules no longer get since transformers 5.3.
    """

    def __init__(self, model: Any, prompt_tokens: int, budget: int) -> None:
        need("kvpress", "kvpress")
        if tuple(map(int, transformers_version.split(".")[:2])) >= (5, 3):
            raise EngineUnavailable(
                f"kvpress is left out: it needs transformers below 5.3, got {transformers_version}"
            )
        from kvpress import DecodingPress, ObservedAttentionPress, PrefillDecodingPress

        self._model = model
        self._press = PrefillDecodingPress(
            ObservedAttentionPress(1 - budget / prompt_tokens),
            DecodingPress(ObservedAttentionPress(), compression_interval=1, target_size=budget),
        )
        self._cache = DynamicCache()
        self.tokens_seen = 0
        self.prefill_s = 0.0
        self.step_ms: list[float] = []

    @property
    def tokens_kept(self) -> int:
        """Of the first layer."""
        return int(self._cache.layers[0].keys.shape[2])

    def prefill(self, prompt_ids: Sequence[int]) -> Tensor:
        """Run the prompt; the logits of the token after it."""
        logits, self.prefill_s = self._call(prompt_ids)
        return logits

    def feed(self, token_id: int) -> Tensor:
        """Run one token; the logits of the next."""
        logits, seconds = self._call([token_id])
        self.step_ms.append(1000 * seconds)
        return logits

    @torch.inference_mode()
    def _call(self, token_ids: Sequence[int]) -> tuple[Tensor, float]:
        if self._model.config._attn_implementation != "eager":
            self._model.set_attn_implementation("eager")
        positions = torch.arange(self.tokens_seen, self.tokens_seen + len(token_ids))
        arguments = {cache_kwarg(self._model): self._cache, "cache_position": positions}
        with self._press(self._model):
            start = time.perf_counter()
            output = self._model(
                torch.tensor([list(token_ids)]),
                position_ids=positions[None],
                use_cache=True,
                logits_to_keep=1,
                **arguments,
            )
            seconds = time.perf_counter() - start
        self.tokens_seen += len(token_ids)
        return output.logits[0, -1], seconds


class OpenVINOSession:
    """A sequence in OpenVINO GenAI's continuous batching, advanced one token at a time.

    It chooses its tokens itself, greedily.

    Parameters
    ----------
    gguf : str
        The model's file.
    prompt_tokens, new_tokens, threads : int
    budget : int, optional
        Slots of its cache eviction, whole blocks of 32; None is its full cache.
    precision : str, optional
        "f32" or "bf16": what it computes in; None leaves the choice to it.
    """

    BLOCK = 32

    @classmethod
    def slots(cls, tokens: float) -> int:
        """The budget that is nearest to a number of tokens."""
        return max(4 * cls.BLOCK, round(tokens / cls.BLOCK) * cls.BLOCK)

    def __init__(
        self,
        gguf: str,
        prompt_tokens: int,
        new_tokens: int,
        threads: int,
        budget: int | None,
        precision: str | None = None,
    ) -> None:
        need("openvino_genai", "OpenVINO GenAI")
        import openvino_genai as genai

        scheduler = genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False
        scheduler.dynamic_split_fuse = False
        scheduler.max_num_seqs = 1
        scheduler.max_num_batched_tokens = prompt_tokens + 1  # the prompt is one step
        scheduler.cache_size = 1  # GiB
        if budget is not None:
            scheduler.use_cache_eviction = True
            scheduler.cache_eviction_config = genai.CacheEvictionConfig(
                self.BLOCK,
                max(self.BLOCK, budget // 2 // self.BLOCK * self.BLOCK),
                budget,
                genai.AggregationMode.SUM,
            )
        properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads}
        if precision is not None:
            properties["INFERENCE_PRECISION_HINT"] = precision
        self._pipeline = genai.ContinuousBatchingPipeline(
            gguf, scheduler, "CPU", properties, {}, {}
        )
        self._generation = genai.GenerationConfig()
        self._generation.max_new_tokens = new_tokens
        self._generation.ignore_eos = True
        self._generation.do_sample = False
        self._handle: Any = None
        self.prefill_s = 0.0

    def prefill(self, prompt_ids: Sequence[int]) -> None:
        """Run the prompt."""
        import numpy
        import openvino

        ids = openvino.Tensor(numpy.array([prompt_ids], dtype=numpy.int64))
        self._handle = self._pipeline.add_request(0, ids, self._generation)
        self.prefill_s = self.step() / 1000

    def step(self) -> float:
        """Run one token; the milliseconds it took."""
        start = time.perf_counter()
        self._pipeline.step()
        return 1000 * (time.perf_counter() - start)

    @property
    def generated(self) -> int:
        """New tokens so far."""
        return sum(len(output.generated_ids) for output in self._handle.read_all())
