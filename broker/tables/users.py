"""Users and their policies: one table for a broker group, changed and replicated (R31).

A change is a record of the system topic `rmq_sys_BATON_USERS`, so it is replicated, confirmed and
truncated as messages are, and a failover changes no decision. What lies before a slave's first byte
is fetched with the other tables.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, Final

import msgspec

from batonmq.auth.policy import Rulebook, User, UserWrapper
from batonmq.broker.tables.config_file import NamedTable, Unwritten
from batonmq.protocol.system_record import SystemRecord

log = logging.getLogger(__name__)

USERS_MAX: Final = 10_000


class UserChange(SystemRecord, frozen=True, kw_only=True, rename="camel"):
    """One record: users as they are from now on, and those that are gone."""

    KIND: ClassVar = "user"
    users: list[User] = msgspec.field(default_factory=list)
    deleted: list[str] = msgspec.field(default_factory=list)


class UserTable(NamedTable[UserWrapper, User]):
    """User name -> User. One thread only."""

    # The file has the secrets: a signature cannot be checked without them.
    MODE: ClassVar[int] = 0o600

    def __init__(self, path: Path) -> None:
        super().__init__(path, UserWrapper, {})
        self._dirty = False  # without users there is no file
        self.rulebook: Rulebook | None = None
        """Follows the table; None where no user is checked."""

    @staticmethod
    def name_of(config: User) -> str:
        return config.username

    def _take_loaded(self, body: UserWrapper) -> None:
        self._adopt_loaded(body.users, body.data_version)
        self.follow(self.rulebook)

    def follow(self, rulebook: Rulebook | None) -> None:
        self.rulebook = rulebook
        if rulebook is not None:
            rulebook.replace(self._table)

    def wrapper(self) -> UserWrapper:
        return UserWrapper(data_version=self.data_version, users=dict(self._table))

    def replace_all(self, wrapper: UserWrapper) -> bool:
        """Takes over the master's table; False if it was the same already."""
        changed = self._adopt(wrapper.users, wrapper.data_version)
        if changed:
            self.follow(self.rulebook)
        return changed

    def _new_version(self, state_version: int | None = None) -> None:
        super()._new_version(state_version)
        self.follow(self.rulebook)


class UserService:
    """The one way to change the table. `append` puts a record into the log and returns its end;
    `changed` is called after each change."""

    def __init__(
        self, table: UserTable, append: Callable[[bytes], int], changed: Callable[[], None]
    ) -> None:
        self.table = table
        self._append = append
        self._changed = changed
        self.unwritten = Unwritten()

    def put(self, user: User) -> int:
        """Makes or changes a user; safe once the returned offset is confirmed."""
        undo = self.table.undo_of([user.username])
        # First: if no record can be put this raises, and the table must not have changed.
        end = self._append(UserChange(users=[user]).encode())
        self.unwritten.note(end, undo)
        self._apply(UserChange(users=[user]))
        return end

    def delete(self, name: str) -> int:
        """Removes a user with its policies; as `put`."""
        undo = self.table.undo_of([name])
        end = self._append(UserChange(deleted=[name]).encode())
        self.unwritten.note(end, undo)
        self._apply(UserChange(deleted=[name]))
        return end

    def take_over_record(self, body: bytes, end_offset: int) -> None:
        self._apply(UserChange.decode(body))

    def own_record_confirmed(self, body: bytes, end_offset: int) -> None:
        self.unwritten.written(end_offset)  # applied when it was put

    def apply_record(self, body: bytes, end_offset: int) -> None:
        self.unwritten.written(end_offset)
        self._apply(UserChange.decode(body))

    def _apply(self, change: UserChange) -> None:
        changed = self.table.put_all(change.users)
        for user in change.users:
            log.info("user_changed user=%s type=%s", user.username, user.user_type)
        for name in change.deleted:
            changed = self.table.delete(name) or changed
            log.info("user_deleted user=%s", name)
        if changed:
            self._changed()
