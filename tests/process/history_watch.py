"""The history as it was written down and as it was published, and who leads."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from batonmq import MessageExt, MessageQueue, PullConsumer
from batonmq.history.message import history_name
from lab.cluster.processes import wait_for
from lab.cluster.up import ClusterProcess

TOPIC = "BATON_SYS_HISTORY"
Name = tuple[str, int, int]


def in_files(cluster: ClusterProcess) -> dict[Name, str]:
    """Every event that any controller wrote down, as its line."""
    found: dict[Name, str] = {}
    for path in cluster.data_dir.glob("namesrv-*/controller/history-*.jsonl"):
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                event = json.loads(line)
                name = (event["log"], event["raft_index"], event.get("part", 0))
                assert found.setdefault(name, line[:-1]) == line[:-1], path
    return found


async def read_all(name_servers: str, broker_name: str) -> list[MessageExt]:
    """The whole queue, from its beginning."""
    queue = MessageQueue(TOPIC, broker_name, 0)
    messages: list[MessageExt] = []
    async with PullConsumer("readers-of-history", name_servers=name_servers) as consumer:
        assert queue in await consumer.fetch_queues(TOPIC)
        offset = await consumer.min_offset(queue)
        while offset < await consumer.max_offset(queue):
            got = await consumer.pull(queue, offset)
            messages += got.messages
            offset = got.next_begin_offset
    return messages


def in_topic(cluster: ClusterProcess, broker_name: str = "broker-a") -> list[MessageExt]:
    return asyncio.run(read_all(cluster.name_servers, broker_name))


def first_of_each(messages: list[MessageExt]) -> dict[Name, str]:
    """The first of each event; every repeat must be the same."""
    found: dict[Name, str] = {}
    for message in messages:
        name = history_name(message.properties)
        assert name is not None
        text = message.body.decode()
        event = json.loads(text)
        assert name == (event["log"], event["raft_index"], event.get("part", 0))
        assert message.keys == f"{name[1]} {name[0]}-{name[1]}-{name[2]}"
        assert message.tags == event["kind"]
        assert message.properties.get("BATON_GROUP", "") == event.get("broker_name", "")
        assert found.setdefault(name, text) == text
    return found


def published(cluster: ClusterProcess) -> list[MessageExt]:
    """The topic's messages, once they hold every event of the files."""

    def same() -> list[MessageExt] | None:
        messages = in_topic(cluster)
        return messages if first_of_each(messages) == in_files(cluster) else None

    return wait_for("the topic to hold the events of the files", same)


class Leaders:
    """Who leads, by what the controllers record, and who leads after it was killed."""

    def __init__(self, cluster: ClusterProcess) -> None:
        self.cluster = cluster

    def master(self) -> dict[str, Any]:
        address = self.cluster.wait_in_sync(3)["masterAddress"]
        return next(each for each in self.cluster.brokers if each["address"] == address)

    def leader(self) -> dict[str, Any]:
        """The name server whose controller leads by the newest event."""
        events = (json.loads(line) for line in in_files(self.cluster).values())
        changes = [each for each in events if each["kind"] == "controller_leader_changed"]
        newest = max(changes, key=lambda each: each["controller_epoch"])
        servers = self.cluster.document["nameServers"]
        return servers[int(newest["node"].removeprefix("n"))]

    def other_leader(self, before: dict[str, Any]) -> None:
        wait_for("another controller", lambda: self.leader()["address"] != before["address"])

    def other_master(self, before: dict[str, Any]) -> None:
        def elected() -> bool:
            state = self.cluster.group_state()
            return bool(state) and state.get("masterAddress") not in ("", None, before["address"])

        wait_for("another master", elected)
