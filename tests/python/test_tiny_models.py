"""The tiny trained models of tests/models are what other tests take them for."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

MODELS = Path(__file__).parents[1] / "models"
NAMES = ("tiny_opt", "tiny_gpt_neox")
MODEL_TYPES = {"tiny_opt": "opt", "tiny_gpt_neox": "gpt_neox"}

# Bounds with slack. Measured on the passage: 3.27 and 2.95 nats per token (random weights 6.3), the
# least peaked layer 0.70 and 0.95 (random 0.31), the least heavy 0.68 and 0.77 (random 0.25), and
# 0.40 and 0.075 on the first position in the head that uses it most (random 0.004).
MAX_NATS = 3.7
MIN_TOP_SHARE = {"tiny_opt": 0.6, "tiny_gpt_neox": 0.85}
MIN_HEAVY_SHARE = {"tiny_opt": 0.55, "tiny_gpt_neox": 0.6}
MIN_FIRST_SHARE = {"tiny_opt": 0.2, "tiny_gpt_neox": 0.04}

# Hamlet, act 3, scene 1: a play that is not in the text the models were trained on.
PASSAGE = """HAMLET:
To be, or not to be: that is the question:
Whether 'tis nobler in the mind to suffer
The slings and arrows of outrageous fortune,
Or to take arms against a sea of troubles,
And by opposing end them? To die: to sleep;
No more; and by a sleep to say we end
The heart-ache and the thousand natural shocks
That flesh is heir to, 'tis a consummation
Devoutly to be wish'd. To die, to sleep;
To sleep: perchance to dream: ay, there's the rub;
For in that sleep of death what dreams may come
When we have shuffled off this mortal coil,
Must give us pause: there's the respect
That makes calamity of so long life;
For who would bear the whips and scorns of time,
The oppressor's wrong, the proud man's contumely,
"""


def load(name: str) -> Any:
    """The model in float32 with eager attention, which returns its weights."""
    model = AutoModelForCausalLM.from_pretrained(
        MODELS / name, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    )
    return model.eval()


def untrained(model: Any) -> Any:
    """The same architecture with random weights."""
    return AutoModelForCausalLM.from_config(model.config, attn_implementation="eager").eval()


def load_tokenizer(name: str) -> Any:
    return AutoTokenizer.from_pretrained(MODELS / name, local_files_only=True)


def ids_of(name: str, text: str) -> Tensor:
    """Token ids [1, seq_len], opened by <s>."""
    return torch.tensor([load_tokenizer(name)(text)["input_ids"]])


@torch.no_grad()
def nats_per_token(model: Any, ids: Tensor) -> float:
    return float(model(input_ids=ids, labels=ids).loss)


@torch.no_grad()
def attention_weights(model: Any, ids: Tensor) -> Tensor:
    """Weights [num_layers, num_q_heads, num_queries, seq_len] of the second half of the queries."""
    attentions = model(input_ids=ids, output_attentions=True).attentions
    return torch.cat(attentions)[:, :, ids.shape[1] // 2 :]


def top_share(weights: Tensor) -> list[float]:
    """Mass in the heaviest fifth of the positions that a query sees, a mean for each layer."""
    num_queries, seq_len = weights.shape[2:]
    shares = [
        weights[:, :, row, :]
        .topk(math.ceil(0.2 * (seq_len - num_queries + row + 1)))
        .values.sum(-1)
        for row in range(num_queries)
    ]
    return torch.stack(shares).mean(dim=(0, 2)).tolist()


def heavy_share(weights: Tensor) -> list[float]:
    """Of the mass on the first half of the keys, that on the heaviest fifth of them, by layer."""
    mass = weights[..., : weights.shape[-1] // 2].sum(dim=2)
    heavy = mass.topk(math.ceil(0.2 * mass.shape[-1])).values.sum(-1)
    return (heavy / mass.sum(-1)).mean(dim=1).tolist()


@pytest.mark.parametrize("name", NAMES)
def test_every_file_is_smaller_than_a_megabyte(name: str) -> None:
    sizes = {file.name: file.stat().st_size for file in (MODELS / name).iterdir()}
    wanted = {"README.md", "config.json", "model.safetensors", "tokenizer.json"}
    assert wanted <= sizes.keys()
    assert max(sizes.values()) < 1_000_000


@pytest.mark.parametrize("name", NAMES)
def test_models_open_as_their_family_in_float32(name: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(MODELS / name, local_files_only=True)
    assert model.config.model_type == MODEL_TYPES[name]
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.config.max_position_embeddings >= 512


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("text", [PASSAGE, "", "  two spaces\n\ttab", "Grüße, 東京 🎭"])
def test_any_text_survives_encoding_and_decoding(name: str, text: str) -> None:
    tokenizer = load_tokenizer(name)
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.pad_token_id not in ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


@pytest.mark.parametrize("name", NAMES)
def test_text_of_an_unseen_play_is_predicted_far_better_than_by_chance(name: str) -> None:
    model, ids = load(name), ids_of(name, PASSAGE)
    by_chance = math.log(model.config.vocab_size)
    assert nats_per_token(untrained(model), ids) > by_chance - 0.3
    assert nats_per_token(model, ids) < MAX_NATS


@pytest.mark.parametrize("name", NAMES)
def test_attention_is_peaked_in_every_layer(name: str) -> None:
    model, ids = load(name), ids_of(name, PASSAGE)
    weights = attention_weights(model, ids)
    torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:3]))
    assert min(top_share(weights)) > MIN_TOP_SHARE[name]
    assert max(top_share(attention_weights(untrained(model), ids))) < MIN_TOP_SHARE[name]


@pytest.mark.parametrize("name", NAMES)
def test_a_fifth_of_the_keys_are_heavy_hitters_for_all_later_queries(name: str) -> None:
    model, ids = load(name), ids_of(name, PASSAGE)
    assert min(heavy_share(attention_weights(model, ids))) > MIN_HEAVY_SHARE[name]
    assert max(heavy_share(attention_weights(untrained(model), ids))) < MIN_HEAVY_SHARE[name]


@pytest.mark.parametrize("name", NAMES)
def test_some_head_has_a_sink_on_the_first_token(name: str) -> None:
    model, ids = load(name), ids_of(name, PASSAGE)
    first_share = attention_weights(model, ids)[..., 0].mean(dim=2)  # [num_layers, num_q_heads]
    assert first_share.max() > MIN_FIRST_SHARE[name]
    random_share = attention_weights(untrained(model), ids)[..., 0].mean(dim=2)
    assert random_share.max() < MIN_FIRST_SHARE[name]


@pytest.mark.parametrize("name", NAMES)
def test_left_padding_does_not_change_what_is_generated(name: str) -> None:
    tokenizer, model = load_tokenizer(name), load(name)
    prompts = ["KING RICHARD:\nWhat say'st thou, ", "To be"]
    options = dict(max_new_tokens=24, do_sample=False)
    batch = tokenizer(prompts, padding=True, return_tensors="pt", return_token_type_ids=False)
    assert batch["attention_mask"][1, 0] == 0
    together = model.generate(**batch, **options)[:, batch["input_ids"].shape[1] :]
    for row, prompt in zip(together, prompts, strict=True):
        ids = ids_of(name, prompt)
        alone = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        assert row.tolist() == alone[0, ids.shape[1] :].tolist()
