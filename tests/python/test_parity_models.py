"""Parity modes in unmodified transformers models: every layer does what the lists say."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import parity_lists as lists
from h2o_kv import parity
from h2o_kv.hf import cache_kwarg
from hf_models import NO_END, forward, recorded, set_attention, tiny_model, tokens

PROMPT, LENGTH = 20, 30
MASKING = {
    "utils_hh": (parity.UtilsHH(0.2, 0.15), lambda rows: lists.utils_hh(rows, PROMPT, 4, 3)),
    "utils_hh_recent_zero": (
        parity.UtilsHH(0.2, 0.0),
        lambda rows: lists.utils_hh(rows, PROMPT, 4, 0),
    ),
    "lm_eval_local": (parity.LmEvalLocal(0.2, 0.1), lambda rows: lists.lm_eval_local(rows, 6, 3)),
    "lm_eval_oracle": (
        parity.LmEvalOracle(0.2, 0.1),
        lambda rows: lists.lm_eval_oracle(rows, 6, 3),
    ),
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 4},
    "llama_gqa": {"num_key_value_heads": 2},
    "opt": {},
    "gpt_neox": {},
}


def model_of(name: str, **options: Any) -> Any:
    options = {"dtype": torch.float64, **options}
    return tiny_model(name.split("_gqa")[0], **MODELS[name], **options)


@dataclass
class Call:
    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    output: Tensor


@contextmanager
def recorded_calls() -> Iterator[list[Call]]:
    """Every call of the attention function "h2o_parity", in order."""
    calls: list[Call] = []
    original = ALL_ATTENTION_FUNCTIONS[parity.PARITY_ATTENTION]

    def record(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kw: Any) -> Any:
        result = original(module, query, key, value, mask, **kw)
        calls.append(Call(query, key, value, kw["scaling"], result[0]))
        return result

    AttentionInterface.register(parity.PARITY_ATTENTION, record)
    try:
        yield calls
    finally:
        AttentionInterface.register(parity.PARITY_ATTENTION, original)


# ---- Modes that mask


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mode_name", MASKING)
def test_every_layer_attends_as_the_lists_do(mode_name: str, name: str) -> None:
    mode, replay = MASKING[mode_name]
    model = model_of(name)
    with recorded_calls() as calls:
        logits = mode.score_forward(model, tokens(1, LENGTH), prompt_lengths=PROMPT)
    assert logits.shape == (1, LENGTH, model.config.vocab_size)
    assert len(calls) == 2
    for call in calls:
        group = call.query.shape[1] // call.key.shape[1]
        assert group == (2 if name == "llama_gqa" else 1)
        for head in range(4):
            key, value = call.key[0, head // group], call.value[0, head // group]
            rows = (call.query[0, head] @ key.T * call.scale).tolist()
            expected = lists.attended_output(replay(rows), value)
            torch.testing.assert_close(call.output[0, :, head], expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("mode_name", MASKING)
def test_grouped_queries_are_a_model_whose_kv_heads_are_repeated(mode_name: str) -> None:
    mode, _ = MASKING[mode_name]
    grouped, repeated = model_of("llama_gqa"), model_of("llama")
    weights = grouped.state_dict()
    head_dim = 8
    for name, weight in weights.items():
        if "k_proj" in name or "v_proj" in name:
            heads = weight.unflatten(0, (-1, head_dim)).repeat_interleave(2, 0)
            weights[name] = heads.flatten(0, 1)
    repeated.load_state_dict(weights)
    one, other = (
        mode.score_forward(model, tokens(1, LENGTH), prompt_lengths=PROMPT)
        for model in (grouped, repeated)
    )
    torch.testing.assert_close(one, other, atol=1e-9, rtol=0)


@pytest.mark.parametrize("name", MODELS)
def test_utils_hh_one_forward_is_the_prompt_and_token_after_token(name: str) -> None:
    mode, model, ids = parity.UtilsHH(0.2, 0.15), model_of(name), tokens(1, LENGTH)
    at_once = mode.score_forward(model, ids, prompt_lengths=PROMPT)
    with mode.running(model) as options:
        assert options == {}
        cache = DynamicCache(config=model.config)
        parts = [forward(model, ids[:, :PROMPT], cache)]
        parts += [forward(model, ids[:, t : t + 1], cache) for t in range(PROMPT, LENGTH)]
    assert cache.get_seq_length() == LENGTH  # Nothing is dropped.
    torch.testing.assert_close(torch.cat(parts, 1), at_once, atol=1e-9, rtol=0)


@pytest.mark.parametrize("name", ["llama", "opt", "gpt_neox"])
def test_utils_hh_generates_what_it_scores_best(name: str) -> None:
    """One context serves one text after another; a batch is its rows."""
    mode, model = parity.UtilsHH(0.2, 0.15), model_of(name)
    prompts = [tokens(1, PROMPT, seed=1), tokens(1, 12, seed=2), tokens(2, PROMPT, seed=3)]
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 10, **NO_END}
    with mode.running(model) as extra:
        texts = [
            model.generate(ids, attention_mask=torch.ones_like(ids), **options, **extra)
            for ids in prompts
        ]
    differ = 0
    for ids, text in zip(prompts, texts, strict=True):
        logits = mode.score_forward(model, text, prompt_lengths=ids.shape[1])
        assert torch.equal(logits[:, ids.shape[1] - 1 : -1].argmax(-1), text[:, ids.shape[1] :])
        with torch.no_grad():
            full = model(text).logits
        differ += int((logits - full).abs().amax() > 1e-3)
    assert differ == len(prompts)


@pytest.mark.parametrize("mode_name", MASKING)
def test_a_batch_of_one_length_is_its_rows(mode_name: str) -> None:
    mode, _ = MASKING[mode_name]
    model, ids = model_of("opt"), tokens(3, LENGTH)
    alone = mode.score_forward(model, ids, prompt_lengths=PROMPT)
    with mode.running(model, PROMPT), torch.no_grad():
        together = model(ids, attention_mask=torch.ones_like(ids)).logits
    torch.testing.assert_close(together, alone, atol=1e-9, rtol=0)


# ---- Modes that drop


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "mode", [parity.RealDrop(4, 3), parity.FlexGen(0.2), parity.Fixed(3, 3, num_sink=2)]
)
def test_h2o_cache_does_what_the_replay_does(mode: Any, name: str) -> None:
    model, ids = model_of(name), tokens(1, LENGTH)
    with recorded() as recording:
        mode.score_forward(model, ids, prompt_lengths=PROMPT)
    assert len(recording.calls) == 2
    for calls in recording.calls.values():
        assert len(calls) == 1 + LENGTH - PROMPT
        query, key, value = (
            torch.cat([getattr(call, each)[0] for call in calls], 1)
            for each in ("query", "key", "value")
        )
        group = len(query) // len(key)
        logits = query @ key.repeat_interleave(group, 0).transpose(-1, -2) * calls[0].scale
        trace = mode.replay(logits, PROMPT, group_size=group)
        if group == 1 and isinstance(mode, parity.RealDrop):
            lists.check(trace, logits, lambda rows: lists.drop(rows, PROMPT, 4, 3))
        outputs = trace.weights @ value.repeat_interleave(group, 0)
        last = -1
        for call in calls:
            rows = call.query.shape[2]
            first, last = last + 1, last + rows
            torch.testing.assert_close(
                call.output[0].transpose(0, 1), outputs[:, first : last + 1], atol=1e-9, rtol=0
            )
            for head in range(len(key)):
                held = call.positions[0, head]
                kept = {int(position) for position in held if position >= 0}
                assert kept == lists.positions(trace.kept[head, last])
                scores = dict(zip(held.tolist(), call.scores[0, head].tolist(), strict=True))
                row = trace.scores[head, last : last + 1]
                lists.assert_by_position(row, [scores], 1e-9)


@pytest.mark.parametrize("name", ["llama_gqa", "opt"])
def test_flexgen_generates_with_its_budget(name: str) -> None:
    mode, model, ids = parity.FlexGen(0.2), model_of(name), tokens(1, PROMPT)
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 10, **NO_END}
    with mode.running(model, PROMPT) as extra:
        text = model.generate(ids, attention_mask=torch.ones_like(ids), **options, **extra)
    cache = extra[cache_kwarg(model)]
    assert cache.tokens_kept()[0].tolist() == [[7] * (2 if name == "llama_gqa" else 4)]
    assert [tuple(budget) for budget in cache.budgets] == [(0, 3, 4)]
    logits = mode.score_forward(model, text, prompt_lengths=PROMPT)
    assert torch.equal(logits[:, PROMPT - 1 : -1].argmax(-1), text[:, PROMPT:])
    # Without the turn, 4 heavy and 3 recent, it is another text or other logits.
    other = parity.RealDrop(4, 3).score_forward(model, text, prompt_lengths=PROMPT)
    torch.testing.assert_close(other[:, : PROMPT + 1], logits[:, : PROMPT + 1])
    assert (other - logits).abs().amax() > 1e-3


@pytest.mark.parametrize("name", ["llama_gqa", "gpt_neox"])
def test_rolling_differs_once_tokens_have_left(name: str) -> None:
    model, ids = model_of(name, dtype=torch.float32), tokens(1, LENGTH)
    plain, rolling = (
        kind(4, 3).score_forward(model, ids, prompt_lengths=PROMPT)
        for kind in (parity.RealDrop, parity.RealDropRolling)
    )
    torch.testing.assert_close(plain[:, :PROMPT], rolling[:, :PROMPT], atol=1e-3, rtol=0)
    assert (plain - rolling)[:, PROMPT:].abs().amax() > 1e-2
    with parity.RealDropRolling(4, 3).running(model) as options:
        assert options[cache_kwarg(model)].positions == "rolling"


# ---- All


def modes(tenths: float, length: int) -> list[parity.ParityMode]:
    return [parity.from_ratios(name, tenths, tenths, length) for name in parity.MODES]


@pytest.mark.parametrize("name", ["llama_gqa", "gpt_neox"])
def test_padding_and_the_other_rows_change_nothing(name: str) -> None:
    model = model_of(name, dtype=torch.float32)
    lengths, prompts = [30, 21, 26], [20, 16, 14]
    for left in (True, False):
        ids, mask = tokens(3, 30), torch.zeros(3, 30, dtype=torch.long)
        for row, length in enumerate(lengths):
            mask[row, -length if left else 0 : None if left else length] = 1
        for mode in modes(0.2, 20):
            logits = mode.score_forward(model, ids, mask, prompt_lengths=prompts)
            assert not logits[mask == 0].any()
            for row in range(3):
                alone = ids[row][mask[row] == 1][None]
                expected = mode.score_forward(model, alone, prompt_lengths=prompts[row])
                assert torch.equal(logits[row][mask[row] == 1], expected[0])


@pytest.mark.parametrize("name", ["llama_gqa", "opt"])
def test_with_room_for_all_every_mode_is_full_attention(name: str) -> None:
    model, ids = model_of(name, dtype=torch.float32), tokens(1, LENGTH)
    set_attention(model, "sdpa")
    with torch.no_grad():
        full = model(ids).logits
    for mode in modes(1.0, LENGTH):
        if mode.name == "flexgen" or (mode.name == "real_drop_rolling" and name == "opt"):
            continue  # 2k - 1 slots are at most the prompt; OPT has no rotation.
        logits = mode.score_forward(model, ids, prompt_lengths=PROMPT)
        tolerance = 2e-3 if mode.name == "real_drop_rolling" else 1e-4
        torch.testing.assert_close(logits, full, atol=tolerance, rtol=0)
        assert model.config._attn_implementation == "sdpa"


def test_the_prompt_is_dense_where_a_script_prefills_at_once() -> None:
    model, ids = model_of("llama", dtype=torch.float32), tokens(1, LENGTH)
    set_attention(model, "sdpa")
    with torch.no_grad():
        full = model(ids).logits[:, :PROMPT]
    dense = {"fixed", "real_drop", "real_drop_rolling", "flexgen", "utils_hh"}
    for mode in modes(0.2, PROMPT):
        logits = mode.score_forward(model, ids, prompt_lengths=PROMPT)[:, :PROMPT]
        assert bool((logits - full).abs().amax() < 1e-3) == (mode.name in dense), mode.name


@pytest.mark.parametrize("mode", modes(0.2, PROMPT), ids=lambda mode: mode.name)
def test_bfloat16(mode: parity.ParityMode) -> None:
    model = model_of("llama", dtype=torch.bfloat16)
    logits = mode.score_forward(model, tokens(1, LENGTH), prompt_lengths=PROMPT)
    assert logits.dtype == torch.bfloat16
    assert bool(logits.isfinite().all())


def test_the_model_is_left_as_it_was() -> None:
    model = model_of("llama")
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    for mode in modes(0.2, PROMPT):
        with pytest.raises(ZeroDivisionError), mode.running(model, PROMPT):
            raise ZeroDivisionError
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    assert not model._forward_hooks
    assert model.config._attn_implementation == "h2o"


# ---- The documentation


def test_the_example_of_the_documentation_runs() -> None:
    text = (Path(__file__).parents[2] / "docs/parity.md").read_text(encoding="utf-8")
    example = text.partition("```python\n")[2].partition("```")[0]
    model, ids = model_of("llama_gqa", dtype=torch.float32), tokens(1, 80)
    logits = torch.randn(2, 80, 80, dtype=torch.float64)
    names: dict[str, Any] = {"model": model, "input_ids": ids, "logits": logits}
    exec(example, names)
    assert names["trace"].attended[:, 64:].sum(-1).tolist() == [[12] * 16] * 2
    assert names["text"].shape[1] in range(65, 85)
    assert int(names["options"][cache_kwarg(model)].tokens_kept()[0].max()) == 12
    assert names["scored"].shape == (1, 80, model.config.vocab_size)


def test_the_documentation_names_every_mode() -> None:
    text = (Path(__file__).parents[2] / "docs/parity.md").read_text(encoding="utf-8")
    for name, mode in parity.MODES.items():
        assert f"| `{name}`, `{mode.__name__}(" in text


# ---- Errors


def run_in(mode: parity.ParityMode, *forwards: int, prompt_len: int | None = None) -> None:
    """One cache, forwards of so many tokens."""
    model = model_of("llama")
    with mode.running(model, prompt_len) as options:
        options = options or {cache_kwarg(model): DynamicCache(config=model.config)}
        start = 0
        for num in forwards:
            with torch.no_grad():
                model(tokens(1, LENGTH)[:, start : start + num], **options)
            start += num


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: run_in(parity.LmEvalLocal(), 20, 1),
            "lm_eval_local: a forward must be a whole example, got 1 tokens after 20",
        ),
        (
            lambda: run_in(parity.UtilsHH(), 12, prompt_len=20),
            "utils_hh: the first forward must be the whole prompt of 20 tokens, got 12",
        ),
        (
            lambda: run_in(parity.FlexGen(0.2), 12, prompt_len=20),
            "flexgen: the first forward must be the prompt of 20 tokens, got 12",
        ),
        (lambda: run_in(parity.FlexGen(0.2), 12), "flexgen: prompt_len must be given"),
    ],
)
def test_forwards_that_do_not_fit(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_utils_hh_refuses_tokens_that_do_not_follow() -> None:
    model, ids = model_of("llama"), tokens(1, LENGTH)
    with parity.UtilsHH().running(model), torch.no_grad():
        cache = DynamicCache(config=model.config)
        forward(model, ids[:, :12], cache)
        forward(model, ids[:, 12:14], cache)
        cache.crop(-1)
        with pytest.raises(ValueError, match="must follow the 14 that were seen, got 1 after 13"):
            forward(model, ids[:, 13:14], cache)


def test_padding_is_refused_in_a_masked_forward() -> None:
    model, ids = model_of("llama"), tokens(2, LENGTH)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    message = "lm_eval_oracle: attention_mask must hide later tokens and nothing else"
    with (
        parity.LmEvalOracle().running(model),
        torch.no_grad(),
        pytest.raises(ValueError, match=message),
    ):
        model(ids, attention_mask=mask)


def test_attention_is_refused_outside_and_with_what_it_does_not_do() -> None:
    model, ids = model_of("llama"), tokens(1, LENGTH)
    model.set_attn_implementation(parity.PARITY_ATTENTION)
    with pytest.raises(RuntimeError, match='must run inside "with mode.running.* got LlamaAtt'):
        model(ids)
    with parity.LmEvalLocal().running(model):
        with pytest.raises(NotImplementedError, match='"h2o_parity" does not support softcap'):
            model(ids, softcap=2.0)
        with (
            pytest.raises(RuntimeError, match="utils_hh: the model must run in one mode at a time"),
            parity.UtilsHH().running(model),
        ):
            pass
        model.train()
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.1
        with pytest.raises(
            RuntimeError, match="lm_eval_local: attention dropout must be 0, got 0.1"
        ):
            model(ids)


def test_models_with_an_attention_of_their_own_are_refused() -> None:
    model = tiny_model("bloom")
    with (
        pytest.raises(ValueError, match="utils_hh: the model must call .* functions, got bloom"),
        parity.UtilsHH().running(model),
    ):
        pass


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((tokens(1, 8)[0],), {}, r"utils_hh: input_ids must be \[batch, seq_len\], got \[8\]"),
        (
            (tokens(1, 8), torch.ones(1, 7)),
            {},
            r"must be \[batch, seq_len\] = \[1, 8\], got \[1, 7",
        ),
        ((tokens(1, 8), torch.zeros(1, 8)), {}, "must leave a token in each row, got none in some"),
        ((tokens(1, 8),), {}, "utils_hh: prompt_lengths must be given, got None"),
        ((tokens(1, 8),), {"prompt_lengths": [2, 3]}, "must have one entry a row = 1, got 2"),
        (
            (tokens(2, 8), torch.tensor([[1] * 8, [0] * 3 + [1] * 5])),
            {"prompt_lengths": 6},
            r"prompt_lengths must be in 1\.\.5 \(real tokens\) in row 1, got 6",
        ),
    ],
)
def test_score_forward_says_what_must_be(
    arguments: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        parity.UtilsHH().score_forward(model_of("llama"), *arguments, **options)
