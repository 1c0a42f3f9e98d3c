"""Stores of replicas made for an audit, surgery on them, and the scan without Spark."""

import json
import shutil
from contextlib import nullcontext
from pathlib import Path

from batonmq.protocol.records.codec import NewMessage
from batonmq.protocol.tags import tags_code
from batonmq.spark.audit.audit import AuditRequest, findings_text, plan_audit, run_audit
from batonmq.spark.differences.checkpoint_findings import checkpoint_findings
from batonmq.spark.differences.log_findings import finding_table
from batonmq.spark.differences.replica_groups import find_groups, log_files
from batonmq.spark.differences.table import DifferencesOptions, plan_tasks, scan_range
from batonmq.spark.steps.sql import DuckEngine
from batonmq.store.config import StoreConfig
from batonmq.store.message_store import MessageStore
from batonmq.store.recovery import ConfirmedBySet
from tests.spark.log_files import HOST_V4, START_MS, LogFiles, message, write_checkpoint

FILE_SIZE = 8192
EPOCHS = "2\n0\n3-0\n3000-4\n"


def epochs_text(*entries):
    """An epoch file as brokers write it."""
    lines = [str(len(entries)), "0", *(f"{epoch}-{start}" for epoch, start in entries)]
    return "\n".join(lines) + "\n"


def key(number):
    return f"KEY{number:029d}"


def fields(number):
    """Message `number`: it goes to one of two queues and has a key of its own."""
    return {
        "number": number,
        "queue_id": number % 2,
        "queue_offset": number // 2,
        "body": b"body %d " % number * 10,
        "properties": b"UNIQ_KEY\x01%b\x02TAGS\x01tag\x02" % key(number).encode(),
    }


class Replicas:
    """Equal stores of one group, `count` of them; `offsets`: where each message begins."""

    def __init__(self, root, *, count=3, messages=60, broker="broker-a", confirm=None):
        files = LogFiles(Path(root) / f"{broker}-1", file_size=FILE_SIZE)
        self.offsets = [files.add(**fields(number)) for number in range(messages)]
        self.end = files.end
        self.broker = broker
        text = epochs_text((3, 0), (4, self.offsets[messages // 2]))
        files.save(confirm=confirm, identity=f"C#{broker}#1", epochs=text)
        self.roots = [files.root]
        for number in range(2, count + 1):
            self.roots.append(Path(root) / f"{broker}-{number}")
            shutil.copytree(files.root, self.roots[-1])
            (self.roots[-1] / "brokerIdentity").write_text(f"C#{broker}#{number}")

    @property
    def paths(self):
        return [str(root) for root in self.roots]

    def name(self, number):
        """How the audit calls replica `number`, from 1."""
        return f"{self.broker}#{number}"

    def size(self, number):
        return len(message(self.offsets[number], **fields(number)))

    def write(self, replica, offset, data):
        """Put bytes at a log offset of replica `replica`, from 1."""
        patch(self.roots[replica - 1], offset, data)

    def flip(self, replica, offset):
        path = self.roots[replica - 1] / "commitlog" / f"{offset - offset % FILE_SIZE:020d}"
        data = bytearray(path.read_bytes())
        data[offset % FILE_SIZE] ^= 1
        path.write_bytes(data)

    def confirm(self, replica, offset):
        write_checkpoint(self.roots[replica - 1], offset)

    def begin_epoch(self, epoch, offset, *replicas):
        """These have one epoch more."""
        known = (3, 0), (4, self.offsets[len(self.offsets) // 2])
        for each in replicas:
            path = self.roots[each - 1] / "epochFileCheckpoint"
            path.write_text(epochs_text(*known, (epoch, offset)))


def edit(replicas, which, change):
    """The first log file of replica `which`, from 1, as `change` makes it of its bytes."""
    path = replicas.roots[which - 1] / "commitlog" / f"{0:020d}"
    data = bytearray(path.read_bytes())
    change(data)
    assert len(data) == FILE_SIZE
    path.write_bytes(data)


def raw(replicas, number):
    """Where the bytes of a message lie in the first file."""
    begin = replicas.offsets[number]
    return slice(begin, begin + replicas.size(number))


def patch(root, offset, data, file_size=FILE_SIZE):
    path = root / "commitlog" / f"{offset - offset % file_size:020d}"
    with path.open("r+b") as file:
        file.seek(offset % file_size)
        file.write(data)


def scan(paths, *, group="", unconfirmed=False, whole_logs=False, messages=True, **options):
    """All rows of all groups, with `part`: what tasks tell, and what is found before."""
    chosen = DifferencesOptions(
        path=tuple(map(str, paths)), group=group, unconfirmed=unconfirmed, whole_logs=whole_logs,
        messages=messages, **options,
    )  # fmt: skip
    rows = []
    groups = find_groups(
        chosen.paths, group=group or None, unconfirmed=unconfirmed, with_tails=whole_logs
    )
    for each in groups:
        known = checkpoint_findings(each, log_files(each), unconfirmed=unconfirmed)
        rows += [{**row, "part": "finding"} for row in finding_table(known).to_pylist()]
        for task in plan_tasks(each, chosen.split_bytes):
            for batch in scan_range(task, chosen):
                batch.validate(full=True)
                rows += batch.to_pylist()
    return rows


def audited(*paths, **request):
    """All findings of a whole audit."""
    wanted = AuditRequest(tuple(map(str, paths)), **request)
    with DuckEngine() as engine:
        run_audit(engine, wanted, plan_audit(wanted), nullcontext)
        return engine.rows(findings_text()).to_pylist()


def findings(paths, **options):
    return [row for row in scan(paths, **options) if row["part"] == "finding"]


def counts(paths, **options):
    """(messages, those that several replicas hold alike)."""
    rows = [row for row in scan(paths, **options) if row["part"] == "count"]
    return sum(row["messages"] for row in rows), sum(row["agreed"] for row in rows)


def in_a_queue(number):
    """Message `number`, for a store's appender."""
    return NewMessage(
        "T", number % 2, b"body %d " % number * 10, fields(number)["properties"], tags_code("tag"),
        None, key(number).encode(), born_timestamp=START_MS, born_host=HOST_V4,
    )  # fmt: skip


def real_store(root, made=in_a_queue, *, identity="C#broker-q#1", every_ms=0):
    """A closed store of ours over many small files, with consume queues and an index: 60 messages,
    stored one each `every_ms`, all confirmed."""
    now_ms = START_MS
    store = MessageStore(
        StoreConfig(
            store_path_root_dir=str(root),
            mapped_file_size_commit_log=FILE_SIZE,
            mapped_file_size_consume_queue=400,
            max_hash_slot_num=100,
            max_index_num=400,
        ),
        store_host=HOST_V4,
        confirm_rule=ConfirmedBySet(),
        clock_ms=lambda: now_ms,
    )
    store.open()
    store.prepare_master()
    for number in range(60):
        now_ms = START_MS + number * every_ms
        store.appender.put_message(made(number))
        store.advance_confirm_offset(store.end_turn())
    store.close()
    if identity:
        (root / "brokerIdentity").write_text(identity)


def write_acked(path, entries):
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return str(path)
