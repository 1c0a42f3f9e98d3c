"""The page itself: head, verdict, cards, sections of pictures and tables; one file, no request.

Everything that is text here is escaped when it is written, wherever it comes from; there is no way
to put markup in. The page forbids itself every request (Content-Security-Policy), so a picture that
wanted one would show as an error, not leak. Free of Spark.
"""

from __future__ import annotations

import html
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from plotly.offline import get_plotlyjs

_POLICY: Final = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data: blob:; form-action 'none'; base-uri 'none'"
)
TONES: Final = ("", "good", "warn", "bad")


@dataclass(frozen=True, slots=True)
class Figure:
    """What plotly.js draws: its `data` and `layout`, as JSON can hold them.

    A trace whose `meta` has `legend` (plain text) and `colour` is named in the page's legend.
    """

    data: list[dict[str, Any]]
    layout: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Card:
    """One headline number. `tone`: one of TONES."""

    title: str
    value: str
    text: str = ""
    tone: str = ""


@dataclass(frozen=True, slots=True)
class ReportSummary:
    """One sentence at the head of the page."""

    text: str
    tone: str = ""


@dataclass(frozen=True, slots=True)
class Badge:
    """A cell that is a word with a colour."""

    text: str
    tone: str


@dataclass(frozen=True, slots=True)
class Code:
    """A cell in the letters of a machine."""

    text: str


Cell = str | Badge | Code


@dataclass(frozen=True, slots=True)
class Column:
    """`kind`: text, words (wide), name and time (not folded), number (to the right, not folded)."""

    title: str
    kind: str = "text"


@dataclass(frozen=True, slots=True)
class Table:
    caption: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]


@dataclass(frozen=True, slots=True)
class Picture:
    """`text` explains it, `note` names what is left out; `key` is its id in the page."""

    key: str
    figure: Figure
    text: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """Names and values, one a line."""

    facts: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Words:
    """A paragraph."""

    text: str


@dataclass(frozen=True, slots=True)
class Section:
    key: str
    title: str
    parts: Sequence[Picture | Table | Facts | Words]


@dataclass(frozen=True, slots=True)
class Page:
    title: str
    subtitle: str
    verdicts: Sequence[ReportSummary] = ()
    cards: Sequence[Card] = ()
    sections: Sequence[Section] = field(default_factory=list)


def render(page: Page) -> str:
    """The page as HTML."""
    own = files("batonmq.spark.report")
    has_pictures = any(isinstance(p, Picture) for s in page.sections for p in s.parts)
    scripts = [get_plotlyjs(), own.joinpath("page.js").read_text("utf-8")] if has_pictures else []
    links = "".join(f'<a href="#{_esc(s.key)}">{_esc(s.title)}</a>\n' for s in page.sections)
    verdicts = "".join(f'<li class="{v.tone}">{_esc(v.text)}</li>\n' for v in page.verdicts)
    return "".join(
        (
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n',
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n',
            '<link rel="icon" href="data:,">\n',
            f"<title>{_esc(page.title)}</title>\n",
            f"<style>\n{own.joinpath('page.css').read_text('utf-8')}</style>\n</head>\n<body>\n",
            f'<header>\n<h1>{_esc(page.title)}</h1>\n<p class="soft">{_esc(page.subtitle)}</p>\n',
            f'<ul class="verdict">\n{verdicts}</ul>\n' if verdicts else "",
            f'<dl class="cards">\n{"".join(map(_card, page.cards))}</dl>\n' if page.cards else "",
            f'<nav aria-label="sections">\n{links}</nav>\n</header>\n<main>\n',
            *map(_section, page.sections),
            "</main>\n",
            *(f"<script>{script}</script>\n" for script in scripts),
            "</body>\n</html>\n",
        )
    )


def write_page(path: str, page: Page) -> str:
    """Write it whole or not at all; the path again. Raises OSError that names it."""
    place = Path(path)
    unready = place.with_name(f".{place.name}.{os.getpid()}")
    try:
        with unready.open("w", encoding="utf-8") as file:
            file.write(render(page))
            file.flush()
            os.fsync(file.fileno())
        unready.replace(place)
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from error
    finally:
        unready.unlink(missing_ok=True)
    return path


def _esc(text: object) -> str:
    return html.escape(str(text), quote=True)


def _card(card: Card) -> str:
    assert card.tone in TONES
    text = f'<dd class="text">{_esc(card.text)}</dd>' if card.text else ""
    return (
        f'<div class="card {card.tone}"><dt>{_esc(card.title)}</dt>'
        f'<dd class="value">{_esc(card.value)}</dd>{text}</div>\n'
    )


def _section(section: Section) -> str:
    parts = "".join(map(_part, section.parts))
    return (
        f'<section id="{_esc(section.key)}">\n<h2>{_esc(section.title)}</h2>\n{parts}</section>\n'
    )


def _part(part: Picture | Table | Facts | Words) -> str:
    if isinstance(part, Picture):
        return _picture(part)
    if isinstance(part, Table):
        return _table(part)
    if isinstance(part, Words):
        return f"<p>{_esc(part.text)}</p>\n"
    facts = "".join(f"<dt>{_esc(k)}</dt><dd>{_esc(v)}</dd>\n" for k, v in part.facts.items())
    return f'<dl class="facts">\n{facts}</dl>\n'


def _picture(picture: Picture) -> str:
    figure = {"data": picture.figure.data, "layout": picture.figure.layout}
    # Inside <script> only this could end it; JSON may write it as an escape.
    data = json.dumps(figure, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    note = f'<p class="note">{_esc(picture.note)}</p>\n' if picture.note else ""
    height = int(picture.figure.layout.get("height", 300))
    return (
        f'<figure class="picture" id="{_esc(picture.key)}">\n'
        f"<figcaption>{_esc(picture.text)}</figcaption>\n"
        f'<div class="plot" style="height:{height}px"></div>\n'
        f'<script type="application/json">{data}</script>\n{note}</figure>\n'
    )


def _table(table: Table) -> str:
    heads = "".join(
        f'<th scope="col" class="{_esc(column.kind)}">{_esc(column.title)}</th>'
        for column in table.columns
    )
    rows = "".join(
        "<tr>"
        + "".join(
            f'<td class="{_esc(column.kind)}">{_cell(cell)}</td>'
            for column, cell in zip(table.columns, row, strict=True)
        )
        + "</tr>\n"
        for row in table.rows
    )
    return (
        f'<div class="scroll" tabindex="0"><table>\n<caption>{_esc(table.caption)}</caption>\n'
        f"<thead><tr>{heads}</tr></thead>\n<tbody>\n{rows}</tbody>\n</table></div>\n"
    )


def _cell(cell: Cell) -> str:
    if isinstance(cell, Badge):
        return f'<span class="badge {_esc(cell.tone)}">{_esc(cell.text)}</span>'
    if isinstance(cell, Code):
        return f"<code>{_esc(cell.text)}</code>"
    return _esc(cell)
