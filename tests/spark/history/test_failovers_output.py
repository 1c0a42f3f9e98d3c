"""The folder of results: what is refused, what a killed run leaves behind."""

import json
from contextlib import closing
from unittest.mock import Mock

import pyarrow as pa
import pyarrow.dataset as ds
import pytest

from batonmq.spark.history.history_job import Inputs
from batonmq.spark.jobs.command import AUTO, SPARK, Job
from batonmq.spark.steps import sql
from batonmq.spark.steps.result_folder import Results
from batonmq.spark.steps.sql import SMALL_LOG_BYTES, DuckEngine, ResultTable

HALF = "SELECT 1 AS n, 'east#b=1' AS group UNION ALL SELECT 2, NULL"


def test_a_run_that_ends_early_is_not_whole(tmp_path):
    """The summary comes last, and goes first."""
    results = Results(str(tmp_path), ("t",))
    with DuckEngine() as engine:
        results.begin()
        engine.write(HALF, results.table("t", ["group"]))
        results.publish({"run": 1}, "page")
        assert json.loads((tmp_path / "summary.json").read_text()) == {"run": 1}
        assert (tmp_path / "report.html").read_text() == "page"
        with pytest.raises(ValueError, match="--overwrite replaces it"):
            Results(str(tmp_path), ("t",))
        results.close()
        with closing(Results(str(tmp_path), ("t",), overwrite=True)) as failed:
            failed.begin()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["_growing", "_lock", "t"]
        (tmp_path / "summary.json.growing").write_text("{")  # it was killed at its last file
        with closing(Results(str(tmp_path), ("t",))) as again:  # what is left is of no use
            again.begin()
            again.publish({"run": 2})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["_lock", "summary.json", "t"]
    (tmp_path / "_growing").write_text("")  # killed behind its summary: it is whole
    with pytest.raises(ValueError, match="--overwrite replaces it"):
        Results(str(tmp_path), ("t",))


def test_a_folder_takes_one_run_at_a_time(tmp_path):
    folder = str(tmp_path)
    with closing(Results(folder, ())) as first, closing(Results(folder, ())) as second:
        first.begin()
        with pytest.raises(ValueError, match="another run writes there"):
            second.begin()
        first.publish({"run": 1})
        first.close()
        with pytest.raises(ValueError, match="--overwrite replaces it"):
            second.begin()


def test_without_a_lock_no_result_is_called_whole_that_two_runs_wrote(tmp_path, monkeypatch):
    """Object storage has no locks. Whichever ends first, no summary is left."""
    monkeypatch.setattr(sql, "FolderLock", Mock())
    for order in (0, 1), (1, 0):
        runs = [Results(str(tmp_path), ()) for _ in range(2)]
        for each in runs:
            each.begin()
        if order[0]:  # the second one cannot know
            runs[1].publish({})
        else:
            with pytest.raises(ValueError, match="another run wrote there meanwhile"):
                runs[0].publish({})
        with pytest.raises(ValueError, match="another run wrote there meanwhile"):
            runs[order[1]].publish({})
        assert [path.name for path in tmp_path.iterdir()] == ["_growing"]


def test_a_table_replaces_the_earlier_one_and_has_its_columns_without_a_row(tmp_path):
    folders = ds.partitioning(pa.schema([("group", pa.string())]), flavor="hive")
    with DuckEngine() as engine:
        for text, groups in ((HALF, ["east#b=1", None]), (f"{HALF} LIMIT 0", [])):
            engine.write(text, ResultTable(str(tmp_path / "t"), by=["group"]))
            found = ds.dataset(tmp_path / "t", partitioning=folders).to_table()
            assert found.column_names == ["n", "group"]
            assert found.sort_by("n")["group"].to_pylist() == groups
    assert [path.name for path in tmp_path.iterdir()] == ["t"]


def test_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"--output /.*file: it must be a folder"):
        Results(str(tmp_path / "file"), ("failovers",))
    with pytest.raises(ValueError, match="it holds file"):
        Results(str(tmp_path), ("failovers",), overwrite=True)
    (tmp_path / "earlier" / "failovers").mkdir(parents=True)
    with pytest.raises(ValueError, match="--overwrite"):
        Results(f"file://{tmp_path}/earlier", ("failovers",))


@pytest.mark.parametrize("given", [{}, {"history": ("a",), "history_parquet": ("b",)}])
def test_one_kind_of_history_is_given(given):
    with pytest.raises(ValueError, match="either --history or --history-parquet"):
        Inputs(**given)


def test_the_engine_follows_the_size_of_the_input(tmp_path, monkeypatch):
    """Three files make one history; only a large one is worth Spark, unless Spark is asked for."""
    for name in ("n0", "n1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"history-{name}.jsonl").write_bytes(b"x" * 500)
    (tmp_path / "n1" / "history-n1.000001.jsonl").write_bytes(b"x" * 24)
    plan = Inputs((f"{tmp_path}/n*",)).plan
    assert (plan.size_bytes, plan.controllers) == (1_024, ("n0", "n1"))
    monkeypatch.delenv("PYSPARK_GATEWAY_PORT", raising=False)
    assert Job(engine=AUTO).is_local(SMALL_LOG_BYTES)
    assert not Job(engine=AUTO).is_local(SMALL_LOG_BYTES + 1)
    assert not Job(engine=SPARK).is_local(0)
    assert not Job(engine=AUTO, master="local[2]").is_local(0)
    monkeypatch.setenv("PYSPARK_GATEWAY_PORT", "1")  # by spark-submit
    assert not Job(engine=AUTO).is_local(0)
