"""A connection moved by hand: turns, backpressure, deadlines, malformed frames."""

import logging

import pytest
from loopback import Link

from batonmq.protocol.codes import ResponseCode
from batonmq.protocol.errors import (
    BrokerRefusal,
    ConnectError,
    FencedError,
    RemoteProtocolError,
    RequestTimeoutError,
)
from batonmq.remoting import connection as connection_module
from batonmq.remoting import intake, pending_requests
from batonmq.remoting.budget import MEMORY_MAX, UNREAD_MAX
from batonmq.remoting.command import (
    FLAG_ONEWAY,
    FLAG_RESPONSE,
    RemotingCommand,
    decode_frame,
    encode_frame,
)
from batonmq.remoting.connection import Connection, Processors
from tests.shared.remoting_ends import handled


@pytest.fixture(autouse=True)
def time_of_a_turn_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine the frames after the first would wait for the next turn (R58)."""
    monkeypatch.setattr(intake, "boot_s", lambda: 0.0)


def request(code: int, opaque: int, *, oneway: bool = False, body: bytes = b"") -> bytes:
    flag = FLAG_ONEWAY if oneway else 0
    return encode_frame(RemotingCommand(code, opaque=opaque, flag=flag, body=body))


def commands(data: bytes) -> list[RemotingCommand]:
    found = []
    while data:
        length, header_len = int.from_bytes(data[:4]), int.from_bytes(data[5:8])
        found.append(
            decode_frame(data[8 : 8 + header_len], data[8 + header_len : 4 + length], data[4])
        )
        data = data[4 + length :]
    return found


def echo(cmd: RemotingCommand, connection: Connection) -> RemotingCommand:
    return RemotingCommand.response_to(cmd, body=cmd.body)


def echoing() -> Processors:
    return handled(10, echo)


def test_many_frames_of_one_wake_up_are_answered_in_one_write() -> None:
    link = Link(echoing())
    link.receive(b"".join(request(10, n, body=b"%d" % n) for n in range(50)))
    assert link.transport.writes == []
    link.loop.run_soon()
    (data,) = link.transport.writes
    answers = commands(data)
    assert [a.opaque for a in answers] == list(range(50))
    assert [a.body for a in answers] == [b"%d" % n for n in range(50)]


def test_one_call_of_the_loop_serves_all_connections_of_a_turn() -> None:
    one = Link(echoing())
    one.connection.write(b"a")
    one.connection.write(b"b")
    assert len(one.loop.soon) == 1
    one.turn.flush()
    assert one.transport.writes == [b"ab"]
    one.loop.run_soon()
    assert one.transport.writes == [b"ab"], "flushed early, the end of the turn finds nothing"


def test_unknown_codes_are_answered_3() -> None:
    link = Link()
    link.receive(request(4711, 1))
    link.loop.run_soon()
    (answer,) = commands(link.transport.writes[0])
    assert (answer.code, answer.opaque) == (ResponseCode.REQUEST_CODE_NOT_SUPPORTED, 1)


def test_oneway_requests_get_no_answer_not_even_an_error() -> None:
    def fail(cmd: RemotingCommand, connection: Connection) -> RemotingCommand:
        raise BrokerRefusal(29, "no")

    processors = echoing()
    processors.register(11, fail)
    link = Link(processors)
    link.receive(
        request(10, 1, oneway=True) + request(11, 2, oneway=True) + request(9, 3, oneway=True)
    )
    link.loop.run_soon()
    assert link.transport.writes == [] and not link.connection.closed


def test_r58_only_refusals_of_codes_that_have_a_handler_are_counted() -> None:
    """A guard refuses all others, too: a stranger could send any number of different codes."""

    def refuse(cmd: RemotingCommand, connection: Connection) -> RemotingCommand:
        raise BrokerRefusal(ResponseCode.NO_PERMISSION, "no")

    processors = echoing()
    processors.register(11, refuse)
    processors.default(refuse)
    link = Link(processors)
    link.receive(b"".join(request(code, code) for code in range(10, 30)))
    assert link.dispatcher.refused == {(11, ResponseCode.NO_PERMISSION): 1}


def test_errors_of_handlers_become_codes_and_the_connection_lives(
    caplog: pytest.LogCaptureFixture,
) -> None:
    errors = {
        1: BrokerRefusal(ResponseCode.NO_PERMISSION, "forbidden"),
        2: FencedError("masterEpoch", 1, 2),
        3: ValueError("a bug"),
        4: RemoteProtocolError("TopicConfig: no body of ours"),
    }

    def fail(cmd: RemotingCommand, connection: Connection) -> RemotingCommand:
        raise errors[cmd.opaque]

    processors = echoing()
    processors.register(11, fail)
    link = Link(processors)
    link.receive(b"".join(request(11, n) for n in errors) + request(10, 9))
    while link.loop.soon:  # a slow machine needs more than one turn
        link.loop.run_soon()
    answers = {a.opaque: a for a in commands(b"".join(link.transport.writes))}
    assert (answers[1].code, answers[1].remark) == (16, "forbidden")
    assert answers[2].code == ResponseCode.CONTROLLER_FENCED_MASTER_EPOCH
    assert (answers[3].code, answers[3].remark) == (1, "ValueError: a bug")
    assert answers[4].code == 1 and answers[9].code == 0
    assert [r.message for r in caplog.records if r.levelno >= logging.ERROR] == [
        "request_failed code=11 peer=127.0.0.1:7"
    ]


def test_raw_handlers_get_requests_undecoded_and_their_refusals_are_answered() -> None:
    seen: list[tuple[int, bytes]] = []

    def raw(connection: Connection, serialize_type: int, header: bytes, body: bytes) -> None:
        seen.append((serialize_type, body))
        if body == b"bad":
            raise BrokerRefusal(1, "the custom field <b (topic)> is null")

    processors = Processors()
    processors.register_raw(310, raw)
    link = Link(processors)
    link.receive(request(310, 1, body=b"good") + request(310, 2, body=b"bad"))
    link.receive(request(310, 3, body=b"bad", oneway=True))
    link.loop.run_soon()
    assert seen == [(0, b"good"), (0, b"bad"), (0, b"bad")]
    (answer,) = commands(link.transport.writes[0])
    assert (answer.opaque, answer.remark) == (2, "the custom field <b (topic)> is null")


async def test_a_response_is_never_taken_for_a_raw_request_of_the_same_number() -> None:
    """Answer code 10 (FLUSH_DISK_TIMEOUT) to a request of ours, while 10 also is SEND_MESSAGE."""

    def raw(connection: Connection, serialize_type: int, header: bytes, body: bytes) -> None:
        raise AssertionError("a response went to the send handler")

    processors = Processors()
    processors.register_raw(10, raw)

    link = Link(processors)
    waiting = link.connection.request(RemotingCommand.request(40), 1000)
    answer = RemotingCommand(10, flag=FLAG_RESPONSE, opaque=1)
    link.receive(encode_frame(answer))
    assert waiting.done() and waiting.result().code == 10


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "over the limit"),
        (b"\x00\x00\x00\x10\x00\x00\x00\x08nonsense" + b"\x00" * 4, "JSON header b'nonsense'"),
        (b"\x01\x00\x00\x00\x00\x00\x00\x01", "over the limit"),
    ],
)
def test_a_malformed_frame_ends_its_connection_with_one_line(
    data: bytes, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    link = Link(echoing())
    link.receive(request(10, 1) + data)
    assert link.connection.closed and link.transport.ended == "aborted"
    (line,) = [r.getMessage() for r in caplog.records]
    assert line.startswith("connection_dropped peer=127.0.0.1:7") and what in line


def test_the_end_between_two_frames_is_no_news(caplog: pytest.LogCaptureFixture) -> None:
    link = Link(echoing())
    ended: list[Connection] = []
    link.connection.on_close.append(ended.append)
    link.receive(request(10, 1))
    link.connection.eof_received()
    link.connection.connection_lost(None)
    assert ended == [link.connection] and link.connection.closed and not caplog.records
    link.connection.write(b"late")
    link.loop.run_soon()
    assert link.transport.writes == []


def test_a_peer_that_does_not_read_is_waited_for_and_not_read_from() -> None:
    link = Link(echoing())
    link.connection.write(b"a")
    link.connection.pause_writing()
    assert not link.transport.reading
    link.connection.write(b"b")
    link.loop.run_soon()
    link.connection.write(b"c")
    assert link.transport.writes == []
    link.connection.resume_writing()
    link.loop.run_soon()
    assert link.transport.writes == [b"abc"] and link.transport.reading
    assert link.loop.live_timers == []


def test_a_client_goes_on_reading_while_it_cannot_write() -> None:
    """If both ends stopped reading, neither could ever write again."""
    link = Link(server_side=False)
    link.connection.pause_writing()
    assert link.transport.reading


def test_a_peer_that_never_reads_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    link = Link()
    link.connection.pause_writing()
    link.loop.advance(connection_module.WRITE_STALL_S + 1)
    assert link.transport.ended == "aborted" and "has not read" in caplog.text


@pytest.mark.parametrize(
    ("left", "others", "is_ended"),
    [(100, MEMORY_MAX, True), (99, MEMORY_MAX, False), (100, 0, False)],
)
def test_r58_while_answers_take_too_much_memory_a_peer_that_reads_nothing_is_dropped(
    left: int, others: int, is_ended: bool
) -> None:
    """Thousands of connections can each ask for an answer of megabytes, and not read it."""
    link = Link()
    link.transport.unread_bytes = 100
    link.connection.pause_writing()
    assert link.dispatcher.unread.taken == 100
    link.dispatcher.unread.note(Link().connection.intake, others)
    link.transport.unread_bytes = left
    link.loop.advance(connection_module.UNREAD_S)
    assert (link.transport.ended == "aborted") is is_ended
    link.connection.resume_writing()
    assert link.dispatcher.unread.taken == others and not link.loop.live_timers


def test_r58_the_host_with_the_most_unread_answers_loses_its_oldest_connection_at_once() -> None:
    """Thousands of connections need less than a second to take all memory."""
    link, other, oldest, newer = links = [Link() for _ in range(4)]
    sizes = ("1", other, 100), ("2", oldest, 60), ("2", newer, UNREAD_MAX - 250)
    for host, held, size in sizes:
        held.connection.intake.peer_host = host
        link.dispatcher.unread.note(held.connection.intake, size)
    link.transport.unread_bytes = 100
    link.connection.pause_writing()
    assert [each for each in links if each.transport.ended] == [oldest]
    assert link.dispatcher.unread.taken == UNREAD_MAX - 50


def test_the_backlog_of_a_peer_that_does_not_read_is_bounded(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "BACKLOG_BYTES_MAX", 100)
    link = Link()
    link.connection.write(b"x" * 95)
    link.loop.run_soon()  # the peer takes these
    link.connection.pause_writing()
    for _ in range(11):
        assert not link.connection.closed
        link.connection.write(b"x" * 10)
    assert link.connection.closed and "does not read" in caplog.text


def test_closing_hands_over_what_is_queued_but_does_not_wait_for_a_stalled_peer() -> None:
    link = Link()
    link.connection.write(b"last")
    link.connection.close("done")
    assert link.transport.writes == [b"last"] and link.transport.ended == "closed"
    stalled = Link()
    stalled.connection.pause_writing()
    stalled.connection.write(b"never")
    stalled.connection.close("done")
    assert stalled.transport.ended == "aborted"


async def test_a_reply_over_the_frame_limit_is_refused_instead_of_sent() -> None:
    """The peer would close its connection on such a frame, and all its requests with it."""

    def huge(cmd: RemotingCommand, connection: Connection) -> RemotingCommand:
        return RemotingCommand.response_to(cmd, body=bytes(16_777_216))

    link = Link(handled(10, huge))
    link.receive(request(10, 1))
    link.loop.run_soon()
    (answer,) = commands(link.transport.writes[0])
    assert (answer.opaque, answer.code) == (1, 1) and "over the limit" in (answer.remark or "")

    too_large = RemotingCommand.request(10, body=bytes(16_777_216))
    with pytest.raises(RemoteProtocolError, match="over the limit"):
        await link.connection.invoke(too_large)


async def test_requests_time_out_each_at_its_own_deadline_under_one_timer() -> None:
    link = Link()
    slow = link.connection.request(RemotingCommand.request(1), 3000)
    fast = link.connection.request(RemotingCommand.request(2), 50)
    assert len(link.loop.live_timers) == 1
    link.loop.advance(0.06)
    assert isinstance(fast.exception(), RequestTimeoutError) and not slow.done()
    assert "request 2 within 50 ms" in str(fast.exception())
    assert len(link.loop.live_timers) == 1
    link.loop.advance(2.95)
    assert isinstance(slow.exception(), RequestTimeoutError)
    assert link.loop.live_timers == []


async def test_deadlines_of_answered_requests_do_not_pile_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pending_requests, "_ANSWERED_MAX", 4)
    link = Link()
    waits = link.connection.request(RemotingCommand.request(1), 3000)
    for opaque in range(2, 100):
        link.connection.request(RemotingCommand.request(1), 3000)
        link.receive(encode_frame(RemotingCommand(0, flag=FLAG_RESPONSE, opaque=opaque)))
    assert len(link.connection._pending) == 1
    assert len(link.connection._pending._deadlines) <= 2 * 2 + 4
    link.loop.advance(3.05)
    assert isinstance(waits.exception(), RequestTimeoutError)


async def test_r8_after_a_stall_the_sockets_are_read_before_a_deadline_is_judged() -> None:
    """The process was stopped for 10 s; the answer had come long before its deadline."""
    link = Link()
    waiting = link.connection.request(RemotingCommand.request(1), 3000)
    link.loop.advance(10)
    assert not waiting.done()
    link.receive(encode_frame(RemotingCommand(0, flag=FLAG_RESPONSE, opaque=1)))
    assert waiting.result().code == 0
    nothing = link.connection.request(RemotingCommand.request(2), 3000)
    link.loop.advance(10)
    link.loop.advance(0.002)
    assert isinstance(nothing.exception(), RequestTimeoutError)


async def test_all_that_wait_are_told_when_the_connection_ends() -> None:
    link = Link()
    waiting = [link.connection.request(RemotingCommand.request(1), 1000) for _ in range(3)]
    link.connection.connection_lost(ConnectionResetError("reset"))
    for future in waiting:
        error = future.exception()
        assert isinstance(error, ConnectError) and error.sent and "reset" in str(error)
    with pytest.raises(ConnectError) as caught:
        link.connection.oneway(RemotingCommand.request(1))
    assert not caught.value.sent
    with pytest.raises(ConnectError):
        await link.connection.invoke(RemotingCommand.request(1))
    assert link.loop.live_timers == []


def test_a_late_response_is_ignored() -> None:
    link = Link()
    link.receive(encode_frame(RemotingCommand(0, flag=FLAG_RESPONSE, opaque=77)))
    assert not link.connection.closed


async def test_opaques_stay_positive() -> None:
    link = Link()
    link.connection._opaque = 0x7FFFFFFF
    cmd = RemotingCommand.request(1)
    link.connection.request(cmd, 10)
    assert cmd.opaque == 0


def test_a_client_writes_nothing_more_to_a_peer_that_has_ended() -> None:
    """It would be lost, and no one could tell; unsent, it may go to another one."""
    link = Link(server_side=False)
    link.connection.eof_received()
    with pytest.raises(ConnectError) as refused:
        link.connection.request(RemotingCommand.request(1), 1000)
    assert not refused.value.sent


def test_requests_behind_one_that_closed_the_connection_are_not_handled() -> None:
    taken: list[int] = []

    def close(cmd: RemotingCommand, connection: Connection) -> None:
        taken.append(cmd.opaque)
        connection.close("enough")

    link = Link(handled(10, close))
    link.receive(request(10, 1) + request(10, 2))
    assert taken == [1]


async def test_r34_many_that_wait_are_told_of_the_end_over_several_turns() -> None:
    link = Link()
    waiting = [link.connection.request(RemotingCommand.request(1), 1000) for _ in range(600)]
    link.connection.connection_lost(None)
    assert not all(future.done() for future in waiting)
    for future in waiting:
        with pytest.raises(ConnectError):
            await future


def test_a_farewell_is_the_last_frame_and_says_how_many_were_taken() -> None:
    """The peer ends the connection: what it had sent meanwhile would reset it."""
    link = Link(echoing())
    link.connection.farewell = lambda taken: RemotingCommand.request(77, {"taken": str(taken)})
    cut = request(10, 3)
    link.receive(request(10, 1) + request(10, 2) + cut[:9])
    link.connection.intake.block(True)
    link.connection.close("the end")
    assert link.transport.ended == "half" and link.transport.reading
    *answers, last = commands(b"".join(link.transport.writes))
    assert [answer.opaque for answer in answers] == [1, 2]
    assert (last.code, last.ext, last.is_oneway) == (77, {"taken": "2"}, True)
    for _ in range(3):
        link.receive(b"x" * len(link.connection.get_buffer(-1)))
    link.loop.run_soon()
    assert link.connection.taken == 2
    link.loop.advance(connection_module.LINGER_S)
    assert link.transport.ended == "aborted", "a peer that does not end it is dropped"


def test_a_peer_that_ends_its_side_after_a_farewell_is_not_dropped() -> None:
    link = Link(echoing())
    link.connection.farewell = lambda taken: RemotingCommand.request(77, {})
    link.connection.close("the end")
    link.connection.connection_lost(None)
    link.loop.advance(connection_module.LINGER_S)
    assert link.transport.ended == "half"
