"""Teacher forcing: a text through the full cache and through evicting caches, side by side.

All read the same tokens, whatever they would have said themselves. Segment by segment the evicting
caches go first, so that the teacher, who comes after, knows what each has dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from h2o_kv import Budget, H2OCache
from h2o_kv.diagnostics.departures import Departures
from h2o_kv.diagnostics.dropped import DroppedMass
from h2o_kv.diagnostics.freeze import lowest_heavy
from h2o_kv.diagnostics.steps import ObservedStep, observed_steps
from h2o_kv.diagnostics.teacher import AttentionObserver, Teacher
from h2o_kv.generation import CacheSpec, attention_restored, resolve_policy
from h2o_kv.hf import cache_kwarg
from h2o_kv.hf.settings import ATTENTION_NAME

__all__ = ["PolicyReplay", "Predictions", "Replay", "StepObserver", "replay"]

StepObserver = Callable[[ObservedStep], None]
"""Called with every step of every layer of one evicting cache."""


@dataclass(frozen=True, eq=False)
class Predictions:
    """What was predicted after each step from `Replay.first_prediction` on.

    Attributes
    ----------
    top : Tensor, int64, [steps]
        Most likely next token.
    nll : Tensor, float64, [steps]
        Negative log-likelihood, nats, of the token that comes next in the text.
    kl : Tensor, float64, [steps]
        KL divergence from the full cache's distribution, KL(full || this), nats.
    """

    top: Tensor
    nll: Tensor
    kl: Tensor


@dataclass(frozen=True, eq=False)
class PolicyReplay:
    """One evicting cache over the text.

    Attributes
    ----------
    spec : CacheSpec
        With a policy of counts.
    departures : Departures
    dropped : Tensor, float32, [num_layers, num_kv_heads, group_size, steps]
        m_t^drop at every step; see dropped.py.
    predictions : Predictions
    sampled_steps : tuple of int
        Steps after which `lowest_heavy` was taken.
    lowest_heavy : Tensor, float64, [sampled steps, num_layers, num_kv_heads]
        Lowest score of a heavy hitter; nan where there is none.
    first_single : int
        Steps from this one on took one token each.
    cache : H2OCache
        As it is at the end.
    """

    spec: CacheSpec
    departures: Departures
    dropped: Tensor
    predictions: Predictions
    sampled_steps: tuple[int, ...]
    lowest_heavy: Tensor
    first_single: int
    cache: H2OCache

    @property
    def budget(self) -> Budget:
        """Slots of each row and KV head."""
        assert self.spec.policy is not None
        return self.spec.policy.budget()


@dataclass(frozen=True, eq=False)
class Replay:
    """A text under the full cache and under evicting ones.

    Attributes
    ----------
    steps : int
        Tokens that passed the models: all of the text but its last.
    first_prediction : int
        First step whose prediction was kept: that of the prompt's last token.
    full : Predictions
        Of the full cache; its kl is 0.
    policies : dict of str to PolicyReplay
        By label.
    """

    steps: int
    first_prediction: int
    full: Predictions
    policies: dict[str, PolicyReplay]


def replay(
    model: Any,
    ids: Sequence[int],
    specs: Sequence[CacheSpec],
    *,
    prompt_tokens: int = 1,
    observers: Sequence[AttentionObserver] = (),
    on_step: Mapping[str, StepObserver] | None = None,
    layers: Mapping[str, frozenset[int] | None] | None = None,
    segment: int = 64,
    progress: Callable[[float], None] | None = None,
) -> Replay:
    """Run a text through the full cache and through evicting ones, teacher forced.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        As `Teacher` takes; left under the attention that it came with.
    ids : sequence of int
        The text, at least two tokens. The last one is only predicted.
    specs : sequence of CacheSpec
        Evicting caches with different labels. Their prefill is that of the prompt; later tokens join
        one by one.
    prompt_tokens : int
        Tokens of the prompt, >= 1 and below the number of ids; ratios are of them.
    observers : sequence of AttentionObserver
        They see the full cache's attention.
    on_step : mapping of str to callable, optional
        By label: sees every step of that cache, which then runs one step a forward.
    layers : mapping of str to frozenset of int, optional
        By label: the layers that `on_step` sees; all where left out.
    segment : int
        Tokens after which the caches take turns, >= 1.
    progress : callable, optional
        Called with the fraction that is done.

    Returns
    -------
    Replay

    Raises
    ------
    ValueError
        An argument is out of its range, or a cache does not evict, or reads less than it keeps.
    NotImplementedError
        The model's attention cannot be observed.
    """
    steps = len(ids) - 1
    if not 1 <= prompt_tokens <= steps:
        raise ValueError(
            "replay: prompt_tokens must be >= 1 and below the number of ids, got "
            f"{prompt_tokens} and {len(ids)} ids"
        )
    labels = [spec.label for spec in specs]
    if len(set(labels)) != len(labels):
        raise ValueError(f"replay: labels of specs must differ, got {labels}")
    if segment < 1:
        raise ValueError(f"replay: segment must be >= 1, got {segment}")
    text = torch.tensor(ids, device=model.device)
    seen = on_step or {}
    runs = [_Run(model, spec, prompt_tokens, steps, seen.get(spec.label)) for spec in specs]
    teacher = Teacher(model, [*observers, *(run.dropped for run in runs)])
    full = _Predicted()
    with attention_restored(model), ExitStack() as stack:
        for run in runs:
            if run.on_step is not None:
                chosen = (layers or {}).get(run.spec.label)
                stack.enter_context(observed_steps(run.cache, run.on_step, chosen))
        for start, stop in _segments(prompt_tokens, steps, segment):
            wanted = 1 if stop == prompt_tokens else stop - start
            logits = [run.feed(text, start, stop, wanted) for run in runs]
            right = teacher.feed(text[start:stop], keep_logits=wanted)
            following = text[stop + 1 - wanted : stop + 1]
            log_p = full.add(right, following, None)
            for run, own in zip(runs, logits, strict=True):
                run.predicted.add(own, following, log_p)
            if progress is not None:
                progress(stop / steps)
    return Replay(
        steps=steps,
        first_prediction=prompt_tokens - 1,
        full=full.result(),
        policies={run.spec.label: run.result() for run in runs},
    )


def _segments(prompt_tokens: int, steps: int, segment: int) -> Iterator[tuple[int, int]]:
    """The prompt, then segments of what follows."""
    yield 0, prompt_tokens
    for start in range(prompt_tokens, steps, segment):
        yield start, min(start + segment, steps)


@dataclass
class _Predicted:
    top: list[Tensor] = field(default_factory=list)
    nll: list[Tensor] = field(default_factory=list)
    kl: list[Tensor] = field(default_factory=list)

    def add(self, logits: Tensor, following: Tensor, full: Tensor | None) -> Tensor:
        """Note predictions [steps, vocabulary] beside those of the full cache; returns their log."""
        log_q = torch.log_softmax(logits.double(), -1)
        log_p = log_q if full is None else full
        self.top.append(logits.argmax(-1).cpu())
        self.nll.append(-log_q.gather(1, following[:, None])[:, 0].cpu())
        # Where p is 0, so is the term, although log p is -inf.
        terms = torch.where(log_p > -torch.inf, log_p.exp() * (log_p - log_q), 0.0)
        self.kl.append(terms.sum(-1).cpu())
        return log_q

    def result(self) -> Predictions:
        return Predictions(*(torch.cat(values) for values in (self.top, self.nll, self.kl)))


class _Run:
    """One evicting cache on its way through the text."""

    def __init__(
        self, model: Any, spec: CacheSpec, prompt_tokens: int, steps: int, on_step: Any
    ) -> None:
        if spec.policy is None:
            raise ValueError(f"replay: a cache must evict, got {spec.label!r} without a policy")
        policy = resolve_policy(spec.policy, prompt_tokens)
        # What a step reads would not be what has not left.
        if policy.arguments["read_slots"] > 0:
            raise ValueError(
                f"replay: a cache must read all that it keeps (read_slots 0), got {policy!r}"
            )
        self.spec = CacheSpec(
            label=spec.label,
            policy=policy,
            prefill=spec.prefill,
            prefill_chunk=spec.prefill_chunk,
        )
        self.on_step = on_step
        self.cache = H2OCache(
            model.config, policy, prefill=spec.prefill, prefill_chunk=spec.prefill_chunk
        )
        self.predicted = _Predicted()
        self._model = model
        self._prompt_tokens = prompt_tokens
        config = model.config.get_text_config(decoder=True)
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self._departures = Departures(config.num_hidden_layers, heads, steps)
        self.dropped = DroppedMass(self._departures)
        self._sampled_steps: list[int] = []
        self._lowest: list[Tensor] = []

    @torch.inference_mode()
    def feed(self, text: Tensor, start: int, stop: int, wanted: int) -> Tensor:
        """Run the tokens start .. stop - 1; the logits of the last `wanted`."""
        if self._model.config._attn_implementation != ATTENTION_NAME:
            self._model.set_attn_implementation(ATTENTION_NAME)
        kept = []
        for first, last, chunk in self._forwards(start, stop):
            rows = last - max(first, stop - wanted)
            output = self._model(
                input_ids=text[None, first:last],
                use_cache=True,
                logits_to_keep=max(1, rows),
                **{cache_kwarg(self._model): self.cache},
            )
            if rows > 0:
                kept.append(output.logits[0])
            for layer in self.cache.layers:
                assert layer.last_evicted is not None
                self._departures.record(layer.layer_idx, layer.last_evicted[0], first, chunk)
        self._sample(stop - 1)
        return torch.cat(kept)

    def _forwards(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """First token, last + 1, and how many join together, of each forward."""
        streaming = self.spec.prefill == "streaming"
        chunk = 1
        if start < self._prompt_tokens:
            chunk = self.spec.prefill_chunk if streaming else stop - start
        # Many tokens join one by one in a forward only where the cache streams in chunks of one.
        together = streaming and self.on_step is None and self.spec.prefill_chunk == chunk
        width = stop - start if together else chunk
        for first in range(start, stop, width):
            last = min(first + width, stop)
            yield first, last, min(chunk, last - first)

    def _sample(self, step: int) -> None:
        lowest = []
        for layer in self.cache.layers:
            assert layer.positions is not None
            assert layer.scores is not None
            budget = layer.budget_in_force(0)
            lowest.append(lowest_heavy(layer.positions[0], layer.scores[0], budget, step).cpu())
        self._sampled_steps.append(step)
        self._lowest.append(torch.stack(lowest))

    def result(self) -> PolicyReplay:
        one_by_one = self.spec.prefill == "streaming" and self.spec.prefill_chunk == 1
        return PolicyReplay(
            spec=self.spec,
            departures=self._departures,
            dropped=self.dropped.mass,
            predictions=self.predicted.result(),
            sampled_steps=tuple(self._sampled_steps),
            lowest_heavy=torch.stack(self._lowest),
            first_single=0 if one_by_one else self._prompt_tokens,
            cache=self.cache,
        )
