"""A bad sector under the read map: SIGBUS ends the process, the next start names it (R24)."""

import errno
import mmap
import os
import signal
import subprocess
import sys

import pytest

from batonmq.runtime import disk
from batonmq.runtime.read_faults import ReadFault
from batonmq.store.errors import StoreFormatError
from batonmq.store.suspicion import fault_note

PAGE = mmap.PAGESIZE
READ_BEHIND_THE_END = """
import faulthandler, mmap, os, sys
from pathlib import Path
from batonmq.runtime.read_faults import watch
faulthandler.enable()
watch(Path(sys.argv[2]))
fd = os.open(sys.argv[1], os.O_RDWR)
view = memoryview(mmap.mmap(fd, 4 * mmap.PAGESIZE, prot=mmap.PROT_READ))
os.ftruncate(fd, mmap.PAGESIZE)
print(bytes(view[:10]), flush=True)
if sys.argv[3] == "thread":
    import threading, zlib
    thread = threading.Thread(target=lambda: zlib.crc32(view[2 * mmap.PAGESIZE + 7:]))
    thread.start(); thread.join()
bytes(view[2 * mmap.PAGESIZE + 7:])
print("not reached")
"""


@pytest.mark.process
@pytest.mark.parametrize("where", ["main", "thread"])
def test_a_process_that_dies_of_a_page_leaves_word_which_one(tmp_path, where):
    """Also in a thread that has given up the interpreter's lock for a long checksum."""
    file, note = tmp_path / "a file", tmp_path / "note"
    file.write_bytes(bytes(4 * PAGE))
    ran = subprocess.run(
        [sys.executable, "-c", READ_BEHIND_THE_END, file, note, where],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ran.returncode == -signal.SIGBUS
    assert "Bus error" in ran.stderr and "not reached" not in ran.stdout
    assert ReadFault.read(note) == ReadFault(str(file), 2 * PAGE + 7)


class BadPage:
    """`pread` of that page of a segment raises EIO until the page is written."""

    def __init__(self, monkeypatch, path, position):
        self.key = str(path), position
        self.is_bad = True
        self.refuses = False
        monkeypatch.setattr(disk, "pread", self.pread)
        monkeypatch.setattr(disk, "pwrite", self.pwrite)

    def _is_it(self, fd, position):
        return (os.readlink(f"/proc/self/fd/{fd}"), position) == self.key

    def pread(self, fd, size, position):
        if self.is_bad and self._is_it(fd, position):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return os.pread(fd, size, position)

    def pwrite(self, fd, data, position):
        if self._is_it(fd, position):
            if self.refuses:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            self.is_bad = False
        return os.pwrite(fd, data, position)


def filled(rig):
    """Three segments; the second page of the first holds records in its middle."""
    store = rig.open_master()
    rig.put_confirmed(store, *[b"%02d" % n + bytes([65 + n]) * 900 for n in range(20)])
    store.checkpoints.flush_derived()
    log = bytes(store.log.view(0, 8192)), store.max_phy_offset
    rig.kill(store)
    return log


def die_at(rig, position, number=0):
    ReadFault(str(rig.segment(number)), position).write(fault_note(rig.root))


def test_r24_a_page_that_cannot_be_read_is_named_and_makes_the_log_suspect(rig, monkeypatch):
    """1 the process died at a page. 2 the next start cannot read it either. 3 what it held is
    refused by its CRC, no one dies of it again; a replica fetches it from its master."""
    first, end = filled(rig)
    die_at(rig, PAGE + 100)
    page = BadPage(monkeypatch, rig.segment(), PAGE)
    store = rig.open()
    assert not page.is_bad and not fault_note(rig.root).exists()
    assert f"{rig.segment()} at offset" in store.trust.reason
    assert f"cannot read what was written at position {PAGE}" in store.trust.reason
    damage = store.trust.damage
    assert PAGE - 1100 < damage.offset <= PAGE, "the record that the page cuts"
    assert damage.end_offset >= end == store.max_phy_offset
    assert bytes(store.log.view(PAGE, PAGE)) == bytes(PAGE)
    cut = store.trust.discard_damaged_tail()
    assert cut == damage.offset
    store.slave_log.append_replicated(cut, first[cut:])
    assert store.trust.reason, "until it has caught up with a master"
    store.trust.clear_suspect()
    assert bytes(store.log.view(0, 8192)) == first


def test_r24_a_file_that_was_shortened_under_the_map_is_whole_in_length_again(rig):
    filled(rig)
    with rig.segment().open("r+b") as file:
        file.truncate(PAGE)
    with pytest.raises(StoreFormatError, match="4096 bytes"):
        rig.open()
    die_at(rig, PAGE + 5)
    store = rig.open()
    assert rig.segment().stat().st_size == 8192
    assert f"position {PAGE} of this file" in store.trust.reason
    assert store.trust.discard_damaged_tail() <= PAGE


def test_r24_zeros_at_the_end_do_not_hide_that_more_is_gone_below_them(rig, store):
    """The page lies below where a start begins to read, and the log ends in the zeros behind it:
    all from the page on is fetched again, not only what a start looks at."""
    rig.put_confirmed(store, *[b"%02d" % n + bytes([65 + n]) * 900 for n in range(6)])
    store.checkpoints.flush_derived()
    before = (rig.root / "checkpoint").read_bytes()
    rig.put_confirmed(store, b"06" + b"x" * 900)
    store.checkpoints.flush_derived()
    rig.kill(store)
    (rig.root / "checkpoint").write_bytes(before)  # the queue shows more than it says
    assert PAGE + 1000 < store.max_phy_offset < 8192
    with rig.segment().open("r+b") as file:
        file.truncate(PAGE)
    die_at(rig, PAGE + 5)
    for _ in range(2):
        store = rig.open()
        assert store.trust.damage.offset <= PAGE
        rig.kill(store)
    store = rig.open()
    assert store.trust.discard_damaged_tail() <= PAGE


def test_a_page_that_can_be_read_after_all_is_only_noted(rig):
    filled(rig)
    die_at(rig, PAGE)
    store = rig.open()
    assert not store.trust.reason and not fault_note(rig.root).exists()


def test_a_page_that_cannot_be_written_either_is_named_and_stays_suspect(rig, monkeypatch):
    filled(rig)
    die_at(rig, PAGE)
    page = BadPage(monkeypatch, rig.segment(), PAGE)
    page.refuses = True
    for _ in range(2):
        with pytest.raises(StoreFormatError, match=r"00 *: cannot be read at position 4096"):
            rig.open()
    page.refuses = False
    assert "cannot read" in rig.open().trust.reason


@pytest.mark.parametrize("text", ["", '{"file": "/etc/passwd", "position": 3}', "{", "[]"])
def test_a_note_that_says_nothing_of_the_log_changes_nothing(rig, text):
    filled(rig)
    before = rig.segment().read_bytes()
    fault_note(rig.root).write_text(text)
    store = rig.open()
    assert not store.trust.reason and rig.segment().read_bytes() == before
    assert not fault_note(rig.root).exists()


def test_r24_pages_that_cannot_be_read_are_all_made_good_and_synced(rig, monkeypatch):
    """Bad sectors come in groups. The suspicion is durable before the first is overwritten."""
    filled(rig)
    die_at(rig, 0)
    bad, steps = {0, PAGE}, []

    def is_segment(fd):
        return os.readlink(f"/proc/self/fd/{fd}") == str(rig.segment())

    def pread(fd, size, position):
        if is_segment(fd) and position in bad:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return os.pread(fd, size, position)

    def pwrite(fd, data, position):
        if is_segment(fd):
            steps.append((position, (rig.root / "suspect").exists()))
            bad.discard(position)
        return os.pwrite(fd, data, position)

    def fsync(fd):
        if is_segment(fd):
            steps.append("synced")
        os.fsync(fd)

    monkeypatch.setattr(disk, "pread", pread)
    monkeypatch.setattr(disk, "pwrite", pwrite)
    monkeypatch.setattr(disk, "fsync", fsync)
    assert rig.open().trust.reason
    assert steps[:3] == [(0, True), (PAGE, True), "synced"]
