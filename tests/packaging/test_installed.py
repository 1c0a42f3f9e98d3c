"""An installation works without the checkout, says what it lacks, and gives its users types."""

import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from batonmq.runtime.extras import PACKAGES
from lab.cluster.up import free_base_port
from tests.packaging.installation import Installation, empty_environment, install_wheel

pytestmark = pytest.mark.process

HOSTILE = (
    "asyncio.py", "broker.py", "click.py", "controller/__init__.py", "grpc.py",
    "ha.py", "history.py", "json.py", "logging.py", "namesrv.py", "numpy.py", "process.py",
    "proto/__init__.py", "protocol.py", "pysyncobj/__init__.py", "remoting.py", "settings.py",
    "socket.py", "store.py", "struct.py", "yaml.py",
)  # fmt: skip
"""Modules of ours, of our dependencies and of Python, in the user's working folder."""

USER = """
from collections.abc import Sequence
from typing import assert_type

import batonmq
from batonmq import (
    Admin, BatonError, ConsumeContext, ConsumeOptions, Message, MessageExt, MessageQueue, Producer,
    ProducerOptions, PullConsumer, PushConsumer, PushConsumerOptions, SendFailedError, SendResult,
    TopicConfig, blocking,
)


async def listen(messages: Sequence[MessageExt], context: ConsumeContext) -> None:
    for message in messages:
        assert_type(message.body, bytes)
        assert_type(message.queue_offset, int)


async def main() -> None:
    options = PushConsumerOptions(consume=ConsumeOptions(concurrency=2))
    consumer = PushConsumer("g", listen, name_servers="127.0.0.1:9876", options=options)
    async with Producer("g", options=ProducerOptions(send_timeout_ms=100)) as producer, consumer:
        try:
            result = await producer.send(Message.of("T", b"x", keys="k"))
        except SendFailedError as error:
            assert_type(error, SendFailedError)
            assert isinstance(error, BatonError)
        else:
            assert_type(result, SendResult)
            assert_type(result.acknowledged, bool)
            assert_type(result.queue, MessageQueue)
    async with PullConsumer("g") as reader, Admin() as admin:
        assert_type(await reader.fetch_queues("T"), tuple[MessageQueue, ...])
        await admin.topics.create_or_update(TopicConfig(topic_name="T"), cluster="C")
"""


def test_a_users_program_is_typed(base: Installation, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(USER)
    wrong = "message: batonmq.Message = batonmq.Message.of('T', 3)\nbatonmq.Nonsense\n"
    (tmp_path / "wrong.py").write_text(f"import batonmq\n{wrong}")
    argv = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache")]
    argv += ["--python-executable", str(base.python), "program.py", "wrong.py"]
    done = subprocess.run(
        argv, cwd=tmp_path, env=base.environ, capture_output=True, text=True, timeout=300
    )
    first, second, _ = done.stdout.splitlines()
    assert first.startswith("wrong.py:2") and 'incompatible type "int"' in first, done
    assert second.startswith("wrong.py:3") and 'has no attribute "Nonsense"' in second, done


def test_the_base_installation_has_client_and_mqctl(base: Installation) -> None:
    names = "import batonmq\nfor name in batonmq.__all__: print(getattr(batonmq, name) and name)"
    done = base.run("python", "-c", names)
    assert done.returncode == 0, done.stderr
    assert {"Producer", "PushConsumer", "Admin", "ResponseError"} <= set(done.stdout.split())
    for command in ("mqctl", "batonmq"):
        done = base.run(command, "--help")
        assert done.returncode == 0 and "Usage" in done.stdout, done.stderr


def test_the_base_installation_says_what_it_lacks(base: Installation, tmp_path: Path) -> None:
    config = tmp_path / "broker.yaml"
    config.write_text("broker: {}\n")
    named = ", ".join(PACKAGES["server"].values())
    for arguments in (["up"], ["demo"], ["broker", "-c", config], ["namesrv", "-c", config]):
        done = base.run("batonmq", *arguments, cwd=tmp_path)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == (
            f"batonmq {arguments[0]}: the servers need {named}: pip install 'batonmq[server]'\n"
        )
    for server in ("broker", "controller", "namesrv"):
        done = base.run("python", "-m", f"batonmq.{server}.main", "-c", config, cwd=tmp_path)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == f"{server}: the servers need {named}: pip install 'batonmq[server]'\n"
    for arguments in (["topicStats", "--stores", "s"], ["epochHistory", "--history", "h"]):
        done = base.run("mqctl", *arguments, cwd=tmp_path)
        assert done.returncode == 2 and "Traceback" not in done.stderr
        assert f"needs {', '.join(PACKAGES['spark'].values())}" in done.stderr
        assert "pip install 'batonmq[spark]'" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["broker.yaml"]


@contextmanager
def cluster(made: Installation, folder: Path, *command: str) -> Iterator[str]:
    """A cluster of one controller and one broker, started in `folder`; its name server."""
    port = free_base_port(1)
    argv = [*made.argv(command[0], *command[1:]), "--json", "--controllers", "1"]
    argv += ["--replicas", "1", "--base-port", str(port)]
    with subprocess.Popen(
        argv, cwd=folder, env=made.environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True,
    ) as process:  # fmt: skip
        watchdog = threading.Timer(90, process.kill)
        watchdog.start()
        try:
            assert process.stdout is not None
            said = []
            for line in process.stdout:
                said.append(line)
                if '"cluster_ready"' in line:
                    break
            else:
                raise AssertionError("".join(said))
            yield f"127.0.0.1:{port}"
        finally:
            watchdog.cancel()
            process.terminate()
            rest = process.stdout.read() if process.stdout else ""
            assert process.wait(30) == 0, rest


SEND_AND_READ = """
import asyncio, sys
from batonmq import Message, Producer, PullConsumer

async def main(names):
    async with Producer("p", name_servers=names) as producer:
        sent = await producer.send(Message.of("T", b"hello"))
    assert sent.acknowledged
    async with PullConsumer("c", name_servers=names) as consumer:
        found = await consumer.pull(sent.queue, 0, max_messages=1)
    assert [message.body for message in found.messages] == [b"hello"]

asyncio.run(main(sys.argv[1]))
"""


@pytest.mark.parametrize(
    "command", [("batonmq", "up"), ("python", "-m", "batonmq.launcher.main", "up")]
)
def test_a_cluster_starts_in_a_folder_full_of_hostile_names(
    server: Installation, base: Installation, tmp_path: Path, command: tuple[str, ...]
) -> None:
    """Its servers are the installed ones, and the base installation's client and mqctl reach it."""
    for name in HOSTILE:
        # `python -m` itself loads what its own start needs before any of ours can mend the path.
        if command[0] == "python" and Path(name).stem in sys.stdlib_module_names - {"logging"}:
            continue
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("raise RuntimeError('a file of the working folder')\n")
    with cluster(server, tmp_path, *command) as names:
        done = base.run("python", "-P", "-c", SEND_AND_READ, names, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        for arguments in (["clusterList"], ["health"], ["timeline"]):
            done = base.run("mqctl", *arguments, cwd=tmp_path)
            assert done.returncode == 0, done.stdout + done.stderr
        run = tmp_path / "batonmq-data"
        assert not re.search("Traceback|RuntimeError", _logs(run))


def _logs(data: Path) -> str:
    return "".join(file.read_text() for file in data.glob("*/process.log"))


def interpreters() -> list[str]:
    """python3.11 and newer on PATH, found by name; the running one is tested above."""
    found = []
    for minor in range(11, 20):
        name = f"python3.{minor}"
        path = shutil.which(name)
        if path is None or minor == sys.version_info.minor:
            continue
        done = subprocess.run([path, "-c", ""], capture_output=True, timeout=60, check=False)
        if done.returncode == 0:  # a shim of pyenv may stand for nothing
            found.append(name)
    return found


@pytest.mark.parametrize("name", interpreters() or [""])
def test_other_interpreters_take_it(name: str, wheel: Path, tmp_path: Path) -> None:
    """Each compiles all of it; where pip can get the base packages, the client loads as well."""
    if not name:
        pytest.skip("no other python3.11 or newer is on PATH")
    made = empty_environment(Path(str(shutil.which(name))), tmp_path / "environment")
    install_wheel(wheel, made)
    package = made.site_packages / "batonmq"
    done = made.run("python", "-W", "error", "-m", "compileall", "-q", str(package))
    assert done.returncode == 0, done.stdout
    assert made.run("python", "-W", "error", "-c", "import batonmq").returncode == 0
    pip = [sys.executable, "-m", "pip", "--python", str(made.python), "install", "--quiet"]
    pip += ["--retries", "0", "--timeout", "10", str(wheel)]
    had = subprocess.run(pip, env=os.environ, capture_output=True, timeout=300, check=False)
    if had.returncode:
        pytest.skip(f"{name}: compiled only, pip cannot get the packages for it here")
    done = made.run("python", "-W", "error", "-c", "import batonmq; print(len(batonmq.__all__))")
    assert done.returncode == 0 and int(done.stdout) > 50, done.stderr
    assert made.run("mqctl", "clusterList", "-h").returncode == 0
