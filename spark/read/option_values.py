"""Values of options as users write them: durations, times, numbers, lists, truths.

Each function raises ValueError that names the option, what was given and what is allowed.
Free of Spark.
"""

import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final

from batonmq.client.instance.name_servers import parse_addresses
from batonmq.protocol.topic_name import topic_problem

_MS_PER: Final = {"": 1, "ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000}
_DURATION: Final = re.compile(r"(\d+)\s*(ms|s|m|h|)")
_TRUTHS: Final = {"true": True, "false": False}


class GivenOptions:
    """The options of one read or write by their names in Spark, which are not case-sensitive."""

    def __init__(self, options: Mapping[str, str], allowed: tuple[str, ...], what: str) -> None:
        """Raises ValueError for a name that is not `allowed`; `what` names these options."""
        self._names = {name.lower(): name for name in allowed}
        self._given = {name.lower(): value.strip() for name, value in options.items()}
        unknown = sorted(set(self._given) - set(self._names))
        if unknown:
            raise ValueError(
                f"unknown option {', '.join(unknown)} for {what}; there are "
                f"{', '.join(sorted(allowed, key=str.lower))}"
            )

    def has(self, name: str) -> bool:
        return bool(self._given.get(name.lower()))

    def text(self, name: str, default: str = "") -> str:
        return self._given.get(name.lower()) or default

    def truth(self, name: str, default: bool) -> bool:
        value = self.text(name, str(default)).lower()
        if value not in _TRUTHS:
            raise ValueError(f"{name}={value!r}: it must be true or false")
        return _TRUTHS[value]

    def number(self, name: str, default: int, least: int = 1, most: int | None = None) -> int:
        """`default` may lie outside of what can be given."""
        value = self.text(name, str(default))
        good = value.isdecimal() and int(value) >= least and (most is None or int(value) <= most)
        if not good and value != str(default):
            allowed = f"from {least} on" if most is None else f"from {least} to {most}"
            raise ValueError(f"{name}={value!r}: it must be a number {allowed}")
        return int(value)

    def one_of(self, name: str, allowed: tuple[str, ...]) -> str:
        """Without regard to case; the first is the default."""
        value = self.text(name, allowed[0])
        for each in allowed:
            if value.lower() == each.lower():
                return str(each)
        raise ValueError(f"{name}={value!r}: it must be one of {', '.join(allowed)}")

    def duration_ms(self, name: str, default_ms: int) -> int:
        value = self.text(name, str(default_ms))
        match = _DURATION.fullmatch(value.lower())
        if match is None or not int(match[1]):
            raise ValueError(f"{name}={value!r}: it must be a time such as 500ms, 30s or 2m")
        return int(match[1]) * _MS_PER[match[2]]

    def time_ms(self, name: str) -> int | None:
        """Ms since 1970, or ISO 8601 (UTC unless it has a zone); None if not given."""
        value = self.text(name)
        if not value:
            return None
        if value.isdecimal():
            return int(value)
        try:
            moment = datetime.fromisoformat(value)
        except ValueError:
            raise ValueError(
                f"{name}={value!r}: it must be ms since 1970 or a time such as 2026-11-21T10:00:00Z"
            ) from None
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        return -(-round(moment.timestamp() * 1_000_000) // 1000)

    def words(self, name: str) -> tuple[str, ...]:
        """A list by commas, or a JSON list; each word once."""
        value = self.text(name)
        if value.startswith("["):
            try:
                listed = json.loads(value)
            except ValueError:
                listed = None
            if not isinstance(listed, list) or not all(isinstance(each, str) for each in listed):
                raise ValueError(f"{name}={value!r}: it must be a list by commas or of JSON texts")
            parts = listed
        else:
            parts = value.split(",")
        return tuple(dict.fromkeys(part.strip() for part in parts if part.strip()))

    def name_servers(self) -> tuple[str, ...]:
        """The option nameServers, host:port each."""
        value = self.text("nameServers")
        words = self.words("nameServers") if value.startswith("[") else parse_addresses(value)
        if not words:
            raise ValueError("no nameServers: name those of the cluster, host:port by commas")
        for address in words:
            host, _, port = address.rpartition(":")
            if not host or not port.isdecimal():
                raise ValueError(f"nameServers: {address!r} is not host:port")
        return words

    def topics(self) -> tuple[str, ...]:
        """The option topic: one or several."""
        found = self.words("topic")
        if not found:
            raise ValueError("no topic: name one or several, by commas, as option topic")
        for topic in found:
            problem = topic_problem(topic)
            if problem is not None:
                raise ValueError(f"topic={topic!r}: {problem}")
        return found

    def together(self, one: str, other: str) -> None:
        """Raises ValueError if both are given."""
        if self.has(one) and self.has(other):
            raise ValueError(f"{one} and {other} exclude each other: give one of them")
