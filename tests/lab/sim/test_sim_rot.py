"""What the simulation knows of bits that flipped, and what faults do to files of a cut."""

import errno
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lab.sim.cluster import cluster_of
from lab.sim.cuts import WholeGroup
from lab.sim.disk import HostDisk
from lab.sim.rot import Rot, read_log
from lab.sim.settings import Settings
from lab.sim.sightings import _is_kept


def host_at(root: Path, data: bytes) -> Any:
    """A broker that runs, with a log of two segments of 8 bytes."""
    folder = root / "store" / "commitlog"
    folder.mkdir(parents=True)
    for start in (0, 8):
        (folder / f"{start:020d}").write_bytes(data[start : start + 8])

    def view(offset: int, size: int) -> bytes:
        start = offset - offset % 8
        return (folder / f"{start:020d}").read_bytes()[offset - start :][:size]

    store = SimpleNamespace(log=SimpleNamespace(view=view))
    return SimpleNamespace(
        name="broker 1",
        disk=SimpleNamespace(root=root),
        world=SimpleNamespace(settings=SimpleNamespace(segment_size=8)),
        service=SimpleNamespace(store=store),
    )


def test_a_flipped_bit_is_known_as_long_as_it_shows(tmp_path: Path) -> None:
    truth = bytearray(b"0123456789abcdef")
    rot, host = Rot(truth), host_at(tmp_path, bytes(truth))
    rot.flip(host, 9, 1 << 6)
    segment = tmp_path / "store" / "commitlog" / f"{8:020d}"
    assert segment.read_bytes() == b"8yabcdef" and rot.of(host) == {9: 64}
    assert rot.read(host, 4, 16) == truth[4:], "the byte that was there is read"
    assert rot.met == {"broker 1"}
    segment.write_bytes(b"89abcdef")  # it was fetched again
    assert rot.of(host) == {} and rot.read(host, 0, 16) == truth
    segment.write_bytes(b"8!abcdef")
    assert rot.read(host, 8, 16) == b"8!abcdef", "another wrong byte is not mended"


def test_a_call_fails_within_a_cut_and_not_before(tmp_path: Path) -> None:
    disk = HostDisk(tmp_path / "host", random.Random(1))
    disk.plan.fail_within = ("store/truncation.intent", 2, errno.ENOSPC)
    for _ in range(3):
        disk.before("pwrite", "x")
    (disk.root / "store").mkdir()
    (disk.root / "store" / "truncation.intent").touch()
    disk.before("pread", "x")
    disk.before("pwrite", "x")
    with pytest.raises(OSError, match="No space"):
        disk.before("fdatasync", "x")
    disk.before("pwrite", "x")
    assert disk.plan.is_idle


def test_a_segment_that_was_made_ahead_holds_nothing_of_what_was_cut(tmp_path: Path) -> None:
    folder = tmp_path / "000001-100-300"
    folder.mkdir()
    (folder / f"{100:020d}.tail").write_bytes(b"a" * 100)
    (folder / f"{200:020d}").write_bytes(b"b" * 200)
    (folder / f"{400:020d}").write_bytes(bytes(200))
    assert _is_kept(tmp_path, 100, b"a" * 100 + b"b" * 100)
    assert not _is_kept(tmp_path, 100, b"a" * 100 + b"c" * 100)


@pytest.mark.parametrize("role", ["slave", "master"])
def test_r24_the_background_check_finds_flipped_bytes_and_the_replica_heals(role: str) -> None:
    """1. Eight bytes of an old segment change, at rest; nobody reads them. 2. The replica finds
    them: a slave leaves the set, a master hands over first. 3. It fetches that part again and is a
    member again. Everything that was acknowledged is there, and nobody went without service."""
    settings = Settings(scrub_rate=1 << 20)
    with cluster_of(4, settings) as cluster:
        traffic = WholeGroup(cluster)
        (master,) = (host for host in cluster.brokers.values() if host.is_open)
        host = master if role == "master" else cluster.brokers[1 + master.number % 3]
        store = host.service.store
        traffic.until(lambda: store.confirm_offset > 3 * settings.segment_size, 120)
        cluster.run(1.0)
        epoch = cluster.promises.group.master_epoch
        good = read_log(store, 0, settings.segment_size)
        for number in range(8):
            cluster.promises.rot.flip(host, 5_000 + number, 0x41 + number)
        assert read_log(store, 0, settings.segment_size) != good

        traffic.until(lambda: store.scrub.found_total == 1, 120)
        aside = host.disk.root / "store" / "truncated"
        traffic.until(lambda: any(aside.iterdir()), 5)
        traffic.until(lambda: store.trust.damage is None and traffic.is_whole, 60)
        assert read_log(store, 0, settings.segment_size) == good
        group = cluster.promises.group
        assert (group.master_epoch > epoch) == (role == "master")
        assert master.is_open == (role == "slave")
