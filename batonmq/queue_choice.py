"""Which queue the next message goes to: round robin, keeping off brokers that just failed. Pure."""

from collections.abc import Sequence

from protocol.message import MessageQueue

AVOID_MS = 1000


class QueuePicker:
    """Round robin over a topic's publish queues.

    Invariant: if some queue's broker is not avoided, an avoided one is never picked; if all are
    avoided, the plain round robin goes on (a wrong suspicion must not stop the sender).
    """

    __slots__ = ("_avoid_until_ms", "_next")

    def __init__(self, start: int = 0) -> None:
        self._next = start
        self._avoid_until_ms: dict[str, int] = {}

    def pick(
        self, queues: Sequence[MessageQueue], now_ms: int, *, last_broker: str | None = None
    ) -> MessageQueue:
        """`queues` must not be empty. `last_broker`: whose try just failed; taken only if all
        others are avoided too."""
        if self._avoid_until_ms or last_broker is not None:
            good = [q for q in queues if not self._is_avoided(q.broker_name, now_ms)]
            if last_broker is not None:
                good = [q for q in good if q.broker_name != last_broker] or good
            queues = good or queues
        index = self._next
        self._next = index + 1
        return queues[index % len(queues)]

    def broker_failed(self, broker_name: str, now_ms: int, avoid_ms: int = AVOID_MS) -> None:
        self._avoid_until_ms[broker_name] = now_ms + avoid_ms

    def broker_answered(self, broker_name: str) -> None:
        if self._avoid_until_ms:
            self._avoid_until_ms.pop(broker_name, None)

    def _is_avoided(self, broker_name: str, now_ms: int) -> bool:
        until_ms = self._avoid_until_ms.get(broker_name)
        if until_ms is None:
            return False
        if until_ms <= now_ms:
            del self._avoid_until_ms[broker_name]
            return False
        return True
