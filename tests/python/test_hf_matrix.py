"""Every model family x feature x budget: one cell, one test, named as in `llama-greedy-full`.

Each cell compares with a run that shares nothing with H2OCache: at the budget "full" transformers'
DynamicCache under sdpa, below it the model under the float64 reference attention (hf_reference.py), one
row alone, token by token. Texts must be equal, and the positions that are kept. What cannot be run is a
documented error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tensor_parallel
from h2o_kv import EvictionPolicy, H2OCache
from h2o_kv.hf import cache_kwarg
from hf_models import (
    NO_END,
    assistant,
    forward,
    full_cache_generate,
    generate,
    kept,
    left_padded,
    recorded,
    tiny_model,
    tokens,
)
from hf_reference import ReferenceRow

FAMILIES = ("llama", "opt", "gpt_neox")
BUDGETS = ("full", "fifth", "eight")
NEW, DRAFTS = 10, 3


class Cell:
    """A model and a budget, and what a feature is compared with."""

    def __init__(self, family: str, budget: str, folder: Path) -> None:
        self.family, self.budget, self.folder = family, budget, folder
        self.model = model_of(family)

    def cache(self, **options: Any) -> H2OCache:
        policy = {
            "full": EvictionPolicy(num_heavy=60, num_recent=40),
            "fifth": EvictionPolicy(heavy_ratio=0.1, recent_ratio=0.1),
            "eight": EvictionPolicy(num_heavy=4, num_recent=3, num_sink=1),
        }[self.budget]
        return H2OCache(self.model.config, policy, **options)

    def reference(self, prompt_length: int) -> ReferenceRow:
        tenth = prompt_length // 10
        counts = {"full": (0, 60, 40), "fifth": (0, tenth, tenth), "eight": (1, 4, 3)}
        return ReferenceRow(self.model, counts[self.budget])

    def full(self, ids: Tensor, **options: Any) -> list[list[int]]:
        """Texts of transformers' own cache."""
        return full_cache_generate(self.model, ids, new=NEW, **NO_END, **options).tolist()

    def generate(self, ids: Tensor, cache: H2OCache, *, new: int = NEW, **options: Any) -> Tensor:
        """The `new` tokens [batch, new] that follow."""
        return generate(self.model, ids, cache, new=new, **NO_END, **options)

    def check(self, text: Any, cache: H2OCache | None = None) -> None:
        """Greedy texts of PROMPTS, as many as there are, and what is kept of them."""
        for row, tokens_of_row in enumerate(torch.as_tensor(text).tolist()):
            want, positions = greedy_alone(self.family, self.budget, row)
            assert tokens_of_row == want
            if cache is not None:
                assert kept(cache, row) == positions


@functools.cache
def model_of(family: str) -> Any:
    return tiny_model(family, dtype=torch.float64)


@functools.cache
def prompts() -> list[Tensor]:
    """Rows of 30, 21 and 12 tokens; the first repeats itself, so that drafts can be looked up."""
    return [tokens(1, 10, seed=10)[0].repeat(3), *(tokens(1, n, seed=n)[0] for n in (21, 12))]


@functools.cache
def greedy_alone(family: str, budget: str, row: int) -> tuple[list[int], list[list[list[int]]]]:
    """Text that follows a prompt alone, by the other mechanism, and what is kept in the end."""
    cell, prompt = Cell(family, budget, Path()), prompts()[row]
    if budget != "full":
        reference = cell.reference(len(prompt))
        return reference.greedy([prompt], NEW), reference.kept()
    heads = cell.model.config.num_attention_heads
    heads = getattr(cell.model.config, "num_key_value_heads", heads)
    every = list(range(len(prompt) + NEW - 1))
    return cell.full(prompt[None])[0], [[every] * heads] * 2


def greedy(cell: Cell) -> None:
    cache, prompt = cell.cache(), prompts()[0][None]
    cell.check(cell.generate(prompt, cache), cache)


def sampling(cell: Cell) -> None:
    prompt = prompts()[0][None]
    options: dict[str, Any] = {"do_sample": True, "top_k": 0, "temperature": 1.0}
    torch.manual_seed(7)
    text = cell.generate(prompt, cell.cache(), **options)
    torch.manual_seed(7)
    if cell.budget == "full":
        want = cell.full(prompt, **options)[0]
    else:
        want = cell.reference(30).sampled(prompt[0], NEW)
    assert text[0].tolist() == want
    assert want != greedy_alone(cell.family, cell.budget, 0)[0]


def beams(cell: Cell) -> None:
    """More about beams is in test_hf_generate.py."""
    prompt = prompts()[0][None]
    text = cell.generate(prompt, cell.cache(), num_beams=4)
    if cell.budget == "full":
        want = cell.full(prompt, num_beams=4)[0]
    else:
        want = cell.reference(30).beam(prompt[0], NEW, 4)
    assert text[0].tolist() == want


def left_padding(cell: Cell) -> None:
    ids, mask = left_padded(prompts())
    cache = cell.cache()
    text = cell.generate(ids, cache, mask=mask)
    cell.check(text, cache)
    if cell.budget == "full":
        assert text.tolist() == cell.full(ids, mask=mask)


def right_padding(cell: Cell) -> None:
    """`generate` would go on from the padding, so the loop is here."""
    ids, mask = left_padded([prompt.flip(0) for prompt in prompts()])
    ids, mask = ids.flip(1), mask.flip(1)
    cache, lengths = cell.cache(), mask.sum(1)
    position_ids = (mask.cumsum(1) - 1).clamp(min=0)
    logits = forward(cell.model, ids, cache, mask, position_ids=position_ids)
    last = logits[torch.arange(3), lengths - 1]
    cell.check(decode(cell.model.forward, cell.model, cache, last, mask), cache)


def assisted(cell: Cell) -> None:
    """More about drafts is in test_hf_rollback.py."""
    _drafted(cell, assistant_model=assistant(cell.family, DRAFTS, dtype=torch.float64))


def prompt_lookup(cell: Cell) -> None:
    _drafted(cell, prompt_lookup_num_tokens=DRAFTS)


def _drafted(cell: Cell, **options: Any) -> None:
    cache, prompt = cell.cache(prompt_length=30, max_rollback=DRAFTS), prompts()[0][None]
    text = cell.generate(prompt, cache, **options)
    cell.check(text[:, :NEW])  # transformers 4 goes on to the end of the drafts.
    if text.shape[1] == NEW:
        cell.check(text, cache)


def chunked_prefill(cell: Cell) -> None:
    cache, prompt = cell.cache(prompt_length=30), prompts()[0]
    with recorded() as recording:
        text = cell.generate(prompt[None], cache, prefill_chunk_size=7)
    lengths = [call.key.shape[2] for call in recording.calls[0]]
    # transformers 4 leaves the last token of the prompt to the first step.
    chunks = [7, 7, 7, 7, 2] if lengths[4] == 2 else [7, 7, 7, 7, 1, 1]
    assert lengths == chunks + [1] * (NEW - 1)
    if cell.budget == "full":
        cell.check(text, cache)
        return
    reference = cell.reference(30)
    assert text[0].tolist() == reference.greedy(list(prompt.split(chunks)), NEW)
    assert kept(cache, 0) == reference.kept()


def second_turn(cell: Cell) -> None:
    cache, prompt, more = cell.cache(), prompts()[0], tokens(1, 9, seed=5)[0]
    first = cell.generate(prompt[None], cache)
    cell.check(first, cache)
    conversation = torch.cat([prompt, first[0], more])
    second = cell.generate(conversation[None], cache)[0].tolist()
    if cell.budget == "full":
        assert second == cell.full(conversation[None])[0]
        return
    reference = cell.reference(30)
    reference.greedy([prompt], NEW)
    assert second == reference.greedy([torch.cat([first[0, -1:], more])], NEW)
    assert kept(cache, 0) == reference.kept()


def save_and_load(cell: Cell) -> None:
    """More about files is in test_hf_session.py."""
    cache, prompt = cell.cache(), prompts()[0][None]
    text = cell.generate(prompt, cache, new=4)
    cache.save(cell.folder / "cache.safetensors")
    loaded = H2OCache.load(cell.folder / "cache.safetensors", cell.model.config)
    so_far = torch.cat([prompt, text], 1)
    rest = cell.generate(so_far, loaded, new=NEW - 4)
    cell.check(torch.cat([text, rest], 1), loaded)


def compiled(cell: Cell) -> None:
    """The decode step of model.forward."""
    torch._dynamo.reset()
    step = torch.compile(cell.model.forward, fullgraph=True, backend="eager")
    cache, prompt = cell.cache(), prompts()[0][None]
    last = forward(cell.model, prompt, cache)[:, -1]
    cell.check(decode(step, cell.model, cache, last, None), cache)
    torch._dynamo.reset()


def two_ranks(cell: Cell) -> None:
    """More is in test_hf_tensor_parallel.py; two rows of its own prompts, left-padded."""
    if cell.family == "opt":
        tensor_parallel.check_is_not_shared_out("opt")
        return
    tensor_parallel.check_equals_one_process(cell.family, cell.budget)
    text = tensor_parallel.one_process(cell.family, cell.budget)["text"]
    for row, prompt in zip(text.tolist(), tensor_parallel.PROMPTS, strict=True):
        if cell.budget == "full":
            assert row == cell.full(prompt[None])[0]
        else:
            assert row == cell.reference(len(prompt)).greedy([prompt], NEW)


def decode(step: Any, model: Any, cache: H2OCache, logits: Tensor, mask: Tensor | None) -> Tensor:
    """The NEW tokens [batch, NEW] that follow a prompt with these `logits` [batch, vocabulary]."""
    text = [logits.argmax(-1, keepdim=True)]
    with torch.no_grad():
        while len(text) < NEW:
            positions = {}
            if mask is not None:
                mask = torch.nn.functional.pad(mask, (0, 1), value=1)
                positions["position_ids"] = mask.sum(1, keepdim=True) - 1
            output = step(text[-1], attention_mask=mask, **positions, **{cache_kwarg(model): cache})
            text.append(output.logits[:, -1].argmax(-1, keepdim=True))
    return torch.cat(text, 1)


FEATURES: dict[str, Callable[[Cell], None]] = {
    "greedy": greedy,
    "sampling": sampling,
    "beams": beams,
    "left_padding": left_padding,
    "right_padding": right_padding,
    "assisted": assisted,
    "prompt_lookup": prompt_lookup,
    "chunked_prefill": chunked_prefill,
    "second_turn": second_turn,
    "save_and_load": save_and_load,
    "compiled": compiled,
    "two_ranks": two_ranks,
}


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("family", FAMILIES)
def test_cell(family: str, feature: str, budget: str, tmp_path: Path) -> None:
    FEATURES[feature](Cell(family, budget, tmp_path))


@pytest.mark.parametrize("family", FAMILIES)
def test_cells_could_fail(family: str) -> None:
    """Each budget has a text and positions of its own, and no text is constant."""
    results = [greedy_alone(family, budget, 0) for budget in BUDGETS]
    assert all(len(set(text)) > 3 for text, _ in results)
    for part in range(2):
        assert len({str(result[part]) for result in results}) == 3
