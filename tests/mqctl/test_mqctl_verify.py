"""`mqctl verifyStore`: what is whole, what is damaged and where, from the files alone."""

import os
from pathlib import Path

import pytest

from batonmq.protocol.layout import BLANK
from batonmq.protocol.records.codec import (
    END_FILE_MIN_BLANK,
    MAGIC_BLANK,
    NewMessage,
    encode_record,
)
from tests.mqctl.conftest import Run

SEGMENT = 4096


def make_log(store: Path, count: int, *, property_crc: bool = True) -> list[int]:
    """Writes so many records into files of SEGMENT bytes; the offset of each."""
    log, offsets, offset = bytearray(), [], 0
    for n in range(count):
        message = NewMessage("T", 0, b"body %d " % n * 20, b"", 0, None, None, 1, bytes(8))

        def encoded(at: int, n: int = n, message: NewMessage = message) -> bytes:
            return encode_record(message, b"T", n, at, 2, bytes(8), property_crc)

        left = SEGMENT - offset % SEGMENT
        if len(encoded(offset)) + END_FILE_MIN_BLANK > left:
            log += BLANK.struct.pack(left, MAGIC_BLANK).ljust(left, b"\0")
            offset += left
        offsets.append(offset)
        log += encoded(offset)
        offset = len(log)
    folder = store / "commitlog"
    folder.mkdir(parents=True)
    for base in range(0, len(log), SEGMENT):
        part = bytes(log[base : base + SEGMENT])
        (folder / f"{base:020}").write_bytes(part.ljust(SEGMENT, b"\0"))
    return offsets


def change(store: Path, offset: int, what: bytes) -> None:
    path = store / "commitlog" / f"{offset - offset % SEGMENT:020}"
    data = bytearray(path.read_bytes())
    at = offset % SEGMENT
    data[at : at + len(what)] = what
    path.write_bytes(data)


@pytest.mark.parametrize("property_crc", [True, False])
def test_a_whole_log_is_whole(mqctl: Run, tmp_path: Path, property_crc: bool) -> None:
    offsets = make_log(tmp_path, 50, property_crc=property_crc)
    ran = mqctl("verifyStore", str(tmp_path), "--json")
    assert (ran.code, ran.json["healthy"], ran.json["records"]) == (0, True, 50)
    assert ran.json["beginOffset"] == 0 and ran.json["endOffset"] > offsets[-1]
    assert (ran.json["damages"], ran.json["tailBytes"]) == ([], 0)
    ran = mqctl("verifyStore", str(tmp_path / "commitlog"))
    assert (ran.code, ran.out.splitlines()[-1]) == (0, "whole")


def test_a_store_of_a_java_broker_is_whole(mqctl: Run) -> None:
    store = Path(__file__).parents[1] / "golden" / "java-5.3.3" / "store" / "b1"
    ran = mqctl("verifyStore", str(store), "--json")
    assert (ran.code, ran.json["records"], ran.json["endOffset"]) == (0, 22, 6760)


def test_g8_flipped_bytes_are_found_with_file_and_offset(mqctl: Run, tmp_path: Path) -> None:
    """In the body, in the properties' CRC, in a size, and in the last record of a clean stop."""
    offsets = make_log(tmp_path, 50)
    for hit, at in ((3, 120), (20, 4), (30, 0), (49, 120)):
        change(tmp_path, offsets[hit] + at, b"\xff\xfe\xfd\xfc\xfb\xfa\xf9\xf8")
    ran = mqctl("verifyStore", str(tmp_path), "--json")
    assert (ran.code, ran.json["records"]) == (1, 46)
    assert [each["offset"] for each in ran.json["damages"]] == [offsets[n] for n in (3, 20, 30, 49)]
    assert ran.json["damages"][0]["bytes"] == offsets[4] - offsets[3]
    assert "CRC is wrong" in ran.json["damages"][0]["what"]
    assert ran.json["damages"][0]["file"].endswith(f"{0:020}")
    out = mqctl("verifyStore", str(tmp_path)).out
    assert f"at offset {offsets[3]}" in out and out.splitlines()[-1].startswith("damaged")


def test_what_a_crash_left_behind_the_last_record_is_no_damage(mqctl: Run, tmp_path: Path) -> None:
    offsets = make_log(tmp_path, 10)
    change(tmp_path, offsets[9] + 100, bytes(200))
    (tmp_path / "abort").touch()
    ran = mqctl("verifyStore", str(tmp_path), "--json")
    assert (ran.code, ran.json["records"], ran.json["endOffset"]) == (0, 9, offsets[9])
    assert ran.json["tailBytes"] > 0
    (tmp_path / "abort").unlink()
    assert mqctl("verifyStore", str(tmp_path)).code == 1, "after a clean stop all was written"


def test_a_missing_file_zeros_and_kept_bytes_are_told(mqctl: Run, tmp_path: Path) -> None:
    make_log(tmp_path, 60)
    files = sorted((tmp_path / "commitlog").iterdir())
    files[1].unlink()
    files[2].write_bytes(bytes(SEGMENT))
    kept = tmp_path / "truncated" / "1" / f"{0:020}"
    kept.parent.mkdir(parents=True)
    kept.write_bytes(b"x" * 77)
    ran = mqctl("verifyStore", str(tmp_path), "--json")
    assert ran.code == 1
    gap, zeros = ran.json["damages"]
    assert (gap["offset"], gap["bytes"]) == (SEGMENT, SEGMENT)
    assert (zeros["offset"], zeros["what"]) == (2 * SEGMENT, "zeros where a record should begin")
    assert ran.json["truncated"] == [{"file": str(kept), "bytes": 77}]
    assert (
        "cut from this log and kept: 77 bytes in 1 file" in mqctl("verifyStore", str(tmp_path)).out
    )


def test_space_that_is_only_allocated_is_not_read(
    mqctl: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A segment of 1 GiB with a few records took `mqctl verdict` more than its 5 s."""
    make_log(tmp_path, 5)
    (segment,) = (tmp_path / "commitlog").iterdir()
    os.truncate(segment, 1 << 30)
    read, real = [0], os.pread

    def pread(fd: int, size: int, at: int) -> bytes:
        read[0] += size
        return real(fd, size, at)

    monkeypatch.setattr("os.pread", pread)
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr("asyncio.sleep", sleep)
    ran = mqctl("verifyStore", str(tmp_path), "--json", "--rate", "16")
    assert (ran.code, ran.json["records"], ran.json["tailBytes"]) == (0, 5, 0)
    assert read[0] < 16 << 20
    assert max(waits) < 1, "it waited for 1 GiB"


@pytest.mark.parametrize("window", [64, 300, 5000])
def test_a_small_window_finds_the_same(
    mqctl: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: int
) -> None:
    """A record is larger than the window, or lies across two of them."""
    offsets = make_log(tmp_path, 50)
    change(tmp_path, offsets[20] + 120, b"\xff\xfe")
    whole = mqctl("verifyStore", str(tmp_path), "--json").json
    monkeypatch.setattr("batonmq.mqctl.store_check.WINDOW_BYTES", window)
    assert mqctl("verifyStore", str(tmp_path), "--rate", "1000", "--json").json == whole
    assert whole["records"] == 49


def test_what_the_disk_cannot_read_is_damage_and_the_rest_is_checked(
    mqctl: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offsets = make_log(tmp_path, 50)
    bad = range(1024, 1536)
    real = os.pread

    def pread(fd: int, size: int, at: int) -> bytes:
        name = os.readlink(f"/proc/self/fd/{fd}")
        if name.endswith(f"{0:020}") and at < bad.stop and at + size > bad.start:
            raise OSError(5, "Input/output error")
        return real(fd, size, at)

    monkeypatch.setattr("batonmq.mqctl.store_check.WINDOW_BYTES", 512)
    monkeypatch.setattr("os.pread", pread)
    ran = mqctl("verifyStore", str(tmp_path), "--json")
    assert ran.code == 1
    (damage,) = ran.json["damages"]
    assert damage["what"] == "cannot be read: Input/output error"
    assert damage["offset"] <= bad.start and damage["offset"] + damage["bytes"] >= bad.stop
    assert ran.json["records"] >= 50 - 8 and ran.json["endOffset"] > offsets[-1]


def test_a_folder_without_a_log_is_wrong_usage(mqctl: Run, tmp_path: Path) -> None:
    ran = mqctl("verifyStore", str(tmp_path))
    assert ran.code == 2 and "no commit log" in ran.err
    assert mqctl("verifyStore", str(tmp_path / "nowhere")).code == 2
