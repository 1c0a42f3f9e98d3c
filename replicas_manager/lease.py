"""The lease of a master; pure.

Invariant (R5): it counts from the send time of a heartbeat that the leader answered for the epoch
and the incarnation that this process is master in, and is gone with the role.
"""

from __future__ import annotations

from replicas_manager.events import AnswerReceived, Effect, LeaseChanged, Notice, ReportEvent


class Lease:
    """`lease_ms` is masterLeaseMs."""

    def __init__(self, lease_ms: int) -> None:
        self._lease_ms = lease_ms
        self._until_ms = 0
        self._said = False

    def valid(self, now_ms: int) -> bool:
        """The leader answered less than a lease ago; True only while this process is master."""
        return now_ms < self._until_ms

    def drop(self) -> None:
        """The role changes: no lease passes from one epoch to the next."""
        self._until_ms = 0

    def extend(self, answer: AnswerReceived, master_epoch: int) -> None:
        """The leader answered the master of `master_epoch`."""
        if answer.master_epoch == master_epoch:
            self._until_ms = max(self._until_ms, answer.sent_ms + self._lease_ms)

    def due(
        self, now_ms: int, deadlines: list[int], *, master: bool, master_epoch: int, broker_id: int
    ) -> list[Effect]:
        valid = master and self.valid(now_ms)
        if valid:
            deadlines.append(self._until_ms)
        if valid == self._said:
            return []
        self._said = valid
        effects: list[Effect] = [LeaseChanged(valid, master_epoch)]
        if not valid and master and self._until_ms:
            effects.append(ReportEvent("lease_lost", (("broker_id", broker_id),)))
            effects.append(Notice("lease_lost", (("master_epoch", master_epoch),), warning=True))
        return effects
