"""Consumer offsets, and their file `config/consumerOffset.json`: `topic@group` to queue id to
offset, as in Java. An offset is the next message that the group has not consumed.

Invariant (R31): a master's table is accepted only if its masterEpoch is not below the last one
accepted, so late offsets of a deposed master overwrite nothing. That epoch is in the file, as the
state version of the data version. The deletion of a topic is a record of the log and deletes the
topic's offsets (R39). Origin: Java `ConsumerOffsetManager`, and `SlaveSynchronize`, which compares
no epochs.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import filterfalse
from pathlib import Path
from typing import Final

import msgspec
from msgspec.structs import replace

from batonmq.broker.tables.config_file import ConfigManager
from batonmq.broker.tables.offset_resets import OffsetResets, Running
from batonmq.broker.tables.old_positions import Deletions, OldPositions, Received
from batonmq.protocol.bodies import ConsumerOffsetSerializeWrapper, DataVersion
from batonmq.protocol.codes import ResponseCode
from batonmq.protocol.errors import BrokerRefusal

log = logging.getLogger(__name__)

NO_OFFSET = -1
OFFSETS_MAX: Final = 1 << 21
"""Offsets of all groups (R58): clients choose groups and queues. One takes about 150 bytes."""
SEPARATOR: Final = "@"
_SORTED_AT_ONCE: Final = 512
# As in Java the data version moves once in so many commits, not at each.
_COMMITS_PER_VERSION = 500
_VERSIONS_AHEAD = 1000


class OffsetKeys:
    """The keys `topic@group` of a table by topic and by group, so that a look-up does not walk over
    all of them (R58). The keys of a whole table are indexed bit by bit, as look-ups come:
    a start with 20,000 keys would stop the loop."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._of_topic: dict[str, set[str]] = {}
        self._of_group: dict[str, set[str]] = {}
        self._unsorted = set(keys)

    def add_all(self, keys: Iterable[str]) -> None:
        """Adds keys that were not there."""
        self._unsorted.update(keys)

    def add(self, key: str) -> None:
        """Adds a key that was not there."""
        topic, _, group = key.partition(SEPARATOR)
        self._of_topic.setdefault(topic, set()).add(key)
        self._of_group.setdefault(group, set()).add(key)

    def remove(self, key: str) -> None:
        if key in self._unsorted:
            self._unsorted.remove(key)
            return
        topic, _, group = key.partition(SEPARATOR)
        for table, name in ((self._of_topic, topic), (self._of_group, group)):
            keys = table[name]
            keys.remove(key)
            if not keys:
                del table[name]

    def of_topic(self, topic: str) -> list[str]:
        self._sort_some()
        prefix = topic + SEPARATOR
        rest = [key for key in self._unsorted if key.startswith(prefix)]
        return sorted([*self._of_topic.get(topic, ()), *rest])

    def of_group(self, group: str) -> list[str]:
        """The keys of a group, without those of broadcast consumers (`topic@group@...`)."""
        # `add` has keys of broadcast consumers under `group@client`.
        if SEPARATOR in group:
            return []
        self._sort_some()
        suffix = SEPARATOR + group
        rest = [k for k in self._unsorted if k.endswith(suffix) and k.count(SEPARATOR) == 1]
        return sorted([*self._of_group.get(group, ()), *rest])

    def _sort_some(self) -> None:
        for _ in range(min(len(self._unsorted), _SORTED_AT_ONCE)):
            self.add(self._unsorted.pop())


class OffsetTable(ConsumerOffsetSerializeWrapper):
    """With members that Java does not have: `topics` and `end` of `Deletions`, `OffsetResets`, and
    `end` and `lacks` of `Received`."""

    baton_deleted: dict[str, int] = msgspec.field(default_factory=dict)
    baton_deleted_end: int = 0
    baton_resets: Running = msgspec.field(default_factory=dict)
    baton_resets_end: int = 0
    baton_received_end: int = 0
    baton_unreceived: dict[str, list[int]] = msgspec.field(default_factory=dict)


class ConsumerOffsetManager(ConfigManager[OffsetTable]):
    """`topic@group` to queue id to offset. One thread only; see `ConfigManager.writes_due`."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, OffsetTable)
        self._table: dict[str, dict[int, int]] = {}
        self._own: set[str] = set()
        """Keys whose offsets no snapshot holds: only those may be changed in place."""
        self._keys = OffsetKeys()
        self._size = 0  # offsets of all groups
        self.removals = 0
        """Grows when keys are taken out."""
        self.lowered = 0
        """How many offsets `clamped` has lowered."""
        self._commits = 0
        self._received = Received()
        self._deletion_due = False
        self._old = OldPositions()
        self.deletions = Deletions()
        self.resets = OffsetResets(self.commit, self._new_version)

    def _take_loaded(self, body: OffsetTable) -> None:
        self._table = body.offset_table
        self._count_all()
        self._keys = OffsetKeys(self._table)
        # Consumers may have kept running during this restart, with offsets in queues that are gone
        # (R39).
        for topic in body.baton_deleted:
            self._old.deleted(topic)
        self.resets.running, self.resets.end = body.baton_resets, body.baton_resets_end
        self.data_version = body.data_version
        counted = self.deletions
        counted.topics, counted.loaded_end = body.baton_deleted, body.baton_deleted_end
        counted.loaded_epoch = self.master_epoch
        if body.baton_received_end > counted.loaded_end:
            end, lacks = body.baton_received_end, body.baton_unreceived
            self._received = Received.loaded(self._table, end, self.master_epoch, lacks)
        self._dirty = False

    # Reading.

    def query(self, group: str, topic: str, queue_id: int) -> int:
        """The committed offset, NO_OFFSET (-1) if there is none."""
        offsets = self._table.get(f"{topic}@{group}")
        return NO_OFFSET if offsets is None else offsets.get(queue_id, NO_OFFSET)

    def no_place(self, group: str, topic: str, queue_id: int) -> BrokerRefusal | None:
        """Why the group may not commit in this queue (R58). None if it has an offset there, or
        there are fewer than OFFSETS_MAX of all groups."""
        if self._size < OFFSETS_MAX or queue_id in self._table.get(f"{topic}@{group}", ()):
            return None
        why = f"this broker has {OFFSETS_MAX} offsets of groups: no more are stored"
        return BrokerRefusal(ResponseCode.NO_PERMISSION, f"{why}; delete groups that are not used")

    def _count_all(self) -> None:
        self._size = sum(map(len, self._table.values()))

    def begins(self, group: str, topic: str, queue_id: int) -> int:
        """`query` for a consumer that asks where to begin. Its offsets count from now on (R39)."""
        self._old.begins(group, topic, queue_id)
        return self.query(group, topic, queue_id)

    def was_deleted(self, topic: str) -> bool:
        """Whether consumers may have offsets in queues of this topic that are gone."""
        return topic in self._old

    def is_old(
        self,
        group: str,
        topic: str,
        queue_id: int,
        offset: int,
        first_offset_of: Callable[[str, int], int],
    ) -> bool:
        """Whether a consumer's offset may be one of a deleted queue (R39). `first_offset_of(topic,
        queue_id)`: of the present queue."""
        if not self._old.is_old(group, topic, queue_id):
            return False
        first_offset = first_offset_of(topic, queue_id)
        # A group at the first message skips nothing, and a committed offset is of the new queue,
        # since the deletion removed the old ones.
        if offset > first_offset and self.query(group, topic, queue_id) == NO_OFFSET:
            return True
        self._old.begins(group, topic, queue_id)
        return False

    def offsets_of(self, group: str, topic: str) -> dict[int, int]:
        """Queue id to offset of a group in a topic (a copy)."""
        return dict(self._table.get(f"{topic}@{group}", ()))

    def groups_of(self, topic: str) -> list[str]:
        """Groups that have committed in a topic, sorted; without broadcast consumers
        (`topic@group@...`), as in Java."""
        prefix = topic + SEPARATOR
        groups = [key.removeprefix(prefix) for key in self._keys.of_topic(topic)]
        return [group for group in groups if SEPARATOR not in group]

    @property
    def table(self) -> Mapping[str, Mapping[int, int]]:
        """The whole table; read only."""
        return self._table

    @property
    def master_epoch(self) -> int:
        """The last masterEpoch accepted."""
        return self.data_version.state_version

    @property
    def change_count(self) -> int:
        """Grows with every commit, and when resets begin and end. A slave compares it to decide
        whether to fetch the table again."""
        return self._commits + self.resets.changes

    def wrapper(self) -> OffsetTable:
        """The whole table, without Java's `groupTopicMap`, which is derived and never read."""
        # Commits replace what the snapshot holds. To copy the offsets of 20,000 keys here would
        # stop the loop for 14 ms, every 5 s.
        self._own = set()
        return OffsetTable(
            data_version=self.data_version,
            offset_table=dict(self._table),
            baton_deleted=dict(self.deletions.topics),
            baton_deleted_end=self.deletions.end,
            baton_resets={key: dict(queues) for key, queues in self.resets.running.items()},
            baton_resets_end=self.resets.end,
            baton_received_end=self._received.end,
            baton_unreceived=dict(self._received.lacks),
        )

    # Changing.

    def commit(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        """Sets an offset. A lower one is accepted, as in Java, and logged. This ends a reset of the
        queue: before committing a group's progress check `resets.runs`."""
        key = f"{topic}@{group}"
        if self.resets.running:
            self.resets.finish(key, queue_id)
        offsets = self._table.get(key)
        if offsets is None:
            offsets = self._table[key] = {}
            self._own.add(key)
            self._keys.add(key)
        before = offsets.get(queue_id, NO_OFFSET)
        # Stock clients commit every 5 s, also without progress: then no file needs to be written.
        if offset == before:
            return
        self._size += queue_id not in offsets
        if offset < before:
            log.warning(
                "consumer_offset_back group=%s topic=%s queue_id=%d offset=%d before=%d",
                group,
                topic,
                queue_id,
                offset,
                before,
            )
        if key not in self._own:
            offsets = self._table[key] = dict(offsets)
            self._own.add(key)
        offsets[queue_id] = offset
        self._dirty = True
        self._commits += 1
        if self._commits % _COMMITS_PER_VERSION == 0:
            self._new_version()

    def clamped(self, end_of: Callable[[str, int], int]) -> Iterator[int]:
        """Lowers every offset above `end_of(topic, queue id)` to that end, one `topic@group` a
        step; yields in how many queues. Keys that are added between two steps are left out."""
        for key in list(self._table):
            topic, _, group = key.partition(SEPARATOR)
            # It may have been deleted since the last step.
            offsets = self._table.get(key, {})
            ends = {
                queue_id: end
                for queue_id, offset in offsets.items()
                if offset > (end := end_of(topic, queue_id))
            }
            if not ends:
                yield 0
                continue
            self.lowered += len(ends)
            messages = sum(offsets[queue_id] - end for queue_id, end in ends.items())
            self._table[key] = offsets | ends
            # Slaves compare this count: they must fetch the lowered offsets.
            self._commits += 1
            self._new_version()
            log.warning(
                "consumer_offsets_clamped group=%s topic=%s queues=%d messages=%d",
                group,
                topic,
                len(ends),
                messages,
            )
            yield len(ends)

    def delete_topic(self, topic: str, record_end: int) -> None:
        """A record that ends at `record_end` deletes a topic: removes its offsets (R39)."""
        self._old.deleted(topic)
        self.deletions.note_topic(topic, record_end)
        self._forget(self._keys.of_topic(topic), record_end)

    def log_ends(self, end: int) -> None:
        """The log was cut at `end`: deletions and resets after it have not happened (R44)."""
        self.deletions.log_ends(end)
        self.resets.log_ends(end)
        self._dirty = True

    def delete_group(self, group: str, record_end: int) -> None:
        """The same for a record that deletes a group with its offsets."""
        self._forget(self._keys.of_group(group), record_end)

    def _forget(self, keys: list[str], record_end: int) -> None:
        self.deletions.end = max(self.deletions.end, record_end)
        # A start has read a record again whose effect is in the file: since then the topic may have
        # been created again, with commits that must stay.
        loaded, received = self.deletions, self._received
        if loaded.counts(record_end, loaded.loaded_end, loaded.loaded_epoch):
            return
        is_received = self.deletions.counts(record_end, received.end, received.epoch)
        self._size -= sum(map(len, map(self._table.__getitem__, keys)))
        for key in keys:
            self.resets.forget(key, record_end)
            # The master had carried out this deletion before it sent these offsets: they are of the
            # new topic (R39).
            if is_received and key in received.table:
                self._table[key] = dict(received.table[key])
                self._size += len(received.table[key])
            else:
                del self._table[key]
                self._keys.remove(key)
        for key in received.lacks.keys() & keys:
            del received.lacks[key]
        self.removals += 1
        self._commits += 1
        self._deletion_due = True
        self._new_version()

    def clear_for_new_log(self) -> None:
        """This replica begins an empty log. Durable on return; raises OSError."""
        # The new log may begin after deletions: only offsets that the master sends count.
        self._table.clear()
        self._size = 0
        self.removals += 1
        self._keys = OffsetKeys()
        self._received = Received()
        self.deletions.log_ends(0)
        self.resets.clear()
        self._commits += 1
        self._new_version()
        self.write()

    def deletions_due(self) -> list[Callable[[], None]]:
        """`writes_due` if offsets were deleted or reset since the last call: below a checkpoint the
        log is not read again."""
        return self.writes_due() if self._deletion_due or self.resets.is_due else []

    def writes_due(self) -> list[Callable[[], None]]:
        self._deletion_due = self.resets.is_due = False
        return super().writes_due()

    # Where a slave acts for its master, outside controller mode.

    def act_for_master(self) -> None:
        """Groups commit here from now on."""
        # A Java master that returns refuses a table with a lower version than its own, and that may
        # have grown since it was fetched here: so the version jumps.
        version = self.data_version
        self.data_version = replace(version, counter=version.counter + _VERSIONS_AHEAD)
        self._dirty = True

    def taken_back(
        self, incoming: Mapping[str, Mapping[int, int]], end_of: Callable[[str, int], int]
    ) -> Iterator[int]:
        """For a master that returns: takes offsets that groups committed at a slave, if they are
        above its own and not above `end_of(topic, queue_id)`. One `topic@group` in each step;
        yields how many offsets it took."""
        for key, offsets in incoming.items():
            topic, _, group = key.partition(SEPARATOR)
            own = self._table.get(key, {})
            further = {
                queue_id: offset
                for queue_id, offset in offsets.items()
                # One above the end points to a message that this log lacks. The group would skip
                # the message that gets this offset later.
                if own.get(queue_id, NO_OFFSET) < offset <= end_of(topic, queue_id)
            }
            for queue_id, offset in further.items():
                self.commit(group, topic, queue_id, offset)
            yield len(further)

    # From the master.

    def apply_from_master(
        self,
        master_epoch: int,
        incoming: Mapping[str, Mapping[int, int]],
        carried_out: int | None = None,
        version: DataVersion | None = None,
        resets: Mapping[str, Mapping[int, int]] = {},
    ) -> bool:
        """Merges the offset table that the master of `master_epoch` sent (GET_ALL_CONSUMER_OFFSET,
        43), and the `resets` that ran there, when it had carried out the log up to `carried_out`
        (None: a Java master, whose deletions and resets are no records).

        False, and nothing changed, if the table of a later master was applied before, or if the
        master still had a topic that is deleted here: ask again. Offsets of queues that the
        master's table lacks stay, and so do those of resets whose records it had not carried out.
        The own version does not fall below `version`, the master's (`act_for_master`).
        """
        if master_epoch < self.master_epoch:
            return False
        # R39: its table may have offsets of a topic that is deleted here.
        if carried_out is not None and carried_out < self.deletions.end:
            return False
        if self._received.end != (carried_out or 0):
            self._dirty = True  # also without new offsets: a start compares deletions with this end
        changed, kept = self.resets.from_master(resets, carried_out)
        changed = changed or master_epoch > self.master_epoch
        own = self._table
        self._keys.add_all(incoming.keys() - own.keys())
        if not own:
            own.update(zip(incoming, map(dict, incoming.values()), strict=True))
            changed = changed or bool(own)
        # In the table's order: that of a set would differ from run to run, and so would the file.
        lacks = {key: list(own[key]) for key in filterfalse(incoming.__contains__, own)}
        for key in [key for key, offsets in incoming.items() if own.get(key) != offsets]:
            merged = {**own.get(key, {}), **incoming[key]}
            merged.update((queue_id, own[key][queue_id]) for queue_id in kept.get(key, ()))
            if more := merged.keys() - incoming[key].keys():
                lacks[key] = list(more)
            if merged != own.get(key):
                own[key] = merged
                changed = True
        self._received = Received(incoming, carried_out or 0, master_epoch, lacks)
        if changed:
            self._count_all()
            self._new_version(master_epoch)
        if version is not None and version.counter > self.data_version.counter:
            self.data_version = replace(self.data_version, counter=version.counter)
            self._dirty = True
        return True
