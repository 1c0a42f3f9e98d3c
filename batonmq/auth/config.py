"""The section `auth:` of brokers and name servers, with RocketMQ's keys. Origin: AuthConfig."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from batonmq.auth.policy import SUPER, User, check_user
from batonmq.auth.signature import Credentials
from batonmq.protocol.errors import BrokerRefusal
from batonmq.runtime.section import Section

S = TypeVar("S", bound=msgspec.Struct)


class _InitUser(msgspec.Struct):
    username: str
    password: str


class _InnerUser(msgspec.Struct, rename="camel"):
    access_key: str
    secret_key: str
    next_secret_key: str = ""


class AuthConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """`init_authentication_user`: JSON `{"username","password"}`, a super user that is made if it
    is missing. `inner_client_authentication_credentials`: JSON `{"accessKey","secretKey"}`, what
    the nodes sign with, the same in every file; `nextSecretKey` in it is believed as well, so that
    the secret can be changed file by file. Whitelists: request codes, separated by commas.
    Raises ValueError, without a secret in its text."""

    authentication_enabled: bool = False
    authorization_enabled: bool = False
    init_authentication_user: str = ""
    inner_client_authentication_credentials: str = ""
    authentication_whitelist: str = ""
    authorization_whitelist: str = ""
    audit_log_path: str = ""
    audit_only: bool = False
    """What would be refused is written to the audit log, and passes: to turn users on without a
    refusal."""

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
        user = self.node_user
        return Credentials(access_key=user.username, secret_key=user.password)

    @property
    def node_user(self) -> User:
        """As which nodes are believed; with two secrets while one is being changed."""
        if not self.inner_client_authentication_credentials:
            raise ValueError(
                "authenticationEnabled needs innerClientAuthenticationCredentials, the same in the"
                ' file of every broker and name server: {"accessKey":"…","secretKey":"…"}'
            )
        found = _read(
            _InnerUser,
            self.inner_client_authentication_credentials,
            'the credentials of the nodes: allowed is {"accessKey":"…","secretKey":"…"}',
        )
        return _checked(
            User(
                username=found.access_key,
                password=found.secret_key,
                next_password=found.next_secret_key,
                user_type=SUPER,
            )
        )

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


def _checked(user: User) -> User:
    try:
        return check_user(user)
    except BrokerRefusal as refusal:
        raise ValueError(refusal.remark) from None


def _codes(key: str, text: str) -> frozenset[int]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if bad := [part for part in parts if not (part.isascii() and part.isdecimal())]:
        raise ValueError(f"{key} has {bad[0]!r}: request codes are allowed, separated by commas")
    return frozenset(map(int, parts))
