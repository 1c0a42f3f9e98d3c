"""The `tls:` section: RocketMQ's names, what is refused at the start, what never shows."""

from pathlib import Path

import pytest

from batonmq.protocol.errors import ConfigError
from batonmq.runtime.authority import Authority, check_certificate
from batonmq.runtime.settings import load_settings
from batonmq.runtime.tls import ClientTls, Tls, TlsConfig, TlsError
from tests.shared.certificates import HOSTS, authority, node_section


def load(tmp_path: Path, text: str, name: str = "b.yaml", **environ: str) -> TlsConfig:
    file = tmp_path / name
    file.write_text(text)
    found = load_settings(file, {"tls": TlsConfig}, environ=environ)["tls"]
    assert isinstance(found, TlsConfig)
    return found


def test_javas_names_are_taken_in_both_kinds_of_file(tmp_path: Path) -> None:
    java = {
        "tls.server.mode": "permissive",
        "tls.server.certPath": "/c",
        "tls.server.keyPath": "/k",
        "tls.server.trustCertPath": "/t",
        "tls.server.need.client.auth": "optional",
        "tls.enable": "true",
        "tls.client.authServer": "false",
    }
    flat = load(tmp_path, "".join(f"{k}={v}\n" for k, v in java.items()), "b.conf")
    yaml = load(tmp_path, "tls:\n" + "".join(f"  {k}: {v}\n" for k, v in java.items()))
    assert flat == yaml
    assert flat == TlsConfig(
        server_mode="permissive",
        server_cert_path="/c",
        server_key_path="/k",
        server_trust_cert_path="/t",
        server_need_client_auth="optional",
        tls_enable=True,
        client_auth_server=False,
    )
    assert load(tmp_path, "", BATONMQ_TLS__TLSENABLE="true").dials


def test_who_dials_with_tls() -> None:
    def config(**keys: object) -> TlsConfig:
        paths = {"server_cert_path": "/c", "server_key_path": "/k", "server_trust_cert_path": "/t"}
        return TlsConfig(**paths, **keys)  # type: ignore[arg-type]

    assert not TlsConfig().is_on
    assert not config(server_mode="permissive").dials
    assert config(server_mode="enforcing").dials
    assert config(server_mode="permissive", node_mode="enforcing").dials
    assert not config(server_mode="enforcing", tls_enable=False).dials
    assert config(server_mode="enforcing").nodes == "enforcing"
    assert config(server_mode="enforcing", node_mode="disabled").nodes == "disabled"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("tls.server.mode: enforcing", "serverCertPath is missing"),
        ("serverMode: sometimes", "one of disabled, enforcing, permissive"),
        ("tls.test.mode.enable: true", "a certificate that nobody checks"),
        ("{serverMode: enforcing, serverCertPath: /c, serverKeyPath: /k}", "serverTrustCertPath"),
        ("{serverMode: disabled, tls.server.mode: permissive}", "is already set"),
        ("{serverKeyPassword: geheim, tls.server.keyPassword: geheim}", "is already set"),
    ],
)
def test_what_the_section_refuses(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told) as refused:
        load(tmp_path, f"tls: {text}" if text[0] == "{" else f"tls:\n  {text}")
    assert "geheim" not in str(refused.value)


def test_a_certificate_that_cannot_serve_stops_the_start(tmp_path: Path) -> None:
    made, other = authority(tmp_path / "a"), authority(tmp_path / "b")
    good = node_section(made)
    assert Tls(good, check_certificate).ends_ms > 0

    def refused(match: str, **paths: Path) -> None:
        fields = {f: getattr(good, f) for f in good.__struct_fields__}
        with pytest.raises(TlsError, match=match):
            Tls(
                TlsConfig(**fields | {name: str(path) for name, path in paths.items()}),
                check_certificate,
            )

    late = made.issue("late.pem", ["broker/a/2"], HOSTS, days=-1).path
    strange = other.issue("x.pem", ["broker/a/1"], HOSTS).path
    another = made.issue("y.pem", ["broker/a/3"], HOSTS).path
    refused("and this clock says", server_cert_path=late, server_key_path=late)
    refused("its authority", server_cert_path=strange, server_key_path=strange)
    refused("no certificate with its key", server_key_path=another)
    refused("No such file", server_cert_path=tmp_path / "none.pem")
    refused("No such file", server_trust_cert_path=tmp_path / "none.pem")
    (nonsense := tmp_path / "nonsense.pem").write_text("nonsense")
    refused("no certificate in PEM form", server_trust_cert_path=nonsense)


def test_an_authority_keeps_its_keys_to_itself_and_is_never_overwritten(tmp_path: Path) -> None:
    made = authority(tmp_path / "a")
    node = made.issue("n.pem", ["broker/a/1", "controller/n0"], ["10.0.0.1", "host.example", "::1"])
    assert node.names == ("broker/a/1", "controller/n0")
    assert set(node.hosts) == {"10.0.0.1", "host.example", "::1"}
    assert (made.folder / "ca.key").stat().st_mode & 0o777 == 0o600
    assert node.path.stat().st_mode & 0o777 == 0o600 and made.folder.stat().st_mode & 0o77 == 0
    for lost in (False, True):  # `ca.key` without `ca.pem`: the same key got another name
        if lost:
            trust = made.trust.read_bytes()
            made.trust.unlink()
        with pytest.raises(FileExistsError, match="the lost ca.pem" if lost else "already"):
            Authority(made.folder).make("again")
    made.trust.write_bytes(trust)
    with pytest.raises(ValueError, match="no name of a node"):
        made.issue("n.pem", ["broker/../../x"], [])
    (renewed,) = made.renew()
    assert (renewed.names, renewed.hosts) == (node.names, node.hosts)


def test_passwords_show_in_no_text_of_an_object() -> None:
    assert "geheim" not in repr(ClientTls(key_password="geheim"))
    assert "geheim" not in repr(TlsConfig(server_key_password="geheim"))
