"""Our brokers under RocketMQ's controllers: alone, and with a Java broker in the group.

The tests of a class share one group and one load, and go on where the one before ended. Java has
its defaults but for what `test_java_mixed` names, too.
"""

import signal
from collections.abc import Iterator

import pytest

from lab.cluster.java import SEGMENT
from lab.cluster.mixed import MixedGroup, logs_equal, nothing_lost, steady_load, wait_master
from lab.cluster.writer import Writer, wait_acks

pytestmark = pytest.mark.java

OURS, OTHER = 0, 1
TOPIC = "UnderJava"
FAST_HEARTBEATS = {"haSendHeartbeatInterval": 1000}


@pytest.fixture(scope="class")
def group(
    java_classpath: str, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[MixedGroup]:
    """Two brokers, the first of them ours and at the beginning the master."""
    story = request.cls
    folder = tmp_path_factory.mktemp("under-java")
    with MixedGroup(folder, 2, java_controllers=story.controllers) as running:
        running.start_ours(OURS)
        running.wait_for("a master", lambda: running.master() == OURS)
        if story.other_is_java:
            running.start_java(OTHER, **FAST_HEARTBEATS)
        else:
            running.start_ours(OTHER)
        yield running


@pytest.fixture(scope="class")
def load(group: MixedGroup) -> Iterator[Writer]:
    with steady_load(group, TOPIC, OURS, OTHER) as writer:
        yield writer


def master_epoch(group: MixedGroup) -> int:
    state = group.group_state()
    assert state is not None
    return int(state["masterEpoch"])


def take_over(group: MixedGroup, load: Writer, dead: int, heir: int) -> None:
    """kill -9 of the master, under load."""
    group.kill(dead)
    wait_master(group, load, heir)
    nothing_lost(group, load)


def switches(group: MixedGroup, load: Writer, *places: int) -> None:
    """`electMaster` to each in turn, under load; then nothing is lost."""
    for place in places:
        group.elect(group.address(place))
        wait_master(group, load, place)
        group.wait_in_sync(OURS, OTHER)
    nothing_lost(group, load)


def logs_are_equal(group: MixedGroup, load: Writer) -> None:
    """Over more than one segment."""
    log_dir = group.store(OURS) / "commitlog"
    group.wait_for("a second segment with bytes", lambda: len(list(log_dir.glob("0*"))) > 2)
    load.stop()
    group.wait_in_sync(OURS, OTHER)
    assert logs_equal(group, OURS, OTHER) > SEGMENT


class TestWithAJavaBroker:
    controllers = 1
    other_is_java = True

    def test_ours_is_killed(self, group: MixedGroup, load: Writer) -> None:
        """It comes back as the slave of Java's."""
        take_over(group, load, OURS, OTHER)
        group.start_ours(OURS)
        group.wait_in_sync(OURS, OTHER)

    def test_java_is_killed(self, group: MixedGroup, load: Writer) -> None:
        take_over(group, load, OTHER, OURS)
        group.start_java(OTHER, **FAST_HEARTBEATS)
        group.wait_in_sync(OURS, OTHER)

    def test_planned_switches(self, group: MixedGroup, load: Writer) -> None:
        switches(group, load, OTHER, OURS)

    def test_logs_are_equal(self, group: MixedGroup, load: Writer) -> None:
        logs_are_equal(group, load)


class TestTwoOfOurs:
    controllers = 3
    other_is_java = False

    def test_the_master_is_killed(self, group: MixedGroup, load: Writer) -> None:
        for dead, heir in ((OURS, OTHER), (OTHER, OURS)):
            take_over(group, load, dead, heir)
            group.start_ours(dead)
            group.wait_in_sync(OURS, OTHER)

    def test_r8_a_master_that_hung_goes_on_as_a_slave(
        self, group: MixedGroup, load: Writer
    ) -> None:
        """Only the controllers' time-out tells that it hangs."""
        group.signal(OURS, signal.SIGSTOP)
        try:
            wait_master(group, load, OTHER)
        finally:
            group.signal(OURS, signal.SIGCONT)
        group.wait_in_sync(OURS, OTHER)
        nothing_lost(group, load)

    def test_planned_switches(self, group: MixedGroup, load: Writer) -> None:
        switches(group, load, OURS, OTHER, OURS)

    def test_r33_a_master_that_is_told_to_end_hands_over(
        self, group: MixedGroup, load: Writer
    ) -> None:
        group.kill(OURS, signal.SIGTERM)
        wait_master(group, load, OTHER)
        nothing_lost(group, load)
        group.start_ours(OURS)
        group.wait_in_sync(OURS, OTHER)

    def test_both_are_killed_and_the_last_master_goes_on_in_a_new_epoch(
        self, group: MixedGroup, load: Writer
    ) -> None:
        """R3: not in its old one, though the controllers still name it."""
        epoch = master_epoch(group)
        for place in (OURS, OTHER):
            group.kill(place)
        for place in (OURS, OTHER):
            group.start_ours(place)
        group.wait_in_sync(OURS, OTHER)
        wait_acks(load, 50)
        assert master_epoch(group) > epoch
        nothing_lost(group, load)

    def test_master_and_leading_controller_are_killed(
        self, group: MixedGroup, load: Writer
    ) -> None:
        dead = group.master()
        assert dead is not None
        group.kill_controller()
        take_over(group, load, dead, OURS if dead == OTHER else OTHER)
        group.start_ours(dead)
        group.wait_in_sync(OURS, OTHER)

    def test_logs_are_equal(self, group: MixedGroup, load: Writer) -> None:
        logs_are_equal(group, load)
