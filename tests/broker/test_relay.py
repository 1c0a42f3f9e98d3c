"""A member that is not master, behind its endpoint: what it passes on, keeps, serves, refuses."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from unittest.mock import Mock

import pytest
from heartbeats import heartbeat
from lone_broker import Rig, lone_broker, make_group, position, pull_header, send_header, until

from batonmq.broker.consume.pull_processor import PullProcessor
from batonmq.broker.relay import MASTER_GONE, NO_MASTER, WAIT_MS
from batonmq.broker.write.write_path import OwnDiskConfirms
from batonmq.protocol.bodies import GetConsumerListByGroupResponseBody
from batonmq.protocol.codes import (
    MASTER_ADDRESS_HINT,
    RELAY_FIELD,
    LanguageCode,
    RequestCode,
    ResponseCode,
)
from batonmq.protocol.errors import ConnectError
from batonmq.protocol.records.codec import decode_records
from batonmq.remoting.command import TYPE_BINARY, RemotingCommand

EPOCH = 7


def lead(rig: Rig, epoch: int) -> None:
    path = rig.service.path
    path.acks.begin_epoch(epoch)
    path.gate.opening(epoch)
    path.gate.open()


class Group:
    """A master, and another member that knows it (`follow`) or not. Both are lone brokers whose
    roles are set by hand."""

    def __init__(self, member: Rig, master: Rig) -> None:
        self.member, self.master = member, master
        lead(master, EPOCH)
        self.relay = member.service.relay
        self.relay.enabled = True
        member.service.path.gate.fence()

    def follow(self, epoch: int = EPOCH) -> None:
        self.member.service.path.gate.follow(epoch, self.master.service.address)

    def ask(
        self,
        code: int = RequestCode.SEND_MESSAGE_V2,
        ext: dict[str, str] | None = None,
        body: bytes = b"x",
        *,
        language: LanguageCode = LanguageCode.JAVA,
        kind: int = 0,
    ) -> Awaitable[RemotingCommand]:
        """Asks the member as a stock client does."""
        request = RemotingCommand.request(
            code, send_header("T", 0, {}) if ext is None else ext, body
        )
        request.language, request.serialize_type = language, kind
        return self.member.client.invoke(self.member.service.address, request, 5000)

    async def stored(self) -> list[bytes]:
        return bodies(await self.master.pull())


def commit_request() -> RemotingCommand:
    request = RemotingCommand.request(RequestCode.UPDATE_CONSUMER_OFFSET, {})
    request.language = LanguageCode.JAVA
    return request


def bodies(pulled: RemotingCommand) -> list[bytes]:
    return [record.body for record in decode_records(pulled.body)]


@pytest.fixture
@contextlib.asynccontextmanager
async def group(tmp_path: Path) -> AsyncIterator[Group]:
    async with (
        lone_broker(tmp_path / "a") as member,
        lone_broker(tmp_path / "b") as master,
        asyncio.timeout(20),
    ):
        yield Group(member, master)


@pytest.mark.parametrize("kind", [0, TYPE_BINARY], ids=["json", "binary"])
async def test_a_send_goes_to_the_master_and_its_answer_comes_back(group, kind):
    group.follow()
    replies = await asyncio.gather(
        *(group.ask(body=b"m%d" % number, kind=kind) for number in range(20))
    )
    assert {reply.code for reply in replies} == {0}
    assert sorted(int(reply.ext["queueOffset"]) for reply in replies) == list(range(20))
    assert sorted(await group.stored()) == sorted(b"m%d" % number for number in range(20))
    assert (len(group.relay), group.relay.passed_on, group.relay.refused) == (0, 20, 0)


async def test_a_relayed_record_names_the_client_as_its_birthplace(group):
    group.follow()
    await group.ask()
    (connection,) = group.member.client.connections
    pulled = await group.master.pull()
    (record,) = decode_records(pulled.body)
    assert record.born_host == connection.local


async def test_it_waits_until_there_is_a_master(group):
    sends = [asyncio.ensure_future(group.ask(body=b"early")) for _ in range(3)]
    await until(lambda: len(group.relay) == 3)
    group.follow()
    assert [(await send).code for send in sends] == [0, 0, 0]
    assert await group.stored() == [b"early"] * 3


async def test_it_becomes_master_itself_and_takes_what_waits(group):
    sends = [asyncio.ensure_future(group.ask(body=b"mine")) for _ in range(3)]
    await until(lambda: len(group.relay) == 3)
    lead(group.member, EPOCH + 1)
    assert [(await send).code for send in sends] == [0, 0, 0]
    assert len(await group.stored()) == 0, "nothing went to the old one"
    assert len(group.relay) == group.relay.passed_on == 0


async def test_the_end_of_the_masters_connection_is_seen_before_a_retry_is_written_to_it(group):
    """Both come in the same moment: the client's own connection to the dead master ended, too."""
    group.follow()
    await group.ask()
    (client,) = group.member.service.endpoint.server.connections
    (connection,) = group.relay._client.connections
    answered: list[RemotingCommand] = []
    client.reply = lambda _, response: answered.append(response)
    for channel in group.master.service.endpoint.server.connections:
        channel.drop()
    request = commit_request()
    group.master.service.path.gate.fence()
    assert group.relay.take(client, request)
    await until(lambda: connection.closed)
    assert (len(group.relay), group.relay.passed_on, answered) == (1, 1, []), "it only waits"


async def test_nor_is_a_retry_behind_another_one_written_with_that(group):
    """It comes in a later turn."""
    group.follow()
    await group.ask()
    (client,) = group.member.service.endpoint.server.connections
    client.reply = lambda *_: None
    request = commit_request()
    assert group.relay.take(client, request)
    await asyncio.sleep(0)
    (connection,) = group.relay._client.connections
    for channel in group.master.service.endpoint.server.connections:
        channel.drop()
    group.master.service.path.gate.fence()
    assert group.relay.take(client, request)
    await until(lambda: connection.closed)
    assert group.relay.passed_on == 2


async def test_a_request_that_cannot_be_passed_on_stops_no_other_one(group, monkeypatch):
    group.follow()
    await group.ask()
    (connection,) = group.relay._client.connections
    monkeypatch.setattr(connection, "oneway", Mock(side_effect=ValueError("a test")))
    request = commit_request()
    request.flag = 2
    (client,) = group.member.service.endpoint.server.connections
    assert group.relay.take(client, request)
    assert (await group.ask()).code == 0


async def test_a_stopping_member_passes_on_until_its_connections_end(group):
    """1. A master is known, by then or later. 2. Sends that come when the relay closes get the end
    of their connection: an asynchronous stock client tries no other broker after a refusal."""
    group.member.service.path.gate.close("this broker is stopping")
    assert (await group.ask()).remark == "this broker is stopping"
    group.follow()
    assert (await group.ask(body=b"late")).code == 0
    assert await group.stored() == [b"late"]
    await group.relay.close()
    send = asyncio.ensure_future(group.ask(body=b"too late"))
    (channel,) = group.member.service.endpoint.server.connections
    before = channel.last_active_ms
    await until(lambda: channel.last_active_ms > before or send.done())
    channel.close("stopped")
    with pytest.raises(ConnectError):
        await send
    assert await group.stored() == [b"late"]


async def test_no_master_in_time_is_14(group):
    send = asyncio.ensure_future(group.ask())
    await until(lambda: len(group.relay) == 1)
    now_ms = group.relay._clock_ms()
    group.relay.tick(now_ms + WAIT_MS - 100)
    assert len(group.relay) == 1
    group.relay.tick(now_ms + WAIT_MS)
    reply = await send
    assert (reply.code, reply.remark) == (ResponseCode.SERVICE_NOT_AVAILABLE, NO_MASTER)
    assert (len(group.relay), group.relay.refused) == (0, 1)


async def test_one_hop_only(group):
    """Two members that take each other for the master: the second refuses."""
    group.follow()
    group.master.service.relay.enabled = True
    group.master.service.path.gate.follow(EPOCH, group.member.service.address)
    send = asyncio.ensure_future(group.ask())
    await until(lambda: group.relay.passed_on == 2)
    assert group.master.service.relay.passed_on == 0
    lead(group.master, EPOCH)
    assert (await send).code == 0, "it was asked again: nothing had been stored"


async def test_a_refusal_that_names_a_newer_master_sends_it_there_once(group, tmp_path):
    """The master was deposed and knows: nothing was stored, so the request goes to the new one."""
    group.follow()
    async with lone_broker(tmp_path / "c") as third:
        lead(third, EPOCH + 1)
        group.master.service.path.gate.leave(EPOCH + 1, third.service.address)
        send = asyncio.ensure_future(group.ask(body=b"once"))
        await until(lambda: group.relay.passed_on >= 1 and len(group.relay._waiting) == 1)
        group.member.service.path.gate.follow(EPOCH + 1, third.service.address)
        assert (await send).code == 0
        assert bodies(await third.pull()) == [b"once"]


async def test_a_master_of_a_lower_epoch_takes_nothing(group):
    group.follow(EPOCH + 1)
    send = asyncio.ensure_future(group.ask())
    await until(lambda: group.relay.passed_on >= 1 and len(group.relay._waiting) == 1)
    assert len(await group.stored()) == 0
    lead(group.master, EPOCH + 1)
    assert (await send).code == 0


async def test_a_send_whose_master_goes_away_is_14_once_there_is_another_and_never_sent_twice(
    group,
):
    group.follow()
    await group.ask(body=b"first")
    acks = group.master.service.path.acks
    acks.add = lambda *args: None  # it never answers
    send = asyncio.ensure_future(group.ask(body=b"second"))
    await until(lambda: group.master.service.send.stored_total == 2)
    for connection in list(group.master.service.endpoint.server.connections):
        connection.abort("killed")
    await until(lambda: len(group.relay._waiting) == 1)
    group.follow(EPOCH + 1)
    reply = await send
    assert reply.code == ResponseCode.SERVICE_NOT_AVAILABLE
    assert "send it again" in (reply.remark or "")
    assert group.relay.passed_on == 2 and len(group.relay) == 0


async def test_our_own_client_is_sent_to_the_master(group):
    group.follow()
    reply = await group.ask(language=LanguageCode.PYTHON)
    assert reply.code == ResponseCode.SYSTEM_BUSY
    assert reply.ext[MASTER_ADDRESS_HINT] == group.master.service.address
    assert group.relay.passed_on == 0


@pytest.mark.parametrize(
    ("bound", "held"), [("HELD_MAX", "_held"), ("HELD_BYTES_MAX", "_held_bytes")]
)
async def test_it_keeps_no_more_than_its_bounds(group, bound, held, monkeypatch):
    waits = [asyncio.ensure_future(group.ask()) for _ in range(2)]
    await until(lambda: len(group.relay) == 2)
    monkeypatch.setattr(f"batonmq.broker.relay.{bound}", getattr(group.relay, held))
    assert (await group.ask()).code == ResponseCode.SERVICE_NOT_AVAILABLE
    group.follow()
    assert [(await wait).code for wait in waits] == [0, 0]


async def test_a_client_that_left_is_forgotten(group):
    send = asyncio.ensure_future(group.ask())
    await until(lambda: len(group.relay) == 1)
    group.member.client.close_connection(group.member.service.address)
    with pytest.raises(Exception, match="connection"):
        await send
    await until(lambda: not group.member.service.endpoint.server.connections)
    group.follow()
    await until(lambda: len(group.relay) == 0)
    assert group.relay.passed_on == 0


async def test_offsets_go_to_the_master_and_come_from_it(group):
    group.follow()
    await group.ask()
    await make_group(group.master)
    ext = position()
    commit = await group.ask(RequestCode.UPDATE_CONSUMER_OFFSET, ext | {"commitOffset": "1"})
    assert commit.code == 0
    assert group.master.service.tables.offsets.query("g", "T", 0) == 1
    assert group.member.service.tables.offsets.query("g", "T", 0) == -1
    asked = await group.ask(RequestCode.QUERY_CONSUMER_OFFSET, ext)
    assert asked.ext["offset"] == "1"


async def test_a_new_master_knows_the_consumers_of_its_group(group):
    """Heartbeats go to every member, so no list of members is empty after a switch."""
    group.follow()
    ext = {"consumerGroup": "g"}
    data = heartbeat("c1", "T").encode()
    assert (await group.ask(RequestCode.HEART_BEAT, {}, data)).code == 0
    asked = await group.ask(RequestCode.GET_CONSUMER_LIST_BY_GROUP, ext)
    assert asked.code == ResponseCode.SYSTEM_ERROR, "the master has not heard that client"
    lead(group.member, EPOCH + 1)
    asked = await group.ask(RequestCode.GET_CONSUMER_LIST_BY_GROUP, ext)
    ids = GetConsumerListByGroupResponseBody.decode(asked.body).consumer_id_list
    assert ids == ["c1"]


async def fill(rig: Rig, *bodies: bytes) -> None:
    """Messages that a replica has: it was master when it got them."""
    lead(rig, 1)
    for body in bodies:
        assert (await rig.send(body=body)).code == 0
    assert (await rig.pull()).code == 0  # which makes the group


async def test_r28_a_slave_serves_what_it_shows_and_passes_on_the_rest(group):
    await fill(group.member, b"one", b"two")
    await fill(group.master, b"one", b"two", b"three")
    group.follow()
    own = await group.ask(RequestCode.PULL_MESSAGE, pull_header(0))
    assert bodies(own) == [b"one", b"two"]
    assert group.relay.passed_on == 0
    beyond = await group.ask(RequestCode.PULL_MESSAGE, pull_header(2))
    assert bodies(beyond) == [b"three"]
    far = await group.ask(RequestCode.PULL_MESSAGE, pull_header(9))
    assert far.code == ResponseCode.PULL_OFFSET_MOVED
    assert group.relay.passed_on == 2


@pytest.mark.parametrize(
    ("name", "own"), [("_visible", (1, 2)), ("_is_old", True)], ids=["expired", "R39 old"]
)
async def test_r28_a_slave_passes_on_what_only_the_master_can_judge(group, name, own, monkeypatch):
    """A position below the first message that it has, or of a topic that was deleted since."""
    await fill(group.member, b"one", b"two")
    await fill(group.master, b"ONE", b"TWO")
    group.follow()
    real = getattr(PullProcessor, name)

    def judged(pull: PullProcessor, *args: object) -> object:
        return own if pull is group.member.service.pull else real(pull, *args)

    monkeypatch.setattr(PullProcessor, name, judged)
    answer = await group.ask(RequestCode.PULL_MESSAGE, pull_header(0))
    assert bodies(answer) == [b"ONE", b"TWO"]
    assert group.relay.passed_on == 1


async def test_r28_a_pull_at_the_end_waits_at_the_slave_through_a_change_of_role(group):
    await fill(group.member, b"one")
    wait = asyncio.ensure_future(
        group.ask(RequestCode.PULL_MESSAGE, pull_header(1, suspend_ms=15_000))
    )
    await until(lambda: group.member.service.pull.held == 1)
    group.follow()
    group.member.service.role_left()
    assert group.member.service.pull.held == 1
    lead(group.member, EPOCH + 1)
    await group.member.send(body=b"two")
    assert bodies(await wait) == [b"two"]
    assert group.relay.passed_on == 0


async def test_a_pull_waits_for_a_role(group):
    await fill(group.member, b"one")
    group.member.service.path.gate.fence()
    wait = asyncio.ensure_future(group.ask(RequestCode.PULL_MESSAGE, pull_header(0)))
    await until(lambda: len(group.relay) == 1)
    group.follow()
    assert bodies(await wait) == [b"one"]
    assert group.relay.passed_on == 0, "a slave has it, too"


async def test_a_relay_field_that_is_none_is_named(group):
    header = send_header("T", 0, {}) | {RELAY_FIELD: "nonsense"}
    reply = await group.master.ask(310, header, b"x")
    assert reply.code == ResponseCode.INVALID_PARAMETER
    assert "EPOCH@HOST:PORT" in (reply.remark or "")


@pytest.mark.parametrize("count", [1, 3])
async def test_what_a_stopping_master_never_took_goes_to_the_next_one(group, count):
    """It had come, or was on its way, when the master closed its connections. An asynchronous stock
    send that is answered with an error is not tried again."""
    group.follow()
    await group.ask(body=b"first")
    for channel in group.master.service.endpoint.server.connections:
        channel.intake.block(True)
    sends = [asyncio.ensure_future(group.ask(body=b"%d" % n)) for n in range(count)]
    await until(lambda: group.relay.passed_on == 1 + count)
    await group.master.service.close()
    await until(lambda: len(group.relay._waiting) == count)
    lead(group.member, EPOCH + 1)
    assert {(await send).code for send in sends} == {0}
    assert sorted(bodies(await group.member.pull())) == [b"%d" % n for n in range(count)]


async def test_nor_is_a_send_lost_that_the_master_had_read_but_not_looked_at(group):
    """Its turn was spent (R58)."""
    group.follow()
    await group.ask(body=b"first")
    (channel,) = (one for one in group.master.service.endpoint.server.connections if one.farewell)
    channel._budget = channel.intake._turn = Mock(spent_s=60.0, in_time=lambda end: end())
    send = asyncio.ensure_future(group.ask(body=b"second"))
    await until(lambda: channel.intake._has_frames)
    await group.master.service.close()
    await until(lambda: len(group.relay._waiting) == 1)
    lead(group.member, EPOCH + 1)
    assert (await send).code == 0


@pytest.mark.parametrize("older", ["master", "member"])
async def test_what_a_stopping_master_may_have_taken_is_14(group, older):
    """1. It does not say what it took: it is of an earlier version, or was not asked to. 2. It took
    the send, and has not answered it."""
    if older == "master":
        handlers = group.master.service.endpoint.processors.handlers
        del handlers[RequestCode.BATON_CONNECTION_ENDS]
    group.follow()
    await group.ask(body=b"first")
    (connection,) = group.relay._client.connections
    acks = group.master.service.path.acks
    acks.add = lambda *args: None  # it never answers
    send = asyncio.ensure_future(group.ask(body=b"second"))
    await until(lambda: group.master.service.send.stored_total == 2)
    await group.master.service.close()
    await until(lambda: connection.closed)
    assert ("batonTaken" in connection.attachments) is (older == "member")
    lead(group.member, EPOCH + 1)
    reply = await send
    assert (reply.code, reply.remark) == (ResponseCode.SERVICE_NOT_AVAILABLE, MASTER_GONE)


async def test_a_relayed_request_of_any_kind_waits_where_the_master_was_deposed(group):
    await fill(group.member, b"one")
    group.follow()
    group.master.service.path.gate.leave(EPOCH + 1, group.member.service.address)
    ext = position() | {"commitOffset": "1"}
    commit = asyncio.ensure_future(group.ask(RequestCode.UPDATE_CONSUMER_OFFSET, ext))
    await until(lambda: group.relay.passed_on == 1 and len(group.relay._waiting) == 1)
    lead(group.member, EPOCH + 1)
    assert (await commit).code == 0
    assert group.member.service.tables.offsets.query("g", "T", 0) == 1


async def test_a_member_that_stops_answers_no_send_that_a_master_may_have(group):
    """That master is as it was, but slow, and the role has changed since: no refusal comes, but the
    end of the connection."""
    group.follow()
    await group.ask(body=b"first")
    acks = group.master.service.path.acks
    acks.add = lambda *args: None
    send = asyncio.ensure_future(group.ask(body=b"second"))
    await until(lambda: group.master.service.send.stored_total == 2)
    group.follow(EPOCH + 1)
    await group.member.service.close()
    with pytest.raises(ConnectError):
        await send


async def test_a_master_that_stops_answers_what_its_slaves_still_confirm(rig):
    """No other member took over, so what waits is confirmed here or not at all."""
    path = rig.service.path
    path.rule = rule = OwnDiskConfirms(path, Mock(), waits=True)
    send = asyncio.ensure_future(rig.send(body=b"last"))
    await until(lambda: len(path.acks) == 1)
    stop = asyncio.ensure_future(rig.service.close())
    await until(lambda: path.gate.is_stopping)
    await asyncio.sleep(0)
    rule.held_by_slaves(path.store.max_phy_offset)
    assert (await send).code == 0
    await stop
