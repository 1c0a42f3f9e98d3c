"""What the leader adds to a command before it enters the log: liveness, floors, clocks, waits."""

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest

from batonmq.controller.config import ControllerConfig, RuntimeConfig
from batonmq.controller.liveness import events as ev
from batonmq.controller.liveness.core import LivenessCore
from batonmq.controller.raft.log import Applied, Machine, NotApplied, Outcome, Unknown
from batonmq.controller.requests import ControllerRequests, OutcomeUnknownError
from batonmq.controller.rules.commands import (
    AlterSyncStateSet,
    AnyCommand,
    BecomeController,
    CommandResult,
    ElectMaster,
    LiveBroker,
    NewMember,
    RegisterBroker,
    encode,
)
from batonmq.controller.rules.elect_policy import FIRST_ELECTION_SETTLE_MS
from batonmq.controller.rules.groups import BrokerGroup
from batonmq.controller.rules.state import ControllerState
from batonmq.protocol.codes import ResponseCode as Code
from batonmq.protocol.errors import NotLeaderError
from batonmq.runtime import clock

NAME = "broker-a"
DAY_MS = 86_400_000


class Clocks:
    """Takes the place of `time` in `process.clock`; both clocks stand still."""

    CLOCK_BOOTTIME = time.CLOCK_BOOTTIME

    def __init__(self) -> None:
        self.boot_ms = 50_000
        self.wall_ms = 1_000 * DAY_MS

    def clock_gettime_ns(self, clock_id: int) -> int:
        return self.boot_ms * 1_000_000

    def time_ns(self) -> int:
        return self.wall_ms * 1_000_000


class Leader:
    """A leader with an open gate: the real requests, liveness and rules; a log of one node."""

    def __init__(self, clocks: Clocks, **config: Any) -> None:
        self.clocks = clocks
        self.core = LivenessCore()
        self.machine = Machine()
        self.log: list[AnyCommand] = []
        self.open = True
        self.hint = "n0"
        self.controller_epoch = 1
        self.outcome: Outcome | None = None
        """What becomes of a proposal, where it is not applied at once."""
        runtime = RuntimeConfig(
            ControllerConfig(
                controller_peers="n0-127.0.0.1:9878;n1-h1:9878", controller_self_id="n0", **config
            )
        )
        myself: Any = self  # its gate and its log, too
        self.requests = ControllerRequests(runtime, myself, myself, self.core, lambda: ())
        self.sequences = dict.fromkeys((1, 2, 3), 0)
        self.commit(BecomeController(node="n0", nonce="n", now_ms=clocks.wall_ms))
        self.core.handle(ev.GateOpened(), clocks.boot_ms)

    @property
    def state(self) -> ControllerState:
        return self.machine.state

    def leader_hint(self) -> str:
        return self.hint

    async def propose(self, command: AnyCommand, timeout_ms: int) -> Outcome:
        return self.outcome or Applied(self.commit(command))

    async def read_barrier(self, timeout_ms: int) -> bool:
        return self.outcome is None

    def commit(self, command: AnyCommand) -> CommandResult:
        self.log.append(command)
        commit = self.machine.commit(encode(command), len(self.log))
        self.core.handle(ev.StateApplied(commit.state), self.clocks.boot_ms)
        return commit.result

    def submit(self, command: AnyCommand) -> CommandResult:
        return asyncio.run(self.requests.submit(command))

    @property
    def group(self) -> BrokerGroup:
        group = self.machine.state.group(NAME)
        assert group is not None
        return group

    def register(self, broker_id: int, incarnation: str = "", **facts: Any) -> None:
        fields: dict[str, Any] = {"max_offset": 0, "register_check_code": f"code-{broker_id}"}
        if self.machine.state.group(NAME) and self.group.replica(broker_id):
            fields["broker_id"] = broker_id
        incarnation = incarnation or f"life-{broker_id}"
        result = self.submit(
            RegisterBroker(
                broker_name=NAME,
                address=f"10.0.0.{broker_id}:10911",
                ha_address=f"10.0.0.{broker_id}:10912",
                incarnation=incarnation,
                **(fields | facts),
            )
        )
        assert (result.code, result.broker_id) == (Code.SUCCESS, broker_id)
        self.hello(broker_id, incarnation)

    def hello(self, broker_id: int, incarnation: str = "") -> None:
        """A new session of the broker."""
        self.sequences[broker_id] += 100
        life = incarnation or f"life-{broker_id}"
        hello = ev.SessionHello(NAME, broker_id, life, self.sequences[broker_id])
        self.core.handle(hello, self.clocks.boot_ms)

    def successor(self) -> "Leader":
        """Another controller with the same log, which leads since now and has heard no broker."""
        later = Leader(self.clocks)
        for command in self.log[1:]:
            later.commit(command)
        return later

    def beat(self, broker_id: int, **facts: int) -> None:
        seen = LiveBroker(broker_id, **facts)
        self.core.handle(
            ev.SessionHeartbeat(NAME, self.sequences[broker_id], seen), self.clocks.boot_ms
        )

    def closes(self, broker_id: int, *, goodbye: bool = False) -> None:
        session_id = self.sequences[broker_id]
        closed = ev.SessionEnded(NAME, broker_id, session_id, goodbye=goodbye)
        self.core.handle(closed, self.clocks.boot_ms)

    def passes(self, ms: int, *beating: int) -> None:
        """Both clocks go on; these brokers repeat their last heartbeat."""
        for _ in range(ms // 50):
            self.clocks.boot_ms += 50
            self.clocks.wall_ms += 50
            for broker_id in beating:
                last = {seen.broker_id: seen for seen in self.requests.live(NAME)}
                self.beat(broker_id, **facts_of(last[broker_id]))
            self.core.handle(ev.Tick(), self.clocks.boot_ms)

    def elect(self, broker_id: int = 0, **fields: Any) -> CommandResult:
        return self.submit(ElectMaster(broker_name=NAME, broker_id=broker_id, **fields))

    def alter(self, *broker_ids: int, confirm_offset: int = -1) -> None:
        group = self.group
        result = self.submit(
            AlterSyncStateSet(
                broker_name=NAME,
                master_broker_id=group.master_broker_id,
                master_incarnation=group.master_incarnation,
                master_epoch=group.master_epoch,
                sync_state_set_epoch=group.sync_state_set_epoch,
                new_set=tuple(NewMember(each, f"life-{each}") for each in broker_ids),
                confirm_offset=confirm_offset,
            )
        )
        assert result.ok, result.remark

    def three_in_sync(self, log_end: int = 900) -> None:
        """Master 1 of epoch 1, set {1, 2, 3}; all logs end at `log_end`, which is confirmed."""
        for broker_id in (1, 2, 3):
            self.register(broker_id)
            self.beat(broker_id, max_offset=0)
        assert self.elect(1).ok
        self.alter(1, 2, 3)
        for broker_id in (1, 2, 3):
            self.beat(broker_id, epoch=1, master_epoch=1, max_offset=log_end, confirm_offset=900)


def facts_of(seen: LiveBroker) -> dict[str, int]:
    names = ("epoch", "master_epoch", "max_offset", "confirm_offset")
    return {name: getattr(seen, name) for name in names}


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clocks]:
    made = Clocks()
    monkeypatch.setattr(clock, "time", made)
    yield made


@pytest.fixture
def leader(clocks: Clocks) -> Leader:
    return Leader(clocks)


# --- what is answered where nothing was applied


def test_r11_a_proposal_that_is_refused_is_told_apart_from_one_without_an_outcome(leader):
    leader.outcome = NotApplied("queue full")
    with pytest.raises(NotLeaderError):
        leader.elect(1)
    leader.outcome = Unknown("no answer within 3000 ms")
    with pytest.raises(OutcomeUnknownError, match="no answer within 3000 ms"):
        leader.elect(1)


def test_who_is_no_leader_names_another_node_and_never_itself(leader):
    """Right after the lead was lost, or before its gate opens, its own name is the newest hint."""
    leader.open = False
    for hint, address in (("n1", "h1:9878"), ("n0", None)):
        leader.hint = hint
        with pytest.raises(NotLeaderError) as raised:
            leader.elect(1)
        assert raised.value.leader == address


def test_a_read_of_the_log_is_answered_once_a_majority_has_confirmed_it(clocks):
    leader = Leader(clocks, is_process_read_event=True)
    assert asyncio.run(leader.requests.reading()) is leader.state
    leader.outcome = Unknown("no majority")
    with pytest.raises(OutcomeUnknownError, match="no majority confirmed the read"):
        asyncio.run(leader.requests.reading())
    plain = Leader(clocks)
    plain.outcome = leader.outcome
    assert asyncio.run(plain.requests.reading()) is plain.state


def test_r7_a_lead_that_is_lost_in_the_wait_for_the_lease_elects_nobody(leader, monkeypatch):
    leader.three_in_sync()
    leader.passes(1_000, 2, 3)
    proposed = len(leader.log)

    async def sleep(seconds: float) -> None:
        leader.open = False

    monkeypatch.setattr(asyncio, "sleep", sleep)
    with pytest.raises(NotLeaderError):
        unclean(leader)
    assert len(leader.log) == proposed


# --- R43: what becomes a floor


def test_r17_a_restarted_member_is_judged_by_all_that_was_ever_reported_as_confirmed(leader):
    """Nothing above its log's end could be confirmed while it was away: no report has to age."""
    leader.three_in_sync()
    leader.passes(2_500, 1, 2, 3)
    leader.beat(1, epoch=1, master_epoch=1, max_offset=1_500, confirm_offset=1_400)
    leader.closes(2)
    leader.register(2, "life-2b", max_offset=1_000)
    registered = leader.log[-1]
    assert isinstance(registered, RegisterBroker) and registered.confirm_floor == 1_400


def test_r43_a_drained_offset_never_becomes_the_floor(leader):
    """1. The log of 1 ends at 1,000, 2 acked that, 3 only 900: confirmed is 900. 2. A planned
    switch to 2 drains at 1,000. 3. 1 and 2 die. 4. 3 has all that was acknowledged: it leads."""
    leader.three_in_sync()
    leader.beat(1, epoch=1, master_epoch=1, max_offset=1_000, confirm_offset=900)
    leader.passes(2_500, 1, 2, 3)
    switched = leader.elect(
        2, designate=True, expected_master_epoch=1, drained_offset=1_000, request_id="switch:x/1"
    )
    assert switched.ok and leader.group.master_broker_id == 2
    assert leader.group.confirm_floor == 900
    leader.passes(1_000, 3)
    elected = leader.elect(expected_master_epoch=2)
    assert elected.ok, elected.remark
    assert leader.group.master_broker_id == 3


def test_r43_the_drained_offset_counts_for_the_chosen_one_in_that_decision(leader):
    """All of 1,000 bytes is confirmed; the newest heartbeat of 2 is of before it had the last."""
    leader.three_in_sync()
    leader.beat(2, epoch=1, master_epoch=1, max_offset=800, confirm_offset=800)
    leader.beat(1, epoch=1, master_epoch=1, max_offset=1_000, confirm_offset=1_000)
    leader.passes(2_500, 1, 2, 3)
    switched = leader.elect(
        2, designate=True, expected_master_epoch=1, drained_offset=1_000, request_id="switch:x/1"
    )
    assert switched.ok, switched.remark
    assert leader.group.master_broker_id == 2


def test_r43_only_the_request_of_a_switch_may_name_what_was_drained(leader):
    """Anybody else's word about a replica's log counts for nothing (R16)."""
    leader.three_in_sync()
    leader.beat(2, epoch=1, master_epoch=1, max_offset=800)
    leader.passes(2_500, 1, 2, 3)
    leader.passes(1_000, 2, 3)
    refused = leader.elect(2, designate=True, drained_offset=1_000)
    assert refused.code is Code.CONTROLLER_ELECT_MASTER_FAILED
    assert leader.group.master_broker_id == 1


def test_r59_a_recorded_floor_never_exceeds_the_end_of_the_masters_log(leader):
    """An absurd confirmOffset in one Alter would leave no replica that may be elected."""
    leader.three_in_sync(1_000)
    leader.alter(1, 2, confirm_offset=10**15)
    assert leader.group.confirm_floor == 1_000
    leader.beat(1, epoch=1, master_epoch=1, max_offset=1_000, confirm_offset=10**15)
    leader.passes(2_500, 1, 2, 3)
    leader.passes(1_000, 2, 3)
    assert leader.elect(expected_master_epoch=1).ok
    assert leader.group.master_broker_id == 2
    leader.passes(2_500, 3)  # nobody says where the master's log ends
    floor = leader.group.confirm_floor
    leader.submit(
        AlterSyncStateSet(
            broker_name=NAME,
            master_broker_id=2,
            master_incarnation="life-2",
            master_epoch=leader.group.master_epoch,
            sync_state_set_epoch=leader.group.sync_state_set_epoch,
            new_set=tuple(NewMember(each) for each in leader.group.sync_state_set if each != 1),
            confirm_offset=10**15,
        )
    )
    assert leader.group.confirm_floor == floor


# --- R8, R19: the first election waits on the clock that nobody sets


def waiting_for_its_first_master(leader: Leader) -> None:
    leader.register(1, max_offset=1_000)
    leader.beat(1, max_offset=1_000)


def test_r8_r19_a_wall_clock_that_was_ahead_does_not_hold_up_the_first_election(clocks, leader):
    """1. A controller's wall clock is five days ahead. 2. It is set right. 3. The only broker with
    data asks: it waits one second, not five days."""
    clocks.wall_ms += 5 * DAY_MS
    leader.commit(BecomeController(node="n1", nonce="m", now_ms=clocks.wall_ms))
    leader.controller_epoch = 2
    clocks.wall_ms -= 5 * DAY_MS
    waiting_for_its_first_master(leader)
    leader.passes(FIRST_ELECTION_SETTLE_MS - 50, 1)
    refused = leader.elect(1)
    assert refused.code is Code.CONTROLLER_ELECT_MASTER_FAILED
    assert "waits for further replicas" in refused.remark
    leader.passes(50, 1)
    elected = leader.elect(1)
    assert elected.ok, elected.remark


def test_r8_r19_a_wall_clock_that_jumps_ahead_does_not_shorten_the_wait(clocks, leader):
    """A second replica with data may still come; then only an operator can decide."""
    waiting_for_its_first_master(leader)
    clocks.wall_ms += 5 * DAY_MS
    leader.passes(100, 1)
    refused = leader.elect(1)
    assert refused.code is Code.CONTROLLER_ELECT_MASTER_FAILED
    leader.register(2, max_offset=2_000)
    leader.beat(2, max_offset=2_000)
    leader.passes(5_000, 1, 2)
    refused = leader.elect(1)
    assert "broker 1, 2 have data" in refused.remark
    assert leader.elect(2, designate=True).ok


def test_r19_a_fresh_group_waits_for_nobody(leader):
    leader.register(1)
    leader.beat(1, max_offset=0)
    assert leader.elect(1).ok


# --- R44: an unclean election beside a master that goes on


def one_is_alone_and_gone(leader: Leader, *, goodbye: bool = False) -> None:
    """1 leads with the set {1}: its log ends at 8,192, confirmed are 8,000. 2's log ends at 6,000.
    Then the controllers lose 1."""
    leader.three_in_sync()
    leader.alter(1, confirm_offset=900)
    leader.beat(1, epoch=1, master_epoch=1, max_offset=8_192, confirm_offset=8_000)
    leader.beat(2, epoch=1, master_epoch=1, max_offset=6_000, confirm_offset=900)
    leader.beat(3, epoch=1, master_epoch=1, max_offset=900, confirm_offset=900)
    leader.passes(50, 1, 2, 3)
    leader.closes(1, goodbye=goodbye)
    leader.passes(4_200, 2, 3)


def unclean(leader: Leader, broker_id: int = 2, **fields: Any) -> CommandResult:
    return leader.elect(broker_id, designate=True, unclean=True, reason="operator", **fields)


def test_r44_a_master_alone_in_its_set_and_out_of_sight_may_go_on_so_the_operator_is_told(leader):
    one_is_alone_and_gone(leader)
    before = leader.machine.state
    refused = unclean(leader)
    assert refused.code is Code.CONTROLLER_ELECT_MASTER_FAILED
    assert refused.remark == (
        "the SyncStateSet [1] is out of sight and not known to have ended, so its master may still"
        " acknowledge (broker 1 at 10.0.0.1:10911: last heard 4200 ms ago, log end 8192,"
        " confirmed 8000). The log of broker 2 ends at 6000: 2000 confirmed bytes above that are"
        " cut, and whatever it acknowledges before it hears of the election is cut, too. Stop it"
        " first, or accept that: mqctl electMaster -bn broker-a -b 2 --unclean --cut-later-acks"
    )
    assert leader.machine.state is before, "nothing was proposed"


def test_r44_an_operator_who_accepts_that_is_obeyed_and_the_history_tells_it(leader):
    one_is_alone_and_gone(leader)
    assert unclean(leader, cut_later_acks=True).ok
    assert (leader.group.master_broker_id, leader.group.sync_state_set) == (2, (2,))
    event = leader.machine.state.history[-1]
    assert (event.kind, event.unclean, event.max_offset) == ("elected", True, 6_000)
    assert event.reason == (
        "operator: later acks are cut of broker 1"
        " (last heard 4200 ms ago, log end 8192, confirmed 8000)"
    )


def test_r44_the_setting_for_other_tools_is_no_acceptance(clocks):
    leader = Leader(clocks, enable_elect_unclean_master=True)
    one_is_alone_and_gone(leader)
    refused = leader.elect(2, designate=True)
    assert refused.code is Code.CONTROLLER_ELECT_MASTER_FAILED
    assert "--cut-later-acks" in refused.remark
    assert leader.elect(2, designate=True, cut_later_acks=True).ok


def test_r44_a_master_that_said_goodbye_has_ended(leader):
    one_is_alone_and_gone(leader, goodbye=True)
    assert unclean(leader).ok
    assert "later acks" not in leader.machine.state.history[-1].reason


def test_r44_a_master_that_was_started_again_has_ended(leader):
    """Its new life came, and went before anybody elected it."""
    one_is_alone_and_gone(leader)
    leader.register(1, "life-1b", max_offset=8_192)
    leader.closes(1)
    leader.passes(2_000, 2, 3)
    assert unclean(leader).ok


def test_r44_a_deposed_master_counts_as_fenced_once_it_says_so(leader):
    """1. The controllers lose 1 and depose it. 2. It comes back, and is lost again before its view
    can have reached it, or after it has."""
    for accepted in (1, 2):
        leader = Leader(leader.clocks)
        one_is_alone_and_gone(leader)
        assert leader.elect(expected_master_epoch=1).code is Code.CONTROLLER_MASTER_NOT_AVAILABLE
        assert leader.group.master_broker_id == 0
        leader.hello(1)
        leader.beat(1, epoch=1, master_epoch=accepted, max_offset=8_300, confirm_offset=8_300)
        leader.closes(1)
        leader.passes(2_000, 2, 3)
        elected = unclean(leader)
        assert elected.ok is (accepted == 2)
        if not elected.ok:
            assert "last heard 2000 ms ago, log end 8300, confirmed 8300" in elected.remark


def test_r44_a_whole_set_out_of_sight_may_go_on_together(leader):
    leader.three_in_sync()
    leader.alter(1, 3)
    leader.passes(100, 1, 2, 3)
    leader.closes(1)
    leader.closes(3)
    leader.passes(2_000, 2)
    refused = unclean(leader)
    assert refused.code is Code.CONTROLLER_ELECT_MASTER_FAILED
    assert "the SyncStateSet [1, 3] is out of sight" in refused.remark
    assert "broker 3 at 10.0.0.3:10911: last heard 2000 ms ago, log end 900" in refused.remark
    assert unclean(leader, cut_later_acks=True).ok


def test_r44_a_controller_that_never_saw_the_master_tells_what_was_registered(leader):
    one_is_alone_and_gone(leader)
    later = leader.successor()
    for broker_id in (2, 3):
        later.hello(broker_id)
        later.beat(broker_id, epoch=1, master_epoch=1, max_offset=6_000, confirm_offset=900)
    later.passes(2_000, 2, 3)
    refused = unclean(later)
    assert "(broker 1 at 10.0.0.1:10911: not heard here, log end 0, confirmed -1)" in refused.remark
    assert later.group.confirm_floor == 900
    later.beat(2, epoch=1, master_epoch=1, max_offset=500, confirm_offset=400)
    later.beat(3, epoch=1, master_epoch=1, max_offset=500, confirm_offset=400)
    assert "400 confirmed bytes above that are cut" in unclean(later).remark, "as is recorded"


@pytest.mark.parametrize("longer", [True, False])
def test_r17_a_suspect_that_asks_a_leader_of_a_moment_ago_waits_for_what_others_report(
    leader, longer
):
    """1 is alone in its set. It was started again, after a loss of power, and so was the leader."""
    leader.three_in_sync()
    leader.alter(1)
    leader.closes(1)
    leader.register(1, "life-1b", suspect="another boot", max_offset=676)
    later = leader.successor()
    later.hello(1, "life-1b")
    later.beat(1, epoch=1, max_offset=676)
    refused = later.elect(1)
    assert refused.code is Code.CONTROLLER_ELECT_MASTER_FAILED
    assert "leads only since a moment ago" in refused.remark
    if longer:
        later.hello(2)
        later.beat(2, epoch=1, max_offset=900)
        later.passes(800, 1, 2)
        assert "broker 2 outside of it has more: 900" in later.elect(1).remark
    else:
        later.passes(800, 1)
        assert later.elect(1).view.master_broker_id == 1


def test_r7_a_master_that_still_answers_is_not_passed_over_by_any_flag(leader):
    leader.three_in_sync()
    leader.alter(1)
    leader.passes(2_000, 1, 2, 3)
    waited: list[float] = []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)
        leader.passes(round(seconds * 1_000), 1, 2, 3)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio, "sleep", sleep)
        refused = unclean(leader, cut_later_acks=True)
    assert refused.code is Code.CONTROLLER_ELECT_MASTER_FAILED
    assert "the master still answers" in refused.remark
    assert waited == [1.1]


@pytest.mark.parametrize("member", [2, 3], ids=["the winner", "another, which lacks bytes"])
def test_r44_a_living_member_fences_the_master_that_needs_its_ack(leader, member):
    """It hears of the election, and acks nothing then."""
    leader.three_in_sync()
    leader.alter(1, member)
    leader.beat(1, epoch=1, master_epoch=1, max_offset=8_192, confirm_offset=8_000)
    leader.passes(3_000, 1, 2, 3)
    leader.closes(1)
    leader.passes(2_000, 2, 3)
    assert unclean(leader).ok
    assert leader.group.unclean_epoch == 2


def test_r43_what_was_confirmed_before_an_unclean_election_is_no_floor_after_it(leader):
    """1. 2 is elected uncleanly, with a log of 6,000. 2. 1 follows it, and joins. 3. A heartbeat
    that 1 sent before it cut its log comes late. 4. 2 dies: 1 holds all there is."""
    one_is_alone_and_gone(leader)
    assert unclean(leader, cut_later_acks=True).ok
    leader.hello(1)
    leader.beat(1, epoch=2, master_epoch=2, max_offset=6_000, confirm_offset=6_000)
    leader.alter(1, 2, confirm_offset=6_000)
    leader.beat(1, epoch=1, master_epoch=2, max_offset=8_192, confirm_offset=8_000)
    leader.beat(1, epoch=2, master_epoch=2, max_offset=6_000, confirm_offset=6_000)
    leader.beat(2, epoch=2, master_epoch=2, max_offset=6_000, confirm_offset=6_000)
    leader.passes(2_500, 1, 2)
    leader.closes(2)
    leader.passes(1_000, 1)
    elected = leader.elect(expected_master_epoch=2)
    assert elected.ok, elected.remark
    assert leader.group.confirm_floor == 6_000
