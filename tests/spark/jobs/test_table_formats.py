"""`--format delta` and `iceberg`: the rows that Parquet has, whatever folders their groups need."""

import json
import shutil
from pathlib import Path

import deltalake
import pyarrow as pa
import pyarrow.dataset as ds
import pytest
from click.testing import CliRunner
from pyiceberg.catalog import load_catalog

from batonmq.spark.history.output_tables import TABLES as HISTORY_TABLES
from batonmq.spark.jobs import command, epoch_history, message_audit, topic_stats
from batonmq.spark.stats.stats_queries import TABLES as STATS_TABLES

STORES = Path(__file__).parents[2] / "golden" / "java-5.3.3" / "store"
AT_MS = 1_795_262_400_000


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """Replicas of which one has a wrong byte."""
    root = tmp_path_factory.mktemp("stores")
    shutil.copytree(STORES, root, dirs_exist_ok=True)
    log = root / "b1" / "commitlog" / f"{0:020d}"
    data = bytearray(log.read_bytes())
    data[6269 + 88] ^= 1
    log.write_bytes(data)
    return root / "*"


@pytest.fixture(scope="module")
def history(tmp_path_factory):
    """Two elections of a group whose name no folder can have as it is."""
    event = {"log": "a", "kind": "elected", "broker_name": "east#b=1", "sync_state_set": [1, 2]}
    events = [
        event | {"raft_index": n, "time_ms": AT_MS + n, "broker_id": n, "master_epoch": n}
        for n in (1, 2)
    ]
    path = tmp_path_factory.mktemp("history") / "history-n1.jsonl"
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    return path


class Made:
    """A job over one input, and its tables as Parquet."""

    def __init__(self, job, given, tables, folder):
        self.job, self.given, self.tables = job, [*map(str, given), "--quiet"], tables
        self.parquet = folder
        self.run(folder, "parquet")

    def run(self, out, form, *more):
        wanted = ["--output", str(out), "--overwrite", "--format", form, *more]
        done = CliRunner().invoke(self.job.main, [*self.given, *wanted])
        assert done.exit_code in (0, 1), done.output


@pytest.fixture(scope="module", params=[epoch_history, topic_stats, message_audit])
def made(request, history, stores, tmp_path_factory):
    given, tables = {
        epoch_history: (("--history", history), HISTORY_TABLES),
        topic_stats: (("--stores", stores), STATS_TABLES),
        message_audit: (("--stores", stores), ("findings",)),
    }[request.param]
    return Made(request.param, given, tables, tmp_path_factory.mktemp("parquet"))


@pytest.mark.parametrize("form", ["delta", "iceberg"])
def test_tables_of_other_formats_have_the_rows_of_parquet(form, made, tmp_path):
    catalog = {"type": "sql", "uri": f"sqlite:///{tmp_path}/catalog.db",
               "warehouse": f"file://{tmp_path}/warehouse"}  # fmt: skip
    words = [f"--catalog={key}={value}" for key, value in catalog.items()]
    more = [*words, "--catalog=namespace=lake"] if form == "iceberg" else []
    out = tmp_path / form
    for _ in range(2):  # the second one replaces the first
        made.run(out, form, *more)
    count = 0
    for table in made.tables:
        data = ds.dataset(made.parquet / table, partitioning="hive")
        if form == "iceberg":
            found = load_catalog(None, **catalog).load_table(f"lake.{table}").scan().to_arrow()
        else:
            found = pa.table(deltalake.DeltaTable(str(out / table)).to_pyarrow_table())
        if table == "consumer_lag":
            assert found.num_rows >= data.count_rows()  # each run has its snapshot
            continue
        assert plain(found.to_pylist()) == plain(data.to_table().to_pylist()), table
        count += found.num_rows
    assert count
    assert json.loads((out / "summary.json").read_text())
    # The report reads tables back, of whatever format.
    assert (made.job is message_audit) or (out / "report.html").exists()


def test_a_catalog_without_iceberg_and_iceberg_without_a_catalog_are_refused(history, tmp_path):
    given = ["--history", str(history), "--output", str(tmp_path / "out")]
    for more in (["--format", "iceberg"], ["--catalog", "type=sql"]):
        done = CliRunner().invoke(epoch_history.main, [*given, *more])
        assert (done.exit_code, "--catalog belongs to --format iceberg" in done.stderr) == (2, True)
    assert not (tmp_path / "out").exists()


def plain(rows):
    return sorted(json.dumps(row, default=str, sort_keys=True) for row in rows)


def test_a_machine_without_the_package_says_so_before_anything_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
    given = ["--stores", "/nowhere", "--output", str(tmp_path / "out"), "--format", "delta"]
    done = CliRunner().invoke(topic_stats.main, given)
    assert done.exit_code == 2 and "needs the package deltalake" in done.stderr
    assert not (tmp_path / "out").exists()
