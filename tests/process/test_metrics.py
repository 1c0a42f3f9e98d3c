"""`/metrics` of a real cluster, and the alerts over them, tried by Prometheus' own tools."""

import re
import shutil
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from left_out import leave_out
from prometheus_client.parser import text_string_to_metric_families

from batonmq.blocking import BlockingLitePullConsumer, BlockingProducer
from batonmq.public import Message
from lab.cluster.processes import ROOT
from lab.cluster.up import ClusterProcess

pytestmark = pytest.mark.process

OBSERVE: Final = ROOT / "deploy" / "observe"
FIRES: Final = [
    tuple(line.split(" | "))
    for line in (Path(__file__).parent / "testdata" / "alerts.txt").read_text().splitlines()
]
"""An alert that is silent on a calm cluster, when it has to fire, a series that its fault changes,
as promtool writes it, and its values then."""


@pytest.fixture
def needs_promtool() -> None:
    if shutil.which("promtool") is None:
        leave_out("this machine lacks promtool (Debian: prometheus)")


def promtool(*arguments: str, folder: Path = OBSERVE) -> str:
    ran = subprocess.run(
        ["promtool", *arguments], cwd=folder, capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.mark.usefixtures("needs_promtool")
def test_prometheus_takes_the_files() -> None:
    promtool("check", "config", "prometheus.yml")
    assert "SUCCESS" in promtool("check", "rules", "rules.yml")


@pytest.mark.usefixtures("needs_promtool")
def test_no_alert_on_a_calm_cluster() -> None:
    rules = yaml.safe_load((OBSERVE / "rules.yml").read_text())["groups"][0]["rules"]
    calm = yaml.safe_load((OBSERVE / "rules_test.yml").read_text())["tests"][0]
    named = [rule["alert"] for rule in rules]
    assert [check["alertname"] for check in calm["alert_rule_test"]] == named
    assert {alert for alert, *_ in FIRES} == set(named)
    promtool("test", "rules", "rules_test.yml")


@pytest.mark.usefixtures("needs_promtool")
def test_each_alert_fires_by_its_fault(tmp_path: Path) -> None:
    """promtool compares labels and texts whole; that it names no missing alert is what counts."""
    document: dict[str, Any] = yaml.safe_load((OBSERVE / "rules_test.yml").read_text())
    document["rule_files"] = [str(OBSERVE / "rules.yml")]
    [test] = document["tests"]
    calm = test["input_series"]
    for alert, when in {(alert, when) for alert, when, _, _ in FIRES}:
        changed = {series: values for name, _, series, values in FIRES if name == alert}
        kept = [each for each in calm if each["series"] not in changed]
        test["input_series"] = kept + [{"series": s, "values": v} for s, v in changed.items()]
        test["alert_rule_test"] = [{"alertname": alert, "eval_time": when}]  # expects none
        (tmp_path / f"{alert}.yml").write_text(yaml.safe_dump(document))
    files = map(str, tmp_path.glob("*.yml"))
    ran = subprocess.run(
        ["promtool", "test", "rules", *files], capture_output=True, text=True, timeout=300
    )
    got = r"got:\[\s*0:\s*Labels:\{[^}]*alertname=\"(\w+)\""
    fired = re.findall(got, ran.stderr + ran.stdout)
    assert sorted(fired) == sorted({alert for alert, *_ in FIRES})


class Pages:
    """What the processes of a cluster publish now."""

    def __init__(self, cluster: ClusterProcess) -> None:
        document = cluster.document
        brokers = [node["address"] for node in document["brokers"]]
        names = [node["address"] for node in document["nameServers"]]
        self.of_brokers = {address: self.read(address) for address in brokers}
        self.of_name_servers = {address: self.read(address) for address in names}

    @staticmethod
    def read(address: str, path: str = "/metrics") -> str:
        host, _, port = address.rpartition(":")
        with urllib.request.urlopen(f"http://{host}:{int(port) + 5}{path}", timeout=10) as answer:
            return str(answer.read().decode())

    @property
    def all(self) -> list[str]:
        return [*self.of_brokers.values(), *self.of_name_servers.values()]

    @staticmethod
    def samples(page: str, name: str, **labels: str) -> Iterator[tuple[dict[str, str], float]]:
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                if sample.name == name and labels.items() <= sample.labels.items():
                    yield sample.labels, sample.value

    def value(self, page: str, name: str, **labels: str) -> float:
        [(_, value)] = self.samples(page, name, **labels)
        return value

    def masters(self) -> list[str]:
        return [
            address
            for address, page in self.of_brokers.items()
            if self.value(page, "batonmq_broker_role", role="master")
        ]


def names_of(pages: Pages) -> set[str]:
    return {
        name for page in pages.all for name in re.findall(r"^# TYPE (\S+) ", page, re.MULTILINE)
    }


def documented() -> set[str]:
    page = (ROOT / "docs" / "metrics.md").read_text()
    return set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))


def eventually(cluster: ClusterProcess, what: str, holds: Callable[[Pages], bool]) -> Pages:
    def look() -> Pages | None:
        pages = Pages(cluster)
        return pages if holds(pages) else None

    return cluster.wait_for(what, look)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ClusterProcess]:
    with ClusterProcess(tmp_path) as running:
        yield running


def test_the_figures_of_a_cluster_follow_it_through_a_failover(cluster: ClusterProcess) -> None:
    with BlockingProducer("p", name_servers=cluster.name_servers) as producer:
        for number in range(20):
            producer.send(Message.of("Seen", b"x" * 100, tags=str(number)))
        consumer = BlockingLitePullConsumer("readers", name_servers=cluster.name_servers)
        consumer.subscribe("Seen")
        taken = 0
        with consumer:
            while taken < 20:
                taken += len(consumer.poll(10))
        for number in range(3):  # nobody reads these: the lag of a group that is offline
            producer.send(Message.of("Seen", b"x" * 100, tags=str(number)))

        def is_behind(pages: Pages) -> bool:
            [master] = pages.masters()
            lag = pages.samples(
                pages.of_brokers[master],
                "rocketmq_consumer_ready_messages",
                consumer_group="readers",
                topic="Seen",
            )
            return [value for _, value in lag] == [3]

        pages = eventually(cluster, "the lag of the group", is_behind)
        [old] = pages.masters()
        page = pages.of_brokers[old]
        assert pages.value(page, "rocketmq_messages_in_total", topic="Seen") == 23
        assert pages.value(page, "batonmq_sync_state_set_size") == 3
        assert pages.value(page, "batonmq_ack_wait_seconds_count") >= 20
        assert len(list(pages.samples(page, "batonmq_replica_lag_bytes"))) == 2
        assert pages.value(page, "batonmq_confirm_offset_bytes") > 2000
        assert names_of(pages) == documented()
        assert [p.read(a, "/readyz") for p in (pages,) for a in pages.of_brokers] == ["ok\n"] * 3

        [broker] = [node for node in cluster.brokers if node["address"] == old]
        cluster.kill(broker)
        producer.send(Message.of("Seen", b"y"))
    left = [node["address"] for node in cluster.brokers if node["address"] != old]

    def new_master() -> str | None:
        new = {address: Pages.read(address) for address in left}  # a page is kept for a second
        found = [a for a in left if pages.value(new[a], "batonmq_broker_role", role="master")]
        return new[found[0]] if found else None

    page = cluster.wait_for("the new master's figures", new_master)
    assert pages.value(page, "batonmq_master_epoch") == 2
    elected = {"election_result": "new_master_elected", "kind": "clean"}

    def two_elections(pages_of: list[str]) -> bool:
        counts = (pages.value(each, "batonmq_elections_total", **elected) for each in pages_of)
        return max(counts) == 2

    nodes = [node["address"] for node in cluster.document["nameServers"]]
    cluster.wait_for(
        "the count of elections",
        lambda: two_elections([Pages.read(node) for node in nodes]) or None,
    )
