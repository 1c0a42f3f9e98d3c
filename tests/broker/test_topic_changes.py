"""What code 17 changes of a topic, and what 351 shows of it."""

import json

import pytest
from lone_broker import Rig, lone_broker

from batonmq.protocol.bodies import (
    SetMessageRequestModeRequestBody,
    SubscriptionGroupConfig,
    TopicConfig,
    TopicConfigSerializeWrapper,
)
from batonmq.protocol.codes import ResponseCode
from batonmq.protocol.records.codec import NewMessage
from batonmq.store.errors import PutUnavailable

MAKE = {"topic": "T", "readQueueNums": "16", "writeQueueNums": "16", "perm": "6", "order": "true"}
ODD = {"topicFilterType": "MULTI_TAG", "topicSysFlag": "2"}


async def settings(rig: Rig) -> TopicConfig:
    reply = await rig.ask(351, {"topic": "T"})
    assert reply.code == ResponseCode.SUCCESS
    return TopicConfig.decode(reply.body)


async def test_r31_only_what_is_given_changes(rig):
    assert (await rig.ask(17, MAKE | ODD)).code == ResponseCode.SUCCESS
    assert (await rig.ask(17, {"topic": "T", "perm": "4"})).code == ResponseCode.SUCCESS
    changed = await settings(rig)
    assert (changed.read_queue_nums, changed.write_queue_nums) == (16, 16)
    assert (changed.perm, changed.order) == (4, True)
    assert (changed.topic_filter_type, changed.topic_sys_flag) == ("MULTI_TAG", 2)
    assert (await rig.ask(17, {"topic": "T", "writeQueueNums": "4"})).code == 0
    changed = await settings(rig)
    assert (changed.read_queue_nums, changed.write_queue_nums, changed.perm) == (16, 4, 4)


async def test_attributes_are_checked_kept_and_shown(tmp_path):
    """The broker compares no message with them, as in Java."""

    async def change(rig: Rig, attributes: str) -> tuple[int, str]:
        reply = await rig.ask(17, MAKE | {"attributes": attributes})
        return reply.code, reply.remark or ""

    async with lone_broker(tmp_path) as rig:
        for wrong, why in (
            ("+message.type=ODD", "allowed are UNSPECIFIED, NORMAL, FIFO, DELAY, TRANSACTION"),
            ("+message.type=MIXED", "MIXED needs enableMixedMessageType"),
            ("+queue.type=BatchCQ", "allowed are SimpleCQ"),
            ("+cleanup.policy=COMPACTION", "allowed are DELETE"),
            ("+reserve.time=-2", "allowed are -1 to 9223372036854775807"),
            ("+reserve.time=1_000", "allowed are -1 to 9223372036854775807"),
            ("+odd=1", "there are message.type, queue.type, cleanup.policy, reserve.time"),
            ("message.type=FIFO", "+key=value sets one and -key takes one away"),
            ("+message.type", "+key=value sets one and -key takes one away"),
            ("-message.type", "the topic has no such attribute"),
            ("+message.type=FIFO,+message.type=DELAY", "is given twice"),
            ("+message.type=FIFO,-message.type", "changed twice in one request"),
        ):
            code, remark = await change(rig, wrong)
            assert code == (29 if "MIXED" in wrong else 1) and why in remark, (wrong, remark)
        assert rig.service.topics.get("T") is None
        assert await change(rig, "+message.type=FIFO,+queue.type=SimpleCQ") == (0, "")
        assert (await rig.send(DELAY="1")).code == 0
        code, remark = await change(rig, "-queue.type")
        assert code == 1 and "it can be set only when the topic is made" in remark
        assert await change(rig, "+message.type=DELAY,+reserve.time=-1") == (0, "")
        assert await change(rig, "-reserve.time") == (0, "")
        assert (await rig.ask(17, MAKE)).code == 0
        shown = {"message.type": "DELAY", "queue.type": "SimpleCQ"}
        assert (await settings(rig)).attributes == shown
        table = TopicConfigSerializeWrapper.decode((await rig.ask(21)).body).topic_config_table
        assert table["T"].attributes == shown
        body = b"enableMixedMessageType=true"
        assert (await rig.ask(25, body=body)).code == 0
        assert await change(rig, "+message.type=MIXED") == (0, "")
    kept = json.loads((tmp_path / "config" / "topics.json").read_text())["topicConfigTable"]["T"]
    assert kept["attributes"]["message.type"] == "MIXED"
    async with lone_broker(tmp_path) as rig:
        assert (await settings(rig)).attributes["message.type"] == "MIXED"


async def test_a_new_topic_needs_its_numbers(rig):
    reply = await rig.ask(17, {"topic": "T", "perm": "6"})
    assert reply.code == ResponseCode.INVALID_PARAMETER
    assert "readQueueNums" in (reply.remark or "")
    assert (await rig.ask(351, {"topic": "T"})).code == ResponseCode.TOPIC_NOT_EXIST


async def test_r31_queues_that_hold_messages_stay_readable_unless_it_is_forced(rig):
    """`updateTopic -p 6` of a tool that sends its defaults: 8 queues where there are 16."""
    assert (await rig.ask(17, MAKE)).code == ResponseCode.SUCCESS
    for queue in (2, 9, 11):
        assert (await rig.send(queue=queue)).code == ResponseCode.SUCCESS
    fewer = MAKE | {"readQueueNums": "8", "writeQueueNums": "8"}
    refused = await rig.ask(17, fewer)
    assert refused.code == ResponseCode.INVALID_PARAMETER
    for word in ("queue 11 holds messages", "12 and more", "--force"):
        assert word in (refused.remark or "")
    assert (await settings(rig)).read_queue_nums == 16
    assert (await rig.pull(queue=11)).code == ResponseCode.SUCCESS

    assert (await rig.ask(17, fewer | {"readQueueNums": "12"})).code == ResponseCode.SUCCESS
    assert (await settings(rig)).read_queue_nums == 12
    assert (await rig.ask(17, fewer | {"force": "true"})).code == ResponseCode.SUCCESS
    assert (await settings(rig)).read_queue_nums == 8
    refused = await rig.ask(17, fewer | {"readQueueNums": "2"})
    assert "queue 2 holds messages" in (refused.remark or ""), "queue 11 is hidden already"


async def test_what_cannot_be_written_changes_nothing(rig, monkeypatch):
    """R31: a topic or group whose record does not fit into the log is not in the master's table
    either: no slave would ever have it, and the next send would take it for made."""

    def refuse(body: bytes) -> int:
        raise PutUnavailable("no room")

    topics = rig.service.topics
    with monkeypatch.context() as patch:
        patch.setattr(topics, "_append", refuse)
        with pytest.raises(PutUnavailable):
            topics.put_topic(TopicConfig(topic_name="N"))
        with pytest.raises(PutUnavailable):
            topics.put_group(SubscriptionGroupConfig(group_name="n"))
        with pytest.raises(PutUnavailable):
            topics.forbid("n", "N", reading=True)
        with pytest.raises(PutUnavailable):
            topics.put_request_mode(
                SetMessageRequestModeRequestBody(topic="N", consumer_group="n", mode="POP")
            )
    assert topics.get("N") is None and topics.groups.get("n") is None
    assert not topics.groups.is_forbidden("n", "N")
    assert topics.request_modes.get("N", "n") is None


async def test_r31_queues_whose_messages_are_not_confirmed_yet_stay_readable(rig):
    assert (await rig.ask(17, MAKE)).code == ResponseCode.SUCCESS
    store = rig.service.store
    store.appender.put_message(NewMessage("T", 11, b"x", b"", 0, None, None, 0, bytes(8)))
    assert store.queries.max_offset_in_queue("T", 11) == 0
    refused = await rig.ask(17, MAKE | {"readQueueNums": "8"})
    assert refused.code == ResponseCode.INVALID_PARAMETER
    assert "queue 11" in (refused.remark or "")
