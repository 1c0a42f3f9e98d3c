"""Admin calls about users and their policies. Origin: DefaultMQAdminExtImpl."""

from batonmq.auth.policy import AclInfo, PolicyEntry, PolicyInfo, UserInfo, subject_of
from batonmq.client.admin.cluster import ClusterAdmin
from batonmq.client.admin.requests import AdminRequests
from batonmq.protocol.codes import RequestCode
from batonmq.protocol.json_body import decode_json


class UserAdmin:
    """Each broker group has its own table, changed by its master, so changes are sent to all
    masters."""

    def __init__(self, requests: AdminRequests, cluster: ClusterAdmin) -> None:
        self._requests = requests
        self._cluster = cluster

    async def create(self, user: UserInfo) -> None:
        """No error if an equal user exists. Raises ResponseError."""
        await self._change(RequestCode.AUTH_CREATE_USER, user)

    async def create_at(self, address: str, user: UserInfo) -> None:
        """As `create`, in one broker group only."""
        name, code = user.username or "", RequestCode.AUTH_CREATE_USER
        ext = {"username": name}
        await self._requests.ask(address, code, ext, f"user {name}", body=user.encode())

    async def put_acl_at(self, address: str, acl: AclInfo) -> None:
        """Adds entries in one broker group; those with the same resource are replaced. Raises
        ResponseError."""
        ext = {"subject": acl.subject or ""}
        code = RequestCode.AUTH_UPDATE_ACL
        await self._requests.ask(address, code, ext, f"rights of {acl.subject}", body=acl.encode())

    async def update(self, user: UserInfo) -> None:
        """None leaves a field as it is. Raises ResponseError."""
        await self._change(RequestCode.AUTH_UPDATE_USER, user)

    async def delete(self, name: str) -> None:
        """Deletes the user with its rights. Raises ResponseError."""
        await self._at_masters(RequestCode.AUTH_DELETE_USER, {"username": name}, f"user {name}")

    async def rotate(self, name: str, secret: str, old_until_ms: int = 0) -> None:
        """Adds a second secret. The old one stays valid until `old_until_ms` (wall clock; 0: until
        `end_rotation`). Raises ResponseError."""
        more = {"step": "begin", "until": str(old_until_ms)}
        await self._rotation(name, more, UserInfo(password=secret).encode())

    async def end_rotation(self, name: str, *, keep_new: bool) -> None:
        """Keeps only one of the two secrets. Without a rotation it changes nothing. Raises
        ResponseError."""
        await self._rotation(name, {"step": "finish" if keep_new else "cancel"})

    async def _rotation(self, name: str, more: dict[str, str], body: bytes = b"") -> None:
        fields = {"username": name} | more
        await self._at_masters(RequestCode.BATON_ROTATE_USER, fields, f"user {name}", body)

    async def _change(self, code: RequestCode, user: UserInfo) -> None:
        name = user.username or ""
        await self._at_masters(code, {"username": name}, f"user {name}", user.encode())

    async def put_entry(self, name: str, kind: str, entry: PolicyEntry) -> None:
        """Adds an entry, or replaces the one with the same resource. Raises ResponseError."""
        subject = subject_of(name)
        acl = AclInfo(subject=subject, policies=[PolicyInfo(entries=[entry], policy_type=kind)])
        await self._at_masters(
            RequestCode.AUTH_UPDATE_ACL, {"subject": subject}, f"rights of {name}", acl.encode()
        )

    async def delete_entries(self, name: str, kind: str | None, resource: str | None) -> None:
        """Deletes one entry; without a resource, all. Raises ResponseError."""
        ext = {"subject": subject_of(name), "policyType": kind, "resource": resource}
        given = {key: value for key, value in ext.items() if value is not None}
        await self._at_masters(RequestCode.AUTH_DELETE_ACL, given, f"rights of {name}")

    async def _at_masters(
        self, code: RequestCode, ext: dict[str, str], what: str, body: bytes = b""
    ) -> None:
        # One after the other: an error names the first master that lacks the change.
        for address in (await self._cluster.masters()).values():
            await self._requests.ask(address, code, ext, what, body=body)

    async def users(self, address: str) -> list[UserInfo]:
        """The users of one broker, without passwords."""
        reply = await self._requests.ask(address, RequestCode.AUTH_LIST_USER, {}, "the users")
        return decode_json(list[UserInfo], reply.body)

    async def user(self, address: str, name: str) -> UserInfo | None:
        """A user in the table of one broker; None if it does not exist."""
        ext = {"username": name}
        reply = await self._requests.ask(address, RequestCode.AUTH_GET_USER, ext, f"user {name}")
        return UserInfo.decode(reply.body) if reply.body else None

    async def acls(self, address: str) -> list[AclInfo]:
        """The policies of one broker; users without an entry are left out."""
        reply = await self._requests.ask(address, RequestCode.AUTH_LIST_ACL, {}, "the rights")
        return decode_json(list[AclInfo], reply.body)

    async def who_am_i(self, address: str) -> tuple[UserInfo, str]:
        """The signing user and the client address, as a node sees them."""
        reply = await self._requests.ask(address, RequestCode.BATON_WHO_AM_I, {}, "the user")
        return UserInfo.decode(reply.body), reply.ext.get("peer", "")
