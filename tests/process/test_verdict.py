"""`mqctl verdict` against what really happened: an injected incident must be named first."""

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.cluster.stores import copy_sparsely
from lab.cluster.up import rounds
from lab.faults.verdict import (
    SETTINGS,
    Base,
    ask_live,
    ask_verdict,
    first,
    lost,
    make_bases,
    names,
    safe,
)
from lab.faults.verdict_files import FILE_INCIDENTS, Copy
from lab.faults.verdict_live import LIVE_INCIDENTS, LiveVerdict

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

SEEDS = range(7, 7 + rounds(1, soak=8))


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Base]:
    """What a killed cluster left, a stopped one, and one whose set was a single member."""
    folder = tmp_path_factory.mktemp("verdict")
    return {base.name: base for base in make_bases(folder)}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", FILE_INCIDENTS)
def test_an_incident_in_files_is_named_first_and_never_called_safe_if_a_message_is_lost(
    name: str, seed: int, bases: dict[str, Base], tmp_path: Path
) -> None:
    """In what a killed cluster left; under `make soak` in any of the three folders."""
    rng = random.Random(seed)
    base = bases["killed"] if seed == SEEDS[0] else rng.choice(list(bases.values()))
    copy_sparsely(base.data, tmp_path / "data")
    copied = Copy(tmp_path / "data", base.folder, rng)
    expected = FILE_INCIDENTS[name](copied)
    document = ask_verdict(str(copied.data), home=copied.data)
    is_lost = lost(base.acked, copied.data) > 0
    shutil.rmtree(copied.data)
    assert names(first(document), expected), document["incidents"][:2]
    assert safe(document) in ({"lost", "unknown"} if is_lost else {"safe", "unknown"})


@pytest.mark.parametrize("name", ["killed", "stopped", "alone"])
def test_nothing_is_lost_when_all_that_happened_is_that_processes_ended(
    name: str, bases: dict[str, Base]
) -> None:
    document = ask_verdict(str(bases[name].data), home=bases[name].folder)
    assert safe(document) == "safe"


def test_r1_the_only_member_of_the_set_is_gone(bases: dict[str, Base], tmp_path: Path) -> None:
    """The two slaves were away when the last messages were acknowledged."""
    base = bases["alone"]
    copy_sparsely(base.data, tmp_path / "data")
    document = ask_verdict(str(tmp_path / "data"), home=tmp_path)
    (holder,) = document["groups"][0]["holders"]
    shutil.rmtree(tmp_path / "data" / holder)
    document = ask_verdict(str(tmp_path / "data"), home=tmp_path)
    assert lost(base.acked, tmp_path / "data") > 0
    assert (safe(document), first(document)) == ("lost", ("store-lost", holder))


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveVerdict]:
    running = LiveVerdict(tmp_path_factory.mktemp("live") / "cluster", SETTINGS)
    yield running
    running.stop()


def test_a_calm_cluster_is_ok(live: LiveVerdict) -> None:
    live.cluster.wait_for("calm", lambda: ask_live(live)["state"] == "ok", 20)
    document = ask_live(live)
    assert (document["state"], safe(document), document["incidents"]) == ("ok", "safe", [])
    assert all(each["allowed"] for each in document["restarts"])


LIVE = [
    name
    for name in LIVE_INCIDENTS
    if rounds(0, 1) or name not in ("master-stopped", "slave-stopped", "slave-hung", "master-hung")
]
"""How a process ended is found out in one way for all roles."""


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", LIVE)
def test_an_incident_of_a_running_cluster_is_named_first(
    name: str, seed: int, live: LiveVerdict
) -> None:
    """Also by addresses alone, as for a cluster on other hosts: there a killed node is away."""
    addresses = ";".join(node.controller_address for node in live.cluster.layout.name_servers)
    where = ("-n", live.cluster.name_servers, "-a", addresses)

    def is_away(role: str) -> bool:
        document = ask_verdict(*where, home=live.folder)
        return first(document)[0] == f"{role}-away" and safe(document) != "lost"

    try:
        expected = LIVE_INCIDENTS[name](live, random.Random(seed))
        live.cluster.wait_for(f"{expected}", lambda: names(first(ask_live(live)), expected), 20)
        role, _, how = name.rpartition("-")
        if how == "killed":
            live.cluster.wait_for(f"{role}-away", lambda: is_away(role), 20)
    finally:
        live.heal()
