"""Runs models on two ranks by transformers' own tensor parallelism, and compares with one process.

torchrun starts this file, too: then it is one of the ranks, and leaves `rank<i>.pt` in a folder that
it is told.
"""

from __future__ import annotations

import functools
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from h2o_kv import EvictionPolicy, H2OCache
from hf_models import NO_END, forward, generate, left_padded, tiny_model, tokens

RANKS, NEW = 2, 10
# Two rows of one batch.
PROMPTS = [tokens(1, 30)[0], tokens(1, 21, seed=1)[0]]
POLICIES = {
    "full": EvictionPolicy(num_heavy=60, num_recent=40),
    "fifth": EvictionPolicy(heavy_ratio=0.1, recent_ratio=0.1),
    "eight": EvictionPolicy(num_heavy=4, num_recent=3, num_sink=1),
}
# KV heads that cannot be shared out evenly.
ODD_HEADS = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48}
MODELS: dict[str, tuple[str, dict[str, int]]] = {
    "llama": ("llama", {}),
    "gpt_neox": ("gpt_neox", {}),
    "opt": ("opt", {}),
    "odd heads": ("llama", ODD_HEADS),
}
STATE = ("k_cache", "v_cache", "scores", "positions", "tokens_seen")


def model_of(name: str) -> Any:
    family, overrides = MODELS[name]
    return tiny_model(family, dtype=torch.float64, **overrides)


def results_of(model: Any, budget: str, file: Path) -> dict[str, Any]:
    """Text, then a step more of the cache and of one that went through `file`: logits and states."""
    ids, mask = left_padded(PROMPTS)
    cache = H2OCache(model.config, POLICIES[budget])
    text = generate(model, ids, cache, new=NEW, mask=mask, **NO_END)
    cache.save(file)
    loaded = H2OCache.load(file, model.config)
    logits = [forward(model, text[:, -1:], one) for one in (cache, loaded)]
    states = [
        [{name: getattr(layer, name) for name in STATE} for layer in one.layers]
        for one in (cache, loaded)
    ]
    return {
        "text": text,
        "logits": logits[0],
        "layers": states[0],
        "loaded logits": logits[1],
        "loaded layers": states[1],
    }


@functools.cache
def two_ranks() -> list[dict[str, Any]]:
    """Results of each rank by (model, budget); (model, "error") where it cannot be run so."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for model in MODELS:
            model_of(model).save_pretrained(folder / model)
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        launch += ["--nproc-per-node", str(RANKS), __file__, name]
        done = subprocess.run(launch, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        return [torch.load(folder / f"rank{rank}.pt") for rank in range(RANKS)]


@functools.cache
def one_process(name: str, budget: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        return results_of(model_of(name), budget, Path(folder, "cache"))


def check_equals_one_process(name: str, budget: str, *, shared_out: bool = True) -> None:
    """Each rank has the text, and of its KV heads the state, of one process; loaded caches, too.

    Without `shared_out`, each rank has all heads.
    """
    want = one_process(name, budget)
    for index, rank in enumerate(two_ranks()):
        got = rank[name, budget]
        assert torch.equal(got["text"], want["text"])
        torch.testing.assert_close(got["logits"], want["logits"], atol=1e-9, rtol=1e-9)
        for mine, all_heads in zip(got["layers"], want["layers"], strict=True):
            for part in STATE:
                share = all_heads[part]
                if shared_out and part != "tokens_seen":
                    share = share.chunk(RANKS, dim=1)[index]
                assert mine[part].shape == share.shape
                if mine[part].is_floating_point():
                    torch.testing.assert_close(mine[part], share, atol=1e-9, rtol=1e-9)
                else:
                    assert torch.equal(mine[part], share)
        assert torch.equal(got["logits"], got["loaded logits"])
        for mine, loaded in zip(got["layers"], got["loaded layers"], strict=True):
            assert all(torch.equal(mine[part], loaded[part]) for part in STATE)


def check_is_not_shared_out(name: str) -> None:
    """transformers has no plan for this model. It says so, or gives every rank the whole model."""
    errors = [rank.get((name, "error")) for rank in two_ranks()]
    if errors == [None] * RANKS:
        for budget in POLICIES:
            check_equals_one_process(name, budget, shared_out=False)
    else:
        assert all("tp_plan" in error for error in errors)


def _load(folder: Path) -> Any:
    """The rank's part of the model."""
    options: dict[str, Any] = {"tp_plan": "auto"}
    try:
        from transformers.distributed import DistributedConfig

        options = {"distributed_config": DistributedConfig(tp_plan="auto", tp_size=RANKS)}
    except (ImportError, TypeError):
        pass  # Earlier releases
    model = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="h2o", dtype=torch.float64, **options
    )
    return model.eval()


def _rank(folder: Path) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    results: dict[tuple[str, str], Any] = {}
    for name in MODELS:
        try:
            model = _load(folder / name)
            forward(model, PROMPTS[0][None], None)
        except Exception as error:
            results[name, "error"] = f"{type(error).__name__}: {error}"
            continue
        for budget in POLICIES:
            results[name, budget] = results_of(model, budget, folder / f"{rank}.safetensors")
    torch.save(results, folder / f"rank{rank}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    _rank(Path(sys.argv[1]))
