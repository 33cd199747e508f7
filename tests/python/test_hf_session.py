"""Saved sessions: a loaded cache goes on bit for bit, and no damaged file loads as another cache."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import BartConfig, LogitsProcessor, LogitsProcessorList

from h2o_kv import EvictionPolicy, H2OCache, __version__
from h2o_kv.hf import SessionError, cache_kwarg, session
from h2o_kv.hf.memory import STATE_TENSORS
from hf_models import KINDS, forward, generate, left_padded, tiny_config, tiny_model, tokens

SMALL = EvictionPolicy(num_heavy=4, num_recent=3, num_sink=1)
RATIOS = EvictionPolicy(heavy_ratio=0.3, recent_ratio=0.2, gqa_reduce="max")


def filled(path: Path, **options: Any) -> tuple[Any, H2OCache]:
    """A tiny llama, and its cache of two rows after a prompt and a step, saved to `path`."""
    model = tiny_model("llama")
    cache = H2OCache(model.config, SMALL, **options)
    forward(model, tokens(2, 20), cache)
    forward(model, tokens(2, 1), cache)
    cache.save(path)
    return model, cache


def contents(cache: H2OCache) -> list[Any]:
    """All that a cache is, comparable with ==; tensors as their bytes, so that NaN equals itself."""
    settings = cache._settings
    parts: list[Any] = [settings.policy, settings.options()]
    for layer in cache.layers:
        state = layer.state()
        parts += [state.columns_seen, state.budget, state.window, sorted(state.tensors)]
        for name in sorted(state.tensors):
            tensor = state.tensors[name]
            raw = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            parts.append((name, tensor.dtype, tensor.shape, tensor.device, raw))
    return parts


def continued(model: Any, cache: H2OCache, steps: int = 6) -> list[Any]:
    """Logits of some steps, and the contents afterwards."""
    batch = cache.layers[0].batch_size
    logits = [forward(model, tokens(batch, 1, seed=i), cache) for i in range(steps)]
    return [[one.double().numpy().tobytes() for one in logits], contents(cache)]


class SaveAfter(LogitsProcessor):  # type: ignore[misc]
    """Saves a cache in the middle of generate, after some forwards."""

    def __init__(self, cache: H2OCache, path: Path, forwards: int) -> None:
        self.cache, self.path, self.forwards = cache, path, forwards

    def __call__(self, ids: Tensor, logits: Tensor) -> Tensor:
        self.forwards -= 1
        if self.forwards == 0:
            self.cache.save(self.path)
        return logits


# ---- A loaded cache goes on as if it had never been saved.


@pytest.mark.parametrize("prefill", ["one_shot", "streaming"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("family", KINDS)
def test_a_cache_saved_inside_generate_goes_on_in_a_new_one(
    family: str, padded: bool, prefill: str, tmp_path: Path
) -> None:
    model, ids, mask, policy = tiny_model(family), tokens(2, 14), None, SMALL
    if padded:
        policy = RATIOS
        ids, mask = left_padded([tokens(1, n, seed=n)[0] for n in (5, 13, 20)])
    cache = H2OCache(model.config, policy, prefill=prefill, prefill_chunk=4)
    save = SaveAfter(cache, tmp_path / "a", 5)
    text = generate(
        model, ids, cache, new=16, mask=mask, logits_processor=LogitsProcessorList([save])
    )
    assert len(set(text.flatten().tolist())) > 3, "constant text would prove nothing"

    loaded = H2OCache.load(tmp_path / "a", model.config)
    assert loaded.get_seq_length() == ids.shape[1] + 4
    assert (loaded.layers[0].row_budget is not None) == padded
    ids = torch.cat([ids, text[:, :5]], 1)
    if mask is not None:
        mask = torch.nn.functional.pad(mask, (0, 5), value=1)
    assert torch.equal(generate(model, ids, loaded, new=11, mask=mask), text[:, 5:])
    assert contents(loaded) == contents(cache)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_every_dtype_goes_on_bit_for_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    model = tiny_model("llama", dtype=dtype)
    cache = H2OCache(model.config, SMALL)
    forward(model, tokens(3, 12), cache)
    cache.save(tmp_path / "a")
    loaded = H2OCache.load(tmp_path / "a", model.config)
    assert loaded.layers[1].k_cache is not None
    assert loaded.layers[1].k_cache.dtype == dtype
    assert contents(loaded) == contents(cache)
    assert continued(model, loaded) == continued(model, cache)


FRESH_PROCESS = """
import sys
from hf_models import generate, tiny_model
from h2o_kv import H2OCache
import torch

torch.set_num_threads(1)
model = tiny_model("llama")
cache = H2OCache.load(sys.argv[1], model.config)
generate(model, torch.load(sys.argv[2]), cache, new=8)
cache.save(sys.argv[3])
"""


def test_a_fresh_process_goes_on_to_the_same_file(tmp_path: Path) -> None:
    model, ids = tiny_model("llama"), tokens(2, 14)
    cache = H2OCache(model.config, SMALL)
    save = LogitsProcessorList([SaveAfter(cache, tmp_path / "a", 5)])
    text = generate(model, ids, cache, new=13, logits_processor=save)
    cache.save(tmp_path / "b")
    torch.save(torch.cat([ids, text[:, :5]], 1), tmp_path / "ids")
    subprocess.run(
        [
            sys.executable,
            "-c",
            FRESH_PROCESS,
            *(str(tmp_path / name) for name in ("a", "ids", "c")),
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=True,
    )
    assert (tmp_path / "c").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_cache_before_its_first_forward_keeps_its_settings(tmp_path: Path) -> None:
    model = tiny_model("llama")
    ids, mask = left_padded([tokens(1, 9)[0], tokens(1, 14)[0]])
    cache = H2OCache(
        model.config,
        EvictionPolicy(heavy_ratio=0.1 + 0.2, recent_ratio=1 / 3, num_sink=2, gqa_reduce="max"),
        prefill="streaming",
        prefill_chunk=10**30,
        prompt_length=[9, 14],
        dtype=torch.bfloat16,
    )
    cache.save(tmp_path / "a")
    loaded = H2OCache.load(tmp_path / "a", model.config)
    assert contents(loaded) == contents(cache)
    assert not loaded.is_initialized
    for one in (cache, loaded):
        forward(model, ids, one, mask)
    assert loaded.budgets is not None
    assert loaded.budgets[0] != loaded.budgets[1]
    assert continued(model, loaded) == continued(model, cache)


def test_a_cache_that_was_reset_or_allocated_early_is_saved_as_it_is(tmp_path: Path) -> None:
    model, cache = filled(tmp_path / "a")
    early = H2OCache(model.config, SMALL)
    early.early_initialization(2, 2, 8, torch.float32, torch.device("cpu"))
    cache.reset()
    for one in (cache, early):
        one.save(tmp_path / "a")
        loaded = H2OCache.load(tmp_path / "a", model.config)
        assert contents(loaded) == contents(one)
        assert loaded.is_initialized
        tensor = loaded.layers[0].k_cache
        forward(model, tokens(2, 9), loaded)
        assert loaded.layers[0].k_cache is tensor
        forward(model, tokens(2, 9), one)
        assert contents(loaded) == contents(one)


def test_no_rows_and_no_new_tokens_are_saved(tmp_path: Path) -> None:
    model, cache = filled(tmp_path / "a")
    layer = H2OCache(tiny_config("llama", num_hidden_layers=1), SMALL).layers[0]
    layer.attend(*(torch.zeros(2, heads, 0, 8) for heads in (4, 2, 2)), None, None)
    assert layer.last_evicted is not None
    assert layer.last_evicted.shape == (2, 2, 0)
    cache.layers[0].last_evicted = cache.layers[1].last_evicted = layer.last_evicted
    cache.save(tmp_path / "a")
    assert contents(H2OCache.load(tmp_path / "a", model.config)) == contents(cache)
    cache.batch_select_indices(torch.tensor([], dtype=torch.long))
    cache.save(tmp_path / "a")
    loaded = H2OCache.load(tmp_path / "a", model.config)
    assert contents(loaded) == contents(cache)
    assert loaded.layers[0].batch_size == 0


def test_rows_of_a_loaded_cache_move_as_one(tmp_path: Path) -> None:
    model = tiny_model("llama")
    ids, mask = left_padded([tokens(1, 8)[0], tokens(1, 20)[0]])
    cache = H2OCache(model.config, RATIOS)
    forward(model, ids, cache, mask)
    cache.save(tmp_path / "a")
    loaded = H2OCache.load(tmp_path / "a", model.config)
    for one in (cache, loaded):
        one.reorder_cache(torch.tensor([1, 0]))
        one.batch_repeat_interleave(2)
        one.batch_select_indices(torch.tensor([0, 3, 1]))
    assert continued(model, loaded.fork(2)) == continued(model, cache.fork(2))


def test_what_inference_mode_saved_and_loaded_is_usable_outside(tmp_path: Path) -> None:
    model = tiny_model("llama")
    cache = H2OCache(model.config, SMALL)
    with torch.inference_mode():
        forward(model, tokens(2, 12), cache)
        cache.save(tmp_path / "a")
        loaded = H2OCache.load(tmp_path / "a", model.config)
    cache.save(tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert not any(
        t.is_inference() for layer in loaded.layers for t in layer.state().tensors.values()
    )
    loaded.reorder_cache(torch.tensor([1, 0]))
    cache.reorder_cache(torch.tensor([1, 0]))
    assert continued(model, loaded) == continued(model, cache)


def test_a_loaded_cache_owns_its_memory(tmp_path: Path) -> None:
    model, cache = filled(tmp_path / "a")
    before = (tmp_path / "a").read_bytes()
    loaded = H2OCache.load(tmp_path / "a", model.config)
    continued(model, loaded)
    assert (tmp_path / "a").read_bytes() == before
    (tmp_path / "a").write_bytes(b"")
    assert continued(model, cache)[1] == contents(loaded)


def test_a_step_of_a_loaded_cache_compiles_to_one_graph(tmp_path: Path) -> None:
    model, cache = filled(tmp_path / "a")
    loaded = H2OCache.load(tmp_path / "a", model.config)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    step = torch.compile(model.forward, fullgraph=True, backend=counter)
    with torch.no_grad():
        for i in range(4):
            step(tokens(2, 1, seed=i), **{cache_kwarg(model): loaded})
    forward(model, tokens(2, 1), cache)
    assert counter.frame_count == 1
    torch._dynamo.reset()


def test_the_window_is_the_one_that_the_sequence_started_with(tmp_path: Path) -> None:
    model = tiny_model("mistral", sliding_window=30)
    cache = H2OCache(model.config, SMALL)
    forward(model, tokens(1, 20), cache)
    cache.save(tmp_path / "a")
    loaded = H2OCache.load(tmp_path / "a", tiny_config("mistral", sliding_window=None))
    assert loaded.layers[0].window() == cache.layers[0].window() == 30


# ---- The file.


def opened(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Header and tensors of a file."""
    with safe_open(path, "pt") as file:
        assert list(file.metadata()) == ["h2o_kv_session"]
        header = json.loads(file.metadata()["h2o_kv_session"])
        return header, {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118


def digest(tensor: Tensor) -> str:
    text = f"{str(tensor.dtype)[6:]} {list(tensor.shape)} "
    raw = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(text.encode() + raw).hexdigest()


def signed(header: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    """The header with checksums as they must be."""
    header = {key: value for key, value in header.items() if key != "sha256"}
    if isinstance(header.get("layers"), list):
        for i, layer in enumerate(header["layers"]):
            if isinstance(layer, dict) and isinstance(layer.get("sha256"), dict):
                prefix = f"layers.{i}."
                layer["sha256"] = {
                    name.removeprefix(prefix): digest(tensor)
                    for name, tensor in tensors.items()
                    if name.startswith(prefix)
                }
    text = json.dumps(header, sort_keys=True, separators=(",", ":"))
    return {**header, "sha256": hashlib.sha256(text.encode()).hexdigest()}


def write(path: Path, header: Any, tensors: dict[str, Tensor]) -> None:
    text = header if isinstance(header, str) else json.dumps(header)
    save_file(tensors, path, metadata={"h2o_kv_session": text})


def test_the_file_is_what_the_documentation_says(tmp_path: Path) -> None:
    _, cache = filled(tmp_path / "a", dtype=torch.float16, prompt_length=20)
    header, tensors = opened(tmp_path / "a")
    assert signed(header, tensors) == header
    for i, layer in enumerate(header.pop("layers")):
        assert layer.pop("sha256").keys() == cache.layers[i].state().tensors.keys()
        budget = {"num_sink": 1, "num_heavy": 4, "num_recent": 3}
        assert layer == {"columns_seen": 21, "budget": budget, "window": None, "device": "cpu"}
    del header["sha256"]
    assert header == {
        "format": "h2o-kv session",
        "version": 3,
        "library": __version__,
        "model": {
            "model_type": "llama",
            "num_hidden_layers": 2,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        },
        "policy": {
            "num_heavy": 4,
            "num_recent": 3,
            "num_sink": 1,
            "heavy_ratio": None,
            "recent_ratio": None,
            "gqa_reduce": "sum",
            "score_rule": "sum",
            "score_decay": 1.0,
            "score_seed": 0,
            "score_queries": 0,
            "score_pool": 1,
            "pattern_stride": 0,
            "pattern_columns": 0,
            "read_slots": 0,
            "read_page": 1,
        },
        "options": {
            "prefill": "one_shot",
            "prefill_chunk": 64,
            "prompt_length": 20,
            "dtype": "float16",
            "max_rollback": None,
            "positions": "original",
        },
        "budget_events": [],
    }
    names = ["keys", "values", "scores", "positions", "tokens_seen", "last_evicted"]
    assert tensors.keys() == {f"layers.{i}.{name}" for i in (0, 1) for name in names}
    for i, layer in enumerate(cache.layers):
        assert all(
            torch.equal(tensors[f"layers.{i}.{name}"], getattr(layer, name)) for name in names
        )


def test_every_tensor_of_a_layer_has_its_place_in_the_file() -> None:
    assert session._AXES.keys() == set(STATE_TENSORS)


def test_equal_caches_make_equal_files(tmp_path: Path) -> None:
    model, cache = filled(tmp_path / "a")
    cache.save(str(tmp_path / "b"))
    H2OCache.load(str(tmp_path / "b"), model.config).save(tmp_path / "c")
    assert len({(tmp_path / name).read_bytes() for name in "abc"}) == 1


# ---- Writing all or nothing.


class Halfway:
    """Stands for `save_file`; writes a part and raises."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __call__(self, tensors: Any, path: Path, **kwargs: Any) -> None:
        path.write_bytes(b"half")
        raise self.error


@pytest.mark.parametrize("error", [OSError("disk is on fire"), KeyboardInterrupt(), ValueError()])
@pytest.mark.parametrize("exists", [True, False])
def test_a_write_that_fails_leaves_what_was_there(
    error: BaseException, exists: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, cache = filled(tmp_path / "a")
    before = (tmp_path / "a").read_bytes()
    if not exists:
        (tmp_path / "a").unlink()
    monkeypatch.setattr(session, "save_file", Halfway(error))
    with pytest.raises(type(error)):
        cache.save(tmp_path / "a")
    assert [path.name for path in tmp_path.iterdir()] == ["a"] * exists
    assert not exists or (tmp_path / "a").read_bytes() == before


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_an_end_that_fails_leaves_what_was_there(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, cache = filled(tmp_path / "a")
    before = (tmp_path / "a").read_bytes()
    forward(model, tokens(2, 1), cache)

    def fail(*args: Any) -> None:
        raise OSError("no more")

    with monkeypatch.context() as patched:
        patched.setattr(os, call, fail)
        with pytest.raises(OSError, match="no more"):
            cache.save(tmp_path / "a")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_bytes() == before
    cache.save(tmp_path / "a")
    assert (tmp_path / "a").read_bytes() != before


# A process that cannot write past 4 kB of a file: an error there, or its end.
FULL_DISK = """
import resource
import signal
import sys
from pathlib import Path
from h2o_kv import EvictionPolicy, H2OCache
from hf_models import forward, tiny_model, tokens

model = tiny_model("llama")
cache = H2OCache(model.config, EvictionPolicy(num_heavy=40, num_recent=40))
forward(model, tokens(2, 90), cache)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
signal.signal(signal.SIGXFSZ, signal.SIG_DFL if sys.argv[2] == "kill" else signal.SIG_IGN)
try:
    cache.save(sys.argv[1])
except OSError as error:
    assert str(error).startswith(f"H2OCache.save: {sys.argv[1]} cannot be written: "), error
    assert len(list(Path(sys.argv[1]).parent.iterdir())) == 1
    print("refused")
"""


@pytest.mark.parametrize("kill", [False, True])
def test_a_full_disk_or_a_kill_leaves_the_old_file(kill: bool, tmp_path: Path) -> None:
    filled(tmp_path / "a")
    before = (tmp_path / "a").read_bytes()
    assert len(before) > 4096
    ended = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path / "a"), "kill" if kill else "fail"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    if kill:
        assert ended.returncode == -signal.SIGXFSZ, ended
    else:
        assert ended.stdout.endswith("refused\n"), ended
    assert (tmp_path / "a").read_bytes() == before


def test_what_safetensors_calls_an_error_of_its_own_is_an_error_of_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, cache = filled(tmp_path / "a")
    monkeypatch.setattr(session, "save_file", Halfway(SafetensorError("I/O error: No space left")))
    with pytest.raises(OSError, match=r"H2OCache.save: .*/a cannot be written: .* No space left"):
        cache.save(tmp_path / "a")


def test_a_link_stays_and_the_mode_is_that_of_any_new_file(tmp_path: Path) -> None:
    model, cache = filled(tmp_path / "a")
    (tmp_path / "link").symlink_to("a")
    (tmp_path / "plain").touch()
    forward(model, tokens(2, 1), cache)
    cache.save(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert H2OCache.load(tmp_path / "a", model.config).get_seq_length() == 22
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    cache = H2OCache(tiny_config("llama"), SMALL)
    with pytest.raises(
        FileNotFoundError, match="^H2OCache.save: the folder must exist, got .*/no$"
    ):
        cache.save(tmp_path / "no" / "a")
    with pytest.raises(
        IsADirectoryError, match="^H2OCache.save: the file must not be a folder, got"
    ):
        cache.save(tmp_path)


# ---- What is refused.


def refused(path: Path, config: Any, match: str) -> None:
    with pytest.raises(SessionError, match=match) as caught:
        H2OCache.load(path, config)
    assert str(caught.value).startswith(f"H2OCache.load: {path}: ")


def test_layers_that_are_not_in_step_are_not_saved(tmp_path: Path) -> None:
    _, cache = filled(tmp_path / "a")
    before = (tmp_path / "a").read_bytes()
    cache.layers[0].columns_seen += 1
    match = "^H2OCache.save: .*/a: layer 1: columns_seen must be those of layer 0 = 22, got 21; a "
    with pytest.raises(SessionError, match=match):
        cache.save(tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == before


def test_another_model_is_refused_by_the_fields_that_differ(tmp_path: Path) -> None:
    filled(tmp_path / "a")
    for config, match in (
        (tiny_config("llama", hidden_size=64), "hidden_size=32, got hidden_size=64$"),
        (tiny_config("mistral"), "model_type='llama', got model_type='mistral'$"),
        (
            tiny_config("opt", num_hidden_layers=3),
            r"model_type='llama', num_hidden_layers=2, num_key_value_heads=2, got "
            r"model_type='opt', num_hidden_layers=3, num_key_value_heads=None$",
        ),
    ):
        refused(tmp_path / "a", config, "config must be that of the model that was saved, " + match)
    with pytest.raises(TypeError, match="H2OCache: config must be that of a model, .* got 'llama'"):
        H2OCache.load(tmp_path / "a", "llama")
    with pytest.raises(ValueError, match=r"decoder-only, got is_encoder_decoder=True") as caught:
        H2OCache.load(tmp_path / "a", BartConfig())
    assert not isinstance(caught.value, SessionError)


def test_files_that_are_no_sessions_are_refused(tmp_path: Path) -> None:
    config, path = tiny_config("llama"), tmp_path / "a"
    for content in (
        b"",
        b"\0",
        b"Call me Ishmael.",
        b"\xff" * 100,
        b"\x08" + b"\0" * 7 + b"{}      ",
    ):
        path.write_bytes(content)
        refused(
            path, config, "must be a file that safetensors reads, got: |must be a saved session"
        )
    for lie in (
        '{"a":{"dtype":"F32","shape":[1099511627776],"data_offsets":[0,4398046511104]}}',
        "{",
    ):
        path.write_bytes((len(lie) << 50 * (lie == "{")).to_bytes(8, "little") + lie.encode())
        refused(path, config, "must be a file that safetensors reads, got: ")
    save_file({"keys": torch.ones(3)}, path)
    refused(path, config, 'must be a saved session, got .* without metadata "h2o_kv_session"$')
    save_file({"keys": torch.ones(3)}, path, metadata={"format": "pt"})
    refused(path, config, "must be a saved session, got .* without metadata")
    with pytest.raises(FileNotFoundError, match="nothing"):
        H2OCache.load(tmp_path / "nothing", config)
    with pytest.raises(IsADirectoryError):
        H2OCache.load(tmp_path, config)


@pytest.mark.parametrize("version", [0, 4])
def test_another_format_is_refused_by_its_version(version: int, tmp_path: Path) -> None:
    model, _ = filled(tmp_path / "a")
    header, tensors = opened(tmp_path / "a")
    write(tmp_path / "a", {**header, "version": version, "library": "7.5", "new": 1}, tensors)
    match = (
        rf"version must be in 1..3, the latest that h2o-kv {__version__} reads, got {version}, "
        "written by h2o-kv '7.5'$"
    )
    refused(tmp_path / "a", model.config, match)


def test_a_file_of_the_first_version_loads(tmp_path: Path) -> None:
    model, cache = filled(tmp_path / "a")
    header, tensors = opened(tmp_path / "a")
    del header["budget_events"]
    for name in [
        name for name in header["policy"] if name.startswith(("score_", "pattern_", "read_"))
    ]:
        del header["policy"][name]
    write(tmp_path / "a", signed({**header, "version": 1}, tensors), tensors)
    loaded = H2OCache.load(tmp_path / "a", model.config)
    assert contents(loaded) == contents(cache)
    assert loaded.budget_events == []
    write(tmp_path / "a", signed({**header, "version": 2}, tensors), tensors)
    refused(tmp_path / "a", model.config, "header must have the keys")


@pytest.mark.parametrize("of_rows", [False, True])
def test_a_file_of_the_second_version_loads(of_rows: bool, tmp_path: Path) -> None:
    """It has no rules in its policy, or in those of its rows."""
    model = tiny_model("llama")
    policies = [EvictionPolicy(num_heavy=4, num_recent=n) for n in (4, 2)]
    cache = H2OCache(model.config, policies if of_rows else policies[0])
    forward(model, tokens(2, 12), cache)
    cache.save(tmp_path / "a")
    header, tensors = opened(tmp_path / "a")
    for policy in header["policy"] if of_rows else [header["policy"]]:
        for name in list(policy):
            if name.startswith(("score_", "pattern_", "read_")):
                del policy[name]
    write(tmp_path / "a", signed({**header, "version": 2}, tensors), tensors)
    loaded = H2OCache.load(tmp_path / "a", model.config)
    assert loaded.row_policies == cache.row_policies
    assert contents(loaded) == contents(cache)


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
def test_a_number_that_is_not_finite_is_refused(number: str, tmp_path: Path) -> None:
    model, _ = filled(tmp_path / "a")
    header, tensors = opened(tmp_path / "a")
    text = json.dumps(header).replace('"score_decay": 1.0', f'"score_decay": {number}')
    write(tmp_path / "a", text, tensors)
    refused(tmp_path / "a", model.config, f"header must be JSON.* finite, got {number}")


def test_damage_is_refused_by_its_place(tmp_path: Path) -> None:
    model, _ = filled(tmp_path / "a")
    header, tensors = opened(tmp_path / "a")
    damaged = {name: tensor.clone() for name, tensor in tensors.items()}
    damaged["layers.1.values"][0, 0, 0, 0] += 1
    write(tmp_path / "a", header, damaged)
    match = (
        "layer 1: values must have the sha256 that was saved, '.*', got [0-9a-f]{64}; the file is"
    )
    refused(tmp_path / "a", model.config, match)
    reshaped = {**tensors, "layers.0.scores": tensors["layers.0.scores"].view(2, 8, 2)}
    write(tmp_path / "a", header, reshaped)
    refused(tmp_path / "a", model.config, "layer 0: scores must have the sha256")
    retyped = {**tensors, "layers.0.scores": tensors["layers.0.scores"].view(torch.int32)}
    write(tmp_path / "a", header, retyped)
    refused(tmp_path / "a", model.config, "layer 0: scores must have the sha256")
    header["library"] = "0.1.1"
    write(tmp_path / "a", header, tensors)
    refused(tmp_path / "a", model.config, "header must have the sha256 that was saved, '.*', got ")


Header, Tensors = dict[str, Any], dict[str, Tensor]


def first_layer(**fields: Any) -> Callable[[Header, Tensors], None]:
    return lambda header, tensors: header["layers"][0].update(fields)


def entries(**fields: Any) -> Callable[[Header, Tensors], None]:
    return lambda header, tensors: header.update(fields)


def nested(key: str, **fields: Any) -> Callable[[Header, Tensors], None]:
    return lambda header, tensors: header[key].update(fields)


def every_layer(**fields: Any) -> Callable[[Header, Tensors], None]:
    def change(header: Header, tensors: Tensors) -> None:
        for layer in header["layers"]:
            layer.update(fields)

    return change


def tensor(name: str, value: Callable[[Tensor], Tensor]) -> Callable[[Header, Tensors], None]:
    def change(header: Header, tensors: Tensors) -> None:
        tensors[f"layers.0.{name}"] = value(tensors[f"layers.0.{name}"]).contiguous()

    return change


def last_token_unseen(header: Header, tensors: Tensors) -> None:
    """Layer 1 is a token behind in its first row."""
    tensors["layers.1.tokens_seen"][0] = 20
    positions = tensors["layers.1.positions"]
    positions[positions == 20] = -1


def added(name: str, value: Tensor) -> Callable[[Header, Tensors], None]:
    return lambda header, tensors: tensors.update({name: value})


def removed(name: str) -> Callable[[Header, Tensors], None]:
    return lambda header, tensors: [tensors.pop(f"layers.{i}.{name}") for i in (0, 1)]


def put(index: Any, value: float) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        tensor[index] = value
        return tensor

    return change


def wide(*shape: int) -> Callable[[Header, Tensors], None]:
    """Tensors of no element and huge axes."""

    def change(header: Header, tensors: Tensors) -> None:
        tensors["layers.0.keys"] = torch.zeros(*shape, 8)
        tensors["layers.0.values"] = torch.zeros(*shape, 8)
        tensors["layers.0.scores"] = torch.zeros(shape)
        tensors["layers.0.positions"] = torch.zeros(shape, dtype=torch.int32)

    return change


BUDGET = {"num_sink": 1, "num_heavy": 4, "num_recent": 3}
EVENT: dict[str, Any] = {
    "position": 9,
    "time": 0.5,
    "old": [BUDGET],
    "new": [BUDGET],
    "max_evictions_per_step": None,
    "held_at": None,
}


def event(**fields: Any) -> Callable[[Header, Tensors], None]:
    return entries(budget_events=[{**EVENT, **fields}])


def row_target(
    counts: list[list[int]], budgets: list[list[int]] | None = [[1, 4, 3]] * 2
) -> Callable[[Header, Tensors], None]:
    """Layer 0 moves from budgets of its rows to these."""

    def change(header: Header, tensors: Tensors) -> None:
        for name, rows in (("row_target", counts), ("row_budget", budgets)):
            if rows is not None:
                tensors[f"layers.0.{name}"] = torch.tensor(rows, dtype=torch.int32)

    return change


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (entries(format="another"), 'header must have format "h2o-kv session", got {'),
        (entries(version=0.5), r"version must be an integer >= 0, got 0\.5"),
        (entries(version=True), "version must be an integer >= 0, got True"),
        (entries(extra=1), r"header must have the keys \['budget_events', 'format', .*, got {"),
        (entries(layers=None), "layers must be a list, got None"),
        (entries(layers=[]), "layers must be num_hidden_layers = 2, got 0|header must name all"),
        (entries(layers=[5, 6]), r"layer 0: header must have the keys \['budget', .*, got 5"),
        (entries(model=[]), r"model must have the keys \['hidden_size', .*, got \[\]"),
        (nested("model", hidden_size=[32]), r"saved, hidden_size=\[32\], got hidden_size=32"),
        (entries(policy={}), r"policy must have the keys \['gqa_reduce', .*, got {}"),
        (nested("policy", num_heavy=-1), "EvictionPolicy: num_heavy must be >= 0, got -1"),
        (nested("policy", num_heavy="4"), "EvictionPolicy: num_heavy must be an integer, got '4'"),
        (nested("policy", gqa_reduce="mean"), 'gqa_reduce must be one of "sum", "max", got "mean"'),
        (
            nested("policy", heavy_ratio=10**400),
            "policy must be one that can be, got {'gqa_reduce'",
        ),
        (
            nested("policy", gqa_reduce="\ud800"),
            "policy must be one that can be, got {'gqa_reduce'",
        ),
        (nested("options", prefill="lazy"), ': prefill must be one of .*, got "lazy"'),
        (nested("options", prefill_chunk=0), ": prefill_chunk must be >= 1, got 0"),
        (nested("options", prompt_length=[3, 0]), r": prompt_length must be >= 1 .* got \[3, 0\]"),
        (nested("options", prompt_length="9"), ": prompt_length must be an integer, got '9'"),
        (nested("options", dtype="int8"), ": dtype must be one of torch.float32, .* got 'int8'"),
        (nested("options", dtype="auto"), ": dtype must be one of torch.float32, .* got 'auto'"),
        (nested("options", dtype=["float32"]), "unhashable type: 'list'"),
        (
            nested("options", dtype="float16"),
            "layer 0: keys must be torch.float16, got torch.float32",
        ),
        (entries(budget_events={}), "budget_events must be a list, got {}"),
        (entries(budget_events=[{}]), r"budget_events must have the keys \['held_at', .*, got {}"),
        (event(position=-1), "position must be an integer >= 0, got -1"),
        (event(time="noon"), "time must be a number of seconds, got 'noon'"),
        (event(held_at=0.5), r"held_at must be an integer >= 0, got 0\.5"),
        (event(max_evictions_per_step=True), "max_evictions_per_step must be an integer >= 0"),
        (event(old=None), "old must be a list, got None"),
        (event(new=[{}]), r"new must have the keys \['num_heavy', 'num_recent', 'num_sink'\], got"),
        (row_target(counts=[[1, 4, 3, 1]] * 2, budgets=None), "row_budget must be given where"),
        (row_target([[1, 4, 3]] * 2), r"row_target must be \[batch, counts and pace\] = \[2, 4\]"),
        (row_target([[1, 4, 3, -1]] * 2), r"row_target must be >= 0 each and >= 1 in all, got \[1"),
        (row_target([[0, 4, 3, 1]] * 2), "row_target must have num_sink and num_recent of row_bud"),
        (
            row_target([[1, 4, 3, 1], [1, 5, 3, 1]]),
            r"no more num_heavy, got \[1, 5, 3, 1\] at \[1\]",
        ),
        (row_target([[1, 3, 3, 0]] * 2), "row_target must have a pace >= 1 where row_budget has"),
        (nested("options", more=1), r"options must have the keys \['dtype', "),
        (first_layer(columns_seen=-1), "layer 0: columns_seen must be an integer >= 0, got -1"),
        (
            first_layer(columns_seen=2**63),
            "layer 0: columns_seen must be an integer >= 0, got 9223",
        ),
        (first_layer(columns_seen=21.0), r"columns_seen must be an integer >= 0, got 21\.0"),
        (
            first_layer(columns_seen=99),
            "layer 1: columns_seen must be those of layer 0 = 99, got 21",
        ),
        (
            every_layer(columns_seen=20),
            "layer 0: tokens_seen must be .* <= columns_seen = 20, got 21",
        ),
        (
            every_layer(columns_seen=0),
            "layer 0: tokens_seen must be .* <= columns_seen = 0, got 21",
        ),
        (first_layer(window="wide"), "layer 0: window must be an integer >= 0, got 'wide'"),
        (first_layer(device=3), "layer 0: device must be a name, got 3"),
        (first_layer(sha256=[]), r"layer 0: sha256 must be an object, got \[\]"),
        (first_layer(budget=None), "budget must be given where columns_seen > 0, got 21 and None"),
        (first_layer(budget=[1, 4, 3]), r"budget must have the keys \['num_heavy', .* got \[1, 4"),
        (
            first_layer(budget={**BUDGET, "num_heavy": 5}),
            "layer 0: budget must be <= capacity = 8 in",
        ),
        (first_layer(budget={**BUDGET, "num_sink": -1}), "Budget: num_sink must be >= 0, got -1"),
        (first_layer(budget={**BUDGET, "num_heavy": 10**30}), "Budget: num_heavy must be <= 2147"),
        (removed("keys"), r"layer 0: tensors must be .*, got \['last_evicted', 'positions', "),
        (added("layers.0.k_scale", torch.ones(2)), r"tensors must be .*, got \['k_scale', 'keys'"),
        (
            added("elsewhere", torch.ones(2)),
            r"header must name all tensors, got also \['elsewhere'\]",
        ),
        (
            tensor("keys", lambda t: t.int()),
            "keys must be of a floating-point dtype, got torch.int32",
        ),
        (tensor("values", lambda t: t.double()), "values must be torch.float32, got torch.float64"),
        (tensor("scores", lambda t: t.half()), "scores must be torch.float32, got torch.float16"),
        (tensor("positions", lambda t: t.long()), "positions must be torch.int32, got torch.int64"),
        (
            tensor("values", lambda t: t[..., :7]),
            r"values must be \[batch, num_kv_heads, capacity, head_dim\] = \[2, 2, 8, 8\], got "
            r"\[2, 2, 8, 7\]",
        ),
        (tensor("keys", lambda t: t[0]), r"keys must be .* = \['any', .*'any'\], got \[2, 8, 8\]"),
        (tensor("scores", lambda t: t[:1]), r"scores must be .* = \[2, 2, 8\], got \[1, 2, 8\]"),
        (tensor("positions", lambda t: t[:, :, :5]), r"positions must be .*, got \[2, 2, 5\]"),
        (
            tensor("tokens_seen", lambda t: t[:1]),
            r"tokens_seen must be \[batch\] = \[2\], got \[1\]",
        ),
        (
            added("layers.0.row_budget", torch.ones(2, 4, dtype=torch.int32)),
            r"row_budget must be \[batch, counts\] = \[2, 3\], got \[2, 4\]",
        ),
        (
            added("layers.0.row_budget", torch.tensor([[1, 4, 3], [1, 5, 3]], dtype=torch.int32)),
            r"row_budget must be >= 0 each and <= capacity = 8 in all, got \[1, 5, 3\] at \[1\]",
        ),
        (
            added("layers.0.row_budget", torch.tensor([[1, 4, 3], [-1, 4, 3]], dtype=torch.int32)),
            r"row_budget must be >= 0 .*, got \[-1, 4, 3\] at \[1\]",
        ),
        (
            tensor("last_evicted", lambda t: t[:, :1]),
            r"last_evicted must be \[batch, num_kv_heads, num_new\] = \[2, 2, 1\], got \[2, 1, 1\]",
        ),
        (
            tensor("last_evicted", put((0, 1, 0), 21)),
            r"last_evicted must be .*, got 21 at \[0, 1, 0\]",
        ),
        (
            tensor("positions", put((1, 0, 2), 21)),
            r"positions must be >= -1 and < tokens_seen of their row, got 21 at \[1, 0, 2\]",
        ),
        (
            tensor("positions", put((1, 0, 2), -2)),
            r"positions must be >= -1 .*, got -2 at \[1, 0, 2\]",
        ),
        (
            tensor("positions", put((1, 1, slice(2, 4)), 19)),
            r"positions of a row and KV head must differ, got 19 at \[1, 1, ",
        ),
        (tensor("tokens_seen", put(1, -5)), r"tokens_seen must be >= 0 .*, got -5 at \[1\]"),
        (tensor("tokens_seen", put(0, 22)), r"tokens_seen must be .* columns_seen = 21, got 22 at"),
        (
            last_token_unseen,
            r"layer 1: tokens_seen must be those of layer 0 = \[21, 21\], got \[20, 21\]",
        ),
        (wide(2, 2**40, 0), "layer 0: last_evicted must be .* = "),
        (wide(0, 2, 2**40), r"layer 0: tokens_seen must be \[batch\] = \[0\], got \[2\]"),
        (wide(2, 2, 0), "layer 0: capacity must be >= 1, got 0"),
    ],
)
def test_states_that_nothing_wrote_are_refused(
    change: Callable[[Header, Tensors], Any], match: str, tmp_path: Path
) -> None:
    model, _ = filled(tmp_path / "a")
    header, tensors = opened(tmp_path / "a")
    change(header, tensors)
    write(tmp_path / "a", signed(header, tensors), tensors)
    refused(tmp_path / "a", model.config, match)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", "NaN", "[" * 100_000, "9" * 5000, '{"format": "h2o-kv session"}'],
)
def test_headers_that_are_no_headers_are_refused(text: str, tmp_path: Path) -> None:
    write(tmp_path / "a", text, {})
    refused(tmp_path / "a", tiny_config("llama"), "header must|version must|recursion")


def test_scores_may_be_nan(tmp_path: Path) -> None:
    model, cache = filled(tmp_path / "a")
    cache.layers[0].scores[0, 1, 3] = float("nan")
    cache.save(tmp_path / "a")
    assert contents(H2OCache.load(tmp_path / "a", model.config)) == contents(cache)


def test_states_that_cannot_be_are_not_saved_either(tmp_path: Path) -> None:
    _, cache = filled(tmp_path / "a")
    before = (tmp_path / "a").read_bytes()
    cache.layers[1].positions[0, 0, 1] = 99
    with pytest.raises(
        SessionError, match="^H2OCache.save: .*: layer 1: positions must be .* 99 at"
    ):
        cache.save(tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == before


# ---- Devices.


def test_a_device_that_is_not_here_becomes_the_cpu(tmp_path: Path) -> None:
    model, cache = filled(tmp_path / "a")
    header, tensors = opened(tmp_path / "a")
    for device in ("cuda:99", "privateuseone", "no such thing", None):
        every_layer(device=device)(header, tensors)
        write(tmp_path / "a", signed(header, tensors), tensors)
        assert contents(H2OCache.load(tmp_path / "a", model.config)) == contents(cache)
    assert contents(H2OCache.load(tmp_path / "a", model.config, device="cpu")) == contents(cache)
    for name in ("cuda:99", "meta", "nowhere"):
        with pytest.raises(ValueError, match="^H2OCache.load: device must be .*, got '") as caught:
            H2OCache.load(tmp_path / "a", model.config, device=name)
        assert not isinstance(caught.value, SessionError)


def test_a_default_device_does_not_matter(tmp_path: Path) -> None:
    model, cache = filled(tmp_path / "a")
    with torch.device("meta"):
        loaded = H2OCache.load(tmp_path / "a", model.config)
    assert contents(loaded) == contents(cache)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_a_cache_returns_to_its_gpu(tmp_path: Path) -> None:
    model = tiny_model("llama").cuda()
    cache = H2OCache(model.config, SMALL)
    forward(model, tokens(2, 20).cuda(), cache)
    cache.save(tmp_path / "a")
    loaded = H2OCache.load(tmp_path / "a", model.config)
    on_cpu = H2OCache.load(tmp_path / "a", model.config, device="cpu")
    assert {layer.k_cache.device.type for layer in loaded.layers} == {"cuda"}
    assert {layer.k_cache.device.type for layer in on_cpu.layers} == {"cpu"}
    step = tokens(2, 1).cuda()
    assert torch.equal(forward(model, step, loaded), forward(model, step, cache))
    for a, b in zip(loaded.layers, cache.layers, strict=True):
        assert all(
            torch.equal(tensor, b.state().tensors[name])
            for name, tensor in a.state().tensors.items()
        )


# ---- Any damage: refused, or the very same cache.


def tiny_session(path: Path) -> tuple[Any, list[Any], bytes]:
    """A file as small as they get, with its config and contents."""
    config = tiny_config("llama", num_hidden_layers=1)
    cache = H2OCache(config, EvictionPolicy(num_heavy=1, num_recent=1))
    for _ in range(3):
        cache.layers[0].attend(*torch.randn(3, 1, 1, 1, 2), None, None)
    cache.save(path)
    return config, contents(cache), path.read_bytes()


def refusal(path: Path, damaged: bytes, config: Any, want: list[Any]) -> str | None:
    """Why a damaged file is refused; None where it loads as the very same."""
    with path.open("r+b") as file:  # Far faster than to empty it first.
        file.write(damaged)
        file.truncate()
    try:
        loaded = H2OCache.load(path, config)
    except SessionError as error:
        return str(error)
    assert contents(loaded) == want
    return None


def test_a_file_cut_at_any_length_is_refused(tmp_path: Path) -> None:
    config, want, whole = tiny_session(tmp_path / "a")
    assert refusal(tmp_path / "a", whole, config, want) is None
    for length in range(len(whole)):
        assert refusal(tmp_path / "a", whole[:length], config, want) is not None, length
    assert refusal(tmp_path / "a", whole + b"\0", config, want) is not None


def damage(whole: bytes, chance: random.Random) -> bytes:
    """Bits that flip, bytes that change, ends, holes and blocks that went elsewhere."""
    content = bytearray(whole)
    kind = chance.choice(["bit", "bit", "bytes", "bytes", "cut", "hole", "zeros", "moved"])
    # Half of them behind the header, which is most of so small a file.
    first = chance.choice([0, 8 + int.from_bytes(whole[:8], "little")])
    a, b = sorted(chance.choices(range(first, len(content)), k=2))
    if kind == "bit":
        content[a] ^= 1 << chance.randrange(8)
    elif kind == "bytes":
        for where in chance.choices(range(first, len(content)), k=chance.randint(1, 8)):
            content[where] = chance.choice(whole)
    elif kind == "cut":
        del content[a:]
    elif kind == "hole":
        del content[a : b + 1]
    elif kind == "zeros":
        content[a : b + 1] = bytes(b + 1 - a)
    else:
        block = content[a : b + 1]
        del content[a : b + 1]
        where = chance.randrange(first, len(content) + 1)
        content[where:where] = block
    return bytes(content)


def test_ten_thousand_damaged_files_are_refused_or_the_very_same(tmp_path: Path) -> None:
    config, want, whole = tiny_session(tmp_path / "a")
    chance = random.Random(0)
    refusals: list[str | None] = []
    while len(refusals) < 10_000:
        damaged = damage(whole, chance)
        if damaged != whole:
            refusals.append(refusal(tmp_path / "a", damaged, config, want))
    # A space behind the header may have become another kind of space.
    assert sum(why is None for why in refusals) < 10
    for part in ("that safetensors reads", "header must have the sha256", "layer 0: "):
        assert sum(part in (why or "") for why in refusals) > 500, part
