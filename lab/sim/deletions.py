"""What R39 demands once a topic is deleted, and once it is made again under its name."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from batonmq.broker.tables.consumer_offset import ConsumerOffsetManager
from batonmq.protocol.bodies import DataVersion
from lab.sim.hosts import BrokerHost
from lab.sim.world import World

_SHOWN_S = 10.0
"""What a client pulled it may deliver so much later."""


class Unaware:
    """Which brokers lately ran without a change that others had answered: they cannot obey it yet.

    R39 binds who has the deletion of a topic. A broker that is cut off does not have it: outside of
    the set nothing waits for it (R31), and it continues to show what it has (R36). `check` is to be
    called all the time.
    """

    def __init__(self, world: World, brokers: Collection[BrokerHost]) -> None:
        self._world = world
        self._brokers = brokers
        self._ends: deque[tuple[float, int]] = deque()  # when, the shortest log of a process

    def check(self) -> None:
        services = [host.service for host in self._brokers if host.service is not None]
        now_s = self._world.now_s
        if services:
            shortest = min(service.store.max_phy_offset for service in services)
            self._ends.append((now_s, shortest))
        while self._ends and self._ends[0][0] < now_s - _SHOWN_S:
            self._ends.popleft()

    def of(self, end: int, since_s: float) -> bool:
        """Whether some process lacked a part of the log below `end` after `since_s`."""
        return any(at_s > since_s and shortest < end for at_s, shortest in self._ends)


@dataclass
class _Sent:
    """Offsets of `topic@group` that a master sent in `epoch`, when it had carried out the log up to
    `end`, and which the replica has taken over."""

    offsets: dict[str, dict[int, int]] = field(default_factory=dict)
    end: int = 0
    epoch: int = 0

    def kept_in(self, table: Mapping[str, Mapping[int, int]]) -> _Sent:
        """Without those that changed since."""
        kept = {key: own for key, own in self.offsets.items() if table.get(key) == own}
        return _Sent(kept, self.end, self.epoch)


class KeptProgress:
    """What a master sent behind a deletion is of the new topic, or group. A replica keeps it when
    its own log shows that deletion, also if it was restarted between (R39)."""

    def __init__(self, violate: Callable[[str], None]) -> None:
        self._violate = violate
        self._files: dict[str, list[tuple[DataVersion, _Sent]]] = defaultdict(list)
        """Of each broker: what its file of offsets had of its master's, each time it was written.
        """

    def watch(self, host: BrokerHost, offsets: ConsumerOffsetManager) -> None:
        """A new process of that broker: to be called before it loads its file."""
        load, take, forget = offsets.load, offsets.apply_from_master, offsets._forget
        writes_due, files = offsets.writes_due, self._files[host.name]
        sent = _Sent()

        def on_load() -> None:
            nonlocal sent
            load()
            version = offsets.data_version
            written = [each for at, each in files if at == version]
            sent = min(written, key=lambda each: each.end, default=_Sent())

        def on_take(*args: Any, **more: Any) -> bool:
            nonlocal sent
            taken = take(*args, **more)
            if taken:
                epoch, incoming, carried_out = (*args, None)[:3]
                copied = {key: dict(own) for key, own in incoming.items()}
                sent = _Sent(copied, carried_out or 0, epoch).kept_in(offsets.table)
            return taken

        def on_write() -> list[Callable[[], None]]:
            writes = writes_due()
            if writes:
                files.append((offsets.data_version, sent.kept_in(offsets.table)))
            return writes

        def on_forget(keys: list[str], record_end: int) -> None:
            epochs = offsets.deletions.epochs()
            is_newer = any(e.epoch > sent.epoch and e.start_offset < record_end for e in epochs)
            is_sent_behind = record_end <= sent.end and not is_newer
            kept = sent.kept_in(offsets.table).offsets if is_sent_behind else {}
            forget(keys, record_end)
            for key in keys:
                if key in kept and offsets.table.get(key) != kept[key]:
                    self._violate(
                        f"R39: {host.incarnation} loses the progress of {key}, {kept[key]}, by the"
                        f" deletion that ends at {record_end}; it is of {sent.end}"
                    )

        offsets.load = on_load  # type: ignore[method-assign]
        offsets.apply_from_master = on_take  # type: ignore[method-assign]
        offsets.writes_due = on_write  # type: ignore[method-assign]
        offsets._forget = on_forget  # type: ignore[method-assign]

    def is_at_stake(self, host: BrokerHost, key: str) -> bool:
        """Whether its file has progress of `key` that is of behind what it has carried out."""
        service, files = host.service, self._files[host.name]
        if service is None or not files:
            return False
        _, sent = files[-1]
        return key in sent.offsets and sent.end > service.store.confirm_offset
