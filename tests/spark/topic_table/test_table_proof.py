"""A table held against stores made by hand: rows that the log cannot have, and unseen ones."""

import deltalake
import pyarrow as pa
import pytest

from batonmq.spark.arrow import open_arrow
from batonmq.spark.differences.replica_groups import find_groups
from batonmq.spark.steps.sql import DuckEngine
from batonmq.spark.topic_table.proof import prove
from batonmq.spark.topic_table.rows import MESSAGE
from tests.spark.audit.replica_files import FILE_SIZE, Replicas
from tests.spark.log_files import write_checkpoint
from tests.spark.topic_table.table_runs import Batch, Runs

COLUMNS = ",".join([*MESSAGE.values(), "body"])


class Proof:
    """A table of all messages of one store, rows that are planted in it, and what is found."""

    def __init__(self, folder):
        self.replicas = Replicas(folder / "stores", count=1)
        self.runs = Runs(folder)
        log = open_arrow(self.replicas.paths, table="messages", columns=COLUMNS).read_all()
        self.runs.begun(topic="T")._take(Batch(log.combine_chunks().to_batches()[0]), 0)

    def plant(self, **changed):
        """One more row: message 7 with other values in some of our columns."""
        place = str(self.runs.folder / "t")
        rows = deltalake.DeltaTable(place).to_pyarrow_table()
        row = rows.filter(pa.compute.field("_message_id") == f"KEY{7:029d}").to_pylist()[0]
        made = [row | {f"_{name}": value for name, value in changed.items()}]
        deltalake.write_deltalake(place, pa.Table.from_pylist(made, rows.schema), mode="append")

    def found(self):
        groups = find_groups(self.replicas.paths, group=None, unconfirmed=False, with_tails=False)
        with DuckEngine() as engine:
            proof, found = prove(engine, self.runs.table(), groups)
        return proof, [
            (each.severity, each.kind, each.queue_id, each.queue_offset) for each in found
        ]


@pytest.fixture
def proof(tmp_path):
    return Proof(tmp_path)


def test_a_table_of_the_whole_log_is_proven(proof):
    counts, found = proof.found()
    assert found == []
    assert (counts.rows, counts.compared) == (60, 60)
    assert (counts.unseen, counts.ahead, counts.behind) == (0, 0, 0)


@pytest.mark.parametrize(
    ("changed", "place"),
    [
        ({"queue_offset": 30}, (1, 30)),  # behind the end of its queue
        ({"queue_id": 9}, (9, 3)),  # a queue that the topic does not have
        ({"queue_offset": -1}, (1, -1)),
        ({"broker": None}, (1, 3)),
        ({"queue_id": None}, (None, 3)),
        ({"queue_offset": 31, "physical_offset": None}, (1, 31)),
    ],
)
def test_a_row_that_the_log_cannot_have_is_extra(proof, changed, place):
    proof.plant(**changed)
    counts, found = proof.found()
    assert found == [("critical", "table_extra", *place)]
    assert (counts.compared, counts.unseen, counts.ahead) == (60, 0, 0)


def test_a_row_of_a_message_that_the_log_lost_in_its_middle_is_extra(proof):
    """Another record lies there since, as behind an unclean election."""
    offset = proof.replicas.offsets[-1]
    proof.plant(queue_offset=30, physical_offset=offset)
    assert proof.found()[1] == [("critical", "table_extra", 1, 30)]


def test_rows_behind_the_end_of_the_log_are_a_warning(proof):
    """Of stores that are older than the table: they may have lost nothing."""
    proof.plant(queue_offset=30, physical_offset=proof.replicas.end)
    proof.plant(queue_offset=31, physical_offset=proof.replicas.end + 900)
    counts, found = proof.found()
    assert found == [("warning", "table_ahead", None, None)] and counts.ahead == 2
    assert (counts.rows, counts.compared, counts.unseen) == (62, 60, 0)


def test_what_is_confirmed_on_disk_a_little_later_is_not_ahead(proof):
    """confirmOffset in the file lags: the log is read to its end."""
    write_checkpoint(proof.replicas.roots[0], proof.replicas.offsets[30])
    counts, found = proof.found()
    assert found == [] and counts.compared == 60


def test_rows_older_than_the_log_and_of_other_brokers_are_unseen(proof):
    (root,) = proof.replicas.roots
    (root / "commitlog" / f"{0:020d}").unlink()
    expired = sum(offset < FILE_SIZE for offset in proof.replicas.offsets)
    proof.plant(broker="broker-z")
    counts, found = proof.found()
    assert found == [("info", "table_unseen", None, None)] and expired
    assert (counts.unseen, counts.compared) == (expired + 1, 60 - expired)
