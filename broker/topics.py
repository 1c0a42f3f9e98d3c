"""Topics and groups of this broker: created, changed, deleted, followed (SAFETY R31).

On a master a change is applied here, put into the log as a metadata record, and answered when that
record is confirmed; on a slave it is applied when the record is dispatched. A deletion destroys, so
a master, too, carries it out only when its record is confirmed, and takes no write for the topic
until then: a record that is never confirmed must not cost the queues. Origin:
TopicConfigManager.createTopicInSendMessageMethod and AdminBrokerProcessor in Java, which tell their
slaves every ten seconds instead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from broker.metadata_log import METADATA_TOPIC, MetadataChange, decode_metadata
from protocol.bodies import PERM_WRITE, SubscriptionGroupConfig, TopicConfig
from protocol.codes import ResponseCode
from protocol.errors import BrokerRefusal, RemoteProtocolError
from store.subscription_group import SubscriptionGroupManager
from store.topic_config import TopicConfigManager

log = logging.getLogger(__name__)


class TopicService:
    """The broker's view of its topics and groups.

    `append` puts a metadata record into the log and returns its end offset; `changed` is called
    after every change of the topic table (routes are registered again), `dropped` for a topic
    whose queues go.
    """

    def __init__(
        self,
        topics: TopicConfigManager,
        groups: SubscriptionGroupManager,
        *,
        auto_create_topic: bool,
        auto_create_group: bool,
        append: Callable[[bytes], int],
        changed: Callable[[], None],
        dropped: Callable[[str], None],
    ) -> None:
        self.topics = topics
        self.groups = groups
        self._auto_create_topic = auto_create_topic
        self._auto_create_group = auto_create_group
        self._append = append
        self._changed = changed
        self._dropped = dropped
        self._deleting: set[str] = set()
        """Topics whose deletion is in this master's log and not confirmed yet."""

    def get(self, topic: str) -> TopicConfig | None:
        return self.topics.get(topic)

    def for_send(self, topic: str, default_topic: str, queue_nums: int) -> TopicConfig:
        """The topic of a send, created from `default_topic` if that is allowed.

        Queues: what the client asks for, at most what the template has. Raises BrokerRefusal 17
        if there is no such topic and none may be made, 16 if it may not be written.
        """
        self._refuse_while_deleting(topic)
        config = self.topics.get(topic)
        if config is None:
            config = self._create_from_template(topic, default_topic, queue_nums)
        if not config.perm & PERM_WRITE:
            raise BrokerRefusal(
                ResponseCode.NO_PERMISSION, f"topic {topic} may not be written: perm {config.perm}"
            )
        return config

    def _create_from_template(self, topic: str, default_topic: str, queue_nums: int) -> TopicConfig:
        derived = self.topics.derived(topic, default_topic, max(1, queue_nums))
        if topic.startswith(("%RETRY%", "%DLQ%")):
            config = TopicConfig(topic_name=topic, read_queue_nums=1, write_queue_nums=1, perm=6)
        elif not self._auto_create_topic or derived is None:
            raise BrokerRefusal(
                ResponseCode.TOPIC_NOT_EXIST,
                f"topic {topic} does not exist and is not created by sending to it"
                f" (autoCreateTopicEnable {str(self._auto_create_topic).lower()},"
                f" template {default_topic or 'none'}): create it with mqctl updateTopic",
            )
        else:
            config = derived
        self.put_topic(config)
        return config

    def put_topic(self, config: TopicConfig) -> int:
        """Creates or changes a topic; the change is safe once the returned offset is confirmed."""
        self._refuse_while_deleting(config.topic_name)
        self.topics.put(config)
        end = self._append(MetadataChange(topics={config.topic_name: config}).encode())
        log.info(
            "topic_changed topic=%s read=%d write=%d perm=%d",
            config.topic_name,
            config.read_queue_nums,
            config.write_queue_nums,
            config.perm,
        )
        self._changed()
        return end

    def delete_topic(self, topic: str) -> int:
        """Removes a topic and its queues once the returned offset is confirmed."""
        end = self._append(MetadataChange(deleted_topics=[topic]).encode())
        self._deleting.add(topic)
        self._changed()  # whoever remembers the topic as writable asks anew
        return end

    def _refuse_while_deleting(self, topic: str) -> None:
        if topic in self._deleting:
            raise BrokerRefusal(
                ResponseCode.SYSTEM_BUSY, f"topic {topic} is being deleted: try again in a moment"
            )

    def put_group(self, config: SubscriptionGroupConfig) -> int:
        """Creates or changes a subscription group; same safety as `put_topic`."""
        self.groups.put(config)
        return self._append(MetadataChange(groups={config.group_name: config}).encode())

    def group(self, name: str, *, writable: bool) -> SubscriptionGroupConfig:
        """The group's configuration, created with defaults on a master that allows it.

        Raises BrokerRefusal 26 if it is unknown and not created.
        """
        config = self.groups.get(name)
        if config is None:
            if not self._auto_create_group:
                raise BrokerRefusal(
                    ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
                    f"subscription group {name} does not exist: create it on the broker",
                )
            config = SubscriptionGroupConfig(group_name=name)
            if writable:
                self.put_group(config)
        return config

    def apply_record(self, body: bytes) -> None:
        """Carries out, on a replica, what a confirmed metadata record says. Twice does no harm."""
        change = _readable(body)
        if change is not None:
            self._put(change)
            self._delete(change)

    def take_over_record(self, body: bytes) -> None:
        """A new master finds this record in its log, not confirmed yet: its creations count from
        now on, its deletions when `own_record_confirmed` is told of it."""
        change = _readable(body)
        if change is not None:
            self._put(change)
            self._deleting.update(change.deleted_topics)
            self._changed()

    def own_record_confirmed(self, body: bytes) -> None:
        """A record of this master's log is on every member of the set."""
        change = _readable(body)
        if change is None:
            return
        self._delete(change)
        for config in change.topics.values():
            if self.topics.get(config.topic_name) is None:  # made anew right behind its deletion
                self._put(change)

    def role_left(self) -> None:
        """What was not confirmed may be cut; the log will show what comes of it."""
        self._deleting.clear()

    def _put(self, change: MetadataChange) -> None:
        for config in change.topics.values():
            if self.topics.get(config.topic_name) != config:
                self.topics.put(config)
        for group in change.groups.values():
            if self.groups.get(group.group_name) != group:
                self.groups.put(group)
        if change.topics:
            self._changed()

    def _delete(self, change: MetadataChange) -> None:
        for topic in change.deleted_topics:
            self._deleting.discard(topic)
            self.topics.delete(topic)
            self._dropped(topic)
            log.info("topic_deleted topic=%s", topic)
        if change.deleted_topics:
            self._changed()

    def seen_in_log(self, topic: str, queue_id: int) -> None:
        """A slave meets a message of a queue that its table lacks: it makes the room (R31)."""
        if topic == METADATA_TOPIC:
            return
        config = self.topics.get(topic)
        if config is not None and queue_id < max(config.read_queue_nums, config.write_queue_nums):
            return
        self.topics.create_by_message(topic, queue_id + 1)
        log.info("topic_seen_in_log topic=%s queues=%d", topic, queue_id + 1)
        self._changed()


def _readable(body: bytes) -> MetadataChange | None:
    """A record of a newer version than this broker reads is named and passed by: the messages
    behind it are worth more than the setting in it."""
    try:
        return decode_metadata(body)
    except RemoteProtocolError as exc:
        log.error("metadata_record_skipped topic=%s reason=%s", METADATA_TOPIC, exc)
        return None
