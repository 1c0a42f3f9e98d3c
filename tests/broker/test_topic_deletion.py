"""A topic that is deleted and created again begins at 0, for its groups too (R39)."""

import asyncio
import shutil

import pytest
from lone_broker import Rig, lone_broker, make_group, run_with_broker, unconfirmed, until

from batonmq.broker.tables import old_positions
from batonmq.broker.tables.consumer_offset import ConsumerOffsetManager
from batonmq.broker.tables.old_positions import Deletions, OldPositions
from batonmq.broker.tables.topic_config import topic_config
from batonmq.protocol.codes import ResponseCode

MAKE = {"topic": "T", "readQueueNums": "1", "writeQueueNums": "1", "perm": "6"}


async def consumed_and_deleted(rig: Rig) -> None:
    assert (await rig.ask(17, MAKE)).code == ResponseCode.SUCCESS
    for n in range(5):
        assert (await rig.send(body=b"old%d" % n)).code == ResponseCode.SUCCESS
    await make_group(rig)
    assert (await rig.commit(5)).code == ResponseCode.SUCCESS
    assert (await rig.ask(215, {"topic": "T"})).code == ResponseCode.SUCCESS


async def made_again(rig: Rig) -> None:
    assert (await rig.ask(17, MAKE)).code == ResponseCode.SUCCESS
    for n in range(3):
        reply = await rig.send(body=b"new%d" % n)
        assert reply.ext["queueOffset"] == str(n)
    reply = await rig.committed()
    assert reply.ext["offset"] == "0"
    found = await rig.pull(offset=0)
    assert found.code == ResponseCode.SUCCESS
    assert [found.body.count(b"new%d" % n) for n in range(3)] == [1, 1, 1]
    assert b"old" not in found.body


async def test_r39_groups_read_a_topic_made_again_from_its_first_message(rig):
    await consumed_and_deleted(rig)
    await made_again(rig)


def test_r39_also_after_a_restart(tmp_path):
    run_with_broker(tmp_path, consumed_and_deleted)
    run_with_broker(tmp_path, made_again)


async def test_r39_a_start_that_reads_the_deletion_again_keeps_the_progress_since(tmp_path):
    """The machine stops when the offsets are stored, and no checkpoint has been since."""

    async with lone_broker(tmp_path / "it") as rig:
        await consumed_and_deleted(rig)
        await made_again(rig)
        assert (await rig.commit(2)).code == ResponseCode.SUCCESS
        for write in rig.service.tables.writes_due():
            write()
        shutil.copytree(tmp_path / "it", tmp_path / "later")
    async with lone_broker(tmp_path / "later") as rig:
        assert (await rig.committed()).ext["offset"] == "2"
        found = await rig.pull(offset=2)
        assert found.body.count(b"new2") == 1 and b"old" not in found.body


async def test_r39_a_running_consumer_commits_nothing_in_a_deleted_topic(rig):
    await consumed_and_deleted(rig)
    late = await rig.commit(5)
    assert late.code == ResponseCode.TOPIC_NOT_EXIST
    await made_again(rig)


async def read_on(rig: Rig, offset: int, *, suspend_ms: int = 0) -> list[bytes]:
    """What a consumer gets that pulls from `offset` on, goes where it is sent, and commits along
    with its pulls, as far as there is something."""
    got: list[bytes] = []
    for _ in range(20):
        reply = await rig.pull(offset=offset, suspend_ms=suspend_ms, commit=offset, count=1)
        if reply.code == ResponseCode.SUCCESS:
            got.append(reply.body[reply.body.index(b"new") :][:4])
        elif reply.code != ResponseCode.PULL_OFFSET_MOVED:
            return got
        offset = int(reply.ext["nextBeginOffset"])
    raise AssertionError(f"sent to and fro, {got}")


@pytest.mark.parametrize("count", [1, 4, 5, 6, 9])
@pytest.mark.parametrize("commits_first", [False, True])
async def test_r39_a_running_consumer_at_its_old_offset_reads_the_new_messages(
    rig, count, commits_first
):
    """It was at 5; the topic made again has fewer messages, as many, or more."""
    await consumed_and_deleted(rig)
    assert (await rig.ask(17, MAKE)).code == ResponseCode.SUCCESS
    for n in range(count):
        assert (await rig.send(body=b"new%d" % n)).code == ResponseCode.SUCCESS
    if commits_first:
        late = await rig.commit(5)
        assert late.code == ResponseCode.INVALID_PARAMETER
    assert await read_on(rig, 5) == [b"new%d" % n for n in range(count)]
    assert rig.service.tables.offsets.query("g", "T", 0) == count
    # From here on positions count: a consumer that restarts reads nothing twice.
    assert await read_on(rig, count) == []
    assert await read_on(rig, count - 1) == [b"new%d" % (count - 1)]


@pytest.mark.parametrize("asks", ["where the group is", "for the first message"])
async def test_r39_a_group_that_began_again_may_set_any_offset(rig, asks):
    """A consumer that asks, and finds nothing, may begin at the end (CONSUME_FROM_LAST_OFFSET)."""
    await consumed_and_deleted(rig)
    assert (await rig.ask(17, MAKE)).code == ResponseCode.SUCCESS
    for n in range(9):
        assert (await rig.send(body=b"new%d" % n)).code == ResponseCode.SUCCESS
    if asks == "where the group is":
        await rig.committed()
    else:
        await rig.pull(offset=0)
    assert (await rig.commit(7)).code == ResponseCode.SUCCESS
    assert await read_on(rig, 7) == [b"new7", b"new8"]


async def test_r31_a_topic_known_to_senders_is_closed_while_its_deletion_waits(rig):
    assert (await rig.send()).code == ResponseCode.SUCCESS
    with unconfirmed(rig):
        rig.service.topics.delete_topic("T")
        refused = await rig.send(body=b"behind the deletion")
        assert refused.code == ResponseCode.SYSTEM_BUSY
        assert "being deleted" in (refused.remark or "")
    assert (await rig.send(body=b"a new topic of that name")).code == ResponseCode.SUCCESS
    assert rig.service.tables.topics.get("T") is not None


async def test_r39_no_pull_reads_a_topic_whose_deletion_is_in_the_log(rig):
    """A new master has it from one that answered it, and cannot confirm it yet."""
    assert (await rig.ask(17, MAKE)).code == ResponseCode.SUCCESS
    assert (await rig.send(body=b"old")).code == ResponseCode.SUCCESS
    with unconfirmed(rig):
        deletion = asyncio.create_task(rig.ask(215, {"topic": "T"}))
        await until(lambda: "T" in rig.service.store.deleting_topics)
        reply = await rig.pull(offset=0)
        assert reply.code == ResponseCode.PULL_NOT_FOUND
        assert (reply.body, reply.ext["nextBeginOffset"]) == (b"", "0")
        waiting = asyncio.create_task(rig.pull(offset=1, suspend_ms=60_000))
        await until(lambda: rig.service.pull.held == 1)
        rig.service.pull.arrived("T", 0, 2)  # as a sweep finds it
        assert rig.service.pull.held == 1
    assert (await deletion).code == ResponseCode.SUCCESS
    reply = await waiting
    assert (reply.code, reply.ext["nextBeginOffset"]) == (ResponseCode.PULL_OFFSET_MOVED, "0")


async def test_r39_a_pull_that_waits_in_a_deleted_queue_is_answered(rig):
    """Else it would wait for the message behind its old offset."""
    assert (await rig.ask(17, MAKE)).code == ResponseCode.SUCCESS
    for _ in range(5):
        assert (await rig.send(body=b"old")).code == ResponseCode.SUCCESS
    waiting = asyncio.create_task(rig.pull(offset=5, suspend_ms=60_000))
    await until(lambda: rig.service.pull.held == 1)
    assert (await rig.ask(215, {"topic": "T"})).code == ResponseCode.SUCCESS
    reply = await waiting
    assert reply.code == ResponseCode.PULL_OFFSET_MOVED
    assert reply.ext["nextBeginOffset"] == "0"


def test_r39_what_is_kept_of_deleted_topics_is_bounded(monkeypatch):
    monkeypatch.setattr(old_positions, "_DELETIONS_MAX", 16)
    monkeypatch.setattr(old_positions, "_DELETED_TOPICS_MAX", 4)
    deletions = Deletions()
    for number in range(32):
        deletions.note_topic(f"T{number}", number + 1)
    assert len(deletions.topics) == 16 and deletions.since("T31", 31)
    now_ms = 0
    old = OldPositions(lambda: now_ms)
    for number in range(6):
        old.deleted(f"T{number}")
    assert len(old._topics) == 4
    assert old.is_old("g", "T5", 0) and not old.is_old("g", "T1", 0)
    now_ms = OldPositions.KEPT_MS
    assert old.is_old("g", "T4", 0), "its time begins with its first use"
    assert not old.is_old("g", "T5", 0)
    assert len(old._topics) == 3


async def test_r39_retry_topics_of_pop_go_with_it_and_those_of_groups_stay(rig):
    """As in Java: `%RETRY%g` and `%DLQ%g` hold messages of all topics of the group."""
    topics = rig.service.topics
    for name in ("%RETRY%g+T", "%RETRY%g_T", "%RETRY%h_T", "%RETRY%g", "%DLQ%g"):
        topics.put_topic(topic_config(name, 1))
        rig.service.tables.offsets.commit("g", name, 0, 1)
    for name in ("%RETRY%g_T", "%RETRY%g"):
        assert (await rig.send(name)).code == ResponseCode.SUCCESS
    await consumed_and_deleted(rig)
    left = {name for name in topics.topics.table if name.startswith("%")}
    assert left == {"%RETRY%h_T", "%RETRY%g", "%DLQ%g"}
    queues, offsets = rig.service.store._files.consume_queues, rig.service.tables.offsets
    assert queues.ids_of("%RETRY%g_T") == queues.ids_of("T") == []
    assert queues.ids_of("%RETRY%g") == [0]
    assert {key for key in offsets.table if key.endswith("@g")} == {
        "%RETRY%h_T@g",
        "%RETRY%g@g",
        "%DLQ%g@g",
    }


async def test_r39_an_emptied_replica_forgets_what_the_log_will_not_delete(rig, tmp_path):
    service = rig.service
    assert (await rig.ask(17, MAKE)).code == ResponseCode.SUCCESS
    assert (await rig.send()).code == ResponseCode.SUCCESS
    await make_group(rig)
    assert (await rig.commit(1)).code == ResponseCode.SUCCESS
    service.store.slave_log.reset_for_empty_start(1 << 20)
    assert not service.tables.offsets.table
    again = ConsumerOffsetManager(tmp_path / "config" / "consumerOffset.json")
    again.load()
    assert not again.table
