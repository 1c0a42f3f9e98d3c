"""What a command prints: tables for people, one JSON document for scripts.

Standard output carries the result only; everything else goes to standard error. Colour and lines
are drawn on a terminal alone (rich, which honours NO_COLOR); through a pipe a table is plain
columns, so that awk and grep find one row a line.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Self

import click

if TYPE_CHECKING:
    from batonmq.protocol.message import MessageQueue

GOOD, BAD, DIM = "green", "bold red", "dim"
POLL_S: Final = 0.1


class Cell(str):
    """Text of a table with a style that only a terminal shows."""

    __slots__ = ("style",)
    style: str

    @classmethod
    def of(cls, text: object, style: str) -> Self:
        cell = cls(text)
        cell.style = style
        return cell


class Output:
    """Where results go. `as_json`: `document` is what is wanted, else the tables."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json
        self.compact = False
        """One document a line, for commands that print repeatedly."""

    def document(self, value: object) -> None:
        indent = None if self.compact else 2
        click.echo(json.dumps(value, indent=indent, ensure_ascii=False))
        sys.stdout.flush()

    def table(
        self, headings: Sequence[str], rows: Sequence[Sequence[object]], *, title: str = ""
    ) -> None:
        cells = [[_cell(value) for value in row] for row in rows]
        if sys.stdout.isatty():
            _rich_table(headings, cells, title)
            return
        if title:
            click.echo(title)
        lines = [[heading.replace(" ", "_") for heading in headings], *cells]
        widths = [max(len(line[i]) for line in lines) for i in range(len(headings))]
        for line in lines:
            padded = "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
            click.echo(padded.rstrip())

    def fields(self, pairs: Sequence[tuple[str, object]]) -> None:
        """`name: value`, one a line."""
        width = max((len(name) for name, _ in pairs), default=0) + 1
        for name, value in pairs:
            self.line(f"{name + ':':<{width}} {_cell(value)}".rstrip())

    def settings(self, found: Mapping[str, Mapping[str, object]]) -> None:
        """The fields of each node, sorted, under its name; or the document of all."""
        if self.as_json:
            self.document(found)
            return
        for name, fields in found.items():
            self.line(name, style="bold")
            self.fields(sorted(fields.items()))
            self.line()

    def line(self, text: str = "", style: str = "") -> None:
        if style and sys.stdout.isatty():
            _console().print(text, style=style, markup=False, highlight=False)
        else:
            click.echo(text)

    def clear(self) -> None:
        """Empties the screen of a terminal; elsewhere nothing."""
        if sys.stdout.isatty():
            click.echo("\033[H\033[2J", nl=False)


class WaitLine:
    """One line on standard error with what the command waits for, on a terminal only."""

    def __init__(self, text: str) -> None:
        self._shown = sys.stderr.isatty()
        self.say(text)

    def say(self, text: str) -> None:
        if self._shown:
            click.echo(f"\r{text}\033[K", err=True, nl=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.say("")


async def still_lacking(
    lacks: Callable[[], Awaitable[str]], within_s: float, doing: str, poll_s: float = POLL_S
) -> str:
    """Asks `lacks` again until it says "" or the time is over; what it said last. `doing` begins
    the line that shows it meanwhile."""
    import asyncio

    from batonmq.protocol.errors import BatonError
    from batonmq.runtime.clock import boot_ms

    deadline_ms = boot_ms() + int(within_s * 1000)
    with WaitLine(f"{doing} ...") as progress:
        while True:
            try:
                found = await lacks()
            except BatonError as error:  # a node just starts or stops, or an election runs
                found = str(error)
            if not found or boot_ms() >= deadline_ms:
                return found
            progress.say(f"{doing}: {found}")
            await asyncio.sleep(poll_s)


def plain(body: Any) -> Any:
    """A body as what JSON knows, its members named as RocketMQ names them."""
    return json.loads(body.encode())


def plain_queue(queue: MessageQueue) -> dict[str, Any]:
    import msgspec

    fields: dict[str, Any] = msgspec.to_builtins(queue)
    return fields


def when(timestamp_ms: int) -> str:
    """Local time for people; empty for 0."""
    if timestamp_ms <= 0:
        return ""
    seconds, ms = divmod(timestamp_ms, 1000)
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds)) + f".{ms:03d}"


def _cell(value: object) -> str:
    if isinstance(value, str):
        return value
    return "" if value is None else str(value)


def _rich_table(headings: Sequence[str], rows: Sequence[Sequence[str]], title: str) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(
        box=None,
        pad_edge=False,
        collapse_padding=True,
        header_style="bold",
        title=Text(title) if title else None,
        title_justify="left",
    )
    widths = [max(len(cell) for cell in column) for column in zip(headings, *rows, strict=True)]
    folded = max(range(len(widths)), key=lambda i: (widths[i], i), default=0)
    for i, heading in enumerate(headings):
        numbers = bool(rows) and all(_is_number(row[i]) for row in rows)
        # Only the widest column is folded: names and addresses stay whole at 80 columns.
        table.add_column(
            heading,
            justify="right" if numbers else "left",
            overflow="fold",
            no_wrap=i != folded,
        )
    for row in rows:
        table.add_row(*(Text(cell, style=getattr(cell, "style", "")) for cell in row))
    _console().print(table)


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).removeprefix("-").isdecimal() or not text


def _console() -> Any:
    from rich.console import Console

    return Console(highlight=False)
