"""One send: its queue, its tries, its retries, and its result. Pure."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto

from batonmq.client.errors import SendAttempt, SendFailedError
from batonmq.client.instance.failover import pause_ms
from batonmq.client.instance.topic_route import TopicRoute
from batonmq.client.producer.outgoing import Outgoing
from batonmq.protocol.codes import ResponseCode
from batonmq.protocol.errors import DISK_FULL
from batonmq.protocol.message import MessageQueue


class SendStatus(StrEnum):
    """Only `SEND_OK` is an acknowledgement: the message is on every member of the SyncStateSet
    (G1).

    With the others the master stored the message, but not every member confirmed it in time, so a
    failover may lose it. Send it again if it matters; a consumer may then get it twice."""

    SEND_OK = "SEND_OK"
    FLUSH_DISK_TIMEOUT = "FLUSH_DISK_TIMEOUT"
    FLUSH_SLAVE_TIMEOUT = "FLUSH_SLAVE_TIMEOUT"
    SLAVE_NOT_AVAILABLE = "SLAVE_NOT_AVAILABLE"


STATUS_BY_CODE: dict[int, SendStatus] = {
    ResponseCode.SUCCESS: SendStatus.SEND_OK,
    **{ResponseCode[each]: each for each in SendStatus if each is not SendStatus.SEND_OK},
}


@dataclass(frozen=True, slots=True)
class SendResult:
    """`msg_id`: the unique key (a comma list for a batch). `offset_msg_id`: contains broker address
    and physical offset. `queue_offset`: of the first message. `recall_handle`: for
    `Producer.recall`, if the message is timed."""

    status: SendStatus
    msg_id: str
    offset_msg_id: str
    queue: MessageQueue
    queue_offset: int
    attempts: int = 1
    address: str = ""
    recall_handle: str = ""

    @property
    def acknowledged(self) -> bool:
        """True only for SEND_OK. If false, the message is stored, but not confirmed by all."""
        return self.status is SendStatus.SEND_OK


ELSEWHERE_TRIES = 3
"""The most tries after refusals that another broker may not repeat, but the same one will."""
HINTS_FOLLOWED_MAX = 4
"""How often one send follows a hint without a pause, since two brokers may name each other."""
NO_REPLY = -1


class RetryDecision(Enum):
    STORED = auto()  # code 0, 10, 11 or 12: the reply holds a send header
    RETRY = auto()  # role change, overload, shutdown: fetch the route, pause, try again
    ELSEWHERE = auto()  # another broker may accept it: a few tries
    FINAL = auto()  # another try would fail the same way


RETRY_DECISIONS: dict[int, RetryDecision] = {
    **dict.fromkeys(STATUS_BY_CODE, RetryDecision.STORED),
    # Also sent while fewer than `minInSyncReplicas` are in the set: a member may come back (R15).
    ResponseCode.SYSTEM_ERROR: RetryDecision.RETRY,
    ResponseCode.SYSTEM_BUSY: RetryDecision.RETRY,
    ResponseCode.SERVICE_NOT_AVAILABLE: RetryDecision.RETRY,
    ResponseCode.FLOW_CONTROL: RetryDecision.RETRY,
    ResponseCode.GO_AWAY: RetryDecision.RETRY,
    ResponseCode.NO_PERMISSION: RetryDecision.ELSEWHERE,
    ResponseCode.TOPIC_NOT_EXIST: RetryDecision.ELSEWHERE,
    ResponseCode.NO_BUYER_ID: RetryDecision.ELSEWHERE,
    ResponseCode.NOT_IN_CURRENT_UNIT: RetryDecision.ELSEWHERE,
}


ADVICE_BY_CODE: dict[int, str] = {
    ResponseCode.MESSAGE_ILLEGAL: "the broker refuses the message as it is (size, properties, "
    "or a feature that it does not serve)",
    ResponseCode.NO_PERMISSION: "the topic or the broker is not writable (see `mqctl topicRoute`),"
    " or this user may not send to it (see `mqctl acl explain`)",
    ResponseCode.TOPIC_NOT_EXIST: "create the topic with `mqctl updateTopic`",
    ResponseCode.SERVICE_NOT_AVAILABLE: "no master answers: see `mqctl health`",
    ResponseCode.SYSTEM_BUSY: "only slaves or busy brokers answered: see `mqctl health`",
}


def _advice(code: int, remark: str) -> str:
    if remark.startswith(DISK_FULL):
        return "free disk space on that broker: it then takes writes again by itself"
    return ADVICE_BY_CODE.get(code, "see `mqctl health`")


AVOID_MS = 1000


class QueuePicker:
    """Round robin over a topic's publish queues, avoiding brokers that just failed.

    Invariant: an avoided broker is picked only if all are avoided; then plain round robin
    continues, since a wrong suspicion must not stop the sender."""

    __slots__ = ("_avoid_until_ms", "_next")

    def __init__(self, start: int = 0) -> None:
        self._next = start
        self._avoid_until_ms: dict[str, int] = {}

    def pick(
        self, queues: Sequence[MessageQueue], now_ms: int, *, last_broker: str | None = None
    ) -> MessageQueue:
        """Picks one of `queues`, which is not empty. `last_broker`: the broker of the failed try,
        picked only if all others are avoided, too."""
        # Nearly all sends follow a success, and need no walk over the queues.
        if self._avoid_until_ms or last_broker is not None:
            good = [q for q in queues if not self._is_avoided(q.broker_name, now_ms)]
            if last_broker is not None:
                good = [q for q in good if q.broker_name != last_broker] or good
            queues = good or queues
        index = self._next
        self._next = index + 1
        return queues[index % len(queues)]

    def broker_failed(self, broker_name: str, now_ms: int) -> None:
        self._avoid_until_ms[broker_name] = now_ms + AVOID_MS

    def broker_answered(self, broker_name: str) -> None:
        if self._avoid_until_ms:
            self._avoid_until_ms.pop(broker_name, None)

    def moved(self, broker_names: Iterable[str]) -> None:
        """These broker groups have new masters: no longer avoids them."""
        if self._avoid_until_ms:
            for name in broker_names:
                self._avoid_until_ms.pop(name, None)

    def _is_avoided(self, broker_name: str, now_ms: int) -> bool:
        until_ms = self._avoid_until_ms.get(broker_name)
        if until_ms is None:
            return False
        if until_ms <= now_ms:
            del self._avoid_until_ms[broker_name]
            return False
        return True


ChooseQueue = Callable[[Sequence[MessageQueue], str | None], MessageQueue]
"""Chooses a queue, given the publish queues and the broker group whose try just failed."""


@dataclass(slots=True)
class Sending:
    """One send. Each try ends with a result or a call of `failed`, after which `pause_ms` says how
    long to wait."""

    message: Outgoing
    choose: ChooseQueue
    started_ms: int
    deadline_ms: int
    born_ms: int
    attempts: list[SendAttempt] = field(default_factory=list)
    suspects: set[str] = field(default_factory=set)
    follow_hint: bool = False
    """The last refusal named another master: retry there at once."""
    _last_broker: str | None = None
    _elsewhere: int = 0
    _hints_followed: int = 0

    def target(self, route: TopicRoute, now_ms: int) -> tuple[MessageQueue, str] | None:
        """The queue and its master's address; None without a master, which is noted as a
        failure."""
        if not route.publish_queues:
            why = "no broker group of the topic has a master"
            if route.masters():
                why = "its masters take no writes of the topic: its perm, see `mqctl topicRoute`"
            self.failed(None, "", NO_REPLY, why, now_ms)
            return None
        queue = self.choose(route.publish_queues, self._last_broker)
        address = route.master_address(queue.broker_name)
        if address is None:
            self.failed(queue, "", NO_REPLY, "the group has no master", now_ms)
            return None
        return queue, address

    def failed(
        self, queue: MessageQueue | None, address: str, code: int, remark: str, now_ms: int
    ) -> None:
        name = "-"
        if queue is not None:
            self._last_broker = name = queue.broker_name
        # A name server that still names it as master is not believed in this send.
        if address:
            self.suspects.add(address)
        elapsed_ms = now_ms - self.started_ms
        self.attempts.append(SendAttempt(name, address or "-", elapsed_ms, code, remark))

    def refused(self, decision: RetryDecision, *, other_master: bool, now_ms: int) -> None:
        """Notes a refusal. `other_master`: it names another master. Raises SendFailedError if it is
        final."""
        if other_master and self._hints_followed < HINTS_FOLLOWED_MAX:
            self._hints_followed += 1
            self.follow_hint = True
        if decision is RetryDecision.ELSEWHERE:
            self._elsewhere += 1
        if decision is RetryDecision.FINAL or self._elsewhere >= ELSEWHERE_TRIES:
            raise self.error(now_ms)  # before the deadline: more tries would only delay it

    def pause_ms(self, now_ms: int) -> int:
        """The pause before the next try. Raises SendFailedError if the deadline is earlier."""
        # A living broker named the new master: there is nothing to wait for.
        if self.follow_hint:
            return 0
        pause = pause_ms(len(self.attempts))
        if now_ms + pause >= self.deadline_ms:
            raise self.error(now_ms)
        return pause

    def error(self, now_ms: int) -> SendFailedError:
        last = self.attempts[-1] if self.attempts else None
        advice = _advice(last.code, last.remark) if last is not None else _advice(NO_REPLY, "")
        elapsed_ms = now_ms - self.started_ms
        return SendFailedError(self.message.topic, self.attempts, elapsed_ms, advice=advice)
