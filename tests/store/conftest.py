"""A store in a temporary folder, with small files, that can be killed and opened again."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from threading import Lock
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from batonmq.protocol.records.codec import NewMessage, decode_records
from batonmq.protocol.tags import tags_code
from batonmq.store import commit_log
from batonmq.store.appender import PutResult
from batonmq.store.config import StoreConfig
from batonmq.store.message_store import MessageStore
from batonmq.store.recovery import ConfirmedBySet, StartConfirmRule

HOST = b"\x7f\x00\x00\x01\x00\x00\x2a\x9f"
START_MS = 1_700_000_000_000


BY_SET = ConfirmedBySet()


class StoreRig:
    """Opens stores under one folder; closes what is still open in the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root = folder / "store-0"
        self.now_ms = START_MS
        self.disk_ratio = 0.1
        self.config = StoreConfig(
            mapped_file_size_commit_log=8192,
            mapped_file_size_consume_queue=400,
            max_hash_slot_num=100,
            max_index_num=400,
        )
        self.host = HOST
        #: Called with each store before it is opened: the place to set hooks.
        self.before_open: Callable[[MessageStore], object] = lambda store: None
        self._lives = 0
        self._open: list[MessageStore] = []

    def beside(self, name: str) -> "StoreRig":
        """The next stores are opened in a folder of that name."""
        self.root = self.folder / name
        return self

    def open(self, *, confirm_rule: StartConfirmRule = BY_SET, **config: object) -> MessageStore:
        changed = msgspec.structs.replace(self.config, store_path_root_dir=str(self.root), **config)
        store = MessageStore(
            changed,
            store_host=HOST,
            confirm_rule=confirm_rule,
            clock_ms=lambda: self.now_ms,
            disk_use_of=lambda folders: self.disk_ratio,
        )
        self.before_open(store)
        store.open()
        self._open.append(store)
        return store

    def open_master(self, **config: object) -> MessageStore:
        store = self.open(**config)
        store.prepare_master()
        return store

    def kill(self, store: MessageStore) -> None:
        """As kill -9 does: what is in files now stays, what is in memory is gone."""
        self._lives += 1
        after = self.folder / f"store-{self._lives}"
        with store.log._allocation_lock:  # a segment being allocated moves between folders
            shutil.copytree(self.root, after)
        store.abandon()
        self.root = after

    def reopen(self, store: MessageStore, **config: Any) -> MessageStore:
        """What is there after kill -9."""
        self.kill(store)
        return self.open(**config)

    def close_all(self) -> None:
        for store in self._open:
            store.abandon()

    def segment(self, number: int = 0) -> Path:
        start = number * self.config.mapped_file_size_commit_log
        return self.root / "commitlog" / f"{start:020d}"

    @staticmethod
    def put(
        store: MessageStore,
        body: bytes = b"hello",
        *,
        topic: str = "T",
        queue_id: int = 0,
        tag: str = "",
        keys: bytes | None = None,
        uniq_key: bytes | None = None,
        sys_flag: int = 0,
    ) -> PutResult:
        """Put one message, with a property string that says what the arguments say."""
        pairs = [(b"TAGS", tag.encode()), (b"KEYS", keys), (b"UNIQ_KEY", uniq_key)]
        properties = b"".join(b"%b\x01%b\x02" % (name, value) for name, value in pairs if value)
        return store.appender.put_message(
            NewMessage(
                topic,
                queue_id,
                body,
                properties,
                tags_code(tag),
                keys,
                uniq_key,
                sys_flag=sys_flag,
                born_timestamp=START_MS,
                born_host=HOST,
            )
        )

    @staticmethod
    def put_confirmed(store: MessageStore, *bodies: bytes, **message: object) -> int:
        """Put, write and confirm each body in a turn of its own; the end of the log."""
        for body in bodies:
            StoreRig.put(store, body, **message)  # type: ignore[arg-type]
            store.advance_confirm_offset(store.end_turn())
        return store.max_phy_offset

    @staticmethod
    def read_bodies(store: MessageStore, topic: str = "T", queue_id: int = 0) -> list[bytes]:
        """All visible bodies of a queue, pulled one result after another."""
        bodies: list[bytes] = []
        offset = store.queries.min_offset_in_queue(topic, queue_id)
        while True:
            result = store.queries.get_message(topic, queue_id, offset, 32)
            if not result.message_count:
                return bodies
            records = decode_records(b"".join(result.parts))
            assert [record.queue_offset for record in records] == list(
                range(records[0].queue_offset, records[0].queue_offset + len(records))
            )
            bodies += [record.body for record in records]
            offset = result.next_begin_offset

    @staticmethod
    def log_of(store: MessageStore, begin: int | None = None) -> bytes:
        """All bytes of its log, or those from `begin` on."""
        at, data = store.min_phy_offset if begin is None else begin, b""
        while view := bytes(store.log.view(at, 1 << 30)):
            data += view
            at += len(view)
        return data

    @staticmethod
    def write_queues_back(store: MessageStore) -> None:
        """Units get into their files; a checkpoint does not say so."""
        store._files.consume_queues.write_back()

    @staticmethod
    def overwrite(path: Path, position: int, data: bytes) -> None:
        with path.open("r+b") as file:
            file.seek(position)
            file.write(data)

    @staticmethod
    def flip(path: Path, position: int) -> None:
        """Change one bit of a file."""
        byte = path.read_bytes()[position]
        StoreRig.overwrite(path, position, bytes([byte ^ 0x10]))


class _AtOnce:
    """A thread that is done when it has started."""

    def __init__(self, *, target: Callable[[], None], **_: object) -> None:
        self.start = target


@pytest.fixture
def allocations_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments are made ahead in the caller: each run makes the same calls to the disk."""
    monkeypatch.setattr(commit_log, "threading", SimpleNamespace(Thread=_AtOnce, Lock=Lock))


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[StoreRig]:
    rig = StoreRig(tmp_path)
    yield rig
    rig.close_all()


@pytest.fixture
def store(rig: StoreRig) -> MessageStore:
    """A master with an empty log."""
    return rig.open_master()


@pytest.fixture
def master(store: MessageStore) -> MessageStore:
    return store


@pytest.fixture(scope="session")
def rigs_in(tmp_path_factory: pytest.TempPathFactory) -> object:
    """`with rigs_in() as make_rig`: fresh rigs for each example of a property test."""

    @contextmanager
    def fresh() -> Iterator[Callable[[], StoreRig]]:
        folder = tmp_path_factory.mktemp("rig")
        rigs: list[StoreRig] = []

        def make_rig() -> StoreRig:
            rigs.append(StoreRig(folder / str(len(rigs))))
            return rigs[-1]

        try:
            yield make_rig
        finally:
            for rig in rigs:
                rig.close_all()
            shutil.rmtree(folder)

    return fresh


@pytest.fixture(scope="session")
def store_in(rigs_in: Callable[[], AbstractContextManager[Callable[[], StoreRig]]]) -> object:
    """`with store_in() as (rig, store)`: a fresh master for each example of a property test."""

    @contextmanager
    def fresh() -> Iterator[tuple[StoreRig, MessageStore]]:
        with rigs_in() as make_rig:
            rig = make_rig()
            yield rig, rig.open_master()

    return fresh
