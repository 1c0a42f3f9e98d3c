"""Topics, groups and queue locks of this broker: changed and replicated (SAFETY R31).

A change of one of them is a record of the system topic `rmq_sys_BATON_METADATA`. It is replicated,
confirmed, truncated and recovered like any message, before the messages that need it. So it is on
every member of the set once it is confirmed. A Java replica stores such a record and ignores it.

A master applies a change at once, appends the record, and answers when the record is confirmed; a
slave applies it when the record is dispatched. But a deletion destroys data, and its record may
still be cut. So a master also deletes only when the record is confirmed, and takes no write for the
topic until then. The offsets of groups in the topic are deleted with it: with them the groups would
skip messages of a new topic of that name (R39).

Origin: TopicConfigManager and AdminBrokerProcessor in Java, whose slaves poll the tables every ten
seconds instead.
"""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import ClassVar, Final, Self

import msgspec
from msgspec.structs import replace

from batonmq.broker.config import BrokerConfig
from batonmq.broker.tables.broker_tables import BrokerTables
from batonmq.broker.tables.config_file import Unwritten
from batonmq.broker.tables.offset_resets import OffsetReset
from batonmq.broker.tables.queue_locks import LockChange
from batonmq.broker.tables.subscription_group import FORBIDDEN_TO_READ
from batonmq.broker.tables.topic_config import topic_config
from batonmq.protocol.bodies import (
    PERM_WRITE,
    SetMessageRequestModeRequestBody,
    SubscriptionGroupConfig,
    TopicConfig,
)
from batonmq.protocol.codes import ResponseCode
from batonmq.protocol.errors import BrokerRefusal
from batonmq.protocol.system_record import SystemRecord
from batonmq.protocol.topic_name import (
    METADATA_TOPIC,
    TOPIC_QUEUES_MAX,
    check_group,
    check_made_topic,
    is_file_name,
    is_retry_or_dlq,
    pop_retry_topics,
    pop_topic_pairs,
)
from batonmq.store.errors import PutRefused

log = logging.getLogger(__name__)

_GROUPS_MAX: Final = "subscriptionGroupsMax"


class MetadataChange(SystemRecord, frozen=True, kw_only=True, rename="camel"):
    """What one record changes. Names that are absent are untouched.

    `deleted_groups`: whether the offsets of the group are deleted too. `forbidden`: group to topic
    to bits, as in `config/subscriptionGroup.json`.
    """

    KIND: ClassVar = "metadata"
    topics: dict[str, TopicConfig] = msgspec.field(default_factory=dict)
    deleted_topics: list[str] = msgspec.field(default_factory=list)
    groups: dict[str, SubscriptionGroupConfig] = msgspec.field(default_factory=dict)
    locks: list[LockChange] = msgspec.field(default_factory=list)
    deleted_groups: dict[str, bool] = msgspec.field(default_factory=dict)
    forbidden: dict[str, dict[str, int]] = msgspec.field(default_factory=dict)
    request_modes: list[SetMessageRequestModeRequestBody] = msgspec.field(default_factory=list)
    resets: list[OffsetReset] = msgspec.field(default_factory=list)

    @classmethod
    def decode(cls, body: bytes) -> Self:
        """As `SystemRecord.decode`, without names that no file can have (R46)."""
        change = super().decode(body)
        # Earlier versions accepted such names, so they may be in the log. All members skip the
        # same.
        named = [*change.topics, *change.deleted_topics, *change.groups, *change.deleted_groups]
        bad = {name for name in named if not is_file_name(name)}
        if not bad:
            return change
        log.error("metadata_names_skipped names=%r", sorted(bad))
        return replace(
            change,
            topics={name: one for name, one in change.topics.items() if name not in bad},
            deleted_topics=[name for name in change.deleted_topics if name not in bad],
            groups={name: one for name, one in change.groups.items() if name not in bad},
            deleted_groups={n: one for n, one in change.deleted_groups.items() if n not in bad},
        )


class TopicService:
    """The broker's view of its topics and groups.

    `append` puts a metadata record into the log and returns its end offset. `changed` is called
    after every change of the topic table, with the topics that changed, or None if others may have
    changed too. `dropped` removes the queues of a topic, and raises OSError; `deleted` is called
    when the topic is gone. `deleting` counts, by topic, the deletions in this master's log that are
    not confirmed; only this class changes it.
    """

    def __init__(
        self,
        tables: BrokerTables,
        deleting: Counter[str],
        *,
        settings: BrokerConfig,
        append: Callable[[bytes], int],
        changed: Callable[[Collection[str] | None], None],
        dropped: Callable[[str], object],
        deleted: Callable[[str], object],
    ) -> None:
        self.topics = tables.topics
        self.groups = tables.groups
        self.locks = tables.locks
        self.request_modes = tables.request_modes
        self._offsets = tables.offsets
        self.deleted_since = tables.offsets.deletions.since
        self._settings = settings
        self._append = append
        self._changed = changed
        self._dropped = dropped
        self._deleted = deleted
        self._deleting = deleting
        self._counted_end = -1
        """End of the last record whose deletions `deleting` counts."""
        self.unwritten = Unwritten()

    def get(self, topic: str) -> TopicConfig | None:
        return self.topics.get(topic)

    def existing(self, topic: str) -> TopicConfig:
        """Raises BrokerRefusal TOPIC_NOT_EXIST."""
        config = self.topics.get(topic)
        if config is None:
            raise BrokerRefusal(
                ResponseCode.TOPIC_NOT_EXIST, f"topic {topic} does not exist on this broker"
            )
        return config

    def for_send(
        self, topic: str, default_topic: str, queue_nums: int, sys_flag: int = 0
    ) -> TopicConfig:
        """The topic of a send, created from `default_topic` if that is allowed.

        Queues: as many as the client wants, at most those of the template. Raises BrokerRefusal:
        TOPIC_NOT_EXIST if the topic may not be created, NO_PERMISSION if it may not be written.
        """
        self._refuse_while_deleting(topic)
        config = self.topics.get(topic)
        if config is None:
            config = self._from_template(topic, default_topic, queue_nums)
            config = replace(config, topic_sys_flag=sys_flag)
            self.put_topic(config)
        _require_writable(config)
        return config

    def _from_template(self, topic: str, default_topic: str, queue_nums: int) -> TopicConfig:
        derived = self.topics.derived(topic, default_topic, max(1, queue_nums))
        if self._settings.auto_create_topic_enable and derived is not None:
            # A retry topic, too: a client without a route chooses among the template's queues.
            return derived
        if is_retry_or_dlq(topic):
            return topic_config(topic, 1)
        raise BrokerRefusal(
            ResponseCode.TOPIC_NOT_EXIST,
            f"topic {topic} does not exist and is not created by sending to it"
            f" (autoCreateTopicEnable {str(self._settings.auto_create_topic_enable).lower()},"
            f" template {default_topic or 'none'}): create it with mqctl updateTopic",
        )

    def of_group(self, topic: str, queue_nums: int, sys_flag: int = 0) -> int:
        """How many queues the retry or dead-letter topic of a group has for new messages, at most
        `queue_nums`; it is created with that many if it does not exist. Raises BrokerRefusal:
        NO_PERMISSION if it may not be written, INVALID_PARAMETER if its name would be too long."""
        self._refuse_while_deleting(topic)
        queue_nums = min(queue_nums, TOPIC_QUEUES_MAX)  # an earlier version took any for a group
        config = self.topics.get(topic)
        if config is None:
            config = replace(topic_config(topic, queue_nums), topic_sys_flag=sys_flag)
            self._put_all([config])  # also above topicsMax: else failed messages would be lost
        _require_writable(config)
        return max(1, min(queue_nums, config.write_queue_nums))

    def put_topic(self, config: TopicConfig) -> int:
        """Creates or changes a topic; the change is safe once the returned offset is confirmed."""
        return self.put_topics([config])

    def put_topics(self, configs: Sequence[TopicConfig]) -> int:
        """The same for several, as one change. Raises BrokerRefusal: INVALID_PARAMETER for a new
        one with a bad name, NO_PERMISSION for more than `topicsMax`."""
        made = sum(config.topic_name not in self.topics for config in configs)
        _refuse_above("topics", len(self.topics), made, "topicsMax", self._settings.topics_max)
        return self._put_all(configs)

    def _put_all(self, configs: Sequence[TopicConfig]) -> int:
        names = [config.topic_name for config in configs]
        for name in names:
            self._refuse_while_deleting(name)
            if name not in self.topics:
                check_made_topic(name)
        # First: if no record can be put this raises, and the table must not have changed.
        end = self._append(MetadataChange(topics=dict(zip(names, configs, strict=True))).encode())
        # R55: a full disk may keep the record from the log until the role ends: then the change is
        # undone.
        self.unwritten.note(end, partial(self._changed, None))
        self.unwritten.note(end, self.topics.undo_of(names))  # undone first
        for config in configs:
            self.topics.put(config)
            log.info(
                "topic_changed topic=%s read=%d write=%d perm=%d",
                config.topic_name,
                config.read_queue_nums,
                config.write_queue_nums,
                config.perm,
            )
        self._changed(names)
        return end

    def delete_topic(self, topic: str) -> int:
        """Deletes a topic, its queues, and the offsets of groups in it, once the returned offset is
        confirmed. POP's retry topics of it are deleted too, as in Java. A group's topics
        (`%RETRY%group`, `%DLQ%group`) stay: they serve several topics. Raises BrokerRefusal
        INVALID_PARAMETER for a bad name."""
        if topic not in self.topics:
            check_made_topic(topic)
        topics = [topic]
        for group in self._offsets.groups_of(topic):
            retry, shared = pop_retry_topics(group, topic)
            topics += [name for name in (retry, shared) if name in self.topics]
            used_by = self._offsets.groups_of(shared)
            if shared in topics and (
                f"{group}_{topic}" in used_by or self.has_namesake(group, topic)
            ):
                topics.remove(shared)
        end = self._append(MetadataChange(deleted_topics=topics).encode())
        # R39: until the record is confirmed the topic neither takes nor gives messages: after a
        # failover it may still exist, or be gone.
        self._count_deletions(topics, end)
        self._changed(topics)  # the send path has cached it as writable
        return end

    def has_namesake(self, group: str, topic: str) -> bool:
        """Whether POP's `%RETRY%group_topic` is also that of another group in another topic:
        `%RETRY%a_b_c` is of group `a` in topic `b_c`, and of group `a_b` in topic `c`."""
        return any(
            pair != (group, topic) and pair[1] in self.topics and pair[0] in self.groups
            for pair in pop_topic_pairs(pop_retry_topics(group, topic)[1])
        )

    def _refuse_while_deleting(self, topic: str) -> None:
        if topic in self._deleting:
            raise BrokerRefusal(
                ResponseCode.SYSTEM_BUSY, f"topic {topic} is being deleted: try again in a moment"
            )

    def put_group(self, config: SubscriptionGroupConfig) -> int:
        """Creates or changes a subscription group; same safety as `put_topic`."""
        return self.put_groups([config])

    def put_groups(self, configs: Sequence[SubscriptionGroupConfig]) -> int:
        """The same for several, as one change. Raises BrokerRefusal NO_PERMISSION for more than
        `subscriptionGroupsMax`."""
        self.refuse_too_many_groups(configs)
        end = self._append(
            MetadataChange(groups={config.group_name: config for config in configs}).encode()
        )
        self.unwritten.note(end, self.groups.undo_of(config.group_name for config in configs))
        self.groups.put_all(configs)
        return end

    def refuse_too_many_groups(self, configs: Sequence[SubscriptionGroupConfig]) -> None:
        """Raises BrokerRefusal NO_PERMISSION for more than `subscriptionGroupsMax`."""
        made = sum(config.group_name not in self.groups for config in configs)
        most = self._settings.subscription_groups_max
        _refuse_above("groups", len(self.groups), made, _GROUPS_MAX, most)

    def delete_group(self, group: str, *, with_offsets: bool) -> int:
        """Deletes a group, and on request its offsets, once the returned offset is confirmed. Its
        topics (`%RETRY%group`, `%DLQ%group`) stay until they are deleted as topics."""
        return self._append(MetadataChange(deleted_groups={group: with_offsets}).encode())

    def forbid(self, group: str, topic: str, *, reading: bool) -> int:
        """Forbids a group to read a topic, or allows it again; same safety as `put_topic`."""
        before = self.groups.forbidden(group, topic)
        bits = before | FORBIDDEN_TO_READ if reading else before & ~FORBIDDEN_TO_READ
        # R58: clients choose the names, and neither the group nor the topic has to exist.
        there, most = self.groups.forbidden_count, self._settings.subscription_groups_max
        _refuse_above("forbidden topics", there, bits and not before, _GROUPS_MAX, most)
        end = self._append(MetadataChange(forbidden={group: {topic: bits}}).encode())
        self.unwritten.note(end, partial(self.groups.set_forbidden, group, topic, before))
        self.groups.set_forbidden(group, topic, bits)
        return end

    def put_locks(self, change: LockChange) -> int:
        """A change of queue locks that is applied here already; same safety as `put_topic`. Without
        a record it is undone: a renewal puts none, so no slave would ever know the owner."""
        undo = partial(self.locks.apply, replace(change, released=not change.released))
        try:
            end = self._append(MetadataChange(locks=[change]).encode())
        except PutRefused:
            undo()
            raise
        self.unwritten.note(end, undo)
        return end

    def put_request_mode(self, mode: SetMessageRequestModeRequestBody) -> int:
        """Sets whether a group pulls or pops a topic; same safety as `put_topic`."""
        known = self.request_modes.get(mode.topic, mode.consumer_group)
        there, most = self.request_modes.count, self._settings.subscription_groups_max
        _refuse_above("request modes", there, known is None, _GROUPS_MAX, most)
        # A group that is not in the table pulls.
        before = known or replace(mode, mode="PULL", pop_share_queue_num=0)
        end = self._append(MetadataChange(request_modes=[mode]).encode())
        self.unwritten.note(end, partial(self.request_modes.put_all, [before]))
        self.request_modes.put_all([mode])
        return end

    def reset_offsets(self, group: str, topic: str, offsets: dict[int, int]) -> int:
        """The group continues at these offsets (by queue id) once the returned offset is confirmed,
        also at the next master (R56)."""
        reset = OffsetReset(group=group, topic=topic, offsets=offsets)
        return self._append(MetadataChange(resets=[reset]).encode())

    def group(self, name: str, *, writable: bool) -> SubscriptionGroupConfig:
        """The group's configuration, created with defaults if that is allowed. Raises
        BrokerRefusal: SUBSCRIPTION_GROUP_NOT_EXIST if it is not, INVALID_PARAMETER for a bad
        name."""
        config = self.groups.get(name)
        if config is None:
            check_group(name)
            if not self._settings.auto_create_subscription_group:
                raise BrokerRefusal(
                    ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
                    f"subscription group {name} does not exist: create it on the broker",
                )
            config = SubscriptionGroupConfig(group_name=name)
            # A slave puts no records: there the defaults are used for this request only.
            if writable:
                self.put_group(config)
        return config

    def apply_record(self, body: bytes, end_offset: int) -> None:
        """Applies a confirmed metadata record, which ends at `end_offset`, on a replica.
        Idempotent. Raises OSError if a topic's files cannot be removed, RemoteProtocolError."""
        # R55: it is in the log, so it is not undone any more.
        self.unwritten.written(end_offset)
        change = MetadataChange.decode(body)
        self._put(change)
        self._delete(change, end_offset)
        self._offsets.resets.begin(change.resets, end_offset)

    def take_over_record(self, body: bytes, end_offset: int) -> None:
        """A new master finds this record in its log, not confirmed yet. What it creates and resets
        counts at once, what it deletes when it is confirmed."""
        change = MetadataChange.decode(body)
        self._put(change)
        self._offsets.resets.begin(change.resets, end_offset, confirmed=False)
        self._count_deletions(change.deleted_topics, end_offset)
        self._changed(change.deleted_topics)

    def _count_deletions(self, topics: Collection[str], end_offset: int) -> None:
        # Who is elected again before the record is confirmed takes it over again, and it will be
        # confirmed once only.
        if end_offset > self._counted_end:
            self._deleting.update(topics)
            self._counted_end = end_offset

    def own_record_confirmed(self, body: bytes, end_offset: int) -> None:
        """A record of this master's log, which ends at `end_offset`, is on every member of the set.
        Raises OSError as `apply_record` does."""
        self.unwritten.written(end_offset)
        change = MetadataChange.decode(body)
        self._delete(change, end_offset)
        self._offsets.resets.begin(change.resets, end_offset)
        # One that was created again right after its deletion: that record has just removed it.
        lacks = any(one.topic_name not in self.topics for one in change.topics.values())
        if lacks or any(one.group_name not in self.groups for one in change.groups.values()):
            self._put(change)

    def role_left(self) -> None:
        """What was not confirmed may be cut: the log decides."""
        self._deleting.clear()
        self._counted_end = -1
        self._offsets.resets.role_left()

    def _put(self, change: MetadataChange) -> None:
        self.topics.put_all(change.topics.values())
        self.groups.put_all(change.groups.values())
        for name, topics in change.forbidden.items():
            for topic, bits in topics.items():
                self.groups.set_forbidden(name, topic, bits)
        for lock in change.locks:
            self.locks.apply(lock)
        self.request_modes.put_all(change.request_modes)
        if change.topics:
            self._changed(tuple(change.topics))

    def _delete(self, change: MetadataChange, end_offset: int) -> None:
        # The queues go first: if that fails the process ends, and the next start finds the record
        # again (R39).
        for topic in change.deleted_topics:
            self._dropped(topic)
            if self._deleting[topic] > 1:  # deleted again before this was confirmed
                self._deleting[topic] -= 1
            else:
                del self._deleting[topic]
            self.topics.delete(topic)
            self._offsets.delete_topic(topic, end_offset)
            self._deleted(topic)
            log.info("topic_deleted topic=%s", topic)
        if change.deleted_topics:
            self._changed(None)
        for group, with_offsets in change.deleted_groups.items():
            self.groups.delete(group)
            if with_offsets:
                self._offsets.delete_group(group, end_offset)
            log.info("group_deleted group=%s with_offsets=%s", group, with_offsets)

    def seen_in_log(self, topic: str, queue_id: int) -> None:
        """A slave finds a message of a queue that its table lacks: it creates the queue (R31)."""
        if topic == METADATA_TOPIC:
            return
        config = self.topics.get(topic)
        if config is not None and queue_id < max(config.read_queue_nums, config.write_queue_nums):
            return
        self.topics.create_by_message(topic, queue_id + 1)
        log.info("topic_seen_in_log topic=%s queues=%d", topic, queue_id + 1)
        self._changed((topic,))


def _require_writable(config: TopicConfig) -> None:
    if not config.perm & PERM_WRITE:
        raise BrokerRefusal(
            ResponseCode.NO_PERMISSION,
            f"topic {config.topic_name} may not be written: perm {config.perm}",
        )


def _refuse_above(what: str, there: int, made: int, key: str, most: int) -> None:
    """Raises BrokerRefusal NO_PERMISSION if `made` new ones would be too many; others stay."""
    if made and there + made > most:
        raise BrokerRefusal(
            ResponseCode.NO_PERMISSION,
            f"this broker has {there} {what}, and {key} is {most}: no more are made",
        )


def readable_queue(config: TopicConfig, queue_id: int) -> int:
    """A queue that readers see, for a message that waited for `queue_id`: its topic may have fewer
    queues by now (R56)."""
    reads = config.read_queue_nums
    return queue_id % reads if 0 < reads <= queue_id else queue_id
