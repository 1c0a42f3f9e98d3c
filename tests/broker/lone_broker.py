"""A broker outside controller mode in this process, and a client connection to it."""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import uvloop

from batonmq.broker.config import BrokerConfig, BrokerSections, ReplicasConfig
from batonmq.broker.service import BrokerService
from batonmq.broker.tables.broker_tables import BrokerTables
from batonmq.broker.tables.consumer_offset import ConsumerOffsetManager
from batonmq.broker.tables.delay_offset import DelayOffsetManager
from batonmq.broker.tables.queue_locks import QueueLockManager
from batonmq.broker.tables.subscription_group import (
    MessageRequestModeManager,
    SubscriptionGroupManager,
)
from batonmq.broker.tables.topic_config import TopicConfigManager
from batonmq.broker.tables.users import UserTable
from batonmq.broker.write import log_features
from batonmq.broker.write.write_path import WritePath
from batonmq.ha.config import HAConfig
from batonmq.protocol.message import MessageExt
from batonmq.protocol.message_id import decode_offset_msg_id
from batonmq.protocol.properties import encode_properties
from batonmq.protocol.records.codec import NewMessage, decode_records
from batonmq.remoting.command import RemotingCommand
from batonmq.remoting.endpoint import RemotingClient
from batonmq.store.appender import PutResult
from batonmq.store.config import StoreConfig
from batonmq.store.errors import PutRefused
from tests.shared.ports import free_ports
from tests.shared.waiting import until as until


def free_port() -> int:
    """A port whose port - 2 is free as well."""
    return free_ports(3) + 2


def spoil(folder: Path, text: bytes) -> Path:
    """Changes the first byte of `text` in the first segment of a store; that file."""
    log = folder / "commitlog" / f"{0:020d}"
    with log.open("r+b") as file:
        file.seek(file.read().index(text))
        file.write(text[:1].swapcase())
    return log


@dataclass(slots=True)
class Rig:
    """The broker and how to talk to it."""

    service: BrokerService
    client: RemotingClient
    answer_ms: int = 5000

    async def ask(
        self, code: int, ext: dict[str, str] | None = None, body: bytes = b"", *, vip: bool = False
    ) -> RemotingCommand:
        host, _, port = self.service.address.rpartition(":")
        address = f"{host}:{int(port) - 2}" if vip else self.service.address
        return await self.client.invoke(
            address, RemotingCommand.request(code, ext, body), self.answer_ms
        )

    async def send(
        self, topic: str = "T", body: bytes = b"x", *, queue: int = 0, **properties: str
    ) -> RemotingCommand:
        return await self.ask(310, send_header(topic, queue, properties), body)

    async def commit(self, offset: int, *, group: str = "g", topic: str = "T") -> RemotingCommand:
        """UPDATE_CONSUMER_OFFSET of queue 0."""
        return await self.ask(15, position(group, topic) | {"commitOffset": str(offset)})

    async def committed(self, group: str = "g") -> RemotingCommand:
        """QUERY_CONSUMER_OFFSET of queue 0 of T."""
        return await self.ask(14, position(group))

    async def pull(
        self,
        topic: str = "T",
        *,
        queue: int = 0,
        offset: int = 0,
        suspend_ms: int = 0,
        tags: str = "*",
        count: int = 32,
        group: str = "g",
        commit: int = -1,
    ) -> RemotingCommand:
        fields: dict[str, object] = {"consumerGroup": group, "topic": topic, "queueId": queue}
        fields |= {"maxMsgNums": count, "subscription": tags}
        header = pull_header(offset, suspend_ms=suspend_ms, commit=commit, **fields)
        return await self.ask(11, header)


def position(group: str = "g", topic: str = "T") -> dict[str, str]:
    return {"consumerGroup": group, "topic": topic, "queueId": "0"}


async def make_group(rig: Rig, group: str = "g") -> None:
    """For commits of offsets: as in Java they make no group."""
    assert (await rig.ask(200, body=b'{"groupName":"%b"}' % group.encode())).code == 0


def send_header(topic: str, queue: int, properties: dict[str, str]) -> dict[str, str]:
    return {
        "a": "pg",
        "b": topic,
        "c": "TBW102",
        "d": "4",
        "e": str(queue),
        "f": "0",
        "g": "1700000000000",
        "h": "0",
        "i": encode_properties({"UNIQ_KEY": "KEY1", **properties}),
        "j": "0",
        "m": "false",
    }


def long_send_header(**changed: str) -> dict[str, str]:
    """Of SEND_MESSAGE (10), which names its fields in full."""
    fields = {"producerGroup": "pg", "topic": "T", "defaultTopic": "TBW102"}
    fields |= {"defaultTopicQueueNums": "4", "queueId": "0", "sysFlag": "0", "flag": "0"}
    return fields | {"bornTimestamp": "1700000000000", "properties": ""} | changed


def pull_header(
    offset: int = 0, *, suspend_ms: int = 0, commit: int = -1, **changed: object
) -> dict[str, str]:
    """Of PULL_MESSAGE (11) with its subscription."""
    fields: dict[str, object] = {
        "consumerGroup": "g",
        "topic": "T",
        "queueId": 0,
        "queueOffset": offset,
        "maxMsgNums": 32,
        "sysFlag": 4 | (2 if suspend_ms else 0) | (1 if commit >= 0 else 0),
        "commitOffset": max(commit, 0),
        "suspendTimeoutMillis": suspend_ms,
        "subVersion": 0,
        "subscription": "*",
        "expressionType": "TAG",
    }
    return {name: str(value) for name, value in (fields | changed).items()}


def pop_header(**changed: object) -> dict[str, str]:
    """Of POP_MESSAGE (200050)."""
    fields: dict[str, object] = {"consumerGroup": "g", "topic": "T", "queueId": -1}
    fields |= {"maxMsgNums": 32, "invisibleTime": 60_000, "pollTime": 0, "bornTime": 0}
    fields |= {"initMode": 0, "expType": "TAG", "exp": "*", "order": "false"}
    return {name: str(value) for name, value in (fields | changed).items()}


def topic_header(topic: str = "T", queues: int = 4, **changed: str) -> dict[str, str]:
    """Of UPDATE_AND_CREATE_TOPIC (17)."""
    fields = {"topic": topic, "defaultTopic": "TBW102", "perm": "6", "order": "false"}
    fields |= {"readQueueNums": str(queues), "writeQueueNums": str(queues)}
    return fields | {"topicFilterType": "SINGLE_TAG", "topicSysFlag": "0"} | changed


def end_header(sent: RemotingCommand, outcome: str, **changed: str) -> dict[str, str]:
    """Of END_TRANSACTION (37), for a half message of the producer group `pg`."""
    _, offset = decode_offset_msg_id(sent.ext["msgId"])
    fields = {"producerGroup": "pg", "commitLogOffset": str(offset), "commitOrRollback": outcome}
    fields |= {"tranStateTableOffset": sent.ext["queueOffset"], "fromTransactionCheck": "false"}
    return fields | changed


def crashed(folder: Path, *lost: str) -> None:
    """As after a kill, without the checkpoint and these files of `config/`."""
    for name in lost:
        for path in (folder / "config").glob(f"{name}*"):
            path.unlink()
    (folder / "checkpoint").unlink()
    (folder / "abort").touch()


def sections_of(
    folder: Path,
    *,
    broker: dict[str, object] | None = None,
    ha: dict[str, object] | None = None,
    **store: object,
) -> BrokerSections:
    """Small files, outside controller mode; `broker`, `ha` and
    `store` are fields of their sections."""
    settings: dict[str, object] = {
        "store_path_root_dir": str(folder),
        "mapped_file_size_commit_log": 1 << 20,
        "mapped_file_size_consume_queue": 20_000,
        "max_hash_slot_num": 1000,
        "max_index_num": 4000,
        "ha_listen_port": 0,
        **store,
    }
    return BrokerSections(
        BrokerConfig(
            listen_port=free_port(),
            enable_controller_mode=False,
            **(broker or {}),  # type: ignore[arg-type]
        ),
        StoreConfig(**settings),  # type: ignore[arg-type]
        HAConfig(**(ha or {})),  # type: ignore[arg-type]
        ReplicasConfig(),
    )


def tables_in(folder: Path) -> BrokerTables:
    return BrokerTables(
        TopicConfigManager(folder / "topics.json", BrokerConfig(broker_cluster_name="C")),
        SubscriptionGroupManager(folder / "subscriptionGroup.json"),
        ConsumerOffsetManager(folder / "consumerOffset.json"),
        DelayOffsetManager(folder / "delayOffset.json"),
        QueueLockManager(folder / "queueLocks.json"),
        MessageRequestModeManager(folder / "messageRequestMode.json"),
        UserTable(folder / "users.json"),
    )


@contextlib.asynccontextmanager
async def lone_broker(
    folder: Path,
    *,
    broker: dict[str, object] | None = None,
    ha: dict[str, object] | None = None,
    **store: object,
) -> AsyncIterator[Rig]:
    """Started, and closed at the end."""
    fatal: list[BaseException] = []
    service = BrokerService(sections_of(folder, broker=broker, ha=ha, **store), fatal.append)
    await service.start()
    client = RemotingClient()
    try:
        yield Rig(service, client)
    finally:
        await client.close()
        await service.close()
    assert not fatal, fatal


class Clock:
    """The wall clock of the log features. It runs, and a test moves it ahead or stops it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead_ms = 0
        self.stopped_at_ms: int | None = None
        real = log_features.wall_ms

        def now_ms() -> int:
            return real() + self.ahead_ms if self.stopped_at_ms is None else self.stopped_at_ms

        monkeypatch.setattr(log_features, "wall_ms", now_ms)
        monkeypatch.setattr(log_features, "MAX_PAUSE_MS", 1)


class HeldConfirms:
    """Nothing that the broker writes is confirmed until `release`, as while a slave is slow."""

    def __init__(self, path: WritePath) -> None:
        self._path, self._rule = path, path.rule
        path.rule = self

    def release(self) -> None:
        self._path.rule = self._rule
        self._path.end_turn()

    def written(self, offset: int) -> None: ...

    def flushed(self, offset: int) -> None: ...

    def tick(self) -> None: ...

    def pauses(self, now_ms: int) -> bool:
        return False

    def first_acked(self, waited_ms: int) -> None: ...


@contextlib.contextmanager
def unconfirmed(rig: Rig) -> Iterator[None]:
    """Nothing is confirmed within; what waits is at its end."""
    path = rig.service.path
    confirmed, path.confirmed = path.confirmed, lambda offset: None
    try:
        yield
    finally:
        path.confirmed = confirmed
        path.end_turn()


def refuse(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, *topics: str, once: bytes | None = None
) -> list[NewMessage]:
    """The log takes no records of these topics, as on a full disk, or only, `once`, not the
    first one with that body. Those that it refused."""
    appender = rig.service.store.appender
    real = appender.put_message
    refused: list[NewMessage] = []

    def put_message(message: NewMessage, *, stored: bool = False) -> PutResult:
        unwanted = once is None or (message.body == once and not refused)
        if message.topic in topics and unwanted:
            refused.append(message)
            raise PutRefused("the disk is full")
        return real(message, stored=stored)

    monkeypatch.setattr(appender, "put_message", put_message)
    return refused


async def messages(rig: Rig, topic: str, queue: int = 0) -> list[MessageExt]:
    pulled = await rig.pull(topic, queue=queue)
    return decode_records(pulled.body) if pulled.code == 0 else []


def end_of(rig: Rig, topic: str, queue: int = 0) -> int:
    return rig.service.store.queries.max_offset_in_queue(topic, queue)


def expire_all_but_last(rig: Rig, topic: str) -> None:
    """As if the log began at the last message of the topic's first queue. Run the broker with
    `mapped_file_size_consume_queue=2 * UNIT_SIZE`: only whole files are deleted."""
    queue = rig.service.store._queues.get(topic, 0)
    assert queue is not None
    queue.consume_queue.write_tail()
    last = queue.consume_queue.unit_at(queue.consume_queue.max_offset - 1)
    assert last is not None and queue.consume_queue.delete_expired(last[0]) > 0


def run_with_broker(
    folder: Path,
    test: Callable[[Rig], Awaitable[None]],
    *,
    broker: dict[str, object] | None = None,
    **store: object,
) -> None:
    """Runs one coroutine against a fresh broker."""

    async def play() -> None:
        async with lone_broker(folder, broker=broker, **store) as rig:
            await test(rig)

    uvloop.run(play())
