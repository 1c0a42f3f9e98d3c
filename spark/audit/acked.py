"""Acknowledged sends, joined with what the replicas hold.

An entry is looked for at its place, then by its key, or by its message id; what is not found, and
cannot have expired, is lost. So is what only replicas hold that the others have gone on without.
Free of Spark.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from batonmq.protocol.topic_name import OLD_SYSTEM_TOPIC_PREFIX, SCHEDULE_TOPIC, SYSTEM_TOPIC_PREFIX
from batonmq.spark.audit.acked_list import ENTRY_SCHEMA
from batonmq.spark.audit.findings import FINDING_SCHEMA, Finding, finding_table, findings_of
from batonmq.spark.audit.relations import (
    QUEUE,
    Bring,
    Groups,
    QueueBegins,
    Told,
    duplicates,
    of_message,
)
from batonmq.spark.audit.scan import MESSAGE_SCHEMA
from batonmq.spark.steps.severity import CRITICAL, INFO, WARNING
from batonmq.spark.steps.tables import runs_of, sorted_by

PLACE: Final = [*QUEUE, "queue_offset"]
#: An entry, and a text by which messages are found for it; null: by none. `is_rest`: it is still
#: looked for; else it only tells that its key is listed.
SOUGHT_SCHEMA: Final = pa.schema([("link", pa.string()), ("is_rest", pa.bool_()), *ENTRY_SCHEMA])
#: A message and one of its links.
LINKED_SCHEMA: Final = pa.schema([("link", pa.string()), *MESSAGE_SCHEMA])
#: What is lost of a queue, and the queue offset before it.
LOST_SCHEMA: Final = pa.schema([*FINDING_SCHEMA, ("before", pa.int64())])
#: Here messages wait for their time or their commit; the answer names their own topic all the same.
_WAITING: Final = (SCHEDULE_TOPIC, OLD_SYSTEM_TOPIC_PREFIX, SYSTEM_TOPIC_PREFIX)
_LONG_END: Final = 1 << 63
_CRC_BITS: Final = 0x7FFFFFFF
Row = Mapping[str, Any]


def _place(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in PLACE)


def _is_placed(row: Row) -> bool:
    return None not in _place(row)[1:]


def link_of(entry: Row) -> str | None:
    """By what an entry is looked up: its key, else its place, else the offset in its message id."""
    if entry["unique_key"] is not None:
        return f"k{entry['unique_key']}"
    if entry["group"] is None:
        return None
    if _is_placed(entry):
        return "p" + "\0".join(map(str, _place(entry)))
    at = id_offset(entry)
    return None if at is None else f"i{entry['group']}\0{at}"


def links_of(messages: pa.Table, *, with_ids: bool) -> pa.Table:
    """Messages by all links of entries that they may be; one that others deny has a place, too."""
    join = pc.binary_join_element_wise
    place = [messages["topic"], *(messages[n].cast(pa.string()) for n in PLACE[2:])]
    links = [
        join("k", messages["unique_key"], ""),
        join("k", messages["batch_key"], ""),
        pc.if_else(
            pc.equal(messages["amount"], 0), join(join("p", messages["group"], ""), *place, "\0"),
            pa.scalar(None, pa.string()),
        ),
    ]  # fmt: skip
    if with_ids:
        at = messages["physical_offset"].cast(pa.string())
        links.append(join(join("i", messages["group"], ""), at, "\0"))
    tables = [messages.add_column(0, "link", link).filter(pc.is_valid(link)) for link in links]
    return pa.concat_tables(tables).cast(LINKED_SCHEMA)


def id_offset(entry: Row) -> int | None:
    """The log offset that the message id names, of an entry that has nothing else."""
    if entry["unique_key"] is not None or entry["msg_id"] is None:
        return None
    if _is_placed(entry) and entry["group"] is not None:
        return None
    try:
        at = int(entry["msg_id"][-16:], 16)
    except ValueError:
        return None
    return at if 0 <= at < _LONG_END else None


def sought_of(entries: pa.Table, *, rest: bool) -> pa.Table:
    link = pa.array([link_of(row) for row in entries.to_pylist()], pa.string())
    is_rest = pa.repeat(pa.scalar(rest), entries.num_rows)
    return pa.table([link, is_rest, *entries.columns], schema=SOUGHT_SCHEMA)


def _joined(left: pa.Table, messages: pa.Table, keys: list[str], to: list[str]) -> pa.Table:
    """All pairs of equal keys; columns of messages get `m_` before their names."""
    named = messages.rename_columns([f"m_{name}" for name in messages.column_names])
    return left.join(named, keys, [f"m_{key}" for key in to], "inner", coalesce_keys=False)


def _without(left: pa.Table, right: pa.Table, keys: list[str], of: list[str]) -> pa.Table:
    """The rows of which no row of the other table has the keys."""
    return left.join(right.select(of), keys, of, "left anti")


def _first_of(table: pa.Table, *order: str) -> pa.Table:
    """The first row of each value of the first column, as the others order them."""
    table = sorted_by(table, *order)
    return table.take(runs_of(table, order[:1]))


def at_places(groups: Groups, bring: Bring) -> Told:
    """Entries with a place and a group, against messages that the replicas agree on."""
    entries, messages = bring("placed"), bring("messages")
    pairs = _joined(entries, messages, PLACE, PLACE)
    key = pairs["unique_key"]
    fits = pc.is_null(key)
    for theirs in ("m_unique_key", "m_batch_key"):
        fits = pc.or_(fits, pc.fill_null(pc.equal(key, pairs[theirs]), False))
    pairs = pairs.filter(fits)
    told = Told()
    told.sends["unlisted"] = _without(
        messages, pairs, ["group", "physical_offset"], ["m_group", "m_physical_offset"]
    )
    _found(told, _first_of(pairs, "entry", "m_physical_offset"), groups)
    told.sends["sought"] = sought_of(_without(entries, pairs, ["entry"], ["entry"]), rest=True)
    return told


def _found(told: Told, pairs: pa.Table, groups: Groups) -> None:
    """Entries with the message that each of them is."""
    told.counts.found += pairs.num_rows
    names = pa.array(groups, pa.string())
    confirms = pa.array([group.confirm for group in groups.values()], pa.int64())
    confirm = confirms.take(pc.index_in(pairs["m_group"], names).combine_chunks())
    ends = pc.add(pairs["m_physical_offset"], pairs["m_size"])
    told.counts.unconfirmed += pc.sum(pc.greater(ends, confirm)).as_py() or 0
    lacking = pairs.filter(pc.not_equal(pairs["m_lack"], 0))
    told.counts.not_everywhere += lacking.num_rows
    what = "acknowledged, and whole in other replicas only"
    told.sends["lacking"] = finding_table(
        _at(row, "acked_missing", what, _names(groups[row["m_group"]], row["m_lack"]))
        for row in lacking.to_pylist()
    )
    crc = pc.bit_wise_and(pairs["body_crc"], _CRC_BITS)
    for row in pairs.filter(pc.not_equal(crc, pairs["m_body_crc"])).to_pylist():
        detail = (
            f"its body has CRC {row['m_body_crc']}, the acknowledged one "
            f"{row['body_crc'] & _CRC_BITS}"
        )
        told.findings.append(_at(row, "divergent", detail, of="body"))


def by_links(groups: Groups, bring: Bring, begins: QueueBegins, with_duplicates: bool) -> Told:
    """Entries against the messages of their key, their id or, where replicas deny one, their
    place; those that agree come first. `begins`: where queues begin in the log. And repeated keys.
    """
    sought, linked = bring("sought"), bring("linked")
    told = Told([*duplicates(linked)] if with_duplicates else [])
    if not sought.num_rows:
        return told
    linked = linked.join(sought.select(["link"]), "link", join_type="left semi")
    pairs = _joined(sought, _copies(linked), ["link"], ["link"])
    same = pc.equal(pairs["group"], pairs["m_group"])
    pairs = pairs.filter(pc.fill_null(same, True))
    named = pairs.filter(pc.or_(pairs["is_rest"], pc.greater(pairs["m_copies"], 1)))
    agreed = linked.filter(pc.greater(linked["amount"], 0))
    told.sends["named"] = agreed.join(
        named.select(["link", "m_group"]), ["link", "group"], ["link", "m_group"], "left semi"
    ).select(["group", "physical_offset"])
    group = pc.coalesce(pairs["group"], pairs["m_group"])
    pairs = pairs.set_column(pairs.column_names.index("group"), "group", group)
    pairs = pairs.append_column("denied", pc.equal(pairs["m_amount"], 0))
    best = _first_of(pairs.filter(pairs["is_rest"]), "entry", "denied", "m_physical_offset")
    held = best.filter(pc.invert(best["denied"]))
    _found(told, held, groups)
    for row in held.filter(pc.is_valid(held["queue_offset"])).to_pylist():
        if _has_moved(row, groups, begins):
            told.counts.elsewhere += 1
            detail = (
                f"acknowledged here, lies at queue {row['m_queue_id']} offset "
                f"{row['m_queue_offset']} of {row['m_topic']}"
            )
            told.findings.append(_at(row, "reordered", detail))
    lost = [_only_in(row, groups) for row in best.filter(best["denied"]).to_pylist()]
    rest = sought.filter(sought["is_rest"])
    for row in _without(rest, best, ["entry"], ["entry"]).to_pylist():
        lost += _nowhere(told, row, groups, begins)
    told.counts.lost += len(lost)
    table = finding_table(lost)
    told.sends["lost"] = table.append_column("before", pc.subtract(table["queue_offset"], 1))
    return told


def _copies(linked: pa.Table) -> pa.Table:
    """All messages of a group that one link leads to: the first of them, one that replicas agree on
    if there is one, with the bits of all; `copies`: how many of them replicas agree on.
    """
    order = [("link", "ascending"), ("group", "ascending"), ("amount", "descending")]
    table = linked.sort_by([*order, ("physical_offset", "ascending")]).combine_chunks()
    begins = runs_of(table, ("link", "group"))
    copies = table.take(begins)
    sums = {"have": np.bitwise_or, "lack": np.bitwise_and, "copies": np.add}
    for name, how in sums.items():
        values = table["amount" if name == "copies" else name].to_numpy()
        made = pa.array(how.reduceat(values, begins) if len(begins) else begins)
        if name in copies.column_names:
            copies = copies.set_column(copies.column_names.index(name), name, made)
        else:
            copies = copies.append_column(name, made)
    return copies


def _log_first(entry: Row, groups: Groups) -> int:
    if entry["group"] is not None:
        return groups[entry["group"]].first
    return max(group.first for group in groups.values())


def _may_have_expired(entry: Row, begins: QueueBegins) -> bool:
    if entry["group"] is None or not _is_placed(entry):
        return True
    begin = begins.get((entry["group"], entry["topic"], entry["queue_id"]))
    return begin is None or bool(entry["queue_offset"] < begin)


def _has_moved(row: Row, groups: Groups, begins: QueueBegins) -> bool:
    """A copy for a retry does not prove a move of the message itself, unless that cannot have
    expired."""
    if row["m_topic"].startswith(_WAITING):
        return False
    if all(row[name] in (None, row[f"m_{name}"]) for name in PLACE[1:]):
        return False
    return _log_first(row, groups) == 0 or not _may_have_expired(row, begins)


def _nowhere(told: Told, entry: Row, groups: Groups, begins: QueueBegins) -> Iterable[Finding]:
    """What it means that no message is found for an entry; the finding if it is lost."""
    first, at = _log_first(entry, groups), id_offset(entry)
    is_known = (entry["group"], entry["topic"], entry["queue_id"]) in begins
    if entry["group"] is None and entry["unique_key"] is None:
        why = "it names no broker, and several groups are audited"
    elif first == 0 or (at is not None and at >= first):
        why = ""
    elif at is not None or (is_known and _is_placed(entry) and _may_have_expired(entry, begins)):
        told.counts.expired += 1
        return ()
    elif is_known and _is_placed(entry):
        why = ""
    else:
        why = "not found, and it may have expired: the log no longer begins at 0"
    if why:
        told.counts.unchecked += 1
        told.findings.append(_of_entry(entry, WARNING, "unchecked", why))
        return ()
    what = "acknowledged, and in no replica"
    return (_of_entry(entry, CRITICAL, "lost", what, physical_offset=at),)


def _only_in(row: Row, groups: Groups) -> Finding:
    """Of an entry whose message some replicas hold and the others deny."""
    who = _names(groups[row["m_group"]], row["m_have"])
    detail = (
        f"acknowledged, and only in {', '.join(who)}: the others, or a later epoch, went on "
        "without it"
    )
    return _of_entry(
        row, CRITICAL, "lost", detail, replicas=who, physical_offset=row["m_physical_offset"],
        epoch=row["m_epoch"],
    )  # fmt: skip


def lost(groups: Groups, bring: Bring) -> Told:
    """What is lost of queues, with the epoch of the message before it, and where that lies."""
    table = bring("lost")
    if not table.num_rows:
        return Told()
    keys = table.select([*QUEUE, "before"])
    near = _joined(keys, bring("messages"), [*QUEUE, "before"], PLACE).to_pylist()
    before = {(*(row[name] for name in QUEUE), row["before"]): row for row in near}
    told = Told()
    for each in findings_of(table.select(FINDING_SCHEMA.names)):
        row = before.get((each.group, each.topic, each.queue_id, (each.queue_offset or 0) - 1))
        epoch, detail = each.epoch, each.detail
        if row is not None:
            epoch = row["m_epoch"] if epoch is None else epoch
            if not each.replicas:
                at = row["m_physical_offset"]
                detail += f"; the one before it in its queue lies at {at}"
        told.findings.append(msgspec.structs.replace(each, epoch=epoch, detail=detail))
    return told


def by_offsets(_: Groups, bring: Bring) -> Told:
    """Messages that no entry names, and each that a replica lacks once."""
    place = ["group", "physical_offset"]
    unlisted = _without(bring("unlisted"), bring("named"), place, place)
    what = "in the log, and not in the list"
    told = Told([of_message(row, INFO, "not_acked", what) for row in unlisted.to_pylist()])
    lacking = sorted_by(bring("lacking"), *place)
    told.findings += findings_of(lacking.take(runs_of(lacking, place)))
    return told


def in_order(_: Groups, bring: Bring) -> Told:
    """Where a producer was given descending offsets in a queue; all entries have a number."""
    keys = ("group", "producer", "topic", "queue_id")
    entries = sorted_by(bring("numbered"), *keys, "number")
    fresh = np.zeros(entries.num_rows, np.bool_)
    fresh[runs_of(entries, keys)] = True
    offsets = entries["queue_offset"].to_numpy()
    after = np.flatnonzero(~fresh[1:] & (offsets[1:] <= offsets[:-1])) + 1
    told = Told()
    befores = entries.take(after - 1).to_pylist()
    for row, before in zip(entries.take(after).to_pylist(), befores, strict=True):
        detail = (
            f"number {row['number']} of producer {row['producer']} was acknowledged here, number "
            f"{before['number']} before it at queue offset {before['queue_offset']}"
        )
        told.findings.append(_of_entry(row, WARNING, "reordered", detail))
    return told


def _of_entry(
    entry: Row,
    severity: str,
    kind: str,
    detail: str,
    *,
    replicas: tuple[str, ...] = (),
    physical_offset: int | None = None,
    size: int | None = None,
    epoch: int | None = None,
    of: str | None = None,
) -> Finding:
    """A finding about an entry."""
    return Finding(
        entry["group"], severity, kind, detail, replicas, entry["topic"], entry["queue_id"],
        entry["queue_offset"], physical_offset, size, epoch, entry["unique_key"], of,
    )  # fmt: skip


def _at(
    row: Row, kind: str, detail: str, replicas: tuple[str, ...] = (), of: str | None = None
) -> Finding:
    return _of_entry(
        row, CRITICAL, kind, detail, replicas=replicas, of=of, size=row["m_size"],
        physical_offset=row["m_physical_offset"], epoch=row["m_epoch"],
    )  # fmt: skip


def _names(group: Any, bits: int) -> tuple[str, ...]:
    names: tuple[str, ...] = group.names(at for at in range(len(group.replicas)) if bits >> at & 1)
    return names
