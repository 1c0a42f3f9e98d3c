"""The group in classic mode: may this broker take its role, and does it act for its master? Pure.

STARTING: the broker asks name servers for its group before it takes its role. It stays STARTING
while another living broker has its id: two masters of one id would write two histories, two slaves
of one id hide each other. With `enableSlaveActingMaster` a master meets each slave before it
registers (pre-online). ONLINE: it has its role; a slave acts for the master while no lower id is in
the group. BARRED: two masters of one id were started at the same time; the one that started later
gives up its role for good, because no other log has what it wrote.
Origin: BrokerPreOnlineService, BrokerController.syncBrokerMemberGroup and updateMinBroker in Java,
where nothing detects a second broker of one id.
"""

import enum
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from batonmq.protocol.codes import MASTER_ID
from batonmq.runtime.recent_events import RecentEvents, records_event

Members = Mapping[int, Collection[str]]
"""Broker id -> its addresses: name servers may differ."""
HANDING_BACK_MS: Final = 15_000
"""How long a slave takes no offsets after a master has announced itself, if it does not come."""


@dataclass(frozen=True, slots=True)
class GroupPolicy:
    """`started_ms` is wall clock, because brokers compare their start times."""

    broker_id: int
    address: str
    started_ms: int
    acting: bool = False
    """enableSlaveActingMaster."""
    pre_online: bool = False
    """With it: not skipPreOnline."""
    check_ms: int = 5_000
    """Time between two checks of the group."""


class GroupStage(enum.Enum):
    STARTING = "starting"
    ONLINE = "online"
    BARRED = "barred"


class Rival(enum.Enum):
    """The result of asking the other broker with this id."""

    GONE = "gone"
    """Nothing listens at its address."""
    SILENT = "silent"
    LIVES = "lives"


@dataclass(frozen=True, slots=True)
class AskMembers:
    """Ask all name servers for the group, then feed `members_known`."""


@dataclass(frozen=True, slots=True)
class AskRival:
    """Ask the broker at `address` whether it lives, then feed `rival_known`."""

    address: str


@dataclass(frozen=True, slots=True)
class Meet:
    """Pre-online with one slave, then feed `met`."""

    address: str


@dataclass(frozen=True, slots=True)
class TakeRole:
    """Take the role of the configuration."""


@dataclass(frozen=True, slots=True)
class Act:
    """Serve groups in place of the master from now on, or no longer."""

    on: bool


@dataclass(frozen=True, slots=True)
class Register:
    """Register at the name servers, whose replies name the master to a slave."""


@dataclass(frozen=True, slots=True)
class StandBack:
    """Take no more writes."""

    reason: str


GroupEffect = AskMembers | AskRival | Meet | TakeRole | Act | Register | StandBack


class ClassicGroupCore:
    """Feed it events; perform the effects in order. Times are ms; one request at a time."""

    def __init__(self, policy: GroupPolicy, now_ms: int) -> None:
        self.policy = policy
        self.stage = GroupStage.STARTING
        self.problem = ""
        """What is wrong with the group, or why this broker takes no role; empty if nothing."""
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
        """As acting master: not while a returning master may have fetched the offsets already."""
        return self.acts and now_ms >= self._handing_back_until_ms

    # -- events

    def tick(self, now_ms: int) -> list[GroupEffect]:
        if now_ms < self._due_ms:
            return []
        self._due_ms = now_ms + self.policy.check_ms
        return [AskMembers()]

    @records_event
    def hinted(self, now_ms: int) -> None:
        """Something changed in the group: NOTIFY_MIN_BROKER_ID_CHANGE (905) came, or the connection
        to the master ended."""
        self._due_ms = now_ms

    @records_event
    def master_announced(self, now_ms: int) -> None:
        """The master is about to return, and fetches the offsets of groups
        (EXCHANGE_BROKER_HA_INFO, 906)."""
        self._handing_back_until_ms = now_ms + HANDING_BACK_MS

    @records_event
    def claimed(self, address: str, now_ms: int) -> None:
        """The broker at `address`, which has the same id, asked whether this one lives."""
        if address != self.policy.address:
            self._rival, self._rival_is_gone = address, False
            self.hinted(now_ms)

    @records_event
    def members_known(self, members: Members | None, now_ms: int) -> list[GroupEffect]:
        """The group according to the name servers that answered; None: none answered."""
        policy = self.policy
        if members is None:
            # If no name server answers, the configuration alone decides, as in Java.
            if self.stage is GroupStage.STARTING and not policy.pre_online:
                return self._take_role()
            if self.stage is GroupStage.STARTING:
                self.problem = "no name server answers who is in its group (pre-online)"
            return []
        self._members = members
        rivals = sorted(a for a in members.get(policy.broker_id, ()) if a != policy.address)
        if rivals:
            self._rival, self._rival_is_gone = rivals[0], False
        if not self._rival_is_gone:
            return [AskRival(self._rival)]
        return self._continue(now_ms)

    @records_event
    def rival_known(
        self, address: str, rival: Rival, started_ms: int, now_ms: int
    ) -> list[GroupEffect]:
        """The result of `AskRival`; `started_ms` counts if it lives."""
        if self.stage is GroupStage.BARRED:
            return []
        policy = self.policy
        who = f"the broker at {address} has the same name and brokerId, {policy.broker_id}"
        is_listed = address in self._members.get(policy.broker_id, ())
        if rival is Rival.GONE:
            self._rival_is_gone = True  # a refused connection proves that it ended
            again = [Register()] if self.stage is GroupStage.ONLINE and is_listed else []
            return [*self._continue(now_ms), *again]
        if self.stage is GroupStage.STARTING:
            self.problem = f"{who}" + ("" if rival is Rival.LIVES else ", and does not answer")
            return []
        # An online broker keeps its role: a partition must not stop both of them.
        if rival is Rival.SILENT:
            self.problem = f"{who}, and does not answer"
            # While name servers list it, the next check asks it again. If they do not, nothing but
            # its address is left of it.
            self._rival_is_gone = not is_listed
        # The same comparison on both sides, so exactly one of them gives up its role.
        elif (started_ms, address) < (policy.started_ms, policy.address):
            self.problem = f"{who}, and started earlier"
            # Two slaves of one id only hide each other; two masters write two histories.
            if policy.broker_id == MASTER_ID:
                self.stage = GroupStage.BARRED
                return [StandBack(self.problem)]
        else:
            self.problem = f"{who}, and started later"
        effects = self._judge()
        # Name servers have one address for an id, and it is the rival's now: this puts ours back.
        return [*effects, Register()] if is_listed else effects

    @records_event
    def met(self, address: str, problem: str, now_ms: int) -> list[GroupEffect]:
        """The result of `Meet`; `problem` is empty if it succeeded."""
        if problem:
            self.problem = f"pre-online with {address}: {problem}"
            return []
        self._met.add(address)
        return self._continue(now_ms)

    # -- inside

    def _continue(self, now_ms: int) -> list[GroupEffect]:
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
        """Whether this slave acts for the master."""
        policy = self.policy
        if not policy.acting or policy.broker_id == MASTER_ID:
            return []
        others = (
            broker_id
            for broker_id, addresses in self._members.items()
            if set(addresses) - {policy.address}
        )
        # The slave with the lowest id acts, as in Java.
        acts = min(others, default=policy.broker_id) >= policy.broker_id
        if acts == self.acts:
            return []
        self.acts = acts
        self._handing_back_until_ms = 0  # the announced master is back
        return [Act(acts), Register()]
