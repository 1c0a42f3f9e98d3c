"""What the engines of `steps.sql` must do alike, whatever a job asks of them."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batonmq.spark.steps.sql import DuckEngine, ResultTable, SparkEngine, names_in, put

ROWS = pa.table({"grp": ["b", "a", "b"], "n": pa.array([2, 1, 1], pa.int64())})
FOLDED = pa.schema([("text", pa.string())])


class Numbered:
    """A batch for each task."""

    def __call__(self, task):
        yield pa.RecordBatch.from_pylist([{"grp": task, "n": 1}], ROWS.schema)


class Joined:
    """A row for each run of rows of one group."""

    def __call__(self, batches):
        rows = [row for batch in batches for row in batch.to_pylist()]
        runs = {}
        for row in rows:
            runs.setdefault(row["grp"], []).append(str(row["n"]))
        texts = [{"text": f"{grp}{','.join(n)}"} for grp, n in runs.items()]
        yield pa.RecordBatch.from_pylist(texts, FOLDED)


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning:pyspark")
@pytest.mark.parametrize("kind", ["duck", "spark"])
def test_rows_with_and_without_any_row(kind, request, tmp_path):
    engine = DuckEngine() if kind == "duck" else SparkEngine(request.getfixturevalue("session"))
    with engine:
        engine.table("full_", ROWS)
        engine.table("empty_", ROWS.schema.empty_table())
        engine.mapped("made", ["c", "d"], Numbered(), ROWS.schema)
        every = "SELECT * FROM full_ UNION ALL SELECT * FROM empty_ UNION ALL SELECT * FROM made"
        engine.applied("folded", every, Joined(), FOLDED, by=["grp", "n"])
        found = engine.rows("SELECT text FROM folded ORDER BY text")["text"].to_pylist()
        assert found == ["a1", "b1,2", "c1", "d1"]
        for name, count in (("full_", 3), ("empty_", 0)):
            table = ResultTable(str(tmp_path / name), by=["group"])
            engine.write(f"SELECT n, grp AS group FROM {name}", table)
            engine.read("back", table)
            assert engine.rows("SELECT n FROM back").num_rows == count
        assert sorted(names_in(str(tmp_path))) == ["empty_", "full_"]
    put(f"{tmp_path}/x.json", "{}")
    assert (tmp_path / "x.json").read_text() == "{}"
    put(f"{tmp_path}/x.json", None)
    assert names_in(f"{tmp_path}/nowhere") == [] and not (tmp_path / "x.json").exists()


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_file_has_its_name_once_it_is_whole_whoever_else_writes_it(scheme, tmp_path):
    """As attempts of one task do: one is slow, one lost, one comes through."""
    table = ResultTable(f"{scheme}{tmp_path}/out", by=["grp"])

    def attempt(between=()):
        for row in ROWS.to_batches(max_chunksize=1):
            yield row
            yield from between

    def fail():
        raise OSError("lost")
        yield

    table.begin()
    with pytest.raises(OSError, match="lost"):
        table.add(attempt(fail()), ROWS.schema, "0")

    def whole():
        """Comes through while the slow one writes."""
        assert table.add(attempt(), ROWS.schema, "0") == 3
        growing = sorted(pq.read_table(path)["n"][0].as_py() for path in named())
        assert growing == [1, 2]
        return
        yield

    def named():
        return (tmp_path / "out" / "_growing").glob("grp=*/part-0-0.parquet")

    assert table.add(attempt(whole()), ROWS.schema, "0") == 3
    table.finish()
    files = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file())
    assert files == [f"out/grp={name}/part-0-0.parquet" for name in "ab"]
    assert sorted(table.dataset().to_table()["n"].to_pylist()) == [1, 1, 2]
