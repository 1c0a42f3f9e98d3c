"""The registered addresses, each with the connection that registered it last. Pure."""

from collections.abc import Hashable
from dataclasses import dataclass
from itertools import islice

from batonmq.protocol.bodies import DataVersion

Key = tuple[str, str]
"""Cluster and address."""


@dataclass(slots=True)
class BrokerLiveInfo:
    """A registered address. Java's name."""

    broker_name: str
    broker_id: int
    timeout_ms: int
    deadline_ms: int
    """When the next heartbeat must have arrived."""
    data_version: DataVersion
    connection: Hashable
    ha_server_addr: str
    relays: bool
    is_relayed: bool = False
    """`connection` is that of a slave, which registered this address as its master."""
    earlier: tuple[Hashable, ...] = ()
    """The connections that registered it before, oldest first."""
    parts: object = None
    """The `Parts` of a registration that is not complete yet; None if it is."""


class BrokerLiveTable:
    """The registered addresses, by (cluster, address), group and connection: with 10,000 of them no
    request walks over all."""

    def __init__(self) -> None:
        self._by_key: dict[Key, BrokerLiveInfo] = {}
        self._keys: dict[Hashable, dict[Key, None]] = {}

    def get(self, key: Key) -> BrokerLiveInfo | None:
        return self._by_key.get(key)

    def put(self, key: Key, live: BrokerLiveInfo) -> None:
        # The address may have had another group or connection: it must not stay in their index.
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

    def of_group(self, broker_name: str) -> list[tuple[Key, BrokerLiveInfo]]:
        return self._of(("group", broker_name))

    def of_connection(self, connection: Hashable, most: int) -> list[tuple[Key, BrokerLiveInfo]]:
        return self._of(("connection", connection), most)

    def _of(self, index: Hashable, most: int | None = None) -> list[tuple[Key, BrokerLiveInfo]]:
        # A copy: who asks removes some of them.
        return [(key, self._by_key[key]) for key in islice(self._keys.get(index, ()), most)]

    def silent(self, now_ms: int) -> list[tuple[Key, BrokerLiveInfo]]:
        return [known for known in self._by_key.items() if known[1].deadline_ms < now_ms]


def _indices(live: BrokerLiveInfo) -> tuple[Hashable, Hashable]:
    return ("group", live.broker_name), ("connection", live.connection)
