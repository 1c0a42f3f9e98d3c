"""The interfaces of the ReplicasManager: to its broker, and to the link with its controllers.

The broker implements `BrokerActions`, its HA service `SyncStateSetActions`. All calls are made on
the broker's event loop, one at a time, in the order of the views; only a planned switch (R33) does
not wait for its turn. A link (`grpc_link` for our controllers, `remoting_link` for RocketMQ's)
makes no decisions: it performs effects of the state machine and reports their outcomes as events.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

from batonmq.protocol.role_view import RoleView
from batonmq.replicas_manager import events as ev
from batonmq.replicas_manager.role import CurrentView
from batonmq.replicas_manager.switch import SwitchProgress, SwitchTask

HAND_OVER_S: Final = 1.0
"""How long to wait for a switch, which takes about 0.05 s and at most 0.9 s (R33)."""


@dataclass(frozen=True, slots=True)
class LogFacts:
    """The present state of a broker's log; sent with heartbeats and at registration."""

    epoch: int
    """The last epoch of the epoch file, -1 if there is none."""
    max_offset: int
    """The end of the written log, exclusive."""
    confirm_offset: int
    min_offset: int
    """From here on it has all bytes of its group; on a master, the start of its log."""
    # Above `max_offset` while the replica does not know the next offsets of its queues (R38):
    # controllers add no member whose log begins later than the master's (R13).
    log_id: str
    """The random id that was created with the empty commit log."""
    suspect: str = ""
    """Why the log may lack acknowledged bytes (R17); empty if it does not. While this is set, no
    SyncStateSet takes this replica (R12); when it is cleared, the broker registers again."""


class BrokerActions(Protocol):
    """Role changes and planned switches, carried out by the broker. During one of the three role
    changes newer views may be taken and stored, and only the newest is carried out next. A role
    change that raises is logged and repeated with the newest view, after a short, growing delay.
    """

    def log_facts(self) -> LogFacts:
        """The log's present state. Called for every heartbeat, so it must be cheap."""

    async def become_master(self, view: RoleView, role_durable: Awaitable[None]) -> None:
        """Become master of `view.master_epoch`, also if it was master before. A proposal in flight
        gets no outcome."""
        # R2: before anything is acknowledged in this epoch, the epoch file must be durable, and
        # `role_durable` awaited. It raises OSError if the write failed. Not awaited before this
        # call: both files are written at the same time, so a failover waits for one sync only.

    async def become_slave(self, view: RoleView) -> None:
        """Follow `view.master_broker_id` at `view.master_ha_address`; also called if only the epoch
        grew. `view.master_epoch` is already durable (R2)."""

    async def stand_down(self, view: RoleView) -> None:
        """There is no master, or it is an earlier incarnation of this broker: refuse writes, close
        HA connections, continue to serve reads up to confirmOffset."""

    def master_moved(self, view: RoleView) -> None:
        """The role and its epoch stay, but the master's address may have changed. Idempotent."""
        # Also called if only the set changed: whoever calls need not compare addresses.

    def lease_changed(self, valid: bool) -> None:
        """The lease of this master was granted or ran out (R36)."""

    def role_will_change(self, view: RoleView, *, master: bool) -> None:
        """`view` was taken and changes the role or its epoch: a future master begins to hold sends,
        a former one answers waiting sends at once."""
        # Called before anything is awaited (R4): those answers must not wait for a disk.

    def hold_sends(self) -> int:
        """Hold new sends and write the accepted ones; returns the end of the log."""
        # R33: from now on that end stands still, so the chosen replica can reach it.

    def release_sends(self) -> None:
        """Handle the held sends, in order."""

    def switch_progress(self, broker_id: int) -> SwitchProgress:
        """The end of the log, and the state of that replica."""


class SyncStateSetActions(Protocol):
    """The HA service's side: recorded sets, and outcomes of its proposals."""

    def adopt_view(self, view: RoleView) -> None:
        """The role stays, but the recorded set, an address or an incarnation changed. Idempotent.
        This ends a proposal in flight: only `view`'s set is required now (R11)."""

    def set_dead(self, broker_ids: frozenset[int]) -> None:
        """The replicas (never this one) that the leading controller declares dead now."""

    def proposal_refused(self, code: int, remark: str) -> None:
        """The proposal was refused for good: only the recorded set is required again."""

    def proposal_unknown(self) -> None:
        """It is unknown whether the proposal was committed; the same request is repeated until it
        is answered. Called at most once per proposal."""
        # R11: both sets stay required, since either may be the one that elections look at.


@dataclass(frozen=True, slots=True)
class LinkEvents:
    """What a link needs: where to report events, and the facts of this broker."""

    step: Callable[[ev.Event], None]
    switch_requested: Callable[[SwitchTask], None]
    leader: Callable[[], str | None]
    """The leading controller; None while none is known."""
    log_facts: Callable[[], LogFacts]


@dataclass(frozen=True, slots=True)
class DurableFacts:
    """The identity of this broker from its data folder, and the current view."""

    check_code: str
    """Empty once an id is assigned."""
    earlier_incarnations: tuple[str, ...]
    current: CurrentView
    # Not in the repr: it may be part of a log line or of an error's text.
    secret: str = field(default="", repr=False)
    """Proves the incarnation to our controllers (R59)."""
    folder_secret: str = field(default="", repr=False)
    """Proves that the id belongs to this data folder."""


@dataclass(frozen=True, slots=True)
class ElectAnswer:
    """The controllers' answer to the election that ends a planned switch."""

    code: int
    remark: str


class ControllerLink(Protocol):
    """A link to the controllers. `controller` is an address from the configuration."""

    def begin(self, facts: DurableFacts) -> None:
        """The data folder was read. Called first."""
        # Not in the constructor: a start may wait for disk space before it can read the folder.

    def send(self, call: ev.Call) -> None:
        """Sends one request, which ends in exactly one event, `Replied` or `Unanswered`."""

    def open_sessions(self, broker_id: int) -> None:
        """The process is registered: keep a session with every controller from now on."""

    def heartbeat(self, effect: ev.SendHeartbeat, facts: LogFacts) -> None:
        """Sends a heartbeat on the session with that controller, if there is one."""

    def drop(self, controller: str, reason: str) -> None:
        """Ends that session and begins another over a new connection."""

    def drop_all(self, reason: str) -> None:
        """Closes all sessions for a moment, so that the controllers elect again (R11, R45)."""
        # An election makes a new epoch, and in that every request of the old one is refused.

    def report(
        self, kind: str, broker_id: int, master_epoch: int, fields: Mapping[str, object]
    ) -> None:
        """Adds an event to the history, if the controllers keep one."""

    async def elect(self, task: SwitchTask, drained_offset: int) -> ElectAnswer | None:
        """Requests the election that ends a planned switch; None: no answer. A view in the answer
        is taken before this returns."""

    def switch_failed(self, task: SwitchTask, reason: str) -> None:
        """Reports the failure to the controller that requested the switch."""

    async def hand_over(self, leader: str, broker_id: int, master_epoch: int, reason: str) -> bool:
        """Begins a planned switch to that replica, and waits at most a second for the outcome.
        Returns whether it was carried out."""

    async def goodbye(self, reason: str) -> None:
        """A planned stop: ends all sessions."""
        # Called after replication ended: until then controllers must count this replica as alive.

    async def close(self) -> None:
        """Cancels all requests and reports; no event follows."""
