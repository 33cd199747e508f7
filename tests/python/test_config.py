"""Configs: the Python names, the shipped files, and the schema and the docs against the parser."""

import dataclasses
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from h2o_kv import _C, EvictionPolicy
from h2o_kv.config import Config, ModelConfig, RunConfig, load_config, parse_config

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = json.loads((ROOT / "configs" / "schema.json").read_text(encoding="utf-8"))
SHIPPED = sorted(p for p in (ROOT / "configs").glob("*.json") if p.name != "schema.json")

A_POLICY = {"heavy": {"size": 1}, "recent": {"size": 1}}


def parse(settings: Any) -> Config:
    return parse_config(json.dumps(settings), "test.json")


def schema_entries(node: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (dotted key, its schema) for every key that the schema describes."""
    for key, child in node.get("properties", {}).items():
        child = {**child, **resolved(child)}
        child_path = f"{path}.{key}" if path else key
        yield child_path, child
        yield from schema_entries(child, child_path)


def resolved(node: dict[str, Any]) -> dict[str, Any]:
    name = node.get("$ref", "").removeprefix("#/$defs/")
    definition: dict[str, Any] = SCHEMA["$defs"][name] if name else {}
    return definition


ENTRIES = dict(schema_entries(SCHEMA))
LEAVES = {key: entry for key, entry in ENTRIES.items() if "properties" not in entry}


# Keys that are refused without others.
COMPANIONS: dict[str, dict[str, Any]] = {
    "score_decay": {"score_rule": "decay"},
    "score_seed": {"score_rule": "random"},
    "pattern_stride": {"pattern_columns": 1},
    "pattern_columns": {"pattern_stride": 2147483647},
    "read_page": {"read_slots": 1},
}


def settings_with(key: str, value: Any) -> dict[str, Any]:
    """Return a config that is complete but for the one key."""
    section, *rest = key.split(".")
    if section == "policy":
        policy: dict[str, Any] = dict(A_POLICY)
        if len(rest) == 2:
            policy[rest[0]] = {rest[1]: value}
        else:
            policy |= COMPANIONS.get(rest[0], {}) if value else {}
            policy[rest[0]] = value
        return {"policy": policy}
    return {section: {rest[0]: value}} if rest else {section: value}


def value_of(config: Config, key: str) -> Any:
    section, name = key.split(".")
    if section == "policy":
        return config.policy.arguments[name]
    return getattr(getattr(config, section), name)


def test_every_key_arrives_under_its_python_name() -> None:
    config = parse(
        {
            "model": {"name": "facebook/opt-125m", "dtype": "bfloat16"},
            "policy": {
                "num_sink": 4,
                "heavy": {"size": 60},
                "recent": {"ratio": 0.25},
                "gqa_reduce": "max",
            },
            "run": {
                "prefill": "streaming",
                "prefill_chunk": 32,
                "max_new_tokens": 7,
                "seed": 9,
                "temperature": 0.75,
                "top_p": 0.5,
                "device": "cuda:1",
                "threads": 2,
            },
        }
    )
    assert config == Config(
        model=ModelConfig(name="facebook/opt-125m", dtype="bfloat16"),
        policy=EvictionPolicy(num_heavy=60, recent_ratio=0.25, num_sink=4, gqa_reduce="max"),
        run=RunConfig(
            prefill="streaming",
            prefill_chunk=32,
            max_new_tokens=7,
            seed=9,
            temperature=0.75,
            top_p=0.5,
            device="cuda:1",
            threads=2,
        ),
    )


def test_an_empty_config_is_a_fifth_of_the_prompt() -> None:
    config = parse({})
    assert config.policy == EvictionPolicy(heavy_ratio=0.1, recent_ratio=0.1)
    assert config.model.name is None
    assert config.run.threads is None


def test_a_config_is_frozen() -> None:
    config = parse({})
    for part, name in ((config, "run"), (config.model, "dtype"), (config.run, "seed")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(part, name, None)
    raw = _C.parse_config("{}", "test.json")
    for raw_part, name in ((raw, "run"), (raw.model, "dtype"), (raw.run, "seed")):
        with pytest.raises(AttributeError):
            setattr(raw_part, name, None)


@pytest.mark.parametrize(
    ("python", "cpp"),
    [(Config, _C.Config), (ModelConfig, _C.ModelConfig), (RunConfig, _C.RunConfig)],
)
def test_the_dataclasses_have_the_fields_of_the_cpp_structs(python: Any, cpp: type) -> None:
    fields = {field.name for field in dataclasses.fields(python)}
    assert fields == {name for name in vars(cpp) if not name.startswith("_")}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_config_loads(path: Path) -> None:
    config = load_config(path)
    settings = json.loads(path.read_text(encoding="utf-8"))
    assert settings["$schema"] == "./schema.json"
    for section in ("model", "run"):
        for key, value in settings[section].items():
            assert value_of(config, f"{section}.{key}") == value
    assert config.policy.gqa_reduce == settings["policy"]["gqa_reduce"]


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("smoke", (2, 8, 8)),
        ("smollm2-h2o-20", (0, 100, 100)),
        ("smollm2-local-20", (0, 0, 200)),
        ("smollm2-streaming-llm", (4, 0, 252)),
        ("opt-125m", (0, 100, 100)),
        ("pythia-410m", (0, 100, 100)),
        ("llama-2-7b", (0, 100, 100)),
    ],
)
def test_a_shipped_config_keeps_what_its_name_says(name: str, counts: tuple[int, int, int]) -> None:
    config = load_config(ROOT / "configs" / f"{name}.json")
    assert tuple(config.policy.resolve(1000)) == counts


def test_every_shipped_config_is_checked_above() -> None:
    assert [path.stem for path in SHIPPED] == [
        "llama-2-7b",
        "opt-125m",
        "pythia-410m",
        "smoke",
        "smollm2-h2o-20",
        "smollm2-local-20",
        "smollm2-streaming-llm",
    ]


def test_the_schema_has_the_keys_of_the_parser() -> None:
    assert set(ENTRIES) == set(_C.known_config_keys())
    for key, entry in ENTRIES.items():
        assert entry["description"], key
        assert "properties" not in entry or entry["additionalProperties"] is False, key
    assert SCHEMA["additionalProperties"] is False


@pytest.mark.parametrize("key", [key for key, entry in LEAVES.items() if "default" in entry])
def test_a_default_in_the_schema_is_that_of_the_parser(key: str) -> None:
    assert value_of(parse({}), key) == LEAVES[key]["default"]


def test_every_field_has_a_default_in_the_schema() -> None:
    with_default = {key for key, entry in LEAVES.items() if "default" in entry}
    fields = {f"model.{field.name}" for field in dataclasses.fields(ModelConfig)}
    fields |= {f"run.{field.name}" for field in dataclasses.fields(RunConfig)}
    fields |= {f"policy.{name}" for name in parse({}).policy.arguments}
    of_either = ("num_heavy", "num_recent", "heavy_ratio", "recent_ratio")
    assert with_default == fields - {f"policy.{name}" for name in of_either}


def edge_values() -> Iterator[tuple[str, Any, bool]]:
    """Yield (key, value, whether the schema allows it) around every limit of the schema."""
    for key, entry in LEAVES.items():
        step: float = 1 if "integer" in entry.get("type", ()) else 0.001
        if "minimum" in entry:
            yield key, entry["minimum"], True
            yield key, entry["minimum"] - step, False
        if "exclusiveMinimum" in entry:
            yield key, entry["exclusiveMinimum"] + step, True
            yield key, entry["exclusiveMinimum"], False
        if "maximum" in entry:
            yield key, entry["maximum"], True
            yield key, entry["maximum"] + step, False
        for name in entry.get("enum", ()):
            yield key, name, True
            yield key, name + "x", False
        if "minLength" in entry:
            yield key, "x" * entry["minLength"], True
            yield key, "x" * (entry["minLength"] - 1), False
        if "pattern" in entry:
            for name in ("auto", "cpu", "cuda", "cuda:0", "cuda:12", "cuda:", "cuda:123", "gpu"):
                yield key, name, re.search(entry["pattern"], name) is not None
        types = entry.get("type", "string")
        yield key, None, "null" in types
        yield key, True, False
        yield key, [], False


EDGES = list(edge_values())


@pytest.mark.parametrize(("key", "value", "allowed"), EDGES, ids=[f"{k}={v}" for k, v, _ in EDGES])
def test_the_schema_and_the_parser_draw_the_same_limits(
    key: str, value: Any, allowed: bool
) -> None:
    if allowed:
        parse(settings_with(key, value))
    else:
        with pytest.raises(ValueError, match=rf"^test\.json: {re.escape(key)} must be .*, got "):
            parse(settings_with(key, value))


DOCS = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")


def test_the_docs_have_a_row_for_every_key() -> None:
    table = DOCS.partition("\n## Keys\n")[2].partition("\n## ")[0]
    lines = [line.split("|") for line in table.splitlines() if line.startswith("| `")]
    defaults = {cells[1].strip(" `"): cells[3].strip(" `") for cells in lines}
    assert list(defaults) == list(LEAVES)
    for key, default in defaults.items():
        if "default" in LEAVES[key]:
            assert json.loads(default) == LEAVES[key]["default"], key


def test_the_docs_name_every_shipped_config() -> None:
    table = DOCS.partition("\n## The shipped configs\n")[2].partition("\n## ")[0]
    assert sorted(re.findall(r"`([^`]+\.json)`", table)) == [path.name for path in SHIPPED]


def test_the_example_in_the_docs_is_the_shipped_one() -> None:
    example = re.search(r"```json\n(.*?)```", DOCS, flags=re.DOTALL)
    assert example is not None
    assert parse_config(example[1]) == load_config(ROOT / "configs" / "opt-125m.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{"policy": {"heavy": {"size": 1, "ratio": 0.1}, "recent": {"size": 1}}}',
            'policy.heavy must have exactly one of "size", "ratio", got both',
        ),
        (
            '{"policy": {"heavy": {}, "recent": {"size": 1}}}',
            'policy.heavy must have exactly one of "size", "ratio", got neither',
        ),
        (
            '{"policy": {"heavy": {"size": 1}}}',
            'policy must have both "heavy" and "recent", got no "recent"',
        ),
        (
            '{"policy": {"heavy": {"size": 0}, "recent": {"size": 0}}}',
            "policy: num_sink + heavy.size + recent.size must be >= 1, got 0",
        ),
        (
            '{"policy": {"heavvy": {"size": 1}}}',
            'policy must have only the keys "num_sink", "heavy", "recent", "gqa_reduce", '
            '"score_rule", "score_decay", "score_seed", "score_queries", "score_pool", '
            '"pattern_stride", "pattern_columns", "read_slots", "read_page", '
            'got "heavvy": an object',
        ),
        ('{"run": {"seed": 1, "seed": 1}}', "run.seed must be given once, got it twice"),
        (
            '{"run": {"seed": "0"}}',
            'run.seed must be an integer from 0 to 9223372036854775807, got "0"',
        ),
        ('{"model": "modèle"}', 'model must be an object, got "modèle"'),
    ],
)
def test_a_bad_config_is_refused_with_file_key_and_value(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError) as from_file:
        load_config(path)
    assert str(from_file.value) == f"{path}: {message}"
    with pytest.raises(ValueError) as from_text:
        parse_config(text)
    assert str(from_text.value) == f"config: {message}"


def test_a_syntax_error_names_line_and_column(tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text('{\n  "run": {"seed": 1}\n  "model": {}\n}\n')
    with pytest.raises(
        ValueError, match=rf"^{re.escape(str(path))}: line 3, column 9: syntax error"
    ):
        load_config(path)
    path.write_bytes(b'{"model": {"name": "\xff"}}')
    with pytest.raises(ValueError, match=r": line 1, column 21: .*\\xff'$"):
        load_config(path)


def test_a_file_that_cannot_be_read_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as missing:
        load_config(tmp_path / "missing.json")
    assert missing.value.filename == str(tmp_path / "missing.json")
    with pytest.raises(IsADirectoryError):
        load_config(str(tmp_path))


def test_a_file_that_stops_being_readable_is_an_os_error() -> None:
    unreadable = Path("/proc/self/mem")  # opens, but nothing is mapped where reading begins
    if not unreadable.exists():
        pytest.skip("this system has no /proc")
    with pytest.raises(OSError) as error:
        load_config(unreadable)
    assert error.value.filename == str(unreadable)


def test_a_nul_character_is_a_syntax_error() -> None:
    with pytest.raises(ValueError, match="^config: line 1, column 20: syntax error - a NUL byte$"):
        parse_config('{"run": {"seed": 7}\0 no JSON')


def test_a_long_number_is_cut() -> None:
    with pytest.raises(ValueError) as error:
        parse_config('{"run": {"seed": ' + "9" * 100_000 + "}}")
    assert str(error.value).endswith("'" + "9" * 80 + "...'")


@pytest.mark.parametrize("as_bytes", [True, False])
def test_a_file_name_that_is_no_utf8_is_told_with_the_key(tmp_path: Path, as_bytes: bool) -> None:
    path = os.fsencode(tmp_path) + b"/caf\xe9.json"
    try:
        Path(os.fsdecode(path)).write_text('{"run": {"seeds": 1}}')
    except OSError:
        pytest.skip("this file system takes UTF-8 names only")
    with pytest.raises(ValueError) as error:
        load_config(path if as_bytes else os.fsdecode(path))  # type: ignore[arg-type]
    message = str(error.value)
    assert message.startswith(f"{tmp_path}/caf\\xe9.json: run must have only the keys ")
    assert message.endswith('got "seeds": 1')


@pytest.mark.parametrize("path", ["a\0b.json", "\ud800.json"])
def test_a_name_that_no_file_can_have_is_a_value_error(path: str) -> None:
    message = f"load_config: path must be a name that a file can have, got {path!r}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        load_config(path)


def test_lone_surrogates_and_nul_characters_are_no_riddles() -> None:
    with pytest.raises(ValueError, match=r"^config: line 1, column 17: .*invalid string"):
        parse_config('{"model": {"nam\ud800": 1}}')
    with pytest.raises(ValueError, match=r"^a\\0b\\udcff: the top level must be an object"):
        parse_config("[]", "a\0b\udcff")
    for arguments, name in (((b"{}",), "text"), ((None,), "text"), (("{}", 1), "name")):
        with pytest.raises(TypeError, match=f"^parse_config: {name} must be a string, got "):
            parse_config(*arguments)


def test_the_version_and_the_build_are_known() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", _C.version())
    info = _C.build_info()
    assert info["version"] == _C.version()
    assert set(info) >= {"version", "compiler", "build_type"}
    assert all(isinstance(value, str) for value in info.values())
