"""Replication over TLS: replicas prove themselves by a certificate, strangers get no byte."""

import asyncio
import dataclasses
import logging
import os
import ssl
from pathlib import Path

import pytest

from batonmq.runtime import tls_listener
from batonmq.runtime.authority import Authority
from batonmq.runtime.tls import client_context
from tests.ha.conftest import until
from tests.shared.certificates import authority, client_tls, node_tls


@pytest.fixture
def made(tmp_path: Path) -> Authority:
    return authority(tmp_path / "tls")


def nodes(group, made, **keys):
    for broker_id in (1, 2, 3):
        tls = node_tls(made, f"broker/broker-a/{broker_id}", **keys)
        group.tls[broker_id] = tls.for_replicas("broker-a")


async def test_roles_change_and_logs_are_equal_under_tls(group, made):
    nodes(group, made)
    one, two = await group.add(1), await group.add(2)
    for master, slave in ((one, two), (two, one), (one, two)):
        await group.elect(master, 1, 2)
        await until(lambda m=master: m.ha.required_set_whole)
        master.put(400)
        await group.caught_up(master, slave)
    assert one.log_bytes() == two.log_bytes() and one.readable == 1_200


async def test_a_permissive_master_has_slaves_of_both_kinds(group, made):
    nodes(group, made, server_mode="permissive", tls_enable=True)
    group.tls[2] = node_tls(made, "broker/broker-a/2", server_mode="permissive").for_replicas(
        "broker-a"
    )
    assert group.tls[2].dials is None and group.tls[3].dials is not None
    one, two, three = [await group.add(broker_id) for broker_id in (1, 2, 3)]
    await group.elect(one)
    await until(lambda: one.ha.in_sync_count == 3)
    one.put(10)
    await group.caught_up(one, two, three)


async def test_a_replica_of_another_authority_and_a_plain_one_never_follow(
    group, made, tmp_path, caplog
):
    other = authority(tmp_path / "other")
    caplog.set_level(logging.DEBUG, logger="batonmq.ha")
    nodes(group, made)
    group.tls[2] = node_tls(other, "broker/broker-a/2").for_replicas("broker-a")
    del group.tls[3]
    one, two, three = [await group.add(broker_id) for broker_id in (1, 2, 3)]
    await group.elect(one)
    one.put(10)
    await until(lambda: caplog.text.count("ha_dial_failed") >= 3)
    await until(lambda: caplog.text.count("ha_master_lost") >= 3)
    assert two.readable == three.readable == 0 and one.ha.required_set == {1}


async def test_r58_a_stranger_at_an_enforcing_port_gets_no_byte_of_the_log(
    group, made, monkeypatch
):
    """Plain, without a certificate, with one that has ended: the connection ends, and replication
    continues."""
    late = str(made.issue("late.pem", ["broker/broker-a/9"], [], days=-1).path)

    async def answer(port: int, context: ssl.SSLContext | None, data: bytes) -> bytes:
        writer = None
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
            writer.write(data)
            return await asyncio.wait_for(reader.read(), 10)
        except (ConnectionError, ssl.SSLError):
            return b""
        finally:
            if writer is not None:
                writer.close()

    nodes(group, made)
    one, two = await group.pair()
    one.put(10)
    for context in (
        None,
        client_context(client_tls(made)),
        client_context(client_tls(made, cert_path=late, key_path=late)),
    ):
        assert await answer(one.ha.port, context, b"\0" * 12) == b""
    # Half a greeting is waited for. From here on every true replica is connected.
    monkeypatch.setattr(tls_listener, "PROVE_S", 0.5)
    for garbage in (b"\x16\x03\x01" + os.urandom(500), b"\x16" * 30_000):
        alert = await answer(one.ha.port, None, garbage)
        assert len(alert) < 16
    one.put(10)
    await group.caught_up(one, two)
    assert one.ha.in_sync_count == 2


async def test_a_certificate_of_another_group_or_role_gets_no_byte(group, made, caplog):
    caplog.set_level(logging.WARNING, logger="batonmq.ha")
    nodes(group, made)
    names = {1: "broker/broker-a/1", 2: "broker/broker-b/2", 3: "controller/n0"}
    for broker_id, name in names.items():
        # what a thief does: it takes any master, only the true replica is particular
        tls = node_tls(made, name)
        group.tls[broker_id] = tls.for_replicas("broker-a")
        if broker_id != 1:
            group.tls[broker_id] = dataclasses.replace(tls.for_raft, admits=lambda _: True)
    one, two, three = [await group.add(broker_id) for broker_id in (1, 2, 3)]
    await group.elect(one)
    one.put(10)
    for name in (names[2], names[3]):
        await until(lambda n=name: f"the certificate of {n} may not be" in caplog.text)
    assert two.readable == three.readable == 0 and one.ha.required_set == {1}


async def test_a_replica_follows_no_master_with_the_certificate_of_another_group(
    group, made, caplog
):
    caplog.set_level(logging.WARNING, logger="batonmq.ha")
    rogue, true = node_tls(made, "broker/broker-b/1"), node_tls(made, "broker/broker-a/2")
    group.tls[1] = dataclasses.replace(rogue.for_raft, admits=lambda _: True)
    group.tls[2] = true.for_replicas("broker-a")
    one, two = await group.add(1), await group.add(2)
    await group.elect(one)
    one.put(10)
    await until(lambda: "the certificate of broker/broker-b/1 may not be" in caplog.text)
    assert two.readable == 0
