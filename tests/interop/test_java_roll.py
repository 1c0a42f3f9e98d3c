"""Stock Java clients, every setting at its default, through `mqctl roll` to the version before, and
under `make soak` back. No send fails, and every acknowledged message is consumed."""

import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from lab.cluster.earlier_version import NoEarlierVersionError, earlier_checkout, interpreter
from lab.cluster.stock_load import StockLoad
from lab.cluster.up import ClusterProcess, rounds
from tests.interop.conftest import RunJava

pytestmark = pytest.mark.java


def test_no_send_of_a_stock_client_fails_in_rolls(tmp_path: Path, run_java: RunJava) -> None:
    try:
        checkout = earlier_checkout()
    except NoEarlierVersionError as error:
        pytest.skip(str(error))
    former = interpreter(tmp_path, checkout)
    # The version before refuses a section of this one: a setting that it lacks is not written.
    settings: dict[str, dict[str, object]] = {
        "namesrv": {"replicaRoutes": True},
        "metrics": {"metricsExporterType": "DISABLE"},
    }
    with (
        ClusterProcess(tmp_path / "c", overrides=settings, respawn=True) as cluster,
        ExitStack() as stack,
    ):
        load = StockLoad(run_java, stack, cluster.name_servers, "JavaRolled")
        load.go_on(100)
        for number in range(rounds(1, 20)):
            python = sys.executable if number % 2 else str(former)
            ran = cluster.mqctl("roll", "--within", "60", "--python", python)
            assert ran.code == 0, f"{ran.out}\n{ran.err}\n{cluster.diagnostics()}"
            load.go_on(100)
            print(number, python, load.since(0))
        print(load.finish(), load.since(0), len(load.acked("sync")))
        assert load.failed() == []
