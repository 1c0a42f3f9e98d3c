"""Raft nodes as processes that can be killed (`-m tests.controller.raft_zygote FOLDER PORTS...`).

Reads `start N...`, `kill N...`, `stop N...`, `cont N...`, `fill N...` (its files may not grow from
now on) and `reap N...` (waits for its end) from its input and answers `done`. A node whose gate is
open writes `open N EPOCH BEFORE_MS AFTER_MS` again and again: the time (`boot_ms`) around its look
at the gate, since it may be stopped between that look and the write. It registers one broker group
after the other, several at a time, and writes `ack NAME` once a registration is applied. `died N
STATUS` reports a node that ended by itself. Forks are quick, since everything is imported before.
"""

import asyncio
import ctypes
import itertools
import os
import resource
import signal
import sys
from pathlib import Path

from batonmq.controller.config import Peer
from batonmq.controller.gate import LeaderGate
from batonmq.controller.raft.log import Applied, Machine
from batonmq.controller.raft.node import RaftLog, RaftSettings
from batonmq.controller.rules.commands import ApplyBrokerId
from batonmq.runtime.clock import boot_ms, wall_ms
from tests.controller.raft_cluster import QUICK

WRITERS = 4
COMPACT_AFTER_ENTRIES = 40
LOOK_S = 0.01
FULL_AT_BYTES = 1 << 10
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "cont": signal.SIGCONT}
PR_SET_PDEATHSIG = 1


def peers_at(ports: list[int]) -> tuple[Peer, ...]:
    return tuple(Peer(f"n{i}", "127.0.0.1", port, port, port) for i, port in enumerate(ports))


def tell(line: str) -> None:
    os.write(1, line.encode() + b"\n")


class Node:
    """One node; registers groups whenever its gate is open."""

    def __init__(self, folder: Path, peers: tuple[Peer, ...], number: int) -> None:
        self._number = number
        self._log = RaftLog(
            RaftSettings(
                peers[number],
                peers,
                QUICK,
                folder / peers[number].node_id,
                compact_after_entries=COMPACT_AFTER_ENTRIES,
            ),
            Machine(),
        )
        self._gate = LeaderGate(
            self._log,
            peers[number].node_id,
            wall_ms=wall_ms,
            timeout_ms=1000,
            on_change=lambda _: None,
        )
        self._names = (f"{os.getpid()}-{count}" for count in itertools.count())

    async def run(self) -> None:
        await self._log.start()
        telling = asyncio.create_task(self._tell_open())
        while not telling.done():
            while not self._gate.open:  # noqa: ASYNC110  there is no event
                await asyncio.sleep(LOOK_S)
            epoch = self._gate.controller_epoch
            await asyncio.gather(*(self._write(epoch) for _ in range(WRITERS)))
            await asyncio.sleep(LOOK_S)

    async def _tell_open(self) -> None:
        """Whether this node would answer and elect, as a request that comes just now finds it."""
        while True:
            before_ms, is_open, after_ms = boot_ms(), self._gate.open, boot_ms()
            if is_open:
                epoch = self._gate.controller_epoch
                tell(f"open {self._number} {epoch} {before_ms} {after_ms}")
            await asyncio.sleep(LOOK_S)

    async def _write(self, controller_epoch: int) -> None:
        while self._gate.open:
            name = next(self._names)
            command = ApplyBrokerId(
                request_id=name,
                controller_epoch=controller_epoch,
                broker_name=name,
                broker_id=1,
                register_check_code="x",
            )
            outcome = await self._log.propose(command, 1000)
            if isinstance(outcome, Applied):
                if not outcome.result.ok:
                    return  # another node was leader in between: a new epoch is needed
                tell(f"ack {name}")


def main() -> None:
    folder, peers = Path(sys.argv[1]), peers_at([int(port) for port in sys.argv[2:]])
    children: dict[int, int] = {}
    for line in sys.stdin:
        verb, *numbers = line.split()
        for number in map(int, numbers):
            if verb == "start":
                pid = os.fork()
                if not pid:
                    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
                    asyncio.run(Node(folder, peers, number).run())
                children[number] = pid
            elif verb == "fill":
                limits = (FULL_AT_BYTES, FULL_AT_BYTES)
                resource.prlimit(children[number], resource.RLIMIT_FSIZE, limits)
            elif verb in SIGNALS:
                os.kill(children[number], SIGNALS[verb])
        if verb in ("kill", "reap"):
            for number in map(int, numbers):
                _, status = os.waitpid(children.pop(number), 0)
                if not os.WIFSIGNALED(status):
                    tell(f"died {number} {status}")
        tell("done")


if __name__ == "__main__":
    main()
