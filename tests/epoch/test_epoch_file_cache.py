"""The epoch file: Java's bytes, durable changes, and a second copy that is as new as the first."""

from pathlib import Path

import pytest
from failing_disk import failing

from batonmq.epoch.entry import MAX_OFFSET, EpochEntry, entry_after, entry_at, entry_of, with_bytes
from batonmq.epoch.file_cache import EpochFileCache, decode_entries, encode_entries
from batonmq.protocol.errors import CorruptLogError
from batonmq.runtime import durable_file

GOLDEN = Path(__file__).parent.parent / "golden" / "java-5.3.3" / "store"


def starts(cache: EpochFileCache) -> list[tuple[int, int]]:
    return [(entry.epoch, entry.start_offset) for entry in cache.entries]


@pytest.fixture
def cache(tmp_path: Path) -> EpochFileCache:
    cache = EpochFileCache(tmp_path / "epochFileCheckpoint")
    for epoch, start in ((1, 100), (2, 300), (3, 500)):
        assert cache.append(EpochEntry(epoch, start))
    return cache


@pytest.mark.parametrize("broker", ["b0", "b1"])
def test_golden_files_load_and_are_rewritten_alike(broker: str, tmp_path: Path) -> None:
    data = (GOLDEN / broker / "epochFileCheckpoint").read_bytes()
    entries = decode_entries(data)
    assert [(e.epoch, e.start_offset) for e in entries] == [(1, 0), (2, 6269), (3, 6516)]
    assert [e.end_offset for e in entries] == [6269, 6516, MAX_OFFSET]
    assert encode_entries(entries) == data


def test_checksum_vectors() -> None:
    assert encode_entries([EpochEntry(7, 7000), EpochEntry(8, 8000)]) == (
        b"2\n773307083\n7-7000\n8-8000\n"
    )
    assert encode_entries([EpochEntry(1, 0)]) == b"1\n1725254278\n1-0\n"
    assert encode_entries([]) == b"0\n0\n"
    assert decode_entries(b"1\n0\n1-5\n") == (EpochEntry(1, 5),)  # checksum 0 is not checked


def test_init_from_file(cache: EpochFileCache) -> None:
    again = EpochFileCache(cache.path)
    assert again.entries == cache.entries
    found = entry_of(again.entries, 2)
    assert found is not None
    assert found.end_offset == 500
    assert again.last_epoch == 3
    assert again.entries[-1] == EpochEntry(3, 500)


def test_truncate_suffix(cache: EpochFileCache) -> None:
    assert cache.truncate_suffix_by_offset(150)
    assert starts(cache) == starts(EpochFileCache(cache.path)) == [(1, 100)]


def test_entry_at(cache: EpochFileCache) -> None:
    assert entry_at(cache.entries, 350) == EpochEntry(2, 300, 500)
    assert entry_at(cache.entries, 100) == EpochEntry(1, 100, 300)
    assert entry_at(cache.entries, 99) is None
    assert entry_at(cache.entries, 10**12) == EpochEntry(3, 500)


def test_entry_after(cache: EpochFileCache) -> None:
    assert entry_after(cache.entries, 1) == EpochEntry(2, 300, 500)
    assert entry_after(cache.entries, -1) == EpochEntry(1, 100, 300)
    assert entry_after(cache.entries, 3) is None
    assert with_bytes((EpochEntry(1, 0), EpochEntry(2, 0)), 0) == (EpochEntry(2, 0, 0),)


def test_append_refuses_what_does_not_grow(cache: EpochFileCache) -> None:
    assert not cache.append(EpochEntry(3, 900))
    assert not cache.append(EpochEntry(2, 900))
    assert not cache.append(EpochEntry(4, 499))
    assert starts(cache) == [(1, 100), (2, 300), (3, 500)]


def test_the_last_end_is_open_again_after_a_truncation(cache: EpochFileCache) -> None:
    """Java resets a copy: epoch 2 keeps its end 500 and covers nothing written afterwards."""
    assert cache.truncate_suffix_by_offset(500)
    assert cache.entries[-1] == EpochEntry(2, 300, MAX_OFFSET)
    assert entry_at(cache.entries, 600) == EpochEntry(2, 300)


def test_an_empty_list_is_written(cache: EpochFileCache) -> None:
    """Java skips the write, so the old epochs come back after a restart."""
    assert cache.truncate_suffix_by_offset(0)
    assert cache.path.read_bytes() == b"0\n0\n"
    again = EpochFileCache(cache.path)
    assert again.entries == ()
    assert again.last_epoch == -1
    assert again.entries == ()
    assert entry_at(again.entries, 0) is None


def test_truncate_prefix_keeps_the_epoch_of_the_first_byte_and_the_last(
    cache: EpochFileCache,
) -> None:
    assert not cache.truncate_prefix_by_offset(299)
    assert cache.truncate_prefix_by_offset(300)
    assert starts(cache) == [(2, 300), (3, 500)]
    assert cache.truncate_prefix_by_offset(10_000)
    assert starts(cache) == starts(EpochFileCache(cache.path)) == [(3, 500)]


def test_r25_equal_starts_stay_in_order_of_epoch(cache: EpochFileCache) -> None:
    """Two elections without a write: both epochs are kept, also over a restart."""
    assert cache.append(EpochEntry(4, 800))
    assert cache.append(EpochEntry(5, 800))
    assert cache.append(EpochEntry(7, 800))
    again = EpochFileCache(cache.path)
    assert starts(again)[-3:] == [(4, 800), (5, 800), (7, 800)]
    assert entry_at(again.entries, 800) == EpochEntry(7, 800)
    assert entry_at(again.entries, 799) == EpochEntry(3, 500, 800)
    assert again.last_epoch == 7


def test_r25_entries_above_the_log_end_are_dropped(cache: EpochFileCache) -> None:
    """The epoch was noted, its bytes never came: only an entry at the very end may stay."""
    assert not cache.drop_above(500)
    assert cache.drop_above(499)
    assert starts(EpochFileCache(cache.path)) == [(1, 100), (2, 300)]


def test_replace_all_checks_the_order(cache: EpochFileCache) -> None:
    with pytest.raises(ValueError, match="5-0 cannot follow 6-0"):
        cache.replace_all([EpochEntry(6, 0), EpochEntry(5, 0)])
    assert cache.replace_all([EpochEntry(5, 0), EpochEntry(6, 0)])
    assert starts(EpochFileCache(cache.path)) == [(5, 0), (6, 0)]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "missing"),
        (b"", "empty"),
        (b"\x00\xff\x00", "not a count and a checksum"),
        (b"3\n773307083\n7-7000\n8-8000\n", "2 entries where 3"),
        (b"2\n773307084\n7-7000\n8-8000\n", "checksum 773307083 where 773307084"),
        (b"1\n0\n7_7000\n", "no entry"),
        (b"1\n0\n-7-7000\n", "no entry"),
        (b"2\n0\n8-8000\n7-9000\n", "7-9000 cannot follow 8-8000"),
        (b"2\n0\n7-7000\n7-7000\n", "7-7000 cannot follow 7-7000"),
        (b"2\n0\n7-7000\n8-6999\n", "8-6999 cannot follow 7-7000"),
        (b"1\n0\n7-9223372036854775808\n", "out of range"),
    ],
)
def test_a_bad_file_falls_back_to_the_other_copy(
    cache: EpochFileCache, content: bytes | None, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Main file bad: `.bak` has the same list. Both bad: an error names files and reasons."""
    cache.settle()
    good = cache.path.read_bytes()
    spoil(cache.path, content)
    again = EpochFileCache(cache.path)
    assert again.entries == cache.entries
    assert "epoch_file_from_backup" in caplog.text
    assert reason in caplog.text
    assert cache.path.read_bytes() == good  # healed

    spoil(cache.path, content)
    spoil(durable_file.backup_path(cache.path), b"garbage")
    with pytest.raises(CorruptLogError) as caught:
        EpochFileCache(cache.path)
    assert str(cache.path) in str(caught.value)
    assert reason in str(caught.value)
    assert "epochFileCheckpoint.bak: the first two lines" in str(caught.value)


@pytest.mark.parametrize("error", ["EIO", "EUCLEAN", "EBADMSG"])
def test_what_the_disk_cannot_read_falls_back_to_the_other_copy(
    cache: EpochFileCache, error: str, caplog: pytest.LogCaptureFixture
) -> None:
    cache.settle()
    with failing(f"read_bytes {cache.path.name} {error} once"):
        assert EpochFileCache(cache.path).entries == cache.entries
    assert "epoch_file_from_backup" in caplog.text
    with failing(f"read_bytes .bak {error}"):
        again = EpochFileCache(cache.path)
    assert again.append(EpochEntry(99, 1 << 40))
    assert EpochFileCache(cache.path).entries == again.entries
    for unread in (cache.path.name, ".redo"):  # the newest epochs are in no other file
        with (
            failing(f"read_bytes {unread} {error}"),
            pytest.raises((CorruptLogError, OSError)) as at,
        ):
            EpochFileCache(cache.path)
        assert str(cache.path) in str(at.value)


def spoil(path: Path, content: bytes | None) -> None:
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)


def test_no_file_at_all_is_an_empty_list(tmp_path: Path) -> None:
    cache = EpochFileCache(tmp_path / "epochFileCheckpoint")
    assert cache.entries == ()
    assert list(tmp_path.iterdir()) == []


def test_an_unchanged_list_is_not_written_again(
    cache: EpochFileCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.settle()
    before = cache.path.stat().st_ino
    assert not cache.truncate_suffix_by_offset(10**9)
    assert not cache.drop_above(10**9)
    assert cache.path.stat().st_ino == before
