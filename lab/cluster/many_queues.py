"""A writer that fills many queues in turn, and whether they hold what it had acknowledged.

It runs beside the probe: a cluster with 10,000 queues has to fail over like one with a few.
Independent of batonmq.
"""

import threading
from collections.abc import Iterator
from typing import Final

from lab.cluster import frames
from lab.cluster.acks import key_of, parts_of
from lab.cluster.checks import BrokenPromise
from lab.cluster.connection import BlockingConnection
from lab.cluster.writer import Writer

PER_TOPIC: Final = 4
PREFIX: Final = "many"
_AT_A_TIME: Final = 512


class ManyQueuesWriter(Writer):
    """Writes 0, 1, 2, … to `queues` queues in turn, each number until it is acknowledged. Topics of
    `PER_TOPIC` queues are made by their first message. `acks` say in which queue offset it is."""

    def __init__(self, addresses: list[str], queues: int, *, pause_s: float) -> None:
        super().__init__(addresses, "Many", 0, pause_s=pause_s)
        self.queues = queues
        self.are_all_made = threading.Event()
        """Every queue has a message."""

    def place(self, number: int) -> tuple[str, int]:
        queue = number % self.queues
        return f"{self.topic}{queue // PER_TOPIC}", queue % PER_TOPIC

    def properties(self, number: int) -> str:
        if number >= self.queues:
            self.are_all_made.set()
        return frames.key_properties(key_of(PREFIX, number))

    def find_lost(self, master: str) -> list[BrokenPromise]:
        """Reads all queues of a whole cluster's master: each acknowledged message is where its ack
        said. Raises OSError if the connection breaks."""
        wanted: dict[tuple[str, int], list[tuple[int, int]]] = {}
        for ack in list(self.acks):
            wanted.setdefault(self.place(ack.number), []).append((ack.queue_offset, ack.number))
        found: list[BrokenPromise] = []
        with BlockingConnection(master, timeout_s=15.0) as connection:
            for (topic, queue_id), acked in wanted.items():
                stored = list(_stored(connection, topic, queue_id))
                found += [
                    BrokenPromise(
                        "lost", f"{topic} queue {queue_id} offset {offset} is not {number}"
                    )
                    for offset, number in acked
                    if offset >= len(stored) or stored[offset] != number
                ]
        return found


def _stored(connection: BlockingConnection, topic: str, queue_id: int) -> Iterator[int]:
    """The numbers in a queue from its first message on. Raises RuntimeError for a queue that does
    not begin at 0 or cannot be read."""
    offset = 0
    while True:
        reply = connection.pull(topic, offset, queue_id=queue_id, count=_AT_A_TIME)
        if reply.code == frames.PULL_NOT_FOUND:
            return
        following = int(reply.ext.get("nextBeginOffset", "0"))
        if reply.code != frames.OK or following <= offset:
            raise RuntimeError(f"{topic} queue {queue_id} at {offset}: {reply.code} {reply.remark}")
        for _, properties in frames.stored_records(reply.body):
            yield parts_of(properties["UNIQ_KEY"])[1]
        offset = following
