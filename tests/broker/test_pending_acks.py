"""PendingAcks: code 0 leaves for confirmed bytes of the right epoch, and for nothing else."""

import json

import pytest

from batonmq.broker.write.pending_acks import PendingAcks
from batonmq.remoting.headers import SendReplies

REPLIES = SendReplies("DefaultRegion")


class Sink:
    def __init__(self) -> None:
        self.frames: list[bytes] = []

    def write(self, frame: bytes) -> None:
        self.frames.append(frame)

    @property
    def codes(self) -> list[int]:
        return [json.loads(frame[8:])["code"] for frame in self.frames]


def reply(opaque: int) -> bytes:
    return REPLIES.ok(opaque, b"00", 0, opaque, b"KEY")


def test_replies_leave_in_order_up_to_confirm_offset():
    acks, sink = PendingAcks(3000), Sink()
    for number, end in enumerate((100, 200, 300)):
        acks.add(end, 0, sink, reply(number))
    assert acks.confirm(99, 0) == 0
    assert acks.confirm(200, 0) == 2
    assert [json.loads(f[8:])["opaque"] for f in sink.frames] == [0, 1]
    assert len(acks) == 1


def test_r4_a_role_change_fails_what_waits_before_the_next_epoch_begins():
    """1. Two writes wait in epoch 1. 2. The role changes: both are refused. 3. In epoch 2 the
    same offsets are confirmed, with other bytes: nothing of epoch 1 is released by that."""
    acks, sink = PendingAcks(3000), Sink()
    acks.begin_epoch(1)
    acks.add(100, 0, sink, reply(1))
    acks.add(200, 0, sink, reply(2))
    with pytest.raises(AssertionError, match="R4"):
        acks.begin_epoch(2)
    assert acks.fail_all(14, "role changed") == 2
    acks.begin_epoch(2)
    acks.confirm(10_000, 0)
    assert sink.codes == [14, 14]


def test_a_late_write_is_answered_with_its_place_in_the_log():
    """12 means stored: a Java client reads the extFields of such a reply like those of code 0."""
    acks, sink = PendingAcks(3000), Sink()
    acks.add(100, 0, sink, reply(7))
    assert acks.expire(2999, lambda end: (12, "late")) == 0
    assert acks.expire(3000, lambda end: (12, f"late at {end}")) == 1
    header = json.loads(sink.frames[0][8:])
    assert (header["code"], header["opaque"], header["remark"]) == (12, 7, "late at 100")
    assert header["extFields"]["queueOffset"] == "7"


def test_waiters_get_their_outcome_once():
    acks = PendingAcks(3000)
    outcomes: list[int] = []
    acks.add_waiter(100, 0, lambda code, remark: outcomes.append(code))
    acks.add_waiter(200, 0, lambda code, remark: outcomes.append(code))
    acks.add_waiter(300, 0, lambda code, remark: outcomes.append(code))
    acks.confirm(100, 0)
    acks.expire(3000, lambda end: (12 if end == 200 else 10, ""))
    acks.fail_all(14, "")
    assert outcomes == [0, 12, 10]


def test_the_oldest_reply_shows_how_long_writes_wait():
    acks = PendingAcks(3_000)
    assert acks.waited_ms(50) == 0
    acks.add(100, 60, Sink(), b"")
    acks.add(200, 80, Sink(), b"")
    assert acks.waited_ms(90) == 30
    acks.confirm(100, 0)
    assert acks.waited_ms(90) == 10


def test_r4_a_waiter_for_a_confirmation_fails_with_the_role_change():
    """Offsets of retries, locks, topics and ends of transactions wait so."""
    acks, outcomes = PendingAcks(3000), list[tuple[int, str]]()
    acks.add_waiter(100, 0, lambda code, remark: outcomes.append((code, remark)))
    acks.confirm(99, 0)
    assert outcomes == []
    assert acks.fail_all(14, "role changed") == 1
    acks.confirm(10_000, 0)
    assert outcomes == [(14, "role changed")]
