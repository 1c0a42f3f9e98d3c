"""When a send is tried again, and how soon. Pure.

A retry happens inside the one deadline of its send. Replies that mean "not the master any more"
or "not now" (and silence, and a lost connection) are retried after fetching the route anew, with
pauses that start at 5 ms: an election takes some tens of milliseconds, and the caller should not
notice it. Replies about the message itself are final.
"""

from enum import Enum, auto

from batonmq.send_result import STATUS_BY_CODE
from protocol.codes import ResponseCode

FIRST_PAUSE_MS = 5
LAST_PAUSE_MS = 100
GROWTH = 1.5

# Tries for replies that another broker might answer better, but time will not.
ELSEWHERE_TRIES = 3


class Verdict(Enum):
    STORED = auto()  # code 0, 10, 11 or 12: the reply holds a send header
    RETRY = auto()  # role change, overload, going away: fetch the route, pause, try again
    ELSEWHERE = auto()  # another broker may know better; give up after a few tries
    FINAL = auto()  # will not get better


_RETRY = frozenset(
    {
        ResponseCode.SYSTEM_ERROR,
        ResponseCode.SYSTEM_BUSY,
        ResponseCode.SERVICE_NOT_AVAILABLE,
        ResponseCode.FLOW_CONTROL,
        ResponseCode.GO_AWAY,
    }
)
_ELSEWHERE = frozenset(
    {
        ResponseCode.NO_PERMISSION,
        ResponseCode.TOPIC_NOT_EXIST,
        ResponseCode.NO_BUYER_ID,
        ResponseCode.NOT_IN_CURRENT_UNIT,
    }
)


def judge_send_reply(code: int) -> Verdict:
    if code in STATUS_BY_CODE:
        return Verdict.STORED
    if code in _RETRY:
        return Verdict.RETRY
    if code in _ELSEWHERE:
        return Verdict.ELSEWHERE
    return Verdict.FINAL


def means_not_master(code: int) -> bool:
    """Replies after which the route must be asked for anew, whatever the request was.

    A slave answers sends and pulls with SYSTEM_BUSY, a deposed or leaseless master with
    SERVICE_NOT_AVAILABLE.
    """
    return code in (
        ResponseCode.SYSTEM_ERROR,
        ResponseCode.SYSTEM_BUSY,
        ResponseCode.SERVICE_NOT_AVAILABLE,
        ResponseCode.GO_AWAY,
    )


def pause_ms(failures: int) -> int:
    """How long to wait before the next try after `failures` (>= 1) failed ones in a row."""
    return min(round(FIRST_PAUSE_MS * GROWTH ** min(failures - 1, 16)), LAST_PAUSE_MS)


ADVICE_BY_CODE: dict[int, str] = {
    ResponseCode.MESSAGE_ILLEGAL: "the broker refuses the message as it is (size, properties, "
    "or a feature that it does not serve)",
    ResponseCode.NO_PERMISSION: "the topic or the broker is not writable: see `mqctl topicRoute`",
    ResponseCode.TOPIC_NOT_EXIST: "create the topic with `mqctl updateTopic`",
    ResponseCode.SERVICE_NOT_AVAILABLE: "no master answers: see `mqctl health`",
    ResponseCode.SYSTEM_BUSY: "only slaves or busy brokers answered: see `mqctl health`",
}
