"""Trained OPT and GPT-NeoX: heavy hitters and sinks, which random weights do not have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from h2o_kv import EvictionPolicy, H2OCache
from hf_models import check_against_reference, full_cache_generate, generate, recorded

MODELS = Path(__file__).parents[1] / "models"
PROMPT = """KING RICHARD:
Give me another horse: bind up my wounds.
Have mercy, Jesu! Soft! I did but dream.
O coward conscience, how dost thou afflict me!
The lights burn blue. It is now dead midnight.
"""


@pytest.fixture(params=["tiny_opt", "tiny_gpt_neox"])
def folder(request: pytest.FixtureRequest) -> Path:
    return MODELS / request.param


def load(folder: Path, dtype: torch.dtype) -> tuple[Any, Tensor]:
    """The model under "h2o" and the prompt's token ids."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="h2o")
    ids: Tensor = AutoTokenizer.from_pretrained(folder)(PROMPT, return_tensors="pt").input_ids
    return model.eval(), ids


def test_with_an_ample_budget_tokens_equal_the_full_cache(folder: Path) -> None:
    model, ids = load(folder, torch.float32)
    cache = H2OCache(model.config, EvictionPolicy(num_heavy=200, num_recent=200))
    expected = full_cache_generate(model, ids, new=60)
    assert generate(model, ids, cache, new=60).tolist() == expected.tolist()
    assert len(set(expected[0].tolist())) > 10


@pytest.mark.parametrize("prefill", ["one_shot", "streaming"])
def test_every_layer_equals_the_reference_at_every_step(folder: Path, prefill: str) -> None:
    model, ids = load(folder, torch.float64)
    policy = EvictionPolicy(num_heavy=12, num_recent=12)
    cache = H2OCache(model.config, policy, prefill=prefill, prefill_chunk=16)
    with recorded() as recording:
        generate(model, ids, cache, new=24)
    evictions = check_against_reference(recording, cache, [(0, 12, 12)])
    heads = cache.layers[0].positions.shape[1]
    assert evictions == len(cache.layers) * heads * (ids.shape[1] + 23 - 24)
