"""What stands where a process expects a file of its own: a pipe, a socket, a folder, 2 GiB of
nothing. Each is refused by name; none makes the process wait, or fills its memory."""

import asyncio
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from batonmq.auth.audit import AuditLog
from batonmq.broker.tables.consumer_offset import ConsumerOffsetManager
from batonmq.client.consumer.offset_store import LocalOffsetStore
from batonmq.controller.raft.journal import DurableJournal, VoteFile
from batonmq.controller.raft.membership import Membership, check_members
from batonmq.controller.raft.snapshot import FileSnapshots
from batonmq.epoch.file_cache import EpochFileCache, RedoFile
from batonmq.history.event import HistoryEvent
from batonmq.history.file import HistoryFile
from batonmq.namesrv.kv_config import KVConfig
from batonmq.protocol.errors import BatonError
from batonmq.replicas_manager.identity import IdentityFile, IncarnationLog, RoleFile
from batonmq.runtime import disk
from batonmq.runtime.durable_file import replace_file, replace_with_twin
from batonmq.runtime.read_faults import ReadFault
from batonmq.runtime.tls import ClientTls, TlsError, client_context, read_pem
from batonmq.store.checkpoint import StoreCheckpoint
from batonmq.store.queue_positions import QueuePositions
from batonmq.store.suspicion import RunMark, SuspectMark


def unexpected(*given: object) -> None:
    raise AssertionError(given)


def snapshots(path: Path) -> object:
    return FileSnapshots(
        path,
        capture=dict,
        restore=unexpected,
        holds=lambda index, term: False,
        on_fatal=unexpected,  # type: ignore[arg-type]  # it returns
    )


READERS: dict[str, Callable[[Path], object]] = {
    "abort": RunMark.read,
    "brokerIdentity": lambda path: IdentityFile(path, "c", "b").load(),
    "checkpoint": StoreCheckpoint,
    "consumerOffset.json": lambda path: ConsumerOffsetManager(path).load(),
    "epochFileCheckpoint": EpochFileCache,
    "epochFileCheckpoint.redo": lambda path: RedoFile(path).load(b""),
    "g.json": lambda path: asyncio.run(
        LocalOffsetStore(path.parents[1], path.parent.name, "g").load()
    ),
    "journal": lambda path: DurableJournal(path.parent, None, unexpected),  # type: ignore[arg-type]
    "kvConfig.json": lambda path: KVConfig(path).load(),
    "lives": lambda path: IncarnationLog(path).begin("life"),
    "masterEpoch": lambda path: RoleFile(path).load(),
    "members": lambda path: check_members(path.parent, Membership("c", ("n0@h:1",))),
    "meta": lambda path: VoteFile(path, unexpected).load(),
    "queuePositions": QueuePositions,
    "read_fault": ReadFault.read,
    "snapshot": snapshots,
    "suspect": SuspectMark,
    "tls.pem": lambda path: read_pem(str(path)),
    "trust.pem": lambda path: client_context(ClientTls(trust_cert_path=str(path))),
    "cert.pem": lambda path: client_context(ClientTls(cert_path=str(path))),
}


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))


def make_sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 2 << 30)


KINDS: dict[str, tuple[Callable[[Path], None], str]] = {
    "pipe": (make_pipe, "is no regular file|No such device"),
    "socket": (make_socket, "is no regular file|No such device"),
    "folder": (Path.mkdir, "Is a directory"),
    "2 GiB": (make_sparse, r"it has 2147483648 bytes, allowed are 1073741824"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", READERS)
def test_what_is_no_file_of_ours_is_refused_by_name(tmp_path: Path, name: str, kind: str) -> None:
    make, why = KINDS[kind]
    path = tmp_path / name
    make(path)
    with pytest.raises((OSError, BatonError), match=why) as refused:
        READERS[name](path)
    told = refused.value
    text = str(told) if isinstance(told, TlsError) else disk.described(told)
    assert name in text


@pytest.mark.parametrize("write", [replace_file, replace_with_twin])
def test_a_pipe_at_the_name_of_a_temporary_file_is_refused_at_once(
    tmp_path: Path, write: Callable[[Path, bytes], None]
) -> None:
    os.mkfifo(tmp_path / "topics.json.tmp")
    with pytest.raises(OSError, match=r"No such device or address: .*topics\.json\.tmp"):
        write(tmp_path / "topics.json", b"{}")


def test_a_history_without_a_line_end_is_put_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Zeros, as a loss of power leaves them. To look for the line end took hours: each block was
    joined with all that had been read before it."""
    path = tmp_path / "history-n0.jsonl"
    make_sparse(path)
    history = HistoryFile(path)
    history.close()
    assert path.stat().st_size == 0
    assert "without a line end; move this file aside" in caplog.text
    assert [each.name for each in tmp_path.iterdir() if each.stat().st_size] == [
        "history-n0.000001.jsonl"
    ]


def test_a_history_that_is_a_pipe_keeps_no_controller_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "history-n0.jsonl")
    history = HistoryFile(tmp_path / "history-n0.jsonl")
    long = HistoryEvent(log="a", raft_index=1, time_ms=1, kind="elected", reason="x" * (1 << 20))
    with pytest.raises(BlockingIOError):
        history.append([long])


def test_an_audit_log_that_is_a_pipe_waits_for_its_reader_without_the_process(
    tmp_path: Path,
) -> None:
    path = tmp_path / "audit.log"
    os.mkfifo(path)
    audit = AuditLog(path)
    assert "No such device" in audit.failure
    audit.close()
