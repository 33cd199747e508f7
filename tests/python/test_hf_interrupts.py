"""A forward that stops anywhere leaves the cache before it or after it, never in between.

An interrupt is raised at every bytecode of this package that a forward runs through, and at every
line of the model around it. Then the cache must equal, in every bit, that of a run without an
interrupt, before or after the forward; and it must go on like that one.
"""

from __future__ import annotations

import copy
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

import h2o_kv
from h2o_kv import EvictionPolicy, H2OCache
from h2o_kv.hf.attention import h2o_attention_forward
from hf_models import forward, generate, left_padded, tiny_config, tiny_model, tokens
from test_hf_cache import Calls

PACKAGE = str(Path(h2o_kv.__file__).parent)
TRANSFORMERS = str(Path(transformers.__file__).parent)
CONFIG = tiny_config("llama", attn_implementation="h2o")
FULL = EvictionPolicy(num_sink=1, num_heavy=3, num_recent=2)
RATIOS = EvictionPolicy(heavy_ratio=0.3, recent_ratio=0.2)


# ---- Interrupts.


class Interrupt:
    """Raises KeyboardInterrupt at event number `at`; counts the events otherwise.

    An event is a bytecode, or a line, of a function in a file below one of `folders`.
    """

    def __init__(self, at: int | None, *folders: str, opcodes: bool) -> None:
        self.at, self.folders, self.opcodes = at, folders, opcodes
        self.events = 0

    def __enter__(self) -> Interrupt:
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: Any) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(self.folders):
            return None
        frame.f_trace_opcodes = self.opcodes
        return self._event

    def _event(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == ("opcode" if self.opcodes else "line"):
            self.events += 1
            if self.events == self.at:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._event


def interrupted(at: int | None, run: Callable[[], Any], *folders: str, opcodes: bool) -> bool:
    """Whether `run` was stopped at that event, or came to its end before it."""
    try:
        with Interrupt(at, *folders, opcodes=opcodes):
            run()
    except KeyboardInterrupt:
        return True
    return False


# ---- What a cache is.


def everything(cache: H2OCache) -> list[Any]:
    """All that distinguishes a cache; what empty slots hold does not count."""
    parts: list[Any] = [cache._progress.awaiting, cache.get_seq_length()]
    for layer in cache.layers:
        state = layer.state()
        parts += [state.columns_seen, state.budget, state.window, layer._in_prompt]
        parts += [layer.is_initialized, layer.keys is None or layer.batch_size]
        for name, tensor in state.tensors.items():
            if name in ("keys", "values"):
                tensor = tensor.masked_fill(state.tensors["positions"][..., None] < 0, 0)
            parts += [name, tensor]
        journal = layer.journal
        if journal is not None:
            parts += [journal.depth, journal.unverified, len(journal.entries)]
            for entry in journal.entries:
                parts += [forward.num_columns for forward in entry.forwards]
                parts += entry.before
                for recorded in entry.forwards:
                    left = recorded.evicted[..., None] < 0
                    room = (recorded.k_evicted, recorded.v_evicted)
                    parts += recorded[:5]
                    parts += [tensor.masked_fill(left, 0) for tensor in room]
    return [part.clone() if isinstance(part, Tensor) else part for part in parts]


def same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(
        torch.equal(x, y) if isinstance(x, Tensor) and isinstance(y, Tensor) else x == y
        for x, y in zip(a, b, strict=True)
    )


# ---- Stories: what happens to a cache, one thing after the other, the same each time.

Act = Callable[[H2OCache], Any]


def attend(num_new: int, mask: list[list[int]] | None = None, batch: int = 2) -> Act:
    """A forward through the layers, with tensors of its own in place of a model's."""

    def act(cache: H2OCache) -> list[Tensor]:
        seen = cache.get_seq_length()
        generator = torch.Generator().manual_seed(1000 * seen + num_new)
        cache.layers[0].get_mask_sizes(num_new)
        real = None if mask is None else torch.tensor(mask, dtype=torch.bool)[:, None, None]
        outputs = []
        for layer_idx in range(len(cache.layers)):
            module = torch.nn.Module()
            module.config = CONFIG
            query, key, value = (
                torch.randn(batch, heads, num_new, 8, dtype=torch.float64, generator=generator)
                for heads in (4, 2, 2)
            )
            key, value = cache.update(key, value, layer_idx)
            outputs.append(h2o_attention_forward(module, query, key, value, real, scaling=0.4)[0])
        return outputs

    return act


def crop(tokens_to_remove: int) -> Act:
    return lambda cache: cache.crop(-tokens_to_remove)


def reset(cache: H2OCache) -> None:
    cache.reset()


@dataclass
class Story:
    """What was before, what is stopped, and how it goes on."""

    policy: EvictionPolicy
    before: list[Act]
    stopped: Act
    after: list[Act] = field(default_factory=lambda: [attend(1), attend(3)])
    options: dict[str, Any] = field(default_factory=dict)
    copy: Callable[[H2OCache], H2OCache] = lambda cache: cache.fork(1)

    def start(self) -> H2OCache:
        cache = H2OCache(CONFIG, self.policy, **self.options)
        for act in self.before:
            act(cache)
        return cache


RECORDED: dict[str, Any] = dict(prompt_length=9, max_rollback=4)
PADDED = [[0, 0, 0, 0, 1, 1, 1, 1, 1], [1] * 9]
STORIES = {
    "prefill": Story(FULL, [], attend(9)),
    "first of its ratios": Story(RATIOS, [], attend(9, PADDED)),
    "prefill in memory of an earlier one": Story(FULL, [attend(9), reset], attend(4)),
    "prefill of another batch": Story(
        FULL, [attend(9), reset], attend(4, batch=3), [attend(1, batch=3)]
    ),
    "first token": Story(FULL, [], attend(1)),
    "step while filling": Story(FULL, [attend(3)], attend(1)),
    "step when full": Story(FULL, [attend(9), attend(1)], attend(1)),
    "step after steps of the same cache": Story(
        FULL, [attend(9), attend(1), attend(1)], attend(1), copy=copy.deepcopy
    ),
    "step without recent": Story(EvictionPolicy(num_heavy=4, num_recent=0), [attend(9)], attend(1)),
    "step with padding": Story(FULL, [attend(9, PADDED)], attend(1, [[1], [0]])),
    "step of rows with their budgets": Story(RATIOS, [attend(9, PADDED)], attend(1)),
    "few tokens while filling": Story(FULL, [attend(3)], attend(4)),
    "few tokens when full": Story(FULL, [attend(9)], attend(4, [[1, 1, 0, 1], [0, 1, 1, 1]])),
    "many tokens when full": Story(FULL, [attend(9)], attend(8)),
    "streaming prefill": Story(
        FULL, [attend(9)], attend(5), options=dict(prefill="streaming", prefill_chunk=2)
    ),
    "few tokens of rows with their budgets": Story(RATIOS, [attend(9, PADDED)], attend(3)),
    "recorded prompt": Story(FULL, [], attend(9), options=RECORDED),
    "recorded prompt with drafts": Story(FULL, [], attend(12), [crop(2), attend(1)], RECORDED),
    "recorded prompt in parts, with drafts": Story(
        FULL, [attend(7)], attend(5), [crop(2), attend(1)], RECORDED
    ),
    "recorded prompt in parts, with drafts, of a window": Story(
        EvictionPolicy(num_heavy=0, num_recent=6), [attend(7)], attend(5), [crop(2)], RECORDED
    ),
    "recorded step": Story(FULL, [attend(9), attend(2)], attend(1), [crop(2), attend(1)], RECORDED),
    "recorded steps, an old entry leaves": Story(
        FULL,
        [attend(9), attend(4), attend(2), attend(2)],
        attend(1),
        [crop(4), attend(1)],
        RECORDED,
    ),
    "recorded drafts": Story(FULL, [attend(9)], attend(5), [crop(3), attend(1)], RECORDED),
    "recorded drafts of rows with padding": Story(
        RATIOS,
        [attend(9, PADDED)],
        attend(3, [[1, 0, 1], [1, 1, 1]]),
        [crop(2), attend(1)],
        dict(prompt_length=[5, 9], max_rollback=4),
    ),
    "too many to be recorded": Story(
        FULL, [attend(9), attend(2)], attend(7), [attend(2), crop(1)], RECORDED
    ),
    "crop": Story(FULL, [attend(9), attend(5)], crop(3), [attend(2), crop(1)], RECORDED),
    "crop over several forwards": Story(
        FULL, [attend(9), attend(2), attend(1), attend(2)], crop(4), [attend(2), crop(2)], RECORDED
    ),
    "reset": Story(RATIOS, [attend(9, PADDED), attend(1)], reset, [attend(9)], copy=copy.deepcopy),
}


def is_verified(cache: H2OCache) -> bool:
    """Whether the last forward was recorded, or none is."""
    journals = [layer.last_complete().journal for layer in cache.layers]
    return not any(journal is not None and journal.unverified for journal in journals)


STORY_NUMBER = {name: number for number, name in enumerate(STORIES)}
# All events take minutes; other ones in each story show the same.
STRIDE = 1 if os.environ.get("H2O_EVERY_INTERRUPT") else 3

# So many runs one after the other that were not stopped any more are the end of a story.
ENDS = 10

# What a user may do next: each finds the cache whole, and so does going on at once.
NEXT: list[Act] = [
    lambda cache: cache.fork(1),
    lambda cache: cache.reorder_cache(torch.arange(len((cache.tokens_kept() or [[0]])[0]))),
    lambda cache: cache.crop(0) if is_verified(cache) else cache.fork(1),
]


@pytest.mark.parametrize("name", STORIES)
def test_a_forward_that_stops_at_any_bytecode_has_happened_or_not(name: str) -> None:
    story = STORIES[name]
    clean = story.start()
    states = {False: everything(clean)}
    story.stopped(clean)
    states[True] = everything(clean)
    assert not same(states[False], states[True])
    length = {happened: state[1] for happened, state in states.items()}
    outputs = [act(clean) for act in story.after]
    end = everything(clean)

    first, at, seen = story.start(), STORY_NUMBER[name] % STRIDE, set()
    assert same(everything(story.copy(first)), states[False])
    at_end, ended = False, 0
    # Runs differ by a few events (sets of caches have no order): one that ends early is not the last.
    while ended < ENDS:
        at += 1 if at_end else STRIDE
        cache = story.copy(first)
        if not interrupted(at, lambda c=cache: story.stopped(c), PACKAGE, opcodes=True):
            ended += 1
            if not at_end:
                # Few come after a forward has happened: of the last ones none is left out.
                at_end, at = True, max(0, at - 5 * STRIDE)
            continue
        ended = 0
        where = f"event {at}"
        if at % 4:  # Else it goes on at once.
            NEXT[at % 4 - 1](cache)
            happened = same(everything(cache), states[True])
            assert happened or same(everything(cache), states[False]), where
            seen.add(happened)
            continue
        happened = cache.get_seq_length() == length[True]
        assert happened or cache.get_seq_length() == length[False], where
        if not happened:
            story.stopped(cache)
        for act, output in zip(story.after, outputs, strict=True):
            again = act(cache)
            if output is not None:
                assert all(map(torch.equal, again, output)), where
        assert same(everything(cache), end), where
    assert same(everything(cache), states[True])
    assert seen == {True, False}
    assert at > 30


CHANGES: dict[str, Act] = {
    "fork": lambda cache: cache.fork(1),
    "larger budget": lambda cache: cache.set_budget(num_heavy=9),
    "smaller budget": lambda cache: cache.set_budget(num_heavy=1),
    "reset of a fork": reset,
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_that_stops_leaves_a_cache_that_goes_on_or_says_why(name: str) -> None:
    first, at, refused, went_on = H2OCache(CONFIG, FULL), 0, 0, 0
    for act in (attend(9), attend(1)):
        act(first)
    before = everything(first)
    while True:
        at += 2
        cache = copy.deepcopy(first)
        other = cache.fork(1) if name == "reset of a fork" else None
        if not interrupted(at, lambda c=cache: CHANGES[name](c), PACKAGE, opcodes=True):
            break
        if cache._progress.pending is not None and "budget" in name:
            with pytest.raises(RuntimeError, match="stopped half-way"):
                attend(1)(cache)
            refused += 1
        else:
            attend(1)(cache)
            went_on += 1
        cache.reset()
        attend(9)(cache)
        attend(1)(cache)
        assert same(everything(cache), before), f"event {at}"
        if other is not None:
            assert same(everything(other), before), f"event {at}"
    assert went_on > 0
    assert (refused > 0) == ("budget" in name)


# ---- Models.


@pytest.mark.parametrize("what", ["prefill", "step", "tokens", "drafts"])
@pytest.mark.parametrize("family", ["llama", "opt", "gpt_neox"])
def test_a_model_that_stops_at_any_line_goes_on_as_if_it_had_not(family: str, what: str) -> None:
    model = tiny_model(family, dtype=torch.float64)
    ids, mask = left_padded([tokens(1, 5)[0], tokens(1, 9)[0]])
    columns = {"prefill": [9], "step": [9, 1], "tokens": [9, 4], "drafts": [9, 4]}[what] + [1, 2]
    options: dict[str, Any] = {}
    if what == "drafts":
        options = dict(prompt_length=[5, 9], max_rollback=4)
    more = tokens(2, sum(columns) - 9, seed=1)
    ids, mask = torch.cat([ids, more], 1), torch.cat([mask, torch.ones_like(more)], 1)

    def run(cache: H2OCache, end: int) -> Tensor:
        """Logits of the columns not seen yet, up to `end`: what generate would feed."""
        new = slice(cache.get_seq_length(), end)
        positions = (mask[:, :end].cumsum(1) - 1).clamp(min=0)[:, new]
        logits: Tensor = forward(model, ids[:, new], cache, mask[:, :end], position_ids=positions)
        return logits

    first = H2OCache(model.config, RATIOS, **options)
    ends = [sum(columns[: i + 1]) for i in range(len(columns))]
    for end in ends[:-3]:
        run(first, end)
    clean = copy.deepcopy(first)
    logits = [run(clean, end) for end in ends[-3:]]
    folders = (PACKAGE, TRANSFORMERS)
    at, lost = STORY_NUMBER["prefill"], {False: 0, True: 0}
    while True:
        at += 3 * STRIDE
        cache = copy.deepcopy(first)
        if not interrupted(at, lambda c=cache: run(c, ends[-3]), *folders, opcodes=False):
            break
        happened = cache.get_seq_length() == ends[-3]
        lost[happened] += 1
        if not happened:
            assert torch.equal(run(cache, ends[-3]), logits[0])
        for end, output in zip(ends[-2:], logits[1:], strict=True):
            assert torch.equal(run(cache, end), output)
        assert same(everything(cache), everything(clean))
    assert min(lost.values()) > 0
    assert at > 300


class Stop(Exception):
    """What a test raises."""


class StoppingStreamer(BaseStreamer):
    """Raises at the fifth token."""

    def __init__(self) -> None:
        self.count = 0

    def put(self, value: Tensor) -> None:
        self.count += 1
        if self.count > 5:
            raise Stop

    def end(self) -> None: ...


class StoppingProcessor(LogitsProcessor):
    """Raises at the fifth token."""

    count = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.count += 1
        if self.count > 5:
            raise Stop
        return scores


class Criterion(StoppingCriteria):
    """Raises at the fifth token."""

    count = 0

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Any:
        self.count += 1
        if self.count >= 5:
            raise Stop
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


@pytest.mark.parametrize("who", ["streamer", "processor", "criterion"])
def test_an_error_between_the_steps_of_generate_costs_nothing(who: str) -> None:
    model = tiny_model("llama", dtype=torch.float64)
    ids = tokens(1, 9)
    want = generate(model, ids, H2OCache(model.config, FULL), new=12)
    cache = H2OCache(model.config, FULL)
    options: dict[str, Any] = {
        "streamer": {"streamer": StoppingStreamer()},
        "processor": {"logits_processor": LogitsProcessorList([StoppingProcessor()])},
        "criterion": {"stopping_criteria": [Criterion()]},
    }[who]
    with pytest.raises(Stop):
        generate(model, ids, cache, new=12, **options)
    seen = cache.get_seq_length() - 9
    assert seen in (4, 5)
    text = torch.cat([ids, want[:, : seen + 1]], 1)
    assert torch.equal(generate(model, text, cache, new=11 - seen), want[:, seen + 1 :])
    assert cache.get_seq_length() == 9 + 11


@pytest.mark.parametrize("who", ["mlp", "norm"])
def test_an_error_inside_a_model_is_taken_back(who: str) -> None:
    model = tiny_model("llama", dtype=torch.float64)
    ids = tokens(1, 9)
    want = generate(model, ids, H2OCache(model.config, FULL), new=12)
    cache = H2OCache(model.config, FULL)
    module = {"mlp": model.model.layers[0].mlp, "norm": model.model.layers[1].input_layernorm}[who]
    calls = 0

    def fail(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise torch.OutOfMemoryError("no memory")

    hook = module.register_forward_pre_hook(fail)
    with pytest.raises(torch.OutOfMemoryError):
        generate(model, ids, cache, new=12)
    hook.remove()
    assert cache.get_seq_length() == 11
    assert cache.tokens_kept()[0].max() == 6
    text = torch.cat([ids, want[:, :3]], 1)
    assert torch.equal(generate(model, text, cache, new=9), want[:, 3:])


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, although a shell's background jobs are started to ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.skipif(sys.platform == "win32", reason="SIGINT cannot be sent to oneself there")
def test_ctrl_c_in_generate_is_taken_back(interruptible: None) -> None:
    model = tiny_model("llama", dtype=torch.float64)
    ids, new = tokens(2, 9), 60
    want = generate(model, ids, H2OCache(model.config, FULL), new=new)
    text, cache, interrupts = ids, H2OCache(model.config, FULL), 0
    for attempt in range(200):
        timer = threading.Timer(0.005 + 0.0007 * attempt, signal.raise_signal, [signal.SIGINT])
        try:
            timer.start()
            generate(model, text, cache, new=ids.shape[1] + new - text.shape[1])
            timer.join()  # It may come after the end.
            time.sleep(0.01)
        except KeyboardInterrupt:
            interrupts += 1
        timer.join()
        seen = cache.get_seq_length() - ids.shape[1]
        if seen == new - 1:
            break
        text = torch.cat([ids, want[:, : max(seen, 0) + 1]], 1) if seen >= 0 else ids
    assert interrupts > 3
    whole = H2OCache(model.config, FULL)
    generate(model, ids, whole, new=new)
    assert same(everything(cache), everything(whole))


def test_a_first_forward_that_stopped_leaves_no_window() -> None:
    model = tiny_model("mistral", sliding_window=30)
    cache = H2OCache(model.config, FULL)

    def fail(*_: Any) -> None:
        raise Stop

    hook = model.model.layers[0].mlp.register_forward_pre_hook(fail)
    with pytest.raises(Stop):
        forward(model, tokens(1, 5), cache)
    hook.remove()
    assert [layer.state().window for layer in cache.fork(1).layers] == [None, None]
    forward(model, tokens(1, 5), cache)
    assert [layer.state().window for layer in cache.fork(1).layers] == [30, 30]


# ---- What it costs, and what still raises.


def test_copies_are_freed_when_the_forward_has_happened() -> None:
    model = tiny_model("llama")
    cache = H2OCache(model.config, FULL)
    forward(model, tokens(2, 9), cache)
    forward(model, tokens(2, 8), cache)
    assert cache._progress.undo == {}
    assert cache.nbytes().undo == 0
    sizes = set()
    for i in range(3):
        forward(model, tokens(2, 1, seed=i), cache)
        sizes.add(cache.nbytes().undo)
    # In each layer scores and positions, tokens_seen, and a key and a value.
    assert sizes == {2 * (2 * 2 * 6 * 8 + 2 * 4 + 2 * 2 * 2 * 8 * 4)}
    assert cache.nbytes().total == sum(
        (cache.nbytes().kv, cache.nbytes().bookkeeping, cache.nbytes().undo)
    )


def test_a_step_copies_scores_and_positions_and_nothing_more() -> None:
    model = tiny_model("llama")
    cache = H2OCache(model.config, FULL)
    for n in (9, 1):
        forward(model, tokens(2, n), cache)
    rooms = [layer.step_room for layer in cache.layers]
    with Calls() as calls:
        forward(model, tokens(2, 1), cache)
    assert calls.names.count("aten._foreach_copy_.default") == 2
    assert not [name for name in calls.names if "clone" in name and "contiguous" not in name]
    assert rooms == [layer.step_room for layer in cache.layers]
    cache.batch_repeat_interleave(2)
    forward(model, tokens(4, 1), cache)
    assert rooms != [layer.step_room for layer in cache.layers]


def test_rows_that_stopped_moving_must_be_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    cache = H2OCache(model.config, FULL)
    forward(model, tokens(2, 9), cache)

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(cache.layers[1], "_take_rows", stop)
        with pytest.raises(KeyboardInterrupt):
            cache.reorder_cache(torch.tensor([1, 0]))
    match = r"^H2OCache: reorder_cache stopped half-way, and rows may be mixed up: reset\(\)$"
    for use in (
        lambda: forward(model, tokens(2, 1), cache),
        lambda: cache.fork(1),
        lambda: cache.release(0),
        lambda: cache.reorder_cache(torch.tensor([1, 0])),
        cache.get_seq_length,
    ):
        with pytest.raises(RuntimeError, match=match):
            use()
    cache.reset()
    fresh = H2OCache(model.config, FULL)
    assert torch.equal(forward(model, tokens(2, 9), cache), forward(model, tokens(2, 9), fresh))


def test_a_model_that_leaves_out_layers_is_told_of() -> None:
    model = tiny_model("llama")
    del model.model.layers[1]
    cache = H2OCache(model.config, FULL)
    for _ in range(2):
        forward(model, tokens(2, 5), cache)
    with pytest.warns(RuntimeWarning, match="two forwards in a row stopped after 1 of 2 layers"):
        forward(model, tokens(2, 5), cache)
    assert cache.get_seq_length() == 0


def test_a_last_layer_that_ignores_its_cache_raises() -> None:
    model = tiny_model("llama", attention="sdpa", num_hidden_layers=1)
    other = tiny_model("llama", num_hidden_layers=1)
    cache = H2OCache(other.config, FULL)
    for _ in range(2):
        forward(model, tokens(2, 5), cache)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the attention of layer 0 did not use its cache"):
            forward(model, tokens(2, 5), cache)
    cache.reset()
    forward(other, tokens(2, 5), cache)
    assert cache.get_seq_length() == 5
