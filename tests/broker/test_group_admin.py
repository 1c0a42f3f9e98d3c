"""Helping a consumer: positions, who is connected, offsets set and taken up, members asked."""

import asyncio
import json
from pathlib import Path

import pytest
from heartbeats import heartbeat
from lone_broker import Rig, lone_broker, pop_header, until

from batonmq.broker.consume import group_admin, pull_processor
from batonmq.broker.consume.group_admin import GroupAdminProcessor
from batonmq.broker.tables import consumer_offset
from batonmq.protocol.bodies import (
    ConsumerConnection,
    ConsumeStats,
    GetConsumerStatusBody,
    GroupList,
    ResetOffsetBody,
    TopicStatsTable,
)
from batonmq.protocol.codes import RequestCode, ResponseCode
from batonmq.protocol.fastjson import loads
from batonmq.protocol.message import MessageQueue
from batonmq.protocol.records.codec import decode_record
from batonmq.remoting.command import RemotingCommand
from batonmq.remoting.connection import Connection, Processors
from batonmq.remoting.endpoint import RemotingClient

GOLDEN = Path(__file__).parents[1] / "golden" / "java-5.3.3" / "remoting"
Q0 = MessageQueue("T", "broker-a", 0)


class Member:
    """A client of group g; `asked` are the requests that the broker sent it."""

    def __init__(self, client_id: str, answer: RemotingCommand | None = None) -> None:
        self.client_id = client_id
        self.asked: list[RemotingCommand] = []
        self._answer = answer
        processors = Processors()
        processors.default(self._take)
        self.client = RemotingClient(processors)

    def _take(self, request: RemotingCommand, _: Connection) -> RemotingCommand | None:
        self.asked.append(request)
        if self._answer is None:
            return None
        self._answer.opaque = request.opaque
        return self._answer

    async def join(self, rig: Rig) -> None:
        request = RemotingCommand.request(34, body=heartbeat(self.client_id, "T").encode())
        assert (await self.client.invoke(rig.service.address, request, 5000)).code == 0


def answer(body: bytes, code: int = 0) -> RemotingCommand:
    return RemotingCommand(code, flag=1, body=body)


async def reset(rig: Rig, **fields: object) -> RemotingCommand:
    header = {"topic": "T", "group": "g", "timestamp": -1, "isForce": "true"} | fields
    return await rig.ask(222, {name: str(value) for name, value in header.items()})


async def committed(rig: Rig) -> str:
    return (await rig.committed()).ext["offset"]


async def test_when_a_group_consumed_and_how_long_the_next_message_waits(rig):
    """303."""
    for _ in range(3):
        await rig.send()
    await rig.pull(commit=2)
    asked = {"topic": "T", "group": "g"}
    spans = loads((await rig.ask(303, asked)).body)["consumeTimeSpanSet"]
    assert [span["messageQueue"]["queueId"] for span in spans] == [0, 1, 2, 3]
    first, empty = spans[:2]
    assert first["messageQueue"] == {"brokerName": "broker-a", "queueId": 0, "topic": "T"}
    assert 0 < first["minTimeStamp"] <= first["consumeTimeStamp"] <= first["maxTimeStamp"]
    assert 0 <= first["delayTime"] < 3_600_000
    assert [empty[key] for key in ("minTimeStamp", "maxTimeStamp", "delayTime")] == [-1, -1, 0]
    await rig.pull(commit=3)
    assert loads((await rig.ask(303, asked)).body)["consumeTimeSpanSet"][0]["delayTime"] == 0
    assert (await rig.ask(303, {"topic": "No", "group": "g"})).code == 17


async def test_clone_copies_the_offsets_of_another_group(rig):
    """314."""

    async def clone(target: str, **fields: str) -> dict[str, int]:
        asked = {"srcGroup": "g", "destGroup": target} | fields
        reply = await rig.ask(314, asked)
        assert reply.code == 0, reply.remark
        offsets = rig.service.tables.offsets
        return {topic: offsets.query(target, topic, 0) for topic in "TU"}

    for topic, commit in (("T", 2), ("U", 1)):
        for _ in range(3):
            await rig.send(topic)
        await rig.pull(topic, commit=commit)
    assert await clone("one", topic="U") == {"T": -1, "U": 1}
    assert await clone("all") == {"T": 2, "U": 1}
    member = Member("me@1")
    await member.join(rig)  # of topic T
    assert await clone("some") == {"T": 2, "U": -1}
    assert await clone("more", offline="true") == {"T": 2, "U": 1}
    await member.client.close()
    assert (await rig.ask(314, {"srcGroup": "g", "destGroup": "a b"})).code == 29


async def test_r58_no_request_makes_more_offsets_than_a_broker_keeps(rig, monkeypatch):
    """A clone copies as many as the other group has, to a group of any name."""
    await rig.send()
    await rig.pull(commit=1)
    monkeypatch.setattr(consumer_offset, "OFFSETS_MAX", 1)
    queue = {"consumerGroup": "g", "topic": "T", "commitOffset": "0"}
    for code, header in (
        (314, {"srcGroup": "g", "destGroup": "another", "offline": "true"}),
        (222, {"topic": "T", "group": "g", "timestamp": "-1", "queueId": "1"}),
        (15, queue | {"queueId": "1"}),
        (200050, pop_header(consumerGroup="another", topic="T")),
    ):
        reply = await rig.ask(code, header)
        assert reply.code == ResponseCode.NO_PERMISSION
        assert "no more are stored" in (reply.remark or "")
    assert (await rig.ask(15, queue | {"queueId": "0"})).code == 0
    assert {key for key in rig.service.tables.offsets.table if key.startswith("T@")} == {"T@g"}


async def test_r58_where_groups_pull_next_is_known_of_the_newest(rig, monkeypatch):
    monkeypatch.setattr(pull_processor, "PULLED_MAX", 2)
    for queue in range(4):
        assert (await rig.send(queue=queue)).code == 0
        assert (await rig.pull(queue=queue)).code == 0
    assert list(rig.service.pull.pulled) == [("g", "T", 2), ("g", "T", 3)]


async def test_positions_of_a_topic_and_of_a_group(rig):
    for _ in range(3):
        await rig.send()
    stats = TopicStatsTable.decode((await rig.ask(202, {"topic": "T"})).body)
    assert len(stats.offset_table) == 4
    first = stats.offset_table[Q0]
    assert (first.min_offset, first.max_offset) == (0, 3)
    assert first.last_update_timestamp > 1_700_000_000_000
    assert (await rig.ask(202, {"topic": "Nowhere"})).code == 17

    await rig.pull(commit=2)
    body = (await rig.ask(208, {"consumerGroup": "g"})).body
    progress = ConsumeStats.decode(body).offset_table
    assert len(progress) == 4
    assert (progress[Q0].broker_offset, progress[Q0].consumer_offset) == (3, 2)
    # Of the last message that was consumed, not of the last one.
    assert 1_700_000_000_000 < progress[Q0].last_timestamp <= first.last_update_timestamp
    named = await rig.ask(208, {"consumerGroup": "new", "topicList": "T;Nowhere"})
    assert ConsumeStats.decode(named.body).offset_table[Q0].consumer_offset == 0
    groups = await rig.ask(300, {"topic": "T"})
    assert GroupList.decode(groups.body).group_list == ["g"]


async def test_topics_that_are_listed_are_shown_also_without_a_subscription(rig):
    await rig.send("Other")
    member = Member("m1")  # subscribes to T alone
    await member.join(rig)
    for named, shown in (({"topicList": "Other;T"}, True), ({"topic": "Other"}, False)):
        stats = await rig.ask(208, {"consumerGroup": "g"} | named)
        assert (b'"Other"' in stats.body) is shown
    await member.client.close()


async def test_who_is_connected(rig):
    golden = {
        code: json.loads((GOLDEN / f"broker-{code}.json").read_text())["examples"][0]
        for code in (203, 204)
    }
    for code in (203, 204):
        asked = json.loads(golden[code]["request"]["header"])["extFields"]
        reported = json.loads(golden[code]["response"]["header"])
        reply = await rig.ask(code, asked)
        assert (reply.code, reply.remark) == (reported["code"], reported["remark"])
    await rig.send()
    await rig.ask(34, body=heartbeat("me@1", "T").encode())
    body = ConsumerConnection.decode((await rig.ask(203, {"consumerGroup": "g"})).body)
    (connection,) = body.connection_set
    assert (connection.client_id, connection.language) == ("me@1", "PYTHON")
    assert list(body.subscription_table) == ["T"]
    producers = loads((await rig.ask(204, {"producerGroup": "p"})).body)
    assert [each["clientId"] for each in producers["connectionSet"]] == ["me@1"]


async def test_the_golden_reset_and_both_ends(rig):
    """To the beginning as mqadmin asks for it, to the end, to a time, to an offset of one queue."""
    golden = json.loads((GOLDEN / "broker-222.json").read_text())["examples"][0]
    asked = json.loads(golden["request"]["header"])["extFields"] | {"topic": "T", "group": "g"}
    for _ in range(3):
        await rig.send()
    await rig.pull(commit=2)
    reply = await rig.ask(222, asked)
    table = ResetOffsetBody.decode(reply.body).offset_table
    assert (reply.code, len(table), table[Q0]) == (0, 4, 0)
    assert await committed(rig) == "0"
    assert ResetOffsetBody.decode((await reset(rig)).body).offset_table[Q0] == 3
    assert await committed(rig) == "3"
    await reset(rig, queueId=0, offset=1)
    assert await committed(rig) == "1"
    for fields, code, named in (
        ({"queueId": 0, "offset": 9}, 1, "9 not in consume queue range [0-3]"),
        ({"queueId": 99}, 29, "queueId 99"),
        ({"topic": "Nowhere"}, 17, "Nowhere"),
        ({"group": "nobody"}, 26, "nobody"),
        ({"timestamp": "soon"}, 29, "timestamp"),
    ):
        refused = await reset(rig, **fields)
        assert refused.code == code and named in (refused.remark or "")
    assert await committed(rig) == "1"


async def test_r31_a_reset_in_whose_midst_the_role_ends_sets_nothing(rig, monkeypatch):
    """Looking for the offsets takes turns of the loop: the next master would not know of them."""
    real = GroupAdminProcessor._offset_at
    for _ in range(3):
        await rig.send()
    await rig.pull(commit=2)

    def fencing(admin: GroupAdminProcessor, topic: str, queue_id: int, when: int) -> int:
        rig.service.path.gate.fence()
        return real(admin, topic, queue_id, when)

    monkeypatch.setattr(GroupAdminProcessor, "_offset_at", fencing)
    assert (await reset(rig)).code == ResponseCode.SERVICE_NOT_AVAILABLE
    assert rig.service.tables.offsets.query("g", "T", 0) == 2


async def test_a_reset_reaches_a_waiting_pull_and_no_member_that_has_gone_uses_it_up(rig):
    """Every pull from elsewhere is sent to the offset (21), and progress from before is ignored,
    until one asks for that offset: so the held pull of a former owner does not end the reset."""
    for number in range(4):
        await rig.send(body=b"%d" % number)
    await rig.pull(commit=4, offset=4)
    former = asyncio.ensure_future(rig.pull(offset=4, suspend_ms=20_000))
    await until(lambda: rig.service.pull.held == 1)
    await reset(rig, timestamp=0)
    moved = await former
    assert (moved.code, moved.ext["nextBeginOffset"]) == (21, "0")
    assert moved.remark == "OFFSET_RESET"
    assert (await rig.commit(4)).code == 0
    again = await rig.pull(offset=4, commit=4)
    assert (again.code, again.ext["nextBeginOffset"], await committed(rig)) == (21, "0", "0")
    assert (await rig.pull(offset=0)).code == 0
    assert (await rig.commit(4)).code == 0
    assert await committed(rig) == "4", "the reset is over"


async def test_a_reset_wakes_no_pull_of_another_group(rig):
    await rig.send()
    await rig.pull(commit=1)
    other = asyncio.ensure_future(rig.pull(offset=1, suspend_ms=20_000, group="other"))
    await until(lambda: rig.service.pull.held == 1)
    await reset(rig, timestamp=0)
    assert rig.service.pull.held == 1 and not other.done()
    await rig.send(body=b"new")
    assert (await other).code == 0


async def test_without_server_side_reset_the_members_get_it(tmp_path):
    async with lone_broker(tmp_path, broker={"use_server_side_reset_offset": False}) as rig:
        for _ in range(3):
            await rig.send()
        for queue in range(4):
            await rig.pull(queue=queue, commit=min(queue, 1))
        assert (await reset(rig, timestamp=0)).code == 206
        member = Member("m1")
        await member.join(rig)
        reply = await reset(rig, isForce="false")
        assert ResetOffsetBody.decode(reply.body).offset_table[Q0] == 0, "never forward"
        await until(lambda: RequestCode.RESET_CONSUMER_CLIENT_OFFSET in codes(member))
        (reported,) = [each for each in member.asked if each.code == 220]
        assert reported.ext == {"topic": "T", "group": "g", "timestamp": "-1", "isForce": "false"}
        assert reported.is_oneway and ResetOffsetBody.decode(reported.body).offset_table[Q0] == 0
        await member.client.close()


def codes(member: Member) -> list[int]:
    return [each.code for each in member.asked]


async def test_members_are_asked(rig):
    """223 by 221, 307 and 309 as they are; 1 for one that is not there."""
    sent = await rig.send(body=b"again")
    assert (await rig.ask(223, {"topic": "T", "group": "g"})).code == 1
    held = GetConsumerStatusBody(message_queue_table={Q0: 7}).encode()
    member = Member("m1", answer(held))
    await member.join(rig)
    reply = await rig.ask(223, {"topic": "T", "group": "g"})
    table = loads(reply.body)["consumerTable"]["m1"]
    assert list(table.values()) == [7]
    stranger = Member("m2", answer(b"no offsets"))
    await stranger.join(rig)
    reply = await rig.ask(223, {"topic": "T", "group": "g"})
    assert list(loads(reply.body)["consumerTable"]) == ["m1"]
    await stranger.client.close()

    header = {"consumerGroup": "g", "clientId": "m1", "jstackEnable": "false"}
    info = await rig.ask(307, header)
    assert (info.code, info.body) == (0, held)
    header |= {"msgId": sent.ext["msgId"], "topic": "T"}
    await rig.ask(309, header)
    reported = member.asked[-1]
    assert decode_record(reported.body).body == b"again"
    assert (reported.ext["brokerName"], reported.ext["groupSysFlag"]) == ("broker-a", "0")
    for change, code, named in (
        ({"clientId": "nobody"}, 1, "nobody"),
        ({"msgId": "7F000001" + "0" * 16 + "FFFFFFFF"}, 1, "stored here"),
        ({"msgId": "short"}, 29, "short"),
    ):
        refused = await rig.ask(309, header | change)
        assert refused.code == code and named in (refused.remark or "")
    await member.client.close()


async def test_r58_no_more_members_are_asked_than_one_answer_holds(rig, monkeypatch):
    """Each may answer 16 MiB, and a group may have thousands."""
    monkeypatch.setattr(group_admin, "ASKED_AT_ONCE", 2)
    monkeypatch.setattr(group_admin, "FRAME_SIZE_MAX", 50)
    held = GetConsumerStatusBody(message_queue_table={Q0: 7}).encode()
    members = [Member(f"m{number}", answer(held)) for number in range(5)]
    for member in members:
        await member.join(rig)
    reply = await rig.ask(223, {"topic": "T", "group": "g"})
    assert len(loads(reply.body)["consumerTable"]) == 2
    assert sum(member.asked[-1:] != [] and member.asked[-1].code == 221 for member in members) == 2
    for member in members:
        await member.client.close()


async def test_r58_few_messages_are_kept_for_members_that_consume_them_again(tmp_path, monkeypatch):
    """A member may never answer, and a message may have 4 MiB."""
    monkeypatch.setattr(group_admin, "DIRECTLY_MAX", 2)
    async with lone_broker(tmp_path) as rig:
        sent, member = await rig.send(), Member("m1")
        await member.join(rig)
        header = {"consumerGroup": "g", "clientId": "m1", "msgId": sent.ext["msgId"]}
        asks = [asyncio.create_task(rig.ask(309, header)) for _ in range(5)]
        await until(lambda: codes(member).count(309) == 2)
        assert (await rig.send()).code == 0
        assert codes(member).count(309) == 2
        await member.client.close()
        assert {(await each).code for each in asks} == {1}


@pytest.mark.parametrize("code", [307, 309])
async def test_a_member_that_does_not_answer(rig, code, monkeypatch):
    monkeypatch.setattr("batonmq.broker.consume.group_admin.MEMBER_MS", 50)
    sent = await rig.send()
    member = Member("m1")
    await member.join(rig)
    header = {"consumerGroup": "g", "clientId": "m1", "msgId": sent.ext["msgId"]}
    assert (await rig.ask(code, header)).code == 207
    await member.client.close()
