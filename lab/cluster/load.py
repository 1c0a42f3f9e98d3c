"""A running probe process: its acks, and waiting for the next one. Independent of batonmq."""

import itertools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Self

from lab.cluster.acks import Ack
from lab.cluster.processes import spawn_talking, tail

END_S: Final = 10.0
FAILOVER_LIMIT_S: Final = 60.0


class Load:
    """A running probe process; a context manager that ends it.

    It is a process of its own, so that nothing here delays an ack. `acks` grows in the order in
    which the probe received them. `codes`: how often each code was replied, known after `stop`.
    """

    def __init__(
        self, brokers: Sequence[str], *, prefix: str, log: Path, options: Sequence[str] = ()
    ) -> None:
        self.prefix = prefix
        self.acks: list[Ack] = []
        self.codes: dict[str, int] = {}
        self._log = log
        self._started = threading.Event()
        self._received = threading.Condition()
        argv = [sys.executable, "-m", "lab.cluster.probe", "--prefix", prefix, *options, *brokers]
        self._process = spawn_talking(argv, log)
        self._reader = threading.Thread(target=self._read, name="probe-reader", daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for text in self._process.stdout:
            if text.startswith("{"):
                self.codes = json.loads(text)
                self._started.set()
                continue
            ack = Ack.read(text)
            with self._received:
                self.acks.append(ack)
                self._received.notify_all()
        with self._received:
            self._received.notify_all()  # it has ended: who waits for an ack hears of that

    def wait_started(self) -> None:
        """Returns when the probe tries to connect."""
        if not self._started.wait(END_S):
            raise RuntimeError(f"the probe did not start:\n{tail(self._log)}")

    def stop(self) -> None:
        """Ends the probe; everything that it received is in `acks`."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(END_S)
        if self._process.stdout is not None:
            self._process.stdout.close()

    def first_ack(
        self, *, sent_after: float, limit_s: float, not_from: int | None = None
    ) -> Ack | None:
        """The first ack of a write sent after that moment, by another broker than `not_from`; None
        if none arrives within `limit_s` from now. Raises RuntimeError if the probe has ended."""
        deadline = time.monotonic() + limit_s
        position = self._position(sent_after)
        while True:
            with self._received:
                while position < len(self.acks):
                    ack = self.acks[position]
                    position += 1
                    if ack.sent_s >= sent_after and ack.broker != not_from:
                        return ack
                if self._process.poll() is not None:
                    raise RuntimeError(f"the probe has ended:\n{tail(self._log)}")
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                self._received.wait(left)

    def wait_ack(self, *, sent_after: float, not_from: int | None = None) -> Ack:
        """As `first_ack`. Raises RuntimeError if there is none within FAILOVER_LIMIT_S."""
        limit_s = FAILOVER_LIMIT_S
        ack = self.first_ack(sent_after=sent_after, limit_s=limit_s, not_from=not_from)
        if ack is None:
            raise RuntimeError(f"no write acknowledged within {limit_s:.0f} s")
        return ack

    def failover_s(self, kill: Callable[[], object], *, broker: int) -> float:
        """From just before `kill`, which ends the master, to the first ack by another one. Raises
        RuntimeError if none comes."""
        killed_s = time.monotonic()
        kill()
        return self.wait_ack(sent_after=killed_s, not_from=broker).acked_s - killed_s

    def _position(self, moment: float) -> int:
        """The index of the first ack received after `moment`."""
        position = len(self.acks)
        while position and self.acks[position - 1].acked_s > moment:
            position -= 1
        return position

    def since(self, moment: float) -> list[Ack]:
        """The acks received after that moment."""
        return self.acks[self._position(moment) :]


def longest_gap(acks: Sequence[Ack], begin: float, end: float) -> float:
    """The longest time without an ack in [begin, end]. `acks` in the order of receipt."""
    moments = [begin, *(ack.acked_s for ack in acks if begin < ack.acked_s < end), end]
    return max(after - before for before, after in itertools.pairwise(moments))
