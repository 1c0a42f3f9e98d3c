"""Which registrations the leader proposes: legal names, short texts, a limited number. Pure.

Any host that reaches a controller can register groups, and each one costs every controller memory,
a place in every snapshot and time in every tick (R58). So the leader refuses a *new* group or
replica above the limits, or with a bad name (R46). Groups and replicas that are registered already
are never refused for these reasons.

An id belongs to the data folder that registered it first (R59, `claimed`). A process with another
folder gets the id only if the replica has been away for long and is no member, and loses it when
the owner returns.

The replicated state does not check this: nodes with other settings or versions would come to
different states from the same entry of the log.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from msgspec.structs import replace

from batonmq.controller.config import ControllerConfig
from batonmq.controller.rules.commands import ApplyBrokerId, RegisterBroker
from batonmq.controller.rules.groups import BrokerGroup
from batonmq.controller.rules.state import ControllerState
from batonmq.protocol.topic_name import first_problem

RegisterCommand = RegisterBroker | ApplyBrokerId

RANDOM_ID_SIZE_MAX: Final = 64
"""Characters of an incarnation or a log id; this project's brokers use 32 at most."""
LIVES_MAX: Final = 256
UNHEARD_MS: Final = 5_000
"""How long a replica must be away, and this node must lead, before another data folder may take the
id of the replica."""


class Admission:
    """The limits. They count what the state has and the registrations that are under way."""

    def __init__(self) -> None:
        self._under_way: Counter[str] = Counter()

    def problem(
        self, state: ControllerState, command: RegisterCommand, config: ControllerConfig
    ) -> str:
        """Why the leader does not propose `command`; empty if it does."""
        group = state.group(command.broker_name)
        # Also of a known replica: these texts are in logs and answers of every node.
        if problem := _text_problem(command):
            return problem
        if group is not None and _is_known(group, command):
            return ""
        if group is None and (problem := _name_problem(command)):
            return problem
        return self._number_problem(state, group, command, config)

    @contextmanager
    def under_way(self, command: RegisterCommand) -> Iterator[None]:
        """Counts `command` against the limits until it is in the state, or refused."""
        name = command.broker_name
        self._under_way[name] += 1
        try:
            yield
        finally:
            self._under_way[name] -= 1
            if not self._under_way[name]:
                del self._under_way[name]

    def _number_problem(
        self,
        state: ControllerState,
        group: BrokerGroup | None,
        command: RegisterCommand,
        config: ControllerConfig,
    ) -> str:
        name, coming = command.broker_name, self._under_way
        new_groups = sum(each not in state.groups for each in coming)
        is_new = group is None and name not in coming
        if is_new and len(state.groups) + new_groups >= config.broker_groups_max:
            return _above(f"{len(state.groups)} broker groups", "brokerGroupsMax", "group")
        replicas = len(group.replicas) if group is not None else 0
        if replicas + coming[name] >= config.group_replicas_max:
            return _above(f"{replicas} replicas of {name!r}", "groupReplicasMax", "replica")
        total = sum(len(each.replicas) for each in state.groups.values())
        if total + coming.total() >= config.broker_replicas_max:
            return _above(f"{total} replicas of all groups", "brokerReplicasMax", "replica")
        return ""


def claimed(
    group: BrokerGroup | None, command: RegisterBroker, unheard_ms: int
) -> RegisterBroker | str:
    """The command as the leader proposes it, or why it does not.

    `unheard_ms`: how long the registered process has been silent (`LivenessCore.unheard_ms`).
    """
    record = group.replica(command.broker_id) if group is not None else None
    # Without an owner it was registered by Java, or by an earlier version: nothing to compare.
    if group is None or record is None or not record.owner:
        return command
    if command.owner == record.owner:
        # The owner is back and takes its id from a stranger, also while that one is alive: R18
        # would refuse a second living process.
        if record.is_stranger:
            living = tuple(x for x in command.live if x.broker_id != record.broker_id)
            return replace(command, live=living)
        return command
    if command.incarnation != record.incarnation:
        why = ""
        # A member's acks count: a process without its log must not take its name.
        if record.broker_id in group.sync_state_set:
            why = "is in the SyncStateSet"
        elif unheard_ms < UNHEARD_MS:
            why = f"was heard {unheard_ms} ms ago, {UNHEARD_MS} are needed"
        elif (epoch := max(command.epoch, command.accepted_epoch)) > group.master_epoch:
            # R19: the epochs of a volume of another cluster, for example, would stop all elections.
            why = (
                f"never knew masterEpoch {epoch}, as this one does ({group.master_epoch} is newest)"
            )
        if why:
            return (
                f"id {record.broker_id} of {group.broker_name} belongs to another data folder, and"
                f" its replica {why}: start that one with its whole folder (brokerIdentity-secret"
                f" proves it), or forget it (mqctl cleanBrokerMetadata)"
            )
        return replace(command, owner=record.owner, is_stranger=True)
    return replace(command, owner=record.owner, is_stranger=record.is_stranger)


def _above(registered: str, key: str, what: str) -> str:
    return (
        f"{registered} are registered, no new {what} is accepted above {key}: raise it, or forget"
        " those that are gone (mqctl cleanBrokerMetadata)"
    )


def _is_known(group: BrokerGroup, command: RegisterCommand) -> bool:
    if group.replica(command.broker_id) is not None:
        return True
    code = command.register_check_code
    return bool(code) and any(code == each.register_check_code for each in group.replicas)


def _name_problem(command: RegisterCommand) -> str:
    names = {"broker name": command.broker_name}
    if command.cluster_name:
        names["cluster name"] = command.cluster_name
    return first_problem(names, {})


def _text_problem(command: RegisterCommand) -> str:
    """What is wrong with a text that logs and answers show: it could forge a log line, or it is too
    long."""
    texts = {"registerCheckCode": command.register_check_code}
    if isinstance(command, RegisterBroker):
        texts |= {"address": command.address, "haAddress": command.ha_address}
        if len(command.earlier_lives) > LIVES_MAX:
            return f"{len(command.earlier_lives)} earlier lives are named, {LIVES_MAX} are allowed"
        ids = (command.incarnation, command.log_id, command.owner, *command.earlier_lives)
        if (longest := max(map(len, ids))) > RANDOM_ID_SIZE_MAX:
            return (
                f"an incarnation, log id or owner has {longest} characters,"
                f" {RANDOM_ID_SIZE_MAX} are allowed"
            )
        texts["incarnation, log id or owner"] = next((x for x in ids if not x.isprintable()), "")
    return first_problem({}, {what: text for what, text in texts.items() if text})
