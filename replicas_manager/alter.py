"""The one AlterSyncStateSet that a master may have open (R11).

Pure. Invariant: once its outcome is unknown it ends only by an answer to the same request id that
proves what became of it, or by a view whose epochs passed it. "Same set" proves nothing while the
first attempt may still be queued; and a fence may have been raised by that attempt itself.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

from protocol.codes import ResponseCode
from protocol.role_view import RoleView
from replicas_manager.events import (
    Effect,
    ProposalRefused,
    ProposalRequested,
    ProposalUnknown,
    SendAlter,
)

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


class Answer(enum.Enum):
    REFUSED = "refused"
    RECORDED = "recorded"
    """The recorded epochs moved: a view will show to what."""
    UNKNOWN = "unknown"


class OpenAlter:
    """`key` is the (masterEpoch, setEpoch) that it replaces; `members` are (id, incarnation)."""

    def __init__(
        self,
        request_id: str,
        key: tuple[int, int],
        members: tuple[tuple[int, str], ...],
        confirm_offset: int,
        reason: str,
    ) -> None:
        self.request_id = request_id
        self.key = key
        self._members = members
        self._confirm_offset = confirm_offset
        self._reason = reason
        self._target = ""
        self._flying = False
        self._unknown = False
        self._attempts = 0
        self._retry_ms = 0

    def send(self, target: str) -> SendAlter:
        """Ask, or ask the same again, at `target`."""
        self._target = target
        self._flying = True
        self._attempts += 1
        return SendAlter(
            target,
            self.request_id,
            self.key[0],
            self.key[1],
            self._members,
            self._confirm_offset,
            self._reason,
        )

    def judge(self, code: int) -> Answer:
        """What an answer to this request says about it."""
        proves_nothing = self._unknown and code in _PROVES_NOTHING_AFTER_UNKNOWN
        if code in _REFUSALS and not proves_nothing:
            return Answer.REFUSED
        if code == ResponseCode.SUCCESS or code in _FENCES:
            return Answer.RECORDED
        return Answer.UNKNOWN

    def not_answered(self, target: str, now_ms: int) -> list[Effect]:
        """The attempt at `target` ended without a proof: ask again a little later."""
        if target == self._target:
            self._flying = False
            doublings = min(self._attempts - 1, 8)
            self._retry_ms = now_ms + min(RETRY_FIRST_MS << doublings, RETRY_MOST_MS)
        return self._doubt()

    def leader_changed(self, leader: str) -> list[Effect]:
        """Another controller leads: ask it the same, without waiting for the old one."""
        if self._flying and self._target == leader:
            return []
        return [*self._doubt(), self.send(leader)]

    def due(self, now_ms: int, deadlines: list[int], target: str) -> list[Effect]:
        if self._flying:
            return []
        if now_ms >= self._retry_ms:
            return [self.send(target)]
        deadlines.append(self._retry_ms)
        return []

    def _doubt(self) -> list[Effect]:
        if self._unknown:
            return []
        self._unknown = True
        return [ProposalUnknown()]


def alter_for(
    proposal: ProposalRequested,
    view: RoleView,
    broker_id: int,
    next_request_id: Callable[[], str],
) -> OpenAlter | ProposalRefused:
    """The request for `proposal` of the master `broker_id` in `view`; refused here is what no
    controller could grant."""
    assert proposal.based_on == view.key, "a master knows no more than its ReplicasManager"
    failed = ResponseCode.CONTROLLER_ALTER_SYNC_STATE_SET_FAILED
    if proposal.new_set == view.sync_state_set:
        return ProposalRefused(failed, "the set is recorded already")
    if broker_id not in proposal.new_set:
        return ProposalRefused(failed, "the master is not in the set")
    members: list[tuple[int, str]] = []
    for member_id in sorted(proposal.new_set):
        replica = view.replica(member_id)
        if replica is None or replica.learner:
            what = "unknown" if replica is None else "a learner"
            code = ResponseCode.CONTROLLER_INVALID_REPLICAS
            return ProposalRefused(code, f"broker {member_id} is {what}")
        members.append((member_id, replica.incarnation))
    return OpenAlter(
        next_request_id(), view.key, tuple(members), proposal.confirm_offset, proposal.reason
    )
