"""Reading on while `stream_history` writes: whole files of the table's folder, nothing else."""

from pathlib import Path

import pyarrow as pa
from pyarrow import parquet

from lab.faults.aftermath.tables import read_streamed


def test_streamed_events_are_read_with_their_names_and_elections(tmp_path: Path) -> None:
    assert read_streamed(tmp_path) == []
    rows = [
        {"log": "l", "raft_index": 3, "part": 1, "kind": "elected", "master_epoch": 2, "x": 0},
        {"log": "l", "raft_index": 4, "part": 0, "kind": "opened", "master_epoch": 2, "x": 0},
    ]
    (tmp_path / "_stream").mkdir()
    for name in ("part-00000001.parquet", "_stream/growing"):
        parquet.write_table(pa.Table.from_pylist(rows), tmp_path / name)
    assert read_streamed(tmp_path) == [(("l", 3, 1), 2), (("l", 4, 0), 0)]
