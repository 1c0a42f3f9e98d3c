"""Incidents that are done to a cluster that runs. Each gives the incident, and the node or group
that a verdict must name first."""

import asyncio
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Final

from batonmq import ConsumeFromWhere, LitePullConsumer, LitePullOptions, Message, Producer
from lab.cluster.cluster import GROUP, Sections
from lab.cluster.held import HOSTS, HeldCluster
from lab.cluster.network import Network
from lab.cluster.node_process import NodeProcess, kill_all
from lab.faults.verdict_files import Expected


class LiveVerdict:
    """A whole cluster."""

    def __init__(self, folder: Path, settings: Sections) -> None:
        self.folder = folder
        self.cluster = HeldCluster(folder, Network(HOSTS), settings)
        folder.mkdir(parents=True)
        try:
            self.cluster.start()
        except BaseException:
            self.stop()
            raise

    def slave(self, rng: random.Random) -> NodeProcess:
        master = self.cluster.master()
        return rng.choice([each for each in self.cluster.brokers if each is not master])

    def heal(self) -> None:
        """Makes it whole again."""
        for process in self.cluster.processes:
            process.make_sound()
        self.cluster.resume_stopped()
        self.cluster.launch_dead()
        self.cluster.wait_whole()
        # Else a process that was hurt several times within a minute would be a crash loop.
        for process in self.cluster.processes:
            (process.node.data_dir / "process.log").write_bytes(b"")

    def stop(self) -> None:
        kill_all(self.cluster.processes)


def _end(process: NodeProcess, how: str) -> None:
    if how == "killed":
        process.kill()
    elif how == "hung":
        process.signal(signal.SIGSTOP)
    else:
        process.signal(signal.SIGTERM)
        assert process.child is not None
        process.child.wait(20)


def _node(process: NodeProcess) -> str:
    """As its folder is named."""
    return process.node.data_dir.name


def _one(role: str, how: str) -> Callable[[LiveVerdict, random.Random], Expected]:
    def happen(live: LiveVerdict, rng: random.Random) -> Expected:
        if role == "name-server":
            process = rng.choice(live.cluster.controller_processes)
        else:
            process = live.cluster.master() if role == "master" else live.slave(rng)
        _end(process, how)
        return f"{role}-{how}", _node(process)

    return happen


def quorum_lost(live: LiveVerdict, rng: random.Random) -> Expected:
    for process in rng.sample(live.cluster.controller_processes, rng.choice((2, 3))):
        process.kill()
    return "quorum-lost", "controllers"


def group_down(live: LiveVerdict, rng: random.Random) -> Expected:
    kill_all(live.cluster.brokers)
    return "group-down", GROUP


def members_away(live: LiveVerdict, rng: random.Random) -> Expected:
    """A slave was away when the others died, and comes back alone."""
    slave = live.slave(rng)
    slave.kill()

    def is_smaller() -> bool:
        group = live.cluster.group()
        return group is not None and len(group.in_sync) == 2

    live.cluster.wait_for("a smaller set", is_smaller)
    kill_all(live.cluster.brokers)
    live.cluster.launch(slave)
    live.cluster.wait_listening(live.cluster.brokers.index(slave))
    return "members-away", GROUP


def clock_skew(live: LiveVerdict, rng: random.Random) -> Expected:
    process = live.slave(rng)
    process.jump_clock("+3600")
    return "clock-skew", _node(process)


def consumers_gone(live: LiveVerdict, rng: random.Random) -> Expected:
    """A group consumed, left, and its topic has more since."""
    servers = live.cluster.name_servers

    async def leave() -> None:
        async with Producer("verdict", name_servers=servers) as producer:
            await producer.send(Message("Left", b"first"))
            options = LitePullOptions(from_where=ConsumeFromWhere.FIRST)
            reader = LitePullConsumer("leavers", name_servers=servers, options=options)
            reader.subscribe("Left")
            async with reader:
                while not await reader.poll():
                    pass
                await reader.commit()
            for _ in range(8):
                await producer.send(Message("Left", b"later"))

    asyncio.run(leave())
    return "consumers-gone", "leavers"


LIVE_INCIDENTS: Final[dict[str, Callable[[LiveVerdict, random.Random], Expected]]] = {
    **{
        f"{role}-{how}": _one(role, how)
        for role in ("master", "slave", "name-server")
        for how in ("killed", "stopped", "hung")
    },
    "quorum-lost": quorum_lost,
    "group-down": group_down,
    "members-away": members_away,
    "clock-skew": clock_skew,
    "consumers-gone": consumers_gone,
}
