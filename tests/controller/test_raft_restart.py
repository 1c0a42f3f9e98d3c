"""RaftLog over restarts: of one node, of all at once, cleanly or by kill -9 (G7).

What was acknowledged is there again, and states are equal.
"""

import asyncio
import json
import logging
import os
import random
import select
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Self

import pytest
from raft_cluster import QUICK, Cluster, apply_id, free_peers, started

from batonmq.controller.raft.journal import JournalDamage
from batonmq.controller.raft.log import Applied, Machine
from batonmq.controller.raft.node import RaftLog, RaftSettings
from batonmq.controller.raft.snapshot import BadSnapshot
from batonmq.controller.rules.commands import BecomeController

ROUNDS = 60 if os.environ.get("BATONMQ_SOAK") == "1" else 8
LIMIT_S = 30
ROOT = Path(__file__).parents[2]


async def propose_ids(cluster: Cluster, first: int, last: int) -> None:
    for number in range(first, last + 1):
        outcome, tries = None, 0
        while not isinstance(outcome, Applied):
            _, leader = await cluster.leader()
            outcome = await leader.propose(apply_id(number), 2000)
            tries += 1
        assert outcome.result.ok or tries > 1, outcome


async def lead_anew(cluster: Cluster, nonce: str) -> int:
    """Proposes what a gate would; the controller epoch. A busy machine may cost a leader its lead:
    then the same request goes to the next one."""
    while True:
        _, leader = await cluster.leader()
        request = BecomeController(node="n", nonce=nonce, request_id=nonce)
        outcome = await leader.propose(request, 2000)
        if isinstance(outcome, Applied):
            return outcome.result.controller_epoch


async def stop_all(cluster: Cluster) -> str:
    """All end; the digest of the state they held."""
    await cluster.agree()
    (digest,) = {machine.state.digest() for machine in cluster.machines.values()}
    await cluster.close()
    return digest


async def test_a_shortened_log_and_its_snapshot_are_resumed(tmp_path):
    """With compaction after each 10 entries; a commit of the second life begins at the snapshot."""
    async with started(tmp_path, compact_after_entries=10) as cluster:
        assert await lead_anew(cluster, "first") == 1
        await propose_ids(cluster, 1, 45)
        digest = await stop_all(cluster)
        for node_id in ("n0", "n1", "n2"):
            assert (cluster.folder / node_id / "snapshot").exists()
        await cluster.start_all()
        await cluster.agree()
        assert cluster.machines["n2"].state.digest() == digest
        assert cluster.machines["n2"].state.next_broker_id("broker-a") == 46
        for commits in cluster.commits.values():
            assert commits[0].command is None, "the snapshot comes first"
            assert commits[0].raft_index > 10
        assert await lead_anew(cluster, "second") == 2
        node = cluster.nodes["n0"]
        await cluster.stop("n0")  # else it may just be shortening its log again
        assert node._journal is not None and node._snapshots is not None
        assert node._snapshots.size_bytes == (cluster.folder / "n0" / "snapshot").stat().st_size
        assert node._journal.size_bytes == (cluster.folder / "n0" / "journal").stat().st_size


async def test_term_and_vote_outlive_the_node(cluster, tmp_path):
    await lead_anew(cluster, "first")
    await stop_all(cluster)
    stored = {
        node_id: json.loads((tmp_path / node_id / "meta").read_bytes().partition(b" ")[2])
        for node_id in ("n0", "n1", "n2")
    }
    # One of them may have stood in a newer term while the others ended.
    votes = Counter((each["term"], each["votedFor"]) for each in stored.values())
    assert max(count for (_, vote), count in votes.items() if vote is not None) >= 2
    for node_id, meta in stored.items():
        node = await cluster.start(node_id)
        status = node.status()
        assert status.term >= meta["term"]
        assert node._node is not None
        if status.term == meta["term"]:
            journal = node._node._SyncObj__raftLog
            assert journal.getVotedForNodeId() == meta["votedFor"]
    await cluster.leader()


async def test_an_emptied_node_elects_nobody_over_the_one_that_holds_the_log(cluster):
    """1. Entries are acknowledged by A and C; B was down. 2. A stops, C loses its folder. 3. B asks
    C for its vote: together they would be a majority that forgot the entries. C waits. 4. A comes
    back, is elected by B, and C gets everything."""
    await lead_anew(cluster, "first")
    await cluster.agree()
    a, _ = await cluster.leader()
    b, c = (node_id for node_id in cluster.nodes if node_id != a)
    await cluster.stop(b)
    await propose_ids(cluster, 1, 9)
    digest = cluster.machines[a].state.digest()
    await cluster.stop(c)
    await cluster.stop(a)
    shutil.rmtree(cluster.folder / c)
    loop, asked = asyncio.get_running_loop(), asyncio.Event()
    told = logging.Handler()
    told.emit = lambda _: loop.call_soon_threadsafe(asked.set)
    logging.getLogger("batonmq.controller.raft.election_messages").addHandler(told)
    await cluster.start(b)
    node = await cluster.start(c)
    async with asyncio.timeout(10):
        await asked.wait()
    logging.getLogger("batonmq.controller.raft.election_messages").removeHandler(told)
    assert not any(cluster.leading.values())
    (problem,) = [each for each in node.status().problems if "empty folder" in each]
    assert "gives no vote until a leader has sent it the log" in problem
    await cluster.start(a)
    leader_id, _ = await cluster.leader()
    assert leader_id == a
    await cluster.agree()
    assert not any("empty folder" in each for each in node.status().problems)
    assert cluster.machines[c].state.digest() == digest
    assert node._journal is not None and not node._journal.joining


async def test_a_snapshot_that_is_damaged_is_named_at_the_start(tmp_path):
    (peer,) = free_peers(1)
    cluster = Cluster(tmp_path, 1, peers=(peer,), compact_after_entries=5)
    await cluster.start_all()
    await lead_anew(cluster, "first")
    await propose_ids(cluster, 1, 12)
    await cluster.close()
    path = tmp_path / "n0" / "snapshot"
    path.write_bytes(path.read_bytes()[:-1])
    node = RaftLog(RaftSettings(peer, (peer,), QUICK, tmp_path / "n0"), Machine())
    with pytest.raises(JournalDamage, match="snapshot: no whole snapshot: checksum") as raised:
        await node.start()
    assert isinstance(raised.value.__cause__, BadSnapshot)
    assert "empty" in str(raised.value), "what the operator can do"
    await node.close()
    path.unlink()
    node = RaftLog(RaftSettings(peer, (peer,), QUICK, tmp_path / "n0"), Machine())
    with pytest.raises(JournalDamage, match="no snapshot holds what came before"):
        await node.start()
    await node.close()


async def test_g7_a_folder_of_another_group_of_controllers_replaces_no_log(tmp_path):
    """Clusters of `batonmq up` have the same name and the same member ids. One controller gets the
    folder of another cluster, by a backup say; its term is newer, and its log longer."""
    peers = free_peers(3)
    for _ in range(3):
        async with started(tmp_path / "foreign", peers=peers) as cluster:
            await lead_anew(cluster, "of-the-others")
            await propose_ids(cluster, 1, 9)
            await cluster.agree()
    async with started(tmp_path / "own", peers=peers) as cluster:
        await lead_anew(cluster, "of-this-one")
        await cluster.agree()
    shutil.rmtree(tmp_path / "own" / "n1")
    shutil.copytree(tmp_path / "foreign" / "n1", tmp_path / "own" / "n1")
    async with started(tmp_path / "own", peers=peers) as cluster:
        names, number = ("of-this-one", "of-the-others"), 0
        while any("its log is" not in "".join(n.status().problems) for n in cluster.nodes.values()):
            number += 1
            await propose_ids(cluster, number, number)
        assert cluster.machines["n0"].state.log_name == names[0]
        (problem,) = [each for each in cluster.nodes["n0"].status().problems if "its log" in each]
        assert problem.startswith("controller n1 (") and all(name in problem for name in names)
        assert "Move that one aside" in problem


@pytest.mark.parametrize(("name", "compact_after"), [("journal", 1_000), ("snapshot", 5)])
async def test_g7_a_file_of_another_log_is_refused_and_the_rest_of_the_folder_stays(
    name, compact_after, tmp_path
):
    (peer,) = free_peers(1)
    for log in ("foreign", "own"):
        cluster = Cluster(tmp_path / log, 1, peers=(peer,), compact_after_entries=compact_after)
        await cluster.start_all()
        await lead_anew(cluster, f"{log}-log")
        await propose_ids(cluster, 1, 20 if log == "foreign" else 12)
        await cluster.close()
    own = tmp_path / "own" / "n0"
    shutil.copyfile(tmp_path / "foreign" / "n0" / name, own / name)
    before = {path.name: path.read_bytes() for path in own.iterdir()}
    with pytest.raises(JournalDamage, match=f"{name}: it is not of this folder's log own-log"):
        await cluster.start("n0")
    await cluster.close()
    assert {path.name: path.read_bytes() for path in own.iterdir()} == before


async def test_a_log_that_begins_again_beside_the_file_of_members_gets_a_new_name(tmp_path):
    """An operator began again by removing all files but `members`, which has the old log's name."""
    async with started(tmp_path) as cluster:
        for name in ("before", "after"):
            await lead_anew(cluster, name)
            await stop_all(cluster)
            for path in tmp_path.glob("n?/*") if name == "before" else ():
                if path.name != "members":
                    path.unlink()
            await cluster.start_all()
        await cluster.agree()
        assert cluster.machines["n0"].state.log_name == "after"
    assert json.loads((tmp_path / "n0" / "members").read_bytes())["log"] == "after"


class KilledNodes:
    """Three forked nodes under load. `acked` are the names of the groups that they acknowledged."""

    def __init__(self, folder: Path, ports: list[int]) -> None:
        self.acked: set[str] = set()
        self.died: list[str] = []
        self.kills = 0
        self.opened = (-1, 0)
        """Node and controller epoch of the newest open gate."""
        self._opened_ms = 0
        """When that gate was known to be open."""
        self.wrongly_open: list[str] = []
        """Reports of nodes whose gate was still open after a newer one had opened."""
        self._errors = (folder / "stderr").open("wb")
        self._buffer = b""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.controller.raft_zygote", str(folder), *map(str, ports)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )

    def order(self, verb: str, *numbers: int) -> None:
        """`start` or `kill` these nodes; returns when it is done and all older lines were read."""
        assert self._process.stdin is not None
        self.kills += len(numbers) * (verb == "kill")
        self._process.stdin.write(f"{verb} {' '.join(map(str, numbers))}\n".encode())
        self._process.stdin.flush()
        while self._next_line() != "done":
            pass

    def wait_acks(self, more: int) -> None:
        goal = len(self.acked) + more
        while len(self.acked) < goal:
            self._next_line()

    def __enter__(self) -> Self:
        self.order("start", 0, 1, 2)
        return self

    def __exit__(self, *_: object) -> None:
        """They end as by a kill, with the process that forked them."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(10)
        self._process.stdout.close()
        self._errors.close()

    def wait_open(self, but: int = -1) -> tuple[int, int]:
        """Waits until a node other than `but` reports an open gate; the node and its epoch. The
        first acknowledgements may be read before any such report."""
        while self.opened[0] in (-1, but):
            self._next_line()
        return self.opened

    def _next_line(self) -> str:
        assert self._process.stdout is not None
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._process.stdout], [], [], LIMIT_S)
            assert ready, f"nothing for {LIMIT_S} s; {len(self.acked)} acknowledged so far"
            chunk = os.read(self._process.stdout.fileno(), 1 << 16)
            assert chunk, "the nodes' process ended"
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        verb, _, rest = line.decode().partition(" ")
        if verb == "ack":
            self.acked.add(rest)
        elif verb == "open":
            number, epoch, before_ms, after_ms = map(int, rest.split())
            if epoch > self.opened[1]:
                self.opened, self._opened_ms = (number, epoch), after_ms
            elif epoch < self.opened[1] and before_ms > self._opened_ms:
                # One that looked before, and was stopped before it could write, is right.
                self.wrongly_open.append(rest)
        elif verb == "died":
            self.died.append(rest)
        return verb


async def test_g7_kill_9_of_one_some_and_all_nodes_loses_nothing_acknowledged(tmp_path):
    """Under load, with a snapshot every 40 entries. All three are killed at once in every round,
    and before that, in every other one, one or two of them alone."""
    rng = random.Random(20260117)
    peers = free_peers(3)
    with KilledNodes(tmp_path, [peer.raft_port for peer in peers]) as nodes:
        for number in range(ROUNDS):
            if number:
                nodes.order("start", 0, 1, 2)
            nodes.wait_acks(rng.randrange(5, 60))
            if number % 2:
                some = rng.sample(range(3), rng.randrange(1, 3))
                nodes.order("kill", *some)
                nodes.order("start", *some)
                nodes.wait_acks(rng.randrange(5, 60))
            nodes.order("kill", 0, 1, 2)
    assert nodes.died == []

    async with started(tmp_path, peers=peers) as cluster:
        await cluster.agree()
        for machine in cluster.machines.values():
            assert nodes.acked - set(machine.state.broker_names()) == set()
    print(f"{nodes.kills} kills, {len(nodes.acked)} acknowledged, none missing, states equal")
    assert nodes.kills >= 3.5 * ROUNDS


def test_r8_a_leader_that_was_stopped_wakes_behind_a_closed_gate(tmp_path):
    """SIGSTOP of the leader under load; another one leads; the old one wakes and believes to lead
    until its Raft thread looks. What asks it in that moment finds the gate closed."""
    with KilledNodes(tmp_path, [peer.raft_port for peer in free_peers(3)]) as nodes:
        for _ in range(3):
            nodes.wait_acks(10)
            leader, _ = nodes.wait_open()
            nodes.order("stop", leader)
            nodes.wait_open(but=leader)
            nodes.wait_acks(5)
            nodes.order("cont", leader)
            nodes.wait_acks(20)
        nodes.order("kill", 0, 1, 2)
    assert nodes.wrongly_open == [] and nodes.died == []


def test_a_full_disk_ends_that_node_and_names_the_file_while_the_others_go_on(tmp_path):
    """The kernel refuses the leader's next write; that process ends with code 70."""
    with KilledNodes(tmp_path, [peer.raft_port for peer in free_peers(3)]) as nodes:
        nodes.wait_acks(20)
        full, _ = nodes.wait_open()
        nodes.order("fill", full)
        nodes.order("reap", full)
        nodes.wait_open(but=full)
        nodes.wait_acks(20)
        nodes.order("kill", *({0, 1, 2} - {full}))
    assert nodes.died == [f"{full} {70 << 8}"]
    told = (tmp_path / "stderr").read_text()
    assert f"{tmp_path}/n{full}/" in told and "File too large" in told, told
