"""The shell of the features that live in the log: when a slice runs, and what an error does."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any
from unittest.mock import Mock

import pytest

from batonmq.broker.write import log_features
from batonmq.broker.write.log_features import LogFeature, SystemRecords
from batonmq.broker.write.write_path import WritePath
from batonmq.protocol.errors import CorruptLogError, RemoteProtocolError
from batonmq.store.errors import PutIllegal, PutRefused
from tests.shared.waiting import until


class Feature(LogFeature):
    """Notes its calls; `more` to read, and an `error` for each next slice."""

    TOPICS = ("T",)

    def __init__(self, path: WritePath) -> None:
        super().__init__(path)
        self.calls: list[str] = []
        self.more = False
        self.errors: list[Exception] = []

    def _continue(self) -> None:
        self.calls.append("continue")

    def _forget(self) -> None:
        self.calls.append("forget")

    def _read(self) -> bool:
        self.calls.append("read")
        return self.more

    def _slice(self, now_ms: int) -> int:
        self.calls.append("slice")
        if self.errors:
            raise self.errors.pop(0)
        return 3_600_000

    def try_to(self, put: Callable[[], bool]) -> bool:
        return self._carried_out("this", put)


@contextlib.asynccontextmanager
async def open_feature() -> AsyncIterator[tuple[Feature, WritePath]]:
    store: Any = Mock(confirm_offset=0, max_phy_offset=0)
    path = WritePath(store, ack_wait_ms=1, sync_flush=False, clock_ms=lambda: 0)
    path.gate.opening(1)
    path.gate.open()
    feature = Feature(path)
    yield feature, path
    feature.end()


async def test_r55_a_mastership_that_begins_again_ends_the_one_before():
    async with open_feature() as (feature, _):
        feature.begin()
        feature.begin()
        assert feature.calls == ["forget", "continue"] * 2


async def test_an_arrival_wakes_a_master_only():
    async with open_feature() as (feature, _):
        feature.begin()
        await until(lambda: "slice" in feature.calls)
        feature.calls.clear()
        feature.arrived(0)
        await until(lambda: "slice" in feature.calls)
        feature.end()
        feature.calls.clear()
        feature.arrived(0)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not feature.calls


@pytest.mark.parametrize("why", ["gate", "hold", "replicas"])
async def test_r33_r36_nothing_is_written_while_writes_are_refused_held_or_far_ahead(
    monkeypatch, why
):
    """What is new in the log is read meanwhile."""
    monkeypatch.setattr(log_features, "BLOCKED_MS", 0)
    async with open_feature() as (feature, path):
        store: Any = path.store
        if why == "gate":
            path.gate.update(lease=False, required_set_whole=False)
        elif why == "hold":
            path.hold.begin()
        else:
            store.max_phy_offset = log_features.UNCONFIRMED_BYTES_MAX + 1
        feature.begin()
        await until(lambda: feature.calls.count("read") > 2)
        assert "slice" not in feature.calls
        path.gate.update(lease=True, required_set_whole=False)
        path.hold.release()
        store.max_phy_offset = 0
        await until(lambda: "slice" in feature.calls)


async def test_slices_run_while_there_is_more_to_read():
    async with open_feature() as (feature, _):
        feature.more = True
        feature.begin()
        await until(lambda: feature.calls.count("slice") > 2)


async def test_r54_no_exception_ends_the_timer(monkeypatch):
    monkeypatch.setattr(log_features, "FAILED_MS", 0)
    async with open_feature() as (feature, path):
        feature.errors = [KeyError("x"), OSError(5, "Input/output error")]
        feature.begin()
        await until(lambda: feature.calls.count("slice") == 2)
        assert "Feature is tried again: OSError" in path.aside.problem
        await until(lambda: feature.calls.count("slice") == 3)
        assert path.aside.problem == ""


async def test_r24_a_feature_leaves_a_bad_record_to_its_reader_and_tries_again(monkeypatch):
    monkeypatch.setattr(log_features, "DAMAGED_MS", 0)
    async with open_feature() as (feature, path):
        feature.errors = [CorruptLogError("a file", 7, "CRC")]
        feature.begin()
        await until(lambda: feature.calls.count("slice") == 2)
        assert path.store.trust.mock_calls == []


@pytest.mark.parametrize(
    ("error", "is_final"),
    [
        (PutIllegal("too long"), True),
        (KeyError("x"), True),
        (PutRefused("the disk is full"), False),
        (OSError(5, "Input/output error"), False),
        (CorruptLogError("a file", 7, "CRC"), False),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_r54_only_what_can_never_succeed_is_set_aside(error, is_final):
    async with open_feature() as (feature, path):
        put = Mock(side_effect=error)
        if is_final:
            assert feature.try_to(put) and path.aside.total == 1
        else:
            with pytest.raises(type(error)):
                feature.try_to(put)
            assert path.aside.total == 0


@pytest.mark.parametrize(
    ("takes_over", "is_master", "called"),
    [
        (True, False, "take_over_record"),
        (False, True, "own_record_confirmed"),
        (False, False, "apply_record"),
    ],
)
def test_a_record_reaches_its_table_by_the_role(takes_over, is_master, called):
    kind, store, gate = Mock(), Mock(on_system_record={}), Mock(is_master=is_master)
    store.shows_unconfirmed = takes_over
    SystemRecords(store, gate, {"S": kind})
    store.on_system_record["S"](Mock(physical_offset=100, size=20), b"body")
    assert [(name, args) for name, args, _ in kind.mock_calls] == [(called, (b"body", 120))]


def test_r54_a_record_that_cannot_be_read_is_skipped(caplog):
    kind, store = Mock(), Mock(on_system_record={}, shows_unconfirmed=True)
    kind.take_over_record.side_effect = RemoteProtocolError("version 9")
    SystemRecords(store, Mock(), {"S": kind})
    store.on_system_record["S"](Mock(physical_offset=0, size=1, topic=b"S"), b"")
    assert "system_record_skipped" in caplog.text and "version 9" in caplog.text
