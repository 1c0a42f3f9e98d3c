"""The folder of results, without Spark: what is refused, what a killed run leaves behind."""

import json

import pytest

from batonmq.spark.failovers import sizing
from batonmq.spark.failovers.output import SUMMARY, TABLES, Output
from batonmq.spark.failovers.run import Inputs


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
        (second.path / second.table(TABLES[-1]) / "second").unlink()
        (second.path / second.table(TABLES[-1])).rmdir()
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


def test_tasks_follow_the_size_of_the_input(tmp_path):
    """Three files make one history; only a large one is worth tasks."""
    for name in ("n0", "n1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"history-{name}.jsonl").write_bytes(b"x" * 500)
    (tmp_path / "n1" / "history-n1.000001.jsonl").write_bytes(b"x" * 24)
    assert sizing.history_bytes([f"{tmp_path}/n*"]) == 1_024
    assert Inputs((f"{tmp_path}/n*",)).is_small()
    assert sizing.parquet_bytes([str(tmp_path)]) > 1_024
    tasks = [
        int(sizing.settings_for(size << 20, small=False)["spark.sql.shuffle.partitions"])
        for size in (17, 800, 1_600, 3_000, 100 << 10)
    ]
    assert tasks == [2, 100, 200, 200, 1_600]
    assert sizing.settings_for(0, small=True)["spark.sql.shuffle.partitions"] == "1"
