"""Users and policies: requests 3001 to 3010 as mqadmin sends them, and our request that names the
sender.

No answer has a password, not even for super users, so mqadmin's copyUser fails. Creating an equal
user again is no error: mqadmin sends the request to every replica, and each relays it to the
master. Origin: AdminBrokerProcessor in Java.
"""

from typing import Final

import msgspec

from batonmq.auth.guard import Guard
from batonmq.auth.policy import (
    SUPER,
    AclInfo,
    KnownUser,
    User,
    UserInfo,
    check_user,
    merged,
    rotated,
    subject_name,
    with_one_secret,
    without,
)
from batonmq.auth.signature import ACCESS_KEY
from batonmq.broker.request_fields import invalid, text
from batonmq.broker.tables.slave_sync import reply_in_turns
from batonmq.broker.tables.users import USERS_MAX, UserService
from batonmq.broker.write.write_path import WritePath
from batonmq.protocol.codes import RequestCode, ResponseCode
from batonmq.protocol.errors import BrokerRefusal
from batonmq.protocol.json_body import encode_json
from batonmq.remoting.command import RemotingCommand
from batonmq.remoting.connection import Connection, Processors
from batonmq.runtime.turns import in_turns

ACLS_AT_ONCE: Final = 16
"""Users whose policies are listed in one turn; a user may have dozens of entries."""
NO_USERS: Final = "this broker checks no users: authenticationEnabled is false"


class UserProcessor:
    """Without `guard` every request is refused, or anyone could create a user."""

    def __init__(self, path: WritePath, users: UserService, guard: Guard | None) -> None:
        self._path = path
        self._users = users
        self._guard = guard

    def register(self, processors: Processors) -> None:
        processors.register(RequestCode.AUTH_CREATE_USER, self.create_user)
        processors.register(RequestCode.AUTH_UPDATE_USER, self.update_user)
        processors.register(RequestCode.AUTH_DELETE_USER, self.delete_user)
        processors.register(RequestCode.AUTH_GET_USER, self.get_user)
        processors.register(RequestCode.AUTH_LIST_USER, self.list_users)
        processors.register(RequestCode.AUTH_CREATE_ACL, self.put_acl)
        processors.register(RequestCode.AUTH_UPDATE_ACL, self.put_acl)
        processors.register(RequestCode.AUTH_DELETE_ACL, self.delete_acl)
        processors.register(RequestCode.AUTH_GET_ACL, self.get_acl)
        processors.register(RequestCode.AUTH_LIST_ACL, self.list_acls)
        processors.register(RequestCode.BATON_ROTATE_USER, self.rotate)
        processors.register(RequestCode.BATON_GET_USERS, self.all_users)
        processors.register(RequestCode.BATON_WHO_AM_I, self.who_am_i)

    async def create_user(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        guard = self._writing()
        name = text(request, "username")
        info = UserInfo.decode_request(request.body)
        user = check_user(
            User(
                username=name,
                password=info.password or "",
                user_type=info.user_type or "Normal",
                user_status=info.user_status or "enable",
            )
        )
        known = self._users.table.get(name)
        # Who signs with that name counts as a node, which has every right.
        if guard.is_node(name):
            raise _forbidden(f"{name} is the name with which the nodes sign")
        if known is not None:
            # Without the policies, which this request cannot have.
            if msgspec.structs.replace(with_one_secret(known, new=False), policies={}) != user:
                raise _forbidden(f"user {name} is there already, and differs: use updateUser")
            user = known
        elif len(self._users.table) >= USERS_MAX:
            raise _forbidden(f"there are {USERS_MAX} users, no more are made")
        self._only_super_changes(request, guard, user)
        # Put it even if it exists: the record of an earlier request may be unconfirmed.
        return await self._put(request, user)

    async def update_user(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        """Changes the given fields. A given password becomes the only one."""
        guard = self._writing()
        known = self._known(text(request, "username"))
        info = UserInfo.decode_request(request.body)
        user = check_user(
            msgspec.structs.replace(
                with_one_secret(known, new=False) if info.password else known,
                password=info.password or known.password,
                user_type=info.user_type or known.user_type,
                user_status=info.user_status or known.user_status,
            )
        )
        self._only_super_changes(request, guard, known, user)
        if not user.is_super:
            self._not_the_last_super(known)
        return await self._put(request, user)

    async def rotate(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        """`step` begin: a second secret, the body's; the old one counts until `until`, if that is
        not 0. finish: only the new one is left, cancel: only the old one. Each step may be sent
        again."""
        guard = self._writing()
        known = self._known(text(request, "username"))
        match text(request, "step"):
            case "begin":
                secret = UserInfo.decode_request(request.body).password or ""
                if not secret:
                    raise invalid("a rotation begins with a new secret")
                user = rotated(known, secret, request.get_int("until", 0))
            case "finish" | "cancel" as step:
                user = with_one_secret(known, new=step == "finish")
            case other:
                raise invalid(f"step {other[:64]!r}: allowed are begin, finish, cancel")
        self._only_super_changes(request, guard, known)
        return await self._put(request, user)

    async def delete_user(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        """No error if the user does not exist."""
        guard = self._writing()
        name = text(request, "username")
        known = self._users.table.get(name)
        if known is not None:
            self._only_super_changes(request, guard, known)
            self._not_the_last_super(known)
        # A record in any case: the deletion by an earlier request may be unconfirmed.
        return await self._path.answer(self._users.delete(name), request, f"user {name}")

    def get_user(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        """Code 0 without a body if there is none, as in Java."""
        name, guard = text(request, "username"), self._guarded()
        # The guard also knows the user of the nodes, which no answer shows.
        user = guard.user(name) if name in self._users.table else None
        body = b"" if user is None else user.info().encode()
        return RemotingCommand.response_to(request, body=body)

    async def list_users(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        self._guarded()
        wanted = request.ext.get("filter", "")
        users = in_turns(sorted(self._users.table.table.items()))
        found = [user.info() async for name, user in users if wanted in name]
        return RemotingCommand.response_to(request, body=encode_json(found))

    async def put_acl(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        """Adds entries; an entry with an equal resource is replaced. Create and update are the
        same, as in Java."""
        guard = self._writing()
        known = self._known(subject_name(text(request, "subject")))
        user = merged(known, AclInfo.decode_request(request.body))
        self._only_super_changes(request, guard, known)
        return await self._put(request, user)

    async def delete_acl(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        guard = self._writing()
        known = self._known(subject_name(text(request, "subject")))
        ext = request.ext
        user = without(known, ext.get("policyType"), ext.get("resource"))
        self._only_super_changes(request, guard, known)
        return await self._put(request, user)

    def get_acl(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        self._guarded()
        user = self._users.table.get(subject_name(text(request, "subject")))
        body = b"" if user is None or not user.acl().policies else user.acl().encode()
        return RemotingCommand.response_to(request, body=body)

    async def list_acls(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        self._guarded()
        subject = request.ext.get("subjectFilter", "")
        resource = request.ext.get("resourceFilter", "")
        found = []
        async for name, user in in_turns(sorted(self._users.table.table.items()), ACLS_AT_ONCE):
            acl = user.acl()  # a new object for each call, so it may be changed
            for policy in acl.policies:
                policy.entries = [entry for entry in policy.entries if resource in entry.resource]
            acl.policies = [policy for policy in acl.policies if policy.entries]
            if acl.policies and subject in f"User:{name}":
                found.append(acl.encode())
        return RemotingCommand.response_to(request, body=b"[%b]" % b",".join(found))

    async def all_users(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        """The table with its secrets, for nodes of the cluster only."""
        self._guarded()
        return await reply_in_turns(request, self._users.table.wrapper())

    def who_am_i(self, request: RemotingCommand, connection: Connection) -> RemotingCommand:
        return self._guarded().who_am_i(request, connection)

    def _guarded(self) -> Guard:
        if self._guard is None:
            raise _forbidden(NO_USERS)
        return self._guard

    def _writing(self) -> Guard:
        guard = self._guarded()
        self._path.gate.require_open()
        return guard

    def _known(self, name: str) -> User:
        user = self._users.table.get(name)
        if user is None:
            raise _forbidden(f"there is no user {name[:64]!r}: create it first")
        return user

    def _only_super_changes(self, request: RemotingCommand, guard: Guard, *users: User) -> None:
        asks: KnownUser | None = guard.user(request.ext.get(ACCESS_KEY, ""))
        if any(user.user_type == SUPER for user in users) and not (
            asks is not None and asks.is_super
        ):
            raise _forbidden("only a super user makes, changes or deletes a super user")

    def _not_the_last_super(self, user: User) -> None:
        """Without one, only who has the secret of the nodes could make users."""
        if user.is_super and not any(
            other.is_super and other.username != user.username
            for other in self._users.table.table.values()
        ):
            raise _forbidden(f"{user.username} is the last super user: make another one first")

    async def _put(self, request: RemotingCommand, user: User) -> RemotingCommand:
        return await self._path.answer(self._users.put(user), request, f"user {user.username}")


def _forbidden(why: str) -> BrokerRefusal:
    return BrokerRefusal(ResponseCode.NO_PERMISSION, why)
