"""Authorities and certificates for tests, and the `tls:` sections that name them."""

from pathlib import Path
from typing import Any

from batonmq.runtime.authority import Authority, check_certificate
from batonmq.runtime.tls import ClientTls, Tls, TlsConfig

HOSTS = ("127.0.0.1", "localhost")


def authority(folder: Path, cluster: str = "test") -> Authority:
    made = Authority(folder)
    made.make(cluster)
    return made


def node_section(made: Authority, name: str = "broker/a/1", **keys: Any) -> TlsConfig:
    """The section of a node with a certificate of its own."""
    path = str(made.issue(name.replace("/", ".") + ".pem", [name], HOSTS).path)
    trust = str(made.trust)
    keys = {"server_mode": "enforcing"} | keys
    return TlsConfig(
        server_cert_path=path, server_key_path=path, server_trust_cert_path=trust, **keys
    )


def node_tls(made: Authority, name: str = "broker/a/1", **keys: Any) -> Tls:
    return Tls(node_section(made, name, **keys), check_certificate)


def client_tls(made: Authority, **keys: Any) -> ClientTls:
    return ClientTls(trust_cert_path=str(made.trust), **keys)
