"""`h2o-kv report`: one page with everything in it, nothing from elsewhere, and one-line errors."""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from cli_runs import assert_matches, error_line
from h2o_kv_cli import main

# One grey pixel.
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNoAAAAggCBd81ytgAAAABJRU5ErkJggg=="
)
VOID = {"meta", "img", "br", "hr", "link", "input"}
TABLE = """# Table 7: accuracy

Some *words* about `it`, and <b>markup</b>.

| task | ours | paper |
| --- | ---: | ---: |
| copa & co | 62.0 | 85 |
| piqa | 70.5 | 79.22 |

## Details

![a plot](plot.png) and ![](https://example.com/far.png), [a page](https://example.com/) and
[a trap](javascript:alert(1)).
"""


class Page(HTMLParser):
    """What a page consists of; fails where tags do not nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in VOID
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append((self._open[-1], data.strip()))

    def all(self, tag: str, attribute: str) -> list[Any]:
        return [attrs.get(attribute) for name, attrs in self.tags if name == tag]

    def inside(self, tag: str) -> list[str]:
        return [text for name, text in self.texts if name == tag]


def write(folder: Path, **results: Any) -> Path:
    """A folder of results; `results` are those of results.json."""
    folder.mkdir(parents=True)
    (folder / "table.md").write_text(TABLE, encoding="utf-8")
    (folder / "plot.png").write_bytes(PNG)
    (folder / "more.png").write_bytes(PNG + b"more")
    if results:
        (folder / "results.json").write_text(json.dumps(results), encoding="utf-8")
    return folder


def report(tmp_path: Path, *folders: Path, options: tuple[str, ...] = ()) -> Page:
    out = tmp_path / "page" / "report.html"
    assert main(["report", *map(str, folders), "--out", str(out), *options]) == 0
    return Page(out.read_text(encoding="utf-8"))


def test_a_page_has_tables_plots_and_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(
        tmp_path / "out" / "b",
        results=[{"value": 1}],
        title="Table 8: <script>alert(1)</script>",
        machine="some CPU",
        date="2026-01-02T03:04+00:00",
        commit="abc1234",
        settings={"models": "small & tiny", "list": [1]},
    )
    write(tmp_path / "out" / "a" / "deep")
    page = report(tmp_path, tmp_path / "out", options=("--title", "All <tables>"))
    assert re.fullmatch(r".*report\.html: 2 sections, 0\.0 MB\n", capsys.readouterr().out)
    assert page.inside("h1") == page.inside("title") == ["All <tables>"]
    titles = ["Table 7: accuracy", "Table 8: <script>alert(1)</script>"]
    assert page.inside("h2") == titles
    links = page.all("a", "href")
    assert links[:2] == ["#s1", "#s2"]
    assert page.all("section", "id") == ["s1", "s2"]
    # Headings of the tables' files are below those of the sections; the first one is the title.
    assert page.inside("h3") == ["Details", "Details"]
    assert page.inside("th") == ["task", "ours", "paper"] * 2
    assert page.inside("td") == ["copa & co", "62.0", "85", "piqa", "70.5", "79.22"] * 2
    facts = dict(zip(page.inside("dt")[-5:], page.inside("dd")[-5:], strict=True))
    assert facts == {
        "machine": "some CPU",
        "commit": "abc1234",
        "date": "2026-01-02T03:04+00:00",
        "models": "small & tiny",
        "folder": "b",
    }


def test_a_page_loads_nothing(tmp_path: Path) -> None:
    folder = write(tmp_path / "out")
    page = report(tmp_path, folder)
    # Where the Markdown has it, then what is left.
    sources = page.all("img", "src")
    contents = [
        base64.b64decode(source.removeprefix("data:image/png;base64,")) for source in sources
    ]
    assert contents == [PNG, PNG + b"more"]
    assert page.inside("figcaption") == ["more.png"]
    assert not {"script", "link", "iframe", "b"} & {tag for tag, _ in page.tags}
    assert [link for link in page.all("a", "href") if not link.startswith("#")] == [
        "https://example.com/"
    ]
    assert not any("url(" in text or "@import" in text for text in page.inside("style"))
    [policy] = [
        attrs["content"]
        for tag, attrs in page.tags
        if tag == "meta" and attrs.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policy == "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    assert "prefers-color-scheme: dark" in page.inside("style")[0]


def test_a_folder_without_results_json_has_its_heading_and_its_time(tmp_path: Path) -> None:
    folder = tmp_path / "eval"
    folder.mkdir()
    file = folder / "summary.md"
    file.write_text("# Evaluation\n\n## copa\n\n| a |\n| --- |\n| é |\n", encoding="utf-8")
    os.utime(file, (0, 0))
    page = report(tmp_path, folder)
    assert page.inside("h2") == ["Evaluation"]
    assert page.inside("td") == ["é"]
    assert page.inside("dt") == ["date", "folder"]
    assert page.inside("dd") == ["1970-01-01T00:00+00:00", "eval"]


def test_settings_may_stand_beside_the_rest(tmp_path: Path) -> None:
    folder = write(tmp_path / "out", model="tiny", tokens=64, layers=[1, 2], note=None)
    page = report(tmp_path, folder)
    assert page.inside("dt") == ["model", "tokens", "date", "folder"]
    assert page.inside("dd")[:2] == ["tiny", "64"]


def test_report_is_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert re.search(r"^  report +join result folders", capsys.readouterr().out, re.MULTILINE)
    with pytest.raises(SystemExit) as stopped:
        main(["report", "--help"])
    assert stopped.value.code == 0
    assert {"--out", "--title"} <= set(re.findall(r"--[a-z]+", capsys.readouterr().out))


def test_report_starts_without_torch(tmp_path: Path) -> None:
    folder = write(tmp_path / "out")
    code = (
        "import sys; from h2o_kv_cli import main; "
        f"status = main(['report', {str(folder)!r}, '--out', {str(tmp_path / 'page.html')!r}]); "
        "print(status, sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "0 []"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: None, r"h2o-kv report: DIR must be a folder, got .*/out"),
        (
            lambda folder: folder.mkdir(),
            r"h2o-kv report: .*/out: must have table\.md, summary\.md, results\.md in it or below, "
            r"got none",
        ),
        (
            lambda folder: (write(folder) / "results.json").write_text('{"a": '),
            r"h2o-kv report: .*/results\.json: must be JSON: .*",
        ),
        (
            lambda folder: (write(folder) / "results.json").write_text("[" * 100_000),
            r"h2o-kv report: .*/results\.json: must be JSON: .*",
        ),
        (
            lambda folder: (folder / "table.md").mkdir(parents=True),
            r"h2o-kv report: .*/out: must have table\.md, .* in it or below, got none",
        ),
        (
            lambda folder: (write(folder) / "results.json").write_text("[1]"),
            r"h2o-kv report: .*/results\.json: must be a JSON object, got list",
        ),
        (
            lambda folder: (write(folder) / "plot.png").write_bytes(b"<svg/>"),
            r"h2o-kv report: .*/plot\.png: must be a PNG image, got something else",
        ),
        (
            lambda folder: (write(folder) / "table.md").write_bytes(b"\xff"),
            r"h2o-kv report: .*/table\.md is no UTF-8 text: .*",
        ),
    ],
)
def test_bad_folders_are_refused(
    make: Any, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path / "out")
    arguments = ["report", str(tmp_path / "out"), "--out", str(tmp_path / "page.html")]
    assert_matches(message, error_line(arguments, capsys))
    assert not (tmp_path / "page.html").exists()


def test_a_page_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path / "out")
    line = error_line(["report", str(folder), "--out", str(tmp_path)], capsys)
    assert_matches(r"h2o-kv report: .*: Is a directory", line)
