"""What a port takes: a plain connection, TLS, and which certificate it shows. Seen from outside, so
that no server needs to be asked about itself."""

import asyncio
import ssl
from dataclasses import dataclass
from functools import cache
from typing import Final

from batonmq.runtime.sockets import dialled_place
from batonmq.runtime.tls import ClientTls, TlsState, client_context, tls_reason

PLAIN_S: Final = 0.5
"""A port that closes a plain connection does so at once."""
# What an HTTP/2 client sends first, with an empty SETTINGS frame.
_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"


@dataclass(frozen=True, slots=True)
class Port:
    """`kind`: remoting, grpc, ha or raft. `address`: host:port. `broker`: of an HA port, where its
    broker is asked."""

    node: str
    kind: str
    address: str
    broker: str = ""


@dataclass(frozen=True, slots=True)
class PortState:
    """`takes_tls` empty: no TLS; else its version. `refusal`: why its certificate is not trusted,
    or why nothing answers. `ends_ms`: of a certificate that is trusted, 0: unknown."""

    port: Port
    takes_plain: bool = False
    takes_tls: str = ""
    is_verified: bool = False
    ends_ms: int = 0
    refusal: str = ""
    clients: TlsState | None = None
    """What the process says, while its ports for clients take both."""
    proof: TlsState | None = None
    """What a broker says of the proofs at its HA port, if its peers prove anything."""


async def probe(port: Port, tls: ClientTls | None, timeout_s: float) -> PortState:
    """Raises TlsError for files of `tls` that cannot be used."""
    try:
        async with asyncio.timeout(timeout_s):
            plain = await _takes_plain(port)
            version, ends_ms, refusal = await _takes_tls(port, tls)
        if port.kind == "grpc" and plain:
            refusal = ""  # it takes one of both
    except OSError as error:  # a time-out among them
        return PortState(port, refusal=tls_reason(error))
    return PortState(port, plain, version, bool(version) and not refusal, ends_ms, refusal)


async def _takes_plain(port: Port) -> bool:
    reader, writer = await asyncio.open_connection(*dialled_place(port.address))
    try:
        # A server of gRPC answers its preface; the others wait for the rest of a frame.
        writer.write(_PREFACE if port.kind == "grpc" else b"\0")
        async with asyncio.timeout(PLAIN_S):
            answer = await reader.read(9)
        return port.kind == "grpc" and len(answer) == 9 and answer[3] == 4
    except TimeoutError:
        return port.kind != "grpc"
    except ConnectionError:
        return False
    finally:
        writer.transport.abort()  # a farewell would outlive the command, and fail


async def _takes_tls(port: Port, tls: ClientTls | None) -> tuple[str, int, str]:
    """(version, end of the certificate, why it is not trusted)."""
    try:
        return *await _handshake(port, _context(tls or ClientTls(), port.kind)), ""
    except ssl.SSLCertVerificationError as error:
        refusal = tls_reason(error)
    except (ssl.SSLError, ConnectionError) as error:
        return "", 0, "" if tls is None else tls_reason(error)
    # Once more without a check: the port takes TLS, and with which version, is worth showing too.
    version, _ = await _handshake(port, _context(ClientTls(auth_server=False), port.kind))
    return version, 0, refusal


@cache
def _context(tls: ClientTls, kind: str) -> ssl.SSLContext:
    """One for all ports of a kind: to read this machine's authorities may take 0.1 s."""
    context = client_context(tls)
    context.set_alpn_protocols(["h2"] if kind == "grpc" else [])
    return context


async def _handshake(port: Port, context: ssl.SSLContext) -> tuple[str, int]:
    _, writer = await asyncio.open_connection(*dialled_place(port.address), ssl=context)
    try:
        certificate = writer.get_extra_info("peercert") or {}
        version = str(writer.get_extra_info("cipher")[1])
        ends = certificate.get("notAfter")
        return version, int(ssl.cert_time_to_seconds(ends) * 1000) if ends else 0
    finally:
        writer.transport.abort()  # a farewell would outlive the command, and fail
