"""Sweeps: what is run, what is not run again, the summary's numbers, and `h2o-kv eval`."""

from __future__ import annotations

import doctest
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cli_runs import assert_matches, error_line
from h2o_kv.eval import (
    EvalError,
    Plan,
    TaskSpec,
    intervals,
    make_task,
    markdown,
    read_results,
    run_sweep,
    score,
    settings,
    summarise,
    sweep,
    text_metrics,
)
from h2o_kv.eval.intervals import Interval, bootstrap, wilson
from h2o_kv.eval.results import ResultFile, key_of
from h2o_kv.eval.scoring import encode_pair
from h2o_kv_cli import main
from model_files import save_tiny_model, tiny_llama, tiny_tokenizer
from test_eval_choices import write

WORDS = ("light", "darkness", "the deep", "waters", "heaven and the earth", "form")
SETTINGS = tuple(settings(["full", "h2o"], [0.5, 0.2], ["streamed", "one_shot"]))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    write(
        folder,
        "arc_easy/test.jsonl",
        [
            {"question": f"{WORDS[i % 6]}?", "choices": [*WORDS[i % 3 : i % 3 + 3]], "label": i % 3}
            for i in range(20)
        ],
    )
    rows = [{"context": f"And God called {word} the", "target": word} for word in WORDS]
    write(folder, "lambada/test.jsonl", rows)
    return folder


def plan_of(data: Path, **options: Any) -> Plan:
    tasks = tuple(TaskSpec(name, data) for name in ("arc_easy", "lambada"))
    return Plan(**{"tasks": tasks, "settings": SETTINGS, "model": "tiny", **options})


@pytest.fixture
def loaded() -> dict[str, Any]:
    tokenizer = tiny_tokenizer()
    return {"model": tiny_llama(tokenizer), "tokenizer": tokenizer}


def test_a_sweep_has_one_line_an_example_and_setting(
    data: Path, tmp_path: Path, loaded: dict[str, Any]
) -> None:
    file = tmp_path / "out" / "rows.jsonl"
    told: list[tuple[str, int, int]] = []
    added = run_sweep(plan_of(data), file, progress=lambda *event: told.append(event), **loaded)
    rows = read_results(file)
    assert added == len(rows) == len({key_of(row) for row in rows}) == (20 + 6) * 5
    assert told[0] == ("lines", 0, 130)
    assert told[-1] == ("lambada", 130, 130)
    row = next(row for row in rows if row["ratio"] == 0.2 and row["prefill"] == "one_shot")
    assert (row["model"], row["dtype"], row["task"]) == ("tiny", "float32", "arc_easy")
    assert row["options"] == {"shots": 0, "seed": 0}
    assert row["prompt_format"] == "lm-evaluation-harness 0.3"
    # Its texts, scored by hand.
    task = make_task(TaskSpec("arc_easy", data), loaded["tokenizer"])
    pairs = task._examples[row["index"]].pairs  # type: ignore[attr-defined]
    requests = [encode_pair(loaded["tokenizer"], *pair) for pair in pairs]
    [setting] = settings(["h2o"], [0.2], ["one_shot"])
    own = score(loaded["model"], requests, setting)
    assert row["log_probs"] == pytest.approx([one.log_prob for one in own], abs=1e-4)
    for name in ("seen", "kept", "evicted", "sinks", "heavy", "recent"):
        assert row[name] == [getattr(one.use, name) for one in own]
    sums = [one.log_prob for one in own]
    norms = [total / (len(text) - 1) for total, (_, text) in zip(sums, pairs, strict=True)]
    label = row["index"] % 3
    assert row["metrics"] == {
        "acc": float(max(sums) == sums[label]),
        "acc_norm": float(max(norms) == norms[label]),
    }
    assert row["nothing_evicted"] is False
    full = [row for row in rows if row["policy"] == "full"]
    assert all(row["nothing_evicted"] for row in full)


def test_the_last_word_has_its_likelihood(
    data: Path, tmp_path: Path, loaded: dict[str, Any]
) -> None:
    run_sweep(plan_of(data, limit=2), tmp_path / "rows.jsonl", **loaded)
    row = next(row for row in read_results(tmp_path / "rows.jsonl") if row["task"] == "lambada")
    assert row["metrics"]["nll"] == -row["log_probs"][0] > 0
    assert row["metrics"]["acc"] in (0.0, 1.0)


class Killed(Exception):
    """What ends a run."""


def test_an_interrupted_sweep_goes_on_where_it_was(
    data: Path, tmp_path: Path, loaded: dict[str, Any]
) -> None:
    whole, file = tmp_path / "whole.jsonl", tmp_path / "rows.jsonl"
    run_sweep(plan_of(data), whole, **loaded)

    def stop(text: str, done: int, total: int) -> None:
        if done == 27:
            raise Killed

    with pytest.raises(Killed):
        run_sweep(plan_of(data), file, progress=stop, **loaded)
    with file.open("a", encoding="utf-8") as stream:
        stream.write('{"model": "tiny", "task": "arc')  # what a kill may leave
    first = file.read_text(encoding="utf-8").splitlines()[:27]
    assert run_sweep(plan_of(data), file, **loaded) == 130 - 27
    lines = file.read_text(encoding="utf-8").splitlines()
    assert lines[:27] == first
    rows = {key_of(row): row for row in read_results(file)}
    assert len(lines) == len(rows) == 130
    for row in read_results(whole):
        assert rows[key_of(row)]["metrics"] == row["metrics"]
        assert rows[key_of(row)]["kept"] == row["kept"]
    assert run_sweep(plan_of(data), file, **loaded) == 0


def test_a_finished_sweep_does_not_load_the_model(
    data: Path, tmp_path: Path, loaded: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_sweep(plan_of(data, limit=1), tmp_path / "rows.jsonl", **loaded)
    monkeypatch.setattr(sweep, "load_model", lambda *_, **__: pytest.fail("loaded"))
    tokenizer = loaded["tokenizer"]
    assert run_sweep(plan_of(data, limit=1), tmp_path / "rows.jsonl", tokenizer=tokenizer) == 0


def test_other_data_is_run_again(data: Path, tmp_path: Path, loaded: dict[str, Any]) -> None:
    plan = plan_of(data, tasks=(TaskSpec("lambada", data),), limit=1)
    assert run_sweep(plan, tmp_path / "rows.jsonl", **loaded) == 5
    write(data, "lambada/test.jsonl", [{"context": "And the", "target": "earth"}])
    assert run_sweep(plan, tmp_path / "rows.jsonl", **loaded) == 5
    assert len(summarise(read_results(tmp_path / "rows.jsonl"))) == 2


def test_tasks_that_are_the_same_are_run_once(
    data: Path, tmp_path: Path, loaded: dict[str, Any]
) -> None:
    tasks = tuple(TaskSpec("lambada", data, new_tokens=new) for new in (8, 16))
    assert run_sweep(plan_of(data, tasks=tasks), tmp_path / "rows.jsonl", **loaded) == 30


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"model": "tiny"}\n', encoding="utf-8")
    with pytest.raises(EvalError, match="result 1 must have dtype, task, .*, got none"):
        ResultFile(file)


# ---- Numbers of the summary


def test_a_second_run_in_a_folder_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    with ResultFile(file):
        file.write_text('{"a line that', encoding="utf-8")
        with pytest.raises(EvalError, match="rows.jsonl: another run is writing to it"):
            ResultFile(file)
        assert file.read_text(encoding="utf-8") == '{"a line that'
    with ResultFile(file):
        assert file.read_text(encoding="utf-8") == ""


def test_a_task_without_examples_is_refused(
    data: Path, tmp_path: Path, loaded: dict[str, Any]
) -> None:
    (data / "lambada" / "test.jsonl").write_text("\n", encoding="utf-8")
    with pytest.raises(
        EvalError, match="lambada, shots 0, seed 0: must have at least one example, got none"
    ):
        run_sweep(plan_of(data), tmp_path / "rows.jsonl", **loaded)
    assert not (tmp_path / "rows.jsonl").exists()


RULER = "ruler/niah_multikey_3_4096_first100.jsonl"
UUIDS = [f"{i}1111111-1111-1111-1111-111111111111" for i in range(10)]
RULER_ROW = {"input": " ".join(f"One is: {one}" for one in UUIDS), "outputs": UUIDS[:1]}


@pytest.mark.parametrize(
    ("task", "file", "good", "bad"),
    [
        (
            "copa",
            "copa/validation.jsonl",
            {"premise": "a.", "choice1": "b", "choice2": "c", "question": "cause", "label": 0},
            {"label": 2},
        ),
        (
            "xsum",
            "xsum/xsum_0shot_first200.jsonl",
            {"article": "Light.", "summary_gt": "Form."},
            {"summary_gt": 5},
        ),
        ("ruler_multikey", RULER, RULER_ROW, {"outputs": ["light"]}),
    ],
)
def test_a_bad_row_is_refused_before_anything_runs(
    task: str,
    file: str,
    good: dict[str, Any],
    bad: dict[str, Any],
    data: Path,
    tmp_path: Path,
    loaded: dict[str, Any],
) -> None:
    spec = TaskSpec(task, data)
    write(data, file, [good])
    assert len(make_task(spec, loaded["tokenizer"])) == 1
    write(data, file, [good, {**good, **bad}])
    with pytest.raises(EvalError, match=f"{file}: row 1: field '{next(iter(bad))}' must be"):
        run_sweep(plan_of(data, tasks=(spec,), limit=1), tmp_path / "rows.jsonl", **loaded)
    assert not (tmp_path / "rows.jsonl").exists()


@pytest.mark.parametrize(
    ("field", "wrong", "rule"),
    [
        ("ratio", "half", "must be float or int, got 'half'"),
        ("index", [0], r"must be int, got \[0\]"),
        ("options", [1], r"must be dict, got \[1\]"),
        ("metrics", 5, "must be dict, got 5"),
        ("metrics", {"acc": "no"}, "must be numbers, at least one, got 'no'"),
        ("seen", [], "must be numbers, at least one, got none"),
        ("kept", [True], "must be numbers, at least one, got True"),
    ],
)
def test_a_result_of_another_type_is_refused(
    field: str, wrong: Any, rule: str, data: Path, tmp_path: Path, loaded: dict[str, Any]
) -> None:
    file = tmp_path / "rows.jsonl"
    run_sweep(plan_of(data, tasks=(TaskSpec("lambada", data),), limit=1), file, **loaded)
    lines = file.read_text(encoding="utf-8").splitlines()
    row = {**json.loads(lines[1]), field: wrong}
    write(tmp_path, "rows.jsonl", [json.loads(lines[0]), row])
    with pytest.raises(EvalError, match=f"rows.jsonl: result 2: field '{field}' {rule}"):
        read_results(file)


@pytest.mark.parametrize(
    ("task", "file", "row"),
    [
        ("xsum", "xsum/xsum_0shot_first200.jsonl", {"article": "Light.", "summary_gt": "Form."}),
        ("alpaca_eval", "alpaca_eval/instructions_805.jsonl", {"instruction": "Let there be"}),
        ("needle", "needle_haystack/paul_graham_essays.jsonl", {"text": "And God said. " * 40}),
        ("ruler_multikey", RULER, RULER_ROW),
    ],
)
def test_a_policy_that_cannot_run_a_task_is_refused_before_anything_runs(
    task: str,
    file: str,
    row: dict[str, Any],
    data: Path,
    tmp_path: Path,
    loaded: dict[str, Any],
) -> None:
    write(data, file, [row])
    plan = plan_of(
        data,
        tasks=(TaskSpec("arc_easy", data), TaskSpec(task, data)),
        settings=tuple(settings(["h2o", "oracle"], [0.5], ["streamed"])),
    )
    message = f"{task}: policy must be one that does not need the whole text .*, got oracle"
    with pytest.raises(EvalError, match=message):
        run_sweep(plan, tmp_path / "rows.jsonl", **loaded)
    assert not (tmp_path / "rows.jsonl").exists()


def test_a_label_that_is_a_bool_is_refused(
    data: Path, tmp_path: Path, loaded: dict[str, Any]
) -> None:
    rows = [{"question": "light?", "choices": ["light", "form"], "label": True}]
    write(data, "arc_easy/test.jsonl", rows)
    with pytest.raises(EvalError, match="row 0: field 'label' must be int, got True"):
        run_sweep(plan_of(data), tmp_path / "rows.jsonl", **loaded)


def test_wilson_s_interval() -> None:
    # z = 1.959964; (p + z^2/2n +- z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n), by hand.
    assert wilson(62, 100) == pytest.approx((0.62, 0.522098, 0.709024), abs=2e-6)
    assert wilson(0, 10) == pytest.approx((0.0, 0.0, 0.277533), abs=1e-5)
    assert wilson(10, 10) == pytest.approx((1.0, 0.722467, 1.0), abs=1e-5)
    for trials in range(1, 60):
        for successes in range(trials + 1):
            mean, low, high = wilson(successes, trials)
            assert 0 <= low <= mean <= high <= 1  # or a plot refuses its error bars
    with pytest.raises(ValueError, match="got 3 of 2"):
        wilson(3, 2)


def test_the_bootstrap_is_that_of_a_mean() -> None:
    values = [0.0] * 50 + [1.0] * 50
    mean, low, high = bootstrap(values)
    assert mean == 0.5
    # Of 100 draws the mean has the deviation 0.05: 1.96 of them on each side.
    assert low == pytest.approx(0.5 - 0.098, abs=0.012)
    assert high == pytest.approx(0.5 + 0.098, abs=0.012)
    assert bootstrap(values) == bootstrap(values)
    with pytest.raises(ValueError, match="at least one"):
        bootstrap([])


@pytest.mark.parametrize("module", [intervals, text_metrics])
def test_the_examples_in_the_documentation_run(module: Any) -> None:
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0


def row_of(policy: str, index: int, correct: float, **fields: Any) -> dict[str, Any]:
    full = policy == "full"
    return {
        **{"model": "tiny", "dtype": "float32", "task": "copa", "options": {}, "data": "0"},
        **{"policy": policy, "ratio": 1.0 if full else 0.2, "index": index},
        "prefill": "full" if full else "streamed",
        "prompt_format": "by hand",
        "metrics": {"acc": correct},
        **{"seen": [10, 20], "kept": [10, 20] if full else [2, 4], "nothing_evicted": full},
        **fields,
    }


def test_a_summary_s_numbers() -> None:
    full, ours = [1.0, 1.0, 0.0, 1.0], [1.0, 0.0, 0.0]
    rows = [row_of("h2o", index, correct) for index, correct in enumerate(ours)]
    rows[2]["nothing_evicted"] = True
    rows += [row_of("full", index, correct) for index, correct in enumerate(full)]
    [group] = summarise(rows)
    first, second = group.points
    assert (first.policy, first.examples, first.metrics["acc"]) == ("full", 4, wilson(3, 4))
    assert first.differences == {}
    assert (second.policy, second.examples, second.metrics["acc"]) == ("h2o", 3, wilson(1, 3))
    # Over the three examples that both have: 0, -1 and 0.
    assert second.differences["acc"] == bootstrap([0.0, -1.0, 0.0])
    assert second.differences["acc"].mean == pytest.approx(-1 / 3)
    assert (second.seen, second.kept, second.nothing_evicted) == (15.0, 3.0, 1)
    table = markdown([group])
    assert "| full | all |  | 4 | 15.0 | 15.0 |  | 0.750 [0.301, 0.954] |  |" in table
    assert "| h2o | 20% | streamed | 3 | 15.0 | 3.0 | 1 | 0.333 [0.061, 0.792] | -0.333 [" in table


def test_a_policy_that_reads_a_part_need_not_evict() -> None:
    fields = {"kept": [10, 20], "nothing_evicted": True, "ratio": 0.125}
    [group] = summarise([row_of(policy, 0, 1.0, **fields) for policy in ("top-k", "h2o")])
    table = markdown([group])
    assert "| top-k | 12.5% | streamed | 1 | 15.0 | 15.0 |  | 1.000" in table
    assert "| h2o | 12.5% | streamed | 1 | 15.0 | 15.0 | 1 | 1.000" in table


def test_a_likelihood_becomes_a_perplexity() -> None:
    rows = [row_of("full", i, 0.0, metrics={"nll": nll}) for i, nll in enumerate((1.0, 3.0))]
    [group] = summarise(rows)
    assert group.points[0].metrics["nll"] == Interval(2.0, 1.0, 3.0)
    assert "7.389 [2.718, 20.086]" in markdown([group])


# ---- The command


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def arguments(data: Path, tmp_path: Path, folder: Path) -> list[str]:
    options = ("--data", str(data), "--out", str(tmp_path / "out"), "--model", str(folder))
    return ["eval", *options, "--tasks", "arc_easy"]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_the_command_writes_rows_a_table_and_a_plot(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    options = ["--limit", "3", "--budgets", "50%,0.2", "--policies", "full,h2o", "--threads", "1"]
    assert main([*arguments, *options]) == 0
    report = capsys.readouterr().out
    assert report == (tmp_path / "out" / "summary.md").read_text(encoding="utf-8")
    assert "## arc_easy (shots 0, seed 0)" in report
    assert "| h2o | 50% | streamed | 3 |" in report
    assert (tmp_path / "out" / "summary.png").stat().st_size > 1000
    assert len(read_results(tmp_path / "out" / "rows.jsonl")) == 9
    # More examples: only those are run; the summary has all.
    options[1] = "5"
    assert main([*arguments, *options, "--json"]) == 0
    [group] = json.loads(capsys.readouterr().out)
    assert [point["examples"] for point in group["points"]] == [5, 5, 5]
    assert len(read_results(tmp_path / "out" / "rows.jsonl")) == 15


def test_processes_share_the_work(
    arguments: list[str], tmp_path: Path, loaded: dict[str, Any], data: Path
) -> None:
    options = ["--budgets", "20%", "--policies", "full,h2o", "--threads", "1", "--processes", "2"]
    assert main([*arguments, *options]) == 0
    rows = {
        row["index"]: row
        for row in read_results(tmp_path / "out" / "rows.jsonl")
        if row["policy"] == "h2o"
    }
    assert sorted(rows) == list(range(20))
    plan = plan_of(
        data,
        tasks=(TaskSpec("arc_easy", data),),
        settings=tuple(settings(["h2o"], [0.2], ["streamed"])),
    )
    run_sweep(plan, tmp_path / "alone.jsonl", **loaded)
    for row in read_results(tmp_path / "alone.jsonl"):
        assert rows[row["index"]]["log_probs"] == pytest.approx(row["log_probs"], abs=1e-4)
        assert rows[row["index"]]["kept"] == row["kept"]


def test_help_names_tasks_and_policies(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["eval", "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for word in ("copa", "wikitext2", "xsum", "needle", "streaming", "--limit", "--processes"):
        assert word in text


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--tasks", "mmlu"], r"h2o-kv eval: task must be one of copa, .*, got 'mmlu'"),
        (["--tasks", ","], r"h2o-kv eval: argument --tasks: must be at least one name, got ',' .*"),
        (
            ["--policies", ""],
            r"h2o-kv eval: argument --policies: must be at least one .*, got '' .*",
        ),
        (["--policies", "h3o"], r"h2o-kv eval: policy must be one of full, .*, got 'h3o'"),
        (["--prefill", "x"], r"h2o-kv eval: prefill must be one of streamed, one_shot, got 'x'"),
        (["--budgets", "120%"], r"h2o-kv eval: budgets must be parts in \(0, 1\], got 1.2"),
        (["--budgets", "20"], r"h2o-kv eval: argument --budgets: must be parts .*, got '20' .*"),
        (["--budgets", "x"], r"h2o-kv eval: argument --budgets: must be parts .*, got 'x' .*"),
        (["--shots", "x"], r"h2o-kv eval: argument --shots: must be counts .*, got 'x' .*"),
        (["--shots", "11"], r"h2o-kv eval: shots must be in 0\.\.10, got 11"),
        (["--limit", "0"], r"h2o-kv eval: --limit must be >= 1, got 0"),
        (["--processes", "0"], r"h2o-kv eval: --processes must be >= 1, got 0"),
        (["--data", "no-such"], r"h2o-kv eval: no-such/arc_easy/test.jsonl: No such file.*"),
        (["--model", "./no-such"], r"h2o-kv eval: .*no-such.*"),
        (["--device", "abacus"], r"h2o-kv eval: --device must be .*"),
    ],
)
def test_mistakes_are_one_line(
    options: list[str],
    line: str,
    arguments: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert_matches(line, error_line([*arguments, *options], capsys))
    assert not (tmp_path / "out" / "summary.md").exists()
