"""A section of a configuration file: ranges of its numbers, keys without effect."""

import re
from collections.abc import Mapping
from typing import ClassVar, Final, Literal

import msgspec

LogLevel = Literal["", "DEBUG", "INFO", "WARNING", "ERROR"]
"""Empty: by `--log-level`."""
LogFormat = Literal["text", "json"]
SECRET: Final = re.compile(
    "password|secret|token|access.?key|credential|AuthenticationUser|ExporterHeader", re.IGNORECASE
)
"""Neither errors nor `mqctl doctor` show the values of keys that match."""
Ranges = Mapping[str, tuple[int, int | None]]
"""Field -> (least, most) allowed; None: no upper limit."""


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """The base of each section. Raises ValueError for a number out of range; the loader adds file
    and line."""

    RANGES: ClassVar[Ranges] = {}
    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset()
    """Fields for RocketMQ's keys that are read and shown, but have no effect here."""
    ALIASES: ClassVar[Mapping[str, str]] = {}
    """Other spelling of a key -> the key."""
    NO_LONGER_USED: ClassVar[frozenset[str]] = frozenset()  # Keys of an earlier version, ignored.

    def __post_init__(self) -> None:
        for name, (least, most) in self.RANGES.items():
            value = getattr(self, name)
            if value is None or (least <= value and (most is None or value <= most)):
                continue
            allowed = f"{least} or more is" if most is None else f"{least} to {most} are"
            raise ValueError(f"{keys_of(type(self))[name]} is {value}: {allowed} allowed")


def keys_of(kind: type[msgspec.Struct]) -> dict[str, str]:
    """Field -> its key in files."""
    return dict(zip(kind.__struct_fields__, kind.__struct_encode_fields__, strict=True))
