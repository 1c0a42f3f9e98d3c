"""Events of a running cluster, as lines and as JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, TextIO

import click

from batonmq.runtime.clock import wall_ms


@dataclass(frozen=True, slots=True)
class ClusterEvent:
    """One thing that happened. `kind` is a stable word; `text` is the line for people."""

    kind: str
    text: str
    fields: Mapping[str, object] = field(default_factory=dict)
    bad: bool = False


class Reporter(Protocol):
    def report(self, event: ClusterEvent) -> None: ...


class JsonReporter:
    """One JSON object a line: `time` (ms since 1970), `event`, and the event's own fields."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def report(self, event: ClusterEvent) -> None:
        record = {"time": wall_ms(), "event": event.kind, **event.fields}
        self._out.write(json.dumps(record) + "\n")
        self._out.flush()


class LineReporter:
    """Lines with the time of day, red where something is wrong."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def report(self, event: ClusterEvent) -> None:
        clock = time.strftime("%H:%M:%S")
        text = click.style(event.text, fg="red") if event.bad else event.text
        click.echo(f"{clock}  {text}", file=self._out)
