"""Administration of consumer groups: progress, offsets, and requests to members.

Members are called over the connections that they have opened. Walks over many queues yield to the
loop. Origin: AdminBrokerProcessor and Broker2Client in Java.
"""

import asyncio
from collections.abc import AsyncIterator
from itertools import islice
from typing import Final, cast

import msgspec

from batonmq.auth.signature import SIGNED_FIELDS
from batonmq.broker.config import BrokerConfig
from batonmq.broker.consume.consumer_manager import ClientChannel, ConsumerManager
from batonmq.broker.consume.pull_processor import PullProcessor
from batonmq.broker.request_fields import flag, invalid, number, stored_at, system_error, text
from batonmq.broker.tables.consumer_offset import SEPARATOR, ConsumerOffsetManager
from batonmq.broker.tables.slave_sync import reply_in_turns
from batonmq.broker.tables.topics import TopicService
from batonmq.broker.write.write_path import WritePath
from batonmq.protocol.bodies import (
    ConsumeStats,
    ConsumeStatsList,
    GetConsumerStatusBody,
    GroupList,
    OffsetWrapper,
    QueryConsumeTimeSpanBody,
    QueueTimeSpan,
    ResetOffsetBody,
    TopicConfig,
    TopicList,
    TopicOffset,
    TopicStatsTable,
)
from batonmq.protocol.codes import RequestCode, ResponseCode
from batonmq.protocol.errors import BatonError, BrokerRefusal, ConnectError, RequestTimeoutError
from batonmq.protocol.json_body import encode_json, encode_queue_map
from batonmq.protocol.message import MessageQueue
from batonmq.protocol.topic_name import group_problem
from batonmq.remoting.command import FRAME_SIZE_MAX, RemotingCommand
from batonmq.remoting.connection import Connection, Processors
from batonmq.runtime.clock import wall_ms
from batonmq.runtime.turns import Pace, in_turns

STATUS_MS: Final = 5_000
ASKED_AT_ONCE: Final = 64
MEMBER_MS: Final = 10_000
"""How long a member may take for a request that its listener answers, as in Java."""
DIRECTLY_MAX: Final = 32
"""Messages that members consume again: each is kept until the member has answered (R58)."""
TO_THE_END: Final = -1
RESET_AT_ONCE: Final = 128
"""Queues in one record of a reset."""


class GroupAdminProcessor:
    """Reads work on every replica; the relay passes changes of offsets to the master."""

    def __init__(
        self,
        path: WritePath,
        topics: TopicService,
        clients: ConsumerManager,
        offsets: ConsumerOffsetManager,
        pull: PullProcessor,
        config: BrokerConfig,
    ) -> None:
        self._path = path
        self._store = path.store
        self._topics = topics
        self._clients = clients
        self._offsets = offsets
        self._pull = pull
        self._broker_name = config.broker_name
        self._address = config.address
        self._config = config
        self._directly = asyncio.Semaphore(DIRECTLY_MAX)

    def register(self, processors: Processors) -> None:
        for code, handler in (
            (RequestCode.GET_TOPIC_STATS_INFO, self.topic_stats),
            (RequestCode.GET_CONSUME_STATS, self.consume_stats),
            (RequestCode.QUERY_CONSUME_TIME_SPAN, self.time_span),
            (RequestCode.CLONE_GROUP_OFFSET, self.clone_offsets),
            (RequestCode.GET_BROKER_CONSUME_STATS, self.all_consume_stats),
            (RequestCode.QUERY_TOPIC_CONSUME_BY_WHO, self.groups_of_topic),
            (RequestCode.QUERY_TOPICS_BY_CONSUMER, self.topics_of_group),
            (RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, self.reset_offset),
        ):
            processors.register(code, handler, large=True)
        status = RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS
        processors.register(status, self.consumer_status)
        processors.register(RequestCode.GET_CONSUMER_RUNNING_INFO, self.running_info)
        processors.register(RequestCode.CONSUME_MESSAGE_DIRECTLY, self.consume_directly)

    # Positions.

    async def topic_stats(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        """The range of each queue, and the store time of its last message (GET_TOPIC_STATS_INFO,
        202)."""
        topic, config = self._topic(request)
        table = TopicStatsTable(topic_put_tps=self._path.stats.put_tps(topic))
        queues = max(config.read_queue_nums, config.write_queue_nums)
        async for queue_id in in_turns(range(queues)):
            end = self._store.queries.max_offset_in_queue(topic, queue_id)
            table.offset_table[self._queue(topic, queue_id)] = TopicOffset(
                last_update_timestamp=self._stored_at(topic, queue_id, end - 1),
                max_offset=max(0, end),
                min_offset=max(0, self._store.queries.min_offset_in_queue(topic, queue_id)),
            )
        return await reply_in_turns(request, table)

    async def consume_stats(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        """The progress of a group (GET_CONSUME_STATS, 208) in the topics of `topicList`. Without
        that: in `topic`, or in all where it has an offset; of these only the subscribed ones, if it
        is connected here."""
        group, topic = text(request, "consumerGroup"), request.ext.get("topic")
        topics = [name for name in request.ext.get("topicList", "").split(";") if name]
        if not topics:
            topics = [topic] if topic else await self._topics_of(group)
            topics = [one for one in topics if self._may_consume(group, one)]
        stats, pace = ConsumeStats(), Pace()
        for topic in topics:
            if progress := await self._progress_in(group, topic, pace):
                stats.offset_table.update(progress)
                stats.consume_tps += self._path.stats.got_tps(topic, group)
        return await reply_in_turns(request, stats)

    async def all_consume_stats(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        """The progress of all groups in all topics (GET_BROKER_CONSUME_STATS, 317); with `isOrder`
        only in ordered topics."""
        only_ordered = flag(request, "isOrder")
        topics: dict[str, list[str]] = {}
        pace = Pace()
        async for topic, group in self._committed():
            topics.setdefault(group, []).append(topic)
        body = ConsumeStatsList(broker_addr=self._address)
        for group in sorted(topics):
            of_group = []
            for topic in sorted(topics[group]):
                config = self._topics.get(topic)
                if only_ordered and not (config is not None and config.order):
                    continue
                table = await self._progress_in(group, topic, pace)
                if table and self._may_consume(group, topic):
                    tps = self._path.stats.got_tps(topic, group)
                    stats = ConsumeStats(consume_tps=tps, offset_table=table)
                    text = (await reply_in_turns(request, stats)).body
                    of_group.append(msgspec.Raw(text))
                    behind = [q.broker_offset - q.consumer_offset for q in table.values()]
                    body.total_diff += sum(behind)
            body.consume_stats_list.append({group: of_group})
        return RemotingCommand.response_to(request, body=body.encode())

    async def _progress_in(
        self, group: str, topic: str, pace: Pace
    ) -> dict[MessageQueue, OffsetWrapper]:
        """The progress of a group in a topic; empty if the topic does not exist."""
        config = self._topics.get(topic)
        await pace.step()
        if config is None:
            return {}
        return {
            self._queue(topic, queue_id): self._progress(group, topic, queue_id)
            async for queue_id in pace.through(range(config.read_queue_nums))
        }

    def _may_consume(self, group: str, topic: str) -> bool:
        """False if the group is connected here without a subscription of the topic."""
        known = self._clients.groups.get(group)
        return known is None or not known.subscriptions or topic in known.subscriptions

    def _progress(self, group: str, topic: str, queue_id: int) -> OffsetWrapper:
        consumed = max(0, self._offsets.query(group, topic, queue_id))
        end = max(0, self._store.queries.max_offset_in_queue(topic, queue_id))
        pulled = self._pull.pulled.get((group, topic, queue_id), 0)
        return OffsetWrapper(
            broker_offset=end,
            consumer_offset=consumed,
            last_timestamp=self._stored_at(topic, queue_id, consumed - 1),
            pull_offset=max(consumed, min(pulled, end)),
        )

    async def time_span(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        """For each writable queue (QUERY_CONSUME_TIME_SPAN, 303): store times of the first, the
        last and the last consumed message (-1: none), and how long the next one has waited."""
        topic, config = self._topic(request)
        group = text(request, "group")
        body = QueryConsumeTimeSpanBody()
        async for queue_id in in_turns(range(config.write_queue_nums)):
            body.consume_time_span_set.append(self._time_span(group, topic, queue_id))
        return await reply_in_turns(request, body)

    def _time_span(self, group: str, topic: str, queue_id: int) -> QueueTimeSpan:
        queries = self._store.queries
        begin = queries.min_offset_in_queue(topic, queue_id)
        end = queries.max_offset_in_queue(topic, queue_id)
        consumed = max(begin, self._offsets.query(group, topic, queue_id))
        first, before, following, last = (
            queries.message_store_timestamp(topic, queue_id, offset)
            for offset in (begin, max(begin, consumed - 1), consumed, end - 1)
        )
        return QueueTimeSpan(
            consume_time_stamp=before,
            delay_time=max(0, wall_ms() - following) if consumed < end else 0,
            max_time_stamp=last,
            message_queue=self._queue(topic, queue_id),
            min_time_stamp=first,
        )

    async def groups_of_topic(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        """The groups that subscribe to a topic now, or have an offset in it
        (QUERY_TOPIC_CONSUME_BY_WHO, 300)."""
        topic = text(request, "topic")
        groups = {group async for one, group in self._committed() if one == topic}
        async for name, known in in_turns(list(self._clients.groups.items())):
            if topic in known.subscriptions:
                groups.add(name)
        return RemotingCommand.response_to(
            request, body=GroupList(group_list=sorted(groups)).encode()
        )

    async def topics_of_group(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        """The topics in which a group has an offset (QUERY_TOPICS_BY_CONSUMER, 343)."""
        topics = await self._topics_of(text(request, "group"))
        body = TopicList(broker_addr=self._address, topic_list=topics)
        return RemotingCommand.response_to(request, body=body.encode())

    async def _topics_of(self, group: str) -> list[str]:
        return sorted([topic async for topic, one in self._committed() if one == group])

    async def _committed(self) -> AsyncIterator[tuple[str, str]]:
        """(Topic, group) of each progress."""
        # A copy: groups commit between the turns.
        async for key in in_turns(list(self._offsets.table)):
            parts = key.split(SEPARATOR)
            # Broadcast consumers store `topic@group@...`: this is not the progress of the group.
            if len(parts) == 2:
                yield parts[0], parts[1]

    def _stored_at(self, topic: str, queue_id: int, offset: int) -> int:
        return max(0, self._store.queries.message_store_timestamp(topic, queue_id, offset))

    # Changes of offsets.

    async def reset_offset(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        """Resets a group to a time (-1: to the end), or one queue to an offset
        (INVOKE_BROKER_TO_RESET_OFFSET, 222). The reply's body has the new offsets. With
        useServerSideResetOffset the broker moves the next pulls, and replies once the reset is
        confirmed (R56). Otherwise members must be connected, and get RESET_CONSUMER_CLIENT_OFFSET
        (220)."""
        self._path.gate.require_open()
        topic, config = self._topic(request)
        group = text(request, "group")
        if self._topics.groups.get(group) is None:
            raise BrokerRefusal(
                ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, f"Group {group} does not exist"
            )
        when = number(request, "timestamp")
        queue_id = number(request, "queueId", -1)
        if queue_id >= config.read_queue_nums:
            raise invalid(
                f"queueId {queue_id} of topic {topic}: it has {config.read_queue_nums} queues"
            )
        offset = number(request, "offset", -1)
        if queue_id >= 0 and offset != -1:
            self._check_in_queue(topic, queue_id, offset)
            wanted = {queue_id: offset}
        else:
            queues = range(config.read_queue_nums) if queue_id < 0 else (queue_id,)
            wanted = {}
            async for each in in_turns(queues):
                wanted[each] = self._offset_at(topic, each, when)
        if self._config.use_server_side_reset_offset:
            # In parts: one record for a topic of thousands of queues would fill a turn on each
            # member (R58).
            what, left = f"reset of group {group} in {topic}", iter(wanted.items())
            # The role may change at each await, so it is checked for every record.
            while some := dict(islice(left, RESET_AT_ONCE)):
                self._path.gate.require_open()
                self._require_place(group, topic, next(iter(some)))
                end = self._topics.reset_offsets(group, topic, some)
                await self._path.wait_confirmed(end, what)
            async for each in in_turns(wanted):  # the record of POP comes behind it in the log
                self._pull.on_reset(group, topic, each)
            # POP has just put records for this reset: wait for them, too.
            await self._path.still_master(what)
        else:
            self._path.gate.require_open()
            is_forced = flag(request, "isForce", default=True)
            wanted = await self._send_to_members(group, topic, wanted, when, is_forced=is_forced)
        return await reply_in_turns(request, await _reset_body(topic, self._broker_name, wanted))

    async def clone_offsets(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        """Copies the offsets of `srcGroup` to `destGroup` (CLONE_GROUP_OFFSET, 314), in `topic` or
        in all; if `srcGroup` is connected, without `offline` only in its subscribed topics. Java
        copies nothing if no topic is named."""
        source, target = text(request, "srcGroup"), text(request, "destGroup")
        if problem := group_problem(target):
            raise invalid(f"destGroup: {problem}")
        named = request.ext.get("topic")
        topics = [named] if named else await self._topics_of(source)
        if not flag(request, "offline"):
            topics = [topic for topic in topics if self._may_consume(source, topic)]
        pace = Pace()
        for topic in topics:
            async for queue_id in pace.through(self._offsets.offsets_of(source, topic)):
                self._path.gate.require_open()
                offset = self._offsets.query(source, topic, queue_id)
                # The topic may have been deleted in an earlier turn: do not bring its offsets back
                # (R39).
                if self._topics.get(topic) is not None and offset >= 0:
                    self._require_place(target, topic, queue_id)
                    self._offsets.commit(target, topic, queue_id, offset)
            await pace.step()
        return RemotingCommand.response_to(request)

    def _require_place(self, group: str, topic: str, queue_id: int) -> None:
        if (refusal := self._offsets.no_place(group, topic, queue_id)) is not None:
            raise refusal

    def _offset_at(self, topic: str, queue_id: int, when: int) -> int:
        if when <= TO_THE_END:
            return self._store.queries.max_offset_in_queue(topic, queue_id)
        return self._store.queries.offset_in_queue_by_time(topic, queue_id, when)

    def _check_in_queue(self, topic: str, queue_id: int, offset: int) -> None:
        begin = self._store.queries.min_offset_in_queue(topic, queue_id)
        end = self._store.queries.max_offset_in_queue(topic, queue_id)
        if not begin <= offset <= end:
            raise system_error(f"Target offset {offset} not in consume queue range [{begin}-{end}]")

    async def _send_to_members(
        self, group: str, topic: str, wanted: dict[int, int], when: int, *, is_forced: bool
    ) -> dict[int, int]:
        """Sends the offsets to the members (RESET_CONSUMER_CLIENT_OFFSET, 220); without force only
        offsets that move them back."""
        targets = {}
        async for queue_id, offset in in_turns(wanted.items()):
            consumed = self._offsets.query(group, topic, queue_id)
            if consumed < 0:
                raise system_error(
                    f"The consumer group <{group}> not exist: it has no offset of queue {queue_id}"
                )
            targets[queue_id] = offset if is_forced else min(offset, consumed)
        members = self._members(group)
        if not members:
            raise BrokerRefusal(
                ResponseCode.CONSUMER_NOT_ONLINE,
                f"Consumer not online, so can not reset offset, Group: {group} Topic: {topic}"
                f" Timestamp: {when}",
            )
        body = (await _reset_body(topic, self._broker_name, targets)).encode()
        ext: dict[str, str | int | bool | None] = {
            "topic": topic,
            "group": group,
            "timestamp": when,
            "isForce": is_forced,
        }
        async for member in in_turns(members):
            channel = cast(Connection, member.channel)
            if not channel.closed:
                channel.oneway(
                    RemotingCommand.request(RequestCode.RESET_CONSUMER_CLIENT_OFFSET, ext, body)
                )
        return targets

    # Requests to members.

    async def consumer_status(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        """Asks the members, or the one named in `clientAddr`, for their offsets
        (INVOKE_BROKER_TO_GET_CONSUMER_STATUS, 223; sent on as 221)."""
        topic, group = text(request, "topic"), text(request, "group")
        wanted = request.ext.get("clientAddr", "")
        members = [
            each async for each in in_turns(self._members(group)) if wanted in ("", each.client_id)
        ]
        if not members:
            raise system_error(f"No Any Consumer online in the consumer group: [{group}]")
        asked = {"topic": topic, "group": group}
        parts, left = list[bytes](), FRAME_SIZE_MAX
        # A few at a time: a group may have thousands of members (R58).
        for begin in range(0, len(members), ASKED_AT_ONCE):
            some = members[begin : begin + ASKED_AT_ONCE]
            asks = (
                self._ask(member, RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT, asked)
                for member in some
            )
            answers = await asyncio.gather(*asks, return_exceptions=True)
            for member, answer in zip(some, answers, strict=True):
                if (table := await _status_in(answer)) is not None:
                    parts.append(encode_json(member.client_id) + b":" + table)
                    left -= len(parts[-1])
            if left < 0:
                break  # R58: too large for an answer: the caller gets an error
        body = b'{"consumerTable":{%b},"messageQueueTable":{}}' % b",".join(parts)
        return RemotingCommand.response_to(request, body=body)

    async def running_info(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        """What a member reports of itself (GET_CONSUMER_RUNNING_INFO, 307)."""
        return await self._passed_on(request, request.ext, b"")

    async def consume_directly(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        """Makes a member consume one message again, named by its offsetMsgId
        (CONSUME_MESSAGE_DIRECTLY, 309)."""
        message_id = text(request, "msgId")
        async with self._directly:
            return await self._consumed_directly(request, message_id)

    async def _consumed_directly(
        self, request: RemotingCommand, message_id: str
    ) -> RemotingCommand:
        record = self._store.queries.look_message_by_offset(stored_at(message_id))
        if record is None:
            raise system_error(f"no message {message_id} is stored here")
        group = self._topics.groups.get(text(request, "consumerGroup"))
        config = self._topics.get(request.ext.get("topic", ""))
        more = {
            "brokerName": self._broker_name,
            "topicSysFlag": str(config.topic_sys_flag if config is not None else 0),
            "groupSysFlag": str(group.group_sys_flag if group is not None else 0),
        }
        return await self._passed_on(request, request.ext | more, bytes(record))

    async def _passed_on(
        self, request: RemotingCommand, ext: dict[str, str], body: bytes
    ) -> RemotingCommand:
        group, client_id = text(request, "consumerGroup"), text(request, "clientId")
        found = [each for each in self._members(group) if each.client_id == client_id]
        if not found:
            raise system_error(f"The Consumer <{group}> <{client_id}> not online")
        # Without the admin's signature: the consumer must not be able to replay it.
        ext = {name: value for name, value in ext.items() if name not in SIGNED_FIELDS}
        try:
            answer = await self._ask(found[0], request.code, ext, body)
        except RequestTimeoutError as error:
            raise BrokerRefusal(
                ResponseCode.CONSUME_MSG_TIMEOUT, f"consumer <{group}> <{client_id}> Timeout"
            ) from error
        except ConnectError as error:
            raise system_error(str(error)) from error
        return RemotingCommand.response_to(
            request, answer.code, answer.remark, answer.ext, answer.body
        )

    async def _ask(
        self, member: ClientChannel, code: int, ext: dict[str, str], body: bytes = b""
    ) -> RemotingCommand:
        asks_listener = code != RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT
        return await cast(Connection, member.channel).invoke(
            RemotingCommand.request(code, ext, body), MEMBER_MS if asks_listener else STATUS_MS
        )

    def _members(self, group: str) -> list[ClientChannel]:
        known = self._clients.groups.get(group)
        members = known.members.values() if known is not None else ()
        return [each for each in members if not cast(Connection, each.channel).closed]

    def _topic(self, request: RemotingCommand) -> tuple[str, TopicConfig]:
        topic = text(request, "topic")
        return topic, self._topics.existing(topic)

    def _queue(self, topic: str, queue_id: int) -> MessageQueue:
        return MessageQueue(topic, self._broker_name, queue_id)


async def _status_in(answer: RemotingCommand | BaseException) -> bytes | None:
    """The offsets in a member's answer; None if it left, does not answer, or answers something
    else."""
    try:
        if isinstance(answer, BaseException):
            raise answer
        # In a thread: a member may answer with megabytes of fastjson's dialect (R58).
        status = await asyncio.to_thread(GetConsumerStatusBody.decode, answer.body)
    except BatonError:
        return None
    if answer.code != ResponseCode.SUCCESS:
        return None
    return encode_queue_map(status.message_queue_table)


async def _reset_body(topic: str, broker_name: str, offsets: dict[int, int]) -> ResetOffsetBody:
    """`offsets`: queue id -> where the group continues."""
    table = {
        MessageQueue(topic, broker_name, queue_id): offset
        async for queue_id, offset in in_turns(list(offsets.items()))
    }
    return ResetOffsetBody(offset_table=table)
