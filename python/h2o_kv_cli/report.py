"""`h2o-kv report`: result folders as one HTML page that opens without a network."""

from __future__ import annotations

import argparse
import base64
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import resources
from pathlib import Path

from jinja2 import Environment
from markdown_it import MarkdownIt
from markdown_it.token import Token
from markupsafe import Markup

from h2o_kv_cli import UserError, one_line, utf8

__all__ = ["DESCRIPTION", "Image", "Section", "add_arguments", "collect", "main", "page"]

DESCRIPTION = (
    "Join the results below some folders into one HTML page with everything in it: tables, plots, "
    "settings. A folder with table.md, summary.md or results.md is a section; its results.json gives "
    "title, settings, machine and date, its PNG files are embedded."
)
_TABLES = ("table.md", "summary.md", "results.md")
_FACTS = ("variant", "machine", "commit", "date")
_PNG = b"\x89PNG\r\n\x1a\n"
_DEEPEST = 6


@dataclass(frozen=True)
class Image:
    """A picture.

    Attributes
    ----------
    name : str
        Of its file.
    source : str
        A `data:` URL with all of it.
    """

    name: str
    source: str


@dataclass(frozen=True)
class Section:
    """What was found in a folder.

    Attributes
    ----------
    title : str
    facts : dict of str to str
        Settings, machine, date.
    body : Markup
        HTML of the tables.
    images : tuple of Image
    """

    title: str
    facts: dict[str, str]
    body: Markup
    images: tuple[Image, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `h2o-kv report` to its parser."""
    parser.add_argument("folders", nargs="+", metavar="DIR", help="with results, at any depth")
    parser.add_argument("--out", required=True, metavar="FILE", help="the page to write")
    parser.add_argument("--title", default="Results", help="of the page (default: Results)")


def main(args: argparse.Namespace) -> int:
    """Run `h2o-kv report`; returns the exit status.

    Raises
    ------
    UserError
        A folder has no results, a file cannot be read, or the page cannot be written.
    """
    out = Path(args.out)
    try:
        sections = [section for folder in args.folders for section in collect(Path(folder))]
        text = page(sections, args.title)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(one_line(error)) from error
    size = len(text.encode("utf-8"))
    sys.stdout.write(f"{out}: {len(sections)} sections, {size / 1e6:.1f} MB\n")
    return 0


def collect(folder: Path) -> list[Section]:
    """The sections of a folder and all below it, by path.

    Raises
    ------
    ValueError
        There is nothing, or a file is not what its name says.
    OSError
        A file cannot be read.
    """
    if not folder.is_dir():
        raise ValueError(f"DIR must be a folder, got {folder}")
    found = sorted(
        {file.parent for name in _TABLES for file in folder.rglob(name) if file.is_file()}
    )
    if not found:
        raise ValueError(f"{folder}: must have {', '.join(_TABLES)} in it or below, got none")
    return [_section(place) for place in found]


def page(sections: Sequence[Section], title: str) -> str:
    """The whole page; whatever results say is text in it, never markup."""
    template = resources.files("h2o_kv_cli").joinpath("report.html.j2").read_text(encoding="utf-8")
    environment = Environment(autoescape=True)
    return environment.from_string(template).render(title=title, sections=sections) + "\n"


def _section(folder: Path) -> Section:
    file = next(folder / name for name in _TABLES if (folder / name).is_file())
    facts = _facts(folder / "results.json")
    images = {
        image.name: Image(image.name, _data_url(image)) for image in sorted(folder.glob("*.png"))
    }
    markdown = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = markdown.parse(utf8(str(file), lambda: file.read_text(encoding="utf-8")))
    heading = _take_title(tokens)
    title = facts.pop("title", None) or heading or folder.name
    if "date" not in facts:
        changed = datetime.fromtimestamp(file.stat().st_mtime, timezone.utc)
        facts["date"] = changed.isoformat(timespec="minutes")
    shown = _adapt(tokens, images)
    body = markdown.renderer.render(tokens, markdown.options, {})
    body = body.replace("<table>", '<div class="scroll"><table>').replace(
        "</table>", "</table></div>"
    )
    rest = tuple(image for name, image in images.items() if name not in shown)
    return Section(title, {**facts, "folder": folder.name}, Markup(body), rest)


def _facts(file: Path) -> dict[str, str]:
    """Title and what stands above the tables, of a results.json; {} if there is none."""
    if not file.is_file():
        return {}
    try:
        found = json.loads(utf8(str(file), lambda: file.read_text(encoding="utf-8")))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{file}: must be JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file}: must be a JSON object, got {type(found).__name__}")
    settings = found.get("settings")
    if not isinstance(settings, dict):
        # Scripts that have no "settings" say them one by one.
        settings = {name: value for name, value in found.items() if name not in ("title", *_FACTS)}
    facts = {name: found[name] for name in ("title", *_FACTS) if name in found}
    return {
        str(name): str(value)
        for name, value in {**facts, **settings}.items()
        if isinstance(value, (str, int, float))
    }


def _data_url(file: Path) -> str:
    content = file.read_bytes()
    if not content.startswith(_PNG):
        raise ValueError(f"{file}: must be a PNG image, got something else")
    return f"data:image/png;base64,{base64.b64encode(content).decode('ascii')}"


def _take_title(tokens: list[Token]) -> str | None:
    """Take the first heading away, if it is the first thing; its text."""
    if not tokens or tokens[0].type != "heading_open" or tokens[0].tag != "h1":
        return None
    text = tokens[1].content
    del tokens[:3]
    return text


def _adapt(tokens: Sequence[Token], images: dict[str, Image]) -> set[str]:
    """Put headings below that of the section, and the folder's images into the page; their names."""
    shown = set()
    for token in tokens:
        if token.type in ("heading_open", "heading_close"):
            token.tag = f"h{min(_DEEPEST, int(token.tag[1]) + 1)}"
        for child in token.children or ():
            if child.type != "image":
                continue
            name = str(child.attrs["src"])
            if name in images:
                child.attrs["src"] = images[name].source
                shown.add(name)
            else:
                # Of elsewhere: the page loads nothing.
                child.type, child.tag = "text", ""
                child.content = child.content or name
    return shown
