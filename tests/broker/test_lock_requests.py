"""41 and 42 at a broker: what is answered, when, and what the log has of it."""

import asyncio
import json
from pathlib import Path

from failing_disk import failing
from lone_broker import lone_broker, unconfirmed, until

from batonmq.protocol.bodies import (
    LockBatchRequestBody,
    LockBatchResponseBody,
    SubscriptionGroupConfig,
)
from batonmq.protocol.codes import ResponseCode
from batonmq.protocol.message import MessageQueue
from batonmq.remoting.command import RemotingCommand

GOLDEN = Path(__file__).parents[1] / "golden" / "java-5.3.3" / "remoting"
QUEUE = MessageQueue("T", "broker-a", 0)


def lock_body(client: str, group: str = "g", queues: int = 1) -> bytes:
    mq_set = [QUEUE] * queues
    return LockBatchRequestBody(client_id=client, consumer_group=group, mq_set=mq_set).encode()


def owned(reply: RemotingCommand) -> list[MessageQueue]:
    assert reply.code == 0, reply.remark
    return LockBatchResponseBody.decode(reply.body).lock_ok_mq_set


async def test_the_golden_lock_and_unlock(rig):
    lock, unlock = (
        json.loads((GOLDEN / f"broker-{code}.json").read_text())["examples"][0] for code in (41, 42)
    )
    reply = await rig.ask(41, body=bytes.fromhex(lock["request"]["body_hex"]))
    assert json.loads(reply.body) == json.loads(bytes.fromhex(lock["response"]["body_hex"]))
    assert (await rig.ask(42, body=bytes.fromhex(unlock["request"]["body_hex"]))).code == 0


async def test_a_second_client_gets_it_when_the_first_gives_it_back(rig):
    assert owned(await rig.ask(41, body=lock_body("a"))) == [QUEUE]
    assert owned(await rig.ask(41, body=lock_body("b"))) == []
    assert owned(await rig.ask(41, body=lock_body("a"))) == [QUEUE]
    await rig.ask(42, body=lock_body("b"))
    assert owned(await rig.ask(41, body=lock_body("b"))) == []
    await rig.ask(42, body=lock_body("a"))
    assert owned(await rig.ask(41, body=lock_body("b"))) == [QUEUE]


async def test_r30_a_lock_is_answered_when_its_record_is_confirmed(rig):
    """The log's record makes every replica know the owner; a renewal writes nothing, but it, too,
    is answered by a master only."""
    await rig.send()
    with unconfirmed(rig):
        waits = asyncio.ensure_future(rig.ask(41, body=lock_body("a")))
        await until(lambda: rig.service.tables.locks.data_version.counter > 0)
        second = await rig.ask(41, body=lock_body("b"))
        assert owned(second) == [] and not waits.done()
    assert owned(await waits) == [QUEUE]
    end = rig.service.store.max_phy_offset
    assert owned(await rig.ask(41, body=lock_body("a"))) == [QUEUE]
    assert rig.service.store.max_phy_offset == end
    rig.service.path.gate.follow(2, "127.0.0.1:1")
    for code in (41, 42):
        refused = await rig.ask(code, body=lock_body("a"))
        assert refused.code == 2 and "slave" in (refused.remark or "")


async def test_r45_a_lock_whose_record_a_full_disk_keeps_is_not_answered(tmp_path):
    """Neither is its renewal, which writes nothing."""
    async with lone_broker(tmp_path, flush_interval_consume_queue=20, slave_timeout=60_000) as rig:
        await rig.send()
        # Of the log only: a queue's writer must not find the full disk before the lock does.
        with failing("pwrite /commitlog ENOSPC"):
            waits = asyncio.ensure_future(rig.ask(41, body=lock_body("a")))
            await until(lambda: not rig.service.store.appender.is_writable)
            renewal = asyncio.ensure_future(rig.ask(41, body=lock_body("a")))
            for _ in range(3):
                await rig.ask(45)
            assert not waits.done() and not renewal.done()
        assert owned(await waits) == owned(await renewal) == [QUEUE]


async def test_locks_survive_a_restart_and_run_out(tmp_path):
    async with lone_broker(tmp_path) as rig:
        assert owned(await rig.ask(41, body=lock_body("a"))) == [QUEUE]
    async with lone_broker(tmp_path) as rig:
        assert owned(await rig.ask(41, body=lock_body("b"))) == []
        locks, now = rig.service.tables.locks, rig.service.path.clock_ms()
        locks.renew_all(now - 3_600_000)
        while locks.has_locks("g", now) or locks.data_version.counter == 0:
            rig.service.locks.tick(now)
        rig.service.locks.tick(now)
        rig.service.locks.tick(now)
        assert locks.wrapper().locks == {}
        assert owned(await rig.ask(41, body=lock_body("b"))) == [QUEUE]


async def test_bad_requests_are_refused_by_name(rig):
    for body, named in (
        (lock_body(""), "clientId"),
        (lock_body("a", ""), "consumerGroup"),
        (b"[", "LockBatchRequestBody"),
        (lock_body("c" * 1025), "clientId has 1025 characters"),
        (lock_body("c", queues=10_001), "10001 queues in mqSet"),
    ):
        for code in (41, 42):
            reply = await rig.ask(code, body=body)
            assert reply.code != 0 and named in (reply.remark or "")
    assert (await rig.ask(42, body=lock_body("c" * 1024, queues=10_000))).code == 0
    assert rig.service.store.max_phy_offset == 0


async def test_r30_a_lock_whose_record_is_refused_is_not_held(rig):
    """Else the next request would renew it, without a record, and no slave would know the owner."""
    await rig.send()
    store = rig.service.store
    store.appender.pause("no disk space")
    refused = await rig.ask(41, body=lock_body("a"))
    assert refused.code == ResponseCode.SERVICE_NOT_AVAILABLE
    store.appender.pause("")
    end = store.max_phy_offset
    assert owned(await rig.ask(41, body=lock_body("a"))) == [QUEUE]
    assert store.max_phy_offset > end, "its record"

    store.appender.pause("no disk space")
    refused = await rig.ask(42, body=lock_body("a"))
    assert refused.code == ResponseCode.SERVICE_NOT_AVAILABLE
    store.appender.pause("")
    assert rig.service.tables.locks.wrapper().locks == {"g": {"a": [("T", 0)]}}


async def test_r45_locks_that_have_expired_wait_for_disk_space(rig, caplog):
    """A tick that raises ends the process."""
    groups = ("g", "h")
    for group in groups:
        assert owned(await rig.ask(41, body=lock_body("a", group))) == [QUEUE]
    locks, now = rig.service.tables.locks, rig.service.path.clock_ms()
    locks.renew_all(now - 3_600_000)
    rig.service.store.appender.pause("no disk space")
    caplog.set_level("INFO")
    for _ in range(4):
        rig.service.locks.tick(now + 3_600_000)
    assert locks.wrapper().locks == {group: {"a": [("T", 0)]} for group in groups}
    waits = [line for line in caplog.messages if line.startswith("expired_locks_wait")]
    assert 0 < len(waits) <= 4, "one a tick, not one a group"
    rig.service.store.appender.pause("")
    for _ in range(4):
        rig.service.locks.tick(now + 3_600_000)
    assert locks.wrapper().locks == {}


async def test_r58_invented_names_leave_places_for_real_queues(rig, monkeypatch, caplog):
    """A stranger chooses the names of groups, topics and queues."""

    async def lock(client: str, group: str, queues: list[MessageQueue]) -> list[MessageQueue]:
        asked = LockBatchRequestBody(client_id=client, consumer_group=group, mq_set=queues)
        return owned(await rig.ask(41, body=asked.encode()))

    def invented(topic: str, first: int = 0) -> list[MessageQueue]:
        return [MessageQueue(topic, "broker-a", number) for number in range(first, first + 6)]

    monkeypatch.setattr("batonmq.broker.tables.queue_locks.INVENTED_MAX", 4)
    monkeypatch.setattr("batonmq.broker.tables.queue_locks.LOCKS_MAX", 6)
    await rig.send()
    rig.service.topics.put_group(SubscriptionGroupConfig(group_name="g"))
    assert len(await lock("stranger", "g", invented("X"))) == 4
    assert await lock("stranger", "g", invented("T", first=1000)) == []
    assert await lock("stranger", "invented", [QUEUE]) == []
    assert caplog.text.count("queue_locks_full") == 1, "named once, not at each request"
    assert await lock("a", "g", [QUEUE]) == [QUEUE]
    assert len(await lock("stranger", "g", invented("X"))) == 4, "what it has is renewed"
    # The whole table has a limit, too: what is given back makes a place.
    real = [MessageQueue("T", "broker-a", number) for number in range(3)]
    assert len(await lock("a", "g", real)) == 2
    await rig.ask(42, body=lock_body("a"))
    assert len(await lock("a", "g", real)) == 2
