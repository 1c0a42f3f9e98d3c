"""The key-values of a name server, by namespace, in one JSON file.

The file is Java's (`{"configTable":{namespace:{key:value}}}`). A value is shown, and its change
answered, once it is on the disk. Changes that arrive during a write share the next one. What a
client may store is limited (R58).

Origin: Java `KVConfigManager`.
"""

import asyncio
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from batonmq.protocol.codes import ResponseCode
from batonmq.protocol.errors import BrokerRefusal
from batonmq.protocol.topic_name import text_problem
from batonmq.runtime import disk
from batonmq.runtime.durable_file import load_with_backup, replace_file

log = logging.getLogger(__name__)

VALUE_SIZE_MAX: Final = 64 * 1024
TABLE_SIZE_MAX: Final = 4 * 1024 * 1024
"""Of all names and values together: bytes of UTF-8, and PAIR_SIZE for each pair."""
PAIR_SIZE: Final = 64
EMPTY_MAX: Final = 64
"""With more namespaces than this, one that loses its last key ends."""

Table = dict[str, dict[str, str]]


@dataclass(slots=True)
class _PairChange:
    """`value` None: the key is deleted."""

    namespace: str
    key: str
    value: str | None
    done: asyncio.Future[None]


class KVConfig:
    """`path` None keeps the values in memory only. If `put` or `delete` raise BrokerRefusal, the
    table has not changed."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._table: Table = {}
        self._size = 0
        self._is_stored = True
        """Not after a failed write: the file may have what was refused."""
        self._waiting: list[_PairChange] = []
        self._writer: asyncio.Task[None] | None = None

    def load(self) -> None:
        """Raises CorruptLogError for a file that cannot be used, OSError."""
        if self._path is None:
            return
        self._table, why = load_with_backup(self._path, _parse) or ({}, "")
        if why:
            log.warning("key_values_from_backup file=%s reason=%s", self._path, why)
            if self._path.exists():
                disk.unlink(self._path)  # it must not become the `.bak` of the next write
        self._size = sum(
            _size(namespace, key, value)
            for namespace, pairs in self._table.items()
            for key, value in pairs.items()
        )

    def get(self, namespace: str, key: str) -> str | None:
        return self._table.get(namespace, {}).get(key)

    def namespace(self, namespace: str) -> dict[str, str] | None:
        """A copy of all pairs, None if the namespace does not exist."""
        pairs = self._table.get(namespace)
        return dict(pairs) if pairs is not None else None

    async def put(self, namespace: str, key: str, value: str) -> None:
        """The pair is on the disk on return."""
        for what, name in (("namespace", namespace), ("key", key)):
            if problem := text_problem(name):
                raise _refusal(f"{what} {name[:64]!r}: {problem}")
        try:
            size = len(value.encode())
        except UnicodeEncodeError as error:
            raise _refusal(f"value of key {key!r}: {error}") from error
        if size > VALUE_SIZE_MAX:
            raise _refusal(
                f"value of key {key!r}: it has {size} bytes, allowed are {VALUE_SIZE_MAX}"
            )
        await self._change(namespace, key, value)

    async def delete(self, namespace: str, key: str) -> None:
        """The pair is gone from the disk on return. Does nothing for an unknown key."""
        await self._change(namespace, key, None)

    async def close(self) -> None:
        """Waits for the write that is under way."""
        if self._writer is not None:
            await asyncio.gather(self._writer, return_exceptions=True)

    async def _change(self, namespace: str, key: str, value: str | None) -> None:
        loop = asyncio.get_running_loop()
        change = _PairChange(namespace, key, value, loop.create_future())
        self._waiting.append(change)
        if self._writer is None:
            self._writer = loop.create_task(self._write_all())
        await change.done

    async def _write_all(self) -> None:
        try:
            while self._waiting:
                changes, self._waiting = self._waiting, []
                await self._write(changes)
        finally:
            self._writer = None

    async def _write(self, changes: list[_PairChange]) -> None:
        """Carries out the changes that fit into the limit, with one write."""
        table, size = dict(self._table), self._size
        for namespace in {change.namespace for change in changes}:
            table[namespace] = dict(table.get(namespace, {}))
        kept = []
        for change in changes:
            grown = size + _growth(table, change)
            # A file may have been above the limit when it was loaded: such a table may shrink.
            if change.value is not None and grown > max(size, TABLE_SIZE_MAX):
                why = (
                    f"all key-values would have {grown} bytes, allowed are {TABLE_SIZE_MAX}:"
                    " delete some"
                )
                _answer(change, _refusal(why))
                continue
            size = grown
            if change.value is not None:
                table[change.namespace][change.key] = change.value
            else:
                table[change.namespace].pop(change.key, None)
            kept.append(change)
        for namespace in {change.namespace for change in changes}:
            # As in Java an empty one stays; R58: not if there are many, as no size limits them.
            is_known = namespace in self._table and len(table) <= EMPTY_MAX
            if not table[namespace] and not is_known:
                del table[namespace]
        failure: BrokerRefusal | None = None
        if kept and not (self._is_stored and table == self._table):
            self._is_stored = False
            try:
                await self._store(table)
                self._is_stored = True
            # Each change needs an answer. RuntimeError: no thread can be started; ValueError: the
            # file had a text that is no UTF-8.
            except (OSError, RuntimeError, ValueError) as error:
                reason = disk.described(error)
                log.error("key_values_not_stored path=%s reason=%r", self._path, reason)
                failure = _refusal(
                    f"cannot store the key-values: {reason}; none was changed, but a restart may"
                    " bring them: set them again"
                )
        if failure is None:
            self._table, self._size = table, size
        for change in kept:
            _answer(change, failure)

    async def _store(self, table: Table) -> None:
        if self._path is not None:
            # In a thread: a controller may run in the same loop, and its heartbeats must not wait.
            text = msgspec.json.encode({"configTable": table})
            await asyncio.to_thread(replace_file, self._path, text, keep_previous=True)


def _growth(table: Table, change: _PairChange) -> int:
    before = table.get(change.namespace, {}).get(change.key)
    old = _size(change.namespace, change.key, before) if before is not None else 0
    if change.value is None:
        return -old
    return _size(change.namespace, change.key, change.value) - old


def _size(namespace: str, key: str, value: str) -> int:
    texts = (namespace, key, value)
    return PAIR_SIZE + sum(len(each.encode("utf-8", "surrogatepass")) for each in texts)


def _answer(change: _PairChange, failure: BrokerRefusal | None) -> None:
    if change.done.done():  # its request was cancelled
        return
    if failure is None:
        change.done.set_result(None)
    else:
        change.done.set_exception(failure)


def _refusal(why: str) -> BrokerRefusal:
    return BrokerRefusal(ResponseCode.SYSTEM_ERROR, why)


def _parse(data: bytes) -> Table:
    try:
        value = json.loads(data)
    except RecursionError as error:
        raise ValueError("its JSON is nested too deeply") from error
    table = value.get("configTable") if isinstance(value, dict) else None
    if not isinstance(table, dict) or not all(isinstance(x, dict) for x in table.values()):
        raise ValueError("no configTable of namespaces in it")
    return {
        str(namespace): {str(key): str(item) for key, item in pairs.items()}
        for namespace, pairs in table.items()
    }
