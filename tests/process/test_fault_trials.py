"""One trial of each fault of the laboratory: what must hold, never how fast.

After each trial the laboratory itself asks: is every acknowledged write there, in its order, and
was each epoch acknowledged by one broker only, the elected one (G1, G2)? All share one cluster, so
that a later fault meets what an earlier one left.
"""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from left_out import leave_out

from lab.cluster.network import why_not
from lab.cluster.up import rounds
from lab.faults.catalogue import BY_NAME
from lab.faults.trial import Lab, make_network

pytestmark = pytest.mark.process

LEFT_OUT = {
    "full-load",  # takes minutes; `python -m lab.faults table`
    "pause-300ms",  # its promise is one of time
}
ONLY_SOAKED = {
    # One direction of a cut that is done in both; a master's are done singly, too.
    "oneway-controllers-deaf",
    "oneway-controllers-unheard",
    "oneway-replicas-deaf",
    "oneway-replicas-unheard",
    "oneway-leader-brokers",
    "oneway-brokers-leader",
    "oneway-leader-peer",
    # What is done to a master as well, or to another process of the same role.
    "kill-slave",
    "hang-slave",
    "full-disk-slave",
    "eio-sync-slave",
    "hang-follower",
    "cut-leader-peer",
    # Part of others: all brokers are killed, and the leader hangs as the master dies.
    "two-kills",
    "hang-leader-1s-kill-master",
    # Of the disks that lost something, one that was wiped is done.
    "old-backup",
    "wiped-slave-alone",
    # Of the kills inside a step, the one in a cut is done; test_first_start has the first start.
    "kill-in-epoch-append",
    "kill-in-vote",
    "kill-in-first-start",
}
"""The simulation does all of them."""
LEFT_OUT |= ONLY_SOAKED if rounds(1, soak=0) else set()
SECURED = [name for name, fault in BY_NAME.items() if fault.secure]
TIME_DECIDES = {"elections"}
"""It happens on a busy machine, and costs no message."""
ELECTS_NOBODY = {"kill-controllers"}
PACE = ("--interval-ms", "8")
"""A quarter of what measurements use: nothing is measured here."""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with Lab(tmp_path_factory.mktemp("faults") / "lab", make_network(), load=PACE) as running:
        yield running


@pytest.mark.parametrize("name", [n for n in BY_NAME if n not in LEFT_OUT and n not in SECURED])
def test_g1_g2_nothing_acknowledged_is_lost_and_one_master_acknowledges(
    lab: Lab, name: str
) -> None:
    """The fault is done under load, undone, and everything is read back."""
    try_once(lab, name)


def try_once(lab: Lab, name: str) -> None:
    fault = BY_NAME[name]()
    if fault.needs_cuts and not lab.network.can_cut:
        leave_out(why_not())
    trial = lab.trial(fault, random.Random(name))
    passed_over = set() if name in ELECTS_NOBODY else TIME_DECIDES
    findings = [found for found in trial.findings if found.rule not in passed_over]
    assert not findings, f"{trial.notes}\n{lab.cluster.diagnostics()}"
    assert trial.acked > 0


def test_g3_after_all_that_the_logs_are_equal(lab: Lab) -> None:
    """Everything is stopped; every ack of the module is looked for once more, and the replicas'
    logs are the same bytes up to the smaller confirmOffset."""
    assert lab.close_and_compare() == []


def test_g1_g2_g3_kill_hang_and_switch_with_tls_and_users_on(tmp_path: Path) -> None:
    """Every port takes TLS only, and each request is signed by a user of the table."""
    with Lab(tmp_path, make_network(), load=PACE, secure=True) as secured:
        for name in SECURED:
            try_once(secured, name)
        assert secured.close_and_compare() == []
