"""What the ReplicasManager needs of a connection with its controllers, whatever they speak.

Controllers of ours speak gRPC (`grpc_link`), RocketMQ's speak remoting (`remoting_link`). A link
holds no policy: it performs the effects of the state machine, and tells it what came of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from batonmq.replicas_manager.actions import LogFacts
from batonmq.replicas_manager.events import Call, Event, SendHeartbeat
from batonmq.replicas_manager.role import ViewInForce
from batonmq.replicas_manager.switch import SwitchTask

HAND_OVER_S: Final = 1.0
"""A switch lasts some 0.05 s, and 0.9 s at most (R33)."""


@dataclass(frozen=True, slots=True)
class LinkEvents:
    """Where a link tells what happens, and whom it asks."""

    step: Callable[[Event], None]
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
    current: ViewInForce


@dataclass(frozen=True, slots=True)
class ElectAnswer:
    """Of the controllers, to the election that ends a planned switch."""

    code: int
    remark: str


class ControllerLink(Protocol):
    """All methods are called on the broker's loop. `controller` is an address of the
    configuration."""

    def begin(self, facts: DurableFacts) -> None:
        """The data folder was read. Comes before everything else."""

    def send(self, call: Call) -> None:
        """One request. It ends in exactly one event, `Replied` or `Unanswered`."""

    def open_sessions(self, broker_id: int) -> None:
        """Registered: keep a session with every controller from now on, if there is none."""

    def heartbeat(self, effect: SendHeartbeat, facts: LogFacts) -> None:
        """On the session with that controller, if there is one."""

    def drop(self, controller: str, reason: str) -> None:
        """End that session, and begin another over a new connection."""

    def drop_all(self, reason: str) -> None:
        """To the controllers this broker broke down; it comes back in a moment (R11, R45)."""

    def report(
        self, kind: str, broker_id: int, master_epoch: int, fields: Mapping[str, object]
    ) -> None:
        """Add an event of this broker to the history, if the controllers keep one."""

    async def elect(self, task: SwitchTask, drained_offset: int) -> ElectAnswer | None:
        """Ask for the election that ends a planned switch; None: no answer. A view that comes with
        the answer is taken before this returns."""

    def switch_failed(self, task: SwitchTask, reason: str) -> None:
        """To whoever requested that switch."""

    async def hand_over(self, leader: str, broker_id: int, master_epoch: int, reason: str) -> bool:
        """Begin a planned switch of this mastership to that replica. Returns when its outcome is
        known, or a second later: whether it was carried out."""

    async def goodbye(self, reason: str) -> None:
        """A planned stop: no session is left."""

    async def close(self) -> None:
        """Cancel what is in flight, reports included; nothing more is emitted."""
