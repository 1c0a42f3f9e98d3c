"""One event of the failover history as a message of BATON_SYS_HISTORY.

The body is the event's line as it stands in a controller's history file, without the line end. An
event is named by (log, raft index, part); a repeat of it has the same name, and readers drop it.

    KEYS              "<raft index> <log>-<raft index>-<part>": two keys, the second one unique
    TAGS              the event's kind
    BATON_LOG         the random name of the controllers' log
    BATON_RAFT_INDEX  index of the command in that log
    BATON_PART        which event of that command, from 0
    BATON_AFTER       "<raft index>-<part>" of the event in front of it in the same log: there is
                      none between the two; left out where the publisher does not know it (the
                      line then may have "gap": its file lacks what was in front)
    BATON_GROUP       the broker group that the event is about; left out if it is about none Pure.
"""

from dataclasses import dataclass
from typing import Final

from batonmq.history.event import EventKey
from batonmq.protocol.properties import KEY_SEPARATOR, KEYS, TAGS, WAIT

HISTORY_LOG: Final = "BATON_LOG"
HISTORY_RAFT_INDEX: Final = "BATON_RAFT_INDEX"
HISTORY_PART: Final = "BATON_PART"
HISTORY_AFTER: Final = "BATON_AFTER"
HISTORY_GROUP: Final = "BATON_GROUP"


@dataclass(frozen=True, slots=True)
class Line:
    """One event of a history file; `text` is its line without the end."""

    mark: EventKey
    kind: str
    broker_name: str
    text: bytes
    after: tuple[int, int] | None = None
    """(raft index, part) of the event of its log in front of it, None where that is not known."""


def history_properties(line: Line) -> dict[str, str]:
    """The properties of the message that carries this event."""
    log, raft_index, part = line.mark
    unique = f"{log}-{raft_index}-{part}"
    properties = {
        KEYS: f"{raft_index}{KEY_SEPARATOR}{unique}",
        TAGS: line.kind,
        WAIT: "true",
        HISTORY_LOG: log,
        HISTORY_RAFT_INDEX: str(raft_index),
        HISTORY_PART: str(part),
    }
    if line.after is not None:
        properties[HISTORY_AFTER] = f"{line.after[0]}-{line.after[1]}"
    if line.broker_name:
        properties[HISTORY_GROUP] = line.broker_name
    return properties


def history_name(properties: dict[str, str]) -> EventKey | None:
    """(log, raft index, part) of a message's event, None for a message that is no event."""
    log = properties.get(HISTORY_LOG)
    try:
        index, part = int(properties[HISTORY_RAFT_INDEX]), int(properties[HISTORY_PART])
    except (KeyError, ValueError):
        return None
    return (log, index, part) if log else None
