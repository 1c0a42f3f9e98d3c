"""Which role views a broker takes, which role they give it, and asking for those that did not come.

Pure. Invariants: a view is taken only if its (masterEpoch, setEpoch) grows (R20) and its epoch is
not below the highest accepted, which never falls (R2); this process is master only where a view
names its id *and* incarnation, in an epoch above all that an earlier life accepted (R3).
"""

from __future__ import annotations

import enum

from protocol.role_view import RoleView
from replicas_manager.events import FetchView

FETCH_AFTER_MS = 100
"""An answer tells of a newer view: its push may be this much behind."""

Key = tuple[int, int]
"""(masterEpoch, setEpoch)."""


class Role(enum.Enum):
    MASTER = "master"
    SLAVE = "slave"
    NONE = "none"


class Worth(enum.Enum):
    """What a view that came is worth to this broker."""

    NEWER = "newer"
    REGISTERED_ANEW = "registered anew"
    """The same epochs, but an address or an incarnation (R12) changed."""
    KNOWN = "known"
    STALE = "stale"
    """Of a masterEpoch below the highest accepted."""


class ViewInForce:
    """The newest view taken, and what this process is in it. `broker_id` 0: not assigned yet."""

    def __init__(self, broker_id: int, incarnation: str, highest_master_epoch: int) -> None:
        self.broker_id = broker_id
        self.incarnation = incarnation
        self.highest_master_epoch = highest_master_epoch
        self.view: RoleView | None = None
        self._earlier_epoch = highest_master_epoch
        """Highest epoch that an earlier life of this broker accepted (R3)."""

    @property
    def role(self) -> Role:
        return Role.NONE if self.view is None else self.role_in(self.view)

    @property
    def key(self) -> Key:
        """Of the view in force, (0, 0) before the first."""
        return (0, 0) if self.view is None else self.view.key

    @property
    def told_key(self) -> Key:
        """What heartbeats tell: the highest epoch accepted, and the set's epoch."""
        return (self.highest_master_epoch, self.key[1])

    def worth(self, view: RoleView) -> Worth:
        if view.master_epoch < self.highest_master_epoch:
            return Worth.STALE
        known = self.view
        if known is None or view.key > known.key:
            return Worth.NEWER
        if (
            view.key == known.key
            and view.raft_index > known.raft_index
            and _registrations(view) != _registrations(known)
        ):
            return Worth.REGISTERED_ANEW
        return Worth.KNOWN

    def take(self, view: RoleView) -> bool:
        """True if its masterEpoch is higher than any before and has to be made durable."""
        self.view = view
        if view.master_epoch <= self.highest_master_epoch:
            return False
        self.highest_master_epoch = view.master_epoch
        return True

    def role_in(self, view: RoleView) -> Role:
        """R3: master only under this incarnation, in an epoch that no earlier life accepted."""
        if not view.master_broker_id:
            return Role.NONE
        if view.master_broker_id != self.broker_id:
            return Role.SLAVE
        own_life = view.master_incarnation == self.incarnation
        return Role.MASTER if own_life and view.master_epoch > self._earlier_epoch else Role.NONE

    def check_invariants(self) -> None:
        if self.view is not None:
            assert self.view.master_epoch <= self.highest_master_epoch
            if self.role is Role.MASTER:
                assert self.view.master_epoch > self._earlier_epoch


class MissedViews:
    """Fetches a newer view that is known to exist and whose push did not come."""

    def __init__(self) -> None:
        self._flying = False
        self._due_ms = 0
        self._wanted: Key = (0, 0)

    def want(self, key: Key, now_ms: int) -> None:
        """A view of `key` exists."""
        self._wanted = max(self._wanted, key)
        self._due_ms = now_ms

    def ended(self) -> None:
        """The fetch under way was answered, or not."""
        self._flying = False

    def due(
        self,
        now_ms: int,
        deadlines: list[int],
        known: Key,
        ahead: tuple[str, int] | None,
        target: str,
        leader: str | None,
    ) -> list[FetchView]:
        """`ahead`: a controller that knows more than `known`, and since when."""
        if self._flying:
            return []
        due_ms = self._due_ms
        if self._wanted <= known:
            if ahead is None:
                return []
            controller, since_ms = ahead
            target = leader or controller
            due_ms = max(due_ms, since_ms + FETCH_AFTER_MS)
        if now_ms < due_ms:
            deadlines.append(due_ms)
            return []
        self._flying = True
        self._due_ms = now_ms + 2 * FETCH_AFTER_MS
        return [FetchView(target)]


def _registrations(view: RoleView) -> tuple[object, ...]:
    return tuple(
        (r.broker_id, r.address, r.ha_address, r.learner, r.incarnation, r.log_id)
        for r in view.replicas
    )
