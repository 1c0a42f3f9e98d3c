"""The one AlterSyncStateSet that a master may have open (R11). Pure.

Invariant: once its outcome is unknown it ends only by an answer to the same request id that proves
what became of it, or by a view whose epochs passed it. "Same set" proves nothing while the first
attempt may still be queued, and a fence may have been raised by that attempt itself.

RocketMQ's controllers know no request ids. They refuse by the leader's memory, and apply an earlier
copy in their log later without a look at its epochs. So no refusal of theirs ends an alter whose
outcome is unknown. If they keep refusing, the master drops its sessions: what is elected then has a
newer epoch, and every copy comes before it or is refused.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable

from batonmq.protocol.codes import ResponseCode
from batonmq.protocol.role_view import RoleView
from batonmq.replicas_manager import events as ev
from batonmq.runtime.backoff import pause_ms

_FENCES = frozenset(
    {
        ResponseCode.CONTROLLER_FENCED_MASTER_EPOCH,
        ResponseCode.CONTROLLER_FENCED_SYNC_STATE_SET_EPOCH,
        ResponseCode.CONTROLLER_INVALID_MASTER,
    }
)
_REFUSALS = _FENCES | {
    ResponseCode.CONTROLLER_INVALID_REPLICAS,
    ResponseCode.CONTROLLER_INVALID_REQUEST,
    ResponseCode.CONTROLLER_BROKER_NOT_ALIVE,
    ResponseCode.CONTROLLER_BROKER_NEED_TO_BE_REGISTERED,
    ResponseCode.CONTROLLER_ALTER_SYNC_STATE_SET_FAILED,
}
_PROVES_NOTHING_AFTER_UNKNOWN = _FENCES | {ResponseCode.CONTROLLER_ALTER_SYNC_STATE_SET_FAILED}

RETRY_FIRST_MS = 50
RETRY_MOST_MS = 1000
STANDS_STILL_MS = 5000
"""After so long refused and unknown at once: longer than new leaders need to hear of every living
broker."""


class AlterOutcome(enum.Enum):
    REFUSED = "refused"
    RECORDED = "recorded"
    """The recorded epochs moved: a view will show to what."""
    UNKNOWN = "unknown"


class OpenAlter:
    """`key` is the (masterEpoch, setEpoch) that it replaces. `ids_remembered`: the controllers give
    each copy of a request the answer of the first one."""

    def __init__(self, request: ev.SendAlter, *, ids_remembered: bool) -> None:
        self.request_id = request.request_id
        self.key = (request.master_epoch, request.sync_state_set_epoch)
        self._request = request
        self._in_flight = False
        self._proves_nothing = _PROVES_NOTHING_AFTER_UNKNOWN if ids_remembered else _REFUSALS
        self._ids_remembered = ids_remembered
        self._unknown = False
        self._dropping_until_ms: int | None = None
        self._attempts = 0
        self._retry_ms = 0

    def send(self, target: str) -> ev.SendAlter:
        """The request, or its repetition, to `target`."""
        self._request = dataclasses.replace(self._request, target=target)
        self._in_flight = True
        self._attempts += 1
        return self._request

    def outcome_of(self, code: int) -> AlterOutcome:
        """What an answer proves about this request."""
        # R11: while an earlier copy may still be queued, a refusal of this one is no
        # outcome.
        proves_nothing = self._unknown and code in self._proves_nothing
        if code in _REFUSALS and not proves_nothing:
            return AlterOutcome.REFUSED
        if code == ResponseCode.SUCCESS or code in _FENCES:
            # A fence shows that the epochs moved, perhaps by this very request.
            return AlterOutcome.RECORDED
        return AlterOutcome.UNKNOWN

    def not_answered(self, target: str, now_ms: int) -> list[ev.Effect]:
        """The attempt at `target` ended without a proof: repeat it a little later."""
        # Else the request has been sent to a new leader meanwhile, and that attempt is still open.
        if target == self._request.target:
            self._in_flight = False
            self._retry_ms = now_ms + pause_ms(RETRY_FIRST_MS, RETRY_MOST_MS, self._attempts)
        return self._doubt()

    def stands_still(self, code: int, now_ms: int) -> list[ev.Effect]:
        """Answered with `code`, which proved nothing."""
        if self._ids_remembered or not self._unknown or code not in _REFUSALS:
            return []
        if self._dropping_until_ms is not None and now_ms < self._dropping_until_ms:
            return []
        # The first refusal only starts the wait: a new leader refuses until it has heard the
        # brokers.
        is_first = self._dropping_until_ms is None
        self._dropping_until_ms = now_ms + STANDS_STILL_MS
        return (
            []
            if is_first
            else [ev.DropSessions("a set change is unknown, and its copies are refused")]
        )

    def leader_changed(self, leader: str) -> list[ev.Effect]:
        """Another controller leads: repeat the request there, without waiting for the old one."""
        if self._in_flight and self._request.target == leader:
            return []
        # The old leader may have proposed its copy, which is committed later or not (R11).
        return [*self._doubt(), self.send(leader)]

    def due(self, now_ms: int, deadlines: list[int], target: str) -> list[ev.Effect]:
        if self._in_flight:
            return []
        if now_ms >= self._retry_ms:
            return [self.send(target)]
        deadlines.append(self._retry_ms)
        return []

    def _doubt(self) -> list[ev.Effect]:
        if self._unknown:
            return []
        self._unknown = True
        return [ev.ProposalUnknown()]


def alter_for(
    proposal: ev.ProposalRequested,
    view: RoleView,
    broker_id: int,
    next_request_id: Callable[[], str],
    *,
    ids_remembered: bool = True,
) -> OpenAlter | ev.ProposalRefused:
    """The request for `proposal` of the master `broker_id` in `view`; refused here is what no
    controller could grant."""
    assert proposal.based_on == view.key, "a master knows no more than its ReplicasManager"
    failed = ResponseCode.CONTROLLER_ALTER_SYNC_STATE_SET_FAILED
    if proposal.new_set == view.sync_state_set:
        return ev.ProposalRefused(failed, "the set is recorded already")
    if broker_id not in proposal.new_set:
        return ev.ProposalRefused(failed, "the master is not in the set")
    members: list[tuple[int, str]] = []
    for member_id in sorted(proposal.new_set):
        replica = view.replica(member_id)
        if replica is None or replica.learner:
            what = "unknown" if replica is None else "a learner"
            code = ResponseCode.CONTROLLER_INVALID_REPLICAS
            return ev.ProposalRefused(code, f"broker {member_id} is {what}")
        # R12: by now another process may be registered; the acks were not its own.
        counted = proposal.processes or {}
        members.append((member_id, counted.get(member_id, replica.incarnation)))
    return OpenAlter(
        ev.SendAlter(
            "",
            next_request_id(),
            *view.key,
            tuple(members),
            proposal.confirm_offset,
            proposal.reason,
        ),
        ids_remembered=ids_remembered,
    )
