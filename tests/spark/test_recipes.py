"""Every block of docs/spark-recipes.md runs, on the stores and the history of the tests."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from left_out import leave_out

from batonmq.spark.arrow import open_arrow
from tests.spark.spark_session import CONNECT_PORT

ROOT = Path(__file__).parents[2]
STORES = f"{ROOT}/tests/golden/java-5.3.3/store/*"
PAGE = (ROOT / "docs/spark-recipes.md").read_text()
BLOCKS = re.findall(r"^```(\w+) ?(\w*)\n(.*?)^```$", PAGE, re.M | re.S)


def need_packages(*names):
    """Skip without them; where everything must run, fail."""
    lacking = [name for name in names if importlib.util.find_spec(name) is None]
    if lacking:
        leave_out(f"this machine lacks {', '.join(lacking)} (`make setup-spark`)")


@pytest.fixture(scope="module")
def history(tmp_path_factory):
    folder = tmp_path_factory.mktemp("n0")
    lines = (ROOT / "tests/history/testdata/history_real.jsonl").read_bytes()
    (folder / "history-n0.jsonl").write_bytes(lines)
    return str(folder)


@pytest.mark.parametrize(
    ("needs", "text"),
    [
        (needs, text)
        for kind, needs, text in BLOCKS
        if kind == "python" and needs not in ("spark", "connect")
    ],
    ids=lambda each: each[:12].strip() or "plain",
)
def test_without_spark(history, tmp_path, needs, text):
    need_packages(*[needs] if needs else [])
    names = {"STORES": STORES, "HISTORY": history, "OUTPUT": str(tmp_path / "table")}
    exec(compile(text, "spark-recipes.md", "exec"), names)
    made = set(names) & {"bytes_by_topic", "elections", "newest", "by_kind"}
    assert made and all(len(names[each]) if each != "elections" else names[each] for each in made)


def test_a_stream_is_what_others_take(history):
    """pandas, polars and DuckDB take a stream by this protocol."""
    table = pa.table(open_arrow(history, table="history", columns="kind"))
    assert table.column_names == ["kind"] and table.num_rows > 50
    with pytest.raises(ValueError, match="did you mean table"):
        open_arrow(history, tabel="history")
    bad = f"{history}/history-n1.jsonl"
    Path(bad).write_text("garbage\n")
    stream = open_arrow(bad, table="history", mode="PERMISSIVE", columns="kind")
    assert stream.read_all().to_pylist()[0]["corrupt"]["bytes"] == 8


@pytest.mark.timeout(300)  # Spark starts
def test_in_spark_by_name(history, session):
    """In a session in which nothing was registered."""
    spark = session.newSession()
    for kind, needs, text in BLOCKS:
        if needs != "spark":
            continue
        if kind == "sql":
            rows = spark.sql(text.replace("{STORES}", STORES)).collect()
        else:
            exec(compile(text, "spark-recipes.md", "exec"), {"spark": spark, "STORES": STORES})
    assert len(rows) > 1 and rows[0]["messages"] >= rows[-1]["messages"] > 0


@pytest.mark.timeout(300)
def test_through_spark_connect(session):
    """From a process of its own, which has sessions of that kind only; the server is in our JVM."""
    need_packages("pandas", "grpc_status", "zstandard")
    context = session.sparkContext
    context._jvm.org.apache.spark.sql.connect.service.SparkConnectService.start(context._jsc.sc())
    place = f"127.0.0.1:{context.getConf().get(CONNECT_PORT)}"
    (text,) = [text for _, needs, text in BLOCKS if needs == "connect"]
    program = f"STORES = {STORES!r}\n" + text.replace("spark-server:15002", place)
    done = subprocess.run(
        [sys.executable, "-c", f"{program}\nspark.stop()"],
        cwd=ROOT, env={**os.environ, "PYSPARK_PYTHON": sys.executable},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Row(broker='broker-a', max(epoch)=3)" in done.stdout
