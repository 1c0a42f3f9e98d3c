"""Held sends (R33): kept in order, handled later as if they came then, bounded, not in the log."""

import asyncio
from unittest.mock import Mock

import pytest
from lone_broker import until

from batonmq.broker.write import write_path


async def test_r33_held_sends_are_no_part_of_the_log_and_keep_their_order(rig):
    """1. Sends arrive while the hold is on: no answer, the log stands. 2. The old master reopens:
    all are answered, in the order of their arrival, and the next one after them."""
    first = await rig.send(body=b"before")
    assert first.code == 0
    hold, store = rig.service.path.hold, rig.service.store
    end = store.max_phy_offset
    hold.begin()
    waiting = [asyncio.create_task(rig.send(body=b"%d" % n)) for n in range(5)]
    await until(lambda: len(hold) == 5)
    assert store.max_phy_offset == end
    assert not any(task.done() for task in waiting)
    assert rig.service.status.table()["heldSends"] == "5"
    hold.release()
    replies = await asyncio.gather(*waiting)
    assert [(r.code, r.ext["queueOffset"]) for r in replies] == [(0, str(n)) for n in range(1, 6)]
    after = await rig.send(body=b"after")
    assert after.ext["queueOffset"] == "6"


async def test_r33_at_a_role_change_held_sends_get_the_new_master_and_are_not_stored(rig):
    assert (await rig.send()).code == 0
    hold, gate = rig.service.path.hold, rig.service.path.gate
    end = rig.service.store.max_phy_offset
    hold.begin()
    waiting = asyncio.create_task(rig.send())
    await until(lambda: len(hold) == 1)
    gate.leave(8, "10.0.0.2:10911")
    hold.release()
    reply = await waiting
    assert reply.code == 14
    assert reply.ext == {"batonMasterAddress": "10.0.0.2:10911", "batonMasterEpoch": "8"}
    assert rig.service.store.max_phy_offset == end


async def test_a_full_hold_refuses_at_once(rig, monkeypatch):
    assert (await rig.send()).code == 0
    hold = rig.service.path.hold
    hold.begin()
    monkeypatch.setattr(write_path, "HELD_MAX", 1)
    kept = asyncio.create_task(rig.send())
    await until(lambda: len(hold) == 1)
    refused = await rig.send()
    assert (refused.code, refused.ext) == (14, {})
    assert "1 sends wait already" in (refused.remark or "")
    monkeypatch.setattr(write_path, "HELD_BYTES_MAX", 3 * hold._bytes)
    monkeypatch.setattr(write_path, "HELD_MAX", 100)
    assert (await rig.send(body=b"x" * 2 * hold._bytes)).code == 14
    assert (await rig.send(KEYS="k" * 2 * hold._bytes)).code == 14
    hold.release()
    assert (await kept).code == 0


async def test_a_hold_ends_by_itself(rig, monkeypatch):
    assert (await rig.send()).code == 0
    monkeypatch.setattr(write_path, "HELD_MOST_S", 0.01)
    rig.service.path.hold.begin()
    assert (await rig.send()).code == 0
    assert not rig.service.path.hold.active


class Handled:
    """A connection that keeps what it is handed, and is asked whether the hold is on then."""

    closed = False

    def __init__(self, hold: write_path.SendHold) -> None:
        self.kinds: list[int] = []
        self._hold = hold

    def handle_again(self, handler: object, kind: int, header: bytes, body: bytes) -> None:
        assert not self._hold.active, "it would be held again"
        self.kinds.append(kind)


async def test_r34_many_held_sends_are_handled_over_many_turns_in_their_order(monkeypatch):
    """Between the slices the loop does other things, and who comes then stands at the end. Each
    turn handles more than came in the one before, so it ends however many come."""
    monkeypatch.setattr(write_path, "HELD_SLICE", 3)
    hold = write_path.SendHold()
    connection = Handled(hold)
    after_turn: list[int] = []

    def take(kind: int) -> None:
        hold.take(Mock(), connection, kind, b"", b"body")

    hold.begin()
    for kind in range(10):
        take(kind)
    hold.release()
    assert connection.kinds == [0, 1, 2], "the first of them at once"
    late = 10
    while hold.active:
        take(late)
        take(late + 1)
        late += 2
        await asyncio.sleep(0)
        after_turn.append(len(connection.kinds))
    assert connection.kinds == list(range(16))
    assert after_turn == [8, 13, 16]
    assert len(hold) == 0 and hold._bytes == 0


async def test_r33_a_hold_that_begins_again_stops_the_release(monkeypatch):
    """The log must stand from then on: what is left waits for the next release, in its order."""
    monkeypatch.setattr(write_path, "HELD_SLICE", 3)
    hold = write_path.SendHold()
    connection = Handled(hold)
    hold.begin()
    for kind in range(8):
        hold.take(Mock(), connection, kind, b"", b"")
    hold.release()
    hold.begin()
    for _ in range(5):
        await asyncio.sleep(0)
    assert hold.active and connection.kinds == [0, 1, 2]
    hold.release()
    for _ in range(5):
        await asyncio.sleep(0)
    assert not hold.active and connection.kinds == list(range(8))


async def test_r33_a_held_send_that_fails_keeps_no_other_one_waiting():
    hold, handled = write_path.SendHold(), Mock(closed=False)
    handled.handle_again.side_effect = [ValueError("the first"), None, None]
    hold.begin()
    for kind in range(3):
        hold.take(Mock(), handled, kind, b"", b"")
    with pytest.raises(ValueError, match="the first"):
        hold.release()
    await until(lambda: not hold.active)
    assert [call.args[1] for call in handled.handle_again.call_args_list] == [0, 1, 2]


async def test_a_client_that_left_is_not_written_for(rig):
    """The client gave up while its send was held: it is not stored."""
    assert (await rig.send()).code == 0
    hold, end = rig.service.path.hold, rig.service.store.max_phy_offset
    hold.begin()
    waiting = asyncio.create_task(rig.send())
    await until(lambda: len(hold) == 1)
    (_, connection, *_rest) = hold._held[0]
    connection.abort("the test")
    hold.release()
    with pytest.raises(Exception, match=r"closed|lost|connect"):
        await waiting
    assert rig.service.store.max_phy_offset == end
