"""Raft nodes as processes that can be killed: `python raft_zygote.py FOLDER PORT PORT PORT`.

Reads `start N...` and `kill N...` from its input, forks a node for each N or kills it with SIGKILL,
and answers `done`. A node that leads registers one broker group after the other, several at a time,
and writes `ack NAME` once the registration is applied. A node that ended by itself is told as
`died N STATUS`. Forks are quick, since everything is imported before.
"""

import asyncio
import ctypes
import itertools
import os
import signal
import sys
from pathlib import Path

from raft_cluster import QUICK

from controller.commands import ApplyBrokerId, BecomeController
from controller.config import Peer
from controller.log import Applied
from controller.machine import Machine
from controller.raft.node import RaftLog

WRITERS = 4
COMPACT_AFTER_ENTRIES = 40
PR_SET_PDEATHSIG = 1


def peers_at(ports: list[int]) -> tuple[Peer, ...]:
    return tuple(Peer(f"n{i}", "127.0.0.1", port, port, port) for i, port in enumerate(ports))


def tell(line: str) -> None:
    os.write(1, line.encode() + b"\n")


class Node:
    """One node; registers groups whenever it leads."""

    def __init__(self, folder: Path, peers: tuple[Peer, ...], number: int) -> None:
        self._log = RaftLog(
            peers[number],
            peers,
            Machine(),
            QUICK,
            folder / peers[number].node_id,
            compact_after_entries=COMPACT_AFTER_ENTRIES,
        )
        self._leads = asyncio.Event()
        self._names = (f"{os.getpid()}-{count}" for count in itertools.count())
        self._log.on_role(lambda leading: self._leads.set() if leading else self._leads.clear())

    async def run(self) -> None:
        await self._log.start()
        while True:
            await self._leads.wait()
            nonce = next(self._names)
            become = BecomeController(node="n", nonce=nonce, request_id=nonce)
            outcome = await self._log.propose(become, 1000)
            if isinstance(outcome, Applied) and outcome.result.ok:
                epoch = outcome.result.controller_epoch
                await asyncio.gather(*(self._write(epoch) for _ in range(WRITERS)))

    async def _write(self, controller_epoch: int) -> None:
        while self._leads.is_set():
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
            else:
                os.kill(children[number], signal.SIGKILL)
        if verb == "kill":
            for number in map(int, numbers):
                _, status = os.waitpid(children.pop(number), 0)
                if not os.WIFSIGNALED(status):
                    tell(f"died {number} {status}")
        tell("done")


if __name__ == "__main__":
    main()
