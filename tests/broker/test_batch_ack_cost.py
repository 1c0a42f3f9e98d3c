"""What a batch of acks of a stranger costs (R58)."""

import base64
import time
from unittest.mock import Mock

import pytest

from batonmq.broker.pop import ack_processor
from batonmq.broker.pop.ack_processor import (
    BIT_SET_BYTES_MAX,
    ENTRIES_MAX,
    OFFSETS_MAX,
    AckProcessor,
)
from batonmq.protocol.bodies import BatchAck, BatchAckMessageRequestBody
from batonmq.protocol.codes import RequestCode
from batonmq.protocol.errors import BrokerRefusal
from batonmq.remoting.command import RemotingCommand


def batch(bit_set: bytes, count: int) -> RemotingCommand:
    entry = BatchAck(bit_set=base64.b64encode(bit_set).decode(), consumer_group="g", topic="T")
    body = BatchAckMessageRequestBody(acks=[entry] * count).encode()
    return RemotingCommand.request(RequestCode.BATCH_ACK_MESSAGE, body=body)


@pytest.mark.parametrize(
    "bit_set, count, refused",
    [
        (b"\xff" * BIT_SET_BYTES_MAX, 700, f"more than {OFFSETS_MAX} messages"),
        (b"\xff" * (OFFSETS_MAX // 8) + b"\1", 1, f"more than {OFFSETS_MAX} messages"),
        (b"\1", ENTRIES_MAX + 1, f"at most {ENTRIES_MAX} are allowed"),
        (b"\0" * (BIT_SET_BYTES_MAX + 1), 1, f"at most {BIT_SET_BYTES_MAX} are allowed"),
        (b"\1", ENTRIES_MAX, ""),
        (b"\0" * BIT_SET_BYTES_MAX, 1, ""),
    ],
)
def test_r58_a_batch_of_acks_is_counted_before_it_is_unfolded(bit_set, count, refused, monkeypatch):
    processor = AckProcessor(Mock(), Mock(), Mock())
    request = batch(bit_set, count)
    unfolded = Mock(side_effect=ack_processor._positions)
    monkeypatch.setattr(ack_processor, "_positions", unfolded)
    if refused:
        with pytest.raises(BrokerRefusal, match=refused):
            processor.batch_ack(request, Mock())
    else:
        processor.batch_ack(request, Mock())
    assert unfolded.call_count == (0 if refused else count)


def test_r58_the_largest_bit_set_is_unfolded_in_a_pass():
    def cost_s(size: int) -> float:
        bits = int.from_bytes(b"\0" * (size - 1) + b"\x81", "little")
        tries = []
        for _ in range(7):
            begin = time.thread_time()
            assert ack_processor._positions(bits) == [8 * size - 8, 8 * size - 1]
            tries.append(time.thread_time() - begin)
        return min(tries)

    assert cost_s(BIT_SET_BYTES_MAX) < 16 * cost_s(BIT_SET_BYTES_MAX // 4) + 0.001
