"""Batch bodies, names and attributes of topics, flags, and errors that know their wire code."""

import json
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batonmq.protocol.attributes import altered
from batonmq.protocol.batch import BatchItem, encode_batch, split_batch
from batonmq.protocol.codes import ResponseCode
from batonmq.protocol.errors import BrokerRefusal, FencedError, ResponseError
from batonmq.protocol.message import Message, MessageQueue
from batonmq.protocol.sysflag import has_queue_unit
from batonmq.protocol.topic_name import METADATA_TOPIC, check_send_allowed, is_system_topic

GOLDEN = Path(__file__).parents[1] / "golden/java-5.3.3/remoting/broker-320.json"
ITEM = st.builds(
    BatchItem, st.binary(max_size=20), st.binary(max_size=20), st.integers(-(2**31), 2**31 - 1)
)


def test_the_golden_batch_splits_and_joins_to_the_same_bytes() -> None:
    body = bytes.fromhex(json.loads(GOLDEN.read_text())["examples"][0]["request"]["body_hex"])
    items = list(split_batch(body))
    assert [item.body for item in items] == [b"batch 0", b"batch 1", b"batch 2"]
    assert encode_batch(items) == body


@given(st.lists(ITEM, min_size=1, max_size=5), st.data())
def test_batches_go_there_and_back_and_cut_ones_are_refused(
    items: list[BatchItem], data: st.DataObject
) -> None:
    body = encode_batch(items)
    assert list(split_batch(body)) == items
    ends = {len(encode_batch(items[:n])) for n in range(1, len(items))}
    cut = data.draw(st.integers(0, len(body) - 1))
    if cut not in ends:
        with pytest.raises(BrokerRefusal) as caught:
            list(split_batch(body[:cut]))
        assert caught.value.code == ResponseCode.MESSAGE_ILLEGAL


@pytest.mark.parametrize(
    ("total", "body_size", "properties_size"), [(26, 1, 1), (24, -65_536, 0), (24, 2, -1)]
)
def test_lengths_of_a_batch_that_disagree_are_refused(
    total: int, body_size: int, properties_size: int
) -> None:
    """Below 0 they would be read from another message, or leave bytes out."""
    item = struct.pack(">iiiii", total, 0, 0, 0, body_size) + b"b"
    item += struct.pack(">h", properties_size) + b"pppp"
    with pytest.raises(BrokerRefusal) as caught:
        list(split_batch(item[:total]))
    assert caught.value.code == ResponseCode.MESSAGE_ILLEGAL


@given(st.binary(max_size=80))
def test_noise_is_refused_or_read_to_its_last_byte(noise: bytes) -> None:
    try:
        items = list(split_batch(noise))
    except BrokerRefusal as refused:
        assert refused.code == ResponseCode.MESSAGE_ILLEGAL
    else:
        assert items and len(encode_batch(items)) == len(noise)


def test_no_client_sends_to_topics_of_the_broker() -> None:
    assert is_system_topic("TBW102") and is_system_topic(METADATA_TOPIC)
    with pytest.raises(BrokerRefusal) as caught:
        check_send_allowed("SCHEDULE_TOPIC_XXXX")
    assert caught.value.code == ResponseCode.NO_PERMISSION
    check_send_allowed("TBW102")


@pytest.mark.parametrize(("kind", "has_unit"), [(0, True), (4, False), (8, True), (12, False)])
def test_neither_half_messages_nor_rollbacks_are_read_by_consumers(
    kind: int, has_unit: bool
) -> None:
    assert has_queue_unit(kind) is has_queue_unit(kind | 0x3F3) is has_unit


def test_what_is_set_when_a_topic_is_made_stays_so() -> None:
    change = {"+cleanup.policy": "DELETE"}
    assert altered(None, change, mixed=False) == {"cleanup.policy": "DELETE"}
    for known in ({}, {"message.type": "FIFO"}):
        with pytest.raises(BrokerRefusal, match="only when the topic is made"):
            altered(known, change, mixed=False)


def test_queues_are_ordered_as_java_orders_them() -> None:
    queues = [MessageQueue("t", "b", 1), MessageQueue("t", "a", 9), MessageQueue("s", "z", 0)]
    assert sorted(queues) == [queues[2], queues[1], queues[0]]
    assert len({*queues, MessageQueue("t", "b", 1)}) == 3


def test_messages_keep_tags_and_keys_as_properties() -> None:
    message = Message.of("T", "body", tags="a", keys="k1 k2")
    message.delay_level = 3
    assert message.properties == {"TAGS": "a", "KEYS": "k1 k2", "DELAY": "3"}
    assert (message.body, message.tags, message.delay_level) == (b"body", "a", 3)


def test_errors_say_what_to_do() -> None:
    assert "fenced" in str(FencedError("masterEpoch", 1, 2))
    assert str(ResponseError(17, "no", "h:1")) == "h:1 answered TOPIC_NOT_EXIST (17): no"
