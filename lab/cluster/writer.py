"""Threads that write numbers into one queue, each number until it is acknowledged.

Independent of batonmq.
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

from lab.cluster import frames
from lab.cluster.connection import BlockingConnection
from lab.cluster.processes import READY_S, wait_for

AFTER_ERROR_S = 0.002
AFTER_REFUSAL_S = 0.005


@dataclass(frozen=True)
class QueueAck:
    """A write that was acknowledged, and its place in the queue. `at`: CLOCK_MONOTONIC, s."""

    number: int
    queue_id: int
    queue_offset: int
    at: float


class WriterThread:
    """Runs `write` in a thread while a `with` block runs. `error`: the exception that ended it."""

    def __init__(self, topic: str, queue_id: int) -> None:
        self.topic = topic
        self.queue_id = queue_id
        self.acks: list[QueueAck] = []
        self.error: BaseException | None = None
        self.stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"writer-{queue_id}")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def write(self) -> None:
        """Writes until `stopping` is set."""
        raise NotImplementedError

    def body(self, number: int) -> bytes:
        return b"%d %d " % (self.queue_id, number) + b"x" * 200

    @property
    def longest_gap_s(self) -> float:
        """Between two acks."""
        times = [ack.at for ack in list(self.acks)]
        return max((after - before for before, after in pairwise(times)), default=0.0)

    def stop(self) -> None:
        """Ends after the write in progress. Raises the exception that ended the thread, if any."""
        self.stopping.set()
        self._thread.join(30)
        assert not self._thread.is_alive(), "the writer hangs"
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        try:
            self.write()
        except BaseException as error:
            self.error = error


class Writer(WriterThread):
    """Writes the numbers 0, 1, 2, … by raw frames, at most one every `pause_s`.

    Brokers are tried in turn until one acknowledges. A number is sent only after the one before was
    acknowledged, so the queue must hold them in a non-falling order. `refusals` holds every reply
    that was not code 0: (CLOCK_MONOTONIC s, address, code, remark).
    """

    def __init__(
        self,
        addresses: list[str],
        topic: str,
        queue_id: int,
        *,
        timeout_s: float = 4.0,
        pause_s: float = 0.0,
    ) -> None:
        super().__init__(topic, queue_id)
        self.addresses = addresses
        self.refusals: list[tuple[float, str, int, str]] = []
        self._timeout_s = timeout_s
        self._pause_s = pause_s

    def place(self, number: int) -> tuple[str, int]:
        """Topic and queue id of a number."""
        return self.topic, self.queue_id

    def properties(self, number: int) -> str:
        return ""

    def write(self) -> None:
        turn = 0
        while not self.stopping.is_set():
            address = self.addresses[turn % len(self.addresses)]
            turn += 1
            try:
                with BlockingConnection(address, timeout_s=self._timeout_s) as connection:
                    self._write_to(connection)
            except OSError:
                self.stopping.wait(AFTER_ERROR_S)

    def _write_to(self, connection: BlockingConnection) -> None:
        """Writes to one broker until it refuses. Raises OSError."""
        while not self.stopping.wait(self._pause_s):
            number = len(self.acks)
            topic, queue_id = self.place(number)
            reply = connection.send(
                topic, self.body(number), queue_id=queue_id, properties=self.properties(number)
            )
            if reply.code != frames.OK:
                refusal = (time.monotonic(), connection.address, reply.code, reply.remark)
                self.refusals.append(refusal)
                self.stopping.wait(AFTER_REFUSAL_S)
                return
            place = int(reply.ext["queueId"]), int(reply.ext["queueOffset"])
            self.acks.append(QueueAck(number, *place, time.monotonic()))


def wait_acks(
    writers: WriterThread | Sequence[WriterThread], more: int, limit_s: float = READY_S
) -> None:
    """Returns when every writer has `more` acks more than now. Raises what ended a writer."""
    every = [writers] if isinstance(writers, WriterThread) else writers
    wanted = [(writer, len(writer.acks) + more) for writer in every]

    def reached() -> bool:
        for writer, _ in wanted:
            if writer.error is not None:
                raise writer.error
        return all(len(writer.acks) >= count for writer, count in wanted)

    wait_for(f"{more} acks more for each of {len(wanted)} writers", reached, limit_s)


def number_in(body: bytes) -> tuple[int, int]:
    """(queue id, number) of a body that a writer made."""
    queue_id, number, _ = body.split(b" ", 2)
    return int(queue_id), int(number)
