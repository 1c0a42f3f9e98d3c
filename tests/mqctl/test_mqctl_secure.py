"""`mqctl secure`: certificates are made once, renewed in place, and private to their owner."""

import asyncio
import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from click.testing import CliRunner, Result

from batonmq.launcher.layout import STAGES, Stage
from batonmq.mqctl import tls_probe
from batonmq.mqctl.main import cli
from batonmq.mqctl.roll import Doubt
from batonmq.mqctl.tls_steps import refused, stages_of, steps
from batonmq.runtime.authority import check_certificate, read_certificate
from batonmq.runtime.tls import Tls, TlsConfig, TlsState, client_context


def run(*args: str) -> Result:
    return CliRunner().invoke(cli, ["secure", *args])


NODES = ("--node", "broker/broker-a/1@127.0.0.1,mq1.example", "--node", "controller/n0@127.0.0.1")


def test_init_makes_files_that_servers_take_and_rotate_renews_them(tmp_path: Path) -> None:
    folder = tmp_path / "tls"
    made = run("init", str(folder), *NODES, "--json")
    assert made.exit_code == 0, made.output
    files = {Path(one["file"]).name: one for one in json.loads(made.stdout)}
    assert set(files) == {"broker.broker-a.1.pem", "controller.n0.pem", "admin.pem"}
    assert files["broker.broker-a.1.pem"]["hosts"] == ["mq1.example", "127.0.0.1"]
    for file in folder.iterdir():
        assert file.name == "ca.pem" or file.stat().st_mode & 0o777 == 0o600, file
    path = str(folder / "broker.broker-a.1.pem")
    tls = Tls(
        TlsConfig(
            server_mode="enforcing",
            server_cert_path=path,
            server_key_path=path,
            server_trust_cert_path=str(folder / "ca.pem"),
        ),
        check_certificate,
    )
    before = Path(path).read_bytes()
    renewed = run("rotate", str(folder), "--days", "10")
    assert renewed.exit_code == 0 and "broker/broker-a/1" in renewed.output
    assert Path(path).read_bytes() != before and tls.reload()
    assert read_certificate(Path(path)).ends_ms < files["admin.pem"]["notAfter"]


def test_init_never_replaces_an_authority(tmp_path: Path) -> None:
    assert run("init", str(tmp_path), *NODES).exit_code == 0
    again = run("init", str(tmp_path), *NODES)
    assert again.exit_code == 1 and "there is an authority already" in again.output


def test_what_init_and_rotate_refuse(tmp_path: Path) -> None:
    folder = str(tmp_path / "tls")
    for args, told in (
        (("init", folder), "which nodes?"),
        (("init", folder, "--node", "broker/a/1"), "NAME@HOST is needed"),
        (("init", folder, "--node", "broker/a/1/2@h"), "is no name of a node"),
        (("rotate", "--authority", "--secrets"), "one at a time"),
        (("rotate", folder, "--authority", "--secrets"), "one at a time"),
        (("enable", "--secrets"), "go with rotate"),
        (("rotate", "--secrets", "--step", "next"), "goes with rotate --secrets FILE"),
    ):
        refused = run(*args)
        assert refused.exit_code == 2 and told in refused.output, refused.output
    empty = run("rotate", str(tmp_path / "none"))
    assert empty.exit_code == 1 and "no certificates" in empty.output


def test_a_step_of_a_file_of_secrets_is_named_and_taken_once(tmp_path: Path) -> None:
    """So a script may run it again after whatever interrupted it."""
    file = tmp_path / "raft"
    file.write_text("s" * 40)
    file.chmod(0o600)
    texts = [file.read_text()]
    for step in ("next", "former", "done"):
        for _ in range(2):
            ran = run("rotate", "--secrets", str(file), "--step", step, "--json")
            assert ran.exit_code == 0, ran.output
            assert json.loads(ran.stdout) == [{"file": str(file), "step": step}]
        if step == "next":
            skipped = run("rotate", "--secrets", str(file), "--step", "done")
            assert skipped.exit_code == 1, "it would end the only secret that all servers know"
            assert "it is at step next, and former is next" in skipped.output
        texts.append(file.read_text())
        secrets = [word for word in texts[-1].split() if len(word) >= 32]
        assert secrets and not any(secret in ran.output for secret in secrets)
    assert len(set(texts)) == 4 and "s" * 40 not in texts[-1]


async def test_status_reads_the_authorities_of_this_machine_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It takes 0.1 s: for each of twenty ports that was longer than the time for an answer."""
    made = Mock(side_effect=client_context)
    monkeypatch.setattr(tls_probe, "client_context", made)
    tls_probe._context.cache_clear()
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    async with server:
        host, number = server.sockets[0].getsockname()
        for node in ("one", "two", "three"):
            port = tls_probe.Port(node, "remoting", f"{host}:{number}")
            assert await tls_probe.probe(port, None, 10) == tls_probe.PortState(port)
    assert made.call_count == 1


def at(stage: Stage, **more: Any) -> TlsState:
    server, node, dials = STAGES[stage]
    return TlsState(server_mode=server, node_mode=node, dials=dials, **more)


def test_tls_is_turned_on_and_off_one_stage_after_the_other_and_continues_where_it_stopped() -> (
    None
):
    def way(target: Stage, *stages: Stage) -> list[tuple[str, str]]:
        by_name = {str(number): stage for number, stage in enumerate(stages)}
        return [(s.stage, "".join(sorted(s.names))) for s in steps(by_name, target)]

    assert way("enforcing", "disabled", "disabled") == [
        ("accept", "01"),
        ("dial", "01"),
        ("enforcing", "01"),
    ]
    assert way("disabled", "enforcing", "permissive") == [
        ("dial", "01"),
        ("accept", "01"),
        ("disabled", "01"),
    ]
    assert way("enforcing", "dial", "accept")[0] == ("dial", "1")
    assert way("enforcing", "enforcing", "dial") == [("enforcing", "1")]
    assert way("disabled", "enforcing", "dial")[0] == ("dial", "0")
    assert way("permissive", "enforcing", "permissive") == [("permissive", "0")]
    assert way("enforcing", "enforcing") == way("disabled", "disabled") == []


def test_who_would_be_refused_is_named_and_modes_set_by_hand_are_a_doubt() -> None:
    states = {
        "broker b1:1": at("dial", plain=21, plain_peers=["10.0.0.1:5"] * 20, encrypted=1),
        "namesrv n1:1": at("dial", encrypted_peers=["10.0.0.2:6"], encrypted=1),
    }
    peers = ", ".join(["10.0.0.1:5"] * 20)
    assert refused(states, "enforcing") == f"at broker b1:1 {peers} and 1 more"
    assert "at namesrv n1:1 10.0.0.2:6" in refused(states, "disabled")
    assert refused({"n": at("dial")}, "enforcing") == ""
    assert set(stages_of(states).values()) == {"dial"}
    with pytest.raises(Doubt, match="nodeMode disabled"):
        stages_of({"b": TlsState(server_mode="enforcing")})
