"""The durable facts of one broker: who it is, and the highest masterEpoch it accepted (R2).

`brokerIdentity` holds `cluster#name#id` and `brokerIdentity-temp` holds `cluster#name#id#code`,
one line without a newline, byte-compatible with Java (`BrokerMetadata`, `TempBrokerMetadata`).
Invariant: the check code is durable before an id is asked for and stays until the id is durable,
so asking again after a lost answer gives the same id and none leaks. Java asks for a next id
first; here the controller picks one, so our temporary file names id 0 until then.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from pathlib import Path

from epoch.durable_file import remove_file, replace_file
from replicas_manager.errors import IdentityError, RoleFileError

TEMP_SUFFIX = "-temp"
_SEPARATOR = "#"


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
    """The highest masterEpoch that this replica accepted, one JSON object at `path` (R2)."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def load(self) -> int:
        """0 if the file is missing. Raises RoleFileError if it cannot be understood."""
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return 0
        try:
            value = json.loads(data)
        except ValueError as error:
            raise RoleFileError(self.path, f"not JSON ({error})") from error
        epoch = value.get("masterEpoch") if isinstance(value, dict) else None
        if not isinstance(epoch, int) or isinstance(epoch, bool) or epoch < 0:
            raise RoleFileError(self.path, f"no masterEpoch in {data[:80]!r}")
        return epoch

    def store(self, master_epoch: int) -> None:
        """Durable on return. Raises OSError."""
        text = json.dumps({"v": 1, "masterEpoch": master_epoch})
        replace_file(self.path, text.encode())
