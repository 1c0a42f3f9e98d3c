"""What a slave takes over from its master's tables, and what it does not (R31)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from unittest.mock import AsyncMock, Mock

import pytest

from batonmq.broker.tables.slave_sync import (
    EXT_MASTER_EPOCH,
    EXT_OFFSET_VERSION,
    EXT_TABLE_VERSION,
    BrokerTables,
    Followed,
    SlaveSynchronize,
)
from batonmq.protocol.codes import RequestCode
from batonmq.remoting.command import RemotingCommand
from batonmq.store.consumer_offset import ConsumerOffsetManager, DelayOffsetManager
from batonmq.store.queue_locks import QueueLockManager
from batonmq.store.subscription_group import MessageRequestModeManager, SubscriptionGroupManager
from batonmq.store.topic_config import TopicConfigManager

MASTER = Followed("h:10911", 4)


def tables(folder: Path) -> BrokerTables:
    return BrokerTables(
        TopicConfigManager(folder / "topics.json"),
        SubscriptionGroupManager(folder / "groups.json"),
        ConsumerOffsetManager(folder / "offsets.json"),
        DelayOffsetManager(folder / "delays.json"),
        QueueLockManager(folder / "locks.json"),
        MessageRequestModeManager(folder / "modes.json"),
    )


def offsets_of_master(folder: Path, epoch: int) -> bytes:
    other = tables(folder).offsets
    other.set_state_version(epoch)
    other.commit("g", "T", 0, 70)
    return other.wrapper().encode()


@pytest.mark.parametrize("epoch, taken", [(3, False), (-1, False), (4, True), (5, True)])
def test_r31_offsets_of_a_lower_epoch_are_not_taken_over(
    tmp_path: Path, epoch: int, taken: bool
) -> None:
    """Who answers at the master's address may be a deposed one, or none any more (-1)."""
    own = tables(tmp_path / "own")
    body = offsets_of_master(tmp_path / "master", max(epoch, 0))
    asked: list[int] = []

    async def answer(address: str, request: RemotingCommand, timeout_ms: int) -> RemotingCommand:
        asked.append(request.code)
        assert address == "h:10909"
        ext = {EXT_MASTER_EPOCH: str(epoch), EXT_OFFSET_VERSION: "v1"}
        return RemotingCommand.response_to(request, ext=ext, body=body)

    sync = SlaveSynchronize(Mock(invoke=answer), own, 1_000, lambda: None)
    sync._followed = MASTER
    sync._fetch_tables = AsyncMock(return_value=True)  # type: ignore[method-assign]
    asyncio.run(sync._synchronize(MASTER))
    assert own.offsets.query("g", "T", 0) == (70 if taken else -1)
    assert sync._fetch_tables.await_count == taken
    assert sync._offset_version == ("v1" if taken else "")
    assert asked == [RequestCode.GET_ALL_CONSUMER_OFFSET]


def test_r31_an_answer_that_another_role_change_overtook_is_dropped(tmp_path: Path) -> None:
    own = tables(tmp_path / "own")
    body = offsets_of_master(tmp_path / "master", 4)
    sync = SlaveSynchronize(Mock(), own, 1_000, lambda: None)

    async def answer(address: str, request: RemotingCommand, timeout_ms: int) -> RemotingCommand:
        sync._followed = Followed("other:10911", 5)
        return RemotingCommand.response_to(request, ext={EXT_MASTER_EPOCH: "4"}, body=body)

    sync._client = Mock(invoke=answer)
    sync._followed = MASTER
    asyncio.run(sync._synchronize(MASTER))
    assert own.offsets.query("g", "T", 0) == -1


def test_r42_tables_are_held_when_all_of_them_are_here_and_of_one_master(tmp_path: Path) -> None:
    """1 topics change while they are fetched: again. 2 they are here. 3 another master: of it
    nothing is here, whatever its versions are."""
    own = tables(tmp_path / "own")
    asked: list[dict[str, str]] = []
    held: list[int] = []

    async def answer(address: str, request: RemotingCommand, timeout_ms: int) -> RemotingCommand:
        asked.append(request.ext)
        ext = {EXT_MASTER_EPOCH: "5", EXT_OFFSET_VERSION: "v1", EXT_TABLE_VERSION: "t1"}
        return RemotingCommand.response_to(request, ext=ext)

    async def play() -> None:
        sync = SlaveSynchronize(Mock(invoke=answer), own, 1_000, lambda: None)
        sync.on_tables = held.append
        sync._fetch_tables = AsyncMock(side_effect=[False, True, True])  # type: ignore[method-assign]
        sync.follow(MASTER)
        assert not await sync._synchronize(MASTER) and held == []
        assert await sync._synchronize(MASTER) and held == [5]
        assert await sync._synchronize(MASTER) and sync._fetch_tables.await_count == 2
        other = Followed("other:10911", 5)
        sync.follow(other)
        assert await sync._synchronize(other) and held == [5, 5]
        assert sync._fetch_tables.await_count == 3

    asyncio.run(play())
    assert [ext[EXT_OFFSET_VERSION] for ext in asked] == ["", "v1", "v1", ""]
