"""One message stops no feature (R54): what can never be carried out is set aside, and named."""

import json

import pytest
from lone_broker import Rig, end_header, end_of, messages, until

from batonmq.broker.schedule.delivery import Delivery
from batonmq.broker.send import send_processor
from batonmq.protocol.bodies import PROBLEMS_KEY
from batonmq.protocol.numbers import whole_number
from batonmq.protocol.properties import PROPERTIES_ROOM, PROPERTIES_SIZE_MAX

HOUR_MS = 3_600_000


async def longest(rig: Rig, **properties: str) -> int:
    """The longest pad that a send is acknowledged with."""
    low, high = 0, 40_000
    while low + 1 < high:
        middle = (low + high) // 2
        sent = await rig.send("PROBE", b"x", pad="x" * middle, **properties)
        low, high = (middle, high) if sent.code == 0 else (low, middle)
    return low


@pytest.mark.parametrize("keeps_room", [True, False])
async def test_r54_properties_of_any_accepted_length_stop_no_timer(
    rig, clock, monkeypatch, keeps_room
):
    """Without the room: as logs of older brokers, and of Java's, have them."""
    if not keeps_room:
        monkeypatch.setattr(send_processor, "require_space", lambda properties: None)
    pad = "x" * await longest(rig, TIMER_DELAY_SEC="250000")
    assert (PROPERTIES_SIZE_MAX - len(pad) > PROPERTIES_ROOM) is keeps_room
    assert (await rig.send("T", b"long", pad=pad, TIMER_DELAY_SEC="60")).code == 0
    assert (await rig.send("U", b"later", TIMER_DELAY_SEC="61", UNIQ_KEY="K2")).code == 0
    clock.ahead_ms = HOUR_MS
    await until(lambda: end_of(rig, "U") == 1)
    (message,) = await messages(rig, "T")
    assert message.properties["pad"] == pad


async def test_a_property_as_long_as_in_rocketmq_s_own_tests_is_accepted(rig):
    """ChinaPropIT and MessageExceptionIT send 10,240 Chinese characters."""
    sent = await rig.send("T", b"x", key="\u4e00" * 10_240, WAIT="true", UNIQ_KEY="K" * 32)
    assert sent.code == 0, sent.remark


async def test_r54_what_is_longer_than_clients_may_send_by_now_is_delivered(rig, clock):
    waits = {"DELAY": "3"}
    half = {"TRAN_MSG": "true", "PGROUP": "pg", "UNIQ_KEY": "K2"}
    assert (await rig.send("T", b"x" * 200_000, **waits)).code == 0
    held = await rig.send("V", b"x" * 200_000, **half)
    assert (await rig.send("U", b"later", UNIQ_KEY="K3", **waits)).code == 0
    timed = await rig.send("W", b"x" * 200_000, UNIQ_KEY="K4", TIMER_DELAY_SEC="60")
    failed = await rig.send("F", b"x" * 200_000, UNIQ_KEY="K5")
    assert timed.code == failed.code == 0
    assert (await rig.ask(25, {}, b"maxMessageSize=100000\ntransactionCheckMax=100000\n")).code == 0
    clock.ahead_ms = HOUR_MS
    await until(lambda: end_of(rig, "T") == end_of(rig, "U") == 1)
    assert (await rig.ask(37, end_header(held, "8"))).code == 0
    await until(lambda: end_of(rig, "V") == 1)
    await until(lambda: end_of(rig, "W") == 1)
    back = {"group": "g", "offset": str(int(failed.ext["msgId"][16:], 16))}
    assert (await rig.ask(36, back | {"delayLevel": "0"})).code == 0
    assert (await rig.ask(36, back | {"delayLevel": "-1"})).code == 0
    await until(lambda: end_of(rig, "%DLQ%g") == 1)
    clock.ahead_ms = 2 * HOUR_MS
    await until(lambda: end_of(rig, "%RETRY%g") == 1)


@pytest.mark.parametrize("wish", [{"DELAY": "1"}, {"TIMER_DELAY_SEC": "1"}])
async def test_r54_a_message_that_cannot_be_delivered_is_set_aside_and_named(
    rig, clock, monkeypatch, wish
):
    deliver = Delivery.deliver

    def poisoned(self: Delivery, message: object, stored_at: int) -> bool:
        if message.body == b"poison":
            raise IndexError("of this message")
        return deliver(self, message, stored_at)

    monkeypatch.setattr(Delivery, "deliver", poisoned)
    for body in (b"poison", b"good"):
        assert (await rig.send("T", body, **wish)).code == 0
    clock.ahead_ms = HOUR_MS
    await until(lambda: end_of(rig, "T") == 1)
    reply = await rig.ask(28)
    problems = json.loads(json.loads(reply.body)["table"][PROBLEMS_KEY])
    assert any("set messages aside" in one and "of this message" in one for one in problems)


@pytest.mark.parametrize("immunity", ["9" * 5000, "9" * 19, "-1", "٣", "1_0"])
async def test_r54_no_number_of_a_half_message_stops_transactions(rig, immunity):
    fields = {"TRAN_MSG": "true", "PGROUP": "pg"}
    odd = {"CHECK_IMMUNITY_TIME_IN_SECONDS": immunity}
    assert (await rig.send("T", b"odd", UNIQ_KEY="K1", **fields, **odd)).code == 0
    later = await rig.send("T", b"later", UNIQ_KEY="K2", **fields)
    assert (await rig.ask(37, end_header(later, "8"))).code == 0
    await until(lambda: end_of(rig, "T") == 1)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("0", 0),
        ("-12", -12),
        (b"7", 7),
        ("9223372036854775807", (1 << 63) - 1),
        ("9223372036854775808", None),
        ("-9223372036854775808", -(1 << 63)),
        ("9" * 5000, None),
        ("", None),
        (b"", None),
        ("-", None),
        ("1_0", None),
        ("٣", None),
        ("²", None),
        (" 1", None),
    ],
)
def test_r54_numbers_of_clients_are_those_of_java(text, number):
    assert whole_number(text) == number
