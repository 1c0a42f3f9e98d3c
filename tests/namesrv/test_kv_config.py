"""The key-values of a name server: limits, one write for many changes, a disk that fails (R58)."""

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from batonmq.namesrv import kv_config
from batonmq.namesrv.kv_config import TABLE_SIZE_MAX, VALUE_SIZE_MAX, KVConfig
from batonmq.protocol.errors import BrokerRefusal, CorruptLogError
from tests.shared.failing_disk import failing, walk_errors
from tests.shared.power_cut import CHANGES


def opened(path: Path | None) -> KVConfig:
    kv = KVConfig(path)
    kv.load()
    return kv


def refused(work: Callable[[], Awaitable[None]]) -> str:
    async def run() -> None:
        await work()

    with pytest.raises(BrokerRefusal) as raised:
        asyncio.run(run())
    return raised.value.remark or ""


BAD_NAMES = ("", " ", "a\nb", "a\0b", "\x1b[2J", "a\u2028b", "x" * 256, "é" * 128, "\ud800")


@pytest.mark.parametrize("name", BAD_NAMES)
def test_r46_bad_names_of_key_values_are_refused(name: str) -> None:
    kv = opened(None)
    assert "namespace" in refused(lambda: kv.put(name, "k", "v"))
    assert "key" in refused(lambda: kv.put("n", name, "v"))
    assert kv.namespace("n") is None


@pytest.mark.parametrize("name", ["ORDER_TOPIC_CONFIG", "%RETRY%g", "a/b", "..", "x" * 255, "é b"])
def test_r46_legal_names_stay_legal(tmp_path: Path, name: str) -> None:
    path = tmp_path / "kv.json"
    asyncio.run(opened(path).put(name, name, "v\n"))
    assert opened(path).get(name, name) == "v\n"


def test_r58_values_and_the_table_are_limited(tmp_path: Path) -> None:
    path = tmp_path / "kv.json"
    kv = opened(path)
    value = "v" * VALUE_SIZE_MAX
    assert str(VALUE_SIZE_MAX) in refused(lambda: kv.put("n", "k", value + "v"))
    assert "surrogates" in refused(lambda: kv.put("n", "k", "\ud800"))

    async def fill() -> int:
        most = 2 * TABLE_SIZE_MAX // VALUE_SIZE_MAX
        puts = (kv.put("n", f"k{number}", value) for number in range(most))
        results = await asyncio.gather(*puts, return_exceptions=True)
        kept = [result for result in results if result is None]
        assert all("delete some" in str(each) for each in results if each is not None)
        return len(kept)

    kept = asyncio.run(fill())
    assert 0.9 * TABLE_SIZE_MAX < kept * VALUE_SIZE_MAX <= TABLE_SIZE_MAX
    assert path.stat().st_size < 1.1 * TABLE_SIZE_MAX
    asyncio.run(kv.put("n", "k0", "less"))
    asyncio.run(kv.delete("n", "k1"))
    asyncio.run(kv.put("n", "new", value))
    again = opened(path)
    assert again._size == kv._size and again._table == kv._table


async def test_r58_of_many_namespaces_an_emptied_one_ends() -> None:
    kv = opened(None)
    for number in range(kv_config.EMPTY_MAX + 1):
        await kv.put(f"n{number}", "k", "v")
        await kv.delete(f"n{number}", "k")
    await kv.delete("unknown", "k")
    assert kv.namespace("n0") == kv.namespace(f"n{kv_config.EMPTY_MAX - 1}") == {}
    assert kv.namespace(f"n{kv_config.EMPTY_MAX}") is kv.namespace("unknown") is None


def test_r58_a_file_above_the_limit_opens_and_may_shrink(tmp_path: Path) -> None:
    path = tmp_path / "kv.json"
    table = {"n": {"k": "v" * 2 * TABLE_SIZE_MAX, "l": "w"}}
    path.write_text(json.dumps({"configTable": table}))
    kv = opened(path)
    assert "delete some" in refused(lambda: kv.put("n", "m", "w"))
    asyncio.run(kv.put("n", "l", ""))
    asyncio.run(kv.delete("n", "k"))
    asyncio.run(kv.put("n", "m", "w"))
    assert opened(path)._table == {"n": {"l": "", "m": "w"}}


async def test_r58_the_loop_goes_on_while_the_disk_is_slow_and_changes_share_a_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = opened(tmp_path / "kv.json")
    release, writes = threading.Event(), 0
    replace_file = kv_config.replace_file

    def slow(path: Path, data: bytes, *, keep_previous: bool) -> None:
        nonlocal writes
        writes += 1
        assert release.wait(10)
        replace_file(path, data, keep_previous=keep_previous)

    monkeypatch.setattr(kv_config, "replace_file", slow)

    first = asyncio.ensure_future(kv.put("n", "first", "v"))
    while not writes:  # noqa: ASYNC110  turns of the loop are the clock
        await asyncio.sleep(0)
    others = [asyncio.ensure_future(kv.put("n", f"k{x}", "v")) for x in range(100)]
    await asyncio.sleep(0)
    assert kv.get("n", "first") is None and not first.done()
    release.set()
    await asyncio.gather(first, *others)
    assert writes == 2
    assert len(opened(tmp_path / "kv.json").namespace("n") or ()) == 101


@pytest.mark.parametrize("error", ["ENOSPC", "EIO"])
@pytest.mark.parametrize("call", [*CHANGES, "open", "close", "makedirs"])
def test_r58_a_disk_call_that_fails_is_an_error_and_loses_nothing(
    tmp_path: Path, call: str, error: str
) -> None:
    def attempt(rule: str, number: int) -> bool:
        path = tmp_path / str(number) / "kv.json"
        kv = opened(path)
        asyncio.run(kv.put("n", "old", "1"))
        with failing(rule) as struck:
            try:
                asyncio.run(kv.put("n", "new", "2"))
                answered = ""
            except BrokerRefusal as refusal:
                answered = refusal.remark or ""
        assert not answered or str(path.parent) in answered
        assert kv.get("n", "new") == (None if answered else "2")
        assert opened(path).get("n", "old") == "1"
        # It may be on the disk, though its answer was an error: to delete it must be a write.
        asyncio.run(kv.delete("n", "new"))
        assert opened(path).namespace("n") == {"old": "1"}
        return bool(struck)

    walk_errors(f"{call} * {error}", attempt)


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), ValueError("no UTF-8")])
def test_r58_a_write_that_cannot_begin_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Its client would wait, and so would each later one."""
    path = tmp_path / "kv.json"
    kv = opened(path)
    with monkeypatch.context() as broken:
        broken.setattr(kv_config.asyncio, "to_thread", Mock(side_effect=error))
        assert str(error) in refused(lambda: asyncio.wait_for(kv.put("n", "k", "1"), 10))
    asyncio.run(kv.put("n", "k", "2"))
    assert opened(path).namespace("n") == {"k": "2"}


def test_a_copy_that_was_used_is_not_overwritten_by_what_was_damaged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The next write linked the damaged file over it: a crash behind that left two."""
    path = tmp_path / "kv.json"
    for value in ("1", "2"):
        asyncio.run(opened(path).put("n", "k", value))
    path.write_bytes(b"[]")
    kv = opened(path)
    assert kv.get("n", "k") == "1" and "key_values_from_backup" in caplog.text
    with failing("replace kv.json.tmp EIO"):
        refused(lambda: kv.put("n", "k", "3"))
    assert opened(path).get("n", "k") == "1"


@pytest.mark.parametrize(
    "content", [b"[]", b'{"configTable":[]}', b'{"configTable":{"n":[]}}', b"[" * 100_000, b"\xff"]
)
def test_a_file_of_something_else_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "kv.json"
    path.write_bytes(content)
    with pytest.raises(CorruptLogError, match=str(path)):
        opened(path)
