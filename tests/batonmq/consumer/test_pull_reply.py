"""What a consumer takes from the answer of a pull, however much it would inflate to."""

import zlib
from dataclasses import replace

import pytest

from batonmq.client.consumer import pulling
from batonmq.client.consumer.pulling import PullRequest, build_subscription, read_pull_reply
from batonmq.protocol.message import MessageQueue
from batonmq.protocol.sysflag import COMPRESSED
from batonmq.remoting.command import RemotingCommand
from tests.records import message


def test_r58_messages_that_inflate_to_too_much_come_with_the_next_pull(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """32 messages of 128 KiB each may stand for 4 GiB."""
    many = [replace(message(n, zlib.compress(bytes(1000))), sys_flag=COMPRESSED) for n in range(4)]
    monkeypatch.setattr(pulling, "decode_records", lambda body: many)
    monkeypatch.setattr(pulling, "INFLATED_BODY_SIZE_MAX", 1500)
    reply = RemotingCommand(0, ext={"nextBeginOffset": "4", "minOffset": "0", "maxOffset": "4"})
    request = PullRequest("g", MessageQueue("T", "a", 0), 0, build_subscription("T", "*", 1))
    result = read_pull_reply(reply, request, "10.0.0.1:1")
    assert [each.body for each in result.messages] == [bytes(1000)] * 2
    assert (result.next_begin_offset, result.max_offset) == (2, 4)
