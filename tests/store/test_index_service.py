"""The index: Java's files answer, ours has the same bytes either way, no crash hides a key."""

import json
import random
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batonmq.protocol.tags import java_string_hash
from batonmq.store import index_batch, index_service
from batonmq.store.file_handles import UNREADABLE, FileHandles
from batonmq.store.index_file import ENTRY, HEADER, IndexFile, file_size, key_hash
from batonmq.store.index_service import IndexService
from tests.shared.failing_disk import failing

GOLDEN = Path(__file__).parent.parent / "golden" / "java-5.3.3" / "store"
SLOTS, ENTRIES = 1000, 4000


class Clock:
    def __init__(self) -> None:
        self.now_ms = 1_795_000_000_000

    def __call__(self) -> int:
        return self.now_ms


def service_at(root: Path, *, index_num: int = ENTRIES, clean: bool = True) -> IndexService:
    service = IndexService(root, slot_num=SLOTS, index_num=index_num, clock_ms=Clock())
    service.load(clean=clean)
    return service


def golden_records(broker: str) -> list[dict[str, object]]:
    lines = (GOLDEN / broker / "commitlog.decoded.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture
def service(tmp_path: Path) -> IndexService:
    return service_at(tmp_path)


@pytest.mark.parametrize("few", [True, False])
@pytest.mark.parametrize("broker", ["b0", "b1"])
def test_the_golden_file_is_built_again_byte_by_byte(broker, few, tmp_path, monkeypatch):
    """Fed with the same records, one by one or as one batch, ours equals Java's file."""
    if not few:
        monkeypatch.setattr("batonmq.store.index_service._BATCH_MIN", 1)
        IndexService.preload()
    service = service_at(tmp_path / "index")
    for record in golden_records(broker):
        properties = record["properties"]
        assert isinstance(properties, dict)
        keys = properties.get("KEYS")
        if record["sysFlag"] != 0xC:
            service.put(
                str(record["topic"]),
                properties["UNIQ_KEY"].encode() if "UNIQ_KEY" in properties else None,
                keys.encode() if keys is not None else None,
                record["physicalOffset"],
                record["storeTimestamp"],
            )
        if few:
            service.drain()
    service.flush()
    service.close()
    (ours,) = (tmp_path / "index").iterdir()
    (javas,) = (GOLDEN / broker / "index").iterdir()
    assert HEADER.unpack_from(ours.read_bytes()) == HEADER.unpack_from(javas.read_bytes())
    assert ours.read_bytes() == javas.read_bytes()


keys_strategy = st.lists(
    st.one_of(
        st.text(st.characters(codec="utf-8", exclude_characters=" "), min_size=1, max_size=8),
        st.sampled_from(["a", "b", "k" * 56, "ä", "polygenelubricants", "\U0001f600"]),
    ),
    min_size=1,
    max_size=40,
)


@settings(deadline=None)
@given(keys_strategy)
def test_numpy_hashes_keys_as_java_does(keys):
    from batonmq.store.index_batch import key_hashes

    topics = [f"topic{index % 3}" for index in range(len(keys))]
    prefixes = [java_string_hash(topic + "#") & 0xFFFFFFFF for topic in topics]
    prefix_column = np.array(prefixes, dtype=np.uint32)
    hashes = key_hashes(prefix_column, [key.encode() for key in keys]).tolist()
    assert hashes == [key_hash(topic, key) for topic, key in zip(topics, keys, strict=True)]


def test_the_hash_of_min_value_is_zero():
    """abs(Integer.MIN_VALUE) is negative in Java, and counts as 0; numpy agrees."""
    from batonmq.store.index_batch import key_hashes

    text = "polygenelubricants"
    assert java_string_hash(text) == -(2**31)
    assert key_hashes(np.zeros(1, np.uint32), [text.encode()]).tolist() == [0]


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=90), min_size=1, max_size=6))
def test_batches_and_single_puts_make_the_same_file(batches):
    """Chains within a batch and to older batches are Java's, whichever way entries come."""
    with tempfile.TemporaryDirectory() as folder:
        handles = FileHandles(4)
        one, many = (
            IndexFile.create(Path(folder) / name, 7, ENTRIES, handles) for name in ("1", "2")
        )
        offset = 0
        for hashes in batches:
            offsets = list(range(offset, offset + len(hashes)))
            offset += len(hashes)
            times = [5000 + 700 * o for o in offsets]
            for hash_, at, time in zip(hashes, offsets, times, strict=True):
                one.put([hash_], [at], [time])
            many.put_batch(
                *(np.array(column, dtype=np.int64) for column in (hashes, offsets, times))
            )
        one.close()
        many.close()
        handles.close()
        assert one.path.read_bytes() == many.path.read_bytes()


def fill(service: IndexService, count: int, *, first: int = 0) -> None:
    for number in range(first, first + count):
        service.put("T", b"U%d" % number, b"k%d all" % (number % 10), number * 100, 1000 * number)


def test_query_by_key_and_time_newest_first_over_several_files(tmp_path):
    service = service_at(tmp_path, index_num=100)  # 33 records of three keys each per file
    fill(service, 150)
    assert service.query("T", "all", 5).phy_offsets == [14900, 14800, 14700, 14600, 14500]
    assert len(list(tmp_path.iterdir())) == 5
    assert service.query("T", "U77", 64).phy_offsets == [7700]
    assert service.query("T", "U77", 64, 77_500, 77_600).phy_offsets == [7700]  # whole seconds
    assert service.query("T", "U77", 64, 78_000, 99_000).phy_offsets == []
    assert service.query("T", "U77", 64, 0, 76_999).phy_offsets == []
    assert service.query("T", "all", 64, 40_000, 42_000).phy_offsets == [4200, 4100, 4000]
    assert len(service.query("T", "k3", 64).phy_offsets) == 15
    assert service.query("Other", "all", 64).phy_offsets == []
    answer = service.query("T", "all", 1)
    assert (answer.last_update_timestamp, answer.last_update_phy_offset) == (149_000, 14900)
    service.close()
    again = service_at(tmp_path, index_num=100)
    assert len(again.query("T", "all", 1000).phy_offsets) == 150
    assert again.end_phy_offset == 14900
    again.close()


def test_a_record_is_indexed_once(service):
    """Dispatch begins again somewhat before the end of the index."""
    fill(service, 10)
    service.drain()
    fill(service, 6, first=6)
    service.drain()
    fill(service, 2, first=3)
    assert service.query("T", "all", 64).phy_offsets == [n * 100 for n in range(11, -1, -1)]
    assert not service._noted
    (file,) = service._files
    assert file.count == 1 + 3 * 12
    service.close()


def test_odd_keys_are_indexed_as_java_does(service):
    """Empty pieces are skipped; a key given twice is found once; a record without keys passes."""
    service.put("T", None, b"  a  b a ", 0, 1)
    service.put("T", b"", b"", 100, 1)
    service.put("T", None, None, 200, 1)
    service.put("T", "ключ".encode(), b"\xff", 300, 1)
    assert service.query("T", "a", 64).phy_offsets == [0]
    assert service.query("T", "b", 64).phy_offsets == [0]
    assert service.query("T", "", 64).phy_offsets == []
    assert service.query("T", "ключ", 64).phy_offsets == [300]
    service.close()


def test_the_first_record_of_an_empty_log_is_indexed(service):
    assert service.end_phy_offset == -1
    service.put("T", b"U", None, 0, 1)
    assert service.query("T", "U", 1).phy_offsets == [0]
    service.truncate_to(0)
    assert service.end_phy_offset == -1
    service.put("T", b"U", None, 0, 1)
    assert service.query("T", "U", 1).phy_offsets == [0]
    service.close()


@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize("cut", [0, 1, 3200, 3300, 3301, 8000, 14900, 14901])
def test_r22_truncated_entries_are_out_of_reach(tmp_path, cut, batch, monkeypatch):
    """The log is cut; other records come to the same offsets; no old key leads there."""
    if batch:
        monkeypatch.setattr("batonmq.store.index_file._LARGE", 1)
        monkeypatch.setattr("batonmq.store.index_service._BATCH_MIN", 1)
        IndexService.preload()
    service = service_at(tmp_path, index_num=100)
    fill(service, 150)
    service.drain()
    assert service.truncate_to(cut) == (cut <= 14900)
    kept = [n * 100 for n in range(149, -1, -1) if n * 100 < cut]
    assert service.query("T", "all", 1000).phy_offsets == kept
    assert service.end_phy_offset == (kept[0] if kept else -1)
    assert not service.truncate_to(cut)

    # A crash now: nothing was written after the truncation returned.
    crashed = service_at(tmp_path, index_num=100, clean=False)
    survivors = crashed.query("T", "all", 1000).phy_offsets
    assert survivors == kept[1:]  # the newest record is dispatched again
    for offset in range(cut, 16_000, 100):
        crashed.put("T", b"new%d" % offset, b"fresh", offset, 10**6)
    assert crashed.query("T", "all", 1000).phy_offsets == survivors
    assert crashed.query("T", "U149", 64).phy_offsets in ([], [14900][: cut > 14900])
    assert len(crashed.query("T", "fresh", 1000).phy_offsets) == len(range(cut, 16_000, 100))
    crashed.close()
    service._handles.close()


def test_r22_dropped_entries_do_not_pass_for_new_ones_after_power_loss(service, tmp_path):
    """Cut, then new entries, of which power loss keeps the header but not the page: the old
    entries must not stand in their place."""
    fill(service, 40)
    service.drain()
    service.truncate_to(2000)
    service._handles.close()
    (path,) = tmp_path.iterdir()
    header = list(HEADER.unpack_from(path.read_bytes()))
    header[3], header[5] = 3900, 1 + 3 * 40
    with path.open("r+b") as file:
        file.write(HEADER.pack(*header))
    again = service_at(tmp_path, clean=False)
    assert again.end_phy_offset == 1800
    assert again.query("T", "U30", 64).phy_offsets == []
    again.close()


def test_r22_a_crash_within_the_truncation_is_made_good_by_doing_it_again(
    service, tmp_path, monkeypatch
):
    """Slots went back, the header did not: reading is right already, repeating finishes it."""
    fill(service, 40)
    service.drain()

    class Crash(Exception):
        pass

    def crash(path: Path) -> None:
        raise Crash

    with monkeypatch.context() as patched:
        patched.setattr("batonmq.store.index_file.sync_file", crash)
        with pytest.raises(Crash):
            service.truncate_to(2000)
    resumed = service_at(tmp_path)
    expected = [n * 100 for n in range(19, -1, -1)]
    assert resumed.query("T", "all", 64).phy_offsets == expected
    assert resumed.truncate_to(2000)
    assert resumed.query("T", "all", 64).phy_offsets == expected
    assert resumed.end_phy_offset == 1900
    resumed.close()
    service._handles.close()


@pytest.mark.parametrize("count", [30, 3000])
def test_after_a_kill_slots_are_built_from_entries(tmp_path, count):
    """Slots were in memory only (batches); the log need not be read again but for the last."""
    service = service_at(tmp_path, index_num=20_000)
    fill(service, count)
    service.drain()
    service._handles.close()  # killed: neither slots nor close
    again = service_at(tmp_path, index_num=20_000, clean=False)
    assert again.end_phy_offset == (count - 2) * 100
    fill(again, 1, first=count - 1)
    found = again.query("T", "all", 5000).phy_offsets
    assert found == [n * 100 for n in range(count - 1, -1, -1)]
    assert again.query("T", "U7", 64).phy_offsets == [700]
    again.close()


@pytest.mark.parametrize("batch", [False, True])
def test_power_loss_left_a_hole_among_the_entries(service, tmp_path, batch, monkeypatch):
    """Everything behind the hole is cut off and comes again from the log."""
    fill(service, 500)
    service.close()
    (path,) = tmp_path.iterdir()
    data = bytearray(path.read_bytes())
    at = HEADER.size + 4 * SLOTS + 301 * ENTRY.size
    data[at : at + 5 * ENTRY.size] = bytes(5 * ENTRY.size)
    path.write_bytes(data)
    if batch:
        monkeypatch.setattr("batonmq.store.index_file._LARGE", 1)
        monkeypatch.setattr("batonmq.store.index_service._BATCH_MIN", 1)
        IndexService.preload()
    service = service_at(tmp_path, clean=False)
    assert service.end_phy_offset < 10_000
    resume = service.end_phy_offset // 100 + 1
    fill(service, 500 - resume, first=resume)
    found = service.query("T", "all", 1000).phy_offsets
    assert found == [n * 100 for n in range(499, -1, -1)]
    service.close()


def test_a_damaged_file_and_those_behind_it_are_built_anew(tmp_path, caplog):
    service = service_at(tmp_path, index_num=100)
    fill(service, 150)
    service.close()
    names = sorted(path.name for path in tmp_path.iterdir())
    (tmp_path / names[1]).write_bytes(b"short")
    again = service_at(tmp_path, index_num=100)
    assert "5 bytes where 6040 belong" in caplog.text
    assert sorted(path.name for path in tmp_path.iterdir()) == names[:1]
    assert again.end_phy_offset == 3200
    again.close()


@pytest.mark.parametrize("clean", [True, False])
def test_a_file_that_the_disk_cannot_read_is_built_anew(tmp_path, clean, caplog):
    """No start fails for good at what the log gives back."""
    service = service_at(tmp_path, index_num=100)
    fill(service, 150)
    service.close()
    names = sorted(path.name for path in tmp_path.iterdir())
    with failing(f"pread {names[1]} EIO"):
        again = service_at(tmp_path, index_num=100, clean=clean)
    assert f"index_file_damaged file={tmp_path / names[1]}" in caplog.text
    assert sorted(path.name for path in tmp_path.iterdir()) == names[:1] and again.was_cut
    again.close()


def test_after_a_failure_nothing_touches_the_index(tmp_path):
    """A slave still dispatches in batches; the next start builds all again."""
    service = service_at(tmp_path, index_num=100)
    fill(service, 150)
    with failing("pwrite * EIO"):
        service.drain()
    one = np.array([10**6], dtype=np.int64)
    with failing("* * EIO") as struck:
        assert service.put_entries(one, one, one)
        fill(service, 600, first=150)
        service.drain()
        assert service.write_back() == [] and service.delete_expired(10**9) == 0
        assert not service.truncate_to(100)
        service.flush()
    assert not struck and (tmp_path / UNREADABLE).exists()
    service.close()
    again = service_at(tmp_path, index_num=100)
    assert again.was_cut and again.end_phy_offset == -1
    again.close()


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        ((0, 0, 0, 0, 0, 101), "entry count 101"),
        ((0, 0, 0, 0, 0, -1), "entry count -1"),
        ((0, 0, 9, 8, 0, 5), "begin offset 9, end offset 8"),
    ],
)
def test_a_garbled_header_is_not_believed(tmp_path, header, reason, caplog):
    size = file_size(SLOTS, 100)
    (tmp_path / "20260101000000000").write_bytes(HEADER.pack(*header).ljust(size, b"\0"))
    service = service_at(tmp_path, index_num=100)
    assert reason in caplog.text
    assert service.end_phy_offset == -1
    service.close()


def test_a_header_that_java_has_not_written_yet_is_of_an_empty_file(tmp_path):
    path = tmp_path / "20260101000000000"
    path.write_bytes(bytes(file_size(SLOTS, 100)))
    service = service_at(tmp_path, index_num=100)
    service.put("T", None, b"k", 100, 1)
    assert service.query("T", "k", 64).phy_offsets == [100]
    assert [file.path for file in service._files] == [path]
    service.close()


def test_r45_what_a_full_disk_keeps_out_of_the_files_is_found_newest_first(service):
    for at in (100, 200, 300, 400):
        service.put("T", None, b"k", at, at)
    with failing("pwrite * ENOSPC"):
        assert service.query("T", "k", 2).phy_offsets == [400, 300]
        assert service.query("T", "k", 64, 200, 300).phy_offsets == [300, 200]
    service.close()


def test_the_hashes_of_so_many_topics_are_kept(service, monkeypatch):
    monkeypatch.setattr(index_service, "_TOPIC_HASHES_MAX", 2)
    for topic in "abc":
        assert service._topic_hash(topic) == java_string_hash(f"{topic}#")
    assert list(service._topic_hashes) == ["c"]


def test_files_below_the_log_expire_but_the_last_stays(tmp_path):
    service = service_at(tmp_path, index_num=100)
    fill(service, 150)
    service.drain()
    assert service.delete_expired(3200) == 0
    assert service.delete_expired(3300) == 1
    assert service.delete_expired(10**9) == 3
    assert len(list(tmp_path.iterdir())) == 1
    assert service.query("T", "all", 1000).phy_offsets[-1] == 13200
    service.truncate_to(0)
    assert list(tmp_path.iterdir()) == []
    assert service.end_phy_offset == -1
    service.close()


def test_names_grow_even_if_the_clock_does_not(tmp_path):
    clock = Clock()
    service = IndexService(tmp_path, slot_num=SLOTS, index_num=100, clock_ms=clock)
    service.load(clean=True)
    for round_ in range(5):
        fill(service, 33, first=33 * round_)
        service.drain()
        clock.now_ms -= 3_600_000
    names = [file.path.name for file in service._files]
    assert names == sorted(set(names))
    assert all(len(name) == 17 for name in names)
    service.close()


def test_flush_makes_slots_durable_and_tells_the_time(service, tmp_path):
    service.flush()
    assert service.end_timestamp == 0
    fill(service, 600)
    service.flush()
    assert service.end_timestamp == 599_000
    assert service.write_back() == []
    (path,) = tmp_path.iterdir()
    count = struct.unpack_from(">i", path.read_bytes(), 36)[0]
    assert count == 1 + 1800
    twin = tmp_path / "twin"
    twin.mkdir()
    shutil.copy(path, twin)
    copy = service_at(twin)
    assert len(copy.query("T", "all", 1000).phy_offsets) == 600
    copy.close()
    service.close()


def test_new_files_are_sparse_and_idle_brokers_load_no_numpy(tmp_path):
    program = f"""
import sys
from pathlib import Path
from batonmq.store.index_service import IndexService
service = IndexService(Path({str(tmp_path)!r}))
service.load(clean=True)
for number in range(40):
    service.put("T", b"U%d" % number, None, number, number)
    if number % 20 == 19:
        service.drain()
assert service.query("T", "U17", 4).phy_offsets == [17]
service.flush()
service.close()
assert "numpy" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    (path,) = tmp_path.iterdir()
    assert path.stat().st_size == 420_000_040
    assert path.stat().st_blocks * 512 < 1_000_000


def test_r22_random_life_equals_a_plain_list(tmp_path):
    """Puts, drains, cuts, kills and restarts in any order: queries equal a scan of a list."""
    rng = random.Random(7)
    service = service_at(tmp_path, index_num=300)
    model: list[tuple[int, str]] = []
    for _ in range(150):
        step = rng.random()
        if step < 0.6:
            for _ in range(rng.choice([1, 5, 120])):
                offset = model[-1][0] + rng.randint(1, 50) if model else 0
                key = f"k{rng.randint(0, 30)}"
                model.append((offset, key))
                service.put("T", None, key.encode(), offset, offset)
        elif step < 0.7:
            service.drain()
        elif step < 0.85:
            cut = rng.randint(0, model[-1][0] + 10) if model else 0
            service.truncate_to(cut)
            model = [entry for entry in model if entry[0] < cut]
        else:
            clean = rng.random() < 0.5
            if clean:
                service.flush()
                service.close()
            else:
                service._handles.close()
            service = service_at(tmp_path, index_num=300, clean=clean)
            for offset, key in model:
                if offset > service.end_phy_offset:
                    service.put("T", None, key.encode(), offset, offset)
        key = f"k{rng.randint(0, 30)}"
        expected = [offset for offset, k in reversed(model) if k == key]
        assert service.query("T", key, 10_000).phy_offsets == expected
    service.close()


def test_long_keys_are_hashed_in_parts(monkeypatch):
    """What is kept for hashing must not grow with what clients send: the outcome is the same."""
    keys = [b"k%d" % number * number for number in range(1, 40)]
    topics = np.arange(39, dtype=np.uint32) * np.uint32(977)
    whole = index_batch.key_hashes(topics, keys)
    seen, real = [], index_batch.PieceHashes
    monkeypatch.setattr(index_batch, "_BYTES_MAX", 256)
    monkeypatch.setattr(index_batch, "PieceHashes", lambda c: seen.append(len(c)) or real(c))
    assert index_batch.key_hashes(topics, keys).tolist() == whole.tolist()
    assert max(seen) <= 256 and sum(seen) == sum(map(len, keys))


def test_a_large_table_of_slots_is_read_whole(tmp_path):
    """More than one read takes at once."""
    path, slots = tmp_path / "slots", 600_000
    path.write_bytes(bytes(40) + np.arange(1, slots + 1, dtype=">i4").tobytes())
    with path.open("rb") as file:
        table = index_batch.SlotTable.read(file.fileno(), 40, slots)
        assert table.used() == slots and table.get(slots - 1) == slots
        with failing("lseek slots EIO"), pytest.raises(OSError, match=str(path)):
            index_batch.SlotTable.read(file.fileno(), 40, slots)


def test_r22_entries_that_were_cut_are_in_no_chain():
    """A slot on the disk may still lead to them: numbers at or above the next entry's."""
    table = index_batch.SlotTable(10)
    table.set(3, 7)
    table.set(4, 2)
    previous, slots, heads = table.chain(np.array([13, 14, 23], dtype=np.int64), 5)
    assert previous.tolist() == [0, 2, 5]
    assert dict(zip(slots.tolist(), heads.tolist(), strict=True)) == {3: 7, 4: 6}


def test_r58_after_the_preload_the_first_large_batch_loads_nothing(tmp_path):
    """In a process of its own: a module is looked for on the disk, and the loop would wait."""
    program = (
        "import sys; from pathlib import Path; from batonmq.store.index_service import *\n"
        "IndexService.preload(); service = IndexService(Path(sys.argv[1]))\n"
        "loaded = set(sys.modules)\n"
        "for n in range(600): service.put('T', b'U%d' % n, b'a b', 100 * n, 5)\n"
        "assert service.end_phy_offset > 0\n"
        "print(*sorted(set(sys.modules) - loaded))\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert run.stdout == "\n"
