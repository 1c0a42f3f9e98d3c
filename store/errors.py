"""Why the store refuses: by what the caller must do next (Java: `PutMessageStatus`).

Damage of the log itself is `protocol.errors.CorruptLogError`, which names the file and offset.
"""

from __future__ import annotations

import enum
from pathlib import Path

from batonmq.protocol.codes import ResponseCode
from batonmq.protocol.errors import BatonError


class PutStatus(enum.Enum):
    """Outcomes of a put under RocketMQ's names; the store raises all but PUT_OK."""

    PUT_OK = "PUT_OK"
    SERVICE_NOT_AVAILABLE = "SERVICE_NOT_AVAILABLE"
    CREATE_MAPPED_FILE_FAILED = "CREATE_MAPPED_FILE_FAILED"
    MESSAGE_ILLEGAL = "MESSAGE_ILLEGAL"
    PROPERTIES_SIZE_EXCEEDED = "PROPERTIES_SIZE_EXCEEDED"


class PutRefused(BatonError):
    """A message was not stored; nothing of it is in the log. `status` is Java's name for it."""

    status = PutStatus.CREATE_MAPPED_FILE_FAILED

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what


class PutUnavailable(PutRefused):
    """This broker takes no writes now: not a master, disk full, damaged."""

    response_code = ResponseCode.SERVICE_NOT_AVAILABLE
    retriable = True
    status = PutStatus.SERVICE_NOT_AVAILABLE


class PutIllegal(PutRefused):
    """The message can never be stored: body or record too long."""

    response_code = ResponseCode.MESSAGE_ILLEGAL
    status = PutStatus.MESSAGE_ILLEGAL


class PutPropertiesTooLong(PutIllegal):
    """The property string is longer than a record can hold."""

    status = PutStatus.PROPERTIES_SIZE_EXCEEDED


class StoreFormatError(BatonError):
    """A file of the store does not fit the configuration: an operator must decide."""

    def __init__(self, path: Path, what: str) -> None:
        super().__init__(path, what)
        self.path = path
        self.what = what

    def __str__(self) -> str:
        return f"{self.path}: {self.what}"


class TruncationRefused(BatonError):
    """The cut would take back confirmed bytes (R23) or is not at a record boundary."""

    def __init__(self, offset: int, confirm_offset: int, what: str) -> None:
        super().__init__(offset, confirm_offset, what)
        self.offset = offset
        self.confirm_offset = confirm_offset
        self.what = what

    def __str__(self) -> str:
        return (
            f"truncation to {self.offset} refused: {self.what} "
            f"(confirmOffset {self.confirm_offset})"
        )


class StoreStateError(BatonError):
    """The call does not fit the state of the store: a bug or a suspect log."""
