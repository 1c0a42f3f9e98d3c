"""The role that the controllers gave this process: current view, lease, role changes. Pure.

Invariants:
- A view is taken only if its (masterEpoch, setEpoch) grows (R20) and its epoch is not below the
  highest accepted, which never falls (R2).
- This process is master only if a view names its id *and* incarnation, in an epoch above all that
  earlier incarnations accepted (R3) and that it did not refuse (R17).
- The lease counts from the send time of a heartbeat that the leader answered for this mastership,
  and ends with the role (R5).
- The broker gets each role change (masterEpoch, role, master) once; again only if it failed, or to
  fetch damaged bytes of a slave again (R24).
"""

import enum

from batonmq.protocol.role_view import Role, RoleView
from batonmq.replicas_manager import events as ev
from batonmq.runtime.backoff import Backoff

RETRY_FIRST_MS = 50
RETRY_MOST_MS = 1000

Key = tuple[int, int]
"""(masterEpoch, setEpoch)."""


class ViewFreshness(enum.Enum):
    """How a received view relates to the current one."""

    NEWER = "newer"
    REGISTERED_AGAIN = "registered again"
    """The same epochs, but an address or incarnation changed (R12)."""
    KNOWN = "known"
    STALE = "stale"
    """Its masterEpoch is below the highest accepted."""


class CurrentView:
    """The newest view taken, and the role of this process in it. `broker_id` 0: not assigned
    yet."""

    def __init__(self, broker_id: int, incarnation: str, highest_master_epoch: int) -> None:
        self.broker_id = broker_id
        self.incarnation = incarnation
        self.highest_master_epoch = highest_master_epoch
        self.stored_master_epoch = highest_master_epoch
        """The highest durable one, which a restart remembers: only this is reported to
        controllers."""
        self.view: RoleView | None = None
        # Highest epoch that an earlier incarnation accepted (R3) or this one refused (R17).
        self._earlier_epoch = highest_master_epoch

    @property
    def role(self) -> Role:
        return Role.FENCED if self.view is None else self.role_in(self.view)

    @property
    def key(self) -> Key:
        """The key of the current view; (0, 0) before the first."""
        return (0, 0) if self.view is None else self.view.key

    @property
    def heartbeat_key(self) -> Key:
        """The key in heartbeats: the highest stored epoch, and the current set's epoch if it
        belongs to that."""
        stored = self.stored_master_epoch
        return (stored, self.key[1] if stored == self.highest_master_epoch else 0)

    def freshness_of(self, view: RoleView) -> ViewFreshness:
        if view.master_epoch < self.highest_master_epoch:
            return ViewFreshness.STALE
        known = self.view
        if known is None or view.key > known.key:
            return ViewFreshness.NEWER
        if (
            # Compare Raft indices: a lagging controller would bring back the address of an ended
            # process.
            view.key == known.key
            and view.raft_index > known.raft_index
            and _registrations(view) != _registrations(known)
        ):
            return ViewFreshness.REGISTERED_AGAIN
        return ViewFreshness.KNOWN

    def take(self, view: RoleView) -> None:
        self.view = view
        self.highest_master_epoch = max(self.highest_master_epoch, view.master_epoch)

    def refuse(self, view: RoleView) -> bool:
        """R17: refuses to be master in `view`'s epoch. Returns whether that ends a mastership; an
        epoch in which it already is master is not refused."""
        if view.master_broker_id != self.broker_id or view.master_epoch <= self._earlier_epoch:
            return False
        # It may have acknowledged writes in that epoch: only a newer one ends it.
        if self.role is Role.MASTER and view.master_epoch == self.key[0]:
            return False
        self._earlier_epoch = view.master_epoch
        return True

    def role_in(self, view: RoleView) -> Role:
        """R3: master only with this incarnation, in an epoch that no earlier one accepted."""
        if not view.master_broker_id:
            return Role.FENCED
        if view.master_broker_id != self.broker_id:
            return Role.SLAVE
        # R3: an epoch of an earlier process of this broker.
        is_new_epoch = view.master_epoch > self._earlier_epoch
        is_own = view.master_incarnation == self.incarnation and is_new_epoch
        return Role.MASTER if is_own else Role.FENCED

    def check_invariants(self) -> None:
        assert self.stored_master_epoch <= self.highest_master_epoch
        if self.view is not None:
            assert self.view.master_epoch <= self.highest_master_epoch
            if self.role is Role.MASTER:
                assert self.view.master_epoch > self._earlier_epoch


def _registrations(view: RoleView) -> tuple[object, ...]:
    return tuple(
        (r.broker_id, r.address, r.ha_address, r.learner, r.incarnation, r.log_id)
        for r in view.replicas
    )


class Lease:
    """The lease of a mastership. `lease_ms` is masterLeaseMs."""

    def __init__(self, lease_ms: int) -> None:
        self._lease_ms = lease_ms
        self._until_ms = 0
        self._reported = False

    def valid(self, now_ms: int) -> bool:
        """Whether the last answered heartbeat was sent less than a lease ago."""
        return now_ms < self._until_ms

    def drop(self) -> None:
        """The role changes: a lease does not pass on to the next epoch."""
        self._until_ms = 0

    def extend(self, answer: ev.AnswerReceived, master_epoch: int) -> None:
        """The leader answered the master of `master_epoch`."""
        if answer.master_epoch == master_epoch and not answer.no_lease:
            # R5: from the send time, so that a late answer grants no extra time.
            self._until_ms = max(self._until_ms, answer.sent_ms + self._lease_ms)

    def due(
        self, now_ms: int, deadlines: list[int], *, master: bool, master_epoch: int, broker_id: int
    ) -> list[ev.Effect]:
        # Reported at each change only: the broker opens or closes its gate by it (R36).
        valid = master and self.valid(now_ms)
        if valid:
            deadlines.append(self._until_ms)
        if valid == self._reported:
            return []
        self._reported = valid
        effects: list[ev.Effect] = [ev.LeaseChanged(valid)]
        # 0: this mastership never had a lease to lose.
        if not valid and master and self._until_ms:
            effects.append(ev.HistoryReport("lease_lost", (("broker_id", broker_id),)))
            effects.append(ev.Notice("lease_lost", (("master_epoch", master_epoch),), warning=True))
        return effects


class RoleChanges:
    """The role change that the broker must carry out, and its repetition after a failure."""

    def __init__(self) -> None:
        self._acted: tuple[int, Role, int] | None = None
        self._dead_reported: frozenset[int] = frozenset()
        self._backoff = Backoff(RETRY_FIRST_MS, RETRY_MOST_MS)
        self._retry_ms: int | None = None
        self._suspect = self._refetched = ""

    def is_new(self, view: RoleView, role: Role) -> bool:
        """Notes the role in `view`; returns whether it changes the role."""
        # Not by the set: a new set in the same epoch changes no role.
        acted = (view.master_epoch, role, view.master_broker_id or 0)
        if acted == self._acted:
            return False
        self._acted = acted
        self._backoff.reset()
        return True

    def act(self, view: RoleView, role: Role, broker_id: int) -> list[ev.Effect]:
        """The effects of changing to `role`."""
        self._retry_ms = None
        change: ev.Effect
        if role is Role.MASTER:
            change = ev.BecomeMaster(view)
        elif role is Role.SLAVE:
            change = ev.BecomeSlave(view)
            if broker_id not in view.sync_state_set:
                # This role change also cuts and fetches the damaged part (R24).
                self._refetched = self._suspect
        else:
            change = ev.StandDown(view)
        name = "none" if role is Role.FENCED else role.value.lower()
        fields = (("role", name), ("broker_id", broker_id))
        return [change, ev.SetDead(self._dead_reported), ev.HistoryReport("role_changed", fields)]

    def suspicion(self, suspect: str) -> None:
        self._suspect, self._refetched = suspect, ""

    def refetch(self, current: CurrentView, suspect: str) -> list[ev.Effect]:
        """R24: a slave with a damaged log repeats its role change, which cuts the log there and
        fetches the rest again. Only once the controllers know that it is `suspect`, so that they do
        not elect it."""
        view = current.view
        if view is None or current.role is not Role.SLAVE or suspect in ("", self._refetched):
            return []
        # Its bytes may be needed while it is a member: it must leave the set first.
        if current.broker_id in view.sync_state_set:
            return []
        self._refetched = suspect
        return [ev.BecomeSlave(view)]

    def failed(self, now_ms: int) -> None:
        """The role change failed: it is repeated, each time later."""
        self._retry_ms = now_ms + self._backoff.next_ms()

    def due(self, now_ms: int, deadlines: list[int]) -> bool:
        """Whether to repeat a failed change now."""
        if self._retry_ms is None:
            return False
        if now_ms >= self._retry_ms:
            return True
        deadlines.append(self._retry_ms)
        return False

    def dead_changed(self, dead: frozenset[int] | None) -> list[ev.Effect]:
        """`dead`: by the leading controller (R5); None without one."""
        if dead is None or dead == self._dead_reported or self._acted is None:
            return []
        self._dead_reported = dead
        return [ev.SetDead(dead)]
