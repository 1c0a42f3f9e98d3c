"""Dispatch in bulk builds what record by record builds: units, index entries, positions."""

import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batonmq.protocol.errors import CorruptLogError
from batonmq.protocol.message_id import host_bytes
from batonmq.protocol.properties import find_property
from batonmq.protocol.records import columns
from batonmq.protocol.records.codec import NewMessage, message_to_store
from batonmq.protocol.tags import tags_code
from batonmq.protocol.topic_name import SCHEDULE_TOPIC
from batonmq.store import bulk_dispatch, dispatch, log_scan
from tests.shared.failing_disk import failing
from tests.store.conftest import HOST, START_MS

GOLDEN_END = 6760
GOLDEN = Path(__file__).parent.parent / "golden" / "java-5.3.3" / "store"
SYSTEM_TOPIC = "rmq_sys_of_this_test"
LARGE = {"mapped_file_size_commit_log": 1 << 20, "max_index_num": 4000}


class Built(NamedTuple):
    """All that dispatching leaves; the name of an index file is a time and no part of it."""

    units: dict
    next_offsets: dict
    index: list
    announced: list
    handled: list
    ends: list


def bulk(*, always: bool):
    """Whether everything is checked and dispatched in bulk, or nothing."""
    stack = ExitStack()
    for module in (dispatch, log_scan):
        stack.enter_context(patch.object(module, "bulk_pays", lambda size, least: always))
    stack.enter_context(patch.object(dispatch, "_BULK_ROWS", 1))
    return stack


def build(rig, name, data, targets, *, slice_bytes=None, begin=0, **config):
    """A slave's derived files after it got `data` and was told to show it up to each target."""
    announced, handled, ends = [], [], []

    def hooks(store) -> None:
        store.on_unknown_topic = lambda topic, queue_id: announced.append((topic, queue_id))
        store.on_system_record[SYSTEM_TOPIC] = lambda head, body: handled.append(
            (
                head.physical_offset,
                body,
                {k: q.next_offset for k, q in store._queues.queues.items()},
            )
        )

    rig.before_open = hooks
    store = rig.beside(name).open(**config)
    store.slave_log.reset_for_empty_start(begin)
    store.slave_log.append_replicated(begin, data)
    for target in targets:
        store._dispatcher.advance(target, slice_bytes)
        ends.append(store.confirm_offset)
    while store._dispatcher.has_more:
        store._dispatcher.advance(0, slice_bytes)
        ends.append(store.confirm_offset)
    store._files.index.flush()
    index = [disk_file.read_bytes() for disk_file in sorted((rig.root / "index").glob("*"))]
    queues = store._queues.queues
    units = {
        key: (queue.consume_queue.last_physical_end, list(queue.consume_queue.iter_units(0)))
        for key, queue in queues.items()
    }
    positions = {key: queue.next_offset for key, queue in queues.items()}
    store.abandon()
    return Built(units, positions, index, announced, handled, ends)


def both_ways(rig, data, targets, **more):
    with bulk(always=False):
        each = build(rig, "each", data, targets, **more)
    runs, real = [], bulk_dispatch.dispatch_run

    def counted(columns, first, behind, *rest):
        done = real(columns, first, behind, *rest)
        runs.append((behind - first) * done)
        return done

    with bulk(always=True), patch.object(bulk_dispatch, "dispatch_run", counted):
        many = build(rig, "many", data, targets, **more)
    assert many == each
    return sum(runs), each


def log_with(rig, messages, turn=7, **config):
    rig.root = rig.folder / "master"
    rig.before_open = lambda store: None
    master = rig.open_master(**config)
    for number, message in enumerate(messages, 1):
        master.appender.put_message(message)
        if number % turn == 0:
            master.end_turn()
            rig.now_ms += 700
    master.end_turn()
    data = rig.log_of(master)
    master.abandon()
    return data


def message(topic, queue_id, body, properties, **more):
    return NewMessage(
        topic,
        queue_id,
        body,
        properties,
        tags_code(find_property(properties, b"TAGS")),
        find_property(properties, b"KEYS"),
        find_property(properties, b"UNIQ_KEY"),
        **({"born_timestamp": START_MS, "born_host": HOST} | more),
    )


text = st.text(st.sampled_from("AaBCb0 é€😀\x00"), max_size=5).map(str.encode)
pairs = st.tuples(
    st.sampled_from([b"TAGS", b"KEYS", b"UNIQ_KEY", b"UNIQ_KEYS", b"WAIT", b"K"]), text
).map(lambda pair: b"%b\x01%b\x02" % pair)
usual = st.builds(
    lambda uniq, tag, keys: (
        b"UNIQ_KEY\x01%032X\x02WAIT\x01true\x02" % uniq
        + (b"TAGS\x01%b\x02" % tag if tag else b"")
        + (b"KEYS\x01%b\x02" % b" ".join(keys) if keys else b"")
    ),
    st.integers(0, 1 << 100),
    st.sampled_from([b"", b"TagA", b"Aa", "é".encode()]),
    st.lists(st.sampled_from([b"order-1", b"k", b"BB", b"Aa"]), max_size=3),
)
messages = st.builds(
    message,
    # Aa and BB, and what begins with them, have one hash.
    st.sampled_from(
        ["T", "T", "T", "AaT", "BBT", "Te\u0301", "L" * 130, SCHEDULE_TOPIC, SYSTEM_TOPIC]
    ),
    st.integers(0, 2),
    st.binary(max_size=30) | st.just(b"\x02\x01KEYS\x01" * 20),
    usual | usual | st.lists(pairs, max_size=5).map(b"".join),
    born_host=st.sampled_from([HOST, HOST, HOST, host_bytes("::1", 80)]),
    sys_flag=st.sampled_from([0, 0, 0, 0, 4, 8, 12]),
)


@given(st.data())
def test_the_same_files_as_record_by_record(rigs_in, data):
    """Odd records between common ones, segments and index files that end, any slices."""
    with rigs_in() as make_rig:
        rig = make_rig()
        log = log_with(
            rig, data.draw(st.lists(messages, max_size=60)), turn=data.draw(st.integers(1, 9))
        )
        targets = sorted(data.draw(st.lists(st.integers(0, len(log)), max_size=4)))
        slice_bytes = data.draw(st.none() | st.integers(1, 5000))
        config = {"max_index_num": data.draw(st.sampled_from([3, 20, 400]))}
        both_ways(rig, log, [*targets, len(log)], slice_bytes=slice_bytes, **config)


def common(count, queues=3):
    return [
        message(
            f"T{number % 2}",
            number % queues,
            b"body" * (number % 5),
            b"UNIQ_KEY\x01%032X\x02TAGS\x01Tag%d\x02KEYS\x01k%d order-%d\x02"
            % (number, number % 11, number, number % 4),
        )
        for number in range(count)
    ]


def test_common_records_go_in_bulk(rig):
    log = log_with(rig, common(300), **LARGE)
    done, built = both_ways(rig, log, [len(log)], **LARGE)
    assert done == 300
    assert sum(len(units) for _, units in built.units.values()) == 300


def test_a_run_that_does_not_fit_into_the_index_file_goes_record_by_record(rig):
    log = log_with(rig, common(300), **LARGE)
    assert both_ways(rig, log, [len(log)], **(LARGE | {"max_index_num": 400}))[0] == 0


def test_a_segment_does_not_stop_it(rig):
    log = log_with(rig, common(300))
    assert both_ways(rig, log, [len(log)], max_index_num=4000)[0] > 280


def test_a_queue_that_goes_back_to_a_check_point_is_not_built_twice(rig):
    """Recovery: some of it is there already, in some queues more than in others."""
    log = log_with(rig, common(200), **LARGE)
    with bulk(always=True):
        rig.root = rig.folder / "slave"
        store = rig.open(**LARGE)
        store.slave_log.append_replicated(0, log)
        store.advance_confirm_offset(len(log) // 2)
        store._dispatcher.restart_at(0)
        store.advance_confirm_offset(len(log))
        again = {k: list(q.consume_queue.iter_units(0)) for k, q in store._queues.queues.items()}
        entries = store._files.index.query("T0", "order-0", 1000).phy_offsets
        built = build(rig, "once", log, [len(log)], **LARGE)
    assert again == {key: units for key, (_, units) in built.units.items()}
    assert len(entries) == len(set(entries)) == 50


def test_r45_a_full_disk_in_the_midst_loses_nothing(rig, monkeypatch):
    """Index entries and large tails stay in memory, and come to the files when there is space."""
    log = log_with(rig, common(260), **LARGE)
    monkeypatch.setattr("batonmq.store.consume_queue._TAIL_BYTES_MAX", 200)
    with bulk(always=False):
        each = build(rig, "each", log, [len(log)], **LARGE)
    rig.before_open = lambda store: None
    store = rig.beside("full").open(**LARGE)
    store.slave_log.append_replicated(0, log)
    with bulk(always=True):
        with failing("pwrite * ENOSPC"):
            store.advance_confirm_offset(len(log) // 2)
        assert store.health.full
        store.advance_confirm_offset(len(log))
    store.health.full = ""
    store._files.index.flush()
    rig.write_queues_back(store)
    queues = store._queues.queues
    assert {
        key: (queue.consume_queue.last_physical_end, list(queue.consume_queue.iter_units(0)))
        for key, queue in queues.items()
    } == each.units
    (file,) = sorted((rig.root / "index").glob("*"))
    assert file.read_bytes() == each.index[0]


@pytest.mark.parametrize("broker", ["b0", "b1"])
def test_what_java_clients_sent_gives_the_same(rig, broker):
    """As Java stored it, without a property CRC, none goes in bulk; as we store it, most does."""
    (segment,) = (GOLDEN / broker / "commitlog").glob("0*")
    java = segment.read_bytes()[:GOLDEN_END]
    assert both_ways(rig, java, [GOLDEN_END], **LARGE)[0] == 0
    messages, position = [], 0
    while position < GOLDEN_END:
        end = position + int.from_bytes(java[position : position + 4], "big")
        messages.append(message_to_store(java[position:end]))
        position = end
    shutil.rmtree(rig.folder)
    log = log_with(rig, messages, **LARGE)
    assert both_ways(rig, log, [len(log)], **LARGE)[0] > len(messages) // 2


def test_a_damaged_size_ends_the_columns(rig):
    """Whatever the sizes say, nothing behind the bytes is read."""
    log = bytearray(log_with(rig, common(40), **LARGE))
    whole = bulk_dispatch.RecordColumns(memoryview(bytes(log)), 0, 0, len(log), 1 << 20, ())
    assert len(whole) == 40 and whole.end == len(log)
    for wrong in (0, 12, 91, 1 << 31, 0xFFFFFFFF):
        at = int(whole.begins[20])
        log[at : at + 4] = wrong.to_bytes(4, "big")
        cut = bulk_dispatch.RecordColumns(memoryview(bytes(log)), 0, 0, len(log), 1 << 20, ())
        assert list(cut.runs()) == [(0, 20)]


@pytest.mark.parametrize("every", [1, 2, 5])
def test_the_check_of_uncommon_records_reads_each_byte_a_few_times_at_most(rig, every):
    """Records without a CRC of their own (here format V2) among others: what is read in vain
    must not grow with the distance to the end."""
    longest = "L" * 130
    mixed = [
        message(longest if number % every == 0 else "T", 0, b"x" * 900, b"")
        for number in range(600)
    ]
    data, end = log_with(rig, mixed, **LARGE), 0
    for _ in mixed:
        end += int.from_bytes(data[end : end + 4], "big")
    data = data[:end]  # the master may have begun a record of its own behind them
    read, real = [], columns._crc32

    def counted(piece, *rest):
        read.append(len(piece))
        return real(piece, *rest)

    rig.root = rig.folder / "slave"
    rig.before_open = lambda store: None
    slave = rig.open(**LARGE)
    slave.slave_log.reset_for_empty_start(0)
    with bulk(always=True), patch.object(columns, "_crc32", counted):
        slave.slave_log.append_replicated(0, data)
    assert slave.max_phy_offset == len(data)
    assert sum(read) <= len(data)
    slave.abandon()


def test_r24_damage_between_two_runs_is_not_stepped_over(rig):
    """A lone record of another queue goes bad behind its check; 40 common ones lie before it and 40
    behind it. Nothing behind it is shown, and the error names its place."""
    parts = [message("T", 0, b"x", b"") for _ in range(40)]
    data = bytearray(log_with(rig, [*parts, message("Alone", 0, b"y", b""), *parts], **LARGE))
    ends = bulk_dispatch.RecordColumns(memoryview(bytes(data)), 0, 0, len(data), 1 << 20, ()).ends
    bad = int(ends[39])
    rig.root = rig.folder / "slave"
    rig.before_open = lambda store: None
    slave = rig.open(**LARGE)
    slave.slave_log.reset_for_empty_start(0)
    slave.slave_log.append_replicated(0, bytes(data))
    magic = slave.log.segments[0].buffer[bad + 4 : bad + 8]
    assert bytes(magic) == data[bad + 4 : bad + 8]
    path = slave.log.segments[0].path
    with open(path, "r+b") as file:
        file.seek(bad + 4)
        file.write(b"\xff\xff\xff\xff")
    with bulk(always=True), pytest.raises(CorruptLogError) as raised:
        slave._dispatcher.advance(len(data))
    assert raised.value.offset == bad == slave._dispatcher.offset
    assert slave._queues.queues["T", 0].consume_queue.max_offset == 40
    slave.abandon()


def test_a_slice_that_ends_with_a_record_is_not_the_end(rig):
    """The next one continues, though nothing more arrives."""
    log = log_with(rig, [message("T", 0, bytes(10), b"")] * 20)
    size = len(log) // 20
    _, built = both_ways(rig, log, [len(log)], slice_bytes=4 * size)
    assert built.ends == [4 * size, 8 * size, 12 * size, 16 * size, 20 * size]


def test_the_time_of_the_newest_record_is_known_either_way(rig):
    """Checkpoint and expiry go by it."""
    log = log_with(rig, common(300), **LARGE)
    times = []
    for always in (False, True):
        rig.root = rig.folder / f"slave-{always}"
        with bulk(always=always):
            store = rig.open(**LARGE)
            store.slave_log.append_replicated(0, log)
            store.advance_confirm_offset(len(log))
        times.append(store._dispatcher.last_store_timestamp)
    assert times[0] == times[1] > START_MS
