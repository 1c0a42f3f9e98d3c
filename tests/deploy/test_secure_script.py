"""deploy/secure.sh: what it makes is what processes take; a new secret in three steps."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from batonmq.auth.config import read_node_user

SCRIPT = Path(__file__).resolve().parents[2] / "deploy" / "secure.sh"
# Runs the script of the container on this host: in the folder itself, without the image's user.
DOCKER = """#!/bin/bash
while [ $# -gt 0 ]; do case $1 in
  --volume) folder=${2%%:*}; shift 2 ;;
  --env) export "$2"; shift 2 ;;
  -euc) script=$2; shift 2 ;;
  *) shift ;;
esac; done
script=${script//\\/tls/$folder}
exec bash -euc "${script//-o batonmq/}"
"""
INLINE = "BATONMQ_AUTH__INNERCLIENTAUTHENTICATIONCREDENTIALS="


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """With stand-ins for `docker` and for the image's `mqctl`."""
    mqctl = f'#!/bin/sh\nexec {sys.executable} -m batonmq.mqctl.main "$@"\n'
    (tmp_path / "bin").mkdir()
    for name, text in (("docker", DOCKER), ("mqctl", mqctl)):
        tool = tmp_path / "bin" / name
        tool.write_text(text)
        tool.chmod(0o755)
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    root = str(SCRIPT.parents[1])
    return os.environ | {
        "PATH": path,
        "PYTHONPATH": root,
        "BATONMQ_TLS_FOLDER": str(tmp_path / "tls"),
    }


def run(environ: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(SCRIPT), *words], env=environ, capture_output=True, text=True, check=False, timeout=120
    )


def test_the_secret_of_the_nodes_is_a_file_of_each_container_and_changes_in_three_steps(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    """A folder of an earlier version, with the secret in users.env, keeps that secret."""
    tls = tmp_path / "tls"
    assert run(environ).returncode == 0
    assert INLINE not in (tls / "users.env").read_text()
    (tls / "node.json").unlink()
    with (tls / "users.env").open("a") as users:
        users.write(INLINE + '{"accessKey":"node","secretKey":"of users.env"}\n')
    assert run(environ).returncode == 0
    assert INLINE not in (tls / "users.env").read_text()
    assert "INITAUTHENTICATIONUSER" in (tls / "users.env").read_text()
    seen = []
    given = tls / "nodes" / "namesrv-3" / "node.json"
    before = given.read_bytes()
    for step in range(3):
        assert run(environ, "secrets").returncode == 0
        if step == 0:  # killed before it was given to all: no node may miss a step
            given.chmod(0o600)
            given.write_bytes(before)
            assert "it is given to them now" in run(environ, "secrets").stderr
        found = [json.loads(file.read_text()) for file in tls.glob("nodes/*/node.json")]
        assert len(found) == 6 and all(each == found[0] for each in found)
        seen.append(found[0])
    first, second, last = seen
    assert first["secretKey"] == second["formerSecretKey"] == "of users.env"
    assert first["nextSecretKey"] == second["secretKey"] == last["secretKey"]
    assert last.keys() == {"accessKey", "secretKey"}
    for file in (tls / "node.json", *tls.glob("nodes/*/node.json")):
        assert not stat.S_IMODE(file.stat().st_mode) & 0o077
        assert read_node_user(file).secret_key == last["secretKey"]
    assert run(environ, "certificates").returncode == 2
