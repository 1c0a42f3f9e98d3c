"""A page of a master's log cannot be read any more: SIGBUS, failover, no crash loop (R24, R17)."""

import os
from pathlib import Path

import pytest

from lab.cluster.connection import BlockingConnection, ask
from lab.cluster.processes import is_running, wait_for
from lab.cluster.stores import check_logs_equal
from lab.cluster.up import ClusterProcess

pytestmark = pytest.mark.process

VIEW_MESSAGE_BY_ID = 33
TOPIC = "BadSector"
COUNT = 60


def test_r24_the_master_that_dies_of_a_bad_page_names_it_and_is_filled_again(
    tmp_path: Path,
) -> None:
    """1 pages vanish under the master's map. 2 it dies of reading one, the slave takes over. 3 it
    starts: the page is named, it is suspect, fetches its log again and joins."""
    with ClusterProcess(tmp_path / "cluster", controllers=1, replicas=2) as cluster:
        cluster.wait_in_sync(2)
        master = cluster.master()
        with BlockingConnection(master["address"]) as probe:
            replies = [probe.send(TOPIC, b"m" * 500 + b"%d" % n) for n in range(COUNT)]
        assert {reply.code for reply in replies} == {0}
        offset = int(replies[-1].ext["msgId"][-16:], 16)
        segment = min(Path(master["dataDir"], "commitlog").glob("0*"))
        size = segment.stat().st_size
        os.truncate(segment, 4096)
        try:
            ask(master["address"], VIEW_MESSAGE_BY_ID, {"offset": str(offset)})
        except (OSError, TimeoutError, EOFError) as error:
            print(f"no answer, as expected: {error!r}")
        wait_for("the master's end", lambda: not is_running(master["pid"]))
        assert "Bus error" in cluster.broker_log(master)
        cluster.wait_new_master(master["address"])

        cluster.restart(master)
        cluster.wait_in_sync(2)
        log = cluster.broker_log(master)
        assert f"bad_sector file={segment} position=4096" in log
        assert "damaged_tail_discarded" in log and log.count("Bus error") == 1
        assert segment.stat().st_size == size
        with BlockingConnection(cluster.master()["address"]) as probe:
            assert probe.send(TOPIC, b"after").code == 0
        folders = cluster.data_folders
        cluster.stop()
        assert check_logs_equal(folders) > offset
