"""Pulls that wait for one queue, more of them than a turn looks at."""

import asyncio
import contextlib
from unittest.mock import Mock

import pytest
from lone_broker import until

from batonmq.broker.consume import pull_processor
from batonmq.broker.consume.held_requests import PullHold
from batonmq.broker.consume.pull_processor import _SLICE, SUSPEND_MAX_MS
from batonmq.broker.tables.offset_resets import OffsetReset
from batonmq.protocol.codes import ResponseCode
from batonmq.protocol.records.codec import NewMessage
from batonmq.protocol.tags import tags_code
from batonmq.remoting.intake import SLICE_BYTES

MANY = _SLICE + 12


@contextlib.asynccontextmanager
async def held(rig):
    """MANY of them, at the end of a queue of one message."""
    await rig.send()
    pull = rig.service.pull
    waits = [
        asyncio.ensure_future(rig.pull(offset=1, suspend_ms=15_000, group=f"g{number}"))
        for number in range(MANY)
    ]
    await until(lambda: pull.held == MANY)
    pull._answer_or_hold = looked = Mock(side_effect=pull._answer_or_hold)
    yield waits, looked
    for wait in waits:
        wait.cancel()
    await asyncio.gather(*waits, return_exceptions=True)


async def test_a_reset_looks_at_each_pull_of_the_queue_once(rig):
    """Those of the other groups are held again, at an offset that the reset still reaches."""
    async with held(rig) as (_, looked):
        pull = rig.service.pull
        reset = OffsetReset(group="another", topic="T", offsets={0: 0})
        pull._was_reset(reset)
        pull._was_reset(reset)  # while the first one runs
        for _ in range(20):
            await asyncio.sleep(0)
        assert (looked.call_count, pull.held, pull._waking) == (2 * MANY, MANY, {})


async def test_a_pull_that_fails_keeps_no_other_one_waiting(rig):
    async with held(rig) as (waits, looked):
        answer = looked.side_effect

        def fail(pull, *args):
            if pull.group.group_name in ("g3", f"g{_SLICE}"):
                raise ValueError("a test")
            answer(pull, *args)

        looked.side_effect = fail
        await rig.send()
        replies = await asyncio.gather(*waits)
        assert sorted(reply.code for reply in replies) == [0] * (MANY - 2) + [1, 1]
        assert rig.service.pull._waking == {}


async def test_r58_a_turn_copies_a_large_message_for_a_few_pulls(rig, monkeypatch):
    """One message of 4 MiB could otherwise cost 512 MiB in one turn."""
    monkeypatch.setattr(pull_processor, "SLICE_BYTES", 3000)
    pull, counts = rig.service.pull, []
    answer_all = pull._answer_or_hold_all

    def noted(*args, **named):
        counts.append(answer_all(*args, **named))
        return counts[-1]

    pull._answer_or_hold_all = noted
    async with held(rig) as (waits, _):
        await rig.send(body=b"x" * 1000)
        assert all(reply.code == 0 for reply in await asyncio.gather(*waits))
    assert max(counts) == 3 and sum(counts) == MANY


@pytest.mark.parametrize(("size", "turns"), [(0, 3), (SLICE_BYTES // 64, 5)])
async def test_r58_the_sweep_looks_at_every_queue_some_in_a_turn(rig, size, turns):
    """It is the second way to a message that came between the look-up and the hold."""
    pull, looked = rig.service.pull, []
    many = [("T", number) for number in range(2 * _SLICE + 1)]
    pull._hold = Mock(queues=lambda: list(many), expired=lambda now_ms, limit: [])
    pull._hold.is_late.return_value = False

    def arrived(topic, queue_id, _):
        looked.append((topic, queue_id))
        pull._answered_bytes += size

    pull.arrived = arrived
    tick, pull.tick = pull.tick, lambda now_ms: False
    calls = 1
    while tick(1 << 60):
        calls += 1
    assert sorted(looked) == many and calls == turns
    pull._hold = PullHold()


async def test_a_pull_that_found_nothing_in_what_it_looked_at_comes_again_for_the_rest(rig):
    """Held, it would get what is there already with the next message only."""
    await rig.send(TAGS="A")
    store = rig.service.store
    for number in range(900):
        tag = b"B" if number == 899 else b"A"
        message = NewMessage("T", 0, b"x", b"TAGS\x01%b\x02" % tag, tags_code(tag.decode()),
                             None, None, 0, bytes(8))  # fmt: skip
        store.appender.put_message(message)
    rig.service.path.end_turn()
    offset, codes = 0, []
    while not codes or codes[-1] != 0:
        reply = await rig.pull(offset=offset, tags="B", suspend_ms=15_000)
        codes.append(reply.code)
        offset = int(reply.ext["nextBeginOffset"])
    assert codes == [ResponseCode.PULL_RETRY_IMMEDIATELY, 0] and offset == 901


async def test_r58_no_pull_waits_for_longer_than_the_limit(rig):
    await rig.send()
    waits = asyncio.ensure_future(rig.pull(offset=1, suspend_ms=1 << 62))
    await until(lambda: rig.service.pull.held == 1)
    rig.service.pull.tick(rig.service.path.clock_ms() + SUSPEND_MAX_MS)
    assert (await waits).code == ResponseCode.PULL_NOT_FOUND
