"""The durable facts of one broker: its identity, its processes, and the highest masterEpoch.

`brokerIdentity` holds `cluster#name#id` and `brokerIdentity-temp` holds `cluster#name#id#code`, one
line without a newline, byte-compatible with Java (`BrokerMetadata`, `TempBrokerMetadata`).
`brokerIdentity-secret` is ours: it proves to the controllers that the id belongs to this folder
(R59).

Invariant: the check code is durable before an id is requested, and stays until the id is durable,
so a request repeated after a lost answer gives the same id. In Java a broker first asks for the
next id; here the controller picks one, so our temporary file has id 0 until then.
"""

from __future__ import annotations

import os
import secrets
import threading
import zlib
from dataclasses import dataclass, field
from pathlib import Path

from batonmq.protocol.errors import BatonError
from batonmq.protocol.numbers import whole_number
from batonmq.runtime import disk
from batonmq.runtime.durable_file import remove_file, replace_file, write_all

TEMP_SUFFIX = "-temp"
SECRET_SUFFIX = "-secret"
_SEPARATOR = "#"
_SLOT_SIZE = 64


@dataclass(frozen=True, slots=True)
class LoadedIdentity:
    """`broker_id` 0: none is assigned yet, and `check_code` is in the temporary file."""

    broker_id: int
    check_code: str
    folder_secret: str = field(repr=False)


class IdentityFile:
    """The files `brokerIdentity` (`path`) and `brokerIdentity-temp`."""

    def __init__(self, path: Path, cluster_name: str, broker_name: str) -> None:
        for key, name in (("brokerClusterName", cluster_name), ("brokerName", broker_name)):
            # The separator of the line, which cannot be escaped.
            if not name or _SEPARATOR in name:
                raise ValueError(f"{key}={name!r}: must not be empty nor contain '#'")
        self.path = path
        self.temp_path = path.with_name(path.name + TEMP_SUFFIX)
        self.secret_path = path.with_name(path.name + SECRET_SUFFIX)
        self._cluster_name = cluster_name
        self._broker_name = broker_name

    def load(self) -> LoadedIdentity:
        """Loads the identity. Without one, creates a check code and the folder's secret, durably.
        Raises IdentityError if a file contradicts the configuration."""
        fields = self._read(self.path, 3)
        if fields is not None:
            broker_id = whole_number(fields[2])
            if broker_id is None or broker_id < 1:
                raise self._unreadable(self.path, _SEPARATOR.join(fields))
            # A crash between the two files left the temporary one, which is no longer needed.
            remove_file(self.temp_path)
            return LoadedIdentity(broker_id, "", self._folder_secret())
        fields = self._read(self.temp_path, 4)
        # Keep an existing code: an id may have been assigned for it.
        if fields is None or not fields[3]:
            check_code = secrets.token_hex(16)
            parts = (self._cluster_name, self._broker_name, "0", check_code)
            replace_file(self.temp_path, _SEPARATOR.join(parts).encode())
        else:
            check_code = fields[3]
        return LoadedIdentity(0, check_code, self._folder_secret())

    def _folder_secret(self) -> str:
        try:
            secret = disk.read_bytes(self.secret_path).decode("ascii", errors="replace").strip()
        except FileNotFoundError:
            secret = ""
        if not secret:
            secret = secrets.token_hex(32)
            # Anyone who can read it can claim this broker's id (R59).
            replace_file(self.secret_path, secret.encode(), mode=0o600)
        return secret

    def save(self, broker_id: int) -> None:
        """Makes the assigned id durable, then removes the temporary file. Raises OSError."""
        line = _SEPARATOR.join((self._cluster_name, self._broker_name, str(broker_id)))
        # In this order: a crash in between leaves the id. In the other order neither would be left,
        # and this folder would get a second id.
        replace_file(self.path, line.encode())
        remove_file(self.temp_path)

    def _read(self, path: Path, count: int) -> list[str] | None:
        """The fields of one file; None if it is missing (or temporary and torn)."""
        try:
            text = disk.read_bytes(path).decode()
        except FileNotFoundError:
            return None
        except UnicodeDecodeError as error:
            raise self._unreadable(path, repr(error.object[:80])) from error
        fields = text.strip().split(_SEPARATOR)
        if len(fields) != count:
            if path == self.temp_path:
                # Java writes this file in place, so it may be torn: no id was requested with it.
                return None
            raise self._unreadable(path, text[:200])
        if fields[0] != self._cluster_name or fields[1] != self._broker_name:
            raise IdentityError(
                path,
                f"brokerClusterName={fields[0]} brokerName={fields[1]}",
                f"brokerClusterName={self._cluster_name} brokerName={self._broker_name}",
                "this data folder belongs to another broker: correct brokerClusterName and "
                "brokerName (or storePathRootDir), or move the whole data folder aside (batonmq "
                "moveAside DIR) to join as a new replica: its log is another group's",
            )
        return fields

    def _unreadable(self, path: Path, found: str) -> IdentityError:
        return IdentityError(
            path,
            repr(found),
            f"{self._cluster_name}#{self._broker_name}#<id>",
            "not an identity: restore the file, or move the whole data folder aside (batonmq "
            "moveAside DIR) to join as a new replica",
        )


class RoleFile:
    """The file with the highest masterEpoch that this replica accepted (R2). Two slots of 64 bytes
    with the text `epoch crc32` are written in turn: an fdatasync in place takes 0.1 ms, replacing
    the file would add 4 ms to every failover. A slot lies in one sector, so a crash leaves it old
    or new; any other content is damage.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._next_slot = 0
        self._stored = 0
        # The executor keeps a write that found no thread, and may run it beside the next one.
        self._writing = threading.Lock()

    def load(self) -> int:
        """Returns the epoch; creates a missing file and returns 0. Raises RoleFileError,
        OSError."""
        try:
            data = disk.read_bytes(self.path)
        except FileNotFoundError:
            replace_file(self.path, 2 * _slot(0))
            return 0
        if len(data) != 2 * _SLOT_SIZE:
            raise RoleFileError(self.path, f"{len(data)} bytes instead of {2 * _SLOT_SIZE}")
        epochs = [self._read_slot(data, number) for number in (0, 1)]
        # Overwrite the older slot, so that a torn write leaves the newer one.
        self._next_slot = 0 if epochs[0] <= epochs[1] else 1
        self._stored = max(epochs)
        return self._stored

    def store(self, master_epoch: int) -> None:
        """Durable on return; `load` comes first. Raises OSError."""
        with self._writing:
            if master_epoch < self._stored:  # it comes late, and must not overwrite an older slot
                return
            fd = disk.open(self.path, os.O_WRONLY)
            try:
                write_all(fd, _slot(master_epoch), self._next_slot * _SLOT_SIZE)
                disk.fdatasync(fd)
            finally:
                disk.close(fd)
            # Only after the sync: a failed write is repeated in the same slot, and the other stays
            # whole.
            self._next_slot, self._stored = 1 - self._next_slot, master_epoch

    def _read_slot(self, data: bytes, number: int) -> int:
        slot = data[number * _SLOT_SIZE : (number + 1) * _SLOT_SIZE]
        digits = slot.split(b" ", 1)[0]
        if not digits.isdigit() or _slot(int(digits)) != slot:
            raise RoleFileError(self.path, f"damaged at byte {number * _SLOT_SIZE}")
        return int(digits)


def _slot(master_epoch: int) -> bytes:
    digits = b"%d" % master_epoch
    return (b"%b %08x" % (digits, zlib.crc32(digits))).ljust(_SLOT_SIZE - 1) + b"\n"


_UNKNOWN = "?"
"""Recorded as the oldest incarnation if an older version, which recorded none, wrote this
folder."""
INCARNATIONS_MAX = 64
"""The file also has incarnations that ended before they could register. If there are more than this
many in a row, because no controller answers, the second and following ones are dropped."""


class IncarnationLog:
    """The file of the processes that wrote in this data folder; it shows that a folder was restored
    from a backup (R17). One incarnation per line, the newest last. The controllers remember the
    incarnation that registered last. A folder that never had it is an older copy: identity, log id
    and checksums are valid, but what that incarnation acknowledged is missing. Once the present
    incarnation is registered, no earlier one matters. Until then the oldest in the file is the last
    that is known to have registered; later ones may have registered and ended before the reply
    arrived.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def begin(self, incarnation: str) -> tuple[str, ...]:
        """Adds `incarnation` durably, before it can acknowledge anything. Returns the earlier ones,
        oldest first; empty if it is unknown which one registered last. Raises OSError."""
        try:
            earlier = tuple(disk.read_bytes(self.path).decode("ascii", errors="replace").split())
        except FileNotFoundError:
            earlier = (_UNKNOWN,)
        kept = earlier if incarnation in earlier else (*earlier, incarnation)  # if done again
        if len(kept) > INCARNATIONS_MAX:
            # The oldest stays: it is the last one that is known to have registered.
            kept = (kept[0], *kept[1 - INCARNATIONS_MAX :])
        self._write(*kept)
        return () if earlier[:1] == (_UNKNOWN,) else earlier

    def registered(self, incarnation: str) -> None:
        """The controllers have registered `incarnation`: drops the earlier ones. Raises OSError."""
        self._write(incarnation)

    def _write(self, *incarnations: str) -> None:
        replace_file(self.path, "".join(f"{name}\n" for name in incarnations).encode())


class IdentityError(BatonError):
    """The identity on disk contradicts the configuration, or cannot be read. `advice` says what can
    be done."""

    def __init__(self, file: Path, found: str, configured: str, advice: str) -> None:
        super().__init__(f"{file}: holds {found}, configured is {configured}: {advice}")


class RoleFileError(BatonError):
    """The file with the highest accepted masterEpoch cannot be read. Without it the broker could
    follow a deposed master (R2), so it does not start."""

    def __init__(self, file: Path, what: str) -> None:
        super().__init__(
            f"{file}: {what}; it holds the highest masterEpoch that this replica accepted. Restore"
            " it, or empty this replica's data folder and let it copy its master"
        )
