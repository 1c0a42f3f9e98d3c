"""Administration of topics and groups, expiry, status, repair; `register` has the request codes.

A change is answered when its record is confirmed, so every required member has it (R31).
Origin: AdminBrokerProcessor in Java.
"""

import asyncio
import mmap
from collections.abc import Awaitable, Callable
from typing import Final

from msgspec.structs import replace

from batonmq.broker.config import BrokerConfig
from batonmq.broker.replication.replication import Replication
from batonmq.broker.request_fields import flag, invalid, number, system_error, text
from batonmq.broker.status import BrokerStatus
from batonmq.broker.tables.topics import TopicService
from batonmq.broker.write.write_path import WritePath
from batonmq.protocol.attributes import altered, parse_attributes
from batonmq.protocol.bodies import (
    PERM_INHERIT,
    PERM_READ,
    PERM_WRITE,
    GroupForbidden,
    KVTable,
    SubscriptionGroupConfig,
    SubscriptionGroupList,
    TopicConfig,
    TopicConfigList,
    TopicList,
)
from batonmq.protocol.codes import HA_LINK_FIELD, SLAVE_NAME_FIELD, RequestCode
from batonmq.protocol.topic_name import (
    OUR_TOPICS,
    SYSTEM_GROUPS,
    SYSTEM_TOPICS,
    TOPIC_QUEUES_MAX,
    check_group,
    check_made_topic,
    check_topic,
    is_system_topic,
)
from batonmq.remoting.command import RemotingCommand
from batonmq.remoting.connection import Connection, Processors
from batonmq.runtime.turns import in_turns
from batonmq.store.errors import StoreStateError

PERM_MAX: Final = PERM_READ | PERM_WRITE | PERM_INHERIT
WITHOUT_EFFECT: Final = (
    RequestCode.CHECK_ROCKSDB_CQ_WRITE_PROGRESS,
    RequestCode.EXPORT_ROCKSDB_CONFIG_TO_JSON,
    RequestCode.POP_ROLLBACK,
    RequestCode.UPDATE_COLD_DATA_FLOW_CTR_CONFIG,
    RequestCode.REMOVE_COLD_DATA_FLOW_CTR_CONFIG,
    RequestCode.GET_COLD_DATA_FLOW_CTR_INFO,
)
AT_ONCE: Final = 100
"""The most topics or groups that one record changes."""
CONFIG_SIZE_MAX: Final = 16 << 10
"""Bytes of JSON of one group (R58): its policy of retries and its subscriptions are free text."""
FILTER_TYPE_LENGTH_MAX: Final = 64


class AdminProcessor:
    """Runs on masters, except for reads; the relay passes on changes from other replicas."""

    def __init__(
        self,
        path: WritePath,
        topics: TopicService,
        status: BrokerStatus,
        replication: Replication,
        known: Callable[[], Awaitable[None]],
        settings: BrokerConfig,
    ) -> None:
        """`known` returns when the name servers know all topics."""
        self._settings = settings
        self._path = path
        self._topics = topics
        self._status = status
        self._replication = replication
        self._known = known

    def register(self, processors: Processors) -> None:
        processors.register(RequestCode.UPDATE_AND_CREATE_TOPIC, self.update_topic)
        processors.register(RequestCode.UPDATE_AND_CREATE_TOPIC_LIST, self.update_topics)
        processors.register(RequestCode.DELETE_TOPIC_IN_BROKER, self.delete_topic)
        processors.register(RequestCode.CLEAN_UNUSED_TOPIC, self.clean_unused)
        processors.register(RequestCode.GET_TOPIC_CONFIG, self.topic_config)
        processors.register(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, self.update_group)
        processors.register(
            RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST, self.update_groups
        )
        processors.register(RequestCode.DELETE_SUBSCRIPTIONGROUP, self.delete_group)
        processors.register(RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG, self.group_config)
        processors.register(RequestCode.UPDATE_AND_GET_GROUP_FORBIDDEN, self.group_forbidden)
        processors.register(RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER, self.system_topics)
        processors.register(RequestCode.GET_BROKER_RUNTIME_INFO, self.runtime)
        processors.register(RequestCode.VIEW_BROKER_STATS_DATA, self.stats)
        processors.register(RequestCode.DELETE_EXPIRED_COMMITLOG, self.delete_expired)
        processors.register(RequestCode.CLEAN_EXPIRED_CONSUMEQUEUE, self.delete_expired)
        processors.register(RequestCode.GET_BROKER_HA_STATUS, self.ha)
        processors.register(RequestCode.GET_BROKER_EPOCH_CACHE, self.epochs)
        processors.register(RequestCode.BATON_REPAIR_REPLICA, self.repair_replica)
        processors.register(RequestCode.SET_COMMITLOG_READ_MODE, self.read_mode)
        for code in WITHOUT_EFFECT:
            processors.register(code, _no_such_feature)

    async def update_topic(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        """Creates a topic, or changes the given fields of an existing one (UPDATE_AND_CREATE_TOPIC,
        17). Without `force` it does not reduce the read queues below those that hold messages."""
        self._path.gate.require_open()
        topic = text(request, "topic")
        check_topic(topic)
        self._refuse_system_topic(topic)
        known = self._topics.get(topic)
        base = known or TopicConfig(topic_name=topic)
        changes = parse_attributes(request.ext.get("attributes", ""))
        mixed = self._settings.enable_mixed_message_type
        # A new topic must say how many queues it has; of a known one only what is given changes.
        config = replace(
            base,
            attributes=altered(known.attributes if known else None, changes, mixed=mixed),
            read_queue_nums=_queues(
                request, "readQueueNums", base.read_queue_nums if known else None
            ),
            write_queue_nums=_queues(
                request, "writeQueueNums", base.write_queue_nums if known else None
            ),
            perm=number(request, "perm", base.perm),
            topic_filter_type=request.ext.get("topicFilterType") or base.topic_filter_type,
            topic_sys_flag=number(request, "topicSysFlag", base.topic_sys_flag),
            order=flag(request, "order", base.order),
        )
        self._check_topic(config, is_forced=flag(request, "force"))
        # Put a record even if nothing changes: that of an earlier request may be unconfirmed, or
        # cut (R31).
        await self._path.wait_confirmed(self._topics.put_topic(config), f"topic {topic}")
        await self._known()  # a client may ask a name server for the route at once
        return RemotingCommand.response_to(request)

    async def update_topics(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        """Creates or replaces several topics (UPDATE_AND_CREATE_TOPIC_LIST, 18). If one is invalid,
        none is written. They are written AT_ONCE at a time, so after a change of role the last ones
        may be missing."""
        self._path.gate.require_open()
        mixed = self._settings.enable_mixed_message_type
        configs = []
        for wanted in TopicConfigList.decode_request(request.body).topic_config_list:
            # One per turn of the loop: a body may list thousands of topics (R58).
            await asyncio.sleep(0)
            known = self._topics.get(wanted.topic_name)
            before = known.attributes if known else None
            config = replace(wanted, attributes=altered(before, wanted.attributes, mixed=mixed))
            configs.append(config)
            check_topic(config.topic_name)
            self._refuse_system_topic(config.topic_name)
            of = f"of topic {config.topic_name}"
            _check_queues(f"readQueueNums {of}", config.read_queue_nums)
            _check_queues(f"writeQueueNums {of}", config.write_queue_nums)
            self._check_topic(config, is_forced=False)
        # The role may have changed while the last part was confirmed, so check it again.
        for begin in range(0, len(configs), AT_ONCE):
            self._path.gate.require_open()
            end = self._topics.put_topics(configs[begin : begin + AT_ONCE])
            await self._path.wait_confirmed(end, f"{len(configs)} topics")
        await self._known()
        return RemotingCommand.response_to(request)

    def _check_topic(self, config: TopicConfig, *, is_forced: bool) -> None:
        if not 0 <= config.perm <= PERM_MAX:
            raise invalid(
                f"perm of topic {config.topic_name} is {config.perm}, allowed are 0 (nothing) to"
                f" {PERM_MAX}: the sum of 4 (read), 2 (write) and 1 (others are created from it)"
            )
        if len(config.topic_filter_type) > FILTER_TYPE_LENGTH_MAX:
            raise invalid(f"topicFilterType is {config.topic_filter_type[:64]!r}…, too long")
        known = self._topics.get(config.topic_name)
        wanted = config.read_queue_nums
        if known is None or is_forced or wanted >= known.read_queue_nums:
            return
        last = self._path.store.queries.last_held(config.topic_name, known.read_queue_nums)
        if wanted <= last:
            raise invalid(
                f"topic {config.topic_name}: readQueueNums is {wanted}, but queue {last} holds"
                f" messages, and no consumer could read them. Allowed are {last + 1} and more, or"
                " force=true (mqctl updateTopic --force)"
            )

    def _refuse_system_topic(self, topic: str) -> None:
        """Also those named after cluster and broker: without them replies go nowhere."""
        if is_system_topic(topic) or topic in self._topics.topics.system:
            raise invalid(f"{topic} is a system topic: it cannot be changed")

    async def clean_unused(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        """Deletes the queues of topics that are no longer in the table (CLEAN_UNUSED_TOPIC, 316).
        One record each, so that all members delete them; if another request is deleting one, waits
        for that.
        """
        self._path.gate.require_open()
        store = self._path.store
        for topic in sorted(store.queries.topics()):
            await asyncio.sleep(0)
            if self._topics.get(topic) is not None or is_system_topic(topic):
                continue
            # Only now: each call copies the names of all topics.
            if topic in store.deleting_topics or topic not in store.queries.topics():
                continue
            self._path.gate.require_open()  # the role may have changed in one of the turns
            end = self._topics.delete_topic(topic)
            await self._path.wait_confirmed(end, f"deletion of unused topic {topic}")
        # If there was nothing to delete, no record has shown that this broker is still the master.
        await self._path.still_master("deletion of unused topics")
        return RemotingCommand.response_to(request)

    def topic_config(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        config = self._topics.existing(text(request, "topic"))
        return RemotingCommand.response_to(request, body=config.encode())

    async def delete_topic(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        """Deletes a topic and its queues; its records stay in the log (DELETE_TOPIC_IN_BROKER,
        215)."""
        self._path.gate.require_open()
        topic = text(request, "topic")
        self._refuse_system_topic(topic)
        end = self._topics.delete_topic(topic)
        return await self._path.answer(end, request, f"deletion of topic {topic}")

    async def update_group(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        """Creates or changes a subscription group (UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, 200)."""
        self._path.gate.require_open()
        config = SubscriptionGroupConfig.decode_request(request.body)
        _check_group_config(config)
        end = self._topics.put_group(config)
        return await self._path.answer(end, request, f"group {config.group_name}")

    async def update_groups(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        """The same for several groups (UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST, 225); all or none,
        and in parts, as `update_topics`."""
        self._path.gate.require_open()
        configs = SubscriptionGroupList.decode_request(request.body).group_config_list
        async for config in in_turns(configs):
            _check_group_config(config)
        self._topics.refuse_too_many_groups(configs)
        for begin in range(0, len(configs), AT_ONCE):
            self._path.gate.require_open()
            end = self._topics.put_groups(configs[begin : begin + AT_ONCE])
            await self._path.wait_confirmed(end, f"{len(configs)} groups")
        return RemotingCommand.response_to(request)

    async def delete_group(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        """Deletes a group, with `cleanOffset` also its offsets (DELETE_SUBSCRIPTIONGROUP, 207). The
        next heartbeat of a member that is still connected creates it again."""
        self._path.gate.require_open()
        group = text(request, "groupName")
        if group in SYSTEM_GROUPS:
            raise invalid(f"{group} is a system group: it cannot be changed")
        # A bad name that an earlier version let in must remain deletable (R46).
        if group not in self._topics.groups:
            check_group(group)
        end = self._topics.delete_group(group, with_offsets=flag(request, "cleanOffset"))
        return await self._path.answer(end, request, f"deletion of group {group}")

    async def group_forbidden(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        """Returns whether a group may read a topic; `readable` sets it
        (UPDATE_AND_GET_GROUP_FORBIDDEN, 353)."""
        group, topic = text(request, "group"), text(request, "topic")
        if request.ext.get("readable"):
            self._path.gate.require_open()
            check_group(group)
            check_made_topic(topic)
            end = self._topics.forbid(group, topic, reading=not flag(request, "readable"))
            await self._path.wait_confirmed(end, f"what group {group} may read")
        readable = not self._topics.groups.is_forbidden(group, topic)
        body = GroupForbidden(group=group, readable=readable, topic=topic)
        return RemotingCommand.response_to(request, body=body.encode())

    def group_config(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        """An unknown group has the settings that its first heartbeat would give it, if that may
        create it. Java creates it already here."""
        config = self._topics.group(text(request, "group"), writable=False)
        return RemotingCommand.response_to(request, body=config.encode())

    def system_topics(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        names = {*self._topics.topics.system, *OUR_TOPICS, *SYSTEM_TOPICS}
        return RemotingCommand.response_to(
            request, body=TopicList(topic_list=sorted(names)).encode()
        )

    def runtime(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        """The broker's status as key-value texts, for clusterList and brokerStatus
        (GET_BROKER_RUNTIME_INFO, 28)."""
        return RemotingCommand.response_to(
            request, body=KVTable(table=self._status.table()).encode()
        )

    def stats(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        """The counter `statsName` of `statsKey`, by minute, hour and day (VIEW_BROKER_STATS_DATA,
        315)."""
        name, key = text(request, "statsName"), text(request, "statsKey")
        stats = self._path.stats
        shown = stats.shown(name, key)
        if shown is None:
            raise system_error(
                f"The stats <{name}> <{key}> not exist: counted are {', '.join(stats.names)},"
                " of what came or went since this broker began, within a day"
            )
        return RemotingCommand.response_to(request, body=shown.encode())

    def delete_expired(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        """Deletes expired segments now instead of at `deleteWhen` (CLEAN_EXPIRED_CONSUMEQUEUE, 306;
        DELETE_EXPIRED_COMMITLOG, 329)."""
        self._path.store.expirer.clean_expired(manual=True)
        return RemotingCommand.response_to(request)

    def read_mode(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        """Whether the kernel reads ahead in the segments that there are
        (SET_COMMITLOG_READ_MODE, 2004); as in Java, not in those to come."""
        mode = number(request, "READ_AHEAD_MODE")
        if mode not in (mmap.MADV_NORMAL, mmap.MADV_RANDOM):
            raise invalid(f"READ_AHEAD_MODE is {mode}, allowed are 0 (read ahead) and 1 (do not)")
        for segment in self._path.store.log.segments:
            segment.read_ahead(enabled=mode == mmap.MADV_NORMAL)
        remark = f"set commitlog readahead mode success, mode: {mode}"
        return RemotingCommand.response_to(request, remark=remark)

    def ha(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        """HA status (GET_BROKER_HA_STATUS, 907). A slave in classic mode also names itself in this
        request."""
        if link := request.ext.get(HA_LINK_FIELD):
            self._replication.note_slave(link, request.ext.get(SLAVE_NAME_FIELD) or "")
        body = self._replication.service.runtime_info().encode()
        return RemotingCommand.response_to(request, body=body)

    def epochs(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        """The epoch list and the identity of this process (GET_BROKER_EPOCH_CACHE, 1007); refused
        in classic mode."""
        answer = self._replication.epoch_cache()
        if answer is None:
            raise system_error("this broker does not run in controller mode")
        cache, process = answer
        return RemotingCommand.response_to(request, ext=process, body=cache.encode())

    def repair_replica(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        """Marks a suspect log as trusted, at an operator's request (BATON_REPAIR_REPLICA, 60001;
        R17). The field `suspect` must repeat the reason from `brokerStatus`. The remark says what
        was done."""
        try:
            done = self._path.store.repair(text(request, "suspect"))
        except StoreStateError as error:
            raise invalid(str(error)) from error
        response = RemotingCommand.response_to(request)
        response.remark = done
        return response


def _no_such_feature(request: RemotingCommand, _: Connection) -> RemotingCommand:
    """Answers what `mqadmin` asks about RocksDB (354, 355, 200056) and about limits of cold reads
    (2001 to 2003): this broker has neither. Limits are taken without effect, as by a Java broker
    with its default settings."""
    is_check = request.code == RequestCode.CHECK_ROCKSDB_CQ_WRITE_PROGRESS
    body = b'{"checkResult":"there is no RocksDB here","checkStatus":3}' if is_check else b""
    return RemotingCommand.response_to(request, body=body)


def _queues(request: RemotingCommand, key: str, default: int | None) -> int:
    value = number(request, key, default)
    _check_queues(key, value)
    return value


def _check_queues(what: str, queues: int) -> None:
    if not 1 <= queues <= TOPIC_QUEUES_MAX:
        raise invalid(f"{what} is {queues}, allowed are 1 to {TOPIC_QUEUES_MAX}")


def _check_group_config(config: SubscriptionGroupConfig) -> None:
    check_group(config.group_name)
    if config.retry_queue_nums > TOPIC_QUEUES_MAX:
        what = f"retryQueueNums of group {config.group_name} is {config.retry_queue_nums}"
        raise invalid(f"{what}, allowed are at most {TOPIC_QUEUES_MAX}")
    if (size := len(config.encode())) > CONFIG_SIZE_MAX:
        what = f"the settings of group {config.group_name} have {size} bytes"
        raise invalid(f"{what}, allowed are {CONFIG_SIZE_MAX}")
    if config.attributes:
        raise invalid(
            f"group {config.group_name}: it has attributes; as in RocketMQ 5.3.3 there are none"
        )
