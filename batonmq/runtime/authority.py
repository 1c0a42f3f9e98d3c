"""The certificate authority of a cluster, and the certificates that it issues.

It is a folder: `ca.pem`, its key `ca.key`, and for each node one file with certificate and key, so
that a renewal is one rename. All files except `ca.pem` have mode 0600. A certificate names its
nodes as `baton://node/<name>` (`broker/broker-a/1`, `controller/n0`, `namesrv/…`, `admin`), and its
hosts.
"""

import contextlib
import datetime
import errno
import ipaddress
import logging
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from batonmq.runtime import disk
from batonmq.runtime.clock import wall_ms
from batonmq.runtime.durable_file import replace_file, sync_directory
from batonmq.runtime.tls import DAY_MS, NODE_URI, TlsConfig, TlsError, names_in, read_pem

log = logging.getLogger(__name__)

CA_CERT: Final = "ca.pem"
CA_KEY: Final = "ca.key"
NEXT_KEY: Final = "ca-next.key"
"""Of an authority that is trusted already, and issues from the next step on."""
Rotation = Literal["none", "trusted", "issuing", "renewed"]
"""`issuing`: some certificates are of the new authority."""
CA_DAYS: Final = 3_650
NODE_DAYS: Final = 397
REPORTED_DAYS: Final = 21
_EARLIER: Final = datetime.timedelta(minutes=5)
"""Certificates are valid from this long ago, since the clocks of hosts differ."""
_NAME = re.compile(r"[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+){0,2}")


@dataclass(frozen=True, slots=True)
class NodeCertificate:
    """An issued certificate. Times in ms since 1970."""

    path: Path
    names: tuple[str, ...]
    hosts: tuple[str, ...]
    ends_ms: int


class Authority:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def trust(self) -> Path:
        return self.folder / CA_CERT

    def make(self, cluster: str, days: int = CA_DAYS) -> None:
        """Creates the authority. Raises FileExistsError if there is one, or was: its certificates
        would become invalid. Raises TlsError, OSError; then it may be repeated."""
        if self.trust.exists():
            raise FileExistsError(errno.EEXIST, "there is an authority already", str(self.folder))
        if issued := self._files():
            why = f"put back the lost {CA_CERT} of the authority that issued {issued[0].name}"
            raise FileExistsError(errno.EEXIST, why, str(self.folder))
        self.folder.mkdir(parents=True, exist_ok=True)
        os.chmod(self.folder, 0o700)
        key = _made_key(self.folder / CA_KEY)
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{cluster} authority")])
        replace_file(self.trust, _signed_by_itself(name, key, days))

    def rotation(self) -> Rotation:
        """How far a change of the authority is. Raises TlsError."""
        if (self.folder / NEXT_KEY).exists():
            return "trusted" if len(self._trusted()) > 1 else "none"
        if len(self._trusted()) == 1:
            return "none"
        _, ca = self._load()
        return "renewed" if all(_is_issued(path, ca) for path in self._files()) else "issuing"

    def trust_next(self) -> None:
        """The first step: a new authority, which is trusted and issues nothing yet. Raises
        TlsError, OSError."""
        _, ca = self._load()
        key = _made_key(self.folder / NEXT_KEY)
        # Another name: a client that trusts both finds the issuer by it.
        named = ca.subject.rfc4514_string().removeprefix("CN=").partition(" since ")[0]
        now = datetime.datetime.now(datetime.UTC)
        # X.509 allows 64 characters.
        common = f"{named[:40]} since {now:%Y%m%d%H%M%S}"
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])
        replace_file(self.trust, _pem_of_certificate(ca) + _signed_by_itself(name, key, CA_DAYS))

    def issue_by_next(self, days: int = NODE_DAYS) -> list[NodeCertificate]:
        """The second step: all certificates again, by the new authority. Raises TlsError,
        OSError."""
        if (self.folder / NEXT_KEY).exists():
            os.replace(self.folder / NEXT_KEY, self.folder / CA_KEY)
            sync_directory(self.folder)
        return self.renew(days)

    def drop_former(self) -> None:
        """The last step: only the new authority is trusted. Raises TlsError, OSError."""
        _, ca = self._load()
        replace_file(self.trust, _pem_of_certificate(ca))

    def _trusted(self) -> list[x509.Certificate]:
        return _certificates(str(self.trust))

    def _files(self) -> list[Path]:
        return [path for path in sorted(self.folder.glob("*.pem")) if path.name != CA_CERT]

    def issue(
        self, file: str, names: Sequence[str], hosts: Sequence[str], days: int = NODE_DAYS
    ) -> NodeCertificate:
        """Writes or replaces `file`, with a new key. Raises TlsError, OSError, and ValueError for
        an invalid name or host."""
        check_names(names)
        ca_key, ca = self._load()
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0][:64])])
        builder = _builder(subject, ca.subject, key.public_key(), days)
        alternatives: list[x509.GeneralName] = [
            x509.UniformResourceIdentifier(NODE_URI + name) for name in names
        ]
        alternatives += map(_host, dict.fromkeys(hosts))
        for extension, critical in (
            (x509.BasicConstraints(ca=False, path_length=None), True),
            (_usage(signs=False), True),
            (
                x509.ExtendedKeyUsage(
                    [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
                ),
                False,
            ),
            (x509.SubjectAlternativeName(alternatives), False),
            (x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), False),
        ):
            builder = builder.add_extension(extension, critical)
        cert = builder.sign(ca_key, hashes.SHA256())
        path = self.folder / file
        text = cert.public_bytes(serialization.Encoding.PEM) + _pem_of(key)
        replace_file(path, text, mode=0o600)
        return read_certificate(path)

    def issued(self) -> list[NodeCertificate]:
        """All node certificates of the folder, by file name. Raises TlsError for a damaged one."""
        return [read_certificate(path) for path in self._files()]

    def renew(self, days: int = NODE_DAYS) -> list[NodeCertificate]:
        """Issues all certificates again, with the same names and new keys. Raises TlsError,
        OSError."""
        issued = self.issued()
        if not issued:
            raise TlsError(self.folder, "no certificates of nodes are there")
        return [self.issue(one.path.name, one.names, one.hosts, days) for one in issued]

    def _load(self) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
        """The authority that issues: of those that are trusted the one with the key."""
        path = self.folder / CA_KEY
        key = _key_in(path)
        for cert in self._trusted():
            if cert.public_key() == key.public_key():
                return key, cert
        raise TlsError(path, f"its certificate is not in {CA_CERT}")


def _made_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Makes a key in a file; one that is there is of an attempt that did not come to its end."""
    if path.exists():
        return _key_in(path)
    key = ec.generate_private_key(ec.SECP256R1())
    replace_file(path, _pem_of(key), mode=0o600)
    return key


def _key_in(path: Path) -> ec.EllipticCurvePrivateKey:
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), None)
    except OSError as error:
        raise TlsError(path, disk.reason(error)) from error
    except (ValueError, TypeError) as error:
        raise TlsError(path, "no key of an authority") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise TlsError(path, "no key that `mqctl secure init` made")
    return key


def _signed_by_itself(name: x509.Name, key: ec.EllipticCurvePrivateKey, days: int) -> bytes:
    builder = _builder(name, name, key.public_key(), days)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), True)
    builder = builder.add_extension(_usage(signs=True), True)
    return _pem_of_certificate(builder.sign(key, hashes.SHA256()))


def _pem_of_certificate(cert: x509.Certificate) -> bytes:
    return cert.public_bytes(serialization.Encoding.PEM)


def _is_issued(path: Path, ca: x509.Certificate) -> bool:
    """Whether the certificate in a file is of this authority. Raises TlsError."""
    try:
        _certificates(str(path))[0].verify_directly_issued_by(ca)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def check_names(names: Sequence[str]) -> None:
    """Raises ValueError for an invalid node name."""
    for name in names:
        if _NAME.fullmatch(name) is None or ".." in name:
            raise ValueError(f"{name!r} is no name of a node: broker/GROUP/ID, controller/ID")


def read_certificate(path: Path) -> NodeCertificate:
    """Raises TlsError."""
    try:
        cert = x509.load_pem_x509_certificate(path.read_bytes())
        found = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except OSError as error:
        raise TlsError(path, disk.reason(error)) from error
    except (ValueError, x509.ExtensionNotFound) as error:
        raise TlsError(path, "no certificate of a node") from error
    names = names_in(found.get_values_for_type(x509.UniformResourceIdentifier))
    addresses = map(str, found.get_values_for_type(x509.IPAddress))
    hosts = (*found.get_values_for_type(x509.DNSName), *addresses)
    ends_ms = int(cert.not_valid_after_utc.timestamp() * 1000)
    return NodeCertificate(path, tuple(names), hosts, ends_ms)


def check_certificate(config: TlsConfig) -> int:
    """When a server's certificate expires, in ms since 1970; 0 without one. Raises TlsError if it
    is not valid now, or other nodes would refuse it."""
    path = config.server_cert_path
    if not path:
        return 0
    chain = _certificates(path)
    begin, end = chain[0].not_valid_before_utc, chain[0].not_valid_after_utc
    now_ms, end_ms = wall_ms(), int(end.timestamp() * 1000)
    if not begin.timestamp() * 1000 <= now_ms <= end_ms:
        valid = f"{begin:%Y-%m-%d %H:%M} to {end:%Y-%m-%d %H:%M}"
        here = datetime.datetime.fromtimestamp(now_ms / 1000, datetime.UTC)
        what = f"the certificate is valid from {valid} UTC only, and this clock says"
        raise TlsError(path, f"{what} {here:%Y-%m-%d %H:%M}")
    days = (end_ms - now_ms) // DAY_MS
    if days < REPORTED_DAYS:
        log.warning("tls_certificate_ends path=%s days_left=%d", path, days)
    if config.nodes == "disabled":
        return end_ms
    for issuer in (*chain[1:], *_certificates(config.server_trust_cert_path)):
        with contextlib.suppress(ValueError, TypeError, InvalidSignature):
            chain[0].verify_directly_issued_by(issuer)
            return end_ms
    raise TlsError(path, "its authority is not in serverTrustCertPath")


def _certificates(path: str) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(read_pem(path))
    except ValueError as error:
        raise TlsError(path, "no certificate in PEM form") from error


def file_of(name: str) -> str:
    """The default file name of a node: `broker.broker-a.1.pem` for `broker/broker-a/1`."""
    return name.replace("/", ".") + ".pem"


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        return x509.DNSName(host)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        # Earlier still if it is to have ended already: it must begin before it ends.
        .not_valid_before(now - _EARLIER + min(datetime.timedelta(days=days), datetime.timedelta()))
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), False)
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )


def _pem_of(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
