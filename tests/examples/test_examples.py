"""Each example against a real cluster, started as a reader would start it."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from lab.cluster.cluster import SMALL_STORE, merged
from lab.cluster.processes import ROOT, spawn, wait_for
from lab.cluster.up import ClusterProcess

pytestmark = pytest.mark.process

LIMIT_S: Final = 120
DRINKS: Final = sorted([f"espresso {n}" for n in range(10)] + [f"tea {n}" for n in range(3)])


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterProcess]:
    """A controller and two replicas; a broker that dies is started again."""
    settings = merged(
        SMALL_STORE, {"broker": {"recallMessageEnable": True, "transactionCheckInterval": 500}}
    )
    folder = tmp_path_factory.mktemp("examples")
    with ClusterProcess(
        folder, controllers=1, replicas=2, settings=settings, respawn=True
    ) as running:
        running.wait_in_sync(2)
        yield running


def argv(cluster: ClusterProcess, name: str, *arguments: str) -> list[str]:
    script = str(ROOT / "examples" / name)
    return [sys.executable, script, "--name-servers", cluster.name_servers, *arguments]


def run(cluster: ClusterProcess, name: str, *arguments: str) -> str:
    return output_of(argv(cluster, name, *arguments))


def output_of(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def pasted(cluster: ClusterProcess, code: str) -> str:
    """What a piece of code of a page prints, with the name servers of this cluster."""
    code, count = re.subn(r'"(127\.0\.0\.1|host):9876"', repr(cluster.name_servers), code)
    assert count
    return output_of([sys.executable, "-c", code])


def test_the_program_of_the_quick_start(cluster: ClusterProcess) -> None:
    (program,) = re.findall(r"^```python\n(.*?)^```$", page("quickstart.md"), re.M | re.S)
    assert "b'one espresso'" in pasted(cluster, program)


ONE_LINERS: Final = re.findall(r"^`(async with .*)`$", page("python-api.md"), re.M)


def test_the_python_api_shows_how_each_kind_of_client_begins() -> None:
    assert [line.split()[2].partition("(")[0] for line in ONE_LINERS] == [
        "Admin",
        "Producer",
        "TransactionProducer",
    ]


@pytest.mark.parametrize("line", ONE_LINERS)
def test_the_one_liners_of_the_python_api(cluster: ClusterProcess, line: str) -> None:
    pasted(
        cluster,
        "import asyncio\n"
        "from batonmq import Admin, Producer, TransactionProducer, TransactionState\n"
        "def check(message): return TransactionState.COMMIT\n"
        f"async def main():\n    {line}\n"
        "asyncio.run(main())\n",
    )


def test_what_the_producer_sends_comes_to_both_consumers(cluster: ClusterProcess) -> None:
    sent = run(cluster, "producer.py")
    assert sent.count("sent order-") == 10 and "sent a batch of 3" in sent
    for consumer in ("push_consumer.py", "lite_pull_consumer.py"):
        shown = run(cluster, consumer, "--count", "13")
        assert sorted(re.findall("got '(.*?)'", shown)) == DRINKS, consumer


def test_the_steps_of_each_order_are_in_their_order(cluster: ClusterProcess) -> None:
    shown = run(cluster, "ordered.py", "--orders", "8")
    assert re.findall(r": (.*)", shown) == ["created, paid, packed, shipped"] * 8


def test_delayed_messages_come_in_the_order_of_their_times(cluster: ClusterProcess) -> None:
    shown = run(cluster, "delayed.py")
    assert "recalled 'second'" in shown
    assert re.findall("got '(.*?)'", shown) == ["first", "third"]


def test_consumers_see_committed_transactions_only(cluster: ClusterProcess) -> None:
    shown = run(cluster, "transaction.py")
    assert set(re.findall("consumers see '(.*?)'", shown)) == {"good card", "slow card"}
    assert "the broker asks for the outcome of 'slow card'" in shown


def test_questions_are_answered(cluster: ClusterProcess) -> None:
    shown = run(cluster, "request_reply.py")
    assert "'HOW ARE YOU'" in shown and "'WHAT TIME IS IT'" in shown


def test_a_popped_message_that_was_not_acknowledged_comes_again(cluster: ClusterProcess) -> None:
    shown = run(cluster, "pop_consumer.py")
    assert "'resize' is done, try 1" in shown and "'crop' is done, try 1" in shown
    assert "'rotate' is done, try 2" in shown


def test_a_failover_loses_nothing(cluster: ClusterProcess, tmp_path: Path) -> None:
    log = tmp_path / "failover.log"
    child = spawn(argv(cluster, "failover.py", "--seconds", "5"), log)
    try:
        wait_for("the first ack", lambda: "acknowledged by" in log.read_text())
        master = cluster.master()
        cluster.kill(master)
        assert child.wait(LIMIT_S) == 0, log.read_text()
    finally:
        child.kill()
        child.wait()
    before, after = re.findall(r"acknowledged by (\S+)", log.read_text())[:2]
    assert before == master["address"] != after
    assert "lost 0" in log.read_text()
