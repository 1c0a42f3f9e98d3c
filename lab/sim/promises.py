"""What servers promise, watched from outside: G1 to G4, R1, R15, and equal controller states.

`truth` is the longest log that any replica showed as confirmed. Whoever shows other bytes, or opens
as master without them, breaks a promise.
"""

import json
import re
import struct
from collections.abc import Callable, Mapping, Sequence

from batonmq.broker.service import BrokerService
from batonmq.controller.raft.log import Commit
from batonmq.controller.rules.commands import ElectMaster
from batonmq.controller.rules.groups import BrokerGroup
from batonmq.epoch.entry import EpochEntry
from batonmq.namesrv.state import RouteInfoManager
from batonmq.protocol.records.codec import MAGIC_BLANK
from batonmq.protocol.role_view import Role
from batonmq.protocol.topic_name import METADATA_TOPIC
from batonmq.store.message_store import MessageStore
from lab.sim.copies import Copies, first_unsynced
from lab.sim.decisions import Decisions, NewestCommit
from lab.sim.deletions import KeptProgress
from lab.sim.expiry import Expiry
from lab.sim.given_up import GivenUp, UncleanElection, records_behind
from lab.sim.hosts import GROUP, BrokerHost, ControllerHost
from lab.sim.records import LogRecord, records
from lab.sim.rot import Rot, read_log
from lab.sim.sightings import Sightings
from lab.sim.stray_logs import Lineage
from lab.sim.world import World

_DIGEST_EVERY = 4  # it reads the whole state
_NAMES = re.compile(rb"[\d.]+-\d+-\d+(?=\|)")
"""Names of messages among the bytes of a log: each body begins with its name and "|"."""


def _has_new_log(host: BrokerHost, end: int, shown: int) -> bool:
    """R27: all that it had is kept aside, and its log begins at `end`, or is still to begin."""
    for folder in (host.disk.root / "store" / "truncated").glob("*-*-*"):
        _, first, last = map(int, folder.name.split("-"))
        if end == first or (end == 0 and last >= shown):
            return True
    return False


class Promises:
    """Called by the hosts with what they do. `brokers` are all there are."""

    def __init__(self, world: World, brokers: Mapping[int, BrokerHost]) -> None:
        self._world = world
        self._violate = world.violate
        self._brokers = brokers
        self.truth = bytearray()
        self.rot = Rot(self.truth)
        self.expiry = Expiry(world, self.truth, self._bound, self.confirmed)
        self.lineage = Lineage(world, lambda: self.group)
        self._copies = Copies(brokers, world.settings, self.rot, self.lineage.strays)
        self._decisions = Decisions(self._copies, world.violate)
        self.sightings: Sightings
        self._shown: dict[str, tuple[int, int]] = {}
        """Of each broker its boot, and up to where it showed its log in it."""
        self.progress = KeptProgress(world.violate)
        self.given_up = GivenUp(world.violate)
        self._gave_up = False
        self.on_given_up: Callable[[Sequence[LogRecord]], None] = lambda records: None
        self.on_cut_later: Callable[[Sequence[str]], None] = lambda names: None
        self.last_epochs: tuple[EpochEntry, ...] = ()
        """The newest epoch list of a broker that has ended."""
        self.truth_ends: dict[int, int] = {}  # masterEpoch -> how much of it stood in that epoch
        self.masters: dict[int, str] = {}
        self.group: BrokerGroup | None = None  # the newest that any controller applied
        self.commits = 0
        self._newest_index = 0
        self._digests: dict[int, str] = {}

    # Logs.

    def begins(self, host: BrokerHost, service: BrokerService) -> None:
        self.progress.watch(host, service.tables.offsets)

    def started(self, host: BrokerHost) -> None:
        self.expiry.watch(host)
        assert host.service is not None
        store, (boot, shown) = host.service.store, self._shown.get(host.name, (0, 0))
        end = store.max_phy_offset
        # A reboot may lose what was not synced, and an unclean election cuts what was shown.
        is_less = end < shown and not store.trust.reason and not _has_new_log(host, end, shown)
        if boot == host.boot and is_less and not self.given_up.any:
            self._violate(f"R24: {host.incarnation} has {end} of {shown}")

    def confirmed(self, host: BrokerHost) -> None:
        """The broker shows more of its log to readers."""
        service = host.service
        if service is None or host in self.lineage.strays:
            return
        store, gate = service.store, service.path.gate
        epoch, end = gate.master_epoch, store.confirm_offset
        self._shown[host.name] = (host.boot, end)
        if self.given_up.is_won_by(host, store.epochs.last_epoch):
            return  # what it alone has is confirmed by its election; it is looked at when it opens
        bound = self._bound(host)
        if bound is None and (fault := self._copies.shown(host)):
            self._violate(fault)
        if gate.role is Role.MASTER:
            first = self.masters.setdefault(epoch, host.incarnation)
            if first != host.incarnation:
                self._violate(f"G2: {first} and {host.incarnation} confirm in epoch {epoch}")
            if end < host.confirms.get(epoch, 0):
                self._violate(f"R15: confirmOffset of {host.incarnation} falls")
            if end > host.confirms.get(epoch, 0):
                self.given_up.confirms(host, epoch)
            host.confirms[epoch] = end
        if bound is not None and end > bound:
            # It has not heard of the unclean election: what it shows behind the bound is given up.
            begin = max(bound, store.min_phy_offset)  # its own oldest segments may have expired
            names = set(_NAMES.findall(self.rot.read(host, begin, end)))
            self.on_cut_later(sorted(name.decode() for name in names))
            end = bound
        begin = max(host.checked, store.min_phy_offset)  # what is older was compared, or expired
        if end <= begin:
            return
        data = self.rot.read(host, begin, end)
        if len(data) < end - begin:
            self._violate(f"G4: {host.incarnation} confirms {end} and holds {begin + len(data)}")
        known = bytes(self.truth[begin:end])
        if data[: len(known)] != known:
            at = begin + equal(data, known)
            self._violate(f"G3: {host.incarnation} shows another byte at {at}")
        host.checked = end
        if end > len(self.truth):
            self.truth += data[len(self.truth) - begin :]
            self.expiry.grown()
            self.truth_ends[epoch] = end
            self._no_newer_master_lacks(host, epoch, end)

    def classic(self, host: BrokerHost, store: MessageStore) -> None:
        """It acknowledges without controllers: what it shows is promised, and belongs to no epoch
        of theirs."""
        begin, end = len(self.truth), store.confirm_offset
        if read_log(store, 0, begin) != self.truth:
            self._violate(f"G3: {host.incarnation} begins its classic life with other bytes")
        self.truth += read_log(store, begin, end)
        self.expiry.grown()
        self.truth_ends[max(self.truth_ends)] = len(self.truth)
        self._copies.acknowledged_alone(len(self.truth))

    def ended(self, host: BrokerHost) -> None:
        """What it wrote is as old as its end, whenever it starts again."""
        self.expiry.note_written([host])
        entries = host.service.store.epochs.entries if host.service is not None else ()
        if entries and (not self.last_epochs or entries[-1].epoch >= self.last_epochs[-1].epoch):
            self.last_epochs = entries

    def note_written(self) -> None:
        """Hours are to pass: what is written by now becomes old."""
        self.expiry.note_written(self._brokers.values())

    def is_confirmed(self, name: str) -> bool:
        """Whether a message of that name stands in what was confirmed."""
        return self.truth.rfind(f"{name}|".encode()) >= 0

    def confirmed_at(self, name: str) -> tuple[str, int, int] | None:
        """Topic, queue id and queue offset of the newest message of that name."""
        head = f"{name}|".encode()
        named = [record for record in records(self.truth) if record.body.startswith(head)]
        return (named[-1].topic, named[-1].queue_id, named[-1].queue_offset) if named else None

    def is_expired(self, name: str) -> bool:
        """Whether all copies of a message of that name are gone by the rules of expiry."""
        begin = self.expiry.begin
        return begin > 0 and -1 < self.truth.rfind(f"{name}|".encode()) < begin

    def _bound(self, host: BrokerHost) -> int | None:
        """Up to where its log must be the truth, if it does not follow an unclean election yet."""
        if not self.given_up.any or host.service is None:
            return None
        entries = host.service.store.epochs.entries
        return self.given_up.bound(entries[-1].epoch if entries else 0)

    def host_of(self, broker_id: int) -> BrokerHost | None:
        return self._copies.host_of(broker_id)

    def held_by(self, host: BrokerHost) -> int:
        """Up to where its log is the truth. An epoch of the truth that it never had says so of
        bytes that have expired in it."""
        assert host.service is not None
        store = host.service.store
        begin, epochs = store.min_phy_offset, {entry.epoch for entry in store.epochs.entries}
        shared = 0
        for epoch, end in sorted(self.truth_ends.items()):
            if min(epochs, default=epoch) < epoch and epoch not in epochs and shared < end:
                break
            shared = max(shared, end)
        else:
            shared = len(self.truth)
        held = begin + equal(self.rot.read(host, begin, len(self.truth)), self.truth[begin:])
        return min(held, shared)

    def _elected_unclean(self, group: BrokerGroup, command: ElectMaster) -> None:
        host = self._copies.host_of(group.master_broker_id)
        held = self.held_by(host) if host is not None and host.service is not None else 0
        boot = host.boot if host is not None else 0
        takes_any = command.unclean and not self.given_up.operator_compares
        election = UncleanElection(
            group.master_epoch, takes_any, command.cut_later_acks, held, host, boot
        )
        self.given_up.elected(election)

    def _give_up(self, host: BrokerHost, epoch: int) -> None:
        """What the log of a master lacks that opens after an unclean election."""
        election = self.given_up.pending(epoch)
        if election is None:
            return
        is_won = self.given_up.is_won_by(host, epoch)
        at = self.held_by(host)
        others = [other for other in self._brokers.values() if other.service is not None]
        self.given_up.completed(election, at, host, [self.held_by(other) for other in others])
        behind = records_behind(self.truth, at)
        self._world.tell("checker", f"{len(behind)} messages from {at} on are given up")
        del self.truth[at:]
        self._fill(host)
        self.expiry.grown()
        self.truth_ends = {e: min(end, at) for e, end in self.truth_ends.items()}
        shows = is_won or self._gave_up
        self._copies.cut(at, self._copies.confirmed_by(host) if shows else 0)
        self._gave_up = True
        for other in self._brokers.values():
            other.checked = min(other.checked, at)  # the truth behind `at` is another one now
        self.on_given_up(behind)
        if is_won:
            self.confirmed(host)

    def _fill(self, host: BrokerHost) -> None:
        """What lies between the truth that is left and the begin of the new master's log is what
        others hold that share its history, and else none."""
        assert host.service is not None
        at, begin = len(self.truth), host.service.store.min_phy_offset
        if begin <= at:
            return
        shared = _epoch_at(host, begin)
        for other in self._brokers.values():
            if other is host or other.service is None or _epoch_at(other, begin) != shared:
                continue
            if other.service.store.min_phy_offset <= at:
                self.truth += self.rot.read(other, at, begin)[: begin - at]
                break
        left = begin - len(self.truth)
        if left > 0:
            self.truth += struct.pack(">iI", left, MAGIC_BLANK).ljust(left, b"\0")

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
        self._give_up(host, epoch)
        needed = max((end for e, end in self.truth_ends.items() if e < epoch), default=0)
        self._check_inherited(host, needed)
        begin = store.min_phy_offset
        self.expiry.check_begin(host)
        data, known = self.rot.read(host, begin, needed), self.truth[begin:needed]
        if data != known:
            self._violate(
                f"G1: {host.incarnation}, master of {epoch}, lacks confirmed bytes: it holds"
                f" {store.max_phy_offset} of {needed}, equal up to {begin + equal(data, known)}"
            )

    def _check_inherited(self, host: BrokerHost, needed: int) -> None:
        """R26: what was acknowledged before its epoch is on its disk. Bytes behind `needed` are
        looked at when it confirms them (R15): a master that is elected again has some of its own
        turn, which nothing acknowledges before their sync."""
        if self._world.settings.sync_flush and host.service is not None:
            store = host.service.store
            begin = store.min_phy_offset
            data = read_log(store, begin, needed)
            if (at := first_unsynced(host, begin, data)) is not None:
                self._violate(f"R26: {host.incarnation} opens, its disk has no more than {at}")

    def is_created(self, topic: str) -> bool:
        """R31: whether the newest change of that topic which is confirmed makes it."""
        for host in self._brokers.values():
            host.look_classic()
        made = False
        for record in records(self.truth):
            if (record.topic, record.queue_id) == (METADATA_TOPIC, 0):
                change = json.loads(record.body)
                made = topic in change.get("topics", ()) or (
                    made and topic not in change.get("deletedTopics", ())
                )
        return made

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
            return  # another controller showed it before
        self._newest_index = index
        self.commits += 1
        state.check_invariants()
        before, group = self.group, state.group(GROUP)
        if group is not None:
            is_new = before is not None and 0 < before.master_epoch < group.master_epoch
            if is_new and group.unclean_epoch == group.master_epoch:
                assert isinstance(commit.command, ElectMaster)
                self._elected_unclean(group, commit.command)
            self.group = group
            self.check_r1()

    @property
    def known(self) -> NewestCommit:
        """What the controllers know now."""
        return NewestCommit(self._newest_index, self.group)

    def controllers_know(self, known: NewestCommit) -> None:
        """They lost their disks, or got older ones back: what comes behind is another history."""
        self._newest_index, self.group = known
        self._digests = {index: of for index, of in self._digests.items() if index <= known.newest}
        self._decisions.go_back(known)

    def check_r1(self) -> None:
        """A master waits for the recorded set, whatever else it waits for."""
        self._copies.note()
        self.note_written()
        group = self.group
        if group is None:
            return
        for host in self._brokers.values():
            ha, manager = host.ha, host.manager
            sync = ha.sync_state if ha is not None else None
            if (
                sync is not None
                and manager is not None
                and sync.master_epoch == group.master_epoch
                and sync.sync_state_set_epoch <= group.sync_state_set_epoch
                and manager.incarnation == group.master_incarnation
                and not set(group.sync_state_set) <= sync.required_set
            ):
                self._violate(
                    f"R1: {host.incarnation} waits for {sorted(sync.required_set)}, recorded is"
                    f" {group.sync_state_set} (epochs {group.master_epoch},"
                    f" {group.sync_state_set_epoch})"
                )


def _epoch_at(host: BrokerHost, offset: int) -> int:
    """The epoch to which the byte at `offset` of its log belongs; 0 if it holds none there."""
    assert host.service is not None
    store = host.service.store
    entries = [entry for entry in store.epochs.entries if entry.start_offset <= offset]
    return entries[-1].epoch if entries and offset < store.max_phy_offset else 0


def equal(one: bytes, other: bytes | bytearray) -> int:
    """How many bytes are equal from the start."""
    size = min(len(one), len(other))
    if one[:size] == other[:size]:
        return size
    return next(index for index in range(size) if one[index] != other[index])
