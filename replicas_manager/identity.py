"""The durable facts of one broker: who it is, and the highest masterEpoch it accepted (R2).

`brokerIdentity` holds `cluster#name#id` and `brokerIdentity-temp` holds `cluster#name#id#code`,
one line without a newline, byte-compatible with Java (`BrokerMetadata`, `TempBrokerMetadata`).
Invariant: the check code is durable before an id is asked for and stays until the id is durable,
so asking again after a lost answer gives the same id and none leaks. Java asks for a next id
first; here the controller picks one, so our temporary file names id 0 until then.
"""

from __future__ import annotations

import os
import secrets
import zlib
from dataclasses import dataclass
from pathlib import Path

from epoch.durable_file import remove_file, replace_file, write_all
from replicas_manager.errors import IdentityError, RoleFileError

TEMP_SUFFIX = "-temp"
_SEPARATOR = "#"
_SLOT_SIZE = 64


@dataclass(frozen=True, slots=True)
class LoadedIdentity:
    """`broker_id` 0: none was assigned yet; `check_code` then stands in the temporary file."""

    broker_id: int
    check_code: str


class IdentityFile:
    """`brokerIdentity` and its temporary sibling at `path`."""

    def __init__(self, path: Path, cluster_name: str, broker_name: str) -> None:
        for key, name in (("brokerClusterName", cluster_name), ("brokerName", broker_name)):
            if not name or _SEPARATOR in name:
                raise ValueError(f"{key}={name!r}: must not be empty nor contain '#'")
        self.path = path
        self.temp_path = path.with_name(path.name + TEMP_SUFFIX)
        self._cluster_name = cluster_name
        self._broker_name = broker_name
        self._check_code = ""

    def load(self) -> LoadedIdentity:
        """Who this broker is. Without an identity a check code is made, or taken up, durably.

        Raises IdentityError if a file disagrees with the configuration.
        """
        fields = self._read(self.path, 3)
        if fields is not None:
            if not fields[2].isdigit() or int(fields[2]) < 1:
                raise self._unreadable(self.path, _SEPARATOR.join(fields))
            # A crash between the two files leaves the temporary one behind: its work is done.
            remove_file(self.temp_path)
            return LoadedIdentity(int(fields[2]), "")
        fields = self._read(self.temp_path, 4)
        if fields is None or not fields[3]:
            self._check_code = secrets.token_hex(16)
            self._write_temp(0)
        else:
            self._check_code = fields[3]
        return LoadedIdentity(0, self._check_code)

    def save(self, broker_id: int) -> None:
        """Make the assigned id durable, then drop the temporary file. Raises OSError."""
        line = _SEPARATOR.join((self._cluster_name, self._broker_name, str(broker_id)))
        replace_file(self.path, line.encode())
        remove_file(self.temp_path)

    def _write_temp(self, broker_id: int) -> None:
        parts = (self._cluster_name, self._broker_name, str(broker_id), self._check_code)
        replace_file(self.temp_path, _SEPARATOR.join(parts).encode())

    def _read(self, path: Path, count: int) -> list[str] | None:
        """The fields of one file, None if it is missing (or, the temporary one, torn)."""
        try:
            text = path.read_bytes().decode()
        except FileNotFoundError:
            return None
        except UnicodeDecodeError as error:
            raise self._unreadable(path, repr(error.object[:80])) from error
        fields = text.strip().split(_SEPARATOR)
        if len(fields) != count:
            if path == self.temp_path:
                # Java writes this file in place: a torn one reserved nothing that we know of.
                return None
            raise self._unreadable(path, text[:200])
        if fields[0] != self._cluster_name or fields[1] != self._broker_name:
            raise IdentityError(
                path,
                f"brokerClusterName={fields[0]} brokerName={fields[1]}",
                f"brokerClusterName={self._cluster_name} brokerName={self._broker_name}",
                "this data folder belongs to another broker: correct brokerClusterName and "
                "brokerName (or storePathRootDir), or remove the file to join as a new replica",
            )
        return fields

    def _unreadable(self, path: Path, found: str) -> IdentityError:
        return IdentityError(
            path,
            repr(found),
            f"{self._cluster_name}#{self._broker_name}#<id>",
            "not an identity: restore the file, or remove it to join as a new replica",
        )


class RoleFile:
    """The highest masterEpoch that this replica accepted, at `path` (R2).

    Two slots of 64 bytes, `epoch crc32` in text, written in turn: replacing the file would put
    4 ms of directory fsyncs into every failover, an fdatasync in place costs 0.1 ms. A slot lies in
    one sector, so a crash leaves it old or new; a slot that is neither is damage.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._next_slot = 0

    def load(self) -> int:
        """0 if the file is missing; it is then made. Raises RoleFileError, OSError."""
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            replace_file(self.path, 2 * _slot(0))
            return 0
        if len(data) != 2 * _SLOT_SIZE:
            raise RoleFileError(self.path, f"{len(data)} bytes instead of {2 * _SLOT_SIZE}")
        epochs = [self._read_slot(data, number) for number in (0, 1)]
        self._next_slot = 0 if epochs[0] <= epochs[1] else 1
        return max(epochs)

    def store(self, master_epoch: int) -> None:
        """Durable on return; `load` comes first. Raises OSError."""
        fd = os.open(self.path, os.O_WRONLY)
        try:
            write_all(fd, _slot(master_epoch), self._next_slot * _SLOT_SIZE)
            os.fdatasync(fd)
        finally:
            os.close(fd)
        self._next_slot = 1 - self._next_slot

    def _read_slot(self, data: bytes, number: int) -> int:
        slot = data[number * _SLOT_SIZE : (number + 1) * _SLOT_SIZE]
        digits = slot.split(b" ", 1)[0]
        if not digits.isdigit() or _slot(int(digits)) != slot:
            raise RoleFileError(self.path, f"damaged at byte {number * _SLOT_SIZE}")
        return int(digits)


def _slot(master_epoch: int) -> bytes:
    digits = b"%d" % master_epoch
    return (b"%b %08x" % (digits, zlib.crc32(digits))).ljust(_SLOT_SIZE - 1) + b"\n"
