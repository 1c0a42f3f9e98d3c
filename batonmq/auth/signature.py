"""Signatures of remoting requests, as stock clients make them. Pure.

What is signed: the values of all fields but the signature, in the order of their names, without
separators, then the body; HMAC-SHA1 with the secret, base64. Neither the request code nor the time
is signed, so who can read a request can send it again: use TLS where the network is not trusted.
Origin: AclClientRPCHook, AclUtils, AclSigner.
"""

from __future__ import annotations

import hmac
import re
from binascii import a2b_base64, b2a_base64
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from hashlib import sha1
from typing import Final, NamedTuple

import msgspec

from batonmq.protocol.fastjson import NOT_JSON
from batonmq.remoting.command import RemotingCommand
from batonmq.remoting.headers import SendFields, SendFrame

ACCESS_KEY: Final = "AccessKey"
SECURITY_TOKEN: Final = "SecurityToken"
SIGNATURE: Final = "Signature"
SIGNED_FIELDS: Final = frozenset({ACCESS_KEY, SECURITY_TOKEN, SIGNATURE})
_SKIPPED: Final = frozenset({SIGNATURE})


class Credentials(msgspec.Struct, frozen=True, kw_only=True):
    """What a client signs with. `access_key`: the name of the user. Raises ValueError if a key is
    missing."""

    access_key: str
    secret_key: str
    security_token: str = ""

    def __post_init__(self) -> None:
        if not self.access_key or not self.secret_key:
            raise ValueError("accessKey and secretKey are needed, and neither may be empty")

    def __repr__(self) -> str:
        return f"Credentials({self.access_key!r})"


class SigningKey:
    """A secret; the two blocks with which every HMAC begins are hashed once."""

    __slots__ = ("_inner", "_outer", "_secret")

    def __init__(self, secret: str) -> None:
        self._secret = secret
        key = secret.encode()
        if len(key) > 64:
            key = sha1(key, usedforsecurity=False).digest()
        key = key.ljust(64, b"\0")
        self._inner = sha1(bytes(byte ^ 0x36 for byte in key), usedforsecurity=False)
        self._outer = sha1(bytes(byte ^ 0x5C for byte in key), usedforsecurity=False)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SigningKey) and self._secret == other._secret

    def __hash__(self) -> int:
        return hash(self._secret)

    def sign(self, fields: Mapping[str, str], body: bytes, skipped: frozenset[str]) -> str:
        """The signature over all fields but `skipped`."""
        return self._of(_text(fields, skipped), body).decode()

    def _of(self, text: str, body: bytes) -> bytes:
        inner, outer = self._inner.copy(), self._outer.copy()
        # A lone surrogate can be in JSON; such a request must be refused, not fail.
        inner.update(text.encode(errors="surrogatepass"))
        inner.update(body)
        outer.update(inner.digest())
        return b2a_base64(outer.digest(), newline=False)

    def proves(
        self, fields: Mapping[str, str], body: bytes, skipped: frozenset[str] = _SKIPPED
    ) -> bool:
        """Whether the request is signed with this secret; takes the same time for any signature."""
        return self.proves_text(_text(fields, skipped), body, fields.get(SIGNATURE, ""))

    def proves_call(self, call: CallSignature) -> bool:
        """Whether a gRPC call is signed with this secret."""
        try:
            given = b2a_base64(bytes.fromhex(call.digest), newline=False).decode()
        except ValueError:
            given = ""
        return self.proves_text(call.signed, b"", given)

    def proves_text(self, text: str, body: bytes, signature: str) -> bool:
        """The same for values that are joined already."""
        given = signature.encode(errors="surrogatepass")
        return hmac.compare_digest(self._of(text, body), given)


def _text(fields: Mapping[str, str], skipped: frozenset[str]) -> str:
    return "".join([fields[name] for name in sorted(fields) if name not in skipped])


class _SignedFields(SendFields, gc=False):
    access_key: str = msgspec.field(name=ACCESS_KEY, default="")
    security_token: str = msgspec.field(name=SECURITY_TOKEN, default="")
    signature: str = msgspec.field(name=SIGNATURE, default="")


class SignedSend(SendFrame, gc=False):
    """A send (310, 320) with its signature."""

    ext: _SignedFields = msgspec.field(name="extFields")


_decode: Final = msgspec.json.Decoder(SignedSend, strict=False).decode


def signed_send(header: bytes) -> SignedSend | None:
    """A send with a JSON header, decoded once for guard and handler; None if it is not valid."""
    try:
        return _decode(header)
    except NOT_JSON:
        return None


class _Texts(dict[int | None, str]):
    """Numbers as text. Most of a send's are small, and a look-up costs half of a conversion."""

    def __missing__(self, value: int | None) -> str:
        return str(value)


_NUMBER: Final = _Texts([(None, ""), *((number, str(number)) for number in range(-1, 256))])
_BOOL: Final = {None: "", True: "true", False: "false"}


def signed_text(f: _SignedFields) -> str:
    """The text that a stock client signs for a send, made from the decoded values. A value in
    another spelling ("04") or a further field gives another text; then the caller must check all
    fields as they came."""
    number = _NUMBER
    return (
        f"{f.access_key}{f.security_token}{f.producer_group}{f.topic}{f.default_topic}"
        f"{number[f.default_topic_queue_nums]}{number[f.queue_id]}{number[f.sys_flag]}"
        f"{f.born_timestamp}{number[f.flag]}{f.properties or ''}{number[f.reconsume_times]}"
        f"{_BOOL[f.unit_mode]}{number[f.max_reconsume_times]}{_BOOL[f.batch]}{f.broker_name or ''}"
    )


_SCHEME: Final = "MQv2-HMAC-SHA1"
_AUTHORIZATION: Final = "authorization"
_DATE_TIME: Final = "x-mq-date-time"
_TIME: Final = re.compile(r"[0-9]{8}T[0-9]{6}Z")


class CallSignature(NamedTuple):
    """The signature of a gRPC call: of the text `signed` by `user`, in hex digits."""

    user: str
    signed: str
    digest: str


def call_signature(metadata: Iterable[tuple[str, str | bytes]]) -> CallSignature | None:
    """In the metadata of a gRPC call, as RocketMQ's clients for gRPC write it; None if it has none
    of this kind. Origin: Signature.java of rocketmq-clients, AuthenticationHeader."""
    fields = {name: value for name, value in metadata if isinstance(value, str)}
    scheme, _, rest = fields.get(_AUTHORIZATION, "").partition(" ")
    parts = dict(part.strip().partition("=")[::2] for part in rest.split(","))
    user = parts.get("Credential", "").partition("/")[0]  # some clients add region and service
    signed = fields.get(_DATE_TIME, "")
    # A time only: else the signed text of any request that was seen would sign a call, too.
    if scheme != _SCHEME or not user or not _TIME.fullmatch(signed):
        return None
    return CallSignature(user, signed, parts.get("Signature", ""))


class Signer:
    """Signs what a client sends."""

    def __init__(self, credentials: Credentials) -> None:
        self.use(credentials)

    def use(self, credentials: Credentials) -> None:
        """Signs with these from now on."""
        self.access_key = credentials.access_key
        self._key = SigningKey(credentials.secret_key)
        self._fields = {ACCESS_KEY: credentials.access_key}
        if credentials.security_token:
            self._fields[SECURITY_TOKEN] = credentials.security_token

    def __call__(self, request: RemotingCommand) -> None:
        """Signs a request; one that is sent again is signed again."""
        # A new table: the caller's may be shared by several requests.
        fields = request.ext | self._fields
        fields[SIGNATURE] = self._key.sign(fields, request.body, _SKIPPED)
        request.ext, request.has_ext = fields, True

    def call_metadata(self, now_ms: int) -> tuple[tuple[str, str], ...]:
        """The metadata of a gRPC call; see `call_signature`."""
        signed = datetime.fromtimestamp(now_ms / 1000, UTC).strftime("%Y%m%dT%H%M%SZ")
        digest = a2b_base64(self._key.sign({"": signed}, b"", _SKIPPED)).hex().upper()
        header = (
            f"{_SCHEME} Credential={self.access_key}, SignedHeaders={_DATE_TIME},"
            f" Signature={digest}"
        )
        return (_DATE_TIME, signed), (_AUTHORIZATION, header)
