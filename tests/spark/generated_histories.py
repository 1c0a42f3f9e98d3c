"""Histories that nobody lived through: as many events as wanted, plausible and always the same.

    python -m tests.spark.generated_histories --events 100000 --groups 3 --output DIR

writes `DIR/history/n<i>/history-n<i>.jsonl` of each controller (full, numbered files before it),
and `DIR/stores/<group>-<id>` with the identity, the epoch file and the checkpoint of each broker.
All controllers tell the same events; the last one was away at first, so its file begins late.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import IO, Any, Final

import click
import msgspec

from batonmq.epoch.entry import EpochEntry
from batonmq.epoch.file_cache import encode_entries
from batonmq.history.file import numbered
from batonmq.protocol.layout import CHECKPOINT, CHECKPOINT_SIZE

DEFAULT_BEGIN: Final = "2026-10-01T00:00:00+00:00"
_EPOCHS_KEPT: Final = 1_000
"""Newest epochs in the files: those of bytes that expired are gone."""
_FILE_BYTES: Final = 64 << 20
_encode = msgspec.json.Encoder().encode

_INCIDENTS: Final = (
    ("kill", 40), ("hang", 20), ("planned", 18), ("slave", 12), ("two", 3), ("blocked", 2),
    ("idle", 3), ("controller", 2),
)  # fmt: skip


class GeneratedGroup:
    """One broker group of three: where it stands, and what each incident makes it tell."""

    def __init__(self, name: str, chance: random.Random) -> None:
        self.name = name
        self.master = 1
        self.master_epoch = 0
        self.set_epoch = 0
        self.members = [1, 2, 3]
        self.log_end = 0
        self.lives = {1: 1, 2: 1, 3: 1}
        self.node = "n0"
        self.epochs: list[EpochEntry] = []
        self._chance = chance

    def born(self, now_ms: int) -> Iterator[dict[str, Any]]:
        """The group registers and gets its first master."""
        for broker_id in (1, 2, 3):
            yield self._registered(broker_id, now_ms + broker_id)
        self.members = []
        yield from self._election(now_ms + 10, 1, [1], "no master is known", 0, -1, before=0)
        for broker_id in (2, 3):
            yield self._altered(now_ms + 100 * broker_id, joined=broker_id)

    def incident(self, kind: str, now_ms: int) -> Iterator[dict[str, Any]]:
        """What one incident leaves in the history, in the order of the log."""
        self.log_end += self._chance.randrange(10_000, 5_000_000)
        slaves = [each for each in self.members if each != self.master]
        winner = self._chance.choice(slaves)
        if kind in ("kill", "two", "idle"):
            silent = self._chance.randrange(0, 90)
            yield from self._lost("session_closed", now_ms, winner, silent, kind)
        elif kind == "hang":
            silent = self._chance.randrange(800, 900)
            yield from self._lost("session_silent", now_ms, winner, silent, kind)
        elif kind == "planned":
            yield from self._planned(now_ms, winner)
        elif kind == "slave":
            yield self._altered(now_ms, left=winner)
            back_ms = now_ms + self._chance.randrange(500, 4_000)
            self.lives[winner] += 1
            yield self._registered(winner, back_ms)
            yield self._altered(back_ms + 120, joined=winner)
        elif kind == "blocked":
            yield from self._all_lost(now_ms)

    def _lost(
        self, reason: str, now_ms: int, winner: int, silent: int, kind: str
    ) -> Iterator[dict[str, Any]]:
        old, old_end = self.master, self.log_end + self._chance.choice((0, 0, 4_096, 65_536))
        kept = [each for each in self.members if each != old]
        answered = kind != "two"
        yield from self._election(
            now_ms, winner, kept, reason, 1, silent, served=answered, idle=kind == "idle"
        )
        if kind == "two":
            last = next(each for each in kept if each != winner)
            yield from self._election(now_ms + 60, last, [last], reason, 1, silent)
            yield from self._back(winner, now_ms + 900, self.log_end)
        yield from self._back(old, now_ms + 1_500, old_end)

    def _back(self, broker_id: int, now_ms: int, its_end: int) -> Iterator[dict[str, Any]]:
        self.lives[broker_id] += 1
        yield self._registered(broker_id, now_ms)
        at = self.epochs[-1].start_offset
        if its_end > at:
            detail = f'{{"fromOffset": {its_end}, "toOffset": {at}}}'
            yield self._told("truncated", now_ms + 40, broker_id, detail)
        yield self._told("role_changed", now_ms + 45, broker_id, '{"role": "slave"}')
        yield self._altered(now_ms + 150, joined=broker_id)

    def _planned(self, now_ms: int, winner: int) -> Iterator[dict[str, Any]]:
        old, held = self.master, self._chance.randrange(1, 25)
        detail = f'{{"master": {old}}}'
        yield self._event(
            "switch_requested", now_ms, broker_id=winner, node=self.node, json=detail,
            reason="named by the operator",
        )  # fmt: skip
        detail = f'{{"target": {winner}, "drainedOffset": {self.log_end}, "heldMs": {held}}}'
        yield self._told("drained", now_ms + 5 + held, old, detail)
        members = list(self.members)
        yield from self._election(now_ms + 6 + held, winner, members, "planned switch", 1, -1)

    def _all_lost(self, now_ms: int) -> Iterator[dict[str, Any]]:
        """All brokers are gone at once; one comes back after a while."""
        old, members = self.master, list(self.members)
        self.master_epoch += 1
        yield self._event(
            "election_failed", now_ms + 3, broker_id=old, master_before=old, node=self.node,
            set_before=members, detected_ms=now_ms, proposed_ms=now_ms + 3, silent_ms=20,
            reason=f"session_closed: no member of the SyncStateSet {members} lives",
        )  # fmt: skip
        back_ms = now_ms + self._chance.randrange(1_000, 3_000)
        for broker_id in members:
            self.lives[broker_id] += 1
            yield self._registered(broker_id, back_ms + broker_id)
        yield self._event(
            "election_blocked", back_ms + 5, node=self.node, json='{"operator": false}',
            reason="members of the set are still to come",
        )  # fmt: skip
        yield from self._election(back_ms + 20, old, members, "no_master", 1, -1, before=0)

    def _election(
        self,
        now_ms: int,
        winner: int,
        members: list[int],
        reason: str,
        propose_ms: int,
        silent: int,
        *,
        before: int | None = None,
        served: bool = True,
        idle: bool = False,
    ) -> Iterator[dict[str, Any]]:
        chance = self._chance
        set_before, old = list(self.members), self.master if before is None else before
        self.master_epoch += 1
        self.set_epoch += 1
        self.master, self.members = winner, sorted(members)
        self.epochs.append(EpochEntry(self.master_epoch, self.log_end))
        del self.epochs[:-_EPOCHS_KEPT]
        proposed_ms = now_ms + propose_ms
        applied_ms = proposed_ms + chance.randrange(1, 6)
        role_ms = applied_ms + chance.randrange(1, 4)
        opened_ms = role_ms + chance.randrange(3, 20)
        yield self._event(
            "elected", proposed_ms, broker_id=winner, address=f"10.0.0.{winner}:10911",
            incarnation=f"i{self.lives[winner]}", master_before=old, set_before=set_before,
            max_offset=self.log_end, confirm_offset=self.log_end, node=self.node, reason=reason,
            detected_ms=now_ms, proposed_ms=proposed_ms, silent_ms=silent,
        )  # fmt: skip
        yield self._told("role_changed", role_ms, winner, '{"role": "master"}')
        detail = f'{{"appliedMs": {applied_ms}, "sessions": {len(members)}}}'
        yield self._event("pushed", applied_ms + 1, node=self.node, json=detail)
        if not served:
            return
        detail = f'{{"maxOffset": {self.log_end}, "confirmOffset": {self.log_end}}}'
        yield self._told("opened", opened_ms, winner, detail)
        ack_ms = opened_ms + (1_400 if idle else chance.randrange(2, 30))
        detail = f'{{"confirmOffset": {self.log_end + 512}, "waitedMs": 3}}'
        yield self._told("first_ack", ack_ms, winner, detail)

    def _altered(self, now_ms: int, *, left: int = 0, joined: int = 0) -> dict[str, Any]:
        before = list(self.members)
        self.members = sorted({*before, joined} - {left, 0})
        self.set_epoch += 1
        reason = f"{joined} caught up" if joined else f"{left} is dead to the controllers"
        return self._event(
            "set_altered", now_ms, broker_id=self.master, set_before=before, reason=reason,
            confirm_offset=self.log_end,
        )  # fmt: skip

    def _registered(self, broker_id: int, now_ms: int) -> dict[str, Any]:
        return self._event(
            "broker_registered", now_ms, broker_id=broker_id, max_offset=self.log_end,
            address=f"10.0.0.{broker_id}:10911", incarnation=f"i{self.lives[broker_id]}",
        )  # fmt: skip

    def _told(self, kind: str, now_ms: int, broker_id: int, detail: str) -> dict[str, Any]:
        return self._event(kind, now_ms, broker_id=broker_id, json=detail)

    def _event(self, kind: str, time_ms: int, **fields: Any) -> dict[str, Any]:
        return {
            "kind": kind,
            "time_ms": time_ms,
            "broker_name": self.name,
            "master_epoch": self.master_epoch,
            "sync_state_set": self.members,
            "sync_state_set_epoch": self.set_epoch,
            **fields,
        }


def events(
    count: int, groups: list[GeneratedGroup], days: float, begin_ms: int, seed: int
) -> Iterator[dict[str, Any]]:
    """At least `count` events of all groups in the order of one log, over `days` days."""
    chance = random.Random(seed)
    names = [name for name, _ in _INCIDENTS]
    weights = [weight for _, weight in _INCIDENTS]
    index, node, controller_epoch = 3, 0, 1
    yield _leads(index, begin_ms, node, node, controller_epoch)
    done = 1
    pace_ms = days * 86_400_000 / max(1, count / 9)
    incidents = 0
    now_ms = float(begin_ms + 1_000)
    told: Iterator[dict[str, Any]]
    while done < count:
        group = groups[incidents % len(groups)]
        kind = chance.choices(names, weights)[0]
        if kind == "controller" and incidents >= len(groups):
            before, node = node, (node + 1) % 3
            controller_epoch += 1
            index += 2
            yield _leads(index, int(now_ms), node, before, controller_epoch)
            done += 1
            for each in groups:
                each.node = f"n{node}"
        else:
            born = incidents < len(groups)
            told = group.born(int(now_ms)) if born else group.incident(kind, int(now_ms))
            for event in told:
                index += 1
                event |= {"log": LOG, "raft_index": index, "controller_epoch": controller_epoch}
                yield event
                done += 1
        index += chance.randrange(3)  # commands that make no event
        incidents += 1
        now_ms += pace_ms * chance.uniform(0.8, 1.2)


LOG: Final = "5eed5eed5eed5eed5eed5eed5eed5eed"


def _leads(index: int, now_ms: int, node: int, before: int, epoch: int) -> dict[str, Any]:
    seen = {} if epoch == 1 else {"node_before": f"n{before}", "leader_seen_ms": now_ms - 180}
    return {
        "kind": "controller_leader_changed", "log": LOG, "raft_index": index, "time_ms": now_ms,
        "node": f"n{node}", "controller_epoch": epoch, "proposed_ms": now_ms,
        "started_ms": now_ms - 5_000, **seen,
    }  # fmt: skip


class _Files:
    """The files of one controller; a full one gets its number."""

    def __init__(self, folder: Path, node: str, size_max: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"history-{node}.jsonl"
        self._size_max = size_max
        self._number = 0
        self._size = 0
        self._file: IO[bytes] = self._path.open("wb")

    def write(self, lines: bytes) -> None:
        if self._size and self._size + len(lines) > self._size_max:
            self.close()
            self._number += 1
            self._path.rename(self._path.with_name(numbered(self._path.name, self._number)))
            self._file, self._size = self._path.open("wb"), 0
        self._file.write(lines)
        self._size += len(lines)

    def close(self) -> None:
        self._file.close()


def generate(
    output: Path,
    *,
    count: int,
    groups: int,
    controllers: int = 3,
    days: float = 10,
    begin: str = DEFAULT_BEGIN,
    seed: int = 1,
    file_bytes: int = _FILE_BYTES,
) -> int:
    """Write histories and stores below `output`. Returns the number of events of one controller."""
    begin_ms = int(datetime.fromisoformat(begin).timestamp() * 1000)
    chance = random.Random(seed)
    made = [GeneratedGroup(f"broker-{number:02d}", chance) for number in range(groups)]
    files = [
        _Files(output / "history" / f"n{number}", f"n{number}", file_bytes)
        for number in range(controllers)
    ]
    late = count // 20 if controllers > 2 else 0
    done = 0
    piece: list[bytes] = []
    for event in events(count, made, days, begin_ms, seed):
        piece.append(_encode(event))
        done += 1
        if len(piece) == 1_000 or done == late:
            _flush(files if done > late else files[:-1], piece)
    _flush(files, piece)
    for file in files:
        file.close()
    for group in made:
        for broker_id in (1, 2, 3):
            _store(output / "stores" / f"{group.name}-{broker_id}", group, broker_id)
    return done


def _flush(files: list[_Files], piece: list[bytes]) -> None:
    if piece:
        lines = b"\n".join(piece) + b"\n"
        for file in files:
            file.write(lines)
        piece.clear()


def _store(folder: Path, group: GeneratedGroup, broker_id: int) -> None:
    """A broker's store as far as epochs go: nothing of its log."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "brokerIdentity").write_text(f"generated#{group.name}#{broker_id}")
    content = encode_entries(group.epochs)
    (folder / "epochFileCheckpoint").write_bytes(content)
    (folder / "epochFileCheckpoint.bak").write_bytes(content)
    checkpoint = bytearray(CHECKPOINT_SIZE)
    confirm_at = CHECKPOINT.at["confirm_phy_offset"]
    checkpoint[confirm_at : confirm_at + 8] = group.log_end.to_bytes(8, "big")
    (folder / "checkpoint").write_bytes(bytes(checkpoint))


@click.command()
@click.option("--events", "count", default=10_000, show_default=True, help="of one controller")
@click.option("--groups", default=3, show_default=True)
@click.option("--controllers", default=3, show_default=True, help="that tell the same events")
@click.option("--days", default=10.0, show_default=True, help="over which they are spread")
@click.option("--seed", default=1, show_default=True, help="the same seed, the same files")
@click.option("--file-bytes", default=_FILE_BYTES, show_default=True, help="size of a full file")
@click.option("--output", required=True, type=click.Path(path_type=Path, file_okay=False))
def main(
    count: int, groups: int, controllers: int, days: float, seed: int, file_bytes: int, output: Path
) -> None:
    """Write generated histories and epoch files."""
    done = generate(
        output,
        count=count,
        groups=groups,
        controllers=controllers,
        days=days,
        seed=seed,
        file_bytes=file_bytes,
    )
    click.echo(f"{done} events of each of {controllers} controllers, {groups} groups: {output}")


if __name__ == "__main__":
    main(prog_name="python -m tests.spark.generated_histories")
