"""What a slave takes for whole, good records while it receives them (G8)."""

import struct

import pytest

from batonmq.protocol.errors import CorruptLogError
from batonmq.protocol.message_id import host_bytes
from batonmq.store.log_scan import check_record
from tests.records import record_of
from tests.shared.failing_disk import failing

V4, V6 = host_bytes("127.0.0.1", 1), host_bytes("::1", 1)
SEGMENT = 8192


def record(born_host, store_host, topic):
    return record_of(
        topic=topic, queue_id=0, queue_offset=0, physical_offset=0, flag=0, sys_flag=0,
        born_timestamp=1, born_host=born_host, store_timestamp=2, store_host=store_host,
        reconsume_times=0, prepared_transaction_offset=0, body=b"b" * 50, properties=b"K\x01v\x02",
        append_prop_crc=False,
    )  # fmt: skip


@pytest.mark.parametrize("topic", [b"T", b"T" * 127, b"T" * 128, b"T" * 255], ids=len)
@pytest.mark.parametrize("store_host", [V4, V6], ids=len)
@pytest.mark.parametrize("born_host", [V4, V6], ids=len)
def test_g8_a_size_is_checked_before_the_record_is_whole(rig, born_host, store_host, topic):
    """One that is too large would let the records behind it pass for more of the same one."""
    good = record(born_host, store_host, topic)
    slave = rig.open()
    slave.slave_log.append_replicated(0, good[:-1])
    assert slave.slave_log.whole_end == 0
    slave.slave_log.append_replicated(len(good) - 1, good[-1:])
    assert slave.slave_log.whole_end == len(good)
    slave.close()
    slave = rig.beside("other").open()
    with pytest.raises(CorruptLogError, match=f"sum up to {len(good)} bytes"):
        slave.slave_log.append_replicated(0, struct.pack(">i", len(good) + 1) + good[4:])


def master_bytes(rig):
    master = rig.beside("master").open_master()
    puts = [rig.put(master, b"%d" % number + bytes(900)) for number in range(12)]
    master.end_turn()
    data = rig.log_of(master)
    rig.root = rig.folder / "slave"
    return data, puts


@pytest.mark.parametrize("is_spoiled", [False, True])
def test_g8_what_was_written_before_the_disk_was_full_is_checked(rig, is_spoiled):
    """Its end is acknowledged although the bytes behind it found no space."""
    data, puts = master_bytes(rig)
    if is_spoiled:
        at = puts[2].physical_offset + 300
        data = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
    slave = rig.open()
    refused = pytest.raises(CorruptLogError if is_spoiled else OSError)
    with failing(f"posix_fallocate {SEGMENT:020d} ENOSPC"), refused:
        slave.slave_log.append_replicated(0, data)
    expected = puts[2].physical_offset if is_spoiled else SEGMENT
    assert slave.slave_log.whole_end == expected


def test_g8_a_record_that_is_read_for_the_first_time_is_checked_as_an_arriving_one(rig):
    """The body CRC does not see the end of properties; no reader takes what recovery refuses."""
    good = record(V4, V4, b"T")
    slave = rig.open()
    slave.slave_log.append_replicated(0, good)
    assert check_record(slave.log, 0).size == len(good)
    with open(slave.log.segments[0].path, "r+b") as file:
        file.seek(len(good) - 1)
        file.write(b"\0")
    with pytest.raises(CorruptLogError, match="never written to their end"):
        check_record(slave.log, 0)
