"""A topic that is deleted and made again begins anew, for its groups too (R39)."""

from __future__ import annotations

from pathlib import Path

from lone_broker import Rig, run_with_broker

from batonmq.protocol.codes import ResponseCode
from batonmq.store.consumer_offset import ConsumerOffsetManager
from batonmq.store.topic_config import topic_config

MAKE = {"topic": "T", "readQueueNums": "1", "writeQueueNums": "1", "perm": "6"}
WHERE = {"consumerGroup": "g", "topic": "T", "queueId": "0"}


async def consumed_and_deleted(rig: Rig) -> None:
    assert (await rig.ask(17, MAKE)).code == ResponseCode.SUCCESS
    for n in range(5):
        assert (await rig.send(body=b"old%d" % n)).code == ResponseCode.SUCCESS
    assert (await rig.ask(15, WHERE | {"commitOffset": "5"})).code == ResponseCode.SUCCESS
    assert (await rig.ask(215, {"topic": "T"})).code == ResponseCode.SUCCESS


async def made_again(rig: Rig) -> None:
    assert (await rig.ask(17, MAKE)).code == ResponseCode.SUCCESS
    for n in range(3):
        reply = await rig.send(body=b"new%d" % n)
        assert reply.ext["queueOffset"] == str(n)
    reply = await rig.ask(14, WHERE)
    assert reply.ext["offset"] == "0"
    found = await rig.pull(offset=0)
    assert found.code == ResponseCode.SUCCESS
    assert [found.body.count(b"new%d" % n) for n in range(3)] == [1, 1, 1]
    assert b"old" not in found.body


def test_r39_groups_read_a_topic_made_again_from_its_first_message(tmp_path: Path) -> None:
    async def play(rig: Rig) -> None:
        await consumed_and_deleted(rig)
        await made_again(rig)

    run_with_broker(tmp_path, play)


def test_r39_also_after_a_restart(tmp_path: Path) -> None:
    run_with_broker(tmp_path, consumed_and_deleted)
    run_with_broker(tmp_path, made_again)


def test_r39_a_consumer_that_goes_on_commits_nothing_in_a_deleted_topic(tmp_path: Path) -> None:
    async def play(rig: Rig) -> None:
        await consumed_and_deleted(rig)
        late = await rig.ask(15, WHERE | {"commitOffset": "5"})
        assert late.code == ResponseCode.TOPIC_NOT_EXIST
        await made_again(rig)

    run_with_broker(tmp_path, play)


def test_r39_retry_topics_of_pop_go_with_it_and_those_of_groups_stay(tmp_path: Path) -> None:
    """As in Java: `%RETRY%g` and `%DLQ%g` hold messages of all topics of the group."""

    async def play(rig: Rig) -> None:
        topics = rig.service.topics
        for name in ("%RETRY%g+T", "%RETRY%g_T", "%RETRY%h_T", "%RETRY%g", "%DLQ%g"):
            topics.put_topic(topic_config(name, 1))
            rig.service.tables.offsets.commit("g", name, 0, 1)
        for name in ("%RETRY%g_T", "%RETRY%g"):
            assert (await rig.send(name)).code == ResponseCode.SUCCESS
        await consumed_and_deleted(rig)
        left = {name for name in topics.topics.table if name.startswith("%")}
        assert left == {"%RETRY%h_T", "%RETRY%g", "%DLQ%g"}
        queries, offsets = rig.service.store.queries, rig.service.tables.offsets
        assert queries.queue_ids("%RETRY%g_T") == queries.queue_ids("T") == []
        assert queries.queue_ids("%RETRY%g") == [0]
        assert {key for key in offsets.table if key.endswith("@g")} == {
            "%RETRY%h_T@g",
            "%RETRY%g@g",
            "%DLQ%g@g",
        }

    run_with_broker(tmp_path, play)


def test_r39_a_replica_that_begins_anew_forgets_what_the_log_will_not_delete(
    tmp_path: Path,
) -> None:
    async def play(rig: Rig) -> None:
        service = rig.service
        assert (await rig.ask(17, MAKE)).code == ResponseCode.SUCCESS
        assert (await rig.send()).code == ResponseCode.SUCCESS
        assert (await rig.ask(15, WHERE | {"commitOffset": "1"})).code == ResponseCode.SUCCESS
        service.store.slave_log.reset_for_empty_start(1 << 20)
        assert not service.tables.offsets.table
        again = ConsumerOffsetManager(tmp_path / "config" / "consumerOffset.json")
        again.load()
        assert not again.table

    run_with_broker(tmp_path, play)
