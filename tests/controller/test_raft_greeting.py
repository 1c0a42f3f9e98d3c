"""The Raft port over real TCP: strangers, other passwords and other member lists are refused.

What a stranger sends costs it the connection and the node nothing: it goes on leading.
"""

import asyncio
import errno
import logging
import pickle
import struct
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from raft_cluster import BECOME, QUICK, Cluster, apply_id, free_peers, started

from batonmq.controller.config import Peer
from batonmq.controller.raft import transport
from batonmq.controller.raft.cipher import read_cipher
from batonmq.controller.raft.log import Applied, Machine
from batonmq.controller.raft.membership import Greeting, Membership, decode_greeting
from batonmq.controller.raft.node import RaftLog, RaftSettings
from batonmq.controller.raft.transport import (
    FRAME_BYTES_MAX,
    GREETING_BYTES_MAX,
    OTHER_PASSWORD,
    GuardedConnection,
)
from batonmq.mqctl.secret_rotation import advance
from batonmq.runtime.followed_files import FollowedFiles
from batonmq.runtime.secret_file import (
    PASSWORD_CHARS_MIN,
    SecretFileError,
    Secrets,
    make_password,
    passwords_text,
    read_passwords,
)

NONCE = "ab" * 32


class Attack:
    def __reduce__(self) -> tuple[Any, ...]:
        return eval, ("1/0",)


def frame(body: bytes) -> bytes:
    return struct.pack("i", len(body)) + body


def greeting_of(cluster: Cluster, **changed: Any) -> Greeting:
    own = Membership.of("", cluster.peers)
    fields = {
        "address": cluster.peers[-1].raft_address,
        "cluster": own.cluster,
        "members": own.members,
        "nonce": NONCE,
        **changed,
    }
    return Greeting(**fields)


async def cut_off(address: tuple[str, int], data: bytes) -> bytes:
    """Sends and waits for the end of the connection; what came back before it."""
    reader, writer = await asyncio.open_connection(*address)
    writer.write(data)
    try:
        async with asyncio.timeout(10):
            return await reader.read()
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


STRANGERS: dict[str, bytes] = {
    "pickle bomb": frame(zlib.compress(pickle.dumps(Attack(), 2))),
    "memo bomb": frame(zlib.compress(b"\x80\x02N" + b"r\xff\xff\xff\x7f" + b".")),
    "inflating": frame(zlib.compress(bytes(4 << 20))),
    "random bytes": frame(bytes(range(256)) * 8),
    "huge length": struct.pack("<I", 0x7FFFFFFF),
    "4 GiB": struct.pack("<I", 0xFFFFFFFF) + bytes(64),
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "nothing but zeros": bytes(4096),
    "a frame, then a flood": frame(b"x") + bytes(1 << 20),
    "half a frame and silence": struct.pack("i", 100) + b"half",
    "silence": b"",
}


async def test_strangers_are_cut_off_and_the_node_goes_on_leading(cluster, caplog, monkeypatch):
    """Each alone, then more than there may be at once; a member comes through all the same."""
    monkeypatch.setattr(transport, "_STRANGER_S", 0.3)
    largest = 0
    read = GuardedConnection._TcpConnection__processRead

    def watched_read(conn: Any) -> bool:
        nonlocal largest
        more = read(conn)
        if not conn.admitted:
            largest = max(largest, len(conn._TcpConnection__readBuffer))
        return more

    monkeypatch.setattr(GuardedConnection, "_TcpConnection__processRead", watched_read)
    leader_id, leader = await cluster.leader()
    assert isinstance(await leader.propose(BECOME, 2000), Applied)
    term = leader.status().term
    peer = next(peer for peer in cluster.peers if peer.node_id == leader_id)
    address = (peer.host, peer.raft_port)
    await asyncio.gather(*(cut_off(address, data) for data in STRANGERS.values()))
    silent = [await asyncio.open_connection(*address) for _ in range(80)]
    assert isinstance(await leader.propose(apply_id(1), 2000), Applied)
    assert (leader.status().term, cluster.leading[leader_id]) == (term, True)
    other = next(each for each in cluster.nodes if each != leader_id)
    await cluster.stop(other)
    await cluster.start(other)
    await cluster.until(lambda: len(cluster.commits[other]) == 2)
    for _, writer in silent:
        writer.close()
    assert largest <= (1 << 16) + GREETING_BYTES_MAX, "no more than a read and a greeting is kept"
    assert any("raft_stranger" in record.message for record in caplog.records)


@pytest.mark.parametrize(
    ("admitted", "allowed"), [(False, GREETING_BYTES_MAX), (True, FRAME_BYTES_MAX)]
)
def test_a_stranger_may_send_a_greeting_and_a_member_a_batch_and_nothing_longer(admitted, allowed):
    for size in (allowed, allowed + 1):
        conn, why = GuardedConnection(poller=None), list[str]()
        conn.on_refused, conn.admitted = why.append, admitted
        conn._TcpConnection__readBuffer = struct.pack("i", size)
        taken = conn._frame_size()
        GuardedConnection(poller=None).refuse("without a listener")
        assert (taken, why) == (
            (size, [])
            if size == allowed
            else (None, [f"a frame of {size} bytes, {allowed} are allowed"])
        )


async def test_of_too_many_strangers_the_oldest_makes_room(tmp_path, monkeypatch):
    """Else whoever keeps the places filled would keep members out."""
    monkeypatch.setattr(transport, "_STRANGER_S", 60.0)
    monkeypatch.setattr(transport, "_STRANGERS_MAX", 2)
    async with nodes(tmp_path, {}) as cluster:
        strangers, opened = transport_of(cluster)._unknownConnections, []
        for number in range(3):
            first = cluster.peers[0]
            opened.append(await asyncio.open_connection(first.host, first.raft_port))
            while len(strangers) < min(number + 1, 2):  # noqa: ASYNC110  another thread
                await asyncio.sleep(0.01)
        assert await opened[0][0].read() == b""
        for _, writer in opened:
            writer.close()


def test_what_a_frame_grows_to_is_limited(monkeypatch):
    monkeypatch.setattr(transport, "PLAIN_BYTES_MAX", 1_000)
    assert transport._inflate(zlib.compress(bytes(1_000))) == bytes(1_000)
    for grown in (zlib.compress(bytes(1_001)), zlib.compress(bytes(1_000))[:-1]):
        with pytest.raises(ValueError, match="more than 1000 bytes, or cut short"):
            transport._inflate(grown)


async def test_a_recorded_greeting_or_frame_is_worth_nothing(cluster):
    """The third word of the greeting must carry the number that this node drew just now."""
    dialled = min(cluster.peers, key=lambda peer: peer.raft_address)
    dials = max(cluster.peers, key=lambda peer: peer.raft_address)
    node = cluster.nodes[dialled.node_id]
    assert node._node is not None
    connections = node._node.transport._connections
    async with asyncio.timeout(10):
        while sum(c.admitted for c in connections.values()) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)  # members that only now connect would be others
    first = greeting_of(cluster, address=dials.raft_address)
    last = greeting_of(cluster, address=dials.raft_address, echo="cd" * 32)
    before = dict(connections)
    answer = await cut_off(
        (dialled.host, dialled.raft_port), frame(first.encode()) + frame(last.encode())
    )
    assert decode_greeting(answer[4:]).echo == NONCE
    assert connections == before, "the true connection stands"


async def test_only_the_side_that_dials_is_let_in_and_only_members(cluster):
    dials = max(cluster.peers, key=lambda peer: peer.raft_address)
    dialled = min(cluster.peers, key=lambda peer: peer.raft_address)
    address = (dials.host, dials.raft_port)
    for claimed in (dialled.raft_address, "127.0.0.1:9", dials.raft_address):
        greeting = greeting_of(cluster, address=claimed)
        assert await cut_off(address, frame(greeting.encode()))


async def test_a_member_that_dials_again_has_one_connection(tmp_path):
    """Over the older one nothing comes any more, though it may look open for long."""

    async def dial(cluster: Cluster) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """As n2, up to its second word, which lets messages pass."""
        dialled, own = cluster.peers[0], cluster.peers[2].raft_address
        reader, writer = await asyncio.open_connection(dialled.host, dialled.raft_port)
        writer.write(frame(greeting_of(cluster, address=own).encode()))
        (size,) = struct.unpack("i", await reader.readexactly(4))
        answer = decode_greeting(await reader.readexactly(size))
        writer.write(frame(greeting_of(cluster, address=own, echo=answer.nonce).encode()))
        return reader, writer

    async with nodes(tmp_path, {}) as cluster:
        older, first = await dial(cluster)
        dialled = transport_of(cluster)._connections
        while not any(each.admitted for each in dialled.values()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        _, second = await dial(cluster)
        await older.read()
        for writer in (first, second):
            writer.close()


async def test_a_member_that_goes_away_is_named_each_time(tmp_path, monkeypatch):
    monkeypatch.setattr(transport, "_APART_S", 0.1)
    async with nodes(tmp_path, {}, {}) as cluster:
        for _ in range(2):
            await cluster.leader()
            node = cluster.nodes["n0"]
            while any("controller n1" in each for each in node.status().problems):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await cluster.stop("n1")
            assert "does not answer on its Raft port" in await said(cluster, "n0", "controller n1")
            await cluster.start("n1")


def messages(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(record.getMessage() for record in caplog.records)


@asynccontextmanager
async def nodes(
    folder: Path, *each: dict[str, Any], peers: tuple[Peer, ...] = ()
) -> AsyncIterator[Cluster]:
    """The first one or two of three, each with its own arguments: n0, which n1 dials."""
    cluster = Cluster(folder, peers=peers or ordered_peers())
    try:
        for number, arguments in enumerate(each):
            await cluster.start(f"n{number}", **arguments)
        async with asyncio.timeout(10):
            yield cluster
    finally:
        await cluster.close()


def transport_of(cluster: Cluster) -> Any:
    node = cluster.nodes["n0"]._node
    assert node is not None
    return node.transport


def ordered_peers() -> tuple[Peer, ...]:
    """n0 is the one that all others dial."""
    ports = sorted((peer.raft_port for peer in free_peers(3)), key=lambda port: f"127.0.0.1:{port}")
    return tuple(Peer(f"n{i}", "127.0.0.1", port, port, port) for i, port in enumerate(ports))


async def said(cluster: Cluster, node_id: str, text: str) -> str:
    """Waits until that node calls it a problem."""
    while True:
        for problem in cluster.nodes[node_id].status().problems:
            if text in problem:
                return problem
        await asyncio.sleep(0.01)


async def test_nodes_with_other_member_lists_form_no_quorum_and_both_say_so(tmp_path):
    peers = ordered_peers()
    stranger = Peer("n9", "127.0.0.1", 9, 9, 9)
    async with nodes(tmp_path, {}, {"peers": (*peers[:2], stranger)}, peers=peers) as cluster:
        for node_id, other in (("n0", "n1"), ("n1", "n0")):
            problem = await said(cluster, node_id, "its members are")
            assert problem.startswith(f"controller {other} (127.0.0.1:")
            assert f"n9@{stranger.raft_address}" in problem
            assert f"n2@{peers[2].raft_address}" in problem
        assert not any(cluster.leading.values())


Answer = Callable[[Greeting, Greeting], Greeting | None]
"""The node's greeting and a true answer to it -> what it is answered."""


@asynccontextmanager
async def dialled_by_a_node(
    folder: Path, answer: Answer
) -> AsyncIterator[tuple[Cluster, list[int]]]:
    """A node whose first peer is this test, and the number of greetings of each connection."""
    cluster, counts = Cluster(folder, peers=ordered_peers()), []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        counts.append(0)
        number = len(counts) - 1
        try:
            while True:
                (size,) = struct.unpack("i", await reader.readexactly(4))
                asked = decode_greeting(await reader.readexactly(size))
                counts[number] += 1
                true = greeting_of(cluster, address=cluster.peers[0].raft_address, echo=asked.nonce)
                if (said := answer(asked, true)) is not None:
                    writer.write(frame(said.encode()))
        except (asyncio.IncompleteReadError, ConnectionError, ValueError):
            writer.close()

    first = cluster.peers[0]
    async with await asyncio.start_server(serve, first.host, first.raft_port), asyncio.timeout(10):
        await cluster.start("n1")
        try:
            yield cluster, counts
        finally:
            await cluster.close()


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (lambda asked, true: msgspec.structs.replace(true, echo="cd" * 32), "answers another one"),
        (lambda asked, true: msgspec.structs.replace(true, address=asked.address), "answers there"),
    ],
    ids=["a recorded greeting", "another member"],
)
async def test_who_answers_a_dial_must_be_there_now_and_the_one_that_was_dialled(
    tmp_path, answer, problem
):
    async with dialled_by_a_node(tmp_path, answer) as (cluster, counts):
        await said(cluster, "n1", problem)
        assert max(counts) == 1, "no second word, which lets messages pass"


async def test_a_dial_that_nobody_answers_is_begun_anew(tmp_path, monkeypatch):
    monkeypatch.setattr(transport, "_DIAL_S", 0.1)
    async with dialled_by_a_node(tmp_path, lambda asked, true: None) as (_, counts):
        while len(counts) < 3:  # noqa: ASYNC110  another thread dials
            await asyncio.sleep(0.01)


def secret(folder: Path, name: str) -> Path:
    path = folder / name
    make_password(path)
    return path


async def test_a_start_that_is_repeated_follows_the_password_file_once(tmp_path, monkeypatch):
    """It is repeated while the disk is full; each follower would read the file for good."""
    (peer,) = free_peers(1)
    path = secret(tmp_path, "secret")
    node = RaftLog(RaftSettings(peer, (peer,), QUICK, tmp_path, password_file=path), Machine())
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(node, "_open_folder", Mock(side_effect=full))
    before = set(FollowedFiles.watched)
    for _ in range(2):
        with pytest.raises(OSError, match="No space"):
            await node.start()
    assert len(FollowedFiles.watched - before) == 1
    await node.close()
    assert FollowedFiles.watched == before


async def test_a_password_changes_while_all_run_and_no_connection_ends(tmp_path):
    """Each node takes each step at another time. Then a stranger with the old one is refused, as
    one without any was before."""
    path = secret(tmp_path, "secret")
    old = read_cipher(path)

    def connections(cluster: Cluster) -> set[int]:
        transports = [node._node.transport for node in cluster.nodes.values()]
        return {id(each) for one in transports for each in one._connections.values()}

    async with started(tmp_path, password_file=path) as cluster:
        leader_id, leader = await cluster.leader()
        assert isinstance(await leader.propose(BECOME, 2000), Applied)
        await cluster.agree()
        before, number, peer = connections(cluster), 0, cluster.peers[0]
        plain = frame(greeting_of(cluster).encode())
        assert await cut_off((peer.host, peer.raft_port), plain) == frame(OTHER_PASSWORD)
        for step in ("next", "former", "done"):
            assert advance(path) == step
            for node in cluster.nodes.values():
                assert node._password is not None and node._password.reload()
                number += 1
                assert isinstance(await leader.propose(apply_id(number), 2000), Applied)
                await cluster.agree()
        assert connections(cluster) == before and cluster.leading[leader_id]
        greeting = frame(old.encrypt(greeting_of(cluster).encode()))
        assert await cut_off((peer.host, peer.raft_port), greeting) == frame(OTHER_PASSWORD)


@pytest.mark.parametrize("which", ["another", "none at the dialled", "none at the dialling"])
async def test_another_password_is_refused_and_both_sides_say_so(tmp_path, caplog, which):
    caplog.set_level(logging.INFO)
    first = {"password_file": secret(tmp_path, "one")} if which != "none at the dialled" else {}
    second = {"password_file": secret(tmp_path, "two")} if which != "none at the dialling" else {}
    async with nodes(tmp_path, first, second) as cluster:
        await said(cluster, "n1", "another Raft password (raftPasswordFile)")
        await said(cluster, "n0", "does not answer on its Raft port")
        assert not any(cluster.leading.values())
    why = "no greeting of a controller" if not first else "without the Raft password of this node"
    assert why in messages(caplog)


def test_a_recorded_frame_of_another_turn_is_refused(tmp_path):
    sender, receiver = GuardedConnection(poller=None), GuardedConnection(poller=None)
    written: list[bytes] = []
    cipher = read_cipher(secret(tmp_path, "secret"))
    sender._write = written.append
    for conn in (sender, receiver):
        conn.encryptor = cipher
    sender.admit("aa" * 32, "bb" * 32)
    receiver.admit("bb" * 32, "aa" * 32)
    for number in range(2):
        sender.send({"type": "x", "n": number})
    assert receiver._open(written[0]) == {"type": "x", "n": 0}
    with pytest.raises(ValueError, match="out of order"):
        receiver._open(written[0])
    assert receiver._open(written[1]) == {"type": "x", "n": 1}
    receiver.admit("cc" * 32, "aa" * 32)
    with pytest.raises(ValueError, match="another connection"):
        receiver._open(written[0])
    again = GuardedConnection(poller=None)
    again._write, again.encryptor = written.append, sender.encryptor
    again.admit("aa" * 32, "cc" * 32)
    again.send({"type": "x", "n": 2})
    assert receiver._open(written[2]) == {"type": "x", "n": 2}, "each connection counts from 0"


# The file.


def test_a_password_file_is_made_once_and_read(tmp_path):
    path = secret(tmp_path, "secret")
    assert path.stat().st_mode & 0o777 == 0o600
    password = read_passwords(path)
    assert len(password.used) == 44 and not password.other
    with pytest.raises(FileExistsError):
        make_password(path)
    assert read_passwords(path) == password


def test_a_password_of_two_lines_is_one_password(tmp_path):
    """As `openssl rand -base64 64` prints it, and as earlier controllers read it."""
    path = secret(tmp_path, "secret")
    two = "x" * 64 + "\n" + "y" * 22 + "=="
    path.write_text(two + "\n")
    assert read_passwords(path) == Secrets(two)
    for given in (Secrets(two, next="z" * 32), Secrets(two, former="z" * 32)):
        path.write_text(passwords_text(given))
        assert read_passwords(path) == given


def test_a_password_file_that_is_no_use_is_named(tmp_path):
    path = tmp_path / "secret"
    with pytest.raises(SecretFileError, match=r"secret: No such file"):
        read_passwords(path)
    make_password(path)
    for mode in (0o640, 0o604, 0o660):
        path.chmod(mode)
        with pytest.raises(SecretFileError, match=f"mode is {mode:04o}.*chmod 0600"):
            read_passwords(path)
    path.chmod(0o600)
    path.write_text("x" * (PASSWORD_CHARS_MIN - 1) + "\n")
    with pytest.raises(SecretFileError, match="holds 31 characters, 32 are needed"):
        read_passwords(path)
    path.write_text(f"{'x' * 32}\nnext {'y' * 31}\n")
    with pytest.raises(SecretFileError, match="holds 31 characters"):
        read_passwords(path)
    for second in ("later " + "y" * 32, f"next {'y' * 32}\nformer {'z' * 32}"):
        path.write_text(f"{'x' * 32}\n{second}\n")
        with pytest.raises(SecretFileError, match="a line with next or former"):
            read_passwords(path)
    with pytest.raises(SecretFileError, match="is no regular file"):
        read_passwords(tmp_path)


def test_a_bad_greeting_is_refused():
    good = Greeting(address="a:1", cluster="c", members=("n0@a:1",), nonce=NONCE)
    assert decode_greeting(good.encode()) == good
    for changed in ({"version": 2}, {"nonce": "ab"}, {"nonce": "x" * 64}):
        bad = Greeting(**{"address": "", "cluster": "", "members": (), "nonce": NONCE, **changed})
        with pytest.raises(ValueError):
            decode_greeting(bad.encode())
