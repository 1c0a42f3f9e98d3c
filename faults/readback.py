"""Reading back what the final master serves, each message once."""

from __future__ import annotations

from bench import wire
from faults.probe import QUEUES, TOPIC
from faults.records import padded, parts_of
from protocol.record import decode_records

_SUBSCRIPTION_INSIDE = "4"
_AT_A_TIME = "512"


class ReadBack:
    """What each probe wrote: number of the write -> physical offset.

    Only confirmed messages are served, so a later master goes on where an earlier one ended. A
    write that a client's retry or nobody's ack left twice in the log keeps its first place.
    """

    def __init__(self) -> None:
        self._stored: dict[str, dict[int, int]] = {}
        self._next = [0] * QUEUES

    def of(self, prefix: str) -> dict[int, int]:
        """What was read so far of the probe with that prefix. It grows as more is read."""
        return self._stored.setdefault(padded(prefix), {})

    def read_on(self, master: str) -> None:
        """Reads what is new. Raises OSError if the master breaks off, RuntimeError if it refuses
        to serve what it says it holds, ValueError for bytes that are no records."""
        with wire.Caller(master, timeout_s=15.0) as caller:
            for queue_id in range(QUEUES):
                self._read_queue(caller, queue_id)

    def _read_queue(self, caller: wire.Caller, queue_id: int) -> None:
        asked = caller.call(wire.MAX_OFFSET, {"topic": TOPIC, "queueId": str(queue_id)})
        end = int(asked.ext.get("offset", "0"))
        if end < self._next[queue_id]:
            raise RuntimeError(f"queue {queue_id} fell from {self._next[queue_id]} to {end}")
        while self._next[queue_id] < end:
            offset = self._next[queue_id]
            reply = caller.call(wire.PULL, _pull_ext(queue_id, offset))
            following = int(reply.ext.get("nextBeginOffset", "0"))
            if reply.code != wire.OK or following <= offset:
                raise RuntimeError(
                    f"queue {queue_id} cannot be read on from {offset} of {end}:"
                    f" code {reply.code} {reply.remark}"
                )
            for message in decode_records(reply.body):
                prefix, number = parts_of(message.properties["UNIQ_KEY"])
                stored = self._stored.setdefault(prefix, {})
                stored.setdefault(number, message.physical_offset)
            self._next[queue_id] = following


def _pull_ext(queue_id: int, offset: int) -> dict[str, str]:
    return {
        "consumerGroup": "faults_read_back",
        "topic": TOPIC,
        "queueId": str(queue_id),
        "queueOffset": str(offset),
        "maxMsgNums": _AT_A_TIME,
        "sysFlag": _SUBSCRIPTION_INSIDE,
        "commitOffset": "0",
        "suspendTimeoutMillis": "0",
        "subVersion": "0",
        "subscription": "*",
        "expressionType": "TAG",
    }
