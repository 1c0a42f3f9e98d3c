"""The controllers' replicated state: `apply` takes one command after the other. Pure.

`ControllerState` is a value: `apply` returns the next one, so an error midway loses nothing.
`apply` is total (every readable command has an answer) and deterministic (no clock, no random, no
order of sets). The rules for one group are in `group_rules`. This module has what all commands
share: the state's clock, the fence of deposed controllers, the table of answered requests (R11),
the history, and the effects.

Origin: RocketMQ's ReplicasInfoManager and its events (RIP-44).
"""

import hashlib
import zlib
from collections.abc import Collection, Mapping
from typing import Any, Final, Self

import msgspec

from batonmq.controller.rules.commands import (
    RULES_VERSION,
    AlterSyncStateSet,
    AnyCommand,
    BecomeController,
    CleanBrokerData,
    CommandResult,
    Effect,
    ElectMaster,
    HistoryAppended,
    LiveBroker,
    RegisterBroker,
    ReplicasChanged,
    RoleChanged,
    SetChanged,
)
from batonmq.controller.rules.group_rules import GroupCommand, change_group
from batonmq.controller.rules.groups import (
    BrokerGroup,
    GroupChange,
    Refused,
    ReplicaRecord,
    fill_alive,
    living_replicas,
)
from batonmq.history.event import HISTORY_EVENTS_MAX, EventKind, HistoryEvent
from batonmq.protocol.codes import ResponseCode
from batonmq.protocol.role_view import RoleView

ANSWERS_MAX: Final = 256
"""Requests whose answers are kept; far more than can be in flight."""
SNAPSHOT_VERSION: Final = 1


class SnapshotError(ValueError):
    """A snapshot that this version cannot read."""


class Answered(msgspec.Struct, frozen=True):
    """The answer that a request id got."""

    request_id: str
    result: CommandResult


class Transition(msgspec.Struct, frozen=True):
    """The outcome of one command: the next state, the answer and the effects."""

    state: "ControllerState"
    result: CommandResult
    effects: tuple[Effect, ...] = ()


class ControllerState(msgspec.Struct, frozen=True):
    """What the controllers agree on.

    `clock_ms` is the highest wall clock of any proposer. `log_name` is the random name that the
    first leader gave this replicated log. `rules` is the version of the rules by which the newest
    command was applied. `answered` and `history` have the newest last.
    """

    clock_ms: int = 0
    applied_index: int = 0
    controller_epoch: int = 0
    controller_node: str = ""
    controller_nonce: str = ""
    log_name: str = ""
    rules: int = 0
    groups: dict[str, BrokerGroup] = {}
    answered: tuple[Answered, ...] = ()
    history: tuple[HistoryEvent, ...] = ()

    def apply(self, command: AnyCommand, index: int, rules: int = 0) -> Transition:
        """Applies entry `index` of the log by `rules`; BecomeController by the rules in force.
        Never raises for a command that decodes."""
        state = msgspec.structs.replace(
            self,
            applied_index=max(self.applied_index, index),
            # Never back: the wall clock of a new leader may be behind that of the last one.
            clock_ms=max(self.clock_ms, command.now_ms),
        )
        request_id = command.request_id
        # A repeated BecomeController must not raise the controller epoch a second time.
        if isinstance(command, BecomeController):
            request_id = request_id or command.nonce
        # R11: before the fence, since the next leader may propose a command of the last one again.
        # It must get the answer of the first time, whatever changed since.
        if (known := self.answer_to(request_id)) is not None:
            return Transition(state, known)
        if isinstance(command, BecomeController):
            return state._become_controller(command, request_id)
        # Before the rules: a deposed leader does not know which ones all members know by now.
        if command.controller_epoch < self.controller_epoch:
            return Transition(state, self._deposed(command.controller_epoch))
        return state._under(rules)._change_group(command)

    def answer_to(self, request_id: str) -> CommandResult | None:
        """The answer that this request got, None if it is not kept (any more)."""
        if request_id:
            for answered in reversed(self.answered):
                if answered.request_id == request_id:
                    return answered.result
        return None

    def group(self, broker_name: str) -> BrokerGroup | None:
        return self.groups.get(broker_name)

    def is_registered(self, broker_name: str, broker_id: int) -> bool:
        group = self.group(broker_name)
        return group is not None and group.replica(broker_id) is not None

    def broker_names(self) -> tuple[str, ...]:
        """The known groups, in order of name."""
        return tuple(sorted(self.groups))

    def role_view(self, broker_name: str, living: Collection[int] = ()) -> RoleView | None:
        """The group as others see it, `living` shown as alive; None for an unknown group."""
        group = self.groups.get(broker_name)
        return None if group is None else group.role_view(living, self.applied_index)

    def next_broker_id(self, broker_name: str) -> int:
        """The id that CONTROLLER_GET_NEXT_BROKER_ID (1012) offers. Another broker may take it."""
        group = self.groups.get(broker_name)
        return 1 if group is None else group.next_broker_id

    def check_invariants(self) -> None:
        """Asserts what must hold between any two commands."""
        for broker_name, group in self.groups.items():
            assert broker_name == group.broker_name
            group.check()
        assert len(self.answered) <= ANSWERS_MAX
        assert len(self.history) <= HISTORY_EVENTS_MAX
        keys = [event.key for event in self.history]
        assert len(set(keys)) == len(keys)

    def to_snapshot(self) -> dict[str, Any]:
        """The state as a JSON value, the same on every node that applied the same log."""
        # JSON in a string: turning the thousand objects of a full history into dicts would block
        # the loop for longer than a heartbeat.
        return {"v": SNAPSHOT_VERSION, "state": self._canonical().decode()}

    @classmethod
    def from_snapshot(cls, snapshot: Mapping[str, Any]) -> Self:
        """The state of that snapshot. Raises SnapshotError if it cannot be read."""
        if snapshot.get("v") != SNAPSHOT_VERSION:
            raise SnapshotError(f"a snapshot of version {snapshot.get('v')!r}")
        try:
            return msgspec.json.decode(snapshot.get("state", ""), type=cls)
        except (msgspec.MsgspecError, TypeError) as error:
            raise SnapshotError(str(error)) from error

    def digest(self) -> str:
        """RULES, a colon and a hash of the whole state. If nodes with the same RULES differ at one
        index, one of them is wrong."""
        return f"{RULES}:{hashlib.sha256(self._canonical()).hexdigest()}"

    def _canonical(self) -> bytes:
        """JSON of the state with ordered sets and maps."""
        return msgspec.json.encode(self, order="deterministic")

    # Applying.

    def _under(self, rules: int) -> Self:
        """The state with `rules` in force. If they are lower than before, fields that only the
        higher ones record must get their defaults here: an earlier version does not have them."""
        return self if rules == self.rules else msgspec.structs.replace(self, rules=rules)

    def _deposed(self, controller_epoch: int) -> CommandResult:
        return CommandResult(
            ResponseCode.CONTROLLER_NOT_LEADER,
            f"proposed in controller epoch {controller_epoch}, by now it is "
            f"{self.controller_epoch}",
            controller_epoch=self.controller_epoch,
        )

    def _become_controller(self, command: BecomeController, request_id: str) -> Transition:
        epoch = self.controller_epoch + 1
        state = msgspec.structs.replace(
            self,
            controller_epoch=epoch,
            controller_node=command.node,
            controller_nonce=command.nonce,
            log_name=self.log_name or command.nonce,
        )
        event = HistoryEvent(
            log="",
            raft_index=0,
            time_ms=0,
            kind=EventKind.CONTROLLER_LEADER_CHANGED,
            node=command.node,
            node_before=self.controller_node,
            proposed_ms=command.now_ms,
            started_ms=command.started_ms,
            leader_seen_ms=command.leader_seen_ms,
        )
        state, effects = state._with_events((event,))
        result = CommandResult(ResponseCode.SUCCESS, controller_epoch=epoch)
        return Transition(state._remembering(request_id, result), result, effects)

    def _change_group(self, command: GroupCommand) -> Transition:
        before = self.groups.get(command.broker_name)
        try:
            change = change_group(before, command, self.clock_ms, self.rules)
        except Refused as refusal:
            change = GroupChange(before, refusal.code, str(refusal))
        live = _live_of(command)
        state = self._with_group(command.broker_name, change.group)
        state, appended = state._with_events(change.events)
        result = _result(change, live, state.applied_index)
        announced = _effects_of(before, change.group, live, state.applied_index)
        return Transition(
            state._remembering(command.request_id, result), result, (*announced, *appended)
        )

    def _with_group(self, broker_name: str, group: BrokerGroup | None) -> "ControllerState":
        # A new dict: states that were handed out never change.
        groups = {name: each for name, each in self.groups.items() if name != broker_name}
        if group is not None:
            groups[broker_name] = group
        return msgspec.structs.replace(self, groups=groups)

    def _with_events(
        self, drafts: tuple[HistoryEvent, ...]
    ) -> "tuple[ControllerState, tuple[Effect, ...]]":
        if not drafts:
            return self, ()
        events = tuple(
            msgspec.structs.replace(
                draft,
                log=self.log_name,
                raft_index=self.applied_index,
                part=part,
                time_ms=draft.time_ms or self.clock_ms,
                controller_epoch=self.controller_epoch,
            )
            for part, draft in enumerate(drafts)
        )
        # Bounded: it is in every snapshot. Older events are in the files of the nodes.
        history = (*self.history, *events)[-HISTORY_EVENTS_MAX:]
        state = msgspec.structs.replace(self, history=history)
        return state, tuple(HistoryAppended(event) for event in events)

    def _remembering(self, request_id: str, result: CommandResult) -> "ControllerState":
        # Java's requests have no id; a repeated one is judged by the state again.
        if not request_id:
            return self
        answered = (*self.answered, Answered(request_id, result))[-ANSWERS_MAX:]
        return msgspec.structs.replace(self, answered=answered)


def _rules() -> str:
    structs = (ControllerState, BrokerGroup, ReplicaRecord, HistoryEvent, CommandResult)
    fields = " ".join(field for struct in structs for field in struct.__struct_fields__)
    return f"{RULES_VERSION}-{zlib.crc32(fields.encode()):08x}"


RULES: Final = _rules()
"""The version of the rules, and a checksum of the fields of a state. Neighbouring versions may make
different states of one log, so only digests with the same RULES are compared."""


def _live_of(command: GroupCommand) -> tuple[LiveBroker, ...]:
    if isinstance(command, RegisterBroker | AlterSyncStateSet | ElectMaster | CleanBrokerData):
        return command.live
    return ()


def _result(change: GroupChange, live: tuple[LiveBroker, ...], index: int) -> CommandResult:
    group = change.group
    if group is None:
        return CommandResult(change.code, change.remark)
    living = living_replicas(group, live)
    master = living.get(group.master_broker_id)
    return CommandResult(
        code=change.code,
        remark=change.remark,
        view=group.role_view(living, index),
        broker_id=change.broker_id,
        master_alive=master is not None and master.incarnation == group.master_incarnation,
    )


def _effects_of(
    before: BrokerGroup | None, after: BrokerGroup | None, live: tuple[LiveBroker, ...], index: int
) -> tuple[Effect, ...]:
    """At most one effect: its view has all that changed. None of a group that was removed."""
    # By comparison, not by command: no rule can forget to announce what it changed.
    if after is None or after is before:
        return ()
    view = after.role_view(living_replicas(after, live), index)
    if before is None:
        return (ReplicasChanged(view),)
    if before.master_epoch != after.master_epoch:
        return (RoleChanged(view),)
    if before.sync_state_set_epoch != after.sync_state_set_epoch:
        return (SetChanged(view),)
    # With all shown as alive: liveness pushes changes of `alive` itself (AliveChanged).
    everyone = [record.broker_id for record in after.replicas]
    if fill_alive(before.role_view((), index), everyone) != fill_alive(view, everyone):
        return (ReplicasChanged(view),)
    return ()
