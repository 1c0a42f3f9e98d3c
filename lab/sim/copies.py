"""Whether every member of the recorded set holds what its master confirms, watched from outside.

That is R1 and R15 without their consequences: no member has to be elected for a missing copy to be
seen. What a member that is down holds is what it held when it ended. Where flushed bytes are
promised (SYNC_FLUSH, haSyncFlush), the simulated disk is asked what a loss of power would leave.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence

from batonmq.broker.service import BrokerService
from batonmq.controller.rules.groups import BrokerGroup
from batonmq.epoch.entry import EpochEntry
from lab.sim.disk import SECTOR
from lab.sim.hosts import BrokerHost, controlled
from lab.sim.rot import Rot
from lab.sim.settings import Settings


class Copies:
    """`note` is to be called often enough to see every process of a broker."""

    def __init__(
        self,
        brokers: Mapping[int, BrokerHost],
        settings: Settings,
        rot: Rot,
        strays: Collection[BrokerHost],
    ) -> None:
        """`strays` are those with the log of another history: they may have any id."""
        self._brokers = brokers
        self._strays = strays
        self._settings = settings
        self._rot = rot
        self._highest = 0  # that any master confirmed
        self._ends: dict[tuple[str, int], int] = {}  # by incarnation and masterEpoch
        self._newest: dict[int, tuple[BrokerHost, BrokerService]] = {}  # by broker id
        self._held: dict[BrokerService, set[int]] = {}  # of which masters a process had the tables

    def note(self) -> None:
        for host in self._brokers.values():
            service, manager = host.service, host.manager
            if service is None or manager is None or host in self._strays:
                continue
            if manager.broker_id:
                self._newest[manager.broker_id] = (host, service)
                if service not in self._held:
                    self._watch_tables(service)

    def _watch_tables(self, service: BrokerService) -> None:
        """They stay in memory; `held_epoch` alone forgets them when the role is taken again."""
        slave_sync = service.slave_sync
        held = self._held[service] = {slave_sync.held_epoch}
        tell = slave_sync.on_tables

        def on_tables(master_epoch: int) -> None:
            held.add(master_epoch)
            tell(master_epoch)

        slave_sync.on_tables = on_tables

    def host_of(self, broker_id: int) -> BrokerHost | None:
        self.note()
        return self._newest[broker_id][0] if broker_id in self._newest else None

    def acknowledged_alone(self, end: int) -> None:
        """A broker without controllers promised all below `end`."""
        self._highest = max(self._highest, end)

    def cut(self, offset: int, brought_back: int = 0) -> None:
        """What was confirmed behind `offset` was given up. The new master shows all below
        `brought_back`: its election confirmed what it alone has, or an earlier one had given that
        up."""
        self._highest = max(min(self._highest, offset), brought_back)

    def confirmed_by(self, master: BrokerHost) -> int:
        """All below it was confirmed by this process in its epoch, or came to it as confirmed."""
        acting, manager = master.service, master.manager
        if acting is None or manager is None:
            return 0
        process = (manager.incarnation, acting.path.gate.master_epoch)
        return self._ends.get(process, acting.store.confirm_offset)

    def shown(self, host: BrokerHost) -> str:
        """Why that broker may not show readers what it shows; "" if some master confirmed it."""
        service = host.service
        if service is None or service.store.confirm_offset <= self._highest:
            return ""
        shown = service.store.confirm_offset
        return f"G4: {host.incarnation} shows {shown}, confirmed is {self._highest}"

    def fault(self, master: BrokerHost, group: BrokerGroup | None, end: int) -> str:
        """Why `master` should not confirm all below `end`; "" if every copy is there, or if another
        set counts by now."""
        self.note()
        acting, manager = master.service, master.manager
        if acting is None or manager is None:
            return ""
        self._highest = max(self._highest, end)
        process = (manager.incarnation, acting.path.gate.master_epoch)
        begin = self.confirmed_by(master)
        self._ends[process] = max(begin, end)
        if end <= begin or group is None:
            return ""
        if process != (group.master_incarnation, group.master_epoch):
            return ""
        if _knows_newer_set(acting, group):
            return ""  # the controllers got an older memory back
        data = b"".join(map(bytes, _pieces(acting, begin, end)))
        # The master may not know yet that the set has shrunk: then those of the larger set count.
        if len(group.sync_state_set) < self._settings.min_in_sync:
            faults = [self._fault_of(one, group, acting, begin, data) for one in self._newest]
            if faults.count("") < self._settings.min_in_sync:
                return f"R15: {master.incarnation} confirms {end} with {group.sync_state_set} only"
        for broker_id in group.sync_state_set:
            fault = self._fault_of(broker_id, group, acting, begin, data)
            if fault:
                return f"{fault}, and {master.incarnation} confirms {end}"
        return ""

    def unfit(self, broker_id: int, epochs: range, confirmed: int) -> str:
        """Why that broker may not be added to the set in which `confirmed` was confirmed; its
        master is one since the first of `epochs`."""
        self.note()
        if broker_id not in self._newest:
            return ""
        host, service = self._newest[broker_id]
        holds, master_epoch = service.store.max_phy_offset, epochs[-1]
        if host.service is not service or service.path.gate.master_epoch != master_epoch:
            return ""  # it ended meanwhile, or has gone on
        if holds < confirmed:
            return f"R13: {host.incarnation} is added with {holds}, confirmed is {confirmed}"
        held = self._held[service]
        if held.isdisjoint(epochs):
            return f"R42: {host.incarnation} is added in {master_epoch} with tables of {held}"
        return ""

    def undrained(self, broker_id: int, incarnation: str, drained: int) -> str:
        """Why a planned switch may not elect that process, which is said to hold all below
        `drained`. One that is gone meanwhile leads nowhere (R3)."""
        self.note()
        if broker_id not in self._newest:
            return ""
        host, service = self._newest[broker_id]
        holds = service.store.max_phy_offset
        manager = controlled(service).manager
        if manager is None or manager.incarnation != incarnation:
            return ""
        if host.service is not service or holds >= drained:
            return ""
        return f"R33: {host.incarnation} is elected with {holds}, sends were held at {drained}"

    def never_confirmed(self, floor: int) -> str:
        """Why `floor` may not be recorded as confirmed."""
        if floor <= self._highest:
            return ""
        return f"R43: {floor} is recorded as confirmed, that is {self._highest}"

    def _fault_of(
        self, broker_id: int, group: BrokerGroup, acting: BrokerService, begin: int, data: bytes
    ) -> str:
        """What is wrong with the copy of one member; `acting` is the master."""
        if broker_id not in self._newest:
            return ""
        host, service = self._newest[broker_id]
        record, manager = group.replica(broker_id), controlled(service).manager
        registered = record.incarnation if record is not None else ""
        is_registered = manager is not None and manager.incarnation == registered
        lost_power = host.boot > 1 and not self._settings.acks_are_flushed
        if (lost_power or host.name in self._rot.met) and not is_registered:
            return ""  # an ack may be under way of what it lost since (R12, R17)
        holds, end = service.store.max_phy_offset, begin + len(data)
        if holds < end:
            return f"R1: {host.incarnation}, member {broker_id}, holds {holds}"
        of_master, own = acting.store.epochs.entries, service.store.epochs.entries
        entered = service.path.gate.master_epoch
        if is_registered and entered < group.master_epoch:
            return f"R41: {host.incarnation} counts in {group.master_epoch}, it is in {entered}"
        first = max(entries[0].epoch if entries else 0 for entries in (of_master, own))
        expected, found = (_history(entries, first, end) for entries in (of_master, own))
        if expected != found:
            return f"R25: the history of {host.incarnation} is {found}, its master's is {expected}"
        settings = self._settings
        flushed = settings.sync_flush if service is acting else settings.acks_are_flushed
        if flushed and (at := first_unsynced(host, begin, data)) is not None:
            return f"R15: the disk of {host.incarnation} has no more than {at}"
        return ""


def _knows_newer_set(acting: BrokerService, group: BrokerGroup) -> bool:
    ha = controlled(acting).ha
    sync = ha.sync_state if ha is not None else None
    return sync is not None and sync.sync_state_set_epoch > group.sync_state_set_epoch


def _pieces(service: BrokerService, begin: int, end: int) -> Iterator[memoryview]:
    while begin < end and (view := service.store.log.view(begin, end - begin)):
        yield view
        begin += len(view)


def _history(entries: Sequence[EpochEntry], first: int, end: int) -> list[tuple[int, int]]:
    """Epochs from `first` on and where they begin, of a log up to `end`."""
    return [(e.epoch, e.start_offset) for e in entries if e.epoch >= first and e.start_offset < end]


def first_unsynced(host: BrokerHost, begin: int, data: bytes) -> int | None:
    """Where a loss of power may change the log's bytes [begin, begin + len(data)), which are
    `data`; None where it cannot."""
    size, end = host.world.settings.segment_size, begin + len(data)
    for file in host.disk.files.values():
        folder, _, name = file.path.rpartition("/")
        if not name.isdigit() or not folder.endswith("/commitlog"):
            continue
        start = int(name)
        if start >= end or start + size <= begin:
            continue
        for sector, synced in sorted({**file.dirty, **file.lost}.items()):
            at = start + sector * SECTOR
            low, high = max(at, begin), min(at + SECTOR, end)
            kept = synced.ljust(SECTOR, b"\0")
            if low < high and kept[low - at : high - at] != data[low - begin : high - begin]:
                return low
    return None
