"""A master's AlterSyncStateSet request; only one may be open (R11). Pure.

Invariant: a request with an unknown outcome ends only by an answer to the same request id that
proves the outcome, or by a view with newer epochs. "Same set" proves nothing while the first
attempt may still be queued; a fence may be the effect of that attempt itself.

RocketMQ's controllers have no request ids. They refuse by the leader's memory, and may later apply
an earlier copy from their log without checking its epochs. So their refusal does not end a request
with an unknown outcome. If they keep refusing, the master drops its sessions: the next election has
a newer epoch, and every copy is applied before it or refused.
"""

import dataclasses
import enum

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
"""How long a request may be both refused and of unknown outcome: longer than a new leader needs to
hear from every living broker."""


class AlterOutcome(enum.Enum):
    REFUSED = "refused"
    RECORDED = "recorded"
    """The recorded epochs changed: a view will show the new ones."""
    UNKNOWN = "unknown"


class OpenAlter:
    """`key`: the (masterEpoch, setEpoch) that it replaces. `ids_remembered`: controllers answer
    each copy of a request like the first one."""

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
        """Sends the request, or repeats it, to `target`."""
        self._request = dataclasses.replace(self._request, target=target)
        self._in_flight = True
        self._attempts += 1
        return self._request

    def outcome_of(self, code: int) -> AlterOutcome:
        """What the answer proves about this request."""
        # R11: an earlier copy may still be queued, so a refusal of this one proves nothing.
        proves_nothing = self._unknown and code in self._proves_nothing
        if code in _REFUSALS and not proves_nothing:
            return AlterOutcome.REFUSED
        if code == ResponseCode.SUCCESS or code in _FENCES:
            # A fence shows that the epochs changed, perhaps by this very request.
            return AlterOutcome.RECORDED
        return AlterOutcome.UNKNOWN

    def not_answered(self, target: str, now_ms: int) -> list[ev.Effect]:
        """The attempt at `target` ended without a proof: repeats it a little later."""
        # Else the request was sent to a new leader since, and that attempt is still open.
        if target == self._request.target:
            self._in_flight = False
            self._retry_ms = now_ms + pause_ms(RETRY_FIRST_MS, RETRY_MOST_MS, self._attempts)
        return self._doubt()

    def stands_still(self, code: int, now_ms: int) -> list[ev.Effect]:
        """An answer with `code` proved nothing: drops the sessions if that lasts too long."""
        if self._ids_remembered or not self._unknown or code not in _REFUSALS:
            return []
        if self._dropping_until_ms is not None and now_ms < self._dropping_until_ms:
            return []
        # The first refusal only starts the time: a new leader refuses until it has heard the
        # brokers.
        is_first = self._dropping_until_ms is None
        self._dropping_until_ms = now_ms + STANDS_STILL_MS
        what = "a set change is unknown, and its copies are refused"
        return [] if is_first else [ev.DropSessions(what)]

    def leader_changed(self, leader: str) -> list[ev.Effect]:
        """Another controller leads: repeats the request there, without waiting for the old one."""
        if self._in_flight and self._request.target == leader:
            return []
        # The old leader may have proposed its copy, which may still be committed (R11).
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
    request_id: str,
    *,
    ids_remembered: bool = True,
) -> OpenAlter | ev.ProposalRefused:
    """The request for `proposal` of the master `broker_id` in `view`. Refuses what no controller
    could grant."""
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
        # R12: another process may be registered now, and the acks were not its own.
        counted = proposal.processes or {}
        members.append((member_id, counted.get(member_id, replica.incarnation)))
    return OpenAlter(
        ev.SendAlter(
            "", request_id, *view.key, tuple(members), proposal.confirm_offset, proposal.reason
        ),
        ids_remembered=ids_remembered,
    )
