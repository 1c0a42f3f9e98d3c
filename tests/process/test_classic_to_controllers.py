"""A log that was written without controllers comes under them: it gets its first epoch."""

from pathlib import Path

import pytest

from batonmq.protocol.records.codec import NewMessage, decode_records
from batonmq.store.config import StoreConfig
from batonmq.store.message_store import MessageStore
from batonmq.store.recovery import ConfirmedByLog
from lab.cluster import frames
from lab.cluster.connection import BlockingConnection
from lab.cluster.java import SEGMENT
from lab.cluster.mixed import MixedGroup
from lab.cluster.stores import log_bytes

pytestmark = pytest.mark.process

HOST = bytes([127, 0, 0, 1, 0, 0, 42, 159])
TOPIC = "Old"
COUNT = 300


def classic_store(root: Path) -> int:
    """A store of classic mode with COUNT messages in more than one segment; the log's end."""
    config = StoreConfig(store_path_root_dir=str(root), mapped_file_size_commit_log=SEGMENT)
    store = MessageStore(config, store_host=HOST, confirm_rule=ConfirmedByLog())
    store.open()
    store.prepare_master()
    for number in range(COUNT):
        body = b"%d " % number + b"x" * 5_000
        message = NewMessage(TOPIC, 0, body, b"", 0, None, None, born_timestamp=1, born_host=HOST)
        store.appender.put_message(message)
        store.end_turn()
    end = store.log.max_offset
    store.close()
    return end


def numbers_at(address: str) -> list[int] | None:
    """All that the master has; None if that broker does not lead (now)."""
    found: list[int] = []
    with BlockingConnection(address) as connection:
        while len(found) < COUNT:
            reply = connection.pull(TOPIC, len(found))
            if reply.code == frames.SYSTEM_BUSY:
                return None
            assert reply.code == frames.OK, reply
            found += [int(m.body.split()[0]) for m in decode_records(reply.body)]
    return found


def test_a_classic_log_gets_its_first_epoch(tmp_path: Path) -> None:
    """The store of a classic master, copied to one broker of a new group: that one is elected, its
    whole log is the first epoch, a second replica fetches it from its first byte, and takes over.
    A broker with another classic log, of which nobody knows whether it is the same, stays out."""
    with MixedGroup(tmp_path) as group:
        end = classic_store(group.store(0))
        classic_store(group.store(2))
        group.start_ours(0)
        group.wait_for("the master", lambda: group.master() == 0 and group.is_open(0))
        assert group.epochs(0)[0][1] == 0
        group.start_ours(1)
        group.wait_in_sync(0, 1)
        assert log_bytes(group.store(0), end) == log_bytes(group.store(1), end)
        group.start_ours(2)
        group.kill(0)
        group.wait_for("a new master", lambda: group.master() == 1 and group.is_open(1))
        found = group.wait_for("its messages", lambda: numbers_at(group.address(1)))
        assert found == list(range(COUNT))
        text = "no epoch file names their epochs"
        group.wait_for("the reason", lambda: text in group.diagnostics())
        assert 2 not in group.in_sync()
