"""The probe as seen from the laboratory: its acks, and waiting for the next one."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from bench.proc import spawn_talking, tail
from faults.records import Ack

ROOT: Final = Path(__file__).resolve().parents[1]
END_S: Final = 10.0


class Load:
    """A running probe process. `acks` grows in the order in which they were heard."""

    def __init__(self, brokers: Sequence[str], *, prefix: str, log: Path, options: Sequence[str]):
        self.prefix = prefix
        self.acks: list[Ack] = []
        self._log = log
        self._heard = threading.Condition()
        argv = [
            sys.executable, "-m", "faults.probe", "--prefix", prefix, *options, *brokers,
        ]  # fmt: skip
        self._process: subprocess.Popen[str] = spawn_talking(argv, log)
        self._reader = threading.Thread(target=self._read, name="probe-reader", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for text in self._process.stdout:
            ack = Ack.read(text)
            with self._heard:
                self.acks.append(ack)
                self._heard.notify_all()
        with self._heard:
            self._heard.notify_all()

    def stop(self) -> None:
        """Ends the probe; everything it heard is in `acks`."""
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
        """The first heard ack of a write sent after that moment, by another broker than
        `not_from`; None if none comes within `limit_s` of now. Raises RuntimeError if the probe
        itself has ended."""
        deadline = time.monotonic() + limit_s
        position = self._position(sent_after)
        while True:
            with self._heard:
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
                self._heard.wait(left)

    def _position(self, moment: float) -> int:
        """Where to begin looking for acks heard after `moment`."""
        position = len(self.acks)
        while position and self.acks[position - 1].acked_s > moment:
            position -= 1
        return position

    def since(self, moment: float) -> list[Ack]:
        """The acks heard after that moment."""
        return self.acks[self._position(moment) :]


def longest_gap(acks: Sequence[Ack], begin: float, end: float) -> float:
    """The longest time without an ack in [begin, end]. `acks` in the order they were heard."""
    moments = [begin, *(ack.acked_s for ack in acks if begin < ack.acked_s < end), end]
    return max(after - before for before, after in itertools.pairwise(moments))
