"""Which part of the log may be missing because it expired.

`Expiry` checks each segment that a store removes. A confirmed one may go if the disk is full
enough, or if its newest message is older than `StoreConfig.file_reserved_time`; never the newest
segment, and none before the log states the positions of all queues after it (R38). A slave removes
only what a master has removed (R27). What lies below `begin` may be missing from then on, in a
log, a queue or at a reader; nothing else may.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable

from batonmq.protocol.topic_name import METADATA_TOPIC
from batonmq.store.commit_log import Segment
from batonmq.store.queue_positions import POSITIONS_QUEUE
from lab.sim.hosts import BrokerHost
from lab.sim.records import records
from lab.sim.world import World

_FORCED_ABOVE = 0.85  # StoreConfig.disk_space_clean_forcibly_ratio
_HOUR_S = 3_600.0
_SLACK_S = 5.0  # clocks drift
_BELIEVED_S = _HOUR_S
"""A clock is believed as far as it advanced since the start (`store.upkeep.LogTime`), and this."""
_START_S = 3.0


class Expiry:
    """`truth` is all that was ever confirmed, from offset 0 on."""

    def __init__(
        self,
        world: World,
        truth: bytearray,
        bound: Callable[[BrokerHost], int | None],
        note_confirmed: Callable[[BrokerHost], None],
    ) -> None:
        """`bound`: up to where the log of a broker is the truth, if it does not follow an unclean
        election yet: what lies behind was given up, and may expire as that broker likes."""
        self._world = world
        self._truth = truth
        self._bound = bound
        self._note_confirmed = note_confirmed
        self.begin = 0
        self.taken = 0
        self._started: dict[str, tuple[float, float]] = {}
        """Per broker: since when its store is open, and by how much its clock was ahead then."""
        self._grown: list[tuple[int, float]] = []  # up to where at what time
        self._written: dict[str, list[tuple[int, float]]] = defaultdict(list)
        """Of each broker up to where it had its log at what time."""
        self._own: dict[str, int] = {}
        """Per broker: where its log begins by what it took away itself."""

    def grown(self) -> None:
        """More of the log is confirmed, or some of it was given up."""
        end, now_s = len(self._truth), self._world.clocks.true_s()
        at_s = next((at_s for before, at_s in self._grown if before >= end), now_s)
        self._grown = [each for each in self._grown if each[0] < end]
        self._grown.append((end, at_s))

    def note_written(self, brokers: Iterable[BrokerHost]) -> None:
        """To be called often, and before hours pass."""
        now_s = self._world.clocks.true_s()
        for host in brokers:
            if host.service is None:
                continue
            end, written = host.service.store.max_phy_offset, self._written[host.name]
            while written and written[-1][0] > end:  # it was cut
                written.pop()
            if not written or written[-1][0] < end:
                written.append((end, now_s))

    def watch(self, host: BrokerHost) -> None:
        """Its store was opened."""
        assert host.service is not None
        log = host.service.store.log
        ahead_s = self._world.clocks.off_s(host.address, _START_S)
        self._started[host.name] = (self._world.now_s, ahead_s)
        self.check_begin(host)
        own = self._own.get(host.name, 0)
        self._own[host.name] = min(own, host.service.store.min_phy_offset)
        take: Callable[[], Segment] = log.take_first_segment

        def take_first_segment() -> Segment:
            is_last = len(log.segments) < 2
            segment = take()
            fault = "it is the newest" if is_last else self._fault(host, segment)
            if fault:
                name = f"{segment.start_offset} to {segment.end_offset}"
                self._world.violate(f"expiry: {host.incarnation} takes {name} away: {fault}")
            self.taken += 1
            self._own[host.name] = segment.end_offset
            self._world.tell(host.name, f"segment {segment.start_offset} expires")
            return segment

        log.take_first_segment = take_first_segment  # type: ignore[method-assign]

    def is_begun_behind(self, host: BrokerHost) -> bool:
        """Whether its log was begun where a master's began. What a member took away itself had
        expired at a master, so that keeps it out of no set (R27)."""
        assert host.service is not None
        return host.service.store.min_phy_offset != self._own.get(host.name, 0)

    def check_begin(self, host: BrokerHost) -> None:
        """A log begins nowhere behind what has expired."""
        assert host.service is not None
        begins = host.service.store.min_phy_offset
        if begins > self.begin and not self._is_given_up(host, begins):
            self._world.violate(f"G1: the log of {host.incarnation} begins at {begins} only")

    def _fault(self, host: BrokerHost, segment: Segment) -> str:
        service = host.service
        assert service is not None
        if segment.end_offset > service.store.confirm_offset:
            return f"confirmed is {service.store.confirm_offset}"
        if self._is_given_up(host, segment.end_offset):
            return ""
        manager = host.manager
        view = manager.view if manager is not None else None
        if manager is None or view is None or view.master_incarnation != manager.incarnation:
            return "" if segment.end_offset <= self.begin else "R27: no master has"
        self._note_confirmed(host)  # the record may have arrived at no queue
        if not self._are_positions_stated(segment.end_offset):
            return "R38: the log does not state the positions of queues behind it"
        if host.disk.used() <= _FORCED_ABOVE:
            age_s = self._world.clocks.true_s() - self._newest_s(host, segment)
            slack_s = _SLACK_S + self._clock_error_s(host)
            if age_s + slack_s < self._world.settings.reserved_hours * _HOUR_S:
                return f"its newest message is {age_s:.0f} s old"
        self.begin = max(self.begin, segment.end_offset)
        return ""

    def _is_given_up(self, host: BrokerHost, end: int) -> bool:
        bound = self._bound(host)
        return bound is not None and end > bound

    def _clock_error_s(self, host: BrokerHost) -> float:
        """By how much older than it is that broker may rightly take a segment for: its clock may
        have been behind when it wrote the file, and is ahead by now."""
        started_s, ahead_s = self._started[host.name]
        since_s = self._world.now_s - started_s + _START_S
        clocks, address = self._world.clocks, host.address
        ahead_s = min(clocks.off_s(address, since_s), ahead_s + _BELIEVED_S)
        return ahead_s + clocks.off_s(address, self._world.now_s, behind=True)

    def _are_positions_stated(self, begin: int) -> bool:
        """Whether a whole round of them lies behind `begin`, and is confirmed."""
        for record in records(self._truth, begin):
            if (record.topic, record.queue_id) == (METADATA_TOPIC, POSITIONS_QUEUE):
                said = json.loads(record.body)
                if said["since"] >= begin and said.get("whole"):
                    return True
        return False

    def _newest_s(self, host: BrokerHost, segment: Segment) -> float:
        """When the last byte of a segment was confirmed; or written there, if hours passed in
        between."""
        behind = [*self._grown, *self._written[host.name]]
        return min(at_s for end, at_s in behind if end >= segment.end_offset)
