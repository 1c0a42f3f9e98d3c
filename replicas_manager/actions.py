"""The seam between the ReplicasManager and the broker that it steers.

The ReplicasManager calls `BrokerActions`; the broker implements it over its store and HA service.
All calls are made on the broker's event loop, one at a time and in the order in which the role
views were taken: no call begins while an earlier one is awaited.
"""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Protocol

from protocol.role_view import RoleView


@dataclass(frozen=True, slots=True)
class LogFacts:
    """What a broker's log looks like right now; sent with heartbeats and at registration."""

    epoch: int
    """Epoch of the last entry of the epoch file, -1 if there is none."""
    max_offset: int
    """End of the written log in bytes, exclusive."""
    confirm_offset: int
    min_offset: int
    log_id: str
    """Random id made with the empty commit log and kept in its folder."""
    suspect: str = ""
    """Why the log may miss what it acknowledged (R17), empty if it does not. While it says so no
    SyncStateSet takes this replica in (R12); that it ended is told to the controllers at once."""


class Proposal(Protocol):
    """A SyncStateSet that the HA service of a master asks for (`ha` has the concrete class)."""

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
    """What the ReplicasManager has done by the broker.

    The three role changes are awaited; while one runs, newer views are taken and persisted but
    acted on afterwards, and only the newest of them. If one raises, the error is logged and the
    action is tried again with the then newest view after a short, growing delay.
    """

    def log_facts(self) -> LogFacts:
        """The log as it is at this moment. Called for every heartbeat: must be cheap."""

    async def become_master(self, view: RoleView, role_durable: Awaitable[None]) -> None:
        """Become, or go on as, master of `view.master_epoch`.

        Also called when a master is elected again with a higher epoch. The role file is being
        written meanwhile: before anything is acknowledged in this epoch, the epoch file has to be
        durable and `role_durable` awaited (R2). It raises OSError if the disk refuses. A proposal
        in flight is over: neither `proposal_applied` nor `proposal_refused` will be called for it.
        """

    async def become_slave(self, view: RoleView) -> None:
        """Follow `view.master_broker_id` at `view.master_ha_address` in `view.master_epoch`.

        Also called when only the epoch grew and the master stayed. `view.master_epoch` is durable
        already (R2).
        """

    async def stand_down(self, view: RoleView) -> None:
        """Nobody is known to be master, or the master named is an earlier life of this process:
        refuse writes, close HA connections, go on serving reads up to confirmOffset."""

    def adopt_view(self, view: RoleView) -> None:
        """The role stays; the recorded set, an address or an incarnation changed. Idempotent."""

    def set_dead(self, broker_ids: frozenset[int]) -> None:
        """The replicas (never this one) that the leading controller calls dead right now."""

    def proposal_applied(self, view: RoleView) -> None:
        """The proposal in flight is over: `view` is what is recorded now, by it or by a committed
        bump of the set's epoch that overtook it (R11). Replaces the union by `view`'s set."""

    def proposal_refused(self, code: int, remark: str) -> None:
        """The proposal in flight was refused for good: the union goes back to the recorded set."""

    def proposal_unknown(self) -> None:
        """Nobody knows yet whether the proposal was committed. The union stays (R11); the same
        request is asked again until it is answered. Called at most once per proposal."""

    def lease_changed(self, valid: bool) -> None:
        """The lease of this master was granted or ran out (R36)."""
