"""What stock mqadmin prints of our cluster is what it printed of a Java one, for the commands of
every day; docs/mqadmin.md has a row for each command that there is."""

import json
from typing import Any, Final

import pytest

from lab.cluster.java import JavaProgram
from lab.cluster.mixed import MixedGroup
from lab.cluster.processes import ROOT
from tests.interop.mqadmin_daily import DONE, GROUP, GROUPS, SAME, TOPIC, Daily, names, told

pytestmark = pytest.mark.java

GOLDEN: Final = ROOT / "tests" / "golden" / "java-5.3.3-tools" / "mqadmin.json"
WITHOUT: Final = {"putLatency99", "putLatency999"}
"""Figures of brokerStatus that Java gives and we do not; readers take them as unknown."""


@pytest.fixture(scope="module")
def answers(java_classpath: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Command -> (what to compare, output)."""
    folder = tmp_path_factory.mktemp("daily")
    with MixedGroup(folder, 1) as group:
        group.start_ours(0)
        group.wait_for("a master", lambda: group.master() == 0 and group.is_open(0))
        places = {
            "NS": group.name_server,
            "CONTROLLER": group.controller,
            "BROKER": group.address(0),
        }
        clients = JavaProgram(java_classpath, folder / "clients", "Consumers", places["NS"])
        with clients, JavaProgram(java_classpath, folder / "mqadmin", "MqAdmin") as mqadmin:

            def consume() -> None:
                clients.send(f"push one {GROUP} {TOPIC} CLUSTERING TAG *")
                clients.wait_for("the message", lambda: bool(clients.of("by")))

            run = Daily(mqadmin, places, folder).run(consume)
            return {command: (how, output) for command, how, output in run}


def test_mqadmin_prints_of_us_what_it_prints_of_java(answers: dict[str, Any]) -> None:
    golden = json.loads(GOLDEN.read_text())
    assert golden.keys() == answers.keys()
    wrong = {}
    for command, (how, output) in answers.items():
        assert "Exception" not in output or "Exception" in str(golden[command]), output
        if how == SAME:
            if (found := told(output)) != golden[command]:
                wrong[command] = {
                    "java": [line for line in golden[command] if line not in found],
                    "ours": [line for line in found if line not in golden[command]],
                }
        elif how == GROUPS:
            assert GROUP in output, (command, output)
        elif how != DONE and (lacks := set(golden[command]) - set(names(output)) - WITHOUT):
            wrong[command] = {"lacks": sorted(lacks)}
    assert not wrong, json.dumps(wrong, indent=1)
