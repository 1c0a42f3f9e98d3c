"""Reads back what the final master serves, each message once. Independent of batonmq."""

from lab.cluster import frames
from lab.cluster.acks import padded, parts_of
from lab.cluster.connection import BlockingConnection
from lab.cluster.load import Load
from lab.cluster.probe import QUEUES, TOPIC

_AT_A_TIME = 512


def lost_at(master: str, load: Load) -> list[int]:
    """The numbers of acknowledged writes that this master does not serve. Raises as `read_on`."""
    reader = ReadBack()
    reader.read_on(master)
    stored = reader.of(load.prefix)
    return sorted({ack.number for ack in load.acks} - stored.keys())


class MasterMoved(RuntimeError):
    """Another broker leads by now: `read_on` continues there."""


class ReadBack:
    """The writes of each probe: number of the write -> physical offset.

    Only confirmed messages are served, so reading continues at a later master where it ended at an
    earlier one. A write that is in the log twice, by a client's retry, keeps its first place.
    """

    def __init__(self) -> None:
        self._stored: dict[str, dict[int, int]] = {}
        self._next = [0] * QUEUES

    def of(self, prefix: str) -> dict[int, int]:
        """What was read so far of the probe with that prefix. It grows as more is read."""
        return self._stored.setdefault(padded(prefix), {})

    def read_on(self, master: str) -> None:
        """Reads what is new. Raises OSError if the connection breaks, MasterMoved if that broker is
        not the master, RuntimeError if the master does not serve what it says it holds, ValueError
        for bytes that are no records."""
        with BlockingConnection(master, timeout_s=15.0) as connection:
            for queue_id in range(QUEUES):
                self._read_queue(connection, queue_id)

    def _read_queue(self, connection: BlockingConnection, queue_id: int) -> None:
        asked = connection.request(frames.MAX_OFFSET, {"topic": TOPIC, "queueId": queue_id})
        end = int(asked.ext.get("offset", "0"))
        if end < self._next[queue_id]:
            raise RuntimeError(f"queue {queue_id} fell from {self._next[queue_id]} to {end}")
        while self._next[queue_id] < end:
            offset = self._next[queue_id]
            reply = connection.pull(TOPIC, offset, queue_id=queue_id, count=_AT_A_TIME)
            if reply.code == frames.SYSTEM_BUSY:
                raise MasterMoved(reply.remark)
            following = int(reply.ext.get("nextBeginOffset", "0"))
            if reply.code not in (frames.OK, frames.PULL_RETRY) or following <= offset:
                raise RuntimeError(
                    f"queue {queue_id} cannot be read on from {offset} of {end}:"
                    f" code {reply.code} {reply.remark}"
                )
            for physical_offset, properties in frames.stored_records(reply.body):
                prefix, number = parts_of(properties["UNIQ_KEY"])
                stored = self._stored.setdefault(prefix, {})
                stored.setdefault(number, physical_offset)
            self._next[queue_id] = following
