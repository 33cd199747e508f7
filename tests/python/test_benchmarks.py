"""The benchmarks in tiny sizes: they run, check before they time, and write what their page says."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from model_files import save_tiny_model, tiny_tokenizer, write_tiny_gguf

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks"
SCRIPTS = sorted(f.stem for f in FOLDER.glob("*.py") if f.read_text().startswith("#!"))
SHAPE = ("--quick", "--model", "smollm2-135m", "--repeats", "3", "--dtype", "float32")
TINY = {
    "bench_attention_decode": (*SHAPE, "--capacity", "64", "--threads-capacity", "128"),
    "bench_evict": (*SHAPE, "--capacity", "64", "--caches", "turns"),
    "bench_prefill_select": (*SHAPE, "--tokens", "64", "--batch", "2"),
}

pytestmark = pytest.mark.skipif(not FOLDER.exists(), reason="there are no benchmarks here")


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Import a script; torch's threads and caches are put back."""
    monkeypatch.syspath_prepend(str(FOLDER))
    threads = torch.get_num_threads()
    yield importlib.import_module
    torch.set_num_threads(threads)


def results(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def documented_fields() -> set[str]:
    section = (ROOT / "docs" / "benchmarks.md").read_text().partition("## The fields")[2]
    firsts = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    return {name for first in firsts for name in re.findall(r"`(\w+)`", first)}


def field_name(name: str) -> str:
    """As the page has it."""
    return re.sub(
        r"^x_[a-z_]+?(_p10|_p90)?$", r"x_PEER\1", re.sub(r"(_share)_p[19]0$", r"\1", name)
    )


def check_files(folder: Path, printed: str) -> list[dict[str, Any]]:
    """The three kinds of files, documented fields, a table of ratios without times."""
    points, fields = results(folder), documented_fields()
    for point in points:
        names = {field_name(name) for name in point}
        assert names <= fields, names - fields
        peers = point["peers"]
        assert point["speedup"] in [point[f"x_{peer}"] for peer in peers]
        for peer in peers:
            assert 0 < point[f"x_{peer}_p10"] <= point[f"x_{peer}"] <= point[f"x_{peer}_p90"]
    table = (folder / "results.md").read_text()
    assert table.count("\n| ") == len(points) + 2
    assert "ms (p10-p90)" in table
    assert not re.search(r"\bms\b", printed)
    assert "(p10-p90)" in printed
    if importlib.util.find_spec("matplotlib"):
        assert len(list(folder.glob("*.png"))) >= 1
    return points


@pytest.mark.parametrize("script", SCRIPTS)
def test_help(
    script: str,
    load: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    with pytest.raises(SystemExit) as stopped:
        load(script).main()
    assert stopped.value.code == 0
    printed = capsys.readouterr().out
    assert "--help" in printed
    if script in {*TINY, "bench_generate"}:
        assert {"--quick", "--out", "--repeats", "--dtype"} <= set(re.findall(r"--[a-z]+", printed))


def test_decode_results(
    load: Callable[[str], ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = "bench_attention_decode"
    assert load(script).main([*TINY[script], "--threads", "2", "--out", str(tmp_path)]) == 0
    step, threads = check_files(tmp_path, capsys.readouterr().out)
    assert (step["what"], threads["what"]) == ("step", "threads")
    assert set(step["peers"]) == {"sdpa", "eager", "grouped", "read"}
    assert set(threads["peers"]) == {"one_thread"}
    assert step["bytes"] == 2 * 3 * 64 * 64 * 4
    assert (threads["num_kv_heads"], threads["capacity"]) == (1, 128)


def test_evict_results(
    load: Callable[[str], ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert load("bench_evict").main([*TINY["bench_evict"], "--out", str(tmp_path)]) == 0
    one, half = check_files(tmp_path, capsys.readouterr().out)
    assert set(one["peers"]) == {"scatter", "gather", "read"}
    assert set(half["peers"]) == {"gather", "read"}
    assert one["caches"] > 1


def test_prefill_results(
    load: Callable[[str], ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = "bench_prefill_select"
    assert load(script).main([*TINY[script], "--out", str(tmp_path)]) == 0
    select, prefill = check_files(tmp_path, capsys.readouterr().out)
    assert (select["op"], prefill["op"]) == ("h2o_prefill_select", "h2o_attention_decode")
    assert set(select["peers"]) == {"sdpa", "eager"}
    assert select["matrix_mib"] == round(2 * 9 * 64 * 64 * 4 / 2**20, 1)


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def generate(load: Callable[[str], ModuleType], model: Path, out: Path) -> int:
    options = ("--quick", "--tokens", "40", "80", "--repeats", "4", "--dtype", "float32")
    return load("bench_generate").main([*options, "--model", str(model), "--out", str(out)])


def test_generate_results(
    load: Callable[[str], ModuleType],
    tiny_model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert generate(load, tiny_model, tmp_path) == 0
    points = check_files(tmp_path, capsys.readouterr().out)
    assert [(p["what"], p["cache_len"]) for p in points] == [
        ("h2o", 8),
        ("h2o all", 49),
        ("h2o", 16),
        ("h2o all", 89),
    ]
    assert all(p["seq_len"] == p["prompt_tokens"] + 9 for p in points)
    assert points[0]["kv_share"] < 0.3


PROGRAM = """#!{python}
import json, sys
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
(prompt,) = json.load(open(options["--tokens"]))["tokens"]
assert options["--threads"] == "2" and options["--dtype"] == "float32"
if "--policy" in sys.argv:
    half = {{"ratio": 0.1}}
    policy = json.load(open(sys.argv[sys.argv.index("--policy") + 1]))
    assert policy == {{"policy": {{"heavy": half, "recent": half}}}}, policy
else:
    assert "--full" in sys.argv
assert len(prompt) in (64, 80, 200)
count = int(options["--max-new-tokens"])
for index, token in enumerate({tokens}[:count]):
    event = {{"event": "token", "row": 0, "index": index, "token": token}}
    print(json.dumps(event))
step_ms = {{"median": 2.0, "p10": 1.0, "p90": 4.0}}
print(json.dumps({{"event": "done", "step_ms": step_ms, "prefill_s": 0.5, "resident_mb": 99.0}}))
"""


class Here:
    """In place of EngineProcess: in this process, which has loaded torch already."""

    def __init__(self, factory: Callable[..., Any], **options: Any) -> None:
        self.engine = factory(**options)

    def __getattr__(self, method: str) -> Any:
        return getattr(self.engine, method)

    def close(self) -> None:
        pass


@pytest.fixture
def engines(
    load: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., int]:
    """Run bench_engines on a tiny GGUF file, with a program in place of h2o-generate."""
    pytest.importorskip("gguf")
    monkeypatch.setenv("H2O_CACHE_DIR", str(tmp_path / "cache"))
    write_tiny_gguf(tmp_path / "tiny.gguf")
    module = load("bench_engines")
    monkeypatch.setattr(module, "EngineProcess", Here)
    ids = tiny_tokenizer()(load("common").read_text(None))["input_ids"]
    folder = str(tmp_path / "tiny.gguf")
    tokens = load("engine_runs").PythonEngine(folder, "float32", 1, None).greedy(ids[:200], 50)

    def run(*options: str, wrong: int = 0) -> int:
        program = tmp_path / "program"
        tokens[7] += wrong
        program.write_text(PROGRAM.format(python=sys.executable, tokens=tokens))
        program.chmod(0o755)
        options = ("--h2o-generate", str(program), "--out", str(tmp_path / "out"), *options)
        options = ("--quick", "--model", str(tmp_path / "tiny.gguf"), "--threads", "2", *options)
        return module.main([*options, "--tokens", "80", "--repeats", "4"])

    return run


def test_engines_results(
    engines: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert engines("--engines", "h2o-generate", "Python, full", "llama", "OpenVINO, none") == 0
    points = results(tmp_path / "out")
    printed = capsys.readouterr().out
    names = ["h2o-generate, full", "h2o-generate, 20%", "Python, full"]
    if importlib.util.find_spec("llama_cpp"):
        names.insert(0, "llama.cpp")
    else:
        assert "llama.cpp is left out: it is not installed" in printed
    assert [(p["what"], p["seq_len"]) for p in points] == [(n, s) for s in (64, 80) for n in names]
    fields = documented_fields()
    for point in points:
        unknown = {field_name(name) for name in point} - fields
        assert not unknown
        growth = point["median_ms"] - point["base_ms"]
        assert point["growth_ms"] == pytest.approx(growth, abs=1e-3)
        assert point["cache_len"] == (
            2 * (point["seq_len"] // 10) if "20%" in point["what"] else point["seq_len"]
        )
        if point["what"].startswith("h2o-generate"):
            spread = (point["median_ms"], point["p10_ms"], point["p90_ms"])
            assert (*spread, point["prefill_s"], point["resident_mb"]) == (2.0, 1.0, 4.0, 0.5, 99.0)


def test_an_engine_that_chooses_other_tokens_fails(
    engines: Callable[..., int], tmp_path: Path
) -> None:
    message = r"Python, full: chooses token \d+ as new token 7, h2o-generate, full \d+"
    with pytest.raises(SystemExit, match=message):
        engines("--engines", "h2o-generate, full", "Python, full", wrong=1)
    assert results(tmp_path / "out") == []


def test_a_plot_has_a_colour_for_every_engine(load: Callable[[str], ModuleType]) -> None:
    pytest.importorskip("matplotlib")
    module, report = load("bench_engines"), load("report")
    args = module.parse_arguments(["--model", "any.gguf"])
    names = [entry.name for entry in module.entries({}, Path(), "float32", 8, args)]
    points = [{"what": name, "dtype": "float32", "seq_len": 64, "median_ms": 1.0} for name in names]
    figure = module.draw(report.load_pyplot(), points)
    lines = figure.axes[0].get_lines()
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == len(names) == 7


def test_an_engine_process_answers_and_raises(load: Callable[[str], ModuleType]) -> None:
    process = load("engine_process").EngineProcess
    with pytest.raises(ValueError, match="negative count"):
        process(bytes, source=-1)
    engine = process(dict, name="engine")
    assert engine.get("name") == "engine"
    with pytest.raises(KeyError, match="other"):
        engine.pop("other")
    engine.close()
    with pytest.raises(OSError, match="closed"):
        engine.get("name")


def test_a_float_gguf_has_the_same_numbers(
    load: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf = pytest.importorskip("gguf")
    monkeypatch.setenv("H2O_CACHE_DIR", str(tmp_path / "cache"))
    write_tiny_gguf(tmp_path / "tiny.gguf")
    float_gguf = load("gguf_float").float_gguf
    source = gguf.GGUFReader(tmp_path / "tiny.gguf")
    for dtype in ("float32", "bfloat16", "float16"):
        file = float_gguf(tmp_path / "tiny.gguf", dtype, lambda done: None)
        made = gguf.GGUFReader(file)
        assert [t.name for t in made.tensors] == [t.name for t in source.tensors]
        for own, theirs in zip(made.tensors, source.tensors, strict=True):
            numbers = torch.tensor(gguf.quants.dequantize(own.data, own.tensor_type))
            expected = torch.tensor(theirs.data)
            if expected.ndim > 1:
                expected = expected.to(getattr(torch, dtype)).float()
            assert torch.equal(numbers, expected), own.name
        for name, field in source.fields.items():
            if not name.startswith("GGUF."):
                assert made.fields[name].contents() == field.contents(), name
        assert float_gguf(tmp_path / "tiny.gguf", dtype, lambda done: 1 / 0) == file


# --- what would compare different work is not timed ---------------------------------------------


def test_attention_over_fewer_tokens_fails(
    load: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module = load("bench_attention_decode")
    real = module.sdpa

    def half(state: Any, query: torch.Tensor) -> Callable[[], torch.Tensor]:
        return real(tuple(t[:, :, :32] for t in state), query)

    monkeypatch.setattr(module, "sdpa", half)
    with pytest.raises(SystemExit, match="sdpa: differs from the reference, error"):
        module.main([*TINY["bench_attention_decode"], "--out", str(tmp_path)])
    assert results(tmp_path) == []


@pytest.mark.parametrize(
    ("index", "change", "message"),
    [
        (4, lambda keep: keep[..., 1:], "eager: keeps 63 tokens, the reference 64"),
        (4, lambda keep: (keep + 1) % 65, "eager: head 0 decides otherwise on tokens"),
        (3, lambda scores: scores * 1.01, "eager, scores: differs from the reference"),
        (1, lambda keys: keys[:, :, 1:], "eager: makes a cache of"),
    ],
)
def test_another_step_fails(
    index: int,
    change: Callable[[torch.Tensor], torch.Tensor],
    message: str,
    load: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    module = load("bench_attention_decode")
    real = module.eager_step

    def other(*args: Any, **options: Any) -> Callable[[], Any]:
        result = list(real(*args, **options)())
        result[index] = change(result[index])
        return lambda: result

    monkeypatch.setattr(module, "eager_step", other)
    with pytest.raises(SystemExit, match=re.escape(message)):
        module.main([*TINY["bench_attention_decode"], "--out", str(tmp_path)])


def test_an_eviction_of_another_token_fails(
    load: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module = load("bench_evict")
    real = module.scatter_evict

    def without_window(*args: Any) -> Callable[[], Any]:
        args[0][2].neg_()  # the highest score leaves
        return real(*args)

    monkeypatch.setattr(module, "scatter_evict", without_window)
    with pytest.raises(SystemExit, match="scatter: head 0 decides otherwise on tokens"):
        module.main([*TINY["bench_evict"], "--out", str(tmp_path)])


def test_attention_that_is_not_causal_fails(
    load: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module = load("bench_prefill_select")
    monkeypatch.setattr(module, "extra_memory", lambda *_: 1.0)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(module, "causal_sdpa", lambda *qkv: lambda: sdpa(*qkv, enable_gqa=True))
    with pytest.raises(SystemExit, match="sdpa: differs from the reference"):
        module.main([*TINY["bench_prefill_select"], "--out", str(tmp_path)])


def test_other_logits_fail(
    load: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    tiny_model: Path,
    tmp_path: Path,
) -> None:
    module = load("bench_generate")
    real = module.EvictionPolicy

    def half(**counts: Any) -> Any:
        """Where every token should stay, half of them do."""
        return real(**{name: n // 2 if name == "num_heavy" else n for name, n in counts.items()})

    monkeypatch.setattr(module, "EvictionPolicy", half)
    with pytest.raises(SystemExit, match="h2o all: differs from the reference, error"):
        generate(load, tiny_model, tmp_path)


# --- ratios -------------------------------------------------------------------------------------


def test_a_ratio_is_taken_in_each_round(load: Callable[[str], ModuleType]) -> None:
    common = load("common")
    own, other = common.Timing((1.0, 10.0, 2.0)), common.Timing((2.0, 30.0, 8.0))
    assert common.ratio(own, other) == common.Spread(median=3.0, p10=2.2, p90=3.8)
    fields = common.ratio_fields({"h2o": own, "sdpa": other})
    assert fields == {"x_sdpa": 3.0, "x_sdpa_p10": 2.2, "x_sdpa_p90": 3.8}
    assert common.ratio(own.scaled(2), other).median == 6.0
    assert own.fields() == {"median_ms": 2.0, "p10_ms": 1.2, "p90_ms": 8.4}
    with pytest.raises(ValueError, match="shorter"):
        common.ratio(own, common.Timing((1.0,)))


def test_functions_take_turns(load: Callable[[str], ModuleType]) -> None:
    calls: list[str] = []
    timings = load("common").measure(
        {name: lambda name=name: calls.append(name) for name in "abc"},
        repeats=20,
        warmup=2,
        prepare=lambda: calls.append("-"),
        clock=lambda function: function() or float(len(calls)),
    )
    text = "".join(calls)
    rounds = [text[i : i + 6] for i in range(0, len(text), 6)]
    assert len(rounds) == 22
    assert all(sorted(r.split("-")) == ["", "a", "b", "c"] for r in rounds)
    assert len(set(rounds)) == 6  # every order comes up
    ends = timings["a"].milliseconds
    assert [text[int(end) - 1] for end in ends] == ["a"] * 20
    assert ends[0] > 12 and list(ends) == sorted(ends)


def test_the_limit_is_the_faster_read(load: Callable[[str], ModuleType]) -> None:
    timing = load("common").Timing
    timings = {"h2o": timing((4.0,)), "sum": timing((3.0,)), "dot": timing((2.0,))}
    assert load("peers").with_read(timings) == {"h2o": timing((4.0,)), "read": timing((2.0,))}


@pytest.mark.parametrize(
    ("script", "options", "message"),
    [
        ("bench_attention_decode", ("--capacity", "1"), "--capacity must be >= 2, got 1"),
        ("bench_attention_decode", ("--threads-capacity", "0"), "--threads-capacity must be >= 2"),
        ("bench_evict", ("--capacity", "64", "-5"), "--capacity must be >= 2, got -5"),
        ("bench_evict", ("--batch", "0"), "--batch must be >= 1, got 0"),
        ("bench_prefill_select", ("--tokens", "-5"), "--tokens must be >= 2, got -5"),
        ("bench_engines", ("--tokens", "64"), "--tokens must be > 64, got 64"),
        ("bench_engines", ("--rounds", "0"), "--rounds must be >= 1, got 0"),
        ("bench_engines", ("--budget", "0"), "--budget must be above 0 and at most 1, got 0.0"),
        ("bench_engines", ("--model", "x"), "--model must be a GGUF file, got x"),
        ("bench_prefill_select", ("--repeats", "0"), "--repeats must be >= 1, got 0"),
    ],
)
def test_impossible_sizes_are_refused(
    script: str,
    options: tuple[str, ...],
    message: str,
    load: Callable[[str], ModuleType],
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as error:
        load(script).main(options)
    assert error.value.code == 2
    assert message in capsys.readouterr().err


def test_tasks_of_lm_eval(
    load: Callable[[str], ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("lm_eval")
    pytest.importorskip("wonderwords")
    save_tiny_model(tmp_path / "model")
    out = tmp_path / "out"
    options = ["--model", str(tmp_path / "model"), "--out", str(out), "--threads", "2", "--quick"]
    script = load("lm_eval_tasks")
    assert script.main([*options, "--policies", "h2o"]) == 0
    report = (out / "results.md").read_text()
    assert capsys.readouterr().out == report
    assert "| task | metric | h2o |" in report
    assert re.search(r"^\| niah_single_1 \| 4096 \| [01]\.\d{3} \|", report, re.MULTILINE)
    results = json.loads((out / "results.json").read_text())["results"]
    assert list(results) == ["h2o"]
    assert script.main([*options, "--policies", "h3o"]) == 2
    assert "got 'h3o'" in capsys.readouterr().err
