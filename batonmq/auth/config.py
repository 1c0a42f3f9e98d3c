"""The section `auth:` of brokers and name servers, with RocketMQ's keys. Origin: AuthConfig."""

from __future__ import annotations

from pathlib import Path
from typing import Final, TypeVar

import msgspec

from batonmq.auth.policy import SUPER, User, check_user
from batonmq.auth.rights import ALWAYS_CHECKED
from batonmq.auth.signature import Credentials
from batonmq.protocol.errors import BrokerRefusal
from batonmq.runtime.secret_file import SecretFileError, Secrets, read_private
from batonmq.runtime.section import Section

CREDENTIALS_FILE: Final = "innerClientAuthenticationCredentialsFile"

S = TypeVar("S", bound=msgspec.Struct)


class _InitUser(msgspec.Struct):
    username: str
    password: str


class NodeUser(msgspec.Struct, rename="camel", omit_defaults=True):
    """The user as which nodes sign. While its secret is replaced, `next` or `former` is accepted as
    well: see `secret_file`."""

    access_key: str
    secret_key: str
    next_secret_key: str = ""
    former_secret_key: str = ""

    @property
    def secrets(self) -> Secrets:
        return Secrets(self.secret_key, self.next_secret_key, self.former_secret_key)

    @property
    def credentials(self) -> Credentials:
        """What this node signs with."""
        return Credentials(access_key=self.access_key, secret_key=self.secret_key)

    def with_secrets(self, secrets: Secrets) -> NodeUser:
        return NodeUser(self.access_key, *secrets)


class AuthConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """`init_authentication_user`: JSON `{"username","password"}`, a super user that is made if it
    is missing. `inner_client_authentication_credentials`: JSON `{"accessKey","secretKey"}`, what
    the nodes sign with, the same in every file; `nextSecretKey` or `formerSecretKey` in it is
    believed as well. `inner_client_authentication_credentials_file`: a file of mode 0600 with the
    same JSON instead, which is followed. Whitelists: request codes, separated by commas.
    Raises ValueError, without a secret in its text."""

    authentication_enabled: bool = False
    authorization_enabled: bool = False
    init_authentication_user: str = ""
    inner_client_authentication_credentials: str = ""
    inner_client_authentication_credentials_file: str = ""
    authentication_whitelist: str = ""
    authorization_whitelist: str = ""
    audit_log_path: str = ""
    ha_allow_unproven: bool = False
    """HA peers without TLS need not prove that they know the secret of the nodes: any host that
    reaches an HA port can read the log."""
    audit_only: bool = False
    """Requests that would be refused are written to the audit log and served, except those about
    users: for a first try of users and rights."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.authorization_enabled and not self.authentication_enabled:
            raise ValueError(
                "authorizationEnabled without authenticationEnabled believes any name: set both"
            )
        _ = self.not_authenticated, self.not_authorized, self.first_user
        if self.authentication_enabled:
            _ = self.node

    @property
    def node(self) -> Credentials:
        """What this node signs with."""
        return self.node_user().credentials

    def node_user(self) -> NodeUser:
        """As its file says now, if it is in one. Raises ValueError."""
        text, file = (
            self.inner_client_authentication_credentials,
            self.inner_client_authentication_credentials_file,
        )
        if bool(text) == bool(file):
            raise ValueError(
                "authenticationEnabled needs innerClientAuthenticationCredentials, the same in the"
                ' file of every broker and name server: {"accessKey":"…","secretKey":"…"}; or'
                " innerClientAuthenticationCredentialsFile, which names a file with that"
            )
        try:
            return read_node_user(Path(file).expanduser()) if file else _node_user(text)
        except SecretFileError as error:
            raise ValueError(str(error)) from None

    @property
    def first_user(self) -> User | None:
        if not self.init_authentication_user:
            return None
        found = _read(
            _InitUser,
            self.init_authentication_user,
            'the first user: allowed is {"username":"…","password":"…"}',
        )
        return _checked(User(username=found.username, password=found.password, user_type=SUPER))

    @property
    def not_authenticated(self) -> frozenset[int]:
        return _codes("authenticationWhitelist", self.authentication_whitelist)

    @property
    def not_authorized(self) -> frozenset[int]:
        return _codes("authorizationWhitelist", self.authorization_whitelist)


def _read(kind: type[S], text: str, allowed: str) -> S:
    try:
        return msgspec.json.decode(text.encode(), type=kind)
    except (msgspec.DecodeError, UnicodeError):  # whose texts may show a secret
        raise ValueError(allowed) from None


def read_node_user(path: Path) -> NodeUser:
    """Raises SecretFileError."""
    try:
        return _node_user(read_private(path).decode())
    except ValueError as error:
        raise SecretFileError(path, str(error)) from None


def _node_user(text: str) -> NodeUser:
    allowed = 'the credentials of the nodes: allowed is {"accessKey":"…","secretKey":"…"}'
    found = _read(NodeUser, text, allowed)
    if found.next_secret_key and found.former_secret_key:
        raise ValueError(f"{allowed}, and one of nextSecretKey and formerSecretKey")
    _ = found.credentials  # neither of the two may be empty
    _checked(known_as(found))
    return found


def known_as(node: NodeUser) -> User:
    """The user that others believe."""
    # KnownUser tries `next_password` first.
    new, old = node.secret_key, node.secrets.other
    if not old:
        new, old = "", new
    return User(username=node.access_key, password=old, next_password=new, user_type=SUPER)


def _checked(user: User) -> User:
    try:
        return check_user(user)
    except BrokerRefusal as refusal:
        raise ValueError(refusal.remark) from None


def _codes(key: str, text: str) -> frozenset[int]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if bad := [part for part in parts if not (part.isascii() and part.isdecimal())]:
        raise ValueError(f"{key} has {bad[0]!r}: request codes are allowed, separated by commas")
    codes = frozenset(map(int, parts))
    if bad_codes := sorted(codes & ALWAYS_CHECKED):
        raise ValueError(f"{key} has {bad_codes[0]}: requests about users are always checked")
    return codes
