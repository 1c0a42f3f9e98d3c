"""Request-reply at the broker: 324 and 325, pushed by 326 to the producer that waits; the trace
topic."""

import asyncio

import pytest
from lone_broker import Rig, lone_broker, long_send_header, send_header, until
from test_group_admin import Member, answer

from batonmq.protocol.properties import decode_properties, encode_properties
from batonmq.protocol.records.codec import decode_records
from batonmq.remoting.command import RemotingCommand

REPLIES = "DefaultCluster_REPLY_TOPIC"
ASKED = {"CORRELATION_ID": "c-1", "TTL": "3000", "MSG_TYPE": "reply", "UNIQ_KEY": "R1"}


async def reply_to(rig: Rig, client_id: str, code: int = 325) -> RemotingCommand:
    properties = ASKED | {"REPLY_TO_CLIENT": client_id}
    header = send_header(REPLIES, 0, properties)
    if code == 324:
        header = long_send_header(topic=REPLIES, properties=encode_properties(properties))
    return await rig.ask(code, header, b"answer")


@pytest.mark.parametrize("code", [324, 325])
async def test_the_answer_reaches_who_asked_and_is_stored(rig, code):
    asker = Member("asker@1", answer(b""))
    await asker.join(rig)
    reply = await reply_to(rig, "asker@1", code)
    assert (reply.code, reply.ext["queueId"], reply.ext["queueOffset"]) == (0, "0", "0")
    assert int(reply.ext["msgId"][16:], 16) >= 0
    pushed = asker.asked[-1]
    assert (pushed.code, pushed.body, pushed.ext["topic"]) == (326, b"answer", REPLIES)
    properties = decode_properties(pushed.ext["properties"])
    assert properties["CORRELATION_ID"] == "c-1" and int(properties["PUSH_REPLY_TIME"])
    assert (properties["MSG_REGION"], properties["TRACE_ON"]) == ("DefaultRegion", "true")
    assert pushed.ext["bornHost"] and int(pushed.ext["storeTimestamp"])
    stored = decode_records((await rig.pull(REPLIES)).body)
    assert [record.body for record in stored] == [b"answer"]
    await asker.client.close()


async def test_who_does_not_wait_any_more(rig):
    """None is named, the named one is gone, or refuses: code 1 with the reason, and stored."""
    unnamed = await rig.ask(325, send_header(REPLIES, 0, ASKED), b"answer")
    assert unnamed.code == 1 and "REPLY_TO_CLIENT" in (unnamed.remark or "")
    gone = Member("gone@1")
    await gone.join(rig)
    await gone.client.close()
    while rig.service.clients._clients.producers:
        await rig.ask(28)
    reply = await reply_to(rig, "gone@1")
    assert reply.code == 1 and "<gone@1> not found" in (reply.remark or "")
    unwilling = Member("unwilling@1", answer(b"", code=1))
    await unwilling.join(rig)
    assert (await reply_to(rig, "unwilling@1")).code == 1
    await unwilling.client.close()
    assert len(decode_records((await rig.pull(REPLIES)).body)) == 3


async def test_r33_a_reply_is_not_stored_when_a_planned_switch_began_within_its_push(rig):
    asker = Member("asker@1")
    await asker.join(rig)
    waits = asyncio.ensure_future(reply_to(rig, "asker@1"))
    await until(lambda: bool(asker.asked))
    rig.service.path.hold.begin()
    end = rig.service.store.max_phy_offset
    await asker.client.close()
    refused = await waits
    assert refused.code == 14 and "changing" in (refused.remark or "")
    assert rig.service.store.max_phy_offset == end


async def test_the_trace_topic_takes_what_clients_trace(tmp_path):
    """traceTopicEnable: a topic of the broker with one queue; its messages are found by the ids
    that they tell of."""

    async with lone_broker(tmp_path / "on", broker={"trace_topic_enable": True}) as rig:
        sent = await rig.send("RMQ_SYS_TRACE_TOPIC", b"Pub\x011700000000000", KEYS="ID1 key1")
        assert (sent.code, sent.ext["queueId"]) == (0, "0")
        config = rig.service.topics.get("RMQ_SYS_TRACE_TOPIC")
        assert config is not None and (config.perm, config.write_queue_nums) == (6, 1)
        query = {"topic": "RMQ_SYS_TRACE_TOPIC", "key": "ID1", "maxNum": "9"}
        times = {"beginTimestamp": "0", "endTimestamp": str(2**62)}
        found = await rig.ask(12, query | times)
        while found.code != 0:
            found = await rig.ask(12, query | times)
        assert [m.body for m in decode_records(found.body)] == [b"Pub\x011700000000000"]
        assert sent.ext["TRACE_ON"] == "true"
    async with lone_broker(tmp_path / "off") as rig:
        assert rig.service.topics.get("RMQ_SYS_TRACE_TOPIC") is None


async def test_without_storing_only_the_push_counts(tmp_path):
    async with lone_broker(tmp_path, broker={"store_reply_message_enable": False}) as rig:
        asker = Member("asker@1", answer(b""))
        await asker.join(rig)
        reply = await reply_to(rig, "asker@1")
        assert (reply.code, reply.ext["msgId"]) == (0, "0")
        assert (await rig.pull(REPLIES)).code != 0
        bad = await rig.ask(325, send_header(REPLIES, 0, ASKED) | {"g": "soon"}, b"answer")
        assert bad.code == 1 and "bornTimestamp" in (bad.remark or "")
        await asker.client.close()
