"""What crosses ranges of the log, as joins. Texts are for `steps.sql`: both engines read them.

They read these views: `d`, table `differences`; `entries`, the acknowledged list, each with its
group; `grps`, a row for each group: where its log begins (`begins`) and what it confirms
(`confirms`); `stores`, the same of each replica; `spans`, which epoch its stretches have; `units`
and `queue_files`; `sets`, replicas by their bits. `grp` is the group; names that need quotes are
not used. `docs/spark-jobs.md` explains the kinds of findings.
"""

import re
from collections.abc import Iterator
from typing import Final

from batonmq.protocol.layout import FILLER_SIZE
from batonmq.protocol.topic_name import (
    DLQ_PREFIX,
    DUE_TOPICS,
    LMQ_PREFIX,
    METADATA_TOPIC,
    OFFSET_MOVED_TOPIC,
    OLD_SYSTEM_TOPIC_PREFIX,
    RETRY_PREFIX,
    SCHEDULE_TOPIC,
    SYSTEM_TOPIC_PREFIX,
)
from batonmq.spark.differences.log_findings import LogFinding

_TOLD: Final = tuple(n for n in LogFinding.__struct_fields__ if n not in ("group", "identity"))
COLUMNS: Final = ("grp", *_TOLD)
#: Topics in which keys repeat by design: retries, delays, halves of transactions.
_REPEATING: Final = (
    RETRY_PREFIX, DLQ_PREFIX, SCHEDULE_TOPIC, OLD_SYSTEM_TOPIC_PREFIX, SYSTEM_TOPIC_PREFIX,
    OFFSET_MOVED_TOPIC,
)  # fmt: skip
#: Here messages wait for their time or commit; the answer still names their own topic.
_WAITING: Final = (SCHEDULE_TOPIC, OLD_SYSTEM_TOPIC_PREFIX, SYSTEM_TOPIC_PREFIX)
_COMPARED: Final = "('missing', 'divergent', 'reordered')"


def _begins(value: str, prefixes: tuple[str, ...]) -> str:
    return "(" + " OR ".join(f"left({value}, {len(p)}) = '{p}'" for p in prefixes) + ")"


def _finding(severity: str, kind: str, detail: str, of: str, **columns: str) -> str:
    """The columns of a finding. `of`: the row that has those which are not said."""
    known = {name: f"{of}.{name}" for name in ("grp", *_OF_ROWS[of])}
    known |= {"severity": severity, "kind": kind, "detail": detail, **columns}
    return ", ".join(f"{known.get(name, 'NULL')} AS {name}" for name in COLUMNS)


def _text(template: str) -> str:
    """A text as SQL; what stands in braces is SQL already, and not NULL."""
    parts = enumerate(re.split("[{}]", template))
    return f"concat({', '.join(part if at % 2 else repr(part) for at, part in parts if part)})"


_MESSAGE: Final = ("topic", "queue_id", "queue_offset", "physical_offset", "size", "epoch",
                   "unique_key")  # fmt: skip
_ENTRY: Final = ("topic", "queue_id", "queue_offset", "unique_key")
_OF_ROWS: Final = {"f": _TOLD, "m": _MESSAGE, "e": _ENTRY,
                   "b": ("topic", "queue_id", "queue_offset"),
                   "q": ("topic", "queue_id", "physical_offset"),
                   "u": ("topic", "queue_id", "queue_offset", "physical_offset")}  # fmt: skip
_QUEUE: Final = ("grp", "topic", "queue_id")


def _equal(one: str, other: str, names: tuple[str, ...]) -> str:
    return " AND ".join(f"{one}.{name} = {other}.{name}" for name in names)


def _span(of: str) -> str:
    """The epoch of a log offset."""
    at = f"{of}.physical_offset"
    return f"JOIN spans p ON {of}.grp = p.grp AND {at} >= p.begins AND {at} < p.ends"


#: The rows of `differences`, by their parts.
PARTS: Final = {
    "ranged": f"""
        SELECT d.group AS grp, {", ".join(f"d.{name}" for name in _TOLD)}, d.identity,
            row_number() OVER (PARTITION BY d.group, d.replicas, d.identity, d.severity, d.kind
                ORDER BY d.physical_offset) AS nth
        FROM d WHERE d.part = 'finding'
    """,
    "messages": """
        SELECT d.group AS grp, d.topic, d.queue_id, d.queue_offset, d.physical_offset, d.size,
            d.epoch, d.unique_key, d.batch_key, d.have, d.lack, d.body_crc, d.amount, d.tags,
            d.is_queued
        FROM d WHERE d.part = 'message'
    """,
    "placed": f"""
        SELECT grp, topic, queue_id, queue_offset, physical_offset, size, tags FROM messages
        WHERE is_queued AND topic <> '{METADATA_TOPIC}'
    """,
    "queue_begins": """
        SELECT grp, topic, queue_id, min(queue_offset) AS lowest FROM placed
        GROUP BY grp, topic, queue_id
    """,
    # What is missing at one place of a replica and extra at another is one: `reordered`.
    "pairs": """
        SELECT m.grp, m.replicas, m.severity, m.physical_offset, x.physical_offset AS other,
            x.queue_id AS other_queue, x.queue_offset AS other_offset
        FROM ranged m JOIN ranged x ON m.grp = x.grp AND m.replicas = x.replicas
            AND m.identity = x.identity AND m.severity = x.severity AND m.nth = x.nth
        WHERE m.kind = 'missing' AND x.kind = 'extra'
    """,
}
#: Consume queues, and messages as their queues number them.
QUEUE_VIEWS: Final = {
    # Queue offsets of a queue follow each other in the log; before a whole log there is -1.
    "steps": """
        SELECT q.*, CASE WHEN q.queue_offset > q.before THEN 'gap' ELSE 'reordered' END AS kind,
            q.queue_offset - q.before - 1 AS lacking
        FROM (
            SELECT n.grp, n.topic, n.queue_id, n.queue_offset, n.physical_offset,
                coalesce(n.before, CASE WHEN g.begins = 0 THEN -1 END) AS before,
                coalesce(n.last_before, g.begins) AS last_before
            FROM (
                SELECT *, lag(queue_offset) OVER (PARTITION BY grp, topic, queue_id
                        ORDER BY physical_offset) AS before,
                    lag(physical_offset) OVER (PARTITION BY grp, topic, queue_id
                        ORDER BY physical_offset) AS last_before
                FROM placed
            ) n JOIN grps g ON n.grp = g.grp
        ) q WHERE q.queue_offset <> q.before + 1
    """,
    # The messages that each replica confirms, and the unit that is in each one's place.
    "held": f"""
        SELECT m.*, s.replica, s.tags_are_hashes FROM placed m JOIN stores s ON m.grp = s.grp
            AND m.physical_offset >= s.begins AND m.physical_offset + m.size <= s.confirms
        WHERE NOT {_begins("m.topic", (LMQ_PREFIX,))}
    """,
    "written": """
        SELECT f.grp, f.replica, f.topic, f.queue_id, f.path, u.*
        FROM units u JOIN queue_files f ON u.file = f.file
    """,
    "reaches": """
        SELECT f.grp, f.replica, f.topic, f.queue_id, min(f.begins) AS begins,
            coalesce(max(u.queue_offset) + 1, min(f.begins)) AS reach
        FROM queue_files f LEFT JOIN units u ON f.file = u.file
        GROUP BY f.grp, f.replica, f.topic, f.queue_id
    """,
    "unfit": f"""
        SELECT h.*, w.points_to, w.unit_size, w.unit_tags, r.begins, coalesce(r.reach, 0) AS reach
        FROM held h LEFT JOIN written w ON {_equal("h", "w", (*_QUEUE, "replica", "queue_offset"))}
            LEFT JOIN reaches r ON {_equal("h", "r", (*_QUEUE, "replica"))}
        WHERE w.points_to IS NULL OR w.points_to <> h.physical_offset OR w.unit_size <> h.size
            OR (w.unit_tags <> h.tags AND h.tags_are_hashes
                AND h.topic NOT IN ({", ".join(f"'{topic}'" for topic in sorted(DUE_TOPICS))}))
    """,
}


def _ranges(acked: bool) -> Iterator[str]:
    """The findings of ranges. `acked`: those of acknowledged messages say so."""
    note = "CASE WHEN k.grp IS NOT NULL THEN '; it was acknowledged' ELSE '' END" if acked else "''"
    known = (
        """LEFT JOIN (SELECT DISTINCT grp, m_offset FROM found WHERE m_lack <> 0) k
        ON f.grp = k.grp AND f.physical_offset = k.m_offset"""
        if acked
        else ""
    )
    moved = _text(
        "in this replica it lies at {p.other}, queue {p.other_queue} offset {p.other_offset}"
    )
    same = """f.grp = p.grp AND f.replicas = p.replicas AND f.severity = p.severity"""
    kind = "CASE WHEN p.grp IS NOT NULL THEN 'reordered' ELSE f.kind END"
    detail = f"concat(CASE WHEN p.grp IS NOT NULL THEN {moved} ELSE f.detail END, {note})"
    yield f"""
        SELECT {_finding("f.severity", kind, detail, "f")}
        FROM ranged f LEFT JOIN pairs p
            ON {same} AND f.physical_offset = p.physical_offset AND f.kind = 'missing' {known}
        WHERE f.kind IN ('missing', 'divergent')
    """
    # A message that lies where another one is missing is reported with that one.
    yield f"""
        SELECT {_finding("f.severity", "f.kind", "f.detail", "f")}
        FROM ranged f LEFT JOIN pairs p ON {same} AND f.physical_offset = p.other
            LEFT JOIN ranged o ON f.grp = o.grp AND f.replicas = o.replicas
                AND f.physical_offset = o.physical_offset AND o.kind = 'missing'
        WHERE f.kind = 'extra' AND p.grp IS NULL AND o.grp IS NULL
    """
    yield f"""
        SELECT {_finding("f.severity", "f.kind", "f.detail", "f")} FROM ranged f
        WHERE f.kind NOT IN ('missing', 'divergent', 'extra')
    """


def _queues() -> Iterator[str]:
    """Consume queues against the messages that their replicas confirm."""
    of = _equal("u", "s", ("grp", "replica"))
    kind = "CASE WHEN u.points_to IS NULL THEN 'queue_missing' ELSE 'queue_wrong' END"
    tags = _text("its unit has tags code {u.unit_tags}, its tags make {u.tags}")
    place = _text("its unit points to {u.unit_size} bytes at {u.points_to}")
    detail = f"""concat(CASE WHEN f.path IS NULL THEN 'no file holds its unit'
        WHEN u.points_to IS NULL THEN 'its unit was never written'
        WHEN u.points_to = u.physical_offset AND u.unit_size = u.size THEN {tags}
        ELSE {place} END, p.doubt)"""
    more = {"replicas": "s.names", "epoch": "p.epoch"}
    wrong = _finding("'critical'", kind, detail, "u", size="u.size", file="f.path", **more)
    # Before its first file a queue has expired, or begins; a filler says that it begins behind it.
    yield f"""
        SELECT {wrong} FROM unfit u JOIN stores s ON {of} {_span("u")} LEFT JOIN queue_files f
            ON {_equal("u", "f", (*_QUEUE, "replica"))}
                AND u.queue_offset >= f.begins AND u.queue_offset < f.ends
        WHERE u.queue_offset < u.reach AND u.queue_offset >= u.begins
            AND coalesce(u.unit_size, 0) <> {FILLER_SIZE}
    """
    detail = _text(
        "the consume queue ends at {b.reach}; {b.amount} confirmed messages have no unit yet"
    )
    behind = _finding("'info'", "'queue_behind'", detail, "b", replicas="s.names")
    yield f"""
        SELECT {behind} FROM (
            SELECT grp, replica, topic, queue_id, reach, min(queue_offset) AS queue_offset,
                count(*) AS amount
            FROM unfit WHERE queue_offset >= reach GROUP BY grp, replica, topic, queue_id, reach
        ) b JOIN stores s ON b.grp = s.grp AND b.replica = s.replica
    """
    detail = _text(
        "the unit points to {u.physical_offset}, where no message of this queue offset lies"
        "{p.doubt}"
    )
    stray = _finding("'critical'", "'queue_wrong'", detail, "u", file="u.path", **more)
    yield f"""
        SELECT {stray} FROM (
            SELECT w.*, w.points_to AS physical_offset FROM written w
                LEFT JOIN held h ON {_equal("w", "h", (*_QUEUE, "replica", "queue_offset"))}
            WHERE h.grp IS NULL AND w.unit_size > 0 AND w.unit_size <> {FILLER_SIZE}
        ) u JOIN stores s ON {of} AND u.physical_offset < s.confirms
            JOIN log_files l ON {of.replace("s.", "l.")} AND u.physical_offset >= l.begins
                AND u.physical_offset < l.ends {_span("u")}
    """


def _steps(acked: bool) -> str:
    """Gaps in queues, and steps back. A gap that damage or a lost message explains is no other."""
    again = "the queue begins again at 0 behind {q.before}, as if it was deleted and created again"
    text = f"""CASE
        WHEN q.kind = 'gap' AND q.lacking > 1 THEN
            {_text("{q.lacking} queue offsets from {q.before + 1} on have no message in the log")}
        WHEN q.kind = 'gap' THEN {_text("1 queue offset from {q.before + 1} on has no message")}
        WHEN q.queue_offset = 0 THEN {_text(again)}
        ELSE {_text("queue offset {q.queue_offset} follows {q.before} in the log")} END"""
    severity = "CASE WHEN q.kind <> 'gap' AND q.queue_offset = 0 THEN 'warning' ELSE 'critical' END"
    at = "CASE WHEN q.kind = 'gap' THEN q.before + 1 ELSE q.queue_offset END"
    lost = unless = ""
    if acked:
        lost = f"""
            LEFT JOIN (SELECT s.grp, s.topic, s.queue_id, s.physical_offset, count(*) AS many
                FROM steps s JOIN lost l ON {_equal("s", "l", _QUEUE)}
                    AND l.queue_offset > s.before AND l.queue_offset < s.queue_offset
                GROUP BY s.grp, s.topic, s.queue_id, s.physical_offset) t
            ON {_equal("q", "t", (*_QUEUE, "physical_offset"))}
        """
        unless = "AND (t.many IS NULL OR t.many < q.lacking)"
    more = {"queue_offset": at, "epoch": "p.epoch"}
    return f"""
        SELECT {_finding(severity, "q.kind", f"concat({text}, p.doubt)", "q", **more)}
        FROM steps q {_span("q")} {lost}
        WHERE (q.kind <> 'gap' OR NOT EXISTS (
            SELECT 1 FROM ranged w WHERE w.kind = 'damaged' AND w.grp = q.grp
                AND w.physical_offset > q.last_before AND w.physical_offset < q.physical_offset
        )) {unless}
    """


def _duplicates() -> str:
    """Every place but the first of a unique key that is in a topic more than once."""
    window = "OVER (PARTITION BY grp, topic, unique_key ORDER BY physical_offset)"
    detail = _text("first at {m.first_at}, queue {m.first_queue} offset {m.first_offset}")
    return f"""
        SELECT {_finding("'info'", "'duplicated'", detail, "m")} FROM (
            SELECT *, row_number() {window} AS nth,
                first_value(physical_offset) {window} AS first_at,
                first_value(queue_id) {window} AS first_queue,
                first_value(queue_offset) {window} AS first_offset
            FROM messages
            WHERE amount = 1 AND unique_key IS NOT NULL AND NOT {_begins("topic", _REPEATING)}
        ) m WHERE m.nth > 1
    """


_PLACED: Final = "topic IS NOT NULL AND queue_id IS NOT NULL AND queue_offset IS NOT NULL"
_PLACE_LINK: Final = _text("p{grp}/{topic}/{queue_id}/{queue_offset}")
_FOUND: Final = """m.grp AS m_grp, m.topic AS m_topic, m.queue_id AS m_queue,
    m.queue_offset AS m_queue_offset, m.physical_offset AS m_offset, m.size AS m_size,
    m.epoch AS m_epoch, m.body_crc AS m_crc"""
#: An entry, and the message that was found for it.
_WITH_ITS: Final = """entry, topic, queue_id, queue_offset, unique_key, body_crc, m_grp, m_topic,
    m_queue, m_queue_offset, m_offset, m_size, m_epoch, m_crc, m_lack"""
#: An entry is looked for at its place, then by its key, or by the log offset in its message id.
ACKED_VIEWS: Final = {
    "listed": """
        SELECT m.* FROM messages m JOIN (
            SELECT DISTINCT grp, topic FROM entries WHERE grp IS NOT NULL AND topic IS NOT NULL
        ) t ON m.grp = t.grp AND m.topic = t.topic WHERE m.amount > 0
    """,
    "placed_pairs": f"""
        SELECT e.*, {_FOUND}, m.have AS m_have, m.lack AS m_lack,
            row_number() OVER (PARTITION BY e.entry ORDER BY m.physical_offset) AS nth
        FROM entries e JOIN listed m ON {_equal("e", "m", (*_QUEUE, "queue_offset"))}
        WHERE e.unique_key IS NULL OR e.unique_key = m.unique_key OR e.unique_key = m.batch_key
    """,
    "rest": """
        SELECT e.* FROM entries e LEFT JOIN (SELECT DISTINCT entry FROM placed_pairs) p
            ON e.entry = p.entry
        WHERE p.entry IS NULL
    """,
    # `is_rest`: still looked for; else the entry only says that its key is listed.
    "sought": f"""
        SELECT s.*, CASE WHEN unique_key IS NOT NULL THEN concat('k', unique_key)
            WHEN grp IS NULL THEN NULL WHEN {_PLACED} THEN {_PLACE_LINK}
            WHEN id_offset IS NOT NULL THEN {_text("i{grp}/{id_offset}")} END AS link
        FROM (
            SELECT r.*, TRUE AS is_rest FROM rest r
            UNION ALL
            SELECT e.*, FALSE AS is_rest FROM entries e
            WHERE grp IS NOT NULL AND {_PLACED} AND unique_key IS NOT NULL
        ) s
    """,
    "linked": f"""
        SELECT l.* FROM (
            SELECT m.*, concat('k', unique_key) AS link FROM messages m
            WHERE unique_key IS NOT NULL
            UNION ALL
            SELECT m.*, concat('k', batch_key) AS link FROM messages m WHERE batch_key IS NOT NULL
            UNION ALL
            SELECT m.*, {_PLACE_LINK} AS link FROM messages m WHERE amount = 0
            UNION ALL
            SELECT m.*, {_text("i{grp}/{physical_offset}")} AS link FROM messages m
        ) l JOIN (SELECT DISTINCT link FROM sought WHERE link IS NOT NULL) s ON l.link = s.link
    """,
    "copies": """
        SELECT * FROM (
            SELECT l.*, row_number() OVER (PARTITION BY link, grp
                    ORDER BY amount DESC, physical_offset) AS nth_copy,
                bit_or(have) OVER (PARTITION BY link, grp) AS all_have,
                bit_and(lack) OVER (PARTITION BY link, grp) AS all_lack,
                sum(amount) OVER (PARTITION BY link, grp) AS many
            FROM linked l
        ) c WHERE nth_copy = 1
    """,
    "link_pairs": f"""
        SELECT s.*, {_FOUND}, m.all_have AS m_have, m.all_lack AS m_lack, m.many, m.amount,
            row_number() OVER (PARTITION BY s.entry, s.is_rest
                ORDER BY CASE WHEN m.amount = 0 THEN 1 ELSE 0 END, m.physical_offset,
                    m.grp) AS nth
        FROM sought s JOIN copies m ON s.link = m.link AND (s.grp IS NULL OR s.grp = m.grp)
    """,
    "named": """
        SELECT DISTINCT l.grp, l.physical_offset FROM linked l JOIN (
            SELECT DISTINCT link, m_grp FROM link_pairs WHERE is_rest OR many > 1
        ) n ON l.link = n.link AND l.grp = n.m_grp WHERE l.amount > 0
    """,
    "best": """
        SELECT p.*, coalesce(p.grp, p.m_grp) AS known_grp FROM link_pairs p
        WHERE p.is_rest AND p.nth = 1
    """,
    "found": f"""
        SELECT f.*, CASE WHEN f.m_offset + f.m_size > g.confirms THEN 1 ELSE 0 END AS is_above
        FROM (
            SELECT {_WITH_ITS}, grp, FALSE AS by_link FROM placed_pairs WHERE nth = 1
            UNION ALL
            SELECT {_WITH_ITS}, known_grp AS grp, TRUE AS by_link FROM best WHERE amount > 0
        ) f JOIN grps g ON f.m_grp = g.grp
    """,
    # A copy for a retry does not prove that the message moved, unless that cannot have expired.
    "moved": f"""
        SELECT f.* FROM found f JOIN grps g ON f.grp = g.grp
            LEFT JOIN queue_begins b ON {_equal("f", "b", _QUEUE)}
        WHERE f.by_link AND f.queue_offset IS NOT NULL AND NOT {_begins("f.m_topic", _WAITING)}
            AND NOT (coalesce(f.topic = f.m_topic, TRUE) AND coalesce(f.queue_id = f.m_queue, TRUE)
                AND f.queue_offset = f.m_queue_offset)
            AND (g.begins = 0 OR f.queue_offset >= b.lowest)
    """,
    "nowhere": f"""
        SELECT n.*, CASE
            WHEN n.grp IS NULL AND n.unique_key IS NULL THEN 'unknown'
            WHEN n.begins = 0 OR n.id_at >= n.begins THEN 'lost'
            WHEN n.id_at IS NOT NULL THEN 'expired'
            WHEN n.lowest IS NOT NULL AND {_PLACED} THEN
                CASE WHEN n.queue_offset < n.lowest THEN 'expired' ELSE 'lost' END
            ELSE 'unchecked' END AS outcome
        FROM (
            SELECT r.*, coalesce(g.begins, (SELECT max(begins) FROM grps)) AS begins, b.lowest,
                CASE WHEN r.unique_key IS NULL AND (r.grp IS NULL OR r.topic IS NULL
                    OR r.queue_id IS NULL OR r.queue_offset IS NULL) THEN r.id_offset
                END AS id_at
            FROM rest r LEFT JOIN best f ON r.entry = f.entry LEFT JOIN grps g ON r.grp = g.grp
                LEFT JOIN queue_begins b ON {_equal("r", "b", _QUEUE)}
            WHERE f.entry IS NULL
        ) n
    """,
    # `bits`: the replicas that alone hold it.
    "lost": """
        SELECT grp, topic, queue_id, queue_offset, unique_key, id_at AS physical_offset,
            CAST(NULL AS BIGINT) AS epoch, CAST(NULL AS BIGINT) AS bits,
            CAST(NULL AS STRING) AS m_grp
        FROM nowhere WHERE outcome = 'lost'
        UNION ALL
        SELECT known_grp, topic, queue_id, queue_offset, unique_key, m_offset, m_epoch, m_have,
            m_grp
        FROM best WHERE amount = 0
    """,
}
#: Views that are read more than once, and are worth keeping.
KEPT: Final = ("ranged", "messages", "placed", "steps", "unfit", "entries", "placed_pairs",
               "linked", "link_pairs", "found", "nowhere", "lost", "findings")  # fmt: skip
#: Sets of replicas that findings name.
SETS: Final = """
    SELECT m_grp AS grp, m_lack AS bits FROM found WHERE m_lack <> 0
    UNION SELECT m_grp AS grp, bits FROM lost WHERE bits IS NOT NULL
"""
#: `elsewhere`: not where they were acknowledged. `not_everywhere`: whole in some replicas, but not
#: in all that confirm their place. `unconfirmed`: found, above what any replica confirms.
#: `expired`: older than the log. `unchecked`: they name no place, and part of the log has expired.
ACKED_COUNTS: Final = """
    SELECT (SELECT count(*) FROM found) AS found, (SELECT count(*) FROM lost) AS lost,
        (SELECT count(*) FROM moved) AS elsewhere,
        (SELECT count(*) FROM found WHERE m_lack <> 0) AS not_everywhere,
        (SELECT coalesce(CAST(sum(is_above) AS BIGINT), 0) FROM found) AS unconfirmed,
        (SELECT count(*) FROM nowhere WHERE outcome = 'expired') AS expired,
        (SELECT count(*) FROM nowhere WHERE outcome IN ('unknown', 'unchecked')) AS unchecked
"""


def _held() -> Iterator[str]:
    """Findings about entries of the list that are found."""
    at = {"physical_offset": "e.m_offset", "size": "e.m_size", "epoch": "e.m_epoch"}
    what = "'acknowledged, and whole in other replicas only'"
    lacking = _finding("'critical'", "'acked_missing'", what, "e", replicas="s.replicas", **at)
    # What a replica lacks is reported where replicas are compared, as long as they are all there.
    yield f"""
        SELECT {lacking} FROM (
            SELECT f.*, row_number() OVER (PARTITION BY f.grp, f.m_offset ORDER BY f.entry) AS nth
            FROM found f WHERE f.m_lack <> 0
        ) e JOIN sets s ON e.m_grp = s.grp AND e.m_lack = s.bits LEFT JOIN (
            SELECT grp, physical_offset, count(DISTINCT replicas) AS many FROM ranged
            WHERE kind IN {_COMPARED} GROUP BY grp, physical_offset
        ) c ON e.m_grp = c.grp AND e.m_offset = c.physical_offset
        WHERE e.nth = 1 AND (c.many IS NULL OR c.many < s.many)
    """
    crc = "(e.body_crc & 2147483647)"
    what = _text(f"its body has CRC {{e.m_crc}}, the acknowledged one {{{crc}}}")
    finding = _finding("'critical'", "'divergent'", what, "e", field="'body'", **at)
    yield f"SELECT {finding} FROM found e WHERE {crc} <> e.m_crc"
    what = _text(
        "acknowledged here, lies at queue {e.m_queue} offset {e.m_queue_offset} of {e.m_topic}"
    )
    finding = _finding("'critical'", "'reordered'", what, "e", **at)
    yield f"SELECT {finding} FROM moved e"


def _lost() -> Iterator[str]:
    """Findings about entries of the list that are not found."""
    why = """CASE WHEN e.outcome = 'unknown'
        THEN 'it names no broker, and several groups are audited'
        ELSE 'not found, and it may have expired: the log no longer begins at 0' END"""
    finding = _finding("'warning'", "'unchecked'", why, "e")
    yield f"SELECT {finding} FROM nowhere e WHERE e.outcome IN ('unknown', 'unchecked')"
    only = "acknowledged, and only in {s.names}: the others, or a later epoch, went on without it"
    nearest = "; the one before it in its queue lies at {n.nearest}"
    what = f"""CASE WHEN e.bits IS NOT NULL THEN {_text(only)}
        WHEN n.nearest IS NOT NULL THEN {_text("acknowledged, and in no replica" + nearest)}
        ELSE 'acknowledged, and in no replica' END"""
    at = {"physical_offset": "e.physical_offset", "epoch": "coalesce(e.epoch, n.epoch)"}
    finding = _finding("'critical'", "'lost'", what, "e", replicas="s.replicas", **at)
    yield f"""
        SELECT {finding} FROM lost e
            LEFT JOIN sets s ON e.m_grp = s.grp AND e.bits = s.bits LEFT JOIN (
                SELECT grp, topic, queue_id, queue_offset, max(physical_offset) AS nearest,
                    max_by(epoch, physical_offset) AS epoch
                FROM listed GROUP BY grp, topic, queue_id, queue_offset
            ) n ON {_equal("e", "n", _QUEUE)} AND e.queue_offset - 1 = n.queue_offset
    """


def _of_list() -> Iterator[str]:
    """Findings about messages that the list lacks, and about the order of its entries."""
    finding = _finding("'info'", "'not_acked'", "'in the log, and not in the list'", "m")
    yield f"""
        SELECT {finding} FROM listed m
            LEFT JOIN (SELECT DISTINCT m_grp, m_offset FROM placed_pairs) p
                ON m.grp = p.m_grp AND m.physical_offset = p.m_offset
            LEFT JOIN named n ON m.grp = n.grp AND m.physical_offset = n.physical_offset
        WHERE p.m_grp IS NULL AND n.grp IS NULL
    """
    order = "OVER (PARTITION BY grp, producer, topic, queue_id ORDER BY number, entry)"
    what = _text(
        "number {e.number} of producer {e.producer} was acknowledged here, number "
        "{e.number_before} before it at queue offset {e.offset_before}"
    )
    finding = _finding("'warning'", "'reordered'", what, "e")
    yield f"""
        SELECT {finding} FROM (
            SELECT *, lag(number) {order} AS number_before,
                lag(queue_offset) {order} AS offset_before
            FROM entries WHERE producer IS NOT NULL AND number IS NOT NULL AND {_PLACED}
        ) e WHERE e.queue_offset <= e.offset_before
    """


def findings(*, acked: bool, duplicates: bool, queues: bool) -> dict[str, str]:
    """Views, of which `findings` has all: of the stores as such (view `known`), of ranges, and of
    what crosses them. Spark plans many small queries sooner than a large one.
    """
    parts = [f"SELECT {', '.join(COLUMNS)} FROM known", *_ranges(acked)]
    if queues:
        parts += [_steps(acked), *_queues()]
    if duplicates:
        parts.append(_duplicates())
    if acked:
        parts += [*_held(), *_lost(), *_of_list()]
    # An empty list is spelled differently by the engines, so it comes from a table.
    finding = {name: f"u.{name}" for name in COLUMNS}
    finding["replicas"] = "coalesce(u.replicas, r.replicas)"
    columns = ", ".join(f"{value} AS {name}" for name, value in finding.items())
    views = {f"findings_{number}": part for number, part in enumerate(parts)}
    every = " UNION ALL ".join(f"SELECT * FROM {name}" for name in views)
    return views | {"findings": f"SELECT {columns} FROM ({every}) u CROSS JOIN no_replicas r"}
