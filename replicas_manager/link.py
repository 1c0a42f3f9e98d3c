"""The seams of the ReplicasManager: the broker that it steers, and the link with its controllers.

The broker implements `BrokerActions`, its HA service `SyncStateSetActions`. All calls are made on
the broker's event loop, one at a time, in the order in which the views were taken; only the planned
switch (R33) does not wait for its turn. A link (`grpc_link` for our controllers, `remoting_link`
for RocketMQ's) holds no policy: it performs the effects of the state machine and emits what came of
them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

from batonmq.protocol.role_view import RoleView
from batonmq.replicas_manager import events as ev
from batonmq.replicas_manager.role import CurrentView
from batonmq.replicas_manager.switch import SwitchProgress, SwitchTask

HAND_OVER_S: Final = 1.0
"""A switch lasts some 0.05 s, and 0.9 s at most (R33)."""


@dataclass(frozen=True, slots=True)
class LogFacts:
    """A broker's log at this moment; sent with heartbeats and at registration."""

    epoch: int
    """Epoch of the last entry of the epoch file, -1 if there is none."""
    max_offset: int
    """End of the written log in bytes, exclusive."""
    confirm_offset: int
    min_offset: int
    """From where on it has what its group has: of a master, where its log begins. Above
    `max_offset` while the replica does not know the next offsets of its queues (R38): the
    controllers add it to no set then."""
    log_id: str
    """Random id made with the empty commit log and kept in its folder."""
    suspect: str = ""
    """Why the log may miss what it acknowledged (R17), empty if it does not. While set no
    SyncStateSet takes this replica in (R12); when it is cleared the broker registers again."""


class Proposal(Protocol):
    """A SyncStateSet that the HA service of a master proposes (`ha` has the concrete class)."""

    @property
    def new_set(self) -> frozenset[int]:
        """Broker ids of the whole new set, the master included."""

    @property
    def reason(self) -> str:
        """For the history: "expand", "shrink: ack 600 ms old", ..."""

    @property
    def confirm_offset(self) -> int:
        """confirmOffset when the proposal was made."""


class BrokerActions(Protocol):
    """Role changes and planned switches, as the broker carries them out.

    The three role changes are awaited; newer views are taken and stored meanwhile, and only the
    newest is acted on afterwards. One that raises is logged and tried again, after a short, growing
    delay, with the newest view.
    """

    def log_facts(self) -> LogFacts:
        """The log as it is at this moment. Called for every heartbeat: must be cheap."""

    async def become_master(self, view: RoleView, role_durable: Awaitable[None]) -> None:
        """Become, or stay, master of `view.master_epoch`; also after an election of the same
        master.

        Before anything is acknowledged in this epoch the epoch file must be durable and
        `role_durable` awaited (R2), which raises OSError if the write failed. A proposal in flight
        gets no outcome any more.
        """

    async def become_slave(self, view: RoleView) -> None:
        """Follow `view.master_broker_id` at `view.master_ha_address`; also called if only the epoch
        grew. `view.master_epoch` is durable already (R2)."""

    async def stand_down(self, view: RoleView) -> None:
        """No master is known, or it is an earlier incarnation of this process: refuse writes, close
        HA connections, keep serving reads up to confirmOffset."""

    def master_moved(self, view: RoleView) -> None:
        """The role and its epoch stay, and the master's address may be another one. Idempotent."""

    def lease_changed(self, valid: bool) -> None:
        """The lease of this master was granted or ran out (R36)."""

    def role_will_change(self, view: RoleView, *, master: bool) -> None:
        """`view` was taken and changes the role or its epoch. Called before anything is awaited: a
        future master holds sends from now on, a former one answers at once what waits."""

    def hold_sends(self) -> int:
        """Queue new sends, write what was taken; returns the end of the log."""

    def release_sends(self) -> None:
        """Handle what was queued, in its order."""

    def switch_progress(self, broker_id: int) -> SwitchProgress:
        """The end of the log, and how far that replica is."""


class SyncStateSetActions(Protocol):
    """What the HA service does with the recorded set and with the outcome of its proposals."""

    def adopt_view(self, view: RoleView) -> None:
        """The role stays; the recorded set, an address or an incarnation changed. Idempotent.
        A proposal in flight is over: `view`'s set replaces the union (R11)."""

    def set_dead(self, broker_ids: frozenset[int]) -> None:
        """The replicas (never this one) that the leading controller judges dead right now."""

    def proposal_refused(self, code: int, remark: str) -> None:
        """The proposal in flight was refused for good: the union goes back to the recorded set."""

    def proposal_unknown(self) -> None:
        """Whether the proposal was committed is open. The union stays (R11), and the same request
        is repeated until it is answered. Called at most once per proposal."""


@dataclass(frozen=True, slots=True)
class LinkEvents:
    """What a link reports events to, and where it reads this broker's facts."""

    step: Callable[[ev.Event], None]
    switch_requested: Callable[[SwitchTask], None]
    leader: Callable[[], str | None]
    """The leading controller, None while none is known."""
    log_facts: Callable[[], LogFacts]


@dataclass(frozen=True, slots=True)
class DurableFacts:
    """Who this broker is: what its data folder says at the start, and the view in force."""

    check_code: str
    """Empty where an id was assigned."""
    earlier_incarnations: tuple[str, ...]
    current: CurrentView
    secret: str = field(default="", repr=False)
    """Proves the incarnation to controllers of ours (R59)."""
    folder_secret: str = field(default="", repr=False)
    """Proves that the id belongs to this data folder."""


@dataclass(frozen=True, slots=True)
class ElectAnswer:
    """The controllers' answer to the election that ends a planned switch."""

    code: int
    remark: str


class ControllerLink(Protocol):
    """All methods are called on the broker's loop. `controller` is an address of the
    configuration."""

    def begin(self, facts: DurableFacts) -> None:
        """The data folder was read. Comes before everything else."""

    def send(self, call: ev.Call) -> None:
        """Sends one request. It ends in exactly one event, `Replied` or `Unanswered`."""

    def open_sessions(self, broker_id: int) -> None:
        """Registered: keep a session with every controller from now on, if there is none."""

    def heartbeat(self, effect: ev.SendHeartbeat, facts: LogFacts) -> None:
        """On the session with that controller, if there is one."""

    def drop(self, controller: str, reason: str) -> None:
        """End that session, and begin another over a new connection."""

    def drop_all(self, reason: str) -> None:
        """Close all sessions, and come back in a moment: the controllers elect again (R11, R45)."""

    def report(
        self, kind: str, broker_id: int, master_epoch: int, fields: Mapping[str, object]
    ) -> None:
        """Add an event of this broker to the history, if the controllers keep one."""

    async def elect(self, task: SwitchTask, drained_offset: int) -> ElectAnswer | None:
        """Ask for the election that ends a planned switch; None: no answer. A view in the answer is
        taken before this returns."""

    def switch_failed(self, task: SwitchTask, reason: str) -> None:
        """To whoever requested that switch."""

    async def hand_over(self, leader: str, broker_id: int, master_epoch: int, reason: str) -> bool:
        """Begin a planned switch of this mastership to that replica. Returns when its outcome is
        known, or a second later: whether it was carried out."""

    async def goodbye(self, reason: str) -> None:
        """A planned stop: no session is left."""

    async def close(self) -> None:
        """Cancel what is in flight, reports included; nothing more is emitted."""
