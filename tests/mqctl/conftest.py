"""`mqctl` in this process, against a scripted `Admin`, with an environment of its own."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self
from unittest.mock import Mock

import pytest
from click.testing import CliRunner

import batonmq.client.admin.admin
import batonmq.client.consumer.pull_consumer
import batonmq.client.producer.producer
import batonmq.mqctl.commands.election
import batonmq.mqctl.context
import batonmq.mqctl.verdict.ask
from batonmq.client.admin.types import (
    ChangedTopic,
    ControllerMetadata,
    ElectedMaster,
    GroupProgress,
    QueueProgress,
    QueueStats,
    TopicChanges,
    Traffic,
)
from batonmq.client.consumer.pulling import PullResult, PullStatus
from batonmq.client.errors import NoMasterError
from batonmq.client.instance.connections import ClientOptions
from batonmq.client.producer.sending import SendResult, SendStatus
from batonmq.history.event import HistoryEvent, lenient_event
from batonmq.mqctl.main import cli
from batonmq.protocol import bodies
from batonmq.protocol.errors import BatonError, ConnectError, ResponseError
from batonmq.protocol.message import MessageExt, MessageQueue
from batonmq.protocol.message_id import decode_offset_msg_id
from lab.cluster.mqctl import Ran

NS = "10.0.0.1:9876"
CONTROLLERS = LEADER, OTHER = ("10.0.0.1:9878", "10.0.0.2:9878")
MASTER, SLAVE = "10.0.0.1:10911", "10.0.0.2:10911"
DEAD_PID = 2**22 + 1  # above any pid
Run = Callable[..., Any]
"""The fixture `mqctl`."""
OFFSET_ID = "0A00000100002A9F0000000000000064"
UNIQUE_ID = "0A000001FFFF12345678000000010000"


def stored_message(**changes: Any) -> MessageExt:
    fields: dict[str, Any] = {
        "topic": "T",
        "queue_id": 1,
        "queue_offset": 7,
        "physical_offset": 100,
        "store_size": 200,
        "msg_id": OFFSET_ID,
        "body": b"hello",
        "body_crc": 1,
        "flag": 0,
        "sys_flag": 0,
        "born_timestamp": 1_700_000_000_000,
        "born_host": "10.0.0.9:5",
        "store_timestamp": 1_700_000_000_001,
        "store_host": MASTER,
        "reconsume_times": 0,
        "prepared_transaction_offset": 0,
        "properties": {"KEYS": "k1 k2", "TAGS": "tag", "UNIQ_KEY": UNIQUE_ID},
        "broker_name": "broker-a",
    }
    return MessageExt(**{**fields, **changes})


class FakeController:
    """What the controllers of the fake cluster answer; tests change its attributes."""

    def __init__(self, fake: FakeCluster, addresses: tuple[str, ...]) -> None:
        self.addresses = addresses
        self._fake = fake

    async def all_metadata(self) -> dict[str, Any]:
        return {a: self._fake.metadata.get(a, ConnectError(a, "refused")) for a in self.addresses}

    async def sync_state_data(
        self, names: list[str], *, every: bool = False
    ) -> bodies.BrokerReplicasInfo:
        if self._fake.roles_error is not None:
            raise self._fake.roles_error
        table = self._fake.replicas.replicas_info_table
        wanted = table if every else names
        return bodies.BrokerReplicasInfo(
            replicas_info_table={n: table[n] for n in wanted if n in table}
        )

    async def config(self, address: str) -> dict[str, str]:
        return {"controllerStorePath": address, **self._fake.settings.get(address, {})}

    async def update_config(self, settings: dict[str, str], address: str) -> tuple[str, ...]:
        if "configStorePath" in settings:
            raise ResponseError(16, "not that one", address)
        self._fake.calls.append(("update_config", settings, address))
        if "unknown" not in settings:
            self._fake.settings.setdefault(address, {}).update(settings)
        return (address,)

    async def elect_master(
        self,
        cluster: str,
        name: str,
        broker_id: int | None,
        *,
        unclean: bool = False,
        cut_later_acks: bool = False,
    ) -> ElectedMaster:
        how = ("unclean",) * unclean + ("cut later acks",) * cut_later_acks
        self._fake.calls.append(("elect_master", cluster, name, broker_id, *how))
        if unclean and self._fake.out_of_sight and not cut_later_acks:
            raise ResponseError(2012, self._fake.out_of_sight, self.addresses[0])
        if name != "broker-a":
            raise ResponseError(2010, "unknown set", self.addresses[0])
        return ElectedMaster(name, 1, MASTER, 3, 5, (1,), already_master=broker_id is None)

    async def clean_broker_data(
        self, cluster: str, name: str, ids: tuple[int, ...], *, clean_living_broker: bool
    ) -> None:
        self._fake.calls.append(("clean", cluster, name, ids, clean_living_broker))
        if 1 in ids and not clean_living_broker:
            raise ResponseError(2009, "broker 1 lives", self.addresses[0])

    async def history(
        self, broker_name: str = "", *, address: str | None = None, limit: int = 0
    ) -> tuple[HistoryEvent, ...]:
        if address in self._fake.dead:
            raise ConnectError(address, "refused")
        events = [
            {"kind": "elected", "broker_name": "broker-a", "master_epoch": 3, "broker_id": 1,
             "address": MASTER, "master_before": 2, "detected_ms": 1000, "time_ms": 1002,
             "reason": "session_closed", "set_before": [1, 2], "sync_state_set": [1]},
            {"kind": "opened", "broker_name": "broker-a", "master_epoch": 3, "time_ms": 1020,
             "json": json.dumps(self._fake.opened)},
            {"kind": "first_ack", "broker_name": "broker-a", "master_epoch": 3, "time_ms": 1033},
            *self._fake.drained,
        ]  # fmt: skip
        made = (lenient_event(json.dumps(event)) for event in events)
        return tuple(event for event in made if event and broker_name in ("", "broker-a"))

    async def histories(self, broker_name: str = "", *, limit: int = 0) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for address in self.addresses:
            try:
                found[address] = await self.history(broker_name, address=address, limit=limit)
            except ConnectError as error:
                found[address] = error
        return found


class FakeCluster:
    """One group of a master and a slave, both in sync, two controllers, one name server."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.dead: set[str] = set()
        self.refuses: set[str] = set()
        self.masters = {MASTER}
        self.out_of_sight = ""
        self.opened: dict[str, object] = {}
        self.drained: list[dict[str, object]] = []
        self.log_ends: dict[str, tuple[int, int]] = {}
        self.suspect = ""
        self.groups = ["G", "H"]
        self.topics = {"T": bodies.TopicConfig(topic_name="T", write_queue_nums=4)}
        self.group_table = {"G": bodies.SubscriptionGroupConfig(group_name="G")}
        self.offsets: dict[str, dict[int, int]] = {"T@G": {0: 5}}
        self.users: Any = None
        self.letter: dict[str, str] = {}
        self.calm = False
        self.figures: dict[str, dict[str, str]] = {}
        self.problems: dict[str, list[str]] = {}
        self.settings: dict[str, dict[str, str]] = {}
        self.messages: list[MessageExt] = [stored_message()]
        self.name_server_error: str | None = None
        self.roles_error: BatonError | None = None
        peers = "n0:10.0.0.1:9878;n1:10.0.0.2:9878;"
        self.metadata = {
            address: ControllerMetadata(address, "g", "n0", CONTROLLERS[0], n == 0, peers)
            for n, address in enumerate(CONTROLLERS)
        }
        self.info = bodies.ClusterInfo(
            broker_addr_table={
                "broker-a": bodies.BrokerData(
                    broker_addrs={0: MASTER, 2: SLAVE}, broker_name="broker-a", cluster="C"
                )
            },
            cluster_addr_table={"C": ["broker-a"]},
        )
        self.replicas = bodies.BrokerReplicasInfo(
            replicas_info_table={
                "broker-a": bodies.ReplicasInfo(
                    in_sync_replicas=[
                        bodies.ReplicaIdentity(alive=True, broker_address=a, broker_id=i)
                        for i, a in ((1, MASTER), (2, SLAVE))
                    ],
                    master_address=MASTER,
                    master_broker_id=1,
                    master_epoch=3,
                    sync_state_set_epoch=5,
                )
            }
        )

    def routed_masters(self) -> dict[str, str]:
        found = {}
        for name, data in self.info.broker_addr_table.items():
            if 0 not in data.broker_addrs:
                raise NoMasterError(name)
            found[name] = data.broker_addrs[0]
        return found

    def lose_group(self, name: str, address: str) -> None:
        """Only the controllers know a group whose last broker is dead."""
        lost = bodies.ReplicaIdentity(alive=False, broker_address=address, broker_id=1)
        self.dead.add(address)
        self.replicas.replicas_info_table[name] = bodies.ReplicasInfo(
            in_sync_replicas=[lost], master_address=address, master_broker_id=1, master_epoch=7
        )


class FakePart:
    """Calls of one subject, named as those of the real `Admin`."""

    def __init__(self, fake: FakeCluster) -> None:
        self.fake = fake

    def check(self, address: str) -> None:
        if address in self.fake.dead:
            raise ConnectError(address, "Connection refused")
        if address in self.fake.refuses:
            raise ResponseError(16, "shop lacks Get", address)

    def check_masters(self, masters: Mapping[str, str] | None) -> None:
        """As a call that asks these masters, or all, and fails if one does."""
        for address in (self.fake.routed_masters() if masters is None else masters).values():
            self.check(address)


class FakeClusterAdmin(FakePart):
    async def info(self) -> bodies.ClusterInfo:
        return self.fake.info

    async def name_server_states(self) -> dict[str, str | None]:
        return {NS: self.fake.name_server_error}

    async def targets(self, cluster: str | None, broker: str | None) -> dict[str, str]:
        return {broker: broker} if broker else self.fake.routed_masters()

    async def masters(self) -> dict[str, str]:
        return self.fake.routed_masters()


class FakeBrokers(FakePart):
    async def config(self, address: str) -> dict[str, str]:
        self.check(address)
        names = {"brokerName": "broker-a", "brokerClusterName": "C"}
        return {**names, **self.fake.settings.get(address, {})}

    async def update_config(self, address: str, settings: dict[str, str]) -> None:
        self.check(address)
        if "brokerName" in settings:
            raise ResponseError(16, "not that one", address)
        self.fake.settings.setdefault(address, {}).update(settings)

    async def runtime_info(self, address: str) -> dict[str, str]:
        self.check(address)
        if address in self.fake.log_ends:
            log_end, confirmed = self.fake.log_ends[address]
            return {"commitLogMaxOffset": str(log_end), "confirmOffset": str(confirmed)}
        return {"suspect": self.fake.suspect,
                bodies.PROBLEMS_KEY: json.dumps(self.fake.problems.get(address, [])),
                "brokerVersionDesc": "V5_3_3", "putTps": "1.5 2 3", "commitLogDiskRatio": "0.5",
                "msgPutTotalTodayNow": "9", "msgPutTotalTodayMorning": "4",
                **self.fake.figures.get(address, {})}  # fmt: skip

    async def repair(self, address: str, suspect: str) -> str:
        self.fake.calls.append(("repair_replica", address, suspect))
        return "cut at 100"

    async def ha_status(self, address: str) -> bodies.HARuntimeInfo:
        self.check(address)
        connections = [
            bodies.HAConnectionRuntimeInfo(addr=SLAVE, in_sync=True, slave_ack_offset=300)
        ]
        return bodies.HARuntimeInfo(
            master=address in self.fake.masters,
            in_sync_slave_nums=1,
            ha_connection_info=connections if address == MASTER else [],
        )

    async def epochs(self, address: str) -> bodies.EpochEntryCache:
        self.check(address)
        return bodies.EpochEntryCache(
            broker_id=1,
            broker_name="broker-a",
            cluster_name="C",
            epoch_list=[bodies.EpochCacheEntry(epoch=1, start_offset=0)],
            max_offset=300,
        )


class FakeTopics(FakePart):
    async def names(self) -> list[str]:
        return ["T", "U"]

    async def route(self, topic: str) -> bodies.TopicRouteData:
        if topic not in ("T", "U"):
            raise ResponseError(17, "No topic route info", NS)
        return bodies.TopicRouteData(
            broker_datas=list(self.fake.info.broker_addr_table.values()),
            queue_datas=[
                bodies.QueueData(broker_name="broker-a", read_queue_nums=4, write_queue_nums=4)
            ],
        )

    async def stats(self, topic: str) -> tuple[QueueStats, ...]:
        return (QueueStats(MessageQueue(topic, "broker-a", 0), 3, 9, 1_700_000_000_000),)

    async def traffic(self, topic: str) -> tuple[Traffic, ...]:
        if topic != "T":
            return (Traffic(topic, None, 0.0, 0),)
        came_in, got = (0.0, 0.0) if self.fake.calm else (2.5, 1.25)
        return (Traffic(topic, None, came_in, 100), Traffic(topic, "G", got, 96))

    async def change(
        self, topic: str, changes: TopicChanges, **where: Any
    ) -> dict[str, ChangedTopic]:
        self.fake.calls.append(("change_topic", topic, changes, where))
        config = bodies.TopicConfig(topic_name=topic, read_queue_nums=2, write_queue_nums=3)
        return {"broker-a": ChangedTopic(MASTER, config)}

    async def config(self, address: str, topic: str) -> bodies.TopicConfig | None:
        known = topic in ("T", "U")
        return bodies.TopicConfig(topic_name=topic, write_queue_nums=4) if known else None

    async def configs(self, address: str) -> bodies.TopicConfigSerializeWrapper:
        return bodies.TopicConfigSerializeWrapper(topic_config_table=dict(self.fake.topics))

    async def create_or_update(self, config: bodies.TopicConfig, *, broker: str) -> None:
        config.attributes = {key.lstrip("+"): value for key, value in config.attributes.items()}
        self.fake.topics[config.topic_name] = config

    async def delete(self, topic: str, cluster: str) -> dict[str, str]:
        self.fake.calls.append(("delete_topic", topic, cluster))
        return {"broker-a": MASTER}


class FakeGroups(FakePart):
    async def update(self, config: bodies.SubscriptionGroupConfig, *, broker: str) -> None:
        self.fake.group_table[config.group_name] = config

    async def delete(self, group: str, **how: Any) -> dict[str, str]:
        self.fake.calls.append(("delete_group", group, how))
        return {"broker-a": MASTER}

    async def commit(self, address: str, group: str, topic: str, queue: int, offset: int) -> None:
        if group not in self.fake.group_table:
            raise ResponseError(26, f"Group {group} not exist!", address)
        if offset > 100:
            raise ResponseError(1, "behind the end", address)
        self.fake.offsets.setdefault(f"{topic}@{group}", {})[queue] = offset

    async def producers(
        self, group: str, masters: Mapping[str, str] | None = None
    ) -> list[bodies.ClientConnection]:
        self.check_masters(masters)
        return (
            [bodies.ClientConnection(client_addr="10.0.0.9:5", client_id="p@1")]
            if group == "P"
            else []
        )

    async def progress_of_broker(self, address: str) -> dict[str, list[QueueProgress]]:
        return {"G": list((await self.progress("G", None, {address: address})).queues)}

    async def settings(self, address: str) -> bodies.SubscriptionGroupWrapper:
        return bodies.SubscriptionGroupWrapper(subscription_group_table=dict(self.fake.group_table))

    async def offsets(self, address: str) -> dict[str, dict[int, int]]:
        return self.fake.offsets

    async def names(self, masters: Mapping[str, str] | None = None) -> list[str]:
        self.check_masters(masters)
        return self.fake.groups

    async def progress(
        self, group: str, topic: str | None = None, masters: Mapping[str, str] | None = None
    ) -> GroupProgress:
        self.check_masters(masters)
        queues = (
            (QueueProgress(MessageQueue("T", "broker-a", 0), 9, 5, 1_700_000_000_000, 8),)
            if group == "G"
            else ()
        )
        return GroupProgress(group, queues, ("10.0.0.9@1",) if group == "G" else ())

    async def connections(
        self, group: str, masters: Mapping[str, str] | None = None
    ) -> bodies.ConsumerConnection | None:
        self.check_masters(masters)
        if group != "G":
            return None
        return bodies.ConsumerConnection(
            connection_set=[
                bodies.ClientConnection(client_addr="10.0.0.9:5", client_id="10.0.0.9@1")
            ],
            subscription_table={"T": bodies.SubscriptionData(topic="T", sub_string="a || b")},
        )

    async def reset_offsets(self, *asked: Any) -> dict[MessageQueue, int]:
        self.fake.calls.append(("reset_offsets", *asked))
        return {MessageQueue(asked[1], "broker-a", 0): 7}

    async def preview_reset(self, *asked: Any) -> dict[MessageQueue, tuple[int, int]]:
        queues = (MessageQueue(asked[1], "broker-a", n) for n in range(2))
        return dict(zip(queues, ((5, 9), (7, 2)), strict=True))


class FakeMessages(FakePart):
    async def by_id(self, msg_id: str, topic: str = "") -> MessageExt | None:
        address, offset = decode_offset_msg_id(msg_id)
        self.check(address)
        return next((m for m in self.fake.messages if m.physical_offset == offset), None)

    async def by_key(self, topic: str, key: str, **limits: Any) -> list[MessageExt]:
        self.fake.calls.append(("by_key", topic, key, limits))
        return [m for m in self.fake.messages if key in m.keys.split()]

    async def by_unique_key(self, topic: str, key: str) -> MessageExt | None:
        return next((m for m in self.fake.messages if m.uniq_key == key), None)


class FakeUsers(FakePart):
    async def users(self, address: str) -> list[Any]:
        raise ResponseError(16, "it keeps no users", address)


class FakeAdmin:
    fake: FakeCluster

    def __init__(
        self, name_servers: tuple[str, ...], *, timeout_ms: int, client_options: ClientOptions
    ) -> None:
        self.client = Mock(options=client_options)
        self.fake.calls.append(("Admin", name_servers, timeout_ms))
        self.cluster = FakeClusterAdmin(self.fake)
        self.brokers = FakeBrokers(self.fake)
        self.users = self.fake.users or FakeUsers(self.fake)
        self.topics = FakeTopics(self.fake)
        self.consumer_groups = FakeGroups(self.fake)
        self.messages = FakeMessages(self.fake)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        pass

    def controller(self, addresses: tuple[str, ...]) -> FakeController:
        return FakeController(self.fake, tuple(addresses))


class FakeClient:
    """A producer or consumer, which commands open with `async with`."""

    def __init__(self, group: str, **options: Any) -> None:
        pass

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        pass


class FakeProducer(FakeClient):
    sent: list[Any]
    status = "SEND_OK"

    async def send(self, message: Any, *, selector: Any = None) -> Any:
        queues = [MessageQueue(message.topic, "broker-a", n) for n in range(2)]
        queue = selector(queues, message) if selector else queues[0]
        self.sent.append(message)
        return SendResult(SendStatus(self.status), UNIQUE_ID, OFFSET_ID, queue, 7)


@pytest.fixture
def producer(monkeypatch: pytest.MonkeyPatch) -> type[FakeProducer]:
    FakeProducer.sent = []
    monkeypatch.setattr(batonmq.client.producer.producer, "Producer", FakeProducer)
    return FakeProducer


class FakeConsumer(FakeClient):
    """Two queues of three messages each, stored at 100, 101, 102."""

    async def fetch_queues(self, topic: str, **options: Any) -> tuple[MessageQueue, ...]:
        return tuple(MessageQueue(topic, "broker-a", n) for n in range(2))

    async def min_offset(self, queue: MessageQueue, **options: Any) -> int:
        return 0

    async def max_offset(self, queue: MessageQueue, **options: Any) -> int:
        return 3

    async def offset_by_time(self, queue: MessageQueue, begin_ms: int, **options: Any) -> int:
        return min(max(begin_ms - 100, 0), 3)

    async def pull(self, queue: MessageQueue, offset: int, most: int, **options: Any) -> Any:
        # The last one came after the end was asked for.
        messages = tuple(
            stored_message(
                queue_id=queue.queue_id,
                queue_offset=n,
                store_timestamp=100 + n,
                **({"properties": FakeAdmin.fake.letter} if FakeAdmin.fake.letter else {}),
            )
            for n in range(offset, 4)
        )
        return PullResult(PullStatus.FOUND, 4, 0, 4, messages)


@pytest.fixture
def consumer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batonmq.client.consumer.pull_consumer, "PullConsumer", FakeConsumer)


def write_cluster(
    path: Path, pid: int, more: Mapping[str, Sequence[str]] = MappingProxyType({})
) -> None:
    """A `cluster.json` of the fake cluster. `more`: other groups, broker name -> addresses."""
    path.parent.mkdir(exist_ok=True)
    brokers = [
        {"name": name, "address": address}
        for name, addresses in {"broker-a": (MASTER, SLAVE), **more}.items()
        for address in addresses
    ]
    document = {
        "supervisorPid": pid,
        "nameServers": [{"address": NS}],
        "controllers": [{"address": address} for address in CONTROLLERS],
        "brokers": brokers,
    }
    path.write_text(json.dumps(document))


@pytest.fixture
def local(fake: FakeCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The data folder that mqctl looks at, and no other place; nothing is in it yet."""
    for name in ("NAMESRV_ADDR", "CONTROLLER_ADDR"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("BATONMQ_DATA", str(tmp_path))
    return tmp_path


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeCluster:
    """The fake cluster, found through the environment's addresses."""
    for name in ("BATONMQ_DATA", "BATONMQ_CONTEXT", "MQCTL_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NAMESRV_ADDR", NS)
    monkeypatch.setenv("CONTROLLER_ADDR", ";".join(CONTROLLERS))
    monkeypatch.chdir(tmp_path)
    # Of most fake elections no first acknowledgement is recorded: it is not waited for.
    monkeypatch.setattr(batonmq.mqctl.commands.election, "STORY_MS", 0)
    FakeAdmin.fake = FakeCluster()
    for module in (batonmq.client.admin.admin, batonmq.mqctl.context, batonmq.mqctl.verdict.ask):
        monkeypatch.setattr(module, "Admin", FakeAdmin)
    return FakeAdmin.fake


@pytest.fixture
def mqctl(fake: FakeCluster) -> Callable[..., Ran]:
    """Runs one command line against the fake cluster; no traceback may reach the user."""

    def run(*arguments: str) -> Ran:
        result = CliRunner().invoke(cli, arguments, prog_name="mqctl")
        assert result.exception is None or isinstance(result.exception, SystemExit), result
        assert "Traceback" not in result.output
        return Ran(result.exit_code, result.stdout, result.stderr)

    return run
