"""Timed generation and scoring: the same tokens as model.generate, exact losses, honest numbers."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from h2o_kv import EvictionPolicy, H2OCache, generation
from h2o_kv.generation import (
    CacheSession,
    CacheSpec,
    GenerationRun,
    SamplingOptions,
    TokenAgreement,
    compare_tokens,
    generate,
    percentile,
    resolve_policy,
    score_continuation,
)
from hf_models import EOS, VOCABULARY, full_cache_generate, kept, tiny_model, tokens
from hf_models import generate as hf_generate

FULL = CacheSpec(label="full")
SMALL = EvictionPolicy(num_heavy=5, num_recent=4, num_sink=1)
H2O = CacheSpec(label="h2o", policy=SMALL)
LARGE = CacheSpec(label="large", policy=EvictionPolicy(num_heavy=100, num_recent=1))
MODELS = ("llama", "opt", "gpt_neox")


class Letters:
    """Stands for a tokenizer: one letter a token."""

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(chr(0x100 + i) for i in ids)


TOKENIZER: Any = Letters()


def prompt(length: int = 30, seed: int = 0) -> list[int]:
    return [int(i) for i in tokens(1, length, seed)[0]]


def run(model: Any, spec: CacheSpec, *, new: int = 20, **options: Any) -> list[int]:
    (result,) = generate(
        model, TOKENIZER, prompt(), [spec], max_new_tokens=new, ignore_eos=True, **options
    )
    return list(result.token_ids)


# ---- Generation.


@pytest.mark.parametrize("family", MODELS)
def test_tokens_are_those_of_model_generate(family: str) -> None:
    model = tiny_model(family, dtype=torch.float64)
    start = prompt(seed=2)
    ids = torch.tensor([start])
    full, h2o, large = generate(
        model, TOKENIZER, start, [FULL, H2O, LARGE], max_new_tokens=20, ignore_eos=True
    )
    # min_new_tokens of hf_generate forbids EOS, so this prompt is one that leads to none.
    assert EOS not in full.token_ids + h2o.token_ids
    assert list(full.token_ids) == full_cache_generate(model, ids, new=20)[0].tolist()
    expected = hf_generate(model, ids, H2OCache(model.config, SMALL), new=20)[0].tolist()
    assert list(h2o.token_ids) == expected
    assert large.token_ids == full.token_ids != h2o.token_ids


def test_a_streaming_prefill_in_several_calls_keeps_what_one_call_keeps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_model("llama")
    spec = CacheSpec(label="h2o", policy=SMALL, prefill="streaming", prefill_chunk=4)
    seen = []
    monkeypatch.setattr(generation, "_STREAMING_CALL_TOKENS", 10)  # two whole chunks
    original = model.forward

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        seen.append(kwargs["input_ids"].shape[1])
        return original(*args, **kwargs)

    session = CacheSession(model, spec)
    monkeypatch.setattr(model, "forward", forward)
    session.prefill(prompt(30))
    assert seen == [8, 8, 8, 6]
    one_call = H2OCache(model.config, SMALL, prefill="streaming", prefill_chunk=4)
    hf_generate(model, torch.tensor([prompt(30)]), one_call, new=1)
    assert kept(session.cache, 0) == kept(one_call, 0)
    one_shot = CacheSession(model, H2O)
    one_shot.prefill(prompt(30))
    assert kept(one_shot.cache, 0) != kept(one_call, 0)


def test_ratios_are_of_the_whole_prompt_in_a_streaming_prefill() -> None:
    model = tiny_model("llama")
    policy = EvictionPolicy(heavy_ratio=0.1, recent_ratio=0.2)
    spec = CacheSpec(label="h2o", policy=policy, prefill="streaming", prefill_chunk=4)
    (result,) = generate(model, TOKENIZER, prompt(50), [spec], max_new_tokens=2)
    assert result.tokens_kept == (15, 15)


def test_the_attention_is_put_back() -> None:
    model = tiny_model("llama", attention="eager")
    generate(model, TOKENIZER, prompt(), [FULL, H2O], max_new_tokens=2)
    assert model.config._attn_implementation == "eager"
    score_continuation(model, prompt(), [5, 6], [H2O])
    assert model.config._attn_implementation == "eager"


def test_generation_stops_at_the_end_of_sequence_unless_told_otherwise() -> None:
    model = tiny_model("llama")
    expected = run(model, FULL)
    stop = next(i for i, token in enumerate(expected) if token not in expected[:i] and i > 3)
    model.generation_config.eos_token_id = [0, expected[stop]]
    arguments: Any = (model, TOKENIZER, prompt(), [FULL])
    (stopped,) = generate(*arguments, max_new_tokens=20)
    assert list(stopped.token_ids) == expected[: stop + 1]
    assert stopped.finish_reason == "eos"
    (through,) = generate(*arguments, max_new_tokens=20, ignore_eos=True)
    assert list(through.token_ids) == expected
    assert through.finish_reason == "length"
    # Reached with the last token allowed, the end is still an end.
    (both,) = generate(*arguments, max_new_tokens=stop + 1)
    assert both.finish_reason == "eos"


def test_a_run_that_has_ended_waits_for_the_others() -> None:
    model = tiny_model("llama")
    full, h2o = run(model, FULL), run(model, H2O)
    stop = next(i for i, token in enumerate(full) if token not in h2o)
    model.generation_config.eos_token_id = full[stop]
    lengths: list[list[int]] = []
    results = generate(
        model,
        TOKENIZER,
        prompt(),
        [FULL, H2O],
        max_new_tokens=20,
        on_token=lambda runs: lengths.append([len(r.token_ids) for r in runs]),
    )
    assert [len(r.token_ids) for r in results] == [stop + 1, 20]
    assert list(results[1].token_ids) == h2o
    assert lengths == [[min(i, stop + 1), i] for i in range(1, 21)]
    assert len(results[0].step_ms) == stop


def test_progress_of_a_prefill_ends_at_one_for_each_cache() -> None:
    model = tiny_model("llama")
    streaming = CacheSpec(label="s", policy=SMALL, prefill="streaming", prefill_chunk=300)
    seen: dict[str, list[float]] = {"full": [], "s": []}
    generate(
        model,
        TOKENIZER,
        prompt(601),
        [FULL, streaming],
        max_new_tokens=2,
        on_prefill=lambda spec, done: seen[spec.label].append(done),
    )
    assert seen["full"] == [0.5, 1.0]
    assert seen["s"] == pytest.approx([i / 6 for i in range(1, 7)])
    assert not any(module._forward_hooks for module in model.modules())


# ---- Choice of the token.


def test_greedy_takes_the_first_of_equals() -> None:
    sampler = generation._Sampler(SamplingOptions())
    assert sampler.choose(torch.tensor([0.0, 2.0, 2.0, 1.0])) == 1


def test_sampling_follows_the_probabilities_inside_top_p() -> None:
    probabilities = torch.tensor([0.1, 0.5, 0.15, 0.25])
    draws = 4000

    def share(top_p: float, temperature: float = 1.0) -> list[float]:
        sampler = generation._Sampler(SamplingOptions(temperature=temperature, top_p=top_p))
        chosen = [sampler.choose(probabilities.log()) for _ in range(draws)]
        return [chosen.count(i) / draws for i in range(4)]

    assert share(1.0) == pytest.approx(probabilities.tolist(), abs=0.04)
    # 0.5 and 0.25 reach 0.75; the third begins where the two others end.
    assert share(0.75) == pytest.approx([0, 2 / 3, 0, 1 / 3], abs=0.04)
    assert share(0.76) == pytest.approx([0, 5 / 9, 1.5 / 9, 2.5 / 9], abs=0.04)
    assert share(0.01) == [0, 1, 0, 0]
    squares = probabilities**2 / (probabilities**2).sum()
    assert share(1.0, temperature=0.5) == pytest.approx(squares.tolist(), abs=0.04)


@pytest.mark.parametrize(
    ("temperature", "top_p"), [(1e-38, 1.0), (1e-320, 1.0), (1.0, 1e-46), (1e-38, 1e-320)]
)
def test_the_smallest_temperature_and_top_p_are_greedy(temperature: float, top_p: float) -> None:
    sampler = generation._Sampler(SamplingOptions(temperature=temperature, top_p=top_p))
    logits = torch.tensor([0.0, 9.0, -torch.inf, 8.99, -9.0])
    assert [sampler.choose(logits) for _ in range(5)] == [1] * 5


def test_a_seed_gives_every_run_the_same_draws() -> None:
    model = tiny_model("llama")
    sampling = SamplingOptions(temperature=1.5, seed=5)
    one, two = generate(
        model, TOKENIZER, prompt(), [LARGE, LARGE], max_new_tokens=15, sampling=sampling
    )
    assert one.token_ids == two.token_ids
    assert list(one.token_ids) != run(model, LARGE, new=15)


# ---- Scoring.


@pytest.mark.parametrize("family", MODELS)
def test_scores_are_the_losses_of_one_forward_over_everything(family: str) -> None:
    model = tiny_model(family, dtype=torch.float64)
    start, continuation = prompt(), prompt(12, seed=1)
    counts: list[int] = []
    full, large, small = score_continuation(
        model, start, continuation, [FULL, LARGE, H2O], on_token=counts.append
    )
    with torch.no_grad():
        logits = model(torch.tensor([start + continuation])).logits[0]
    losses = -logits.log_softmax(-1)
    expected = [float(losses[len(start) - 1 + i, t]) for i, t in enumerate(continuation)]
    assert full.nll == pytest.approx(expected, rel=1e-6)
    assert large.nll == pytest.approx(expected, rel=1e-6)
    assert small.nll[0] == pytest.approx(expected[0], rel=1e-6)  # exact attention in the prefill
    assert small.nll[1:] != pytest.approx(expected[1:], rel=1e-2)
    assert full.mean_nll == pytest.approx(sum(expected) / 12)
    assert counts == list(range(1, 13))
    assert [len(s.step_ms) for s in (full, large, small)] == [11] * 3
    assert full.tokens_seen == len(start) + 11


def test_losses_do_not_depend_on_the_caches_that_take_turns() -> None:
    model = tiny_model("llama")
    alone = score_continuation(model, prompt(), prompt(9, seed=1), [H2O])[0]
    among = score_continuation(model, prompt(), prompt(9, seed=1), [FULL, H2O, LARGE])[1]
    assert alone.nll == among.nll


# ---- Numbers.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_bytes_are_those_of_the_tensors(dtype: torch.dtype) -> None:
    model = tiny_model("llama", dtype=dtype)
    full, h2o = generate(
        model, TOKENIZER, prompt(30), [FULL, H2O], max_new_tokens=5, ignore_eos=True
    )
    # 2 layers, 2 KV heads, head_dim 8; scores are float64 for a float64 cache.
    size, score = dtype.itemsize, 8 if dtype == torch.float64 else 4
    assert full.kv_bytes == full.full_kv_bytes == h2o.full_kv_bytes == 2 * 2 * 34 * 2 * 8 * size
    assert h2o.kv_bytes == 2 * 2 * 10 * (2 * 8 * size + score + 4)
    assert (full.tokens_kept, h2o.tokens_kept) == ((34, 34), (10, 10))
    assert full.tokens_seen == h2o.tokens_seen == 34


def test_tokens_kept_are_slots_in_use_not_slots() -> None:
    model = tiny_model("llama")
    (result,) = generate(model, TOKENIZER, prompt(8), [LARGE], max_new_tokens=3, ignore_eos=True)
    assert result.tokens_kept == (10, 10)


def test_statistics_of_a_run() -> None:
    model = tiny_model("llama")
    (result,) = generate(model, TOKENIZER, prompt(), [H2O], max_new_tokens=9, ignore_eos=True)
    steps = torch.tensor(result.step_ms, dtype=torch.float64)
    assert len(steps) == 8
    assert result.median_ms == pytest.approx(float(steps.quantile(0.5)))
    values = result.as_dict()
    assert values["p10_ms"] == pytest.approx(float(steps.quantile(0.1)))
    assert values["p90_ms"] == pytest.approx(float(steps.quantile(0.9)))
    assert result.tokens_per_s == pytest.approx(1000 / result.median_ms)
    assert result.text == Letters().decode(list(result.token_ids))
    (single,) = generate(model, TOKENIZER, prompt(), [H2O], max_new_tokens=1)
    assert single.as_dict()["median_ms"] is None is single.tokens_per_s


@pytest.mark.parametrize(
    ("a", "b", "compared", "first"),
    [
        ([], [], 0, None),
        ([1, 2], [1, 2], 2, None),
        ([1, 2], [1, 3], 2, 1),
        ([1, 2], [1, 2, 3], 3, 2),
        ([4], [5, 4], 2, 0),
        ([], [1], 1, 0),
    ],
)
def test_agreement(a: list[int], b: list[int], compared: int, first: int | None) -> None:
    prefix = compared if first is None else first
    expected = TokenAgreement(compared=compared, equal_prefix=prefix, first_difference=first)
    assert compare_tokens(a, b) == compare_tokens(b, a) == expected


def test_percentile_interpolates_as_quantile_does() -> None:
    values = torch.rand(23, dtype=torch.float64)
    for percent in (0, 10, 37.5, 50, 90, 100):
        expected = float(values.quantile(percent / 100))
        assert percentile(values.tolist(), percent) == pytest.approx(expected)
    with pytest.raises(ValueError, match="percentile: values must not be empty"):
        percentile([], 50)


def test_a_policy_of_counts_resolves_to_itself() -> None:
    assert resolve_policy(SMALL, 1000) is SMALL
    ratios = EvictionPolicy(heavy_ratio=0.29, num_recent=3, num_sink=2, gqa_reduce="max")
    counts = EvictionPolicy(num_heavy=29, num_recent=3, num_sink=2, gqa_reduce="max")
    assert resolve_policy(ratios, 100) == counts


# ---- What is refused.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefill": "both"}, "CacheSpec: prefill must be one of \"one_shot\", .*, got 'both'"),
        ({"prefill_chunk": 0}, "CacheSpec: prefill_chunk must be >= 1, got 0"),
    ],
)
def test_a_spec_is_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CacheSpec(label="h2o", **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "temperature must be finite and >= 0, got -0.1"),
        ({"seed": -1}, r"seed must be >= 0 and < 2\*\*64, got -1"),
        ({"seed": 2**64}, r"seed must be >= 0 and < 2\*\*64, got 18446744073709551616"),
        ({"temperature": float("inf")}, "temperature must be finite and >= 0, got inf"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0.0"),
        ({"top_p": 1.1}, r"top_p must be in \(0, 1\], got 1.1"),
    ],
)
def test_sampling_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"SamplingOptions: {message}"):
        SamplingOptions(**options)


def test_empty_inputs_and_wrong_order_are_refused() -> None:
    model = tiny_model("llama")
    with pytest.raises(ValueError, match="max_new_tokens must be >= 1, got 0"):
        GenerationRun(model, TOKENIZER, prompt(), FULL, max_new_tokens=0)
    with pytest.raises(ValueError, match="prompt_ids must have at least one token, got 0"):
        generate(model, TOKENIZER, [], [FULL])
    with pytest.raises(ValueError, match="continuation_ids must have at least one token, got 0"):
        score_continuation(model, prompt(), [], [FULL])
    session = CacheSession(model, FULL)
    with pytest.raises(RuntimeError, match="prefill must be called before feed"):
        session.feed(3)
    session.prefill(prompt())
    with pytest.raises(RuntimeError, match="prefill must be called once"):
        session.prefill(prompt())
    assert max(prompt()) < VOCABULARY
