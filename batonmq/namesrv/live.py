"""The registered addresses, with the connection that registered each last. Pure."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from itertools import islice

from batonmq.protocol.bodies import DataVersion

Key = tuple[str, str]
"""Cluster and address."""


@dataclass(slots=True)
class Live:
    """A registered address."""

    broker_name: str
    broker_id: int
    timeout_ms: int
    deadline_ms: int
    """Of the next heartbeat."""
    data_version: DataVersion
    connection: Hashable
    ha_server_addr: str
    relays: bool
    is_relayed: bool = False
    """`connection` is that of a slave, which registered it as its master."""
    earlier: tuple[Hashable, ...] = ()
    """The connections that registered it before, oldest first."""
    parts: object = None
    """Of the registration that is under way; None: it has come as a whole."""


class LiveTable:
    """The registered addresses, by (cluster, address); of 10,000 none is looked at for another."""

    def __init__(self) -> None:
        self._by_key: dict[Key, Live] = {}
        self._keys: dict[Hashable, dict[Key, None]] = {}

    def get(self, key: Key) -> Live | None:
        return self._by_key.get(key)

    def put(self, key: Key, live: Live) -> None:
        self.remove(key)
        self._by_key[key] = live
        for index in _indices(live):
            self._keys.setdefault(index, {})[key] = None

    def remove(self, key: Key) -> None:
        live = self._by_key.pop(key, None)
        for index in () if live is None else _indices(live):
            del self._keys[index][key]
            if not self._keys[index]:
                del self._keys[index]

    def of_group(self, broker_name: str) -> list[tuple[Key, Live]]:
        return self._of(("group", broker_name))

    def of_connection(self, connection: Hashable, most: int) -> list[tuple[Key, Live]]:
        return self._of(("connection", connection), most)

    def _of(self, index: Hashable, most: int | None = None) -> list[tuple[Key, Live]]:
        return [(key, self._by_key[key]) for key in islice(self._keys.get(index, ()), most)]

    def silent(self, now_ms: int) -> list[tuple[Key, Live]]:
        """Those whose heartbeat is overdue."""
        return [known for known in self._by_key.items() if known[1].deadline_ms < now_ms]


def _indices(live: Live) -> tuple[Hashable, Hashable]:
    return ("group", live.broker_name), ("connection", live.connection)
