"""Wraps the handlers of a port: checks who signed a request, and whether that user may send it.

A signature is checked for every request. Decisions are kept for each connection until users or
rights change. Without `authenticationEnabled` there is no guard.
"""

import inspect
import logging
from collections.abc import Awaitable, Callable, Iterable
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias, TypeVar

from batonmq.auth.audit import AuditLog
from batonmq.auth.config import CREDENTIALS_FILE, AuthConfig, NodeUser, known_as, read_node_user
from batonmq.auth.policy import NAME_MAX, KnownUser, Need, Rulebook, UserInfo
from batonmq.auth.rights import ALWAYS_CHECKED, RIGHTS, needs_of, publish_needs
from batonmq.auth.signature import (
    ACCESS_KEY,
    SIGNATURE,
    Signer,
    SigningKey,
    call_signature,
    signed_send,
    signed_text,
)
from batonmq.protocol.codes import RELAY_FIELD, UNIQUE_KEY_FIELD, RequestCode, ResponseCode
from batonmq.protocol.errors import BatonError, BrokerRefusal
from batonmq.protocol.topic_name import NAME_BYTES_MAX
from batonmq.remoting.command import TYPE_JSON, RemotingCommand, decode_frame
from batonmq.remoting.connection import (
    Connection,
    Handler,
    Later,
    Processors,
    RawHandler,
    Response,
    SendHandler,
)
from batonmq.runtime.clock import wall_ms
from batonmq.runtime.followed_files import FollowedFiles
from batonmq.runtime.secret_file import SecretFileError, Secrets

log = logging.getLogger(__name__)

NODE: Final = "auth.node"
USER: Final = "auth.user"
"""Of a connection: whose request was proven last, apart from repeated sends."""
_DECIDED: Final = "auth.decided"
_SENDERS: Final = "auth.senders"
_Senders: TypeAlias = tuple[int, dict[tuple[str, int, str], SigningKey]]
"""The guard's version, and by (user, code, topic) what it allowed under that version."""
SUBJECTS_MAX: Final = 8
DECIDED_MAX: Final = 1024
"""Kept decisions of one connection."""
KEPT_MAX: Final = NAME_BYTES_MAX
"""Characters of a name in a kept decision; no topic or group has a longer one."""
WHY_MAX: Final = 500
"""Characters of a refusal: it names what a stranger sent."""
OLD_CLIENT: Final = 399
"""Up to this version (V4_9_3) clients set UNIQUE_KEY_FIELD behind their signature."""
NO_USERS_YET: Final = (
    "no users are known yet, they come with the first master: sign as the nodes do, or try again"
)
T = TypeVar("T")
Proves: TypeAlias = Callable[[SigningKey], bool]
"""Whether a secret signed the request."""
Metadata: TypeAlias = Iterable[tuple[str, str | bytes]]
"""Of a gRPC call."""
_SIGNATURE_ONLY: Final = frozenset({SIGNATURE})
_NOT_SIGNED: Final = frozenset({SIGNATURE, RELAY_FIELD, UNIQUE_KEY_FIELD})
_RELAYED: Final = frozenset({SIGNATURE, RELAY_FIELD})


class Caller(NamedTuple):
    """Who makes a gRPC call, in place of a connection."""

    peer: str
    attachments: dict[str, object]


class Guard:
    """`books`: the users of this process; of a name server those of each broker group."""

    def __init__(self, config: AuthConfig, cluster: str, audit_path: Path | None) -> None:
        self._config = config
        self.hint = ""
        """Is added to a refusal of a name or signature."""
        self._open_codes = config.not_authenticated
        self._free_codes = config.not_authorized
        self._node_file: FollowedFiles[NodeUser] | None = None
        if file := config.inner_client_authentication_credentials_file:
            # Read once: of two readings a new secret in between would count for one only.
            name = config.node.access_key
            read = partial(_same_node, Path(file).expanduser(), name)
            self._node_file = FollowedFiles(CREDENTIALS_FILE, [file], read)
            self._node_file.on_reload = self._renew_node
        node = self._node_file.value if self._node_file is not None else config.node_user()
        self.signer = Signer(node.credentials)
        self.version = 0
        """Grows with each change of users or rights."""
        nodes = Rulebook(cluster)
        nodes.fix(known_as(node))
        self._nodes = nodes
        self._node = node
        self._books: dict[str, Rulebook] = {"": nodes}
        self._unknown = SigningKey(node.secret_key)
        path = Path(config.audit_log_path) if config.audit_log_path else audit_path
        self.audit = AuditLog(path)
        if self._node_file is not None:
            self._node_file.watch()

    def book(self, name: str, cluster: str) -> Rulebook:
        """The users of one broker group; made at the first use."""
        if name not in self._books:
            self._books[name] = Rulebook(cluster, self._changed)
        return self._books[name]

    def _changed(self) -> None:
        self.version += 1

    @property
    def node_secrets(self) -> Secrets:
        """The secrets with which this node signs now, and those that it accepts as well."""
        return self._node.secrets

    @property
    def allows_unproven(self) -> bool:
        """Whether HA peers need not prove that they know the secret of the nodes."""
        return self._config.ha_allow_unproven or self._config.audit_only

    def _renew_node(self) -> None:
        assert self._node_file is not None
        self._node = node = self._node_file.value
        self.signer.use(node.credentials)
        self._nodes.fix(known_as(node))
        self._changed()

    def user(self, name: str) -> KnownUser | None:
        """The user of that name, the nodes' one included."""
        return next((user for _, user in self._known(name)), None)

    def who_am_i(self, request: RemotingCommand, connection: Connection) -> RemotingCommand:
        """The sender, as this node sees it (request 60008)."""
        user = self.user(self.user_of(request, connection))
        info = user.info() if user is not None else UserInfo()
        return RemotingCommand.response_to(
            request, ext={"peer": connection.peer}, body=info.encode()
        )

    def is_node(self, name: str) -> bool:
        """Whether this is the name with which nodes sign."""
        return self._nodes.get(name) is not None

    def stand_before(self, processors: Processors) -> None:
        """Wraps every handler with the check."""
        for code, handler in processors.handlers.items():
            processors.handlers[code] = self.before(code, handler)
        for code, raw in processors.raw_handlers.items():
            processors.raw_handlers[code] = partial(self._raw, code, raw)
        for code, send in processors.send_handlers.items():
            processors.raw_handlers[code] = partial(self._send, code, send)
        default = processors.default_handler

        def unknown(request: RemotingCommand, connection: Connection) -> object:
            self.check(request.code, request, connection)
            return default(request, connection)

        processors.default(unknown)  # type: ignore[arg-type]

    def before(self, code: int, handler: Handler) -> Handler:
        right = RIGHTS.get(code)
        changes = right is not None and right.changes

        def handle(request: RemotingCommand, connection: Connection) -> object:
            user = self.check(code, request, connection)
            if not changes:
                return handler(request, connection)
            return self._audited(user, code, request, connection, handler)

        return handle  # type: ignore[return-value]

    async def _audited(
        self,
        user: str,
        code: int,
        request: RemotingCommand,
        connection: Connection,
        handler: Handler,
    ) -> Response:
        async def answered() -> Response:
            answer = handler(request, connection)
            return await answer if inspect.isawaitable(answer) else answer

        return await self.noted(
            user,
            connection.peer,
            code,
            _subject(code, request),
            answered(),
            lambda response: response.code if response is not None else None,
        )

    async def noted(
        self,
        user: str,
        peer: str,
        code: int,
        subject: str,
        answer: Awaitable[T],
        code_of: Callable[[T], int | None],
    ) -> T:
        """Awaits the answer to a request that changes something, and writes what became of it to
        the audit log. `code_of` None: it is answered later, or by another node."""
        note = partial(self.audit.changed, user, peer, code, subject)
        try:
            response = await answer
        except BaseException as error:  # a gRPC call is cancelled if its caller goes
            note(str(error) if isinstance(error, BatonError) else type(error).__name__)
            raise
        found = code_of(response)
        if found is None:
            note("passed on, or answered later")
        else:
            note("done" if found == ResponseCode.SUCCESS else f"code {found}")
        return response

    def _raw(
        self,
        code: int,
        handler: RawHandler,
        connection: Connection,
        kind: int,
        header: bytes,
        body: bytes,
    ) -> Later:
        self.check(code, decode_frame(header, body, kind), connection)
        return handler(connection, kind, header, body)

    def _send(
        self,
        code: int,
        handler: SendHandler,
        connection: Connection,
        kind: int,
        header: bytes,
        body: bytes,
    ) -> Later:
        """Checks only the signature if the same user was allowed the same on this connection.
        Anything else, and every refusal, takes the full check."""
        request = signed_send(header) if kind == TYPE_JSON else None
        if request is not None:
            ext = request.ext
            kept: _Senders | None = connection.attachments.get(_SENDERS)  # type: ignore[assignment]
            key = None
            if kept is not None and kept[0] == self.version:
                key = kept[1].get((ext.access_key, code, ext.topic))
            if (
                key is not None
                and ext.relayed is None  # which is not signed, and believed of nodes only
                and key.proves_text(signed_text(ext), body, ext.signature)
            ):
                # Fields that are not in `request` are no part of the signed text, nor read.
                return handler(connection, kind, header, body, request)
        self._check_send(code, decode_frame(header, body, kind), connection)
        return handler(connection, kind, header, body)

    def _check_send(self, code: int, request: RemotingCommand, connection: Connection) -> None:
        """Raises BrokerRefusal. Keeps what is allowed for the next one."""
        name = self.check(code, request, connection)
        known = self._known(name)
        # What passes unchecked is no decision.
        if len(known) != 1 or code in self._open_codes or self._config.audit_only:
            return
        if len(request.ext["b"]) > KEPT_MAX:
            return
        kept: _Senders | None = connection.attachments.get(_SENDERS)  # type: ignore[assignment]
        if kept is None or kept[0] != self.version or len(kept[1]) >= DECIDED_MAX:
            connection.attachments[_SENDERS] = kept = (self.version, {})
        # Of two secrets the new one: a use of the old one is to be seen each time.
        kept[1][name, code, request.ext["b"]] = known[0][1].key

    def check(self, code: int, request: RemotingCommand, connection: Connection) -> str:
        """The user that signed the request, "" if no signature is valid and it passes
        nevertheless (`auditOnly`, `authenticationWhitelist`). Raises BrokerRefusal(NO_PERMISSION).
        """
        return self._check(code, request, connection, _proof(request))

    def user_of(self, request: RemotingCommand, connection: Connection) -> str:
        """The user of a request that has passed, as from `check`."""
        return self._signer_of(request, connection.peer, _proof(request))[0]

    def user_of_call(self, metadata: Metadata, peer: str) -> str:
        """The same for a gRPC call."""
        request, proves = _call(RequestCode.CONTROLLER_ELECT_MASTER, metadata, "")
        return self._signer_of(request, peer, proves)[0]

    def may_publish(self, connection: Connection, topic: str) -> bool:
        """Whether the user that signed last on this connection may write to the topic: a broker
        sends it half messages of it."""
        config = self._config
        if not config.authorization_enabled or config.audit_only:
            return True
        if RequestCode.SEND_MESSAGE_V2 in self._open_codes | self._free_codes:
            return True
        known = self._known(str(connection.attachments.get(USER, "")))
        source = _host(connection.peer)
        return all(
            any(user.evaluate(need, source, book.cluster).allowed for book, user in known)
            for need in publish_needs(topic)
        )

    def check_call(self, code: int, metadata: Metadata, peer: str, subject: str) -> str:
        """The same for a gRPC call that does what the request `code` does. `subject`: the broker
        group that it is about."""
        request, proves = _call(code, metadata, subject)
        return self._check(code, request, Caller(peer, {}), proves)

    def _check(
        self, code: int, request: RemotingCommand, connection: Connection | Caller, proves: Proves
    ) -> str:
        user, found = self._signer_of(request, connection.peer, proves)
        if code not in self._open_codes:
            try:
                self._require_user(code, request, connection, found)
            except BrokerRefusal:
                if not self._config.audit_only or code in ALWAYS_CHECKED:
                    raise
        return user

    def _signer_of(
        self, request: RemotingCommand, peer: str, proves: Proves
    ) -> tuple[str, list[tuple[Rulebook, KnownUser]]]:
        """The user whose signature the request has, and where it is known; "" and []."""
        name = request.ext.get(ACCESS_KEY, "")
        known = self._known(name)
        if not known:  # it takes as long as for a user that there is
            proves(self._unknown)
        elif len(known) > 1:
            proves = cache(proves)  # R58: a user of a thousand groups has one secret in all of them
        now_ms = wall_ms()
        found = [
            (book, user)
            for book, user in known
            if user.signed(proves, now_ms, peer) and user.is_enabled
        ]
        return name if found else "", found

    def _require_user(
        self,
        code: int,
        request: RemotingCommand,
        connection: Connection | Caller,
        found: list[tuple[Rulebook, KnownUser]],
    ) -> None:
        name = request.ext.get(ACCESS_KEY, "")
        if not found:
            why = (
                f"user {name[:NAME_MAX]!r}: unknown, or its signature is not right{self.hint}"
                if name
                else "the request is not signed: set accessKey and secretKey"
            )
            if name and len(self._books) == 1:
                # Of a name server that has just started: the users come with the first master.
                raise BrokerRefusal(ResponseCode.SERVICE_NOT_AVAILABLE, NO_USERS_YET)
            raise self._refusal(name, code, request, connection, why)
        # It names the client, whose address policies may ask for: only nodes are believed.
        if RELAY_FIELD in request.ext and NODE not in connection.attachments:
            why = f"{RELAY_FIELD} is taken from nodes only"
            raise self._refusal(name, code, request, connection, why)
        connection.attachments[USER] = name
        if code == RequestCode.BATON_CONNECTION_ENDS and self.is_node(name):
            connection.attachments[NODE] = True
        if code in self._free_codes:
            return
        if self._config.authorization_enabled or code in ALWAYS_CHECKED:
            self._require_all(code, request, connection, found, _source(request, connection))

    def _known(self, name: str) -> list[tuple[Rulebook, KnownUser]]:
        """The users of that name, each with its book. The name of the nodes is theirs alone."""
        if (node := self._nodes.get(name)) is not None:
            return [(self._nodes, node)]
        books = self._books.values()
        return [(book, user) for book in books if (user := book.get(name)) is not None]

    def _require_all(
        self,
        code: int,
        request: RemotingCommand,
        connection: Connection | Caller,
        found: list[tuple[Rulebook, KnownUser]],
        source: str,
    ) -> None:
        if any(user.is_super for _, user in found):
            return
        name = found[0][1].name
        decided = self._decided(connection)
        right = RIGHTS.get(code)
        key = None
        if right is not None and right.fields:
            get = request.ext.get
            values = [get(field) for field in right.fields]
            key = (name, code, source, *values)
            if key in decided:
                return
            if any(value is not None and len(value) > KEPT_MAX for value in values):
                key = None
        try:
            needs = needs_of(code, request)
        except BatonError as error:
            raise self._refusal(name, code, request, connection, str(error)) from None
        self._require(code, request, connection, found, source, needs)
        if key is not None:
            if len(decided) >= DECIDED_MAX:
                decided.clear()
            decided.add(key)

    def _require(
        self,
        code: int,
        request: RemotingCommand,
        connection: Connection | Caller,
        found: list[tuple[Rulebook, KnownUser]],
        source: str,
        needs: Iterable[Need],
    ) -> None:
        for need in needs:
            decisions = [user.evaluate(need, source, book.cluster) for book, user in found]
            if not any(each.allowed for each in decisions):
                why = f"{found[0][1].name} lacks {need}: {decisions[0].reason}"
                raise self._refusal(found[0][1].name, code, request, connection, why, str(need))

    def require_also(
        self, request: RemotingCommand, connection: Connection, needs: Iterable[Need]
    ) -> None:
        """What a handler finds only when it reads a message. Raises BrokerRefusal."""
        if not self._config.authorization_enabled or request.code in self._free_codes:
            return
        try:
            self._require_known(request, connection, needs)
        except BrokerRefusal:
            if not self._config.audit_only:
                raise

    def _require_known(
        self, request: RemotingCommand, connection: Connection, needs: Iterable[Need]
    ) -> None:
        name = request.ext.get(ACCESS_KEY, "")
        found = [(book, user) for book, user in self._known(name) if user.is_enabled]
        if not found:
            raise self._refusal(name, request.code, request, connection, "unknown user")
        if not any(user.is_super for _, user in found):
            source = _source(request, connection)
            self._require(request.code, request, connection, found, source, needs)

    def _decided(self, connection: Connection | Caller) -> set[tuple[str | int | None, ...]]:
        """What was allowed on this connection under the rules of now."""
        version = self.version
        kept = connection.attachments.get(_DECIDED)
        if not isinstance(kept, tuple) or kept[0] != version:
            kept = (version, set())
            connection.attachments[_DECIDED] = kept
        allowed: set[tuple[str | int | None, ...]] = kept[1]
        return allowed

    def _refusal(
        self,
        name: str,
        code: int,
        request: RemotingCommand,
        connection: Connection | Caller,
        why: str,
        resource: str = "",
    ) -> BrokerRefusal:
        subject = resource or _subject(code, request)
        passes = self._config.audit_only and code not in ALWAYS_CHECKED
        self.audit.refused(name, connection.peer, code, subject, why, passes=passes)
        return BrokerRefusal(ResponseCode.NO_PERMISSION, why[:WHY_MAX])

    def close(self) -> None:
        if self._node_file is not None:
            self._node_file.close()
        self.audit.close()


def _proof(request: RemotingCommand) -> Proves:
    skipped = _SIGNATURE_ONLY
    if RELAY_FIELD in request.ext:
        skipped = _RELAYED
    if request.version <= OLD_CLIENT and UNIQUE_KEY_FIELD in request.ext:
        skipped = (
            _NOT_SIGNED if RELAY_FIELD in request.ext else _SIGNATURE_ONLY | {UNIQUE_KEY_FIELD}
        )
    return lambda key: key.proves(request.ext, request.body, skipped)


def _call(code: int, metadata: Metadata, subject: str) -> tuple[RemotingCommand, Proves]:
    """A gRPC call as the request `code`."""
    call = call_signature(metadata)
    fields = {ACCESS_KEY: call.user if call is not None else "", "group": subject}
    request = RemotingCommand.request(code, fields)
    return request, lambda key: call is not None and key.proves_call(call)


def _same_node(path: Path, name: str) -> NodeUser:
    node = read_node_user(path)
    if node.access_key != name:
        what = f"accessKey is {node.access_key!r}: it stays {name!r} while this process runs"
        raise SecretFileError(path, what)
    return node


def _source(request: RemotingCommand, connection: Connection | Caller) -> str:
    """The client's address without its port; behind a relay, the one that the relay names."""
    relayed = request.ext.get(RELAY_FIELD)
    address = connection.peer if relayed is None else relayed.partition("@")[2]
    return _host(address)


def _host(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")


def _subject(code: int, request: RemotingCommand) -> str:
    """What the request is about, for the audit log; no field of it can hold a secret."""
    names = ("username", "subject", "topic", "b", "group", "groupName", "consumerGroup", "srcGroup")
    found = " ".join(f"{name}={request.ext[name]}" for name in names if name in request.ext)
    if found or not request.body or code not in RIGHTS:
        return found
    try:  # what it is about is in its body
        return "; ".join(map(str, islice(RIGHTS[code].needs(request), SUBJECTS_MAX)))
    except BatonError:
        return ""


Require = Callable[[RemotingCommand, Connection, Iterable[Need]], None]
"""`Guard.require_also`."""


def allow_all(_: RemotingCommand, __: Connection, ___: Iterable[Need]) -> None:
    """Without a guard."""
