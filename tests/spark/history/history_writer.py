"""Histories made by hand and by chance, as controllers write them."""

import json
import random
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

LOG = "log-a"
NOON = int(datetime(2026, 11, 20, 12, tzinfo=UTC).timestamp() * 1000)
OTHER_LOG = "log-b"
MIDNIGHT = int(datetime(2026, 11, 21, tzinfo=UTC).timestamp() * 1000)


class HistoryWriter:
    """Events of one log, in its order; each call adds the next one."""

    def __init__(self, log: str = LOG) -> None:
        self.events: list[dict[str, Any]] = []
        self._log = log
        self._index = 0

    def add(self, kind: str, time_ms: int, group: str = "", **fields: Any) -> dict[str, Any]:
        self._index += 1
        made: dict[str, Any] = {"log": self._log, "raft_index": self._index}
        made |= {"kind": kind, "time_ms": time_ms}
        if group:
            made["broker_name"] = group
        made |= fields
        if isinstance(made.get("json"), dict):
            made["json"] = json.dumps(made["json"])
        self.events.append(made)
        return made

    def elected(
        self, group: str, epoch: int, winner: int, at: int, **fields: Any
    ) -> dict[str, Any]:
        """An election seen 2 ms and proposed 1 ms before `at`, by n0."""
        given: dict[str, Any] = {
            "broker_id": winner,
            "address": f"10.0.0.{winner}:10911",
            "node": "n0",
            "master_epoch": epoch,
            "set_before": [1, 2, 3],
            "sync_state_set": [1, 2, 3],
            "reason": "session_closed",
            "detected_ms": at - 2,
            "proposed_ms": at - 1,
        }
        return self.add("elected", at, group, **(given | fields))

    def report(
        self, kind: str, group: str, epoch: int, broker: int, at: int, **detail: Any
    ) -> dict[str, Any]:
        fields = {"broker_id": broker, "master_epoch": epoch, "json": detail}
        return self.add(kind, at, group, **fields)

    def served(
        self,
        group: str,
        epoch: int,
        broker: int,
        at: int,
        *,
        role: int = 5,
        opened: int = 10,
        ack: int = 20,
        waited: int = 1,
        log_end: int | None = None,
    ) -> None:
        """What a master reports that takes its role, opens and acknowledges after so many ms."""
        self.report("role_changed", group, epoch, broker, at + role, role="master")
        detail = {} if log_end is None else {"maxOffset": log_end, "confirmOffset": log_end}
        self.report("opened", group, epoch, broker, at + opened, **detail)
        self.report("first_ack", group, epoch, broker, at + ack, waitedMs=waited, **{
            key: value for key, value in detail.items() if key == "confirmOffset"
        })  # fmt: skip

    def first(self, group: str, at: int, **served: Any) -> None:
        """A group is born: broker 1 is its first master, 2 and 3 join."""
        self.elected(
            group, 1, 1, at, set_before=[], sync_state_set=[1], reason="no master is known"
        )
        self.served(group, 1, 1, at, **served)
        self.altered(group, 1, at + 30, [1], [1, 2])
        self.altered(group, 1, at + 40, [1, 2], [1, 2, 3])

    def altered(
        self,
        group: str,
        epoch: int,
        at: int,
        before: Sequence[int],
        after: Sequence[int],
        **fields: Any,
    ) -> dict[str, Any]:
        given = {"master_epoch": epoch, "set_before": before, "sync_state_set": after}
        return self.add("set_altered", at, group, **(given | {"reason": "as asked"} | fields))


def by_chance(log: HistoryWriter, group: str, seed: int, incidents: int = 7) -> None:
    """Writes of a group whose sets and epochs fit together and whose order and clocks do not."""
    chance = random.Random(seed)
    now, epoch, master, members = NOON, 1, 1, [1, 2, 3]
    gone: list[int] = []
    log.first(group, now)
    for _ in range(incidents):
        now += chance.choice((40, 900, 60_000))
        jitter = chance.choice((0, 0, 0, -30))
        others = [each for each in members if each != master] or [master]
        winner = chance.choice(others)
        what = chance.choice(
            ("loss", "loss", "planned", "late", "shrink", "return", "failed", "hand")
        )
        if what == "shrink" and len(members) > 1:
            log.altered(group, epoch, now, members, [m for m in members if m != winner])
            members = [m for m in members if m != winner]
            gone.append(winner)
            continue
        if what == "return" and gone:
            back = gone.pop(0)
            log.add("broker_registered", now, group, broker_id=back, incarnation=f"i{now}",
                    master_epoch=epoch)  # fmt: skip
            if chance.random() < 0.7:
                cut = chance.randrange(1, 5) * 1000
                log.report("truncated", group, epoch, back, now + 3 + jitter,
                           fromOffset=50_000 + cut, toOffset=50_000)  # fmt: skip
            if chance.random() < 0.5:
                log.report("role_changed", group, epoch, back, now + 4, role="slave")
            if chance.random() < 0.1:
                log.add(
                    "broker_cleaned", now + 4, group, master_epoch=epoch, set_before=members,
                    sync_state_set=members, reason=f"broker {back}",
                )  # fmt: skip
            log.altered(group, epoch, now + 9, members, sorted([*members, back]))
            members = sorted([*members, back])
            continue
        request: dict[str, Any] = {"broker_id": winner, "json": {"master": master}, "node": "n0"}
        old, before, reason = master, members, "session_silent"
        detail = {"heldMs": chance.randrange(30), "drainedOffset": 7}
        if what == "planned":
            reason = "planned switch"
            if chance.random() < 0.8:
                log.add("switch_requested", now, group, master_epoch=epoch, **request)
            if chance.random() < 0.2:
                log.add("switch_failed", now + 1, group, master_epoch=epoch, **request)
            if chance.random() < 0.8:
                log.report("drained", group, epoch, old, now + 12 + jitter, **detail)
            now += 15
        failed = what == "failed"
        if failed:
            log.add(
                "election_failed", now, group, broker_id=old, master_before=old, node="n1",
                master_epoch=epoch + 1, set_before=members, sync_state_set=members, silent_ms=9,
                detected_ms=chance.choice((0, now - 5)), proposed_ms=now - 1,
                reason="session_closed: nobody of the set lives",
            )  # fmt: skip
            epoch += 1
        if failed or chance.random() < 0.2:
            log.add("election_blocked", now + 2, group, node="n1", reason="waits",
                    master_epoch=chance.choice((epoch, epoch - 1)))  # fmt: skip
        now += 5
        epoch += 1
        if what == "hand":
            reason = "named by an operator"
        kept = (
            members
            if what in ("planned", "late", "hand")
            else (sorted({*members} - {old} | {winner}))
        )
        gone += [each for each in members if each not in kept]
        unclean = chance.random() < 0.1
        log.elected(
            group, epoch, winner, now, master_before=0 if failed else old, set_before=before,
            sync_state_set=kept, reason=reason, unclean=unclean,
            silent_ms=chance.choice((-1, 800)), detected_ms=now - chance.choice((2, 3, 9)),
        )  # fmt: skip
        master, members = winner, kept
        if what == "late":
            if chance.random() < 0.7:
                log.report("drained", group, epoch - 1, old, now - 3, **detail)
            log.add("switch_requested", now - 9, group, master_epoch=epoch - 1, **request)
        if chance.random() < 0.85:
            log.report("role_changed", group, epoch, winner, now + 2 + jitter, role="master")
            log.add("pushed", now + 1, group, master_epoch=epoch, node="n0",
                    json={"appliedMs": now, "sessions": 3})  # fmt: skip
        if chance.random() < 0.8:
            log.report("opened", group, epoch, winner, now + 4)
            if chance.random() < 0.8:
                waited = {"waitedMs": chance.choice((0, 3))} if chance.random() < 0.8 else {}
                ack = now + 4 + chance.choice((0, 6, 400))
                log.report("first_ack", group, epoch, winner, ack, **waited)
        if chance.random() < 0.2 and len(members) > 1:
            lost = next(each for each in members if each != master)
            log.altered(group, epoch, now + 20, members, [m for m in members if m != lost])
            members = [m for m in members if m != lost]
            gone.append(lost)


def write(path: Path, events: Iterable[dict[str, Any] | bytes], *, tail: bytes = b"") -> None:
    """One controller's file; an event given as bytes is written as it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [each if isinstance(each, bytes) else json.dumps(each).encode() for each in events]
    path.write_bytes(b"".join(line + b"\n" for line in lines) + tail)
