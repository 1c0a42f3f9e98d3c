"""The folder of results: what is refused, what a killed run leaves behind."""

import json

import pytest

from batonmq.spark.history.run import Inputs, Output
from batonmq.spark.history.tables import TABLES
from batonmq.spark.jobs.command import AUTO, SPARK, Job
from batonmq.spark.steps.engine import SMALL_LOG_BYTES
from batonmq.spark.steps.result_folder import SUMMARY

LAST = tuple(TABLES)[-1]


def make(output, mark):
    for name in TABLES:
        folder = output.path / output.table(name)
        folder.mkdir()
        (folder / mark).touch()


def content(path):
    return sorted(str(each.relative_to(path)) for each in path.rglob("*"))


def test_a_run_that_ends_early_leaves_what_was_there(tmp_path):
    with Output(str(tmp_path)) as first:
        make(first, "first")
        first.publish({"run": 1})
    before = content(tmp_path)
    with pytest.raises(RuntimeError), Output(str(tmp_path), overwrite=True) as second:
        make(second, "second")
        assert json.loads((tmp_path / SUMMARY).read_text()) == {"run": 1}
        raise RuntimeError
    assert content(tmp_path) == before


def test_a_later_result_replaces_all_of_an_earlier_one(tmp_path):
    for mark in ("first", "second"):
        with Output(str(tmp_path), overwrite=mark == "second") as output:
            make(output, mark)
            output.publish({"run": mark})
            (tmp_path / "report.html").write_text(mark)
    names = {path.rpartition("/")[2] for path in content(tmp_path)}
    assert names == {*TABLES, "second", SUMMARY, "report.html"}
    with Output(str(tmp_path), overwrite=True) as output:
        make(output, "third")
        output.publish({"run": "third"})
    assert not (tmp_path / "report.html").exists()


def test_half_published_has_no_summary(tmp_path):
    """Killed between the tables: readers that ask for the summary take it for what it is."""
    with Output(str(tmp_path)) as first:
        make(first, "first")
        first.publish({"run": 1})
    with pytest.raises(FileNotFoundError), Output(str(tmp_path), overwrite=True) as second:
        make(second, "second")
        (second.path / second.table(LAST) / "second").unlink()
        (second.path / second.table(LAST)).rmdir()
        second.publish({"run": 2})
    assert not (tmp_path / SUMMARY).exists()


def test_what_a_killed_run_left_is_in_nobodys_way(tmp_path):
    (tmp_path / "_making-dead").mkdir()
    with Output(str(tmp_path)) as output:
        make(output, "x")
        output.publish({})
    assert (tmp_path / SUMMARY).exists()


def test_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="must be a folder"):
        Output(str(tmp_path / "file"))
    with pytest.raises(ValueError, match="it holds file"):
        Output(str(tmp_path), overwrite=True)
    with pytest.raises(ValueError, match="file system that all executors share"):
        Output("s3://bucket/out")
    (tmp_path / "earlier" / "failovers").mkdir(parents=True)
    with pytest.raises(ValueError, match="--overwrite"):
        Output(str(tmp_path / "earlier"))


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
