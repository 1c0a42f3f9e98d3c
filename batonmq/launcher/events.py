"""Events of a running cluster, as lines and as JSON."""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import click

from batonmq.runtime.clock import wall_ms


@dataclass(frozen=True, slots=True)
class ClusterEvent:
    """One thing that happened. `kind` is a stable word; `text` is the line for people."""

    kind: str
    text: str
    fields: Mapping[str, object] = field(default_factory=dict)
    bad: bool = False


Report = Callable[[ClusterEvent], None]


def report_json(event: ClusterEvent) -> None:
    """One JSON object a line: `time` (ms since 1970), `event`, and the event's own fields."""
    click.echo(json.dumps({"time": wall_ms(), "event": event.kind, **event.fields}))


def report_line(event: ClusterEvent) -> None:
    """With the time of day, red where something is wrong."""
    text = click.style(event.text, fg="red") if event.bad else event.text
    click.echo(f"{time.strftime('%H:%M:%S')}  {text}")
