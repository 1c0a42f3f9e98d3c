"""What servers promise, watched from outside: G1 to G4, R1, R15, and equal controller states.

`truth` is the longest log that any replica showed as confirmed. Whoever shows other bytes, or opens
as master without them, breaks a promise.
"""

from __future__ import annotations

from collections.abc import Mapping

from batonmq.controller.raft.log import Commit
from batonmq.controller.rules.groups import BrokerGroup
from batonmq.namesrv.state import RouteInfoManager
from batonmq.protocol.role_view import Role
from batonmq.store.message_store import MessageStore
from sim.copies import Copies
from sim.decisions import Decisions
from sim.hosts import GROUP, BrokerHost, ControllerHost
from sim.sightings import Sightings
from sim.world import World

_DIGEST_EVERY = 4


class Promises:
    """Told by the hosts what they do. `brokers` are all there are."""

    def __init__(self, world: World, brokers: Mapping[int, BrokerHost]) -> None:
        self._world = world
        self._brokers = brokers
        self._copies = Copies(brokers, world.settings)
        self._decisions = Decisions(self._copies, world.violate)
        self.sightings: Sightings
        self.truth = bytearray()
        self.truth_ends: dict[int, int] = {}  # masterEpoch -> how much of it stood in that epoch
        self.masters: dict[int, str] = {}
        self.group: BrokerGroup | None = None  # the newest that any controller applied
        self.commits = 0
        self._newest_index = 0
        self._digests: dict[int, str] = {}

    # Logs.

    def confirmed(self, host: BrokerHost) -> None:
        """The broker shows more of its log to readers."""
        service = host.service
        if service is None:
            return
        store, gate = service.store, service.path.gate
        if fault := self._copies.shown(host):
            self._violate(fault)
        epoch, end = gate.master_epoch, store.confirm_offset
        if gate.role is Role.MASTER:
            first = self.masters.setdefault(epoch, host.incarnation)
            if first != host.incarnation:
                self._violate(f"G2: {first} and {host.incarnation} confirm in epoch {epoch}")
            if end < host.confirms.get(epoch, 0):
                self._violate(f"R15: confirmOffset of {host.incarnation} falls")
            host.confirms[epoch] = end
        begin = max(host.checked, store.min_phy_offset)
        if end <= begin:
            return
        data = read_log(store, begin, end)
        if len(data) < end - begin:
            self._violate(f"G4: {host.incarnation} confirms {end} and holds {begin + len(data)}")
        known = bytes(self.truth[begin:end])
        if data[: len(known)] != known:
            at = begin + equal(data, known)
            self._violate(f"G3: {host.incarnation} shows another byte at {at}")
        host.checked = end
        if end > len(self.truth):
            self.truth += data[len(self.truth) - begin :]
            self.truth_ends[epoch] = end
            self._no_newer_master_lacks(host, epoch, end)

    def is_confirmed(self, name: str) -> bool:
        """Whether a message of that name stands in what was confirmed."""
        return self.truth.rfind(f"{name}|".encode()) >= 0

    def _no_newer_master_lacks(self, host: BrokerHost, epoch: int, end: int) -> None:
        for other in self._brokers.values():
            service = other.service
            if other is host or service is None or not other.is_open:
                continue
            if service.path.gate.master_epoch > epoch and service.store.max_phy_offset < end:
                self._violate(
                    f"G1: {host.incarnation} confirms {end} in epoch {epoch}, {other.incarnation}"
                    f" is master of {service.path.gate.master_epoch} without it"
                )

    def promised(self, host: BrokerHost, offset: int) -> None:
        """The master takes all below `offset` for confirmed, and will acknowledge it."""
        fault = self._copies.fault(host, self.group, offset)
        if fault:
            self._violate(fault)

    def routes(self, host: ControllerHost, routes: RouteInfoManager) -> None:
        self.sightings.watch_routes(host, routes)

    def opened(self, host: BrokerHost) -> None:
        """One that hung may open long after its epoch was over: it can confirm nothing (R1)."""
        service = host.service
        assert service is not None
        store, epoch = service.store, service.path.gate.master_epoch
        needed = max((end for e, end in self.truth_ends.items() if e < epoch), default=0)
        begin = store.min_phy_offset
        data, known = read_log(store, begin, needed), self.truth[begin:needed]
        if data != known:
            self._violate(
                f"G1: {host.incarnation}, master of {epoch}, lacks confirmed bytes: it holds"
                f" {store.max_phy_offset} of {needed}, equal up to {begin + equal(data, known)}"
            )

    # Controllers.

    def applied(self, host: ControllerHost, commit: Commit) -> None:
        self._decisions.applied(commit)
        state = commit.state
        index = state.applied_index
        if index % _DIGEST_EVERY == 0:
            digest = state.digest()
            if self._digests.setdefault(index, digest) != digest:
                self._violate(f"G7: {host.name} has another state at index {index}")
        if index <= self._newest_index:
            return
        self._newest_index = index
        self.commits += 1
        state.check_invariants()
        group = state.group(GROUP)
        if group is not None:
            self.group = group
            self.check_r1()

    def check_r1(self) -> None:
        """A master waits for the recorded set, whatever else it waits for."""
        self._copies.note()
        group = self.group
        if group is None:
            return
        for host in self._brokers.values():
            service = host.service
            ha = service.replication.ha if service is not None else None
            sync = ha.sync_state if ha is not None else None
            manager = service.replication.manager if service is not None else None
            if (
                sync is not None
                and manager is not None
                and sync.master_epoch == group.master_epoch
                and manager.incarnation == group.master_incarnation
                and not set(group.sync_state_set) <= sync.required_set
            ):
                self._violate(
                    f"R1: {host.incarnation} waits for {sorted(sync.required_set)}, recorded is"
                    f" {group.sync_state_set} (epochs {group.master_epoch},"
                    f" {group.sync_state_set_epoch})"
                )

    def _violate(self, what: str) -> None:
        self._world.violate(what)


def read_log(store: MessageStore, begin: int, end: int) -> bytes:
    """The bytes [begin, end) of a log, fewer if it ends before."""
    pieces = []
    while begin < end and (view := store.log.view(begin, end - begin)):
        pieces.append(bytes(view))
        begin += len(view)
    return b"".join(pieces)


def equal(one: bytes, other: bytes | bytearray) -> int:
    """How many bytes are equal from the start."""
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return min(len(one), len(other))
