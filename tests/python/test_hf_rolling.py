"""positions="rolling": a token's position is its rank among the tokens that are kept."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from h2o_kv import EvictionPolicy, H2OCache
from h2o_kv.hf import ROLLING_MODELS, cache_kwarg
from h2o_kv.serve import Request, generate_many
from hf_models import (
    forward,
    full_cache_generate,
    generate,
    kept,
    left_padded,
    recorded,
    tiny_config,
    tiny_model,
    tokens,
)

POLICY = EvictionPolicy(num_heavy=4, num_recent=4, num_sink=2)
AMPLE = EvictionPolicy(num_heavy=64, num_recent=64)


def rolling_cache(model: Any, policy: EvictionPolicy = POLICY, **options: Any) -> H2OCache:
    return H2OCache(model, policy, positions="rolling", **options)


# ---- The algorithm once more, in float64 and lists: for one row and one KV head.


def angles(model: Any, positions: list[int]) -> Tensor:
    """Of each position, [len(positions), rotary_dim / 2], rounded to float32 as transformers does."""
    inv_freq = model.base_model.rotary_emb.inv_freq.float()
    return torch.tensor(positions, dtype=torch.float32)[:, None] * inv_freq


def rotated(vectors: Tensor, angle: Tensor, *, undo: bool = False) -> Tensor:
    """Turn the pairs (i, i + rotary_dim / 2) of float64 vectors [n, head_dim] by angles [n, pairs]."""
    pairs = angle.shape[1]
    turn = torch.complex(angle.cos().double(), angle.sin().double())
    if undo:  # Rounded to float32, their length is not quite 1.
        turn = 1 / turn
    turned = torch.complex(vectors[:, :pairs], vectors[:, pairs : 2 * pairs]) * turn
    return torch.cat([turned.real, turned.imag, vectors[:, 2 * pairs :]], 1)


@dataclass
class Token:
    position: int
    key: Tensor  # [head_dim], not rotated
    value: Tensor
    score: float = 0.0


@dataclass
class Head:
    """What one KV head of one row keeps."""

    model: Any
    budget: tuple[int, int, int]
    gqa_reduce: str
    tokens: list[Token] = field(default_factory=list)
    largest: int = -1  # rank that anything was rotated by

    def join(self, new: list[Token], query: Tensor, scale: float) -> tuple[Tensor, list[int]]:
        """Let tokens join; query [new, group, head_dim], not rotated. Outputs [new, group, head_dim]."""
        candidates = sorted(self.tokens, key=lambda token: token.position) + new
        ranks = list(range(len(candidates)))
        self.largest = max(self.largest, ranks[-1])
        keys = rotated(torch.stack([t.key for t in candidates]), angles(self.model, ranks))
        values = torch.stack([t.value for t in candidates])
        outputs = []
        for i, queries in enumerate(query):
            visible = len(candidates) - len(new) + i + 1
            rank = angles(self.model, [visible - 1] * len(queries))
            logits = rotated(queries, rank) @ keys[:visible].T * scale
            weights = logits.softmax(1)
            outputs.append(weights @ values[:visible])
            added = weights.sum(0) if self.gqa_reduce == "sum" else weights.amax(0)
            for token, weight in zip(candidates, added.tolist(), strict=False):
                token.score += weight
        sink, heavy, recent = self.budget
        newest = new[-1].position
        left = []
        while len(candidates) > sink + heavy + recent:
            victim = min(
                (t for t in candidates if sink <= t.position <= newest - recent),
                key=lambda token: (token.score, token.position),
            )
            candidates.remove(victim)
            left.append(victim.position)
        self.tokens = candidates
        return torch.stack(outputs), left


def check_against_lists(
    model: Any, cache: H2OCache, recording: Any, policy: EvictionPolicy, padding: list[int]
) -> tuple[int, int]:
    """Replay what attention got; returns how many tokens left, and the largest rank."""
    evictions, largest = 0, -1
    budget = (policy.num_sink, policy.num_heavy, policy.num_recent)
    for layer_idx, calls in recording.calls.items():
        batch, num_kv_heads, _, head_dim = calls[0].key.shape
        for row in range(batch):
            for head in range(num_kv_heads):
                reference = Head(model, budget, policy.gqa_reduce)
                seen = 0  # columns
                for call in calls:
                    num_new = call.key.shape[2]
                    group = call.query.shape[1] // num_kv_heads
                    real = [i for i in range(num_new) if seen + i >= padding[row]]
                    chunk = num_new
                    if num_new > 1 and cache.prefill == "streaming":
                        chunk = cache.prefill_chunk
                    # position_ids of the model: what generate() makes of a left-padded mask.
                    before = [max(seen + i - padding[row], 0) for i in real]
                    by = angles(model, before)
                    keys = rotated(call.key[row, head, real], by, undo=True)
                    heads = slice(head * group, (head + 1) * group)
                    queries = [rotated(q[real], by, undo=True) for q in call.query[row, heads]]
                    for start in range(0, len(real), chunk):
                        part = range(start, min(start + chunk, len(real)))
                        new = [
                            Token(before[i], keys[i], call.value[row, head, real[i]]) for i in part
                        ]
                        query = torch.stack([q[part.start : part.stop] for q in queries], 1)
                        output, left = reference.join(new, query, call.scale or head_dim**-0.5)
                        got = call.output[row, [real[i] for i in part], heads]
                        torch.testing.assert_close(got, output, atol=1e-9, rtol=0)
                        evictions += len(left)
                    seen += num_new
                    got_positions = call.positions[row, head]
                    got_scores = dict(
                        zip(got_positions.tolist(), call.scores[row, head].tolist(), strict=True)
                    )
                    got_scores.pop(-1, None)
                    want = {token.position: token.score for token in reference.tokens}
                    assert got_scores.keys() == want.keys()
                    assert got_scores == pytest.approx(want, rel=1e-9)
                layer = cache.layers[layer_idx]
                assert layer.positions is not None
                assert layer.k_cache is not None
                for token in reference.tokens:
                    slot = layer.positions[row, head].tolist().index(token.position)
                    torch.testing.assert_close(
                        layer.k_cache[row, head, slot], token.key, atol=1e-9, rtol=0
                    )
                largest = max(largest, reference.largest)
    return evictions, largest


@pytest.mark.parametrize("family", ROLLING_MODELS)
@pytest.mark.parametrize("prefill", ["one_shot", "streaming"])
def test_every_step_equals_the_algorithm_on_lists(family: str, prefill: str) -> None:
    model = tiny_model(family, dtype=torch.float64)
    cache = rolling_cache(model, prefill=prefill, prefill_chunk=3)
    with recorded() as recording:
        generate(model, tokens(1, 20), cache, new=20)
    evictions, largest = check_against_lists(model, cache, recording, POLICY, [0])
    assert evictions > 50
    assert largest == (19 if prefill == "one_shot" else POLICY.resolve(0).total + 2)


@pytest.mark.parametrize("gqa_reduce", ["sum", "max"])
@pytest.mark.parametrize("counts", [(0, 6, 2), (4, 0, 6), (0, 0, 8), (0, 8, 0), (2, 5, 1)])
def test_every_kind_of_budget(counts: tuple[int, int, int], gqa_reduce: str) -> None:
    num_sink, num_heavy, num_recent = counts
    policy = EvictionPolicy(
        num_sink=num_sink, num_heavy=num_heavy, num_recent=num_recent, gqa_reduce=gqa_reduce
    )
    model = tiny_model("llama", dtype=torch.float64)
    cache = rolling_cache(model, policy)
    with recorded() as recording:
        generate(model, tokens(2, 12), cache, new=12)
        # A second turn of several tokens on a full cache.
        with torch.no_grad():
            model(tokens(2, 5, seed=3), **{cache_kwarg(model): cache})
    evictions, _ = check_against_lists(model, cache, recording, policy, [0, 0])
    assert evictions > 100


@pytest.mark.parametrize("prefill", ["one_shot", "streaming"])
def test_padding_takes_no_rank(prefill: str) -> None:
    model = tiny_model("llama", dtype=torch.float64)
    prompts = [tokens(1, length, seed=length)[0] for length in (9, 16)]
    ids, mask = left_padded(prompts)
    cache = rolling_cache(model, prefill=prefill, prefill_chunk=4)
    with recorded() as recording:
        batch = generate(model, ids, cache, new=12, mask=mask)
    evictions, _ = check_against_lists(model, cache, recording, POLICY, [7, 0])
    assert evictions > 50
    for row, prompt in enumerate(prompts):
        alone = rolling_cache(model, prefill=prefill, prefill_chunk=4)
        assert generate(model, prompt[None], alone, new=12).tolist() == [batch[row].tolist()]
        assert kept(alone, 0) == kept(cache, row)


def test_padding_between_tokens_takes_no_rank() -> None:
    model = tiny_model("llama", dtype=torch.float64)
    prompt = tokens(1, 17)
    columns = [0, 1, 4, 5, 6, 9, 10, 11, 12, 13, 15, 16, 17, 18, 19, 21, 22]
    ids, mask = torch.zeros(1, 24, dtype=torch.long), torch.zeros(1, 24, dtype=torch.long)
    ids[0, columns], mask[0, columns] = prompt[0], 1
    position_ids = (mask.cumsum(1) - 1).clamp_min(0)
    for options in ({}, {"prefill": "streaming", "prefill_chunk": 3}):
        alone, padded = (rolling_cache(model, **options) for _ in range(2))
        want = forward(model, prompt, alone)
        got = forward(model, ids, padded, mask, position_ids=position_ids)
        torch.testing.assert_close(got[:, columns], want, atol=1e-9, rtol=0)
        assert kept(padded, 0) == kept(alone, 0)


# ---- What follows from it.


ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "longrope": {
        "rope_type": "longrope",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [1.0, 2.0, 3.0, 4.0],
    },
}


def scaled_model(rope: str, **options: Any) -> Any:
    parameters = {**ROPES[rope], "rope_theta": 10000.0}
    if hasattr(tiny_config("llama"), "rope_parameters"):
        return tiny_model("llama", rope_parameters=parameters, **options)
    del parameters["rope_theta"]  # Before transformers 5.
    return tiny_model("llama", rope_scaling=parameters, **options)


@pytest.mark.parametrize("rope", ROPES)
def test_nothing_evicted_is_full_attention_under_any_scaling(rope: str) -> None:
    model = scaled_model(rope, dtype=torch.float64)
    ids = tokens(2, 30)
    want = full_cache_generate(model, ids, new=10)
    assert generate(model, ids, rolling_cache(model, AMPLE), new=10).tolist() == want.tolist()


@pytest.mark.parametrize("rope", ROPES)
def test_a_longer_text_before_changes_no_angle(rope: str) -> None:
    model = scaled_model(rope, dtype=torch.float64)
    cache = rolling_cache(model, AMPLE)
    forward(model, tokens(1, 100), cache)  # LongRoPE changes its angles at 64.
    cache.reset()
    want = forward(model, tokens(1, 30, seed=1), rolling_cache(model, AMPLE))
    assert torch.equal(forward(model, tokens(1, 30, seed=1), cache), want)


@pytest.mark.parametrize("rope", ROPES)
def test_a_stream_past_the_end_of_the_context_under_any_scaling(rope: str) -> None:
    """The angles of a model may change with its longest position; those of ranks do not."""
    model = scaled_model(rope, dtype=torch.float64, max_position_embeddings=40, num_hidden_layers=1)
    cache = rolling_cache(model, prefill="streaming", prefill_chunk=8)
    ids = tokens(1, 150)
    logits = torch.cat([forward(model, part, cache) for part in ids.split(30, 1)], 1)
    assert logits.isfinite().all()
    keys = cache.layers[0].k_cache
    assert keys is not None
    # Keys of the model's own projection, whatever position they came at.
    hidden = model.model.embed_tokens(ids)
    block = model.model.layers[0]
    raw = block.self_attn.k_proj(block.input_layernorm(hidden))
    raw = raw.view(1, 150, 2, -1).transpose(1, 2)
    positions = cache.layers[0].positions
    assert positions is not None
    want = raw.gather(2, positions.long()[..., None].expand(-1, -1, -1, raw.shape[3]))
    torch.testing.assert_close(keys, want, atol=1e-6, rtol=0)


def test_only_what_is_kept_counts_not_where_it_stood() -> None:
    """One layer, sinks and a window: the same kept tokens give the same logits at any distance."""
    model = tiny_model("llama", dtype=torch.float64, num_hidden_layers=1)
    policy = EvictionPolicy(num_heavy=0, num_recent=6, num_sink=3)
    start, end = tokens(1, 3), tokens(1, 7, seed=1)

    def last_logits(positions: str, between: int) -> Tensor:
        cache = H2OCache(model, policy, positions=positions, prefill="streaming", prefill_chunk=1)
        ids = torch.cat([start, tokens(1, between, seed=2), end], 1)
        return forward(model, ids, cache)[0, -1]

    near, far = (last_logits("rolling", between) for between in (5, 200))
    torch.testing.assert_close(near, far, atol=1e-6, rtol=0)
    near, far = (last_logits("original", between) for between in (5, 200))
    assert (near - far).abs().max() > 0.01


def test_no_rotation_is_past_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama", max_position_embeddings=24)
    cache = rolling_cache(model, prefill="streaming", prefill_chunk=8)
    rolling, asked = cache._settings.rolling, []
    assert rolling is not None
    by_rank = rolling.by_rank

    def spy(num_ranks: int, like: Tensor) -> dict[str, Tensor]:
        asked.append(num_ranks)
        angles = by_rank(num_ranks, like)
        assert len(angles["rope_cos"]) <= 24
        return angles

    monkeypatch.setattr(rolling, "by_rank", spy)
    for part in tokens(1, 600).split(100, 1):
        forward(model, part, cache)
    for _ in range(20):
        forward(model, tokens(1, 1), cache)
    assert POLICY.resolve(0).total + 8 <= max(asked) <= 24
    assert cache.get_seq_length() == 620


def test_more_than_the_context_at_once_raises_and_changes_nothing() -> None:
    model = tiny_model("llama", max_position_embeddings=24)
    cache = rolling_cache(model)
    forward(model, tokens(1, 20), cache)
    before = [copy.deepcopy(layer.state().tensors) for layer in cache.layers]
    with pytest.raises(ValueError, match=r"<= max_position_embeddings = 24 .*got 25; prefill="):
        forward(model, tokens(1, 15), cache)
    for layer, tensors in zip(cache.layers, before, strict=True):
        for name, tensor in layer.state().tensors.items():
            assert torch.equal(tensor, tensors[name]), name
    # 14 join the 10 that are kept.
    cache = rolling_cache(model)
    forward(model, tokens(1, 20), cache)
    forward(model, tokens(1, 14), cache)


@pytest.mark.parametrize("cast", ["to", "from_config"])
def test_a_model_in_16_bits_is_undone_by_its_own_angles(cast: str) -> None:
    """model.to(bfloat16) rounds the frequencies; far out, others would give other angles."""
    model = tiny_model("llama", dtype=torch.bfloat16, num_hidden_layers=1)
    if cast == "from_config":
        rotary = model.model.rotary_emb
        rotary.inv_freq.data = rotary.original_inv_freq.data = type(rotary)(
            model.config
        ).inv_freq.float()
    cache = rolling_cache(model)
    ids = tokens(1, 12)
    forward(model, ids, cache, position_ids=torch.arange(50_000, 50_012)[None])
    block = model.model.layers[0]
    with torch.no_grad():
        raw = block.self_attn.k_proj(block.input_layernorm(model.model.embed_tokens(ids)))
    raw = raw.view(1, 12, 2, -1).transpose(1, 2).float()
    keys, positions = cache.layers[0].k_cache, cache.layers[0].positions
    assert keys is not None
    assert positions is not None
    want = raw.gather(2, positions.long()[..., None].expand(-1, -1, -1, raw.shape[3]))
    torch.testing.assert_close(keys.float(), want, atol=0.03 * float(want.abs().max()), rtol=0)


def test_positions_may_be_counted_in_place() -> None:
    model = tiny_model("llama", dtype=torch.float64)
    ids, position = tokens(1, 20), torch.zeros(1, 1, dtype=torch.long)
    counted, apart = rolling_cache(model), rolling_cache(model)
    for i in range(20):
        got = forward(model, ids[:, i : i + 1], counted, position_ids=position)
        want = forward(model, ids[:, i : i + 1], apart, position_ids=torch.tensor([[i]]))
        assert torch.equal(got, want)
        position += 1


# ---- With everything else.


def test_a_compiled_decode_step_gives_the_same() -> None:
    model, ids = tiny_model("llama"), tokens(2, 5)
    plain, compiled = rolling_cache(model), rolling_cache(model)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    step = torch.compile(model.forward, fullgraph=True, backend=counter)
    for cache in (plain, compiled):
        forward(model, ids, cache)
    for i in range(12):
        new = tokens(2, 1, seed=i)
        want = forward(model, new, plain)
        with torch.no_grad():
            got = step(new, **{cache_kwarg(model): compiled}).logits
        torch.testing.assert_close(got, want, atol=1e-4, rtol=0)
    assert kept(compiled, 0) == kept(plain, 0)
    assert counter.frame_count == 1
    torch._dynamo.reset()


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_rows_that_are_moved_equal_the_same_histories_run_alone(family: str) -> None:
    model, ids = tiny_model(family, dtype=torch.float64), tokens(1, 12)
    generator = torch.Generator().manual_seed(0)
    cache = rolling_cache(model)
    forward(model, ids.expand(3, -1), cache)
    histories = [ids[0].tolist()] * 3
    for step in range(10):
        new = tokens(3, 1, seed=step)
        logits = forward(model, new, cache)[:, -1]
        histories = [h + t for h, t in zip(histories, new.tolist(), strict=True)]
        if step < 9:
            parents = torch.randint(3, (3,), generator=generator)
            cache.reorder_cache(parents)
            histories = [histories[parent] for parent in parents]
    for row, history in enumerate(histories):
        alone = rolling_cache(model)
        forward(model, ids, alone)
        for token in history[12:]:
            want = forward(model, torch.tensor([[token]]), alone)
        torch.testing.assert_close(logits[row], want[0, -1], atol=1e-9, rtol=0)
        assert kept(alone, 0) == kept(cache, row)


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_drafts_change_no_token(family: str) -> None:
    model = tiny_model(family, dtype=torch.float64)
    ids = tokens(1, 6).repeat(1, 4)
    plain = rolling_cache(model)
    want = generate(model, ids, plain, new=30)
    assisted = rolling_cache(model, prompt_length=24, max_rollback=5)
    got = generate(model, ids, assisted, new=30, prompt_lookup_num_tokens=5)
    assert got.tolist() == want.tolist()


def test_taking_back_restores_every_bit() -> None:
    model = tiny_model("llama", dtype=torch.float64)
    cache = rolling_cache(model, prompt_length=16, max_rollback=6)
    forward(model, tokens(1, 16), cache)
    forward(model, tokens(1, 1, seed=1), cache)
    before = [
        {name: tensor.clone() for name, tensor in layer.state().tensors.items()}
        for layer in cache.layers
    ]
    forward(model, tokens(1, 5, seed=2), cache)
    assert not torch.equal(cache.layers[0].positions, before[0]["positions"])
    cache.crop(-5)
    for layer, tensors in zip(cache.layers, before, strict=True):
        for name, tensor in layer.state().tensors.items():
            assert torch.equal(tensor, tensors[name]), name


def test_saved_and_forked_caches_go_on_as_they_would(tmp_path: Path) -> None:
    model = tiny_model("llama", dtype=torch.float64)
    cache = rolling_cache(model)
    forward(model, tokens(1, 20), cache)
    cache.save(tmp_path / "cache.safetensors")
    loaded = H2OCache.load(tmp_path / "cache.safetensors", model)
    forked = cache.fork(2)
    assert loaded.positions == forked.positions == "rolling"
    ids = tokens(1, 1, seed=5)
    want = forward(model, ids, cache)
    assert torch.equal(forward(model, ids, loaded), want)
    torch.testing.assert_close(forward(model, ids.repeat(2, 1), forked), want.repeat(2, 1, 1))
    with pytest.raises(ValueError, match=r"the model itself must be given .*got LlamaConfig"):
        H2OCache.load(tmp_path / "cache.safetensors", model.config)


def test_requests_get_what_they_get_alone() -> None:
    model = tiny_model("llama", dtype=torch.float64)
    requests = [
        Request(tokens(1, length, seed=length)[0], max_new_tokens=12) for length in (5, 14, 23, 9)
    ]
    done = generate_many(
        model, requests, POLICY, batch_size=2, positions="rolling", eos_token_id=[]
    )
    for completion in done:
        request = requests[completion.index]
        ids = torch.as_tensor(request.input_ids)[None]
        want = generate(model, ids, rolling_cache(model), new=12)
        assert completion.tokens == want[0].tolist()


def test_generate_goes_on_past_the_context() -> None:
    model = tiny_model("llama", max_position_embeddings=32)
    cache = rolling_cache(model, prefill="streaming", prefill_chunk=8)
    generate(model, tokens(1, 20), cache, new=100)
    assert cache.get_seq_length() == 119
    assert {int(n) for n in cache.tokens_kept()[0].flatten()} == {POLICY.resolve(0).total}


def test_drafts_count_the_prompt_before_them() -> None:
    model = tiny_model("llama", dtype=torch.float64, max_position_embeddings=32)
    wide = EvictionPolicy(num_heavy=20, num_recent=20)
    whole, parts = (rolling_cache(model, wide, prompt_length=15, max_rollback=4) for _ in range(2))
    ids = tokens(1, 18)
    got = forward(model, ids, whole)
    want = torch.cat([forward(model, part, parts) for part in (ids[:, :15], ids[:, 15:])], 1)
    torch.testing.assert_close(got, want, atol=1e-9, rtol=0)


def test_padding_and_rows_that_left_take_no_rank_of_the_context() -> None:
    model = tiny_model("llama", max_position_embeddings=32)
    wide = EvictionPolicy(num_heavy=20, num_recent=20)
    mask = torch.tensor([[0] * 20 + [1] * 20])
    cache = rolling_cache(model, EvictionPolicy(num_heavy=10, num_recent=10))
    assert forward(model, tokens(1, 40), cache, mask).isfinite().all()
    lengths = (5, 2, 8, 10, 10, 10, 8)
    requests = [Request(tokens(1, 20)[0], max_new_tokens=n) for n in lengths]
    done = generate_many(model, requests, wide, batch_size=2, positions="rolling", eos_token_id=[])
    assert sorted((c.index, len(c.tokens)) for c in done) == list(enumerate(lengths))


@pytest.mark.parametrize("rope", ["default", "dynamic"])
def test_forks_and_saved_caches_of_long_streams_are_their_origin(rope: str, tmp_path: Path) -> None:
    model = scaled_model(rope, dtype=torch.float64, max_position_embeddings=32)
    policy = EvictionPolicy(num_sink=2, num_heavy=12, num_recent=10)
    cache = rolling_cache(model, policy, prefill="streaming", prefill_chunk=4)
    forward(model, tokens(1, 60), cache)
    cache.save(tmp_path / "a")
    others = [cache.fork(1), H2OCache.load(tmp_path / "a", model), copy.deepcopy(cache)]
    new = tokens(1, 1, seed=7)
    want = forward(model, new, cache)
    for other in others:
        assert torch.equal(forward(model, new, other), want)


@pytest.mark.parametrize("change", ["fork", "load", "to", "set_budget"])
def test_a_step_compiles_after(change: str, tmp_path: Path) -> None:
    model = tiny_model("llama")
    cache = rolling_cache(model)
    forward(model, tokens(1, 12), cache)
    if change == "fork":
        cache = cache.fork(1)
    elif change == "load":
        cache.save(tmp_path / "a")
        cache = H2OCache.load(tmp_path / "a", model)
    elif change == "to":
        cache.to(dtype=torch.float64)
    else:
        cache.set_budget(num_heavy=40)
    torch._dynamo.reset()
    plain, step = (
        copy.deepcopy(cache),
        torch.compile(model.forward, backend="eager", fullgraph=True),
    )
    with torch.no_grad():
        got = step(tokens(1, 1), **{cache_kwarg(model): cache}).logits
    torch.testing.assert_close(got, forward(model, tokens(1, 1), plain))
    torch._dynamo.reset()


@pytest.mark.parametrize("positions", ["original", "rolling"])
def test_no_cache_holds_its_model(positions: str) -> None:
    model = tiny_model("llama")
    cache = H2OCache(model, POLICY, positions=positions)
    forward(model, tokens(1, 12), cache)
    forks = [cache.fork(1), copy.deepcopy(cache)]
    gone, of_model = weakref.ref(model), model.num_parameters() * 4
    del model
    gc.collect()
    assert gone() is None
    assert all(len(pickle.dumps(one)) < of_model / 2 for one in (cache, *forks))


# ---- What is refused.


def test_what_it_cannot_serve_is_named() -> None:
    model = tiny_model("llama")
    with pytest.raises(ValueError, match=r"positions must be one of .*got \"moving\""):
        H2OCache(model, POLICY, positions="moving")
    with pytest.raises(ValueError, match=r"the model itself must be given .*got LlamaConfig"):
        H2OCache(model.config, POLICY, positions="rolling")
    with pytest.raises(ValueError, match=r"needs a model of .*got \"opt\""):
        rolling_cache(tiny_model("opt"))


def test_a_row_moves_between_caches_of_the_same_positions_only() -> None:
    model = tiny_model("llama")
    caches = [H2OCache(model, POLICY, positions=name) for name in ("original", "rolling")]
    for cache in caches:
        forward(model, tokens(1, 4), cache)
    with pytest.raises(ValueError, match=r"insert: positions of both caches must be the same"):
        caches[0].insert(0, caches[1])


def test_a_model_that_does_not_tell_its_positions_is_refused() -> None:
    model = tiny_model("llama")
    rolling = rolling_cache(model)._settings.rolling
    assert rolling is not None
    with pytest.raises(ValueError, match=r"must tell its position_ids"):
        rolling.undo(torch.zeros(1, 4, 2, 8), torch.zeros(1, 2, 2, 8), None)


def test_the_model_can_be_given_for_any_cache() -> None:
    model = tiny_model("llama")
    cache = H2OCache(model, POLICY)
    assert cache.positions == "original"
    want = forward(model, tokens(1, 20), H2OCache(model.config, POLICY))
    assert torch.equal(forward(model, tokens(1, 20), cache), want)
