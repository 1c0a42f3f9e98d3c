"""The role change that the view in force asks of the broker, and trying it again; pure.

Invariant: the broker is told of a role once per (masterEpoch, role, master), until it took it.
"""

from __future__ import annotations

from protocol.role_view import RoleView
from replicas_manager.events import (
    BecomeMaster,
    BecomeSlave,
    Effect,
    ReportEvent,
    SetDead,
    StandDown,
)
from replicas_manager.views import Role

RETRY_FIRST_MS = 50
RETRY_MOST_MS = 1000


class RoleChanges:
    def __init__(self) -> None:
        self._acted: tuple[int, Role, int] | None = None
        self._dead_said: frozenset[int] = frozenset()
        self._failures = 0
        self._retry_ms: int | None = None

    def asked_by(self, view: RoleView, role: Role) -> bool:
        """Whether `view`, in which this process is `role`, changes anything; noted if it does."""
        acted = (view.master_epoch, role, view.master_broker_id or 0)
        if acted == self._acted:
            return False
        self._acted = acted
        self._failures = 0
        return True

    def act(self, view: RoleView, role: Role, broker_id: int) -> list[Effect]:
        """The effects of changing to `role`."""
        self._retry_ms = None
        change: Effect
        if role is Role.MASTER:
            change = BecomeMaster(view)
        elif role is Role.SLAVE:
            change = BecomeSlave(view)
        else:
            change = StandDown(view)
        fields = (("role", role.value), ("broker_id", broker_id))
        return [change, SetDead(self._dead_said), ReportEvent("role_changed", fields)]

    def failed(self, now_ms: int) -> None:
        """The broker raised: try again, later and later."""
        self._retry_ms = now_ms + min(RETRY_FIRST_MS << min(self._failures, 8), RETRY_MOST_MS)
        self._failures += 1

    def due(self, now_ms: int, deadlines: list[int]) -> bool:
        """Whether a failed change is to be tried again now."""
        if self._retry_ms is None:
            return False
        if now_ms >= self._retry_ms:
            return True
        deadlines.append(self._retry_ms)
        return False

    def judge_dead(self, dead: frozenset[int] | None) -> list[Effect]:
        """`dead`: by the leader's word (R5), None if there is no word."""
        if dead is None or dead == self._dead_said or self._acted is None:
            return []
        self._dead_said = dead
        return [SetDead(dead)]
