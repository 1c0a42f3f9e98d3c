"""Parquet folders as `epoch_history` leaves them, written by hand: no session is needed."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet as pq

from batonmq.spark.history.output_tables import TABLES


def at(text):
    """A time in UTC."""
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


class EpochFolder:
    """Rows by table, group and day, and the folder that they are written to."""

    def __init__(self, root):
        self.root = Path(root)
        self.rows = {}

    def add(self, table, group, when, **row):
        """One row of the day of `when`; what is not named is null."""
        assert set(row) <= set(TABLES[table].names), row
        key = (table, group, f"{when:%Y-%m-%d}")
        self.rows.setdefault(key, []).append({name: row.get(name) for name in TABLES[table].names})

    def mastership(self, group, epoch, broker_id, began, ended=None, ended_by=None):
        self.add(
            "masterships", group, began, master_epoch=epoch, broker_id=broker_id, began_at=began,
            opened_at=began + timedelta(milliseconds=40), ended_at=ended, ended_by=ended_by,
            address=f"10.0.0.{broker_id}:10911", seen_by=["n0", "n1"],
        )  # fmt: skip

    def failover(self, group, epoch, when, ms, *, before=1, master=2, kind="failover", **more):
        """One at `when` with four equal parts; `ms` None: how long is not known."""
        part = None if ms is None else ms // 4
        end = when + timedelta(milliseconds=ms or 0)
        known = {
            "cause": "session_closed", "idle": False, "unclean": False, "complete": ms is not None,
            "silent_ms": 12, "detect_ms": 12, "elect_ms": part, "role_ms": part, "open_ms": part,
            "first_ack_ms": part, "detected_at": when, "truncated_bytes": 0,
            "elected_at": when + timedelta(milliseconds=part or 0),
            "opened_at": end - timedelta(milliseconds=part or 0) if ms else None,
            "first_ack_at": end if ms else None, "without_writes_ms": ms,
        }  # fmt: skip
        self.add(
            "failovers", group, when, master_epoch=epoch, kind=kind, master_before=before,
            master=master, unavailable_ms=ms, **(known | more),
        )  # fmt: skip

    def day(self, group, when, outages=0, ms=0, longest=0, is_open=False):
        self.add(
            "unavailability", group, when, outages=outages, unavailable_ms=ms,
            longest_ms=longest or ms, open=is_open,
        )  # fmt: skip

    def set_change(self, group, when, before, after, reason=""):
        self.add(
            "set_changes", group, when, at=when, set_before=before, set_after=after,
            joined=[each for each in after if each not in before],
            left=[each for each in before if each not in after], size_after=len(after),
            reason=reason,
        )  # fmt: skip

    def save(self):
        """Write all tables; the folder as text."""
        for number, ((table, group, day), rows) in enumerate(self.rows.items()):
            # Spark writes an empty partition value and special characters like this.
            name = quote(group, safe=" -_.,()") if group else "__HIVE_DEFAULT_PARTITION__"
            folder = self.root / table / f"group={name}" / f"day={day}"
            folder.mkdir(parents=True, exist_ok=True)
            schema = pa.schema([field for field in TABLES[table] if field.name != "day"])
            pq.write_table(pa.Table.from_pylist(rows, schema), folder / f"part-{number}.parquet")
        for table in TABLES.keys() - {table for table, _, _ in self.rows}:
            (self.root / table).mkdir(parents=True)
            schema = TABLES[table].append(pa.field("group", pa.string()))
            if "day" not in schema.names:
                schema = schema.append(pa.field("day", pa.date32()))
            pq.write_table(schema.empty_table(), self.root / table / "part-0.parquet")
        return str(self.root)


def incident_hour(root, *, group="broker-a"):
    """One group, one hour: first election, a kill, a planned switch, a hang, a rejoin that cut."""
    made = EpochFolder(root)
    ten = at("2026-11-21 10:00:00")

    def after(seconds):
        return ten + timedelta(seconds=seconds)

    made.mastership(group, 1, 1, ten, after(600), "failover")
    made.mastership(group, 2, 2, after(600.3), after(1500), "planned_switch")
    made.mastership(group, 3, 3, after(1500.02), after(2700), "failover")
    made.mastership(group, 4, 1, after(2701.2))
    made.failover(group, 1, ten, None, kind="first_election", before=None, master=1, complete=True)
    made.failover(group, 2, after(600), 480, truncated_bytes=4096)
    made.failover(group, 3, after(1500), 24, kind="planned_switch", before=2, master=3,
                  cause="planned_switch", held_ms=20)  # fmt: skip
    made.failover(group, 4, after(2700), 2_400, before=3, master=1, cause="session_silent",
                  silent_ms=900, detect_ms=900, without_writes_ms=3_300)  # fmt: skip
    made.day(group, ten, 3, 3_804, 3_300)
    made.set_change(group, after(1), [1], [1, 2, 3], "caught up")
    made.set_change(group, after(600.3), [1, 2, 3], [2, 3], "election")
    made.set_change(group, after(640), [2, 3], [1, 2, 3], "caught up")
    made.set_change(group, after(2701.2), [1, 2, 3], [1], "election")
    made.set_change(group, after(3600), [1], [1, 3], "caught up")
    made.add("truncations", group, after(639), at=after(639), broker_id=1, master_epoch=2,
             from_offset=1_052_672, to_offset=1_048_576, bytes=4_096)  # fmt: skip
    made.add("findings", group, after(639), severity="warning", kind="epoch_missing",
             text="Broker 2 holds no epoch 3 in its file.", subject="broker 2",
             evidence='{"epochs": [3]}', at=after(639))  # fmt: skip
    made.add("controllers", "", after(30), at=after(30), leader="n1", leader_before="n0",
             controller_epoch=2)  # fmt: skip
    return made
