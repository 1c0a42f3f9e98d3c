"""The controllers' side of a planned switch (R33). Pure.

An operator names a replica to be master while the old master is alive. `plan` decides whether that
becomes a switch, which the old master carries out, or an ordinary election. Each switch ends once:
with the group's next masterEpoch, with the old master's refusal, or with a time-out. The old master
requests the election, with the id of the switch as request id (`is_switch_id`).
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

import msgspec

from batonmq.controller.rules.commands import ANY_EPOCH, NO_BROKER, ElectMaster, LiveBroker
from batonmq.controller.rules.elect_policy import why_stale
from batonmq.controller.rules.groups import BrokerGroup, living_replicas
from batonmq.protocol.codes import ResponseCode

HOLD_MS: Final = 500
"""How long the old master may hold its sends."""
OUTCOME_MS: Final = 1_500
"""How long the leader waits for the outcome: the replica catches up, the master holds its sends, a
master is elected; with some margin."""
_PREFIX: Final = "switch:"


@dataclass(frozen=True, slots=True)
class OrdinaryElection:
    """No switch: the command is proposed as an ordinary election, which may refuse it."""


@dataclass(frozen=True, slots=True)
class AskMaster:
    """The living master of `master_epoch` is to hand over to `broker_id`."""

    master_id: int
    incarnation: str
    master_epoch: int
    broker_id: int


Plan = OrdinaryElection | AskMaster


@dataclass(frozen=True, slots=True)
class SwitchOutcome:
    """The end of a switch; `reason` explains every `code` but SUCCESS."""

    switch_id: str
    code: ResponseCode
    reason: str = ""


@dataclass(frozen=True, slots=True)
class _Open:
    switch_id: str
    asked: AskMaster
    until_ms: int


def is_switch_id(request_id: str) -> bool:
    return request_id.startswith(_PREFIX)


def plan(
    group: BrokerGroup | None,
    command: ElectMaster,
    live: Collection[LiveBroker],
    native: Collection[tuple[int, str]],
) -> Plan:
    """What to do with an operator's election. `native`: (id, incarnation) of open sessions here."""
    # Whatever cannot be a switch is left to the rules of elections. They refuse it with a reason,
    # or elect uncleanly if that was requested. Only a named replica and a clean election can wait
    # for the old master's last byte.
    if group is None or not command.designate or command.unclean:
        return OrdinaryElection()
    # No master has confirmed anything yet: there is nothing to drain.
    if group.master_epoch == 0:
        return OrdinaryElection()
    if command.expected_master_epoch not in (ANY_EPOCH, group.master_epoch):
        return OrdinaryElection()
    if command.cluster_name not in ("", group.cluster_name):
        return OrdinaryElection()
    master_id, target = group.master_broker_id, command.broker_id
    process = (master_id, group.master_incarnation)
    living = living_replicas(group, live)
    # R19: the master's own request would be refused; that of an operator is not.
    if why_stale(group, living):
        return OrdinaryElection()
    # A Java master has no session through which it could be asked.
    if master_id == NO_BROKER or target in (NO_BROKER, master_id) or process not in native:
        return OrdinaryElection()
    # R3: a restarted master takes no writes before it is elected: nothing is to be drained.
    if master_id not in living or living[master_id].incarnation != group.master_incarnation:
        return OrdinaryElection()
    record = group.replica(target)
    if record is None or record.learner or record.suspect:
        return OrdinaryElection()
    if target not in living or target not in group.sync_state_set:
        return OrdinaryElection()
    return AskMaster(master_id, group.master_incarnation, group.master_epoch, target)


def with_drained(
    live: Collection[LiveBroker], broker_id: int, drained_offset: int
) -> tuple[LiveBroker, ...]:
    """`live`, in which the log of `broker_id` ends at `drained_offset` at least."""
    # Its last heartbeat is older than its last ack. By that heartbeat alone R16 would refuse the
    # one replica that has every byte; the old master has seen the ack.
    return tuple(
        msgspec.structs.replace(seen, max_offset=max(seen.max_offset, drained_offset))
        if seen.broker_id == broker_id
        else seen
        for seen in live
    )


class PendingSwitches:
    """The switches under way, at most one a group. Times are ms of one clock."""

    def __init__(self) -> None:
        self._open: dict[str, _Open] = {}

    def names(self) -> list[str]:
        """The groups that have one."""
        return list(self._open)

    def begin(
        self, broker_name: str, asked: AskMaster, nonce: str, now_ms: int
    ) -> str | SwitchOutcome:
        """The id of the new switch, or the reason why there is none. `nonce` is random and used
        once: who knows the id is the master that was asked (R59)."""
        before = self._open.get(broker_name)
        # Two at once would hold the sends of one master for two successors.
        if before is not None:
            return SwitchOutcome(
                before.switch_id,
                ResponseCode.CONTROLLER_ELECT_MASTER_FAILED,
                f"a switch of {broker_name} to broker {before.asked.broker_id} is under way",
            )
        switch_id = f"{_PREFIX}{nonce}"
        self._open[broker_name] = _Open(switch_id, asked, now_ms + OUTCOME_MS)
        return switch_id

    def is_open(self, command: ElectMaster) -> bool:
        """Whether `command` is the election of the switch under way. Only the old master was sent
        its id (R59)."""
        at = self._open.get(command.broker_name)
        if at is None or at.switch_id != command.request_id:
            return False
        asked = at.asked.broker_id, at.asked.master_epoch
        return asked == (command.broker_id, command.expected_master_epoch)

    def failed(self, broker_name: str, switch_id: str, reason: str) -> list[SwitchOutcome]:
        """The master reported that it cannot switch."""
        at = self._open.get(broker_name)
        # A late refusal of an earlier switch must not end this one.
        if at is None or at.switch_id != switch_id:
            return []
        del self._open[broker_name]
        return [SwitchOutcome(switch_id, ResponseCode.CONTROLLER_ELECT_MASTER_FAILED, reason)]

    def applied(self, group: BrokerGroup) -> list[SwitchOutcome]:
        """`group` is its newest state."""
        at = self._open.get(group.broker_name)
        # Any higher epoch ends the switch, whoever won: the old master holds nothing any more.
        if at is None or group.master_epoch <= at.asked.master_epoch:
            return []
        del self._open[group.broker_name]
        if group.master_broker_id == at.asked.broker_id:
            return [SwitchOutcome(at.switch_id, ResponseCode.SUCCESS)]
        who = f"broker {group.master_broker_id}" if group.master_broker_id else "no replica"
        return [
            SwitchOutcome(
                at.switch_id,
                ResponseCode.CONTROLLER_ELECT_MASTER_FAILED,
                f"{who} was elected meanwhile, in masterEpoch {group.master_epoch}",
            )
        ]

    def expired(self, broker_name: str, now_ms: int) -> list[SwitchOutcome]:
        """The time-out of the group's switch, if it is over."""
        at = self._open.get(broker_name)
        if at is None or now_ms < at.until_ms:
            return []
        del self._open[broker_name]
        return [
            SwitchOutcome(
                at.switch_id,
                ResponseCode.CONTROLLER_ELECT_MASTER_FAILED,
                f"broker {at.asked.master_id}, the master, did not hand over to broker "
                f"{at.asked.broker_id} in {OUTCOME_MS} ms; it stays master",
            )
        ]

    def gate_closed(self) -> list[SwitchOutcome]:
        """This node does not lead any more, so it cannot know how they end."""
        ended = [
            SwitchOutcome(at.switch_id, ResponseCode.CONTROLLER_NOT_LEADER, "no longer the leader")
            for at in self._open.values()
        ]
        self._open.clear()
        return ended
