"""Whether each decision of the controllers is one that the rules allow, watched from outside.

A commit is judged with the group as it was recorded before: an Alter replaces the set that it
names (R3, R10) and adds only processes that acked, and hold what is confirmed and the tables of
this epoch (R12, R13, R42); a clean election chooses from the set and keeps its living members (R9,
R10); in a planned switch the chosen one has the last byte (R33); what is recorded as confirmed was
confirmed (R43). A vote is on the voter's disk before it is sent (G7). `Verdicts` judges when a
master is deposed: not at once for the second closed connection of one process (R6), and a broker
that a controller never saw only after it has led for the time of a first contact (R35).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from batonmq.controller.liveness import events as ev
from batonmq.controller.liveness.core import LivenessCore
from batonmq.controller.raft.log import Commit
from batonmq.controller.rules.commands import ANY_EPOCH, AlterSyncStateSet, ElectMaster
from batonmq.controller.rules.groups import BrokerGroup, living_replicas
from batonmq.controller.switch import is_switch_id
from lab.sim.copies import Copies
from lab.sim.disk import HostDisk
from lab.sim.hosts import GROUP


class NewestCommit(NamedTuple):
    """The newest commit of the controllers, and the group as it is recorded by it."""

    newest: int = 0
    group: BrokerGroup | None = None


class Decisions:
    """`applied` takes each commit of each controller. `copies` knows what brokers hold.
    `violate` ends the run."""

    def __init__(self, copies: Copies, violate: Callable[[str], None]) -> None:
        self._copies = copies
        self._violate = violate
        self._newest_index = 0
        self._group: BrokerGroup | None = None
        self._elected: dict[int, str] = {}  # masterEpoch -> incarnation

    def go_back(self, known: NewestCommit) -> None:
        """Other commits come under the numbers of old ones."""
        self._newest_index, self._group = known

    def applied(self, commit: Commit) -> None:
        """The first time that any controller shows this commit, it is judged."""
        state = commit.state
        if state.applied_index <= self._newest_index:
            return
        # Behind a gap the group before is not known: the commit cannot be judged.
        follows = state.applied_index == self._newest_index + 1
        before, after = self._group, state.group(GROUP)
        self._newest_index, self._group = state.applied_index, after
        if after is not None and after.master_broker_id:
            self._once(after)
        if not follows or before is None or after is None or before is after:
            return
        fault = ""
        if isinstance(commit.command, AlterSyncStateSet):
            fault = _of_alter(before, after, commit.command)
            for broker_id in set(after.sync_state_set) - set(before.sync_state_set):
                fault = fault or self._copies.unfit(
                    broker_id, self._since(after), commit.command.confirm_offset
                )
        elif isinstance(commit.command, ElectMaster):
            fault = _of_election(before, after, commit.command)
            if after.master_epoch > before.master_epoch and is_switch_id(commit.command.request_id):
                fault = fault or self._copies.undrained(
                    after.master_broker_id, after.master_incarnation, commit.command.drained_offset
                )
        fault = fault or self._copies.never_confirmed(after.confirm_floor)
        if fault:
            self._violate(fault)

    def _since(self, group: BrokerGroup) -> range:
        """The epochs in which the master of now was the master without a break: controllers that
        forgot may give it another one."""
        since = group.master_epoch
        for epoch in sorted(self._elected, reverse=True):
            if self._elected[epoch] != group.master_incarnation:
                break
            since = epoch
        return range(since, group.master_epoch + 1)

    def _once(self, group: BrokerGroup) -> None:
        first = self._elected.setdefault(group.master_epoch, group.master_incarnation)
        if first != group.master_incarnation:
            who = f"{first}, and now to {group.master_incarnation}"
            self._violate(f"R47: masterEpoch {group.master_epoch} was given to {who}")


def _of_alter(before: BrokerGroup, after: BrokerGroup, command: AlterSyncStateSet) -> str:
    if after.sync_state_set_epoch == before.sync_state_set_epoch:
        return ""
    named = (
        command.master_broker_id,
        command.master_incarnation,
        command.master_epoch,
        command.sync_state_set_epoch,
    )
    recorded = (
        before.master_broker_id,
        before.master_incarnation,
        before.master_epoch,
        before.sync_state_set_epoch,
    )
    if named != recorded:
        return f"R10: an Alter of {named} was accepted, recorded was {recorded}"
    acked = {member.broker_id: member.incarnation for member in command.new_set}
    for broker_id in set(after.sync_state_set) - set(before.sync_state_set):
        record = before.replica(broker_id)
        if record is None or record.incarnation != acked[broker_id] or record.suspicion:
            return f"R12: broker {broker_id} was added as {acked[broker_id]}, recorded is {record}"
    return ""


def _of_election(before: BrokerGroup, after: BrokerGroup, command: ElectMaster) -> str:
    if not after.master_broker_id or after.master_epoch == before.master_epoch:
        return ""
    if command.expected_master_epoch not in (ANY_EPOCH, before.master_epoch):
        return f"R10: {command.expected_master_epoch} was replaced, recorded was {before}"
    if fault := _of_forgotten(before, after, command):
        return fault
    if before.master_epoch == 0:
        return ""
    if fault := _of_suspects(before, after, command):
        return fault
    if after.unclean_epoch == after.master_epoch:
        return ""
    if after.master_broker_id not in before.sync_state_set:
        return f"R9: broker {after.master_broker_id} was elected, not of {before.sync_state_set}"
    for seen in command.live:
        record = before.replica(seen.broker_id)
        is_member = record is not None and seen.broker_id in before.sync_state_set
        if not is_member or seen.broker_id in after.sync_state_set:
            continue
        if record.incarnation == seen.incarnation and not record.suspect:  # type: ignore[union-attr]
            return f"R9: an election dropped broker {seen.broker_id}, a living member"
    return ""


def _of_forgotten(before: BrokerGroup, after: BrokerGroup, command: ElectMaster) -> str:
    """R19: where replicas know more than is recorded, an operator names the master."""
    if command.designate:
        return ""
    living = living_replicas(before, command.live)
    if (known := before.newer_reported(living)) is not None:
        return (
            f"R19: broker {after.master_broker_id} was elected, broker {known[2]} knew of {known}"
        )
    if before.master_epoch > 0:
        return ""
    full = [r.broker_id for r in before.replicas if living.get(r.broker_id, r).max_offset > 0]
    if len(full) > 1 or (full and after.master_broker_id not in full):
        return f"R19: broker {after.master_broker_id} was elected first, {full} have data"
    return ""


def _of_suspects(before: BrokerGroup, after: BrokerGroup, command: ElectMaster) -> str:
    """R16, R17: a suspect wins only in an epoch that says so, after all members were compared, and
    with all that counts as confirmed. An operator may decide otherwise."""
    winner, living = before.replica(after.master_broker_id), living_replicas(before, command.live)
    is_marked = after.unclean_epoch == after.master_epoch
    if winner is not None and winner.suspect and not is_marked:
        return f"R17: broker {winner.broker_id}, a suspect, was elected as if it were whole"
    if command.unclean or not is_marked:
        return ""
    if away := set(before.sync_state_set) - living.keys():
        return f"R17: a suspect was elected before members {sorted(away)} came"
    ends = living[after.master_broker_id].max_offset
    floor = max(before.confirm_floor, command.confirm_floor)
    if 0 <= ends < floor:
        return f"R16: a suspect was elected with {ends}, what counts as confirmed is {floor}"
    return ""


def fault_of_vote(disk: HostDisk, message: Any, candidate: str) -> str:
    """Why a node must not send that message of Raft yet; "" if it may: it is no vote, or what it
    votes is on its disk."""
    if not isinstance(message, dict) or message.get("type") != "response_vote":
        return ""
    path = next((disk.root / "controller").rglob("meta"))
    text = path.read_bytes().partition(b" ")[2]
    meta = msgspec.json.decode(text)
    voted = (meta["term"], meta["votedFor"])
    if voted != (message["term"], candidate):
        return f"G7: it votes for {candidate} in term {message['term']}, on its disk is {voted}"
    return "" if disk.is_durable(path) else f"G7: {path.name} with the vote {voted} is not synced"


FIRST_CONTACT_MS = 1_500
_WINDOW_MS = 10_000
_DELAY_MS = 200


class Verdicts:
    """Of one controller's process, from its start on. `violate` ends the run."""

    def __init__(self, name: str, core: LivenessCore, violate: Callable[[str], None]) -> None:
        self._name = name
        self._core = core
        self._violate = violate
        self._opened_ms = 0
        self._process: dict[int, str] = {}  # by session
        self._closed_ms: dict[str, list[int]] = {}  # by process, what was no good-bye
        self._handle = core.handle
        core.handle = self.handle  # type: ignore[method-assign]

    def handle(self, event: ev.LivenessEvent, now_ms: int) -> list[ev.LivenessEffect]:
        if isinstance(event, ev.GateOpened):
            self._opened_ms = now_ms
        elif isinstance(event, ev.SessionHello):
            self._process[event.session_id] = event.incarnation
        elif isinstance(event, ev.SessionEnded) and self._says_something(event, now_ms):
            process = self._process.get(event.session_id, "")
            self._closed_ms.setdefault(process, []).append(now_ms)
        effects: list[Any] = self._handle(event, now_ms)
        for effect in effects:
            if isinstance(effect, ev.ProposeElect):
                self._judge(effect, now_ms)
        return effects

    def _says_something(self, event: ev.SessionEnded, now_ms: int) -> bool:
        """Not one that was superseded, that was silent before, that closes as its broker stops, or
        while this process stood still (R8), or of a process that is not registered."""
        sessions, state = self._core._sessions, self._core._state
        if not state.is_registered(event.broker_name, event.broker_id):
            return False
        sessions.notice_time(now_ms)
        session = sessions._open_session(event.broker_name, event.broker_id, event.session_id)
        is_news = session is not None and session.silent_since_ms is None
        return is_news and not event.goodbye and now_ms >= sessions._drained_ms

    def _judge(self, effect: ev.ProposeElect, now_ms: int) -> None:
        led_ms = now_ms - self._opened_ms
        if effect.reason == "never_seen" and led_ms < FIRST_CONTACT_MS:
            self._violate(f"R35: {self._name} calls a master dead, never seen in {led_ms} ms")
        group = self._core._state.group(effect.broker_name)
        if effect.reason != "session_closed" or group is None:
            return
        closed_ms = self._closed_ms.get(group.master_incarnation, [])
        earlier = [at for at in closed_ms if 0 < effect.detected_ms - at < _WINDOW_MS]
        waited_ms = now_ms - effect.detected_ms
        if earlier and waited_ms < _DELAY_MS:
            self._violate(
                f"R6: {self._name} deposes {group.master_incarnation} {waited_ms} ms after its"
                f" {len(earlier) + 1}th closed connection in 10 s"
            )
