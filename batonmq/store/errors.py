"""Why the store refuses, by what the caller must do (Java: `PutMessageStatus`). Damage of the log
is `protocol.errors.CorruptLogError`."""

from __future__ import annotations

from pathlib import Path

from batonmq.protocol.codes import ResponseCode
from batonmq.protocol.errors import BatonError, CorruptLogError
from batonmq.runtime import disk


class CorruptQueueError(CorruptLogError):
    """A file of a consume queue is unreadable or too short; `offset` is a position in it. It says
    nothing of the log, from which the next start builds the queue."""


class PutRefused(BatonError):
    """A message was not stored, and nothing of it is in the log."""


class PutUnavailable(PutRefused):
    """This broker takes no writes now: not a master, disk full, damaged."""

    response_code = ResponseCode.SERVICE_NOT_AVAILABLE


class PutIllegal(PutRefused):
    """The message can never be stored: body or record too long."""

    response_code = ResponseCode.MESSAGE_ILLEGAL


class PutPropertiesTooLong(PutIllegal):
    """Of the broker's own properties some may be left out."""


class StoreFormatError(BatonError):
    """A file does not fit the configuration: an operator must decide."""

    def __init__(self, path: Path, what: str) -> None:
        super().__init__(f"{path}: {what}")


class IndexFailedError(BatonError):
    """Nothing can be found by key until the next start has built the index again."""


class TruncationRefused(BatonError):
    """The cut would drop confirmed bytes (R23) or is not at a record boundary."""

    def __init__(self, offset: int, confirm_offset: int, what: str) -> None:
        super().__init__(f"truncation to {offset} refused: {what} (confirmOffset {confirm_offset})")


class StoreStateError(BatonError):
    """The call does not fit the state of the store: a bug, or a suspect log."""


class StoreFailedError(BatonError):
    """The store has failed and does nothing more; the next start recovers it."""


class CutUnfinishedError(StoreFailedError):
    """A cut of the log has begun and could not be finished; the next start does it (R37). `file`:
    where it failed. `intent`: the file that keeps it pending."""

    def __init__(self, offset: int, file: Path, intent: Path, cause: Exception) -> None:
        self.cause, root = cause, intent.parent
        is_short = isinstance(cause, OSError) and disk.is_short(cause)
        needed = f"free 1 MiB on the disk of {root}" if is_short else f"see to the disk of {root}"
        reason = getattr(cause, "strerror", None) or repr(cause)
        super().__init__(
            f"the log could not be cut at {offset}: {file}: {reason}; {needed}, then start this"
            f" broker again: it finishes the cut first ({intent.name}), and does nothing until then"
        )
