"""The keys and certificates of one process: the `tls:` section, and TLS contexts that are reloaded
with the files.

Ports for clients (remoting) and ports between nodes (HA, gRPC, Raft) have a mode each: `disabled`,
`permissive` (plain or TLS, by the first byte) or `enforcing`. Between nodes both sides show a
certificate. A changed file is used for new connections; if it is unusable, the former one stays.
Origin: Java TlsSystemConfig, TlsHelper.
"""

import hashlib
import itertools
import logging
import os
import re
import ssl
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, Protocol

import msgspec

from batonmq.runtime import disk
from batonmq.runtime.followed_files import FollowedFiles
from batonmq.runtime.section import Section

log = logging.getLogger(__name__)

Mode = Literal["disabled", "permissive", "enforcing"]
MODES: Final[tuple[Mode, ...]] = ("disabled", "permissive", "enforcing")

PEERS_SHOWN: Final = 20
_SUITES: Final = "ECDHE+AESGCM:ECDHE+CHACHA20"
"""For TLS 1.2: only forward secrecy and authenticated encryption, as always in TLS 1.3."""
DAY_MS: Final = 86_400_000


class TlsState(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What a process says of its TLS (request BATON_GET_TLS). Connections are those at its ports
    for clients, counted while these are permissive; of peers the first PEERS_SHOWN are named."""

    server_mode: Mode = "disabled"
    node_mode: Mode = "disabled"
    dials: bool = False
    plain: int = 0
    """Open connections without TLS."""
    plain_taken: int = 0
    """All of them since its start."""
    plain_peers: list[str] = []
    encrypted: int = 0
    encrypted_peers: list[str] = []
    trusted: list[str] = []
    """SHA-256 of the certificates of authorities in force."""
    certificate: str = ""
    """SHA-256."""
    not_after: int = 0
    """When that certificate expires, ms since 1970; 0 without one."""
    refusal: str = ""
    """Why newer files are not in force."""
    taken: dict[str, int] = {}
    """Of each file in force (`tls`, or the key that names a file of secrets) when it was written,
    ms since 1970."""
    ha_proof: str = ""
    """Whether HA peers without TLS must prove that they know the secret of the nodes: `required`,
    `optional`, or "": there is none."""
    ha_unproven: int = 0
    """HA peers that did not prove it, since its start."""
    ha_unproven_last: str = ""
    """The newest one, and why."""


class TlsError(disk.FileError):
    """An unusable key or certificate: the file, and why."""


class TlsConfig(Section, frozen=True, kw_only=True, rename="camel"):
    """The `tls:` section. Paths of PEM files. An empty client path means the server's file."""

    ALIASES: ClassVar[dict[str, str]] = {
        "tls.server.mode": "serverMode",
        "tls.server.certPath": "serverCertPath",
        "tls.server.keyPath": "serverKeyPath",
        "tls.server.keyPassword": "serverKeyPassword",
        "tls.server.trustCertPath": "serverTrustCertPath",
        "tls.server.need.client.auth": "serverNeedClientAuth",
        "tls.server.authClient": "serverAuthClient",
        "tls.enable": "tlsEnable",
        "tls.test.mode.enable": "tlsTestModeEnable",
        "tls.client.certPath": "clientCertPath",
        "tls.client.keyPath": "clientKeyPath",
        "tls.client.keyPassword": "clientKeyPassword",
        "tls.client.trustCertPath": "clientTrustCertPath",
        "tls.client.authServer": "clientAuthServer",
    }
    WITHOUT_EFFECT = frozenset({"server_auth_client"})

    server_mode: Mode = "disabled"
    node_mode: Literal["", "disabled", "permissive", "enforcing"] = ""
    """For HA, gRPC and Raft; empty: as serverMode."""
    server_cert_path: str = ""
    server_key_path: str = ""
    server_key_password: str = ""
    server_trust_cert_path: str = ""
    server_need_client_auth: Literal["none", "optional", "require"] = "none"
    """For ports for clients. A certificate that a client shows is always checked."""
    server_auth_client: bool = True
    tls_enable: bool | None = None
    """Whether this process connects with TLS; None: if one of its modes is enforcing."""
    tls_test_mode_enable: bool = False
    client_cert_path: str = ""
    client_key_path: str = ""
    client_key_password: str = ""
    client_trust_cert_path: str = ""
    client_auth_server: bool = True
    client_check_host: bool = True
    """Whether a server's certificate must name the host to which this process connects."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tls_test_mode_enable:
            raise ValueError(
                "tlsTestModeEnable: a certificate that nobody checks protects nothing;"
                " `mqctl secure init` makes real ones"
            )
        if not self.is_on:
            return
        for key, value in (
            ("serverCertPath", self.server_cert_path),
            ("serverKeyPath", self.server_key_path),
        ):
            if self.listens and not value:
                raise ValueError(f"{key} is missing: serverMode and nodeMode need a certificate")
        if not self.server_trust_cert_path:
            if self.nodes != "disabled":
                raise ValueError(
                    "serverTrustCertPath is missing: nodes prove themselves by its authority"
                    " (`nodeMode: disabled` leaves HA, gRPC and Raft without TLS)"
                )
            if self.server_need_client_auth != "none":
                raise ValueError("serverNeedClientAuth needs serverTrustCertPath")

    def __repr__(self) -> str:
        return f"TlsConfig({self.server_mode}, {self.server_cert_path!r})"

    @property
    def nodes(self) -> Mode:
        """The mode of the ports between nodes."""
        return self.node_mode or self.server_mode

    @property
    def listens(self) -> bool:
        return self.server_mode != "disabled" or self.nodes != "disabled"

    @property
    def dials(self) -> bool:
        if self.tls_enable is not None:
            return self.tls_enable
        return "enforcing" in (self.server_mode, self.nodes)

    @property
    def is_on(self) -> bool:
        return self.listens or self.dials


class ClientTls(msgspec.Struct, frozen=True, kw_only=True):
    """How a client connects with TLS. Paths of PEM files. `trust_cert_path` empty: the authorities
    of this machine. `cert_path` and `key_path`: for servers that ask for a certificate."""

    trust_cert_path: str = ""
    cert_path: str = ""
    key_path: str = ""
    key_password: str = ""
    auth_server: bool = True
    check_host: bool = True

    def __repr__(self) -> str:
        return f"ClientTls({self.trust_cert_path!r}, {self.cert_path!r})"


def client_context(client: ClientTls) -> ssl.SSLContext:
    """Raises TlsError."""
    context = _context(ssl.PROTOCOL_TLS_CLIENT)
    if not client.auth_server:
        context.check_hostname = False  # first: ssl refuses CERT_NONE while it is on
        context.verify_mode = ssl.CERT_NONE
    else:
        context.check_hostname = client.check_host
        _trust(context, client.trust_cert_path)
    if client.cert_path:
        _show(context, client.cert_path, client.key_path, client.key_password)
    return context


def _context(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(_SUITES)
    # Compression shows secrets by their sizes; peers could demand handshakes without end.
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
    return context


def _trust(context: ssl.SSLContext, path: str) -> None:
    if not path:
        context.load_default_certs()
        return
    try:
        disk.check_readable(path := os.path.expanduser(path))
        context.load_verify_locations(path)
    except (OSError, ValueError) as error:
        raise TlsError(path, f"no certificates of an authority: {tls_reason(error)}") from error


def _show(context: ssl.SSLContext, cert: str, key: str, password: str) -> None:
    paths = os.path.expanduser(cert), os.path.expanduser(key or cert)
    try:
        for path in paths:
            disk.check_readable(path)
        # Without a callback OpenSSL would ask for the password on the terminal.
        context.load_cert_chain(*paths, lambda: password)
    except (OSError, ValueError) as error:
        raise TlsError(
            f"{cert} and {key or cert}", f"no certificate with its key: {tls_reason(error)}"
        ) from error


def tls_reason(error: BaseException) -> str:
    """The text of an error without OpenSSL's line numbers."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the certificate of the peer is refused: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return (error.reason or str(error)).replace("_", " ").lower()
    if isinstance(error, OSError):
        return disk.reason(error)
    return str(error) or type(error).__name__


NODE_URI: Final = "baton://node/"
"""Begins each name of a node in a certificate: `baton://node/broker/broker-a/1`."""
Names = Collection[str]


def node_names(peercert: Mapping[str, Any] | None) -> Names:
    """The node names in a peer certificate of `ssl`; none without one."""
    found = (peercert or {}).get("subjectAltName", ())
    return names_in([value for kind, value in found if kind == "URI"])


def names_in(uris: Iterable[str]) -> Names:
    return [uri.removeprefix(NODE_URI) for uri in uris if uri.startswith(NODE_URI)]


def acts_as_broker(names: Names, broker_name: str) -> bool:
    """Whether a certificate may act as a replica of that broker group. A certificate without node
    names (of an operator's own authority) may act as any."""
    return not names or any(name.split("/")[:2] == ["broker", broker_name] for name in names)


def refused_names(names: Names) -> str:
    return f"the certificate of {', '.join(names)} may not be at this port"


def acts_as(names: Names, role: str) -> bool:
    """As `acts_as_broker`, for any node of a role: `controller`, `admin`."""
    return not names or any(name.partition("/")[0] == role for name in names)


class OpenPeers:
    """Who is connected to the ports for clients of a process, without TLS and with it, while these
    take both: `enforcing` would refuse the first, `disabled` the second."""

    def __init__(self) -> None:
        self.plain_taken = 0
        """Since the start of the process."""
        self.plain: dict[object, str] = {}
        self.encrypted: dict[object, str] = {}

    def add(self, connection: object, peer: str, *, encrypted: bool) -> None:
        if encrypted:
            self.encrypted[connection] = peer
        else:
            self.plain[connection] = peer
            self.plain_taken += 1

    def discard(self, connection: object) -> None:
        self.plain.pop(connection, None)
        self.encrypted.pop(connection, None)


@dataclass(frozen=True, slots=True)
class PortTls:
    """The ports of one kind: their mode, and the contexts for the next connection that is accepted
    or dialled (None: without TLS)."""

    mode: Mode
    context: Callable[[], ssl.SSLContext]
    dial: Callable[[], ssl.SSLContext | None]
    admits: Callable[[Names], bool] = lambda names: True
    """Whether a peer whose certificate has these node names is accepted."""
    peers: OpenPeers = field(default_factory=OpenPeers)

    @property
    def dials(self) -> ssl.SSLContext | None:
        return self.dial()


def pem_of(client: ClientTls) -> tuple[bytes, bytes, bytes]:
    """Trust, key and certificate as gRPC takes them. Raises TlsError."""
    # gRPC takes no password: a key under one serves remoting only.
    return (
        read_pem(client.trust_cert_path),
        read_pem(client.key_path or client.cert_path),
        read_pem(client.cert_path),
    )


class Dialling(Protocol):
    """Gives the TLS context for the next outgoing connection; None: without TLS."""

    @property
    def dials(self) -> ssl.SSLContext | None: ...


class DialTls(FollowedFiles[ssl.SSLContext]):
    """A client's, which has no timer: it looks at its files before each connection. Raises
    TlsError."""

    def __init__(self, client: ClientTls) -> None:
        paths = (client.trust_cert_path, client.cert_path, client.key_path)
        super().__init__("tls", paths, lambda: client_context(client))

    @property
    def dials(self) -> ssl.SSLContext:
        self.reload_if_changed()
        return self.value


@dataclass(frozen=True, slots=True)
class _Loaded:
    clients: ssl.SSLContext | None = None
    nodes: ssl.SSLContext | None = None
    dials: ssl.SSLContext | None = None
    grpc: tuple[bytes, bytes, bytes] = (b"", b"", b"")
    """Trust, key, certificate."""
    ends_ms: int = 0


class Tls(FollowedFiles[_Loaded]):
    """The certificates of one process. `check` (`authority.check_certificate`) returns when the own
    one expires (ms since 1970, 0 without one), or raises TlsError. Raises TlsError if they are
    unusable."""

    def __init__(self, config: TlsConfig, check: Callable[[TlsConfig], int]) -> None:
        self.config = config
        self._check = check
        served = config.server_cert_path, config.server_key_path, config.server_trust_cert_path
        dialled = config.client_cert_path, config.client_key_path, config.client_trust_cert_path
        super().__init__("tls", (*served, *dialled), self._load)
        self.peers = OpenPeers()

    @property
    def for_clients(self) -> PortTls:
        return PortTls(
            self.config.server_mode,
            lambda: _there(self.value.clients),
            lambda: self.dials,
            peers=self.peers,
        )

    @property
    def for_raft(self) -> PortTls:
        """For controllers only."""
        mode = self.config.nodes
        return PortTls(
            mode,
            lambda: _there(self.value.nodes),
            lambda: None if mode == "disabled" else self.dials,
            lambda names: acts_as(names, "controller"),
        )

    def for_replicas(self, broker_name: str) -> PortTls:
        """The TLS of a broker group's HA port, for its own replicas only."""
        return replace(self.for_raft, admits=lambda names: acts_as_broker(names, broker_name))

    @property
    def dials(self) -> ssl.SSLContext | None:
        """The context for the next outgoing connection; None: plain."""
        return self.value.dials

    @property
    def pem(self) -> tuple[bytes, bytes, bytes]:
        return self.value.grpc

    @property
    def state(self) -> TlsState:
        config, (trust, _, certificate) = self.config, self.pem
        return TlsState(
            server_mode=config.server_mode,
            node_mode=config.nodes,
            dials=config.dials,
            plain=len(self.peers.plain),
            plain_taken=self.peers.plain_taken,
            plain_peers=_first(self.peers.plain),
            encrypted=len(self.peers.encrypted),
            encrypted_peers=_first(self.peers.encrypted),
            trusted=fingerprints(trust),
            certificate="".join(fingerprints(certificate)[:1]),
            not_after=self.ends_ms,
        )

    @property
    def ends_ms(self) -> int:
        """When this process's certificate expires, ms since 1970; 0 without one."""
        return self.value.ends_ms

    def _load(self) -> _Loaded:
        config = self.config
        clients = nodes = None
        ends_ms = self._check(config)
        if config.listens:
            clients = self._server_context()
            if config.server_need_client_auth != "none":
                clients.verify_mode = (
                    ssl.CERT_REQUIRED
                    if config.server_need_client_auth == "require"
                    else ssl.CERT_OPTIONAL
                )
                _trust(clients, config.server_trust_cert_path)
            if config.nodes != "disabled":
                nodes = self._server_context()
                nodes.verify_mode = ssl.CERT_REQUIRED
                _trust(nodes, config.server_trust_cert_path)
        dials = client_context(dial_settings(config)) if config.dials else None
        pem = b"", b"", b""
        # gRPC keeps its own copies, and knows no contexts of Python.
        if config.nodes != "disabled" or config.dials:
            pem = pem_of(dial_settings(config))
        return _Loaded(clients, nodes, dials, pem, ends_ms)

    def _server_context(self) -> ssl.SSLContext:
        config = self.config
        context = _context(ssl.PROTOCOL_TLS_SERVER)
        _show(context, config.server_cert_path, config.server_key_path, config.server_key_password)
        return context


def dial_settings(config: TlsConfig) -> ClientTls:
    """How a process with this section connects."""
    own = config.client_cert_path or config.client_key_path
    return ClientTls(
        trust_cert_path=config.client_trust_cert_path or config.server_trust_cert_path,
        cert_path=config.client_cert_path if own else config.server_cert_path,
        key_path=config.client_key_path if own else config.server_key_path,
        key_password=config.client_key_password if own else config.server_key_password,
        auth_server=config.client_auth_server,
        check_host=config.client_check_host,
    )


def _there(context: ssl.SSLContext | None) -> ssl.SSLContext:
    assert context is not None, "a port without TLS asks for no context"
    return context


def _first(peers: Mapping[object, str]) -> list[str]:
    return list(itertools.islice(peers.values(), PEERS_SHOWN))


def fingerprints(pem: bytes) -> list[str]:
    """SHA-256 of each certificate in a PEM text, in its order. Raises ValueError."""
    found = re.findall(rb"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", pem, re.DOTALL)
    ders = (ssl.PEM_cert_to_DER_cert(each.decode()) for each in found)
    return [hashlib.sha256(der).hexdigest() for der in ders]


def read_pem(path: str) -> bytes:
    if not path:
        return b""
    try:
        return disk.read_bytes(Path(os.path.expanduser(path)))
    except OSError as error:
        raise TlsError(path, disk.reason(error)) from error
