"""What slaves fetch: topics (21), consumer offsets (43), delay offsets (45), groups (201).

Whole tables in one answer: totals are given so that a paging Java slave is content with the first
page. Our own slaves read versions from extFields and ask for tables only when they differ.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from broker.slave_sync import (
    EXT_MASTER_EPOCH,
    EXT_OFFSET_VERSION,
    EXT_TABLE_VERSION,
    table_version,
)
from protocol.bodies import SubscriptionGroupWrapper, TopicConfigAndMappingSerializeWrapper
from protocol.codes import RequestCode
from remoting.command import RemotingCommand
from remoting.connection import Connection
from remoting.server import Processors
from store.consumer_offset import ConsumerOffsetManager
from store.subscription_group import SubscriptionGroupManager
from store.topic_config import TopicConfigManager


class SlaveSourceProcessor:
    """Tables as they are now, stamped with the masterEpoch of the answering broker, which is
    NO_MASTER_EPOCH while it is no master."""

    def __init__(
        self,
        topics: TopicConfigManager,
        groups: SubscriptionGroupManager,
        offsets: ConsumerOffsetManager,
        master_epoch: Callable[[], int],
    ) -> None:
        self._topics = topics
        self._groups = groups
        self._offsets = offsets
        self._master_epoch = master_epoch

    def register(self, processors: Processors) -> None:
        processors.register(RequestCode.GET_ALL_TOPIC_CONFIG, self.all_topics)
        processors.register(RequestCode.GET_ALL_CONSUMER_OFFSET, self.all_consumer_offsets)
        processors.register(RequestCode.GET_ALL_DELAY_OFFSET, self.all_delay_offsets)
        processors.register(RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, self.all_groups)

    def all_topics(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        """21."""
        wrapper = TopicConfigAndMappingSerializeWrapper(
            data_version=self._topics.data_version, topic_config_table=dict(self._topics.table)
        )
        return RemotingCommand.response_to(
            request,
            ext={"totalTopicNum": str(len(wrapper.topic_config_table))},
            body=wrapper.encode(),
        )

    def all_groups(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        """201."""
        wrapper: SubscriptionGroupWrapper = self._groups.wrapper()
        return RemotingCommand.response_to(
            request,
            ext={"totalGroupNum": str(len(wrapper.subscription_group_table))},
            body=wrapper.encode(),
        )

    def all_consumer_offsets(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        """43. Without a body if the asker already has this version."""
        version = f"{self._master_epoch()}.{self._offsets.change_count}"
        ext = {
            EXT_MASTER_EPOCH: str(self._master_epoch()),
            EXT_OFFSET_VERSION: version,
            EXT_TABLE_VERSION: table_version(self._topics, self._groups),
        }
        known = request.ext.get(EXT_OFFSET_VERSION) == version
        body = b"" if known else self._offsets.encode_json()
        return RemotingCommand.response_to(request, ext=ext, body=body)

    def all_delay_offsets(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        """45. No delay level has any progress in a broker that takes no delayed messages."""
        body = msgspec.json.encode(
            {"dataVersion": {"counter": 0, "stateVersion": 0, "timestamp": 0}, "offsetTable": {}}
        )
        return RemotingCommand.response_to(request, body=body)
