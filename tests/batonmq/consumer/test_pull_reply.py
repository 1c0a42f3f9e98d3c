"""What a consumer takes from the answer of a pull or a POP, however much it would inflate to."""

import zlib
from dataclasses import replace

import pytest

from batonmq.client.consumer import pop_consumer, pulling
from batonmq.client.consumer.pulling import PullRequest, build_subscription, read_pull_reply
from batonmq.protocol.message import MessageExt, MessageQueue
from batonmq.protocol.sysflag import COMPRESSED
from batonmq.remoting.command import RemotingCommand
from tests.records import message


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> list[MessageExt]:
    """32 messages of 128 KiB each may stand for 4 GiB: here 1,500 bytes are too much."""
    many = [replace(message(n, zlib.compress(bytes(1000))), sys_flag=COMPRESSED) for n in range(4)]
    for module in (pulling, pop_consumer):
        monkeypatch.setattr(module, "decode_records", lambda body: many)
        monkeypatch.setattr(module, "INFLATED_BODY_SIZE_MAX", 1500)
    return many


def test_r58_messages_that_inflate_to_too_much_come_with_the_next_pull(
    many: list[MessageExt],
) -> None:
    reply = RemotingCommand(0, ext={"nextBeginOffset": "4", "minOffset": "0", "maxOffset": "4"})
    request = PullRequest("g", MessageQueue("T", "a", 0), 0, build_subscription("T", "*", 1))
    result = read_pull_reply(reply, request, "10.0.0.1:1")
    assert [each.body for each in result.messages] == [bytes(1000)] * 2
    assert (result.next_begin_offset, result.max_offset) == (2, 4)


def test_r58_messages_that_inflate_to_too_much_come_with_a_later_pop(
    many: list[MessageExt],
) -> None:
    reply = RemotingCommand(0, ext={"popTime": "1", "invisibleTime": "1", "reviveQid": "0"})
    found = pop_consumer._with_handles(reply, "T", "a")
    assert [each.body for each in found] == [bytes(1000)] * 2
    assert all(len(each.body) < 1000 for each in many[2:])
