"""What a command prints: tables for people, one JSON document for scripts.

Standard output has the result only; everything else goes to standard error (`note`). Colour is for
terminals alone (rich, which honours NO_COLOR); through a pipe a table is plain columns, so that awk
and grep find one row a line. Producers choose keys and bodies, and clients their names: `shown`
lets none of them command the operator's terminal.
"""

import asyncio
import json
import sys
import time
import unicodedata
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, Self

import click
import msgspec

from batonmq.protocol.errors import BatonError
from batonmq.protocol.message import MessageQueue
from batonmq.runtime.clock import boot_ms

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


def yes_or_no(is_so: bool) -> Cell:
    return Cell.of("yes", GOOD) if is_so else Cell.of("no", BAD)


class Output:
    """Where results go. `as_json`: `document` is what is wanted, else the tables."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json
        self.compact = False
        """One document a line, for commands that print repeatedly."""

    def document(self, value: object) -> None:
        indent = None if self.compact else 2
        text = json.dumps(value, indent=indent, ensure_ascii=False)
        try:
            text.encode(sys.stdout.encoding or "utf-8")
        except UnicodeEncodeError:  # half of a surrogate pair, or no UTF-8 here: escaped it fits
            text = json.dumps(value, indent=indent)
        _write(text)

    def wrote_json(self, document: object) -> bool:
        """Writes it if JSON is wanted, and says whether that was so: then nothing else is shown."""
        if self.as_json:
            self.document(document)
        return self.as_json

    def say(self, text: str, style: str = "") -> None:
        """A line for people alone: with --json a document says it."""
        if not self.as_json:
            self.line(text, style)

    def result(self, document: object, text: str, style: str = "") -> None:
        """The document, or for people a line."""
        if not self.wrote_json(document):
            self.line(text, style)

    def records(
        self, records: Sequence[Mapping[str, object]], columns: Mapping[str, str], *, key: str = ""
    ) -> None:
        """All of the records, in an object under `key` if that is given; for people a table of
        `columns`: member -> heading. A member whose name ends with Timestamp is a time."""
        if self.wrote_json({key: records} if key else records):
            return
        rows = [[for_people(name, record.get(name)) for name in columns] for record in records]
        self.table([*columns.values()], rows)

    def table(
        self, headings: Sequence[str], rows: Sequence[Sequence[object]], *, title: str = ""
    ) -> None:
        cells = [[_cell(value) for value in row] for row in rows]
        if sys.stdout.isatty():
            _rich_table(headings, cells, title)
            return
        if title:
            _write(title)
        lines = [[heading.replace(" ", "_") for heading in headings], *cells]
        widths = [max(len(line[i]) for line in lines) for i in range(len(headings))]
        for line in lines:
            padded = "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
            _write(padded.rstrip())

    def fields(self, pairs: Sequence[tuple[str, object]]) -> None:
        """`name: value`, one a line."""
        width = max((len(name) for name, _ in pairs), default=0) + 1
        for name, value in pairs:
            self.line(f"{name + ':':<{width}} {'' if value is None else value}".rstrip())

    def settings(self, found: Mapping[str, Mapping[str, object]]) -> None:
        """The fields of each node, sorted, under its name; or the document of all."""
        if self.wrote_json(found):
            return
        for name, fields in found.items():
            self.line(name, style="bold")
            self.fields(sorted(fields.items()))
            self.line()

    def line(self, text: str = "", style: str = "") -> None:
        text = shown(text, keep="\n\t")
        if style and sys.stdout.isatty():
            _console().print(text, style=style, markup=False, highlight=False)
        else:
            _write(text)

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
            click.echo(f"\r{shown(text)}\033[K", err=True, nl=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.say("")


async def still_lacking(
    lacks: Callable[[], Awaitable[str]], within_s: float, doing: str, poll_s: float = POLL_S
) -> str:
    """Asks `lacks` again until it says "" or the time is over; what it said last. `doing` begins
    the line that shows it meanwhile."""
    deadline_ms = boot_ms() + int(within_s * 1000)
    with WaitLine(f"{doing} ...") as progress:
        while True:
            try:
                found = await lacks()
            except BatonError as error:  # a node just starts or stops, or an election runs
                found = str(error) or type(error).__name__
            if not found or boot_ms() >= deadline_ms:
                return found
            progress.say(f"{doing}: {found}")
            await asyncio.sleep(poll_s)


def plain(body: Any) -> Any:
    """A body as what JSON knows, its members named as RocketMQ names them."""
    return json.loads(body.encode())


def plain_queue(queue: MessageQueue) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(queue)
    return fields


def when(timestamp_ms: int) -> str:
    """Local time for people; empty for 0."""
    if timestamp_ms <= 0:
        return ""
    seconds, ms = divmod(timestamp_ms, 1000)
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds)) + f".{ms:03d}"


def _write(line: str) -> None:
    try:
        click.echo(line)
    except OSError as error:
        error.filename = error.filename or "standard output"  # a full disk behind `> FILE`
        raise


def shown(text: str, keep: str = "") -> str:
    """The text with escapes instead of what a terminal would obey or cannot write: control
    characters, marks that turn the direction of writing, halves of surrogate pairs."""
    if text.isprintable():
        return text
    # Other spaces, such as U+3000, are not printable to Python, and harmless.
    return "".join(
        c if c.isprintable() or c in keep or unicodedata.category(c) == "Zs" else _escape(c)
        for c in text
    )


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode()


def note(text: str) -> None:
    """One line on standard error."""
    click.echo(f"mqctl: {shown(' '.join(text.split()))}", err=True)


def _cell(value: object) -> str:
    if not isinstance(value, str):
        return "" if value is None else str(value)
    text = shown(value)
    return Cell.of(text, value.style) if isinstance(value, Cell) else text


def for_people(name: str, value: object) -> object:
    """The value of a member of a document; that of one named …Timestamp is shown as a time."""
    return when(value) if name.endswith("Timestamp") and isinstance(value, int) else value


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
            heading, justify="right" if numbers else "left", overflow="fold", no_wrap=i != folded
        )
    for row in rows:
        table.add_row(*(Text(cell, style=getattr(cell, "style", "")) for cell in row))
    _console().print(table)


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).removeprefix("-").isdecimal() or not text


def _console() -> Any:
    from rich.console import Console

    return Console(highlight=False)
