"""The liveness core as text: scripts in testdata/liveness_*.txt, verbs with the effects they cause.

`pytest --rewrite` writes the outcomes; read the diff. One native group of three replicas, master 1,
set {1,2,3}, session timeout 800 ms. Effects carry the ms since `start`, and the replicas that beat
send a heartbeat every 100 ms of `run`. Verbs:

    start               sessions of 1, 2 and 3, the gate open for ten seconds
    restart             the same group, the gate just opened, no session yet
    alone               one broker registered, the gate just opened; nobody was ever elected
    follower            as `start`, then the gate is closed; its reports are shown
    java                two brokers that speak only remoting, on channels 11 and 12, timeout 10 s
    java_restart        the same two, the gate just opened, no heartbeat yet
    run MS              ticks every 50 ms, and heartbeats
    beat ID KEY=N...    one heartbeat with these facts, which its later ones repeat
    silent ID | beats ID        its heartbeats stop, go on
    deaf ID | hears ID          no answer reaches it, answers reach it again
    stall MS            this loop stands still
    hello ID [INCARNATION]      a new session; the older ones stay as they are
    close ID [goodbye[=WHY]] [first]        its newest session ends, or the first one of it
    late_beat ID        a heartbeat on its first session
    beat_904 ID CHANNEL | close_channel CHANNEL
    gate open | closed
    peer NODE UNHEARD   that controller hears all but these ids (`-`: all), and reports so, until
                        `silent`
    register [ID INCARNATION] [dead]        in the replicated state, with the liveness of now, or
                        with that of a node that saw the broker die
    carry_out           applies the newest proposal; its effects follow
    lost                the newest proposal ends without an effect
    alter ID... | clean | elect_unclean ID  in the replicated state
    show                the brokers that are alive, and that count as alive in views; problems
    offsets             maxOffset by broker; the highest confirmOffset, and what of it binds
    lease               how long an unclean election waits
"""

from pathlib import Path

import msgspec
import pytest

from batonmq.controller.liveness import events as ev
from batonmq.controller.liveness.broker_sessions import BrokerSessions
from batonmq.controller.liveness.core import GROUPS_A_TURN, LivenessConfig, LivenessCore
from batonmq.controller.rules.commands import ElectMaster, LiveBroker
from batonmq.controller.rules.groups import BrokerGroup, ReplicaRecord
from batonmq.controller.rules.state import ControllerState
from batonmq.protocol.incarnation import new_process_name

SCRIPTS = sorted((Path(__file__).parent / "testdata").glob("liveness_*.txt"))
NAME = "broker-a"
START_MS = 50_000


def facts(words):
    return {key: int(value) for key, value in (word.split("=") for word in words)}


class Env:
    """A core beside the replicated state; every effect is a line."""

    def __init__(self, new_script):
        self.new_script = new_script
        self.out = []

    def do_follow(self):
        self.script = self.new_script()
        self.script.three_in_sync()
        self.begin()

    def do_restart(self):
        self.do_follow()
        self.do_gate("open")

    def do_follower(self):
        self.do_start()
        self.do_gate("closed")
        self.shows_reports = True

    def do_alone(self):
        self.script = self.new_script()
        self.script.register()
        self.begin()
        self.do_gate("open")

    def do_start(self):
        self.do_follow()
        for broker_id in (1, 2, 3):
            self.do_hello(broker_id)
        self.do_gate("open")
        self.do_run(10_000)
        self.zero_ms = self.now_ms
        assert self.core.problems() == ()
        assert [seen.broker_id for seen in self.core.live(NAME, self.now_ms)] == [1, 2, 3]
        assert self.out == ["0 push"], self.out
        self.out.clear()

    def do_java(self):
        self.do_java_restart()
        for broker_id in (1, 2):
            self.do_beat_904(broker_id, 10 + broker_id)
        self.out.clear()

    def do_java_restart(self):
        self.script = self.new_script()
        for broker_id in (1, 2):
            self.script.apply_id(broker_id)
            self.script.register(broker_id, incarnation="", register_check_code="")
        self.script.elect(1)
        self.script.alter(1, 2)
        self.begin()
        self.do_gate("open")
        self.out.clear()

    def begin(self):
        self.core = LivenessCore(LivenessConfig())
        self.now_ms = self.zero_ms = START_MS
        self.sessions, self.sequences, self.answered = {}, {}, {}
        self.beating, self.deaf, self.facts = set(), set(), {}
        self.next_session = 1
        self.proposal = None
        self.reports, self.shows_reports = {}, False
        self.tell(ev.StateApplied(self.script.state))

    def tell(self, event):
        effects = self.core.handle(event, self.now_ms)
        for effect in effects:
            if not isinstance(effect, ev.ReportHearing) or self.shows_reports:
                self.out.append(f"{self.now_ms - self.zero_ms} {self.words(effect)}")
        return effects

    def words(self, effect):
        match effect:
            case ev.ReportHearing(_, unheard):
                return f"reports unheard {sorted(each[1] for each in unheard)}"
            case ev.OfferLead(node):
                return f"offers the lead to {node}"
            case ev.AliveChanged():
                return "push"
            case ev.ProposeElect(_, epoch, reason, detected_ms, silent_ms):
                self.proposal = effect
                seen = detected_ms - self.zero_ms
                silence = "" if silent_ms < 0 else f", silent for {silent_ms}"
                return f"elect in place of epoch {epoch}: {reason}, seen at {seen}{silence}"
            case ev.RefuseSession(session_id, code, remark):
                return f"refuse session {session_id}: {int(code)} {remark}"
            case ev.ElectionBlocked(_, reason, operator):
                return f"blocked{' until an operator decides' if operator else ''}: {reason}"

    def do_run(self, ms):
        for _ in range(int(ms) // 50):
            self.now_ms += 50
            if self.now_ms % 200 == 0:
                self.peers_report()
            if self.now_ms % 100 == 0:
                for broker_id in sorted(self.beating):
                    self.do_beat(broker_id)
            self.tell(ev.Tick())

    def do_peer(self, node, unheard):
        self.reports[node] = unheard
        self.peers_report()

    def peers_report(self):
        for node, unheard in self.reports.items():
            if unheard != "silent":
                ids = [int(each) for each in unheard.split(",") if each != "-"]
                processes = frozenset((NAME, each, f"life-{each}") for each in ids)
                self.tell(ev.PeerReported(node, self.script.state.applied_index, processes))

    def do_beat(self, who, *words):
        broker_id = int(who)
        session_id = self.sessions[broker_id][-1]
        sequence = self.sequences[session_id] = self.sequences.get(session_id, 0) + 1
        if broker_id not in self.deaf:
            self.answered[session_id] = sequence - 1
        self.facts[broker_id] = facts(words) or self.facts.get(broker_id, {})
        seen = LiveBroker(broker_id, **self.facts[broker_id])
        answered = self.answered.get(session_id, 0)
        self.tell(ev.SessionHeartbeat(NAME, session_id, seen, sequence, answered))

    def do_late_beat(self, who):
        self.tell(ev.SessionHeartbeat(NAME, self.sessions[int(who)][0], LiveBroker(int(who))))

    def do_silent(self, who):
        self.beating.discard(int(who))

    def do_beats(self, who):
        self.beating.add(int(who))

    def do_deaf(self, who):
        self.deaf.add(int(who))

    def do_hears(self, who):
        self.deaf.discard(int(who))

    def do_stall(self, ms):
        self.now_ms += int(ms)

    def do_hello(self, who, incarnation=""):
        broker_id, session_id = int(who), self.next_session
        self.next_session += 1
        incarnation = incarnation or self.script.group.replica(broker_id).incarnation
        effects = self.tell(ev.SessionHello(NAME, broker_id, incarnation, session_id))
        if not any(isinstance(effect, ev.RefuseSession) for effect in effects):
            self.sessions.setdefault(broker_id, []).append(session_id)
            self.beating.add(broker_id)

    def do_close(self, who, *words):
        session_id = self.sessions[int(who)][0 if "first" in words else -1]
        goodbye, _, why = next((w for w in words if w != "first"), "").partition("=")
        if "first" not in words:
            self.beating.discard(int(who))
        self.tell(ev.SessionEnded(NAME, int(who), session_id, bool(goodbye), why))

    def do_beat_904(self, who, channel, *words):
        seen = LiveBroker(int(who), **facts(words))
        self.tell(ev.RemotingHeartbeat(NAME, int(channel), 10_000, seen))

    def do_close_channel(self, channel):
        self.tell(ev.RemotingChannelClosed(int(channel)))

    def do_gate(self, state):
        self.tell(ev.GateOpened() if state == "open" else ev.GateClosed())

    def applied(self, result):
        if not result.ok:
            self.out.append(f"  {int(result.code)} {result.remark}")
        elif result.view is not None:
            view = result.view
            epochs = f"epoch {view.master_epoch}/{view.sync_state_set_epoch}"
            members = sorted(view.sync_state_set)
            master = view.master_broker_id or "none"
            self.out.append(f"  master {master} of {epochs}, set {members}")
        self.tell(ev.StateApplied(self.script.state))

    def do_register(self, who="0", incarnation="", *flags):
        more = {"incarnation": incarnation} if incarnation else {}
        if "suspect" in flags:
            more["suspect"] = "another boot"
        live = self.core.live(NAME, self.now_ms)
        if "dead" in flags:
            live = tuple(seen for seen in live if seen.broker_id != int(who))
        self.applied(self.script.register(int(who), live=live, **more))

    def do_carry_out(self):
        epoch = self.proposal.expected_master_epoch
        command = ElectMaster(
            broker_name=NAME,
            expected_master_epoch=epoch,
            reason=self.proposal.reason,
            confirm_floor=self.core.confirm_floor(NAME),
            live=self.core.live(NAME, self.now_ms),
        )
        self.applied(self.script.apply(command))
        self.tell(ev.ElectionEnded(NAME, epoch))

    def do_lost(self):
        self.tell(ev.ElectionEnded(NAME, self.proposal.expected_master_epoch))

    def do_alter(self, *members):
        self.applied(self.script.alter(*map(int, members)))

    def do_clean(self):
        self.applied(self.script.clean(clean_living_broker=True))

    def do_elect_unclean(self, who):
        self.script.die(self.script.group.master_broker_id)
        self.applied(self.script.elect(int(who), designate=True, unclean=True))

    def do_show(self):
        alive = [seen.broker_id for seen in self.core.live(NAME, self.now_ms)]
        presumed = sorted(self.core.presumed_alive(NAME, self.now_ms))
        self.out.append(f"alive {alive}, in views {presumed}")
        self.out += [f"problem {text}" for text in self.core.problems()]

    def do_offsets(self):
        live = self.core.live(NAME, self.now_ms)
        ends = {seen.broker_id: seen.max_offset for seen in live}
        newest, floor = self.core.confirm_newest(NAME), self.core.confirm_floor(NAME)
        self.out.append(f"{ends}, confirmed {newest}, binding {floor}")

    def do_lease(self):
        self.out.append(f"{self.core.unclean_wait_ms(NAME, self.now_ms)}")


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_liveness_script(path, new_script, check_script):
    check_script(path, Env(new_script))


def test_there_are_scripts():
    assert len(SCRIPTS) >= 8


def test_a_bug_shows_the_events_that_led_to_it(new_script):
    env = Env(new_script)
    env.do_start()
    env.do_beat(2, "max_offset=7")
    with pytest.raises(AttributeError) as raised:
        env.tell(ev.StateApplied(None))
    (note,) = raised.value.__notes__
    assert "SessionHeartbeat(broker_name='broker-a'" in note
    assert note.splitlines()[-1].endswith("handle(event=StateApplied(state=None))")


def sessions():
    """Of broker 2, under a leader since START_MS."""
    made = BrokerSessions(LivenessConfig())
    made.notice_time(START_MS)
    made.gate_opened(START_MS)
    made.hello(ev.SessionHello(NAME, 2, "i2", 1), START_MS)
    return made


def passes(made, now_ms):
    """Time up to then, in ticks."""
    for ms in (*range(made._last_ms, now_ms, 50), now_ms):
        made.notice_time(ms)


def test_r8_a_leader_has_not_led_while_it_stood_still():
    made = sessions()
    made.notice_time(START_MS + 5_000)
    assert made.led_for_ms(START_MS + 5_000) < 100


def test_r6_closings_of_long_ago_hold_no_verdict_back():
    made, window_ms = sessions(), LivenessConfig().flap_window_ms
    verdicts = []
    for number, at_ms in enumerate((0, window_ms + 1_000, window_ms + 2_000), 1):
        now_ms = START_MS + at_ms
        passes(made, now_ms)
        made.hello(ev.SessionHello(NAME, 2, "i2", number), now_ms)
        made.closed(ev.SessionEnded(NAME, 2, number), now_ms, is_registered=True)
        verdicts.append(made.judge(NAME, 2, "i2", START_MS, now_ms).state)
    assert verdicts == ["dead", "dead", "unknown"]


def test_r6_a_process_that_registers_again_has_no_first_closing_again():
    """An operator removed it in between, and its session ended while nothing was registered."""
    made, verdicts = sessions(), []
    for number, is_registered in enumerate((True, False, True), 1):
        now_ms = START_MS + 50 * number
        made.notice_time(now_ms)
        made.hello(ev.SessionHello(NAME, 2, "i2", number), now_ms)
        made.closed(ev.SessionEnded(NAME, 2, number), now_ms, is_registered=is_registered)
        verdicts.append(made.judge(NAME, 2, "i2", START_MS, now_ms).state)
    assert verdicts == ["dead", "unknown", "unknown"]


def test_r58_verdicts_are_kept_no_longer_than_they_count():
    made, window_ms = sessions(), LivenessConfig().flap_window_ms
    for number in range(1, 200):
        now_ms = START_MS + number * window_ms // 20
        made.notice_time(now_ms)
        made.hello(ev.SessionHello(NAME, 2, f"i{number}", number), now_ms)
        made.closed(ev.SessionEnded(NAME, 2, number), now_ms, is_registered=True)
    assert len(made._verdicts) == 20


@pytest.mark.parametrize(("session_timeout_ms", "unknown_ms"), [(800, 1_500), (4_000, 4_000)])
@pytest.mark.parametrize("registered_ms", [START_MS - 60_000, START_MS + 3_000])
def test_r35_who_was_never_seen_is_unknown_for_1500_ms_or_a_longer_session_time_out(
    session_timeout_ms, unknown_ms, registered_ms
):
    """Both since this node leads and since the broker was registered."""
    made = BrokerSessions(LivenessConfig(session_timeout_ms=session_timeout_ms))
    made.notice_time(START_MS)
    made.gate_opened(START_MS)
    ends_ms = max(START_MS, registered_ms) + unknown_ms
    for now_ms, standing in ((ends_ms, "unknown"), (ends_ms + 1, "dead")):
        passes(made, now_ms)
        assert made.judge(NAME, 1, "i1", registered_ms, now_ms).state == standing


def thousand_groups():
    """Each has one replica, which is its master."""
    names = [f"b{number:03d}" for number in range(1_000)]
    replica = ReplicaRecord(broker_id=1, address="h:1", incarnation="i1")
    groups = {
        name: BrokerGroup(
            broker_name=name,
            cluster_name="C",
            replicas=(replica,),
            master_broker_id=1,
            master_incarnation="i1",
            master_epoch=1,
            sync_state_set=(1,),
        )
        for name in names
    }
    return names, ControllerState(groups=groups)


@pytest.mark.parametrize("cause", ["gate", "snapshot"])
def test_r58_a_turn_looks_at_64_groups_where_all_are_to_be_looked_at(cause):
    """A gate that opens over 1,000 groups pushes the view of each, and checks each, once. A group
    that changes meanwhile is looked at at once."""
    names, state = thousand_groups()
    core = LivenessCore()
    if cause == "gate":
        found = core.handle(ev.StateApplied(state), START_MS)
        while ev.ContinueChecks() in found:
            found = core.handle(ev.ContinueChecks(), START_MS)
        found = core.handle(ev.GateOpened(), START_MS)
    else:
        core.handle(ev.GateOpened(), START_MS)
        found = core.handle(ev.StateApplied(state), START_MS)
    pushed, turns = [], 0
    while ev.ContinueChecks() in found:
        turns += 1
        pushed += [effect.broker_name for effect in found if isinstance(effect, ev.AliveChanged)]
        assert len(found) <= 2 * GROUPS_A_TURN
        if turns == 3:
            last = msgspec.structs.replace(state.groups["b999"], sync_state_set_epoch=7)
            state = ControllerState(groups={**state.groups, "b999": last})
            late = core.handle(ev.StateApplied(state), START_MS)
            pushed += [effect.broker_name for effect in late if isinstance(effect, ev.AliveChanged)]
            assert ev.ContinueChecks() not in late, "it is under way already"
        found = core.handle(ev.ContinueChecks(), START_MS)
    pushed += [effect.broker_name for effect in found if isinstance(effect, ev.AliveChanged)]
    assert turns == len(names) // GROUPS_A_TURN
    if cause == "gate":
        assert sorted(pushed) == names and pushed[3 * GROUPS_A_TURN] == "b999"


def test_a_tick_looks_at_256_groups_and_the_next_one_goes_on():
    """Of 1,000 groups whose brokers never came each is found dead, and elected for, once."""
    names, state = thousand_groups()
    core = LivenessCore()
    core.handle(ev.GateOpened(), START_MS)
    core.handle(ev.StateApplied(state), START_MS)
    elected, most, now_ms = [], 0, START_MS
    while len(elected) < len(names):
        now_ms += 50
        found = core.handle(ev.Tick(), now_ms)
        most = max(most, sum(isinstance(effect, ev.AliveChanged) for effect in found))
        elected += [effect.broker_name for effect in found if isinstance(effect, ev.ProposeElect)]
        assert now_ms < START_MS + 10_000
    assert sorted(elected) == names and most == 256


def test_r50_a_leader_that_hears_no_broker_deposes_none_and_offers_the_lead(new_script):
    """One that its peers hear is not dead to it. `liveness_elsewhere` has the other cases."""
    env = Env(new_script)
    env.do_start()
    env.do_peer("n1", "-")
    env.do_peer("n2", "3")
    for broker_id in (1, 2, 3):
        env.do_silent(broker_id)
    env.do_run(5_000)
    assert env.out == ["1350 offers the lead to n1"]
    assert env.core.presumed_alive(NAME, env.now_ms) == {1, 2, 3}
    assert env.core.live(NAME, env.now_ms) == ()


def test_r59_a_leader_refuses_the_session_of_a_process_that_is_not_registered(new_script):
    """A follower may not have applied the registration yet."""
    env, own = Env(new_script), new_process_name().incarnation
    env.do_start()
    env.do_close(2)
    env.do_register(2, own)
    for gate, refusals in (("open", 1), ("closed", 0)):
        env.do_gate(gate)
        env.out.clear()
        env.do_hello(2, "another")
        said = f"registered as broker 2 of {NAME} is process {own}, not another"
        assert "\n".join(env.out).count(said) == refusals


def test_r50_a_broker_that_speaks_remoting_is_heard_whatever_session_its_id_has():
    made = sessions()
    made.gate_closed()
    made.remoting_heartbeat(ev.RemotingHeartbeat(NAME, 12, 10_000, LiveBroker(2)), START_MS)
    for now_ms in range(START_MS, START_MS + 5_000, 50):
        made.notice_time(now_ms)
    assert made.hears(NAME, 2, "", now_ms) and not made.hears(NAME, 2, "i2", now_ms)


def test_r59_the_registered_process_takes_the_place_of_one_that_is_not():
    """On a follower, which may lag behind a registration: a stranger comes first, while the
    connection of the registered process is broken."""
    made, own = BrokerSessions(LivenessConfig()), new_process_name().incarnation
    made.notice_time(START_MS)
    assert made.hello(ev.SessionHello(NAME, 2, "a stranger", 1), START_MS) == ""
    assert made.judge(NAME, 2, own, START_MS - 1, START_MS).state != "dead"
    assert made.hello(ev.SessionHello(NAME, 2, own, 2), START_MS, registered=own) == ""
    assert made.hello(ev.SessionHello(NAME, 2, "a stranger", 3), START_MS, registered=own) == own
    assert made.judge(NAME, 2, own, START_MS, START_MS).state == "alive"
