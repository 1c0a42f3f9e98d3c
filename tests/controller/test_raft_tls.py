"""Raft over TLS: nodes prove themselves before the greeting; strangers cost them nothing."""

import asyncio
import os
import ssl
from pathlib import Path
from typing import Any

import pytest
from raft_cluster import Cluster, apply_id, started

from batonmq.controller.raft.log import Applied
from batonmq.runtime.authority import Authority
from batonmq.runtime.tls import PortTls, client_context
from batonmq.runtime.tls_listener import TlsBytes, is_hello
from tests.shared.certificates import authority, client_tls, node_tls
from tests.shared.waiting import until


@pytest.fixture
def made(tmp_path: Path) -> Authority:
    return authority(tmp_path / "tls")


def port(made: Authority, node_id: str, **keys: Any) -> PortTls:
    return node_tls(made, f"controller/{node_id}", **keys).for_raft


async def commit(cluster: Cluster, number: int) -> None:
    _, leader = await cluster.leader()
    assert isinstance(await leader.propose(apply_id(number), 5_000), Applied)


async def lead(cluster: Cluster, number: int = 1) -> None:
    await commit(cluster, number)
    await cluster.agree()


async def test_a_quorum_under_tls_elects_commits_and_catches_up(made, tmp_path):
    async with started(tmp_path, tls=port(made, "n0")) as cluster:
        await lead(cluster)
        node_id, _ = await cluster.leader()
        await cluster.stop(node_id)
        await commit(cluster, 2)
        await cluster.start(node_id)
        await lead(cluster, 3)


async def test_a_permissive_quorum_has_nodes_of_both_kinds(made, tmp_path):
    dials = {"n0": None, "n1": True, "n2": False}
    cluster = Cluster(tmp_path / "raft")
    try:
        for node_id, with_tls in dials.items():
            tls = port(made, node_id, server_mode="permissive", tls_enable=bool(with_tls))
            await cluster.start(node_id, tls=tls)
        await lead(cluster)
    finally:
        await cluster.close()
    assert not cluster.fatal


@pytest.mark.parametrize("dials", ["alert unknown ca", "takes TLS only"])
async def test_a_node_of_another_authority_or_without_tls_is_no_member(
    made, tmp_path, caplog, dials
):
    tls = port(authority(tmp_path / "other"), "n2") if "ca" in dials else None
    async with started(tmp_path / "raft", tls=port(made, "n0")) as cluster:
        await cluster.stop("n2")
        stranger = await cluster.start("n2", tls=tls)
        await until(lambda: dials in caplog.text)
        await commit(cluster, 1)
        assert stranger.status().committed_index <= 1 and not stranger.in_touch()


async def test_r58_strangers_at_an_enforcing_raft_port(made, tmp_path):
    late = str(made.issue("late.pem", ["controller/n9"], [], days=-1).path)

    async def ended(address: tuple[str, int], context: ssl.SSLContext | None, data: bytes) -> bytes:
        writer = None
        try:
            reader, writer = await asyncio.open_connection(*address, ssl=context)
            writer.write(data)
            return await asyncio.wait_for(reader.read(), 10)
        except (ConnectionError, ssl.SSLError):
            return b""
        finally:
            if writer is not None:
                writer.close()

    async with started(tmp_path / "raft", tls=port(made, "n0")) as cluster:
        await lead(cluster)
        peer = cluster.peers[0]
        address = (peer.host, peer.raft_port)
        strangers = (
            (None, b"\x10\0\0\0" + b"x" * 16),
            (None, b"\x16\x03\x01" + os.urandom(400)),
            (None, b"\x16\x03"),  # never goes on
            (None, b"\x16\x03\x01\x02\x00\x01"),
            (client_context(client_tls(made)), b"x" * 30),
            (client_context(client_tls(made, cert_path=late, key_path=late)), b"x" * 30),
        )
        # All at once: those that fall silent keep the test waiting until they are cut off.
        answers = await asyncio.gather(*(ended(address, *stranger) for stranger in strangers))
        assert all(len(answer) < 16 for answer in answers), answers
        await lead(cluster, 2)


def test_the_first_bytes_tell_a_handshake_from_a_greeting():
    assert is_hello(b"\x16\x03\x01") and is_hello(b"\x16\x03\x03\x02")
    assert is_hello(b"\x16") is None and is_hello(b"\x16\x03") is None
    for size in range(1, 8 << 10):
        assert is_hello(size.to_bytes(4, "little")) is False


def test_bytes_that_are_written_during_the_handshake_come_first(made):
    tls = node_tls(made)
    server = TlsBytes(tls.for_raft.context(), server_side=True)
    dialled = tls.for_raft.dials
    assert dialled is not None
    client = TlsBytes(dialled, server_side=False, server_hostname="127.0.0.1")
    client.write(b"first ")
    server.write(b"hello")
    got_by_server = got_by_client = b""
    for _ in range(6):
        got_by_server += server.feed(client.to_send())
        got_by_client += client.feed(server.to_send())
    client.write(b"x" * 100_000)
    got_by_server += server.feed(client.to_send())
    assert got_by_server == b"first " + b"x" * 100_000 and got_by_client == b"hello"


@pytest.mark.parametrize("stranger", ["broker/a/1", "namesrv/n1", "admin"])
def test_at_both_ends_of_raft_are_controllers_only(made, stranger):
    ours, other = port(made, "n0"), node_tls(made, stranger).for_raft
    for dials, accepts in ((ours, other), (other, ours)):
        context = dials.dials
        assert context is not None
        client = TlsBytes(
            context, server_side=False, server_hostname="127.0.0.1", admits=dials.admits
        )
        server = TlsBytes(accepts.context(), server_side=True, admits=accepts.admits)
        client.write(b"greeting")
        said = b""
        with pytest.raises(ssl.SSLError, match=f"of {stranger} may not be"):
            for _ in range(6):
                said += server.feed(client.to_send())
                client.feed(server.to_send())
        assert said == b""
