"""What strangers' bytes cost an endpoint: turns of the loop, and memory (R58)."""

import asyncio
import logging
from contextlib import AsyncExitStack
from typing import Any, cast
from unittest.mock import Mock
from weakref import WeakSet

import pytest
from loopback import HandLoop, Link
from test_connection import commands, request

from batonmq.remoting import budget as budget_module
from batonmq.remoting import command as command_module
from batonmq.remoting import connection as connection_module
from batonmq.remoting import intake as intake_module
from batonmq.remoting.budget import (
    LARGE_MAX,
    STALE_S,
    TURN_S,
    MemoryBudget,
    Paced,
    Places,
    TurnBudget,
)
from batonmq.remoting.command import (
    BUFFER_SIZE,
    HEADER_SIZE_MAX,
    SHORT_HEADER,
    TYPE_BINARY,
    TYPE_JSON,
    FrameReader,
    RemotingCommand,
    encode_frame,
    receive_buffer,
)
from batonmq.remoting.connection import Connection, Processors
from batonmq.remoting.endpoint import RemotingClient, RemotingServer
from batonmq.remoting.headers import decode_send
from batonmq.remoting.intake import RUNNING_MAX
from batonmq.runtime.turns import in_turns
from tests.shared.remoting_ends import dialling, handled, serving

pytestmark = pytest.mark.counts_turns


class Clock:
    """Stands still but where a handler moves it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        for module in (connection_module, budget_module, intake_module):
            monkeypatch.setattr(module, "boot_s", lambda: self.now_s)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_r58_a_turn_of_requests_ends_when_its_time_is_over(clock: Clock) -> None:
    taken: list[int] = []

    def slow(cmd: RemotingCommand, _: Connection) -> RemotingCommand:
        taken.append(cmd.opaque)
        clock.now_s += 0.001
        return RemotingCommand.response_to(cmd)

    link = Link(handled(28, slow))
    link.receive(b"".join(request(28, n) for n in range(50)))
    assert 2 <= len(taken) <= 4 and not link.transport.reading
    turns = 1
    while not link.transport.reading:
        before = len(taken)
        link.loop.run_soon()
        assert len(taken) - before <= 4
        turns += 1
    assert taken == list(range(50)) and turns > 12
    link.loop.run_soon()
    answers = [each.opaque for write in link.transport.writes for each in commands(write)]
    assert answers == list(range(50))


def test_requests_that_wait_for_a_turn_wait_on_while_the_peer_does_not_read(clock: Clock) -> None:
    taken: list[int] = []

    def slow(cmd: RemotingCommand, _: Connection) -> None:
        taken.append(cmd.opaque)
        clock.now_s += 0.001

    link = Link(handled(28, slow))
    link.receive(b"".join(request(28, n) for n in range(50)))
    link.connection.pause_writing()
    before = len(taken)
    for _ in range(5):
        link.loop.run_soon()
    assert 0 < len(taken) == before
    link.connection.resume_writing()
    while link.loop.soon:
        link.loop.run_soon()
    assert taken == list(range(50))


def test_r58_a_step_that_raises_takes_the_turn_from_no_other() -> None:
    def fail() -> None:
        raise ValueError("a bug")

    loop = HandLoop()
    budget, done = TurnBudget(cast(asyncio.AbstractEventLoop, loop)), list[int]()
    for step in (fail, lambda: done.append(1)):
        budget.later(step)
    with pytest.raises(ValueError, match="a bug"):
        loop.run_soon()
    budget.later(lambda: done.append(2))
    while loop.soon:
        loop.run_soon()
    assert done == [1, 2]


@pytest.mark.parametrize(
    ("fields", "is_answered"), [(b'"code":28,"opaque":7,%b', True), (b'%b,"code":28', False)]
)
def test_r58_a_header_over_the_limit_is_not_decoded_to_find_its_code(
    fields: bytes, is_answered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decode(*_: object) -> RemotingCommand:
        raise AssertionError("16 MiB of small fields take a second")

    monkeypatch.setattr(command_module, "decode_frame", decode)
    header = b"{%b}" % (fields % b'"x":"%b"' % bytes(HEADER_SIZE_MAX))
    link = Link(Processors())
    frame = (len(header) + 4).to_bytes(4) + len(header).to_bytes(4) + header
    for at in range(0, len(frame), 8192):
        link.receive(frame[at : at + 8192])
    link.loop.run_soon()
    assert bool(link.transport.writes) is is_answered
    assert link.connection.closed is not is_answered


@pytest.mark.parametrize("serialize_type", [TYPE_JSON, TYPE_BINARY])
def test_r58_a_header_of_many_fields_is_not_decoded(serialize_type: int) -> None:
    """16,000 of them fit into a header, and a send decodes it four times: 0.1 s."""
    taken: list[bytes] = []
    processors = Processors()
    processors.register_raw(
        310, lambda _, kind, header, body: taken.append(decode_send(kind, header))
    )
    for fields, is_taken in (
        ({"i": ":" * 16_000}, True),
        ({f"{n:x}": "1" for n in range(4_000)}, False),
    ):
        link = Link(processors)
        ext = dict.fromkeys("abc", "T") | dict.fromkeys("defgh", "1") | fields
        sent = RemotingCommand(310, ext=ext, serialize_type=serialize_type)
        link.receive(encode_frame(sent))
        link.loop.run_soon()
        assert bool(taken) is is_taken
        taken.clear()
        if not is_taken and serialize_type == TYPE_JSON:
            [answer] = commands(link.transport.writes[0])
            assert "fields, allowed are 1024" in (answer.remark or "")
        else:
            assert link.connection.closed is not is_taken


@pytest.mark.parametrize(("fill", "at_once"), [(0, 8), (SHORT_HEADER, 4)])
def test_r58_frames_of_the_hot_path_share_the_time_as_well(
    clock: Clock, fill: int, at_once: int
) -> None:
    taken = 0

    def slow(*_: object) -> None:
        nonlocal taken
        taken += 1
        clock.now_s += 0.001

    processors = Processors()
    processors.register_raw(10, slow)
    link = Link(processors)
    ext = {"x": "x" * fill}
    frames = [encode_frame(RemotingCommand(10, opaque=n, ext=ext)) for n in range(50)]
    link.receive(b"".join(frames)[:BUFFER_SIZE])
    assert taken == at_once
    for _ in range(20):
        link.loop.run_soon()
    assert taken == min(50, BUFFER_SIZE // len(frames[0]))


def test_r58_bytes_that_come_when_the_turn_is_spent_wait_for_the_next(clock: Clock) -> None:
    taken: list[int] = []
    processors = Processors()
    processors.register(28, lambda cmd, _: taken.append(cmd.opaque))
    link = Link(processors)
    link.dispatcher.turn.spend(TURN_S)
    link.receive(request(28, 7) + request(28, 8)[:9])
    assert taken == [] and not link.transport.reading
    link.loop.run_soon()
    assert taken == [7] and link.transport.reading
    link.receive(request(28, 8)[9:])
    assert taken == [7, 8]


def test_r58_connections_that_end_when_the_turn_is_spent_are_forgotten_later() -> None:
    link = Link()
    link.dispatcher.turn.spend(TURN_S)
    link.connection.connection_lost(None)
    assert link.connection.closed and not link.lost
    link.loop.run_soon()
    assert len(link.lost) == 1


async def test_r58_so_many_handlers_of_a_connection_run_at_once_and_no_more() -> None:
    running = most = 0
    gate = asyncio.Event()

    async def waits(cmd: RemotingCommand, _: Connection) -> RemotingCommand:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await gate.wait()
        running -= 1
        return RemotingCommand.response_to(cmd)

    server, client = RemotingServer(handled(26, waits)), RemotingClient()
    async with serving(server) as address, dialling(client):
        asked = [
            asyncio.create_task(client.invoke(address, RemotingCommand.request(26), 20_000))
            for _ in range(3 * RUNNING_MAX)
        ]
        while running < RUNNING_MAX:  # noqa: ASYNC110  turns of the loop are the clock
            await asyncio.sleep(0)
        gate.set()
        assert [reply.code for reply in await asyncio.gather(*asked)] == [0] * (3 * RUNNING_MAX)
    assert most == RUNNING_MAX


async def test_r58_few_handlers_of_a_host_make_large_answers_at_a_time() -> None:
    """One may hold 25 MB (202 of a topic of 65,536 queues), and a packet has hundreds of requests.
    Others do not wait for these, and what a client asked for that has gone is not begun."""
    begun = running = most = 0
    gate = asyncio.Event()

    async def large(cmd: RemotingCommand, _: Connection) -> RemotingCommand:
        nonlocal begun, running, most
        begun, running = begun + 1, running + 1
        most = max(most, running)
        await gate.wait()
        running -= 1
        return RemotingCommand.response_to(cmd)

    async def small(cmd: RemotingCommand, _: Connection) -> RemotingCommand:
        await asyncio.sleep(0)
        return RemotingCommand.response_to(cmd)

    processors = handled(17, small)
    processors.register(202, large, large=True)
    async with AsyncExitStack() as stack:
        server = RemotingServer(processors)
        address = await stack.enter_async_context(serving(server))
        stays, goes = [await stack.enter_async_context(dialling(RemotingClient())) for _ in "ab"]

        def asked(client: RemotingClient, code: int) -> asyncio.Task[RemotingCommand]:
            request = RemotingCommand.request(code)
            return asyncio.create_task(client.invoke(address, request, 20_000))

        waiting = [asked(client, 202) for client in (stays, goes) for _ in range(RUNNING_MAX - 1)]
        while begun < LARGE_MAX:  # noqa: ASYNC110  turns of the loop are the clock
            await asyncio.sleep(0)
        assert (await asked(stays, 17)).code == 0
        await goes.close()
        while len(server.connections) > 1:  # noqa: ASYNC110  turns of the loop are the clock
            await asyncio.sleep(0)
        gate.set()
        replies = await asyncio.gather(*waiting, return_exceptions=True)
    answered = [reply for reply in replies if isinstance(reply, RemotingCommand)]
    assert len(answered) == begun == RUNNING_MAX - 1 and most == LARGE_MAX


class Waiting:
    """A link whose handlers of code 26 end at `gate`; beside its request one takes nothing."""

    def __init__(self, peer_bytes_max: int, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(intake_module, "HANDLER_BYTES", 0)
        processors = Processors()
        processors.register(26, self._wait)
        self.link = Link(processors)
        self.memory = self.link.dispatcher.memory
        self.memory._peer_bytes_max = peer_bytes_max
        self.gate = asyncio.Event()

    async def _wait(self, cmd: RemotingCommand, _: Connection) -> RemotingCommand:
        await self.gate.wait()
        return RemotingCommand.response_to(cmd)

    async def end(self) -> None:
        self.gate.set()
        while self.link.dispatcher.tasks:  # noqa: ASYNC110  turns of the loop are the clock
            await asyncio.sleep(0)
        await asyncio.sleep(0)


@pytest.mark.parametrize("begun", [0, 30])
@pytest.mark.parametrize("is_closed", [False, True])
async def test_r58_requests_whose_handlers_run_are_memory_of_their_host(
    is_closed: bool, begun: int, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 requests of 16 MiB take a gigabyte; who has sent them may close and connect again."""
    waiting = Waiting(150, monkeypatch)
    link, memory, again = waiting.link, waiting.memory, Peer("127.0.0.1")
    frame = encode_frame(RemotingCommand.request(26, {}, bytes(100)))
    link.receive(frame)
    assert link.transport.reading
    link.receive(frame + frame[:begun])
    assert not link.transport.reading
    if is_closed:
        link.connection.close("done")
    assert not memory.hold(again, 10)
    await waiting.end()
    assert link.transport.reading is not is_closed
    assert memory.hold(again, 10)


async def test_r58_answers_that_are_not_read_stay_counted_when_a_handler_ends(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = Waiting(3000, monkeypatch)
    waiting.link.receive(encode_frame(RemotingCommand.request(26, {}, bytes(10))))
    waiting.link.connection.pause_writing()
    waiting.link.connection.write(bytes(1000))
    waiting.link.connection.write(bytes(1000))
    waiting.memory.run("127.0.0.1", 3000)  # which costs no peer its answers
    await waiting.end()
    assert waiting.memory.held_bytes > 2000 and not waiting.link.connection.closed
    waiting.link.connection.resume_writing()
    assert waiting.memory.held_bytes == 0


async def test_r58_a_closed_connection_whose_handlers_run_takes_no_turn_of_the_oldest_frame(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = Waiting(100, monkeypatch)
    link, memory = waiting.link, waiting.memory
    link.receive(encode_frame(RemotingCommand.request(26, {}, bytes(90))))
    link.connection.close("done")
    a, b = Peer("127.0.0.1"), Peer("127.0.0.1")
    a.memory = memory
    assert memory.hold(a, 60)
    clock.now_s += STALE_S + 1
    assert not memory.hold(b, 60)
    link.loop.advance(0.05)
    assert a.aborted and b.rooms == 1
    await waiting.end()


def test_r58_what_handlers_keep_is_bounded_in_all_and_for_each_host() -> None:
    memory = MemoryBudget(Mock(), bytes_max=100, peer_bytes_max=60)
    assert memory.run("a", 60) and not memory.run("a", 1)
    assert memory.run("b", 39) and not memory.run("b", 1)
    memory.run("a", -61)
    assert memory.run("b", 20)


def test_r58_a_frame_that_waits_for_handlers_is_not_late(clock: Clock) -> None:
    link = Link()
    memory = MemoryBudget(link.loop, 1000, 70)  # type: ignore[arg-type]
    a, b = peers = Peer("a"), Peer("a")
    assert not memory.run("a", 80) and memory.run("c", 70)
    assert not any(memory.hold(each, 60) for each in peers)
    clock.now_s += STALE_S + 1
    link.loop.advance(0.05)
    assert not memory.run("a", -9) and memory.run("a", -1)
    link.loop.advance(0.05)
    assert (a.rooms, b.rooms) == (1, 0) and not a.aborted and not b.aborted


async def test_a_handler_that_waits_for_a_turn_learns_that_it_is_cancelled(clock: Clock) -> None:
    budget, ended = TurnBudget(asyncio.get_running_loop()), list[str]()

    async def work() -> None:
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    async def handler() -> None:
        await Paced(budget, work())

    task = asyncio.ensure_future(handler())
    await asyncio.sleep(0)
    budget.spend(TURN_S)
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert ended == ["cancelled"] and task.cancelled()


async def test_r58_slices_of_many_handlers_share_a_turn(clock: Clock) -> None:
    """Each takes 3 ms between two passes; the turns of the loop stay short all the same."""
    per_turn: list[int] = []
    steps = 0

    async def long_work(cmd: RemotingCommand, _: Connection) -> RemotingCommand:
        nonlocal steps
        async for _ in in_turns(range(5), 1):
            steps += 1
            clock.now_s += 0.003
        return RemotingCommand.response_to(cmd)

    server, client = RemotingServer(handled(26, long_work)), RemotingClient()
    async with serving(server) as address, dialling(client):
        asked = asyncio.gather(
            *(client.invoke(address, RemotingCommand.request(26), 20_000) for _ in range(40))
        )
        while not asked.done():
            before = steps
            await asyncio.sleep(0)
            per_turn.append(steps - before)
    assert steps == 200 and max(per_turn) <= 4
    assert [reply.code for reply in asked.result()] == [0] * 40


def test_r58_memory_only_for_bytes_that_arrived() -> None:
    reader = FrameReader(receive_buffer())
    arrived = 0
    head = (16_777_212).to_bytes(4) + (100).to_bytes(4) + b"{"
    for piece in (head, *[b"x" * 20_000] * 100):
        buffer = reader.get_buffer()
        n = min(len(buffer), len(piece))
        buffer[:n] = piece[:n]
        assert list(reader.received(n)) == []
        arrived += n
        assert reader.waiting == arrived and reader.held <= 2 * max(arrived, BUFFER_SIZE)
    assert FrameReader(receive_buffer()).held == 0


class Peer:
    looks = 0  # at the host of any peer

    def __init__(self, host: str) -> None:
        self.host = host
        self.aborted = ""
        self.rooms = 0
        self.memory: MemoryBudget

    @property
    def peer_host(self) -> str:
        Peer.looks += 1
        return self.host

    def memory_came(self) -> None:
        self.rooms += 1

    def abort(self, reason: str) -> None:
        self.aborted = reason
        self.memory.hold(self, 0)


def test_r58_over_the_memory_of_an_endpoint_frames_come_one_after_the_other(clock: Clock) -> None:
    link = Link(Processors())
    memory = MemoryBudget(link.loop, 100, 70)  # type: ignore[arg-type]
    a, b, c = Peer("a"), Peer("a"), Peer("c")
    assert memory.hold(a, 40) and memory.hold(c, 30)
    assert not memory.hold(b, 40)  # its host has too much, and so have all
    assert memory.hold(a, 60)  # it began first
    link.loop.advance(0.05)
    assert b.rooms == 0 and memory.held_bytes == 130
    assert memory.hold(a, 0)
    link.loop.advance(0.05)
    assert b.rooms == 1 and link.loop.live_timers == []


def test_r58_a_frame_that_never_comes_loses_its_memory_to_who_waits(clock: Clock) -> None:
    link = Link(Processors())
    memory = MemoryBudget(link.loop, 1000, 70)  # type: ignore[arg-type]
    a, b, c = Peer("a"), Peer("a"), Peer("c")
    for each in (a, b, c):
        each.memory = memory
    assert memory.hold(c, 60) and memory.hold(a, 60)
    clock.now_s += STALE_S + 1
    assert not memory.hold(b, 60)
    link.loop.advance(0.05)
    assert a.aborted and not c.aborted and b.rooms == 1


def test_r58_who_waits_for_memory_costs_no_look_at_all_that_have_some(clock: Clock) -> None:
    link = Link(Processors())
    memory = MemoryBudget(link.loop, 1_000_000, 10_000)  # type: ignore[arg-type]
    calm, crowd = [Peer("calm") for _ in range(2000)], [Peer("crowd") for _ in range(200)]
    for each in calm:
        assert memory.hold(each, 1)
    Peer.looks = 0
    waiting = [each for each in crowd if not memory.hold(each, 100)]
    assert len(waiting) == 100
    clock.now_s += STALE_S + 1  # all frames are late, those of the calm host disturb nobody
    crowd[0].memory = memory
    link.loop.advance(0.05)
    assert crowd[0].aborted and not any(each.aborted for each in calm)
    assert Peer.looks < 4 * (len(calm) + len(crowd)), "not the product of both"


async def test_r58_connections_that_announce_large_frames_take_no_memory(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    server = RemotingServer(Processors())
    port = await server.listen("127.0.0.1", 0)
    memory = cast(Any, server)._dispatcher.memory
    streams = [await asyncio.open_connection("127.0.0.1", port) for _ in range(50)]
    for _, writer in streams:
        writer.write((16_777_212).to_bytes(4) + (100).to_bytes(4) + b"{")
    while len(server.connections) < 50 or memory.held_bytes < 450:  # noqa: ASYNC110  turns of the loop are the clock
        await asyncio.sleep(0)
    assert memory.held_bytes == 450
    for _, writer in streams:
        writer.close()
    while server.connections:  # noqa: ASYNC110  turns of the loop are the clock
        await asyncio.sleep(0)
    assert memory.held_bytes == 0
    await server.close()


async def test_r58_a_turn_that_is_spent_is_over_with_the_turn(clock: Clock) -> None:
    turn = TurnBudget(asyncio.get_running_loop())
    turn.spend(TURN_S)
    assert turn.spent_s >= TURN_S
    await turn.turn()
    assert turn.spent_s < TURN_S


class Accepted:
    """A connection that was accepted."""

    def __init__(self, peer: str, descriptor: int = 3) -> None:
        self.peer, self.descriptor = peer, descriptor
        self.last_active_ms = 0
        self.reason = ""

    def close(self, reason: str) -> None:
        self.reason = reason


def test_r58_strangers_make_room_and_members_only_if_there_are_none_else() -> None:
    places = Places(3)
    member, *strangers = peers = [Accepted("a:1"), Accepted("a:2"), Accepted("b:1")]
    for each in peers:
        places.take(each)
    places.keep(member)
    late = [Accepted(f"c:{number}") for number in range(3)]
    for each in late:
        places.take(each)
    assert [each.reason != "" for each in (*strangers, *late)] == [True, True, True, False, False]
    for each in late:
        places.leave(each)
    others = [Accepted("d:1"), Accepted("d:2")]
    for each in others:
        places.take(each)
        places.keep(each)
    assert not member.reason
    places.take(Accepted("e:1"))
    assert others[0].reason and not member.reason, "of the host that has the most"


def test_r58_who_says_something_is_passed_over_once() -> None:
    places = Places(2)
    busy, idle = Accepted("a:1"), Accepted("a:2")
    for each in (busy, idle):
        places.take(each)
    busy.last_active_ms = 5
    places.take(Accepted("a:3"))
    assert idle.reason and not busy.reason
    places.take(Accepted("a:4"))
    places.take(Accepted("a:5"))
    assert busy.reason


def test_r58_descriptors_that_run_out_are_noticed_by_their_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(budget_module, "descriptors_allowed", lambda: 80)
    monkeypatch.setattr(Places, "_of_process", WeakSet())  # not those of other tests
    places = Places()
    first, second = Accepted("a:1", 49), Accepted("a:2", 50)
    places.take(first)
    assert not first.reason
    places.take(second)
    assert first.reason and not second.reason
    places.take(Accepted("a:3", 4))
    assert second.reason, "a low number that was just given back makes no place"
    member, late = Accepted("a:4", 4), Accepted("a:5", 50)
    places.take(member)
    places.keep(member)
    places.take(late)
    assert late.reason and not member.reason


def test_r58_where_all_say_something_one_goes_nevertheless() -> None:
    places, busy = Places(20), [Accepted(f"a:{number}") for number in range(20)]
    for each in busy:
        places.take(each)
    for each in busy:
        each.last_active_ms = 5
    places.take(Accepted("a:20"))
    assert sum(each.reason != "" for each in busy) == 1 and len(places) == 20


async def test_r58_a_server_ends_the_oldest_of_too_many_connections() -> None:
    server = RemotingServer(Processors())
    port = await server.listen("127.0.0.1", 0)
    assert server._dispatcher is not None
    server._dispatcher.places = Places(10)
    opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(15)]
    for reader, _ in opened[:5]:
        assert await reader.read() == b""
    assert len(server.connections) == 10
    for _, writer in opened:
        writer.close()
    await server.close()
