"""Faults of disks that wear out: bits flip at rest, calls fail for good, cuts find no disk space.

One broker of a life has such a disk: nothing is promised where two disks lose the same byte. Its
faults happen only while others have all that it may lose.
"""

import errno

from lab.sim.hosts import BrokerHost
from lab.sim.kinds import Kinds, PlannedFault
from lab.sim.records import LogRecord, records

_NEWEST = 3


class WearFaults(Kinds):
    def _worn(self, fault: PlannedFault) -> BrokerHost | None:
        """The broker whose disk wears out, if it may lose something now. The first fault says
        which."""
        brokers = self.cluster.brokers.values()
        met = self.cluster.promises.rot.met
        host = next((host for host in brokers if host.name in met), None)
        host = host or self._of(list(brokers), fault.pick)
        return host if host is not None and self.is_held_elsewhere(host) else None

    def rot(self, fault: PlannedFault) -> str | None:
        """A byte of a record changes while the process is down. Half of the time it is one of the
        newest: a start reads those."""
        host = self._worn(fault)
        if host is None or host.service is None:
            return None
        store = host.service.store
        found = self._records(store.min_phy_offset, store.confirm_offset)
        if not found:
            return None
        host.kill()
        if fault.pick2 < 0.5:
            found = found[-_NEWEST:]
        what = self._flip(host, found[int(fault.pick2 * 1_009) % len(found)], fault)
        self._later(fault, host.start)
        return what

    def rot_while_up(self, fault: PlannedFault) -> str | None:
        """The same, in what this process of a slave has not read yet."""
        host = self._worn(fault)
        if host is None or host.service is None or host.is_open:
            return None
        store = host.service.store
        found = self._records(store.min_phy_offset, store._dispatcher.verified.start)
        return self._flip(host, found[int(fault.pick2 * len(found))], fault) if found else None

    def _records(self, begin: int, end: int) -> list[LogRecord]:
        found = records(self.cluster.promises.truth, begin, end)
        return [record for record in found if record.offset + record.size <= end]

    def _flip(self, host: BrokerHost, record: LogRecord, fault: PlannedFault) -> str:
        at = int(fault.pick2 * 1e6) % record.size
        self.cluster.promises.rot.flip(host, record.offset + at, 1 << int(fault.pick * 8))
        return f"{host.name} at byte {at} of the record at {record.offset}"

    def failing_disk(self, fault: PlannedFault) -> str | None:
        """EIO, once: the process ends, and is suspect (R40)."""
        host = self._worn(fault)
        detail = self._fail_call(fault, host)
        if host is not None and detail is not None:
            self.cluster.promises.rot.met.add(host.name)
        return detail

    def failing_cut(self, fault: PlannedFault) -> str | None:
        """The next cut of any log finds no disk space at one of its steps (R37)."""
        call = 1 + int(fault.pick2 * 12)
        for host in self.cluster.brokers.values():
            host.disk.plan.fail_within = ("store/truncation.intent", call, errno.ENOSPC)
        return f"at its {call}th call"
