"""What a batch of acks of a stranger costs (R58)."""

import base64
import time
from unittest.mock import Mock

import pytest

from batonmq.broker.pop import ack_processor
from batonmq.broker.pop.ack_processor import (
    BIT_SET_BYTES_MAX,
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


@pytest.mark.parametrize("size, count", [(BIT_SET_BYTES_MAX, 100), (BIT_SET_BYTES_MAX, 700)])
def test_r58_a_batch_of_acks_is_counted_before_it_is_unfolded(size, count):
    processor = AckProcessor.__new__(AckProcessor)
    processor._service, processor._topics = Mock(), Mock()
    request = batch(b"\xff" * size, count)
    unfolded: list[int] = []
    positions = ack_processor._positions

    def noted(bits: int) -> list[int]:
        unfolded.append(bits.bit_count())
        return positions(bits)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ack_processor, "_positions", noted)
        with pytest.raises(BrokerRefusal, match=f"more than {OFFSETS_MAX} messages"):
            processor.batch_ack(request, Mock())
    assert unfolded == []


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
