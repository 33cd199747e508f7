"""`h2o-kv tokenize` and `detokenize`: the ids of AutoTokenizer, its text token by token, quickly."""

from __future__ import annotations

import io
import json
import os
import random
import select
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from cli_runs import assert_matches, error_line
from h2o_kv_cli import main
from h2o_kv_cli.text_tokens import GrowingText, open_tokenizer
from model_files import TEXT, save_tiny_model

TINY_MODELS = Path(__file__).parents[1] / "models"
# Characters of one to four bytes, each of which the tiny tokenizer cuts into as many tokens.
LETTERS = "God said: é, ß, 中文, 🙂👩‍👩‍👧.\n\tAnd\r\n\f  there was\u2028light. "


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def tokenizer(folder: str) -> Any:
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch) -> Callable[[str | bytes], None]:
    """Put something on standard input."""

    def put(content: str | bytes) -> None:
        raw = content.encode() if isinstance(content, str) else content
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw), encoding="utf-8"))

    return put


@pytest.fixture
def run(folder: str, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What a command prints that must succeed."""

    def call(*arguments: str) -> str:
        capsys.readouterr()
        command, *options = arguments
        assert main([command, "--model", folder, *options]) == 0
        return capsys.readouterr().out

    return call


def lines_of(rows: Iterable[list[int]]) -> str:
    """What h2o-generate writes of rows of tokens: step by step, a row after the other."""
    rows = list(rows)
    events: list[dict[str, Any]] = [{"event": "start", "rows": len(rows)}]
    for index in range(max(map(len, rows))):
        for row, ids in enumerate(rows):
            if index < len(ids):
                events.append({"event": "token", "row": row, "index": index, "token": ids[index]})
            if index == len(ids) - 1:
                events.append({"event": "end", "row": row, "reason": "length"})
    events.append({"event": "done", "step_ms": {"median": 1.5}})
    return "".join(json.dumps(event) + "\n" for event in events)


# ---- tokenize.


def test_the_ids_are_those_of_the_tokenizer(
    run: Callable[..., str], tokenizer: Any, tmp_path: Path, stdin: Callable[..., None]
) -> None:
    expected = {"tokens": [tokenizer(LETTERS)["input_ids"]]}
    out = run("tokenize", LETTERS)
    assert json.loads(out) == expected
    assert out.count("\n") == 1
    (tmp_path / "prompt").write_bytes(LETTERS.replace("\r\n", "\n").encode())
    expected = {"tokens": [tokenizer(LETTERS.replace("\r\n", "\n"))["input_ids"]]}
    assert json.loads(run("tokenize", "--file", str(tmp_path / "prompt"))) == expected
    for dash in ([], ["-"], ["--file", "-"]):
        stdin(LETTERS.replace("\r\n", "\n"))
        assert json.loads(run("tokenize", *dash)) == expected


def test_each_line_may_be_a_prompt(
    run: Callable[..., str], tokenizer: Any, stdin: Callable[..., None]
) -> None:
    lines = ["In the beginning", " God\fcreated", "light"]
    expected = {"tokens": [tokenizer(line)["input_ids"] for line in lines]}
    for end in ("", "\n"):
        stdin("\n".join(lines) + end)
        assert json.loads(run("tokenize", "--lines")) == expected


def test_a_chat_template_is_put_around_each_prompt(
    run: Callable[..., str], tokenizer: Any, stdin: Callable[..., None]
) -> None:
    stdin("God\nlight\n")
    rows = json.loads(run("tokenize", "--lines", "--chat"))["tokens"]
    assert rows == [tokenizer(f"<s>{text}")["input_ids"] for text in ("God", "light")]


@pytest.mark.parametrize("name", ["tiny_gpt_neox", "tiny_opt"])
def test_the_quick_way_gives_what_transformers_gives(name: str) -> None:
    folder = TINY_MODELS / name
    expected = AutoTokenizer.from_pretrained(folder)
    quick = open_tokenizer(str(folder))
    ids = expected(TEXT)["input_ids"]
    assert quick.encode(TEXT) == ids
    assert quick.decode(ids) == expected.decode(ids, skip_special_tokens=True)


def test_truncation_and_padding_of_the_file_are_not_applied(folder: str, tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    cut = Tokenizer.from_file(f"{folder}/tokenizer.json")
    cut.enable_truncation(4)
    cut.enable_padding(length=9)
    cut.save(str(tmp_path / "tokenizer.json"))
    assert open_tokenizer(str(tmp_path)).encode(TEXT) == open_tokenizer(folder).encode(TEXT)


def test_a_tokenizer_that_adds_tokens_in_python_is_left_to_transformers(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import h2o_kv.models

    (tmp_path / "tokenizer.json").write_bytes(Path(folder, "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text('{"add_bos_token": true}')
    asked = []

    def load(source: str) -> Any:
        asked.append(source)
        return AutoTokenizer.from_pretrained(folder)

    monkeypatch.setattr(h2o_kv.models, "load_tokenizer", load)
    open_tokenizer(str(tmp_path))
    assert asked == [str(tmp_path)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([""], r"the prompt must have at least one token, got ''"),
        (["a", "--model", "/no/such"], r"load_model: no such folder or file: /no/such"),
        (["--file", "/no/such"], r"/no/such: No such file or directory"),
        (["a", "--file", "b"], r"argument --file: not allowed with argument TEXT .*"),
        (["\udcff"], r"TEXT is no UTF-8 text: .*"),
    ],
)
def test_a_mistake_of_tokenize_is_one_line(
    options: list[str], message: str, folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = error_line(["tokenize", "--model", folder, *options], capsys)
    assert_matches(rf"h2o-kv tokenize: {message}", line)


def test_mistakes_in_files_of_tokenize_are_one_line(
    folder: str, tmp_path: Path, stdin: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    stdin("a\n\nb\n")
    line = error_line(["tokenize", "--model", folder, "--lines"], capsys)
    assert line == "h2o-kv tokenize: line 2 must have at least one token, got ''"
    stdin(b"caf\xe9")
    line = error_line(["tokenize", "--model", folder], capsys)
    assert_matches(r"h2o-kv tokenize: standard input is no UTF-8 text: .*", line)
    (tmp_path / "tokenizer.json").write_text("{")
    line = error_line(["tokenize", "--model", str(tmp_path), "a"], capsys)
    assert_matches(rf"h2o-kv tokenize: cannot read {tmp_path}/tokenizer.json: .*", line)
    (tmp_path / "tokenizer_config.json").write_text("[1]")
    line = error_line(["tokenize", "--model", str(tmp_path), "a"], capsys)
    assert_matches(r"h2o-kv tokenize: load_model: .*", line)
    (tmp_path / "config.json").write_text(Path(folder, "config.json").read_text())
    line = error_line(["tokenize", "--model", str(tmp_path), "a"], capsys)
    assert_matches(r"h2o-kv tokenize: load_model: .*", line)


def test_chat_needs_a_template(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(TINY_MODELS / "tiny_opt")
    line = error_line(["tokenize", "--model", model, "--chat", "a"], capsys)
    assert line == "h2o-kv tokenize: --chat needs a model with a chat template; this one has none"


# ---- Text that grows.


def test_text_grows_without_halves_of_characters(folder: str, tokenizer: Any) -> None:
    ids = tokenizer(LETTERS * 3)["input_ids"]
    growing = GrowingText(open_tokenizer(folder).decode)
    pieces = [growing.add(token) for token in ids]
    assert "".join(pieces) == LETTERS * 3
    assert growing.finish() == ""
    assert "" in pieces
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


def test_text_of_any_tokens_is_the_text_of_the_whole(folder: str) -> None:
    tokenizer = open_tokenizer(folder)
    order = random.Random(0)
    for _ in range(50):
        ids = [order.randrange(320) for _ in range(order.randrange(1, 60))]
        growing = GrowingText(tokenizer.decode)
        text = "".join(growing.add(token) for token in ids) + growing.finish()
        assert text == tokenizer.decode(ids)


def test_spaces_that_a_decoder_drops_at_the_start_of_a_text_are_kept_inside() -> None:
    # As SentencePiece has it: the first word's space is not written.
    words = {0: "▁In", 1: "▁the", 2: "be", 3: "ginning", 4: "▁God"}

    def decode(ids: Iterable[int]) -> str:
        return "".join(words[i] for i in ids).replace("▁", " ").removeprefix(" ")

    growing = GrowingText(decode)
    assert [growing.add(i) for i in range(5)] == ["In", " the", " be"[1:], "ginning", " God"]


# ---- detokenize.


@pytest.mark.parametrize("stream", [[], ["--stream"]])
def test_all_forms_give_the_text(
    stream: list[str],
    run: Callable[..., str],
    tokenizer: Any,
    tmp_path: Path,
    stdin: Callable[..., None],
) -> None:
    ids = tokenizer(LETTERS)["input_ids"]
    forms = [
        lines_of([ids]),
        json.dumps({"tokens": [ids]}),
        json.dumps({"tokens": ids}),
        json.dumps(ids) + "\n",
        json.dumps({"tokens": [ids]}, indent=1),
        lines_of([[*ids, 2]]),  # the end-of-sequence token is no text
    ]
    for form in forms:
        stdin(form)
        assert run("detokenize", *stream) == LETTERS + "\n"
        (tmp_path / "ids").write_text(form)
        assert run("detokenize", str(tmp_path / "ids"), *stream) == LETTERS + "\n"


@pytest.mark.parametrize("stream", [[], ["--stream"]])
def test_several_rows_are_paragraphs(
    stream: list[str], run: Callable[..., str], tokenizer: Any, stdin: Callable[..., None]
) -> None:
    texts = ["And God said", "light 🙂", "é"]
    rows = [tokenizer(text)["input_ids"] for text in texts]
    expected = "row 0:\nAnd God said\n\nrow 1:\nlight 🙂\n\nrow 2:\né\n"
    for form in (lines_of(rows), json.dumps({"tokens": rows}), json.dumps(rows)):
        stdin(form)
        assert run("detokenize", *stream) == expected
    rows = [rows[0][:1], *rows[1:]]  # a row that ends with its first token
    stdin(lines_of(rows))
    assert run("detokenize", *stream).startswith(f"row 0:\n{tokenizer.decode(rows[0])}\n\nrow 1:\n")


def test_a_row_that_begins_late_is_in_the_paragraphs(
    run: Callable[..., str], tokenizer: Any, stdin: Callable[..., None]
) -> None:
    ids = tokenizer("And God said")["input_ids"]
    late = {"event": "token", "row": 1, "index": 0, "token": ids[0]}
    stdin(lines_of([ids]).replace('{"event": "done"', json.dumps(late) + '\n{"event": "done"'))
    first = tokenizer.decode(ids[:1])
    expected = f"And God said\n\nrow 0:\nAnd God said\n\nrow 1:\n{first}\n"
    assert run("detokenize", "--stream") == expected


def test_pieces_of_a_character_that_never_comes_whole_are_shown(
    run: Callable[..., str], tokenizer: Any, stdin: Callable[..., None]
) -> None:
    ids = tokenizer("a🙂")["input_ids"][:-1]
    stdin(json.dumps(ids))
    assert run("detokenize") == "a\N{REPLACEMENT CHARACTER}\n"


def test_a_terminal_gets_no_control_characters(
    run: Callable[..., str],
    tokenizer: Any,
    stdin: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ids = tokenizer("a\x1b[31mb")["input_ids"]
    stdin(json.dumps(ids))
    assert run("detokenize") == "a\x1b[31mb\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    stdin(json.dumps(ids))
    assert run("detokenize") == "a[31mb\n"


START = '{"event": "start"}\n'
TOKEN = '{"event": "token", "row": 0, "index": 0, "token": 5}\n'
DONE = '{"event": "done"}\n'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", r" must hold token ids, got nothing"),
        (" \n\n", r" must hold token ids, got nothing"),
        ("hello\n", r", line 1: must be JSON: .*"),
        ('{"tokens":\n [[1, 2]\n, 3}', r", line 3: must be JSON: .*"),
        ("7", r", line 1: must be an event, .*, got 7"),
        ('{"ids": [1]}', r', line 1: must be an event, .*, got \{"ids": \[1\]\}'),
        ('{"tokens": [[1], []]}', r", line 1: must be an event, .*, got .*"),
        ("[]", r", line 1: must be an event, .*, got .*"),
        ("[[1], 2]", r", line 1: must be an event, .*, got \[\[1\], 2\]"),
        ("[1, -2]", r", line 1: token must be an integer from 0 to 2147483647, got -2"),
        ("[1, true]", r", line 1: token must be an integer from 0 to 2147483647, got true"),
        ("[2147483648]", r", line 1: token must be an integer from 0 .*, got 2147483648"),
        ("[1]\n\n[2]", r", line 3: nothing may follow the token ids"),
        (START + "\n{", r", line 3: must be JSON: .*"),
        (START + "[1]\n", r', line 2: must be an object with "event", got \[1\]'),
        (START + TOKEN.replace("5", '"5"') + DONE, r', line 2: token must be .*, got "5"'),
        (START + TOKEN.replace('"row": 0, ', "") + DONE, r", line 2: row must be .*, got null"),
        (START + TOKEN + TOKEN + DONE, r", line 3: index of row 0 must be 1, got 0"),
        ("[" * 100_000, r", line 1: cannot be read: maximum recursion depth .*"),
        ("[" + "1" * 5000 + "]", r", line 1: cannot be read: Exceeds the limit .*"),
        (START + TOKEN.replace("5", "1" * 5000), r", line 2: cannot be read: Exceeds .*"),
        (START + TOKEN, r' must end with "done", but ends after line 2'),
    ],
)
def test_a_broken_input_is_one_line_that_names_its_line(
    content: str,
    message: str,
    folder: str,
    stdin: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    stdin(content)
    assert main(["detokenize", "--model", folder]) == 2
    assert_matches(rf"h2o-kv detokenize: standard input{message}\n", capsys.readouterr().err)


def test_text_before_a_broken_line_is_written(
    folder: str, tokenizer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = lines_of([tokenizer("And God said")["input_ids"]])
    (tmp_path / "ids").write_text(lines.replace('{"event": "done"', "{"))
    assert main(["detokenize", "--model", folder, str(tmp_path / "ids")]) == 2
    out, err = capsys.readouterr()
    assert out == "And God said\n"
    assert_matches(rf"h2o-kv detokenize: {tmp_path}/ids, line \d+: must be JSON: .*\n", err)


def test_files_that_cannot_be_read_are_one_line(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = error_line(["detokenize", "--model", folder, "/no/such"], capsys)
    assert line == "h2o-kv detokenize: /no/such: No such file or directory"
    (tmp_path / "ids").write_bytes(b'["\xff"]')
    line = error_line(["detokenize", "--model", folder, str(tmp_path / "ids")], capsys)
    assert_matches(rf"h2o-kv detokenize: {tmp_path}/ids is no UTF-8 text: .*", line)


# ---- In processes of their own.


def program(*arguments: str) -> subprocess.Popen[bytes]:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    return subprocess.Popen(
        [sys.executable, "-m", "h2o_kv_cli", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
    )


def test_tokens_are_written_as_they_come(folder: str, tokenizer: Any) -> None:
    ids = tokenizer("And God said")["input_ids"]
    lines = lines_of([ids]).splitlines(keepends=True)
    with program("detokenize", "--model", folder, "--stream") as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write("".join(lines[:3]).encode())  # start and two tokens
        process.stdin.flush()
        first = tokenizer.decode(ids[:2])
        ready, _, _ = select.select([process.stdout], [], [], 60)
        assert ready
        assert process.stdout.read(len(first)).decode() == first
        process.stdin.write("".join(lines[3:]).encode())
        process.stdin.close()
        assert (first + process.stdout.read().decode()) == "And God said\n"
        assert process.wait(timeout=60) == 0


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["tokenize", "--help"], ["detokenize", "--help"], ["convert", "--help"]],
)
def test_help_starts_without_torch(arguments: list[str]) -> None:
    assert_without_torch(arguments)


def test_tokenize_and_detokenize_of_a_folder_start_without_torch(folder: str) -> None:
    out = assert_without_torch(["tokenize", "--model", folder, "God"])
    assert assert_without_torch(["detokenize", "--model", folder], out) == b"God\n"


def assert_without_torch(arguments: list[str], content: bytes = b"") -> bytes:
    code = (
        "import sys\nfrom h2o_kv_cli import main\n"
        "try:\n    main()\n"
        "finally:\n    loaded = {'torch', 'transformers', 'numpy', 'h2o_kv'} & sys.modules.keys()\n"
        "    assert not loaded, loaded\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        input=content,
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout
