"""kill -9 at every disk call of a server's first start: the next start works.

Each server is a fork with a fault point that kills it at its n-th call that changes the disk, for
n = 0, 1, … until it came to its work and ended on SIGTERM unharmed; then it is started again in the
folder that it left. The usual run takes every `STRIDE`-th n, the soak all of them.
"""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from click.testing import CliRunner

from batonmq.launcher.forks import ForkServer, ServerProcess
from batonmq.launcher.main import main
from lab.cluster.fault_points import fault_environment
from lab.cluster.processes import ROOT, free_base_port, is_running, tail, wait_for
from lab.cluster.up import rounds

pytestmark = pytest.mark.process

STRIDE: Final = rounds(14, 1)
GATE_OPEN: Final = "gate_opened"
MASTER: Final = "master_opened"


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> Iterator[ForkServer]:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # for the fault points
    server = ForkServer()
    yield server
    server.close()


async def start(
    forks: ForkServer, server: str, config: Path, log: Path, rules: str = ""
) -> ServerProcess:
    argv = [sys.executable, "-P", "-m", f"batonmq.{server}.main", "-c", str(config)]
    return await forks.start(argv, log, os.environ | fault_environment(disk=rules), ())


async def run(
    forks: ForkServer, server: str, config: Path, log: Path, ready: str, rules: str = ""
) -> int:
    """Starts it, SIGTERM as soon as its log says `ready`; how it ended."""
    process = await start(forks, server, config, log, rules)
    await asyncio.to_thread(
        wait_for,
        f"{server} to say {ready} or to end",
        lambda: not is_running(process.pid) or (log.exists() and ready in log.read_text()),
        30,
        lambda: tail(log),
    )
    if is_running(process.pid):
        os.kill(process.pid, signal.SIGTERM)
    return await process.wait()


def controller_config(folder: Path, base: int) -> Path:
    folder.mkdir()
    path = folder / "namesrv.yaml"
    path.write_text(
        f"namesrv:\n  listenPort: {base}\n  bindAddress: 127.0.0.1\n"
        "  enableControllerInNamesrv: true\n"
        f"controller:\n  controllerDLegerPeers: n0-127.0.0.1:{base + 2}\n"
        "  controllerDLegerSelfId: n0\n  bindAddress: 127.0.0.1\n"
        f"  controllerStorePath: {folder / 'store'}\n"
    )
    return path


def broker_config(folder: Path, base: int, name: str) -> Path:
    folder.mkdir()
    path = folder / "broker.yaml"
    path.write_text(
        f"broker:\n  brokerName: {name}\n  brokerIP1: 127.0.0.1\n  listenPort: {base + 1035}\n"
        f"  namesrvAddr: 127.0.0.1:{base}\n"
        f"store:\n  storePathRootDir: {folder / 'store'}\n  haListenPort: {base + 1036}\n"
        "  mappedFileSizeCommitLog: 1048576\n"
        f"replicas:\n  controllerAddr: 127.0.0.1:{base + 2}\n"
    )
    return path


async def walk(
    forks: ForkServer,
    server: str,
    configs: Iterator[Path],
    ready: str,
    kill: str,
    stride: int,
) -> int:
    """Kills one start after the other at `kill after n`; how many starts were killed. In `kill`,
    HALF stands for n // 2."""
    for kills, config in enumerate(configs):
        number = kills * stride
        log = config.with_name("first.log")
        rules = f"{kill} after {number}".replace("HALF", str(number // 2))
        status = await run(forks, server, config, log, ready, rules)
        if status == 0:
            return kills
        assert status == -signal.SIGKILL, f"{kill} after {number}: {status}\n{tail(log, 4000)}"
        again = config.with_name("again.log")
        status = await run(forks, server, config, again, ready)
        left = f"{kill} after {number}, at {tail(log, 300)}\nthen {status}: {tail(again, 4000)}"
        assert status == 0 and ready in again.read_text(), left
    raise AssertionError("there are always more configurations")


@pytest.mark.parametrize(
    ("moment", "some", "stride"),
    [("before changes", 35, STRIDE), ("during pwrite", 5, rounds(5, 1))],
)
async def test_a_controllers_first_start_killed_at_any_step(
    tmp_path: Path, forks: ForkServer, moment: str, some: int, stride: int
) -> None:
    """A name server with its controller, up to its own election and a clean end."""
    base = free_base_port(1)
    configs = (controller_config(tmp_path / str(n), base) for n in range(1_000))
    kills = await walk(forks, "namesrv", configs, GATE_OPEN, f"kill {moment} *", stride)
    assert kills >= some // stride


@pytest.mark.parametrize(
    ("rules", "some", "stride"),
    [
        ("kill before changes", 100, STRIDE),
        ("kill during pwrite", 15, rounds(7, 1)),
        ("room * ENOSPC once after HALF; kill before changes", 100, rounds(33, 1)),
    ],
)
async def test_a_brokers_first_start_killed_at_any_step(
    tmp_path: Path, forks: ForkServer, rules: str, some: int, stride: int
) -> None:
    """A broker from its empty folder to its first mastership and a clean end; each time one of a
    group of its own, of one controller that stays. The third time it finds no room before (R45)."""
    base = free_base_port(1)
    log = tmp_path / "controller.log"
    config = controller_config(tmp_path / "controller", base)
    controller = await start(forks, "namesrv", config, log)
    wait_for("a controller", lambda: log.exists() and GATE_OPEN in log.read_text())
    configs = (broker_config(tmp_path / str(n), base, f"group-{n}") for n in range(1_000))
    kills = await walk(forks, "broker", configs, MASTER, f"{rules} *", stride)
    assert kills >= some // stride
    os.kill(controller.pid, signal.SIGTERM)
    assert await controller.wait() == 0


def test_a_wrong_key_is_named_once_and_nothing_is_written(tmp_path: Path) -> None:
    given, data = tmp_path / "given.yaml", tmp_path / "data"
    for section, key, meant in (
        ("broker", "flushDiskTyp", "store.flushDiskType"),
        ("controller", "brokerSessionTimeoutM", "brokerSessionTimeoutMs"),
    ):
        given.write_text(f"{section}: {{{key}: x}}")
        words = ["up", "--json", "--data", str(data), "--config", str(given)]
        ran = CliRunner().invoke(main, words)
        (event,) = map(json.loads, ran.stdout.splitlines())
        what = f"--config: {section}.{key} = 'x': unknown key, did you mean {meant}?"
        assert (ran.exit_code, event["event"], event["error"]) == (2, "failed", what)
        assert not data.exists()
