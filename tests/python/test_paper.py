"""The paper's tables in tiny sizes: configs, what stands beside the paper's values, and errors."""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from cli_runs import assert_matches
from h2o_kv.eval import TASKS, encode_pair, intervals, sweep
from h2o_kv.eval.choices import ChoiceData
from h2o_kv.models import load_model
from h2o_kv.policies import POLICIES
from model_files import TEXT, save_tiny_model
from test_eval_choices import write

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks"
CONFIGS = ROOT / "configs" / "paper"
NAMES = sorted(file.stem for file in CONFIGS.glob("*.json"))
WORDS = ("light", "darkness", "the deep", "waters", "heaven and the earth", "form")
# All numbers that may stand in the configs as the paper's.
KNOWN = {
    "table1": {80.09, 57.94, 79.22, 81.0, 56.0, 85.0},
    "table2": {85.0, 48.0, 84.0},
    "table3": {0.6, 18.83},
    "table4": {10.8, 30.4},
    "table5": {99.5, 53.5, 494.1, 918.9, 74800.0, 36400.0},
    "table9": {2.85, 22.75},
    "fig_sparsity": {95.0, 90.0},
    "fig_streaming": {4e6},
}

pytestmark = [
    pytest.mark.skipif(not FOLDER.exists(), reason="there are no benchmarks here"),
    pytest.mark.skipif(not importlib.util.find_spec("pydantic"), reason="pydantic is missing"),
]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Import a module of benchmarks/paper."""
    monkeypatch.syspath_prepend(str(FOLDER))
    threads = torch.get_num_threads()
    yield lambda name: importlib.import_module(f"paper.{name}")
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve rows of each task, and texts."""
    folder = tmp_path_factory.mktemp("data")

    def row(i: int) -> dict[str, Any]:
        words = [*WORDS[i % 3 : i % 3 + 2]]
        return {
            "premise": f"God saw {WORDS[i % 6]}.",
            "question": ("cause", "effect")[i % 2],
            "hypothesis": "It was.",
            "choice1": words[0],
            "choice2": words[1],
            "question_stem": f"God said {WORDS[i % 6]}",
            "choices": words,
            "goal": WORDS[i % 6],
            "sol1": words[0],
            "sol2": words[1],
            "sentence": f"God made _ and {WORDS[i % 6]}.",
            "option1": words[0],
            "option2": words[1],
            "label": i % 2,
        }

    rows = [row(i) for i in range(12)]
    for name in (
        *("copa/validation", "copa/train", "openbookqa/test", "openbookqa/train_first200"),
        *("piqa/validation", "winogrande/validation"),
    ):
        write(folder, f"{name}.jsonl", rows)
    articles = [{"article": TEXT[20 * i : 150 + 30 * i], "summary_gt": TEXT[:40]} for i in range(3)]
    write(folder, "xsum/xsum_0shot_first200.jsonl", articles)
    for name in ("wikitext/wikitext2_raw_test.txt", "books/pg16215_jack_sheppard.txt"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(TEXT * 12, encoding="utf-8")
    return folder


@pytest.fixture
def run(
    load: Callable[[str], ModuleType],
    model: str,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., int]:
    """Run the command in tiny sizes."""
    monkeypatch.setattr(intervals, "RESAMPLES", 50)  # half of the time else

    def call(table: str, *options: str) -> int:
        main: Callable[[list[str]], int] = load("reproduce").main
        arguments = [table, "--quick", "--model", model, "--data", str(data)]
        return main([*arguments, "--out", str(tmp_path / "out"), *options])

    return call


def results(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    return found


def named(found: dict[str, Any], **names: Any) -> dict[str, Any]:
    """The one result of ours with these names."""
    [own] = [
        one
        for one in found["results"]
        if one["value"] is not None and names.items() <= one["of"].items()
    ]
    return own


# ---- Configs.


@pytest.mark.parametrize("name", NAMES)
def test_a_config_says_what_there_is_and_invents_nothing(
    name: str, load: Callable[[str], ModuleType]
) -> None:
    table = load("configs").load_table(CONFIGS / f"{name}.json")
    assert {value.value for value in table.paper_values} == KNOWN.get(name, set())
    for variant in (table.variants.small, table.variants.paper):
        if table.kind not in ("quality", "quantised"):
            continue
        assert {task.name for task in variant.tasks} <= set(TASKS)
        assert set(variant.policies) <= set(POLICIES)
        for value in table.paper_values:
            if "measure" in value.of:
                continue
            assert value.of["policy"] in variant.policies
            assert value.of["ratio"] in (*variant.ratios, *[1.0] * (value.of["policy"] == "full"))
            assert (value.of["task"], value.of["metric"]) in [
                (task.name, task.metric) for task in variant.tasks
            ]
    assert table.variants.small.models == (None,)
    assert table.variants.small.device == "cpu"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t["variants"]["small"].update(policies=["h3o"]),
            r"variants\.small\.policies: must be one of full, h2o, .*, got \['h3o'\]",
        ),
        (
            lambda t: t["variants"]["paper"]["tasks"][1].update(name="copal"),
            r"variants\.paper\.tasks\.1\.name: must be one of copa, .*, got 'copal'",
        ),
        (
            lambda t: t["variants"]["small"].update(ratios=[0.2, 1.5]),
            r"variants\.small\.ratios\.1: input should be less than or equal to 1, got 1\.5",
        ),
        (
            lambda t: t["variants"]["small"]["tasks"][0].update(shots="5"),
            r"variants\.small\.tasks\.0\.shots: input should be a valid integer, got '5'",
        ),
        (
            lambda t: t["variants"].pop("paper"),
            r"variants\.paper: field required, got nothing",
        ),
        (
            lambda t: t.update(parity={"modes": ["lm_eval"], "ratios": {}}),
            r"parity\.modes: must be one of fixed, .*, got \['lm_eval'\]",
        ),
        (
            lambda t: t["paper_values"][0].update(source="a blog"),
            r"paper_values\.0\.source: string should match pattern .*, got 'a blog'",
        ),
        (lambda t: t.update(kinds=1), r"kinds: extra inputs are not permitted, got 1"),
        (
            lambda t: t.update(kind="speed"),
            r"kind: must be one of quality, quantised, throughput, sparsity, streaming, got 'speed'",
        ),
    ],
)
def test_a_config_that_will_not_do_is_refused(
    change: Callable[[dict[str, Any]], object],
    message: str,
    load: Callable[[str], ModuleType],
    tmp_path: Path,
) -> None:
    configs = load("configs")
    table = json.loads((CONFIGS / "table1.json").read_text(encoding="utf-8"))
    change(table)
    file = tmp_path / "own.json"
    file.write_text(json.dumps(table), encoding="utf-8")
    with pytest.raises(configs.TableError, match=rf"^.*/own\.json: {message}$"):
        configs.load_table(file)
    file.write_text("{", encoding="utf-8")
    with pytest.raises(configs.TableError, match=r"^.*/own\.json: must be JSON: "):
        configs.load_table(file)


@pytest.mark.parametrize("text", ["", "GB", "0", "-1GB", "16 gb", "16TB", "nan", "infGB"])
def test_sizes(text: str, load: Callable[[str], ModuleType]) -> None:
    parse_bytes = load("configs").parse_bytes
    assert parse_bytes("700MB") == 700_000_000
    assert parse_bytes("1.5GB") == 1_500_000_000
    assert parse_bytes("12") == 12
    with pytest.raises(ValueError, match="must be a number of bytes"):
        parse_bytes(text)


# ---- Beside the paper's values.


def test_a_value_stands_beside_what_has_all_of_its_names(
    load: Callable[[str], ModuleType],
) -> None:
    configs, output = load("configs"), load("output")
    source = "arXiv 2306.14048, Table 1"
    paper = [
        configs.PaperValue(of=of, value=value, unit="%", model=None, source=source)
        for of, value in (
            ({"task": "copa", "policy": "h2o", "ratio": 0.2}, 85.0),
            ({"task": "rte", "policy": "h2o"}, 1.0),
        )
    ]
    ours = [
        output.result({"task": "copa", "policy": policy, "ratio": ratio, "prefill": "x"}, 60.0, "%")
        for policy, ratio in (("h2o", 0.2), ("h2o", 0.1), ("local", 0.2))
    ]
    first, second, third, rest = output.beside(ours, paper)
    assert first["paper"] == {"value": 85.0, "unit": "%", "model": None, "source": source}
    assert second["paper"] is third["paper"] is None
    assert (rest["of"], rest["value"]) == ({"task": "rte", "policy": "h2o"}, None)
    assert rest["paper"]["value"] == 1.0


def test_losses_of_one_side(load: Callable[[str], ModuleType]) -> None:
    result = load("output").result
    ours = [
        result(
            {"model": "m", "task": task, "policy": policy, "prefill": prefill},
            0.0,
            "%",
            minus_full=None if loss is None else [-loss, 0.0, 0.0],
        )
        for task, policy, prefill, loss in (
            ("copa", "local", "streamed", 12.0),
            ("copa", "heavy", "streamed", 3.0),
            ("rte", "local", "streamed", -1.0),
            # Neither one side alone, nor what the algorithm does, nor evicting.
            ("rte", "h2o", "streamed", 50.0),
            ("rte", "local", "lm_eval_local", 60.0),
            ("rte", "full", "full", None),
        )
    ]
    found = list(load("quality").losses(ours, ("heavy", "local")))
    assert [(one["of"]["measure"], one["value"]) for one in found] == [
        ("smallest loss of one side alone", -1.0),
        ("largest loss of one side alone", 12.0),
    ]


# ---- Quality.


def sum_of_log_probs(model: Any, ids: list[int], start: int, mask: torch.Tensor) -> float:
    """Of the tokens from `start` on, each attending where the mask [tokens, tokens] is True."""
    hidden = torch.where(mask, 0.0, torch.finfo(torch.float32).min)[None, None]
    with torch.no_grad():
        logits = model(torch.tensor([ids]), attention_mask=hidden, use_cache=False).logits[0]
    log_probs = logits.log_softmax(-1)
    return sum(float(log_probs[place - 1, ids[place]]) for place in range(start, len(ids)))


def test_table_1_has_our_accuracy_beside_the_papers(
    run: Callable[..., int],
    load: Callable[[str], ModuleType],
    model: str,
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert run("table1", "--parity", "--limit", "4") == 0
    out = tmp_path / "out" / "table1"
    found = results(out)
    assert (found["table"], found["variant"]) == ("table1", "small")
    assert {"title", "date", "machine", "commit", "settings", "notes"} <= set(found)
    plain, tokenizer = load_model(model, attn_implementation="eager")
    right: dict[str, list[bool]] = {"full": [], "lm_eval_local": []}
    for index in range(4):
        example = ChoiceData("copa", data, shots=5)[index]
        sums: dict[str, list[float]] = {name: [] for name in right}
        for pair in example.pairs:
            request = encode_pair(tokenizer, *pair)
            ids, start = [*request.context, *request.continuation], len(request.context)
            causal = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
            # int(0.2 x tokens) before each row and itself: what "local" was in the scripts.
            band = causal.triu(-int(0.2 * len(ids)))
            sums["full"].append(sum_of_log_probs(plain, ids, start, causal))
            sums["lm_eval_local"].append(sum_of_log_probs(plain, ids, start, band))
            for ratios, mask in (((0.0, 0.2), "lm_eval_local"), ((0.0, 1.0), "full")):
                got = load("parity_rows").score_request(plain, request, "lm_eval_local", ratios)
                assert got == pytest.approx(sums[mask][-1], abs=1e-4)
        for name, own in sums.items():
            right[name].append(own.index(max(own)) == example.label)
    full = named(found, task="copa", policy="full")
    assert full["value"] == 100 * sum(right["full"]) / 4
    assert full["paper"]["value"] == 81.0
    assert full["examples"] == 4
    local = named(found, task="copa", policy="local", prefill="lm_eval_local")
    assert local["value"] == 100 * sum(right["lm_eval_local"]) / 4
    for policy, value in (("local", 56.0), ("h2o", 85.0)):
        own = named(found, task="copa", policy=policy, prefill="streamed")
        assert own["paper"]["value"] == value
        assert own["paper"]["source"] == "arXiv 2306.14048, Table 1"
        assert own["minus_full"][0] == pytest.approx(own["value"] - full["value"])
        assert own["nothing_evicted"] == 0
    assert named(found, task="winogrande", policy="full")["paper"] is None
    text = (out / "table.md").read_text(encoding="utf-8")
    assert text in capsys.readouterr().out
    head = (
        "| task | policy | slots | prefill | ours | - full | as lm_eval_local | as lm_eval_oracle |"
    )
    assert head in text
    [line] = [line for line in text.splitlines() if line.startswith("| copa, 5 shots (acc) | H2O")]
    assert line.split(" | ")[8] == "85"
    if importlib.util.find_spec("matplotlib"):
        assert (out / "table1.png").read_bytes().startswith(b"\x89PNG")
    # What is there is not run again, and a smaller limit looks at the first examples alone.
    monkeypatch.setattr(sweep, "load_model", lambda *_, **__: pytest.fail("loaded"))
    monkeypatch.setattr(load("parity_rows"), "load_model", lambda *_, **__: pytest.fail("loaded"))
    assert run("table1", "--parity", "--limit", "3") == 0
    assert named(results(out), task="copa", policy="full")["examples"] == 3


def test_results_of_other_data_are_not_mixed(
    run: Callable[..., int],
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = ("--data", str(tmp_path / "data"))
    for name in ("wikitext/wikitext2_raw_test.txt", "books/pg16215_jack_sheppard.txt"):
        (tmp_path / "data" / name).parent.mkdir(parents=True)
        (tmp_path / "data" / name).write_bytes((data / name).read_bytes())
    assert run("appendix_ppl", *options) == 0
    found = results(tmp_path / "out" / "appendix_ppl")
    rows = [
        json.loads(line)
        for line in (tmp_path / "out" / "appendix_ppl" / "rows.jsonl").read_text().splitlines()
    ]
    own = named(found, task="wikitext2", policy="h2o", ratio=0.0625, prefill="streamed")
    nll = [
        row["metrics"]["nll"]
        for row in rows
        if (row["task"], row["policy"], row["ratio"], row["prefill"])
        == ("wikitext2", "h2o", 0.0625, "streamed")
    ]
    assert own["value"] == pytest.approx(math.exp(sum(nll) / len(nll)))
    # Segments of 64 + 8 tokens, so 72 / 16 slots.
    assert own["kept"] == 4
    (tmp_path / "data" / "wikitext" / "wikitext2_raw_test.txt").write_text(TEXT * 13)
    capsys.readouterr()
    assert run("appendix_ppl", *options) == 2
    assert (
        capsys.readouterr()
        .err.splitlines()[-1]
        .endswith(
            "appendix_ppl: must have results of wikitext2 on one data file, got two: use another --out"
        )
    )


@pytest.mark.parametrize("name", ["table2", "table9", "fig_budget"])
def test_a_table_of_quality(name: str, run: Callable[..., int], tmp_path: Path) -> None:
    assert run(name) == 0
    found = results(tmp_path / "out" / name)
    values = [one["paper"]["value"] for one in found["results"] if one["paper"]]
    assert set(values) == KNOWN.get(name, set())
    assert all(one["value"] is not None for one in found["results"])
    if name == "table9":
        losses = [one["value"] for one in found["results"] if "measure" in one["of"]]
        lost = [
            -one["minus_full"][0]
            for one in found["results"]
            if one["of"].get("policy") in ("heavy", "local")
        ]
        assert losses == [min(lost), max(lost)]


def test_a_metric_that_is_not_there(
    run: Callable[..., int],
    load: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    table = json.loads((CONFIGS / "table1.json").read_text(encoding="utf-8"))
    table["variants"]["small"]["tasks"] = [{"name": "copa", "metric": "rouge2"}]
    (tmp_path / "table1.json").write_text(json.dumps(table), encoding="utf-8")
    monkeypatch.setattr(load("reproduce"), "FOLDER", tmp_path)
    assert run("table1") == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "reproduce: copa: metric must be one of acc, acc_norm, got 'rouge2'"


# ---- Speed and memory.


@pytest.mark.parametrize("most", [1, 2, 7, 8, 20])
def test_the_largest_batch(most: int, load: Callable[[str], ModuleType]) -> None:
    for limit in range(most + 3):
        tried: list[int] = []

        def fits(batch: int, limit: int = limit, tried: list[int] = tried) -> bool:
            tried.append(batch)
            return batch <= limit

        assert load("throughput").largest_batch(fits, most) == min(limit, most)
        assert len(set(tried)) == len(tried)
        assert all(1 <= batch <= most for batch in tried)


def test_what_a_generation_holds(load: Callable[[str], ModuleType], model: str) -> None:
    throughput = load("throughput")
    loaded, tokenizer = load_model(model)
    ids = tokenizer(TEXT)["input_ids"]
    texts = [ids[:30], ids[5:35], ids[2:22]]  # the last one is padded
    per_slot = 2 * 2 * 2 * 8 * 4  # layers, K and V, KV heads, head_dim, bytes
    full = throughput.generate(loaded, texts, 11, throughput.Setting("full", 1.0, "full"))
    assert (full.batch, full.bookkeeping) == (3, 0)
    assert full.kv == 3 * (30 + 10) * per_slot
    assert full.tokens_per_s == pytest.approx(3 * 11 / full.seconds)
    assert 0 < full.prefill_s < full.seconds
    h2o = throughput.generate(loaded, texts, 11, throughput.Setting("h2o", 0.2, "one_shot"))
    # A fifth of 41 tokens; the row with fewer has as much room.
    assert h2o.kv == 3 * 8 * per_slot
    # A score of 4 bytes and a position of 8 in each slot of each KV head, at least.
    assert h2o.bookkeeping >= 2 * 3 * 2 * 8 * (4 + 8)


def test_columns_are_not_mixed(
    run: Callable[..., int],
    load: Callable[[str], ModuleType],
    model: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    throughput = load("throughput")

    def generate(model: Any, texts: list[list[int]], new_tokens: int, setting: Any) -> Any:
        """A full cache of 1000 bytes a row, an H2O cache of 300; a second a row."""
        own = 1000 if setting.policy == "full" else 300
        seconds = float(len(texts))
        return throughput.Generation(
            batch=len(texts),
            seconds=seconds,
            prefill_s=0.25,
            tokens_per_s=len(texts) * new_tokens / seconds,
            kv=own * len(texts) - 100,
            bookkeeping=40,
            growth=own * len(texts),
        )

    monkeypatch.setattr(throughput, "generate", generate)
    loaded, _ = load_model(model)
    weights = sum(t.nbytes for t in (*loaded.parameters(), *loaded.buffers()))
    assert run("table5", "--memory", str(weights + 1200)) == 0
    found = results(tmp_path / "out" / "table5")

    def value(column: str, cache: str, measure: str) -> float:
        own: float = named(found, column=column, cache=cache, measure=measure)["value"]
        return own

    for column, cache, batch in (
        ("single request", "full", 1),
        ("single request", "h2o", 1),
        ("fixed batch", "full", 2),
        ("fixed batch", "h2o", 2),
        ("largest batch", "full", 1),
        ("largest batch", "h2o", 4),
    ):
        own = 1000 if cache == "full" else 300
        assert value(column, cache, "batch") == batch
        assert value(column, cache, "seconds") == batch
        assert value(column, cache, "tokens/s") == 8
        assert value(column, cache, "peak memory") == (weights + own * batch) / 1e6
        assert value(column, cache, "weights memory") == weights / 1e6
        assert value(column, cache, "KV memory") == (own * batch - 100) / 1e6
        assert value(column, cache, "scores and positions memory") == 40 / 1e6
        assert value(column, cache, "workspace memory") == 60 / 1e6
    # Lengths of the paper are not run here, and say so.
    left = [one for one in found["results"] if one["value"] is None]
    assert {one["paper"]["value"] for one in left} == KNOWN["table5"]
    text = (tmp_path / "out" / "table5" / "table.md").read_text(encoding="utf-8")
    assert "- lengths 2048+2048, column fixed batch, cache full, measure seconds: 99.5 s" in text
    titles = [line for line in text.splitlines() if line.startswith("## ")]
    assert [title.partition(":")[0] for title in titles] == [
        "## Single request",
        "## Fixed batch",
        "## Largest batch",
    ]
    # Not even one row fits.
    assert run("table5", "--memory", str(weights + 100)) == 0
    found = results(tmp_path / "out" / "table5")
    assert value("largest batch", "full", "batch") == value("largest batch", "h2o", "batch") == 0


@pytest.mark.parametrize("name", ["table3", "table4"])
def test_a_table_of_throughput(name: str, run: Callable[..., int], tmp_path: Path) -> None:
    assert run(name) == 0
    found = results(tmp_path / "out" / name)
    for column, batch in (("single request", 1), ("fixed batch", 2), ("largest batch", 4)):
        full, h2o = (
            named(found, column=column, cache=cache, measure="KV memory")["value"]
            for cache in ("full", "h2o")
        )
        assert named(found, column=column, cache="h2o", measure="batch")["value"] == batch
        assert h2o < 0.25 * full
    # The paper's speeds are of other lengths, and never stand beside these.
    assert {one["paper"]["value"] for one in found["results"] if one["paper"]} == KNOWN[name]
    assert all(one["value"] is None for one in found["results"] if one["paper"])


# ---- Figures of attention and of streams.


def test_sparsity_is_that_of_the_models_own_attention(
    run: Callable[..., int], model: str, data: Path, tmp_path: Path
) -> None:
    assert run("fig_sparsity") == 0
    found = results(tmp_path / "out" / "fig_sparsity")
    plain, tokenizer = load_model(model, attn_implementation="eager")
    ids = tokenizer(TEXT * 12)["input_ids"][:64]
    with torch.no_grad():
        layers = plain(torch.tensor([ids]), output_attentions=True).attentions
    sparsity, top = [], []
    for weights in layers:
        rows = weights[0].double()
        small = (rows < 0.01 * rows.amax(-1, keepdim=True)) & torch.ones(64, 64).bool().tril()
        sparsity.append(100 * float(small.sum()) / (4 * 64 * 65 / 2))
        # A fifth of 64 tokens is 12.
        highest = rows.sum(1).topk(12, dim=-1).values.sum(-1) / 64
        top.append(100 * float(highest.mean()))
    own = named(found, measure="sparsity")
    assert own["by_layer"] == pytest.approx(sparsity, abs=1e-3)
    assert own["value"] == pytest.approx(sum(sparsity) / 2, abs=1e-3)
    assert own["paper"]["value"] == 95.0
    own = named(found, measure="mass of the top 20 % tokens")
    assert own["by_layer"] == pytest.approx(top, abs=1e-3)
    assert own["paper"]["value"] == 90.0


def test_a_stream_that_fits_has_the_models_own_perplexity(
    run: Callable[..., int],
    load: Callable[[str], ModuleType],
    model: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setitem(load("streaming").QUICK, "budget", 200)
    assert run("fig_streaming") == 0
    found = results(tmp_path / "out" / "fig_streaming")
    plain, tokenizer = load_model(model, attn_implementation="eager")
    ids = torch.tensor(tokenizer(TEXT * 12)["input_ids"][:193])
    with torch.no_grad():
        logits = plain(ids[None, :-1]).logits[0]
    losses = torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none")
    for cache in ("streaming_llm", "h2o"):
        own = named(found, cache=cache, measure="perplexity")
        assert own["value"] == pytest.approx(math.exp(losses.mean()), rel=1e-3)
        stretches = [(stretch["tokens"], stretch["perplexity"]) for stretch in own["stretches"]]
        expected = [math.exp(losses[end - 64 : end].mean()) for end in (64, 128, 192)]
        assert [tokens for tokens, _ in stretches] == [64, 128, 192]
        assert [perplexity for _, perplexity in stretches] == pytest.approx(expected, rel=1e-3)
    tokens = named(found, cache="h2o", measure="tokens")
    assert (tokens["value"], tokens["paper"]["value"]) == (192, 4e6)


# ---- The command.


def test_a_table_that_needs_what_there_is_not(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("table6") == 3
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        "reproduce: table6 needs quantised caches, which h2o_kv does not have yet\n"
    )
    assert not (tmp_path / "out").exists()


def test_all_tables_that_can_be_run(
    run: Callable[..., int],
    load: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ran: list[str] = []

    def run_one(name: str, *_: Any) -> str:
        ran.append(name)
        return f"# {name}"

    monkeypatch.setattr(load("reproduce"), "run_one", run_one)
    assert run("all") == 0
    assert ran == [name for name in NAMES if name != "table6"]
    captured = capsys.readouterr()
    assert captured.out == "".join(f"# {name}\n" for name in ran)
    assert captured.err.startswith("reproduce: table6 needs quantised caches")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("table1", "--limit", "0"), "--limit must be >= 1, got 0"),
        (("table3", "--memory", "much"), "--memory must be a number of bytes, .*, got 'much'"),
        (("table7",), "argument table: invalid choice: 'table7' .*"),
    ],
)
def test_wrong_options(
    options: tuple[str, ...],
    message: str,
    run: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as stopped:
        run(*options)
    assert stopped.value.code == 2
    assert_matches(f"reproduce.py: error: {message}", capsys.readouterr().err.splitlines()[-1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("appendix_ppl", "--parity"),
            "--parity: appendix_ppl must have parity in its config, got none",
        ),
        (
            ("table1", "--data", "/nowhere"),
            "/nowhere/copa/validation.jsonl: No such file or directory",
        ),
        (
            ("table3", "--device", "tpu"),
            'device must be "auto", "cpu", "cuda" or "cuda:<index>", got \'tpu\'',
        ),
        (("table1", "--model", "/nowhere"), "load_model: "),
    ],
)
def test_mistakes_are_one_line(
    options: tuple[str, ...],
    message: str,
    run: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(*options) == 2
    [line] = [
        line for line in capsys.readouterr().err.splitlines() if line.startswith("reproduce:")
    ]
    assert line.startswith(f"reproduce: {message}")


def test_a_file_in_place_of_the_folder_is_refused_before_anything_runs(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").write_text("mine", encoding="utf-8")
    assert run("fig_sparsity") == 2
    captured = capsys.readouterr()
    assert captured.err.strip() == f"reproduce: --out must be a folder, got {tmp_path / 'out'}"
    assert (tmp_path / "out").read_text(encoding="utf-8") == "mine"


def test_ctrl_c_ends_without_a_traceback(
    load: Callable[[str], ModuleType],
    run: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def stop(*_: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(load("reproduce"), "run_one", stop)
    assert run("fig_sparsity") == 130
    assert "Traceback" not in capsys.readouterr().err


def test_the_tokenizer_of_the_tests_makes_texts_that_fit(model: str) -> None:
    ids = AutoTokenizer.from_pretrained(model)(TEXT * 12)["input_ids"]
    assert len(ids) > 193
