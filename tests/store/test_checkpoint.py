"""The checkpoint: Java's five fields, and our recovery point behind its own CRC."""

import errno
import os
from pathlib import Path

import pytest
from failing_disk import failing
from power_cut import watching

from batonmq.protocol.layout import CHECKPOINT_SIZE
from batonmq.runtime import disk
from batonmq.store.checkpoint import QueueTotals, StoreCheckpoint

GOLDEN = Path(__file__).parent.parent / "golden" / "java-5.3.3" / "store"


@pytest.mark.parametrize("broker", ["b0", "b1"])
def test_golden_files_load_and_are_rewritten_alike(broker):
    path = GOLDEN / broker / "checkpoint"
    checkpoint = StoreCheckpoint(path)
    assert checkpoint.confirm_phy_offset == 6760
    assert checkpoint.index_msg_timestamp == 0
    assert checkpoint.physic_msg_timestamp > 1795221000000
    assert checkpoint.recovery_offset is None
    assert checkpoint.encode() == path.read_bytes()


def test_values_survive_and_an_unchanged_file_is_not_written(tmp_path):
    path = tmp_path / "store" / "checkpoint"
    checkpoint = StoreCheckpoint(path)
    assert checkpoint.min_timestamp == 0
    checkpoint.physic_msg_timestamp = 10_000
    checkpoint.logics_msg_timestamp = 9_000
    checkpoint.index_msg_timestamp = 5_500
    checkpoint.master_flushed_offset = 7
    checkpoint.confirm_phy_offset = 1234
    checkpoint.recovery_offset = 2**40
    assert checkpoint.flush()
    assert not checkpoint.flush()
    checkpoint.close()
    assert path.stat().st_size == CHECKPOINT_SIZE

    again = StoreCheckpoint(path)
    assert again.min_timestamp == 6_000
    assert again.master_flushed_offset == 7
    assert again.confirm_phy_offset == 1234
    assert again.recovery_offset == 2**40
    again.recovery_offset = None
    assert again.flush()
    again.close()
    assert StoreCheckpoint(path).recovery_offset is None


def test_a_new_checkpoint_is_there_after_a_power_cut(tmp_path):
    """Its name as well: what it says of the confirmed end tells damage from a torn tail (R24)."""
    with watching(tmp_path / "store") as cut:
        checkpoint = StoreCheckpoint(tmp_path / "store" / "checkpoint")
        checkpoint.confirm_phy_offset = 1234
        checkpoint.flush()
        left = cut.leave(tmp_path / "left")
        checkpoint.close()
    assert StoreCheckpoint(left / "checkpoint").confirm_phy_offset == 1234


def with_totals(path: Path, ends: QueueTotals) -> StoreCheckpoint:
    checkpoint = StoreCheckpoint(path)
    checkpoint.recovery_offset = 4711
    checkpoint.confirm_phy_offset = 5
    checkpoint.queue_totals = ends
    checkpoint.belongs_to("the log")
    checkpoint.flush()
    checkpoint.close()
    return StoreCheckpoint(path)


def test_the_sum_of_the_ends_belongs_to_its_recovery_offset(tmp_path):
    path = tmp_path / "checkpoint"
    again = with_totals(path, QueueTotals(4711, 99, 7))
    assert again.queue_totals == QueueTotals(4711, 99, 7)
    again.lower_recovery(4710)
    again.flush()
    again.close()
    assert StoreCheckpoint(path).queue_totals is None
    assert StoreCheckpoint(path).recovery_offset == 4710


def test_a_sum_that_does_not_fit_is_unknown(tmp_path):
    """Positions come from the log, which a stranger may have written."""
    again = with_totals(tmp_path / "checkpoint", QueueTotals(4711, 1 << 63, 7))
    assert (again.queue_totals, again.recovery_offset) == (None, 4711)


@pytest.mark.parametrize(
    ("at", "recovery_offset", "confirm_offset"),
    [
        *((at, None, 5) for at in (7, 64, 79, 83)),  # the recovery point is torn
        *((at, 4711, 5) for at in (96, 111, 115)),  # the sum is
        (39, None, 4),  # a Java broker used the file: it writes the first 40 bytes only
    ],
)
def test_what_is_torn_is_not_believed_and_the_rest_is(
    tmp_path, at, recovery_offset, confirm_offset
):
    path = tmp_path / "checkpoint"
    with_totals(path, QueueTotals(4711, 99, 7))
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    torn = StoreCheckpoint(path)
    assert torn.queue_totals is None
    assert (torn.recovery_offset, torn.confirm_phy_offset) == (recovery_offset, confirm_offset)


@pytest.mark.parametrize("content", [b"", b"\x01" * 100, bytes(8192)])
def test_a_file_of_another_length_reads_as_zero_and_is_put_right(tmp_path, content):
    path = tmp_path / "checkpoint"
    path.write_bytes(content)
    checkpoint = StoreCheckpoint(path)
    assert checkpoint.encode() == bytes(CHECKPOINT_SIZE)
    checkpoint.flush()
    checkpoint.close()
    assert path.read_bytes() == bytes(CHECKPOINT_SIZE)


def test_r45_what_found_no_room_is_written_by_the_next_flush(tmp_path):
    checkpoint = StoreCheckpoint(tmp_path / "checkpoint")
    checkpoint.flush()
    checkpoint.confirm_phy_offset = 1234
    with failing("pwrite * ENOSPC"), pytest.raises(OSError, match="No space"):
        checkpoint.flush()
    assert checkpoint.flush()
    checkpoint.close()
    assert StoreCheckpoint(tmp_path / "checkpoint").confirm_phy_offset == 1234


def test_a_close_that_fails_is_not_repeated_on_a_descriptor_of_another_file(tmp_path):
    checkpoint = StoreCheckpoint(tmp_path / "checkpoint")
    checkpoint.physic_msg_timestamp = 1
    checkpoint.flush()

    def close(descriptor: int) -> None:
        os.close(descriptor)
        raise OSError(errno.EIO, "Input/output error")

    with pytest.MonkeyPatch.context() as failing:
        failing.setattr(disk, "close", close)
        with pytest.raises(OSError, match="Input/output"):
            checkpoint.close()
        checkpoint.close()
