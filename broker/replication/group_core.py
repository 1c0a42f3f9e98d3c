"""What a broker outside controller mode makes of the others of its group. Pure.

STARTING: it looks at the group, as name servers know it, before it takes its role. While another
broker that lives has its id, it stays so: two masters of one id would write two histories, two
slaves of one id hide each other. With `enableSlaveActingMaster` a master meets each other member
before it registers (pre-online): it tells its HA address, and takes back the offsets of groups that
were committed there. ONLINE: it has its role. A slave acts for the master while no lower id is in
the group. Of two that began at the same time, and met later, the one that started later stands
back, for the life of its process: what it wrote is in no other log.
Origin: BrokerPreOnlineService, BrokerController.syncBrokerMemberGroup and updateMinBroker in Java,
where nothing detects a second broker of one id.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from batonmq.protocol.codes import MASTER_ID
from batonmq.runtime.recent_events import RecentEvents, records_event

Members = Mapping[int, Collection[str]]
"""Broker id -> its addresses: name servers may differ."""
HANDING_BACK_MS: Final = 15_000
"""How long a slave takes no offsets for a master that has announced itself and does not come."""


@dataclass(frozen=True, slots=True)
class GroupPolicy:
    """`started_ms` is wall clock, as the brokers tell each other when they started."""

    broker_id: int
    address: str
    started_ms: int
    acting: bool = False
    """enableSlaveActingMaster."""
    pre_online: bool = False
    """With it: not skipPreOnline."""
    look_ms: int = 5_000
    """Between two looks at the group."""


class GroupStage(enum.Enum):
    STARTING = "starting"
    ONLINE = "online"
    BARRED = "barred"


class Rival(enum.Enum):
    """What became of a question to the other broker with this id."""

    GONE = "gone"
    """Nothing listens there."""
    SILENT = "silent"
    LIVES = "lives"


@dataclass(frozen=True, slots=True)
class AskMembers:
    """Ask all name servers for the group; then feed `members_known`."""


@dataclass(frozen=True, slots=True)
class AskRival:
    """Ask the broker at `address` whether it lives; then feed `rival_known`."""

    address: str


@dataclass(frozen=True, slots=True)
class Meet:
    """Pre-online with one member; then feed `met`."""

    address: str


@dataclass(frozen=True, slots=True)
class TakeRole:
    """That of the configuration."""


@dataclass(frozen=True, slots=True)
class Act:
    """Serve groups in place of the master from now on, or not any more."""

    on: bool


@dataclass(frozen=True, slots=True)
class Register:
    """At the name servers, which tell a slave where its master is."""


@dataclass(frozen=True, slots=True)
class StandBack:
    """Take no write any more."""

    reason: str


GroupEffect = AskMembers | AskRival | Meet | TakeRole | Act | Register | StandBack


class ClassicGroupCore:
    """Feed it events; perform the effects in order. Times are ms; one question at a time."""

    def __init__(self, policy: GroupPolicy, now_ms: int) -> None:
        self.policy = policy
        self.stage = GroupStage.STARTING
        self.problem = ""
        """What is wrong with the group, or keeps this broker from its role; empty if nothing."""
        self.acts = False
        self.recent_events = RecentEvents()
        self._due_ms = now_ms
        self._members: Members = {}
        self._met: set[str] = set()
        self._rival = ""
        self._rival_is_gone = True
        self._handing_back_until_ms = 0

    @property
    def wakeup_ms(self) -> int:
        """When `tick` is due."""
        return self._due_ms

    def takes_offsets(self, now_ms: int) -> bool:
        """As acting master: not while the master that comes back may have fetched them already."""
        return self.acts and now_ms >= self._handing_back_until_ms

    # -- events

    def tick(self, now_ms: int) -> list[GroupEffect]:
        if now_ms < self._due_ms:
            return []
        self._due_ms = now_ms + self.policy.look_ms
        return [AskMembers()]

    @records_event
    def hinted(self, now_ms: int) -> None:
        """Something changed in the group (905, or the connection to the master ended)."""
        self._due_ms = now_ms

    @records_event
    def master_announced(self, now_ms: int) -> None:
        """The master is about to come back, and takes over what was committed here (906)."""
        self._handing_back_until_ms = now_ms + HANDING_BACK_MS

    @records_event
    def claimed(self, address: str, now_ms: int) -> None:
        """The broker at `address` asked whether this one lives, since it has the same id."""
        if address != self.policy.address:
            self._rival, self._rival_is_gone = address, False
            self.hinted(now_ms)

    @records_event
    def members_known(self, members: Members | None, now_ms: int) -> list[GroupEffect]:
        """The group as the name servers that answered have it; None: none of them did."""
        policy = self.policy
        if members is None:
            if self.stage is GroupStage.STARTING and not policy.pre_online:
                return self._take_role()
            if self.stage is GroupStage.STARTING:
                self.problem = "no name server has said who is in its group (pre-online)"
            return []
        self._members = members
        rivals = sorted(a for a in members.get(policy.broker_id, ()) if a != policy.address)
        if rivals:
            self._rival, self._rival_is_gone = rivals[0], False
        if not self._rival_is_gone:
            return [AskRival(self._rival)]
        return self._go_on(now_ms)

    @records_event
    def rival_known(
        self, address: str, rival: Rival, started_ms: int, now_ms: int
    ) -> list[GroupEffect]:
        """What became of `AskRival`; `started_ms` counts for one that lives."""
        if self.stage is GroupStage.BARRED:
            return []
        policy = self.policy
        who = f"the broker at {address} has the same name and brokerId, {policy.broker_id}"
        is_listed = address in self._members.get(policy.broker_id, ())
        if rival is Rival.GONE:
            self._rival_is_gone = True
            again = [Register()] if self.stage is GroupStage.ONLINE and is_listed else []
            return [*self._go_on(now_ms), *again]
        if self.stage is GroupStage.STARTING:
            self.problem = f"{who}" + ("" if rival is Rival.LIVES else ", and does not answer")
            return []
        if rival is Rival.SILENT:
            self.problem = f"{who}, and does not answer"
            self._rival_is_gone = not is_listed
        elif (started_ms, address) < (policy.started_ms, policy.address):
            self.problem = f"{who}, and started earlier"
            if policy.broker_id == MASTER_ID:
                self.stage = GroupStage.BARRED
                return [StandBack(self.problem)]
        else:
            self.problem = f"{who}, and started later"
        effects = self._judge()
        return [*effects, Register()] if is_listed else effects

    @records_event
    def met(self, address: str, problem: str, now_ms: int) -> list[GroupEffect]:
        """What became of `Meet`; `problem` is empty if all is as it should be."""
        if problem:
            self.problem = f"pre-online with {address}: {problem}"
            return []
        self._met.add(address)
        return self._go_on(now_ms)

    # -- inside

    def _go_on(self, now_ms: int) -> list[GroupEffect]:
        if self.stage is GroupStage.BARRED:
            return []
        self.problem = ""
        if self.stage is GroupStage.ONLINE:
            return self._judge()
        if self.policy.pre_online and self.policy.broker_id == MASTER_ID:
            for broker_id in sorted(self._members):
                for address in sorted(self._members[broker_id]):
                    is_other = broker_id != MASTER_ID and address != self.policy.address
                    if is_other and address not in self._met:
                        return [Meet(address)]
        return self._take_role()

    def _take_role(self) -> list[GroupEffect]:
        self.stage, self.problem = GroupStage.ONLINE, ""
        return [TakeRole(), *self._judge()]

    def _judge(self) -> list[GroupEffect]:
        """Whether this slave acts for the master now."""
        policy = self.policy
        if not policy.acting or policy.broker_id == MASTER_ID:
            return []
        others = (
            broker_id
            for broker_id, addresses in self._members.items()
            if set(addresses) - {policy.address}
        )
        acts = min(others, default=policy.broker_id) >= policy.broker_id
        if acts == self.acts:
            return []
        self.acts = acts
        self._handing_back_until_ms = 0  # the master that announced itself has come
        return [Act(acts), Register()]
