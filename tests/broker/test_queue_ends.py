"""Where a queue ends (request 30): what is confirmed, or what a master's log holds."""

from unittest.mock import Mock

import pytest

from batonmq.broker.consume.query_processor import OffsetProcessor
from batonmq.protocol.codes import RequestCode
from batonmq.protocol.errors import BrokerRefusal
from batonmq.remoting.command import RemotingCommand


def test_r28_the_end_of_a_queue_is_what_is_confirmed_unless_the_whole_log_is_asked_for():
    """`committed` false is what a master's log holds, of which nothing is shown yet."""
    queries = Mock()
    queries.max_offset_in_queue.return_value = 5
    queries.next_offset_in_queue.return_value = 7
    gate = Mock(is_master=True)
    processor = OffsetProcessor(Mock(store=Mock(queries=queries), gate=gate), Mock(), Mock())

    def end(**fields: str) -> str:
        ext = {"topic": "T", "queueId": "0", **fields}
        request = RemotingCommand.request(RequestCode.GET_MAX_OFFSET, ext)
        return processor.max_offset(request, Mock()).ext["offset"]

    assert [end(), end(committed="true"), end(committed="false")] == ["5", "5", "7"]
    gate.is_master = False
    assert end() == "5"
    with pytest.raises(BrokerRefusal, match="not the master"):
        end(committed="false")
