"""One broker's role machine in conversation with its controllers c1, c2 and c3, as text scripts.

The broker is number 1, incarnation `b`. A view is MASTER@EPOCH.SETEPOCH:MEMBERS, `-` for none, with
`by=INC` (incarnation of the master), `dead=IDS`, `index=N`, `inc1=INC` (`none`: 1 is not
registered), `inc2=INC`, `at2=ADDRESS` of number 2, `learner=ID` behind it.

    broker [id=N] [highest=N] [learner] [java]    a new process, under RocketMQ's controllers:
                                           setup verbs have no outcome
    registered                             at c1, which leads; sessions are open everywhere
    master EPOCH.SETEPOCH [MEMBERS]        registered, elected, with a lease
    start | open C | close C | refused C CODE | hint C LEADER | suspect [WHY] | notice E.S
    failed E.S                             the role change to that view raised
    reply register|elect|alter C CODE [id=N] [VIEW]    c1 replies to that call
    fail register|elect|alter|fetch C                  no reply came
    answer C [follower] [epoch=N] [key=E.S] [sent=MS ago] [hint=C]    to a heartbeat
    view C VIEW | fetched C VIEW           pushed on the session, or fetched
    propose MEMBERS [EPOCH.SETEPOCH]       the HA service proposes a set
    tick MS                                time passes; heartbeats are counted at the end
    rounds N LEADER [FOLLOWERS]            N times: they answer, then 100 ms pass
    show
"""

import dataclasses
import itertools
from collections import Counter
from pathlib import Path

import pytest

from batonmq.protocol.role_view import Replica, RoleView
from batonmq.replicas_manager import events as ev
from batonmq.replicas_manager.config import SessionTimings
from batonmq.replicas_manager.controllers import (
    ControllerRegistration,
    Controllers,
    Elections,
    MissedViews,
)
from batonmq.replicas_manager.role import CurrentView
from batonmq.replicas_manager.state import ReplicasState

SCRIPTS = sorted((Path(__file__).parent / "testdata").glob("role_*.txt"))
CONTROLLERS = ("c1", "c2", "c3")
KINDS = {
    ev.SendRegister: "register",
    ev.SendElect: "elect",
    ev.SendAlter: "alter",
    ev.FetchView: "fetch",
}


def ids(text: str) -> frozenset[int]:
    return frozenset(map(int, text.split(","))) if text != "-" else frozenset()


def key_of(text: str) -> tuple[int, int]:
    epoch, set_epoch = map(int, text.split("."))
    return epoch, set_epoch


def options(words: tuple[str, ...]) -> dict[str, str]:
    return dict(word.split("=") for word in words if "=" in word)


def view_of(words: tuple[str, ...]) -> RoleView | None:
    """The view among the words, None if there is none."""
    place = next((word for word in words if "@" in word), None)
    if place is None:
        return None
    opts = options(words)
    who, rest = place.split("@")
    key, _, members = rest.partition(":")
    epoch, set_epoch = key_of(key)
    master = None if who == "-" else int(who)
    incarnations = {1: opts.get("inc1", "b"), 2: opts.get("inc2", "s2"), 3: "s3"}
    return RoleView(
        cluster_name="C",
        broker_name=opts.get("group", "broker-a"),
        master_broker_id=master,
        master_address=f"h{master}:1",
        master_ha_address=f"h{master}:2",
        master_incarnation=opts.get("by", incarnations.get(master or 0, "")),
        master_epoch=epoch,
        sync_state_set_epoch=set_epoch,
        sync_state_set=ids(members or "1,2"),
        replicas=tuple(
            Replica(
                broker_id=broker_id,
                address=opts.get("at2", "h2:1") if broker_id == 2 else f"h{broker_id}:1",
                ha_address=f"h{broker_id}:2",
                alive=str(broker_id) not in opts.get("dead", "").split(","),
                learner=opts.get("learner") == str(broker_id),
                incarnation=incarnation,
            )
            for broker_id, incarnation in incarnations.items()
            if incarnation != "none"
        ),
        raft_index=int(opts.get("index", epoch * 100 + set_epoch)),
    )


def some(numbers: frozenset[int]) -> str:
    return ",".join(map(str, sorted(numbers))) or "-"


def key_text(epoch: int, set_epoch: int) -> str:
    return f"{epoch}.{set_epoch}"


def in_words(effect: ev.Effect) -> str:
    match effect:
        case ev.SendRegister(target, broker_id, request_id, suspect):
            why = f", suspect: {suspect}" if suspect else ""
            return f"-> {target} register id {broker_id}, request {request_id}{why}"
        case ev.SaveIdentity(broker_id):
            return f"saves id {broker_id}"
        case ev.OpenSessions(broker_id):
            return f"opens sessions as {broker_id}"
        case ev.CloseSession(controller, reason):
            return f"closes the session with {controller}: {reason}"
        case ev.SendElect(target, epoch, request_id, reason):
            return f"-> {target} elect after epoch {epoch}, request {request_id}: {reason}"
        case ev.SendAlter(target, request_id, epoch, set_epoch, members, confirm, reason):
            names = " ".join(f"{number}={incarnation}" for number, incarnation in members)
            return (
                f"-> {target} alter {key_text(epoch, set_epoch)} to {names},"
                f" confirm {confirm}, request {request_id}: {reason}"
            )
        case ev.FetchView(target):
            return f"-> {target} fetch"
        case ev.BecomeMaster(view) | ev.StandDown(view):
            return f"{type(effect).__name__} {key_text(*view.key)}"
        case ev.BecomeSlave(view):
            return f"BecomeSlave of {view.master_broker_id} {key_text(*view.key)}"
        case ev.AdoptView(view):
            return f"adopts {key_text(*view.key)} set {some(view.sync_state_set)}"
        case ev.SetDead(broker_ids):
            return f"dead: {some(broker_ids)}"
        case ev.ProposalRefused(code, remark):
            return f"proposal refused {code} {remark}"
        case ev.ProposalUnknown():
            return "proposal unknown"
        case ev.LeaseChanged(valid):
            return f"lease {'granted' if valid else 'over'}"
        case ev.DropSessions(reason):
            return f"gives way: {reason}"
        case ev.HistoryReport(kind, fields):
            return f"reports {kind} {fields_text(fields)}"
        case ev.Notice(event, fields, warning):
            return f"{'WARNS' if warning else 'logs'} {event} {fields_text(fields)}".rstrip()
    raise AssertionError(effect)


def fields_text(fields: tuple[tuple[str, int | str], ...]) -> str:
    return " ".join(f"{name}={value}" for name, value in fields)


class Env:
    """One machine, its clock, and what it did."""

    def __init__(self) -> None:
        self.out: list[str] = []
        self.now_ms = 10_000
        self.calls: dict[str, ev.Call] = {}
        self.acted: dict[tuple[int, int], RoleView] = {}
        self.do_broker()

    def on(self, event: ev.Event) -> list[ev.Effect]:
        effects = self.core.step(event, self.now_ms)
        self.core.check_invariants()
        for effect in effects:
            if isinstance(effect, ev.SendRegister | ev.SendElect | ev.SendAlter | ev.FetchView):
                self.calls[KINDS[type(effect)]] = effect
            if isinstance(effect, ev.BecomeMaster | ev.BecomeSlave | ev.StandDown):
                self.acted[effect.view.key] = effect.view
        return effects

    def say(self, event: ev.Event) -> None:
        effects = self.on(event)
        beats = [effect for effect in effects if isinstance(effect, ev.SendHeartbeat)]
        for effect in effects:
            if not isinstance(effect, ev.SendHeartbeat):
                self.out.append(in_words(effect))
            elif effect is beats[0]:
                keys = {key_text(beat.master_epoch, beat.sync_state_set_epoch) for beat in beats}
                names = " ".join(beat.controller for beat in beats)
                self.out.append(f"-> {names} heartbeat {' '.join(keys)}")
        self.store()

    def store(self) -> None:
        """What was accepted becomes durable, before anything else happens."""
        epoch = self.core.current.highest_master_epoch
        if epoch > self.core.current.stored_master_epoch:
            self.out.append(f"stores epoch {epoch}")
            self.say(ev.EpochStored(epoch))

    def do_broker(self, *words: str) -> None:
        opts = options(words)
        self.core = ReplicasState(
            broker_name="broker-a",
            current=CurrentView(int(opts.get("id", "1")), "b", int(opts.get("highest", "0"))),
            controllers=CONTROLLERS,
            timings=SessionTimings(),
            learner="learner" in words,
            protocol="remoting" if "java" in words else "grpc",
        )

    def do_registered(self) -> None:
        self.on(ev.Started())
        self.on(ev.Replied(self.call("register", "c1"), 0, "", None, 1))
        for controller in CONTROLLERS:
            self.on(ev.SessionOpened(controller))
        self.on(self.answer("c1"))

    def do_master(self, key: str, members: str = "1,2") -> None:
        self.do_registered()
        view = view_of((f"1@{key}:{members}",))
        assert view is not None
        assert any(isinstance(e, ev.BecomeMaster) for e in self.on(ev.ViewReceived("c1", view)))
        self.on(ev.EpochStored(view.master_epoch))
        self.on(self.answer("c1"))

    def do_start(self) -> None:
        self.say(ev.Started())

    def do_open(self, controller: str) -> None:
        self.say(ev.SessionOpened(controller))

    def do_close(self, *controllers: str) -> None:
        for controller in controllers:
            self.say(ev.SessionClosed(controller))

    def do_refused(self, controller: str, code: str) -> None:
        self.say(ev.SessionRefused(controller, int(code), "a remark"))

    def do_hint(self, target: str, leader: str) -> None:
        self.say(ev.LeaderHinted(target, leader))

    def do_suspect(self, why: str = "") -> None:
        self.say(ev.SuspicionChanged(why))

    def do_notice(self, key: str) -> None:
        self.say(ev.NoticeReceived(*key_of(key)))

    def do_failed(self, key: str) -> None:
        self.say(ev.ActionFailed(self.acted[key_of(key)]))

    def call(self, kind: str, target: str) -> ev.Call:
        """The last call of that kind, as if it had gone to `target`."""
        return dataclasses.replace(self.calls[kind], target=target)

    def do_reply(self, kind: str, target: str, code: str, *words: str) -> None:
        broker_id = int(options(words).get("id", "1")) if kind == "register" else 0
        call = self.call(kind, target)
        self.say(ev.Replied(call, int(code), "a remark", view_of(words), broker_id))

    def do_fail(self, kind: str, target: str) -> None:
        self.say(ev.Unanswered(self.call(kind, target), "UNAVAILABLE"))

    def answer(self, controller: str, *words: str) -> ev.AnswerReceived:
        opts, current = options(words), self.core.current.key
        epoch, set_epoch = key_of(opts["key"]) if "key" in opts else current
        return ev.AnswerReceived(
            controller=controller,
            sent_ms=self.now_ms - int(opts.get("sent", "0")),
            leader="follower" not in words,
            controller_epoch=int(opts.get("epoch", "1")),
            leader_grpc_address=opts.get("hint", ""),
            master_epoch=epoch,
            sync_state_set_epoch=set_epoch,
        )

    def do_answer(self, controller: str, *words: str) -> None:
        self.say(self.answer(controller, *words))

    def do_view(self, controller: str, *words: str) -> None:
        view = view_of(words)
        assert view is not None
        self.say(ev.ViewReceived(controller, view))

    def do_fetched(self, controller: str, *words: str) -> None:
        view = view_of(words)
        assert view is not None
        self.say(ev.Replied(self.call("fetch", controller), 0, "", view))

    def do_propose(self, members: str, key: str = "") -> None:
        based_on = key_of(key) if key else self.core.current.key
        self.say(ev.ProposalRequested(ids(members), "expand", 77, based_on))

    def do_tick(self, ms: str) -> None:
        """Ticks exactly at the deadlines that the core names."""
        beats: list[ev.SendHeartbeat] = []
        self.pass_time(int(ms), beats)
        self.count(beats)

    def do_rounds(self, count: str, leader: str, *followers: str) -> None:
        begin_ms = self.now_ms
        beats: list[ev.SendHeartbeat] = []
        for _ in range(int(count)):
            self.on(self.answer(leader))
            for follower in followers:
                self.on(self.answer(follower, "follower"))
            self.pass_time(100, beats, since_ms=begin_ms)
        self.count(beats)

    def pass_time(
        self, ms: int, beats: list[ev.SendHeartbeat], *, since_ms: int | None = None
    ) -> None:
        begin_ms, end_ms = self.now_ms if since_ms is None else since_ms, self.now_ms + ms
        while (deadline_ms := self.core.next_deadline_ms) is not None and deadline_ms <= end_ms:
            self.now_ms = max(self.now_ms, deadline_ms)
            for effect in self.on(ev.TimeCame()):
                if isinstance(effect, ev.SendHeartbeat):
                    beats.append(effect)
                else:
                    self.out.append(f"+{self.now_ms - begin_ms} {in_words(effect)}")
        self.now_ms = end_ms

    def count(self, beats: list[ev.SendHeartbeat]) -> None:
        if beats:
            counts = sorted(Counter(beat.controller for beat in beats).items())
            times = len({beat.sent_ms for beat in beats})
            text = ", ".join(f"{name} {count}" for name, count in counts)
            self.out.append(f"heartbeats at {times} times: {text}")

    def do_show(self) -> None:
        core, current = self.core, self.core.current
        lease = "with a lease" if core.lease_valid(self.now_ms) else "without a lease"
        known = "registered" if core.registered else "not registered"
        alter = "open" if core.open_alter is not None else "none"
        self.out.append(
            f"{current.role.name} {key_text(*current.key)} {lease}, {known} as {current.broker_id},"
            f" leader {core.controllers.leader or '-'}, alter {alter}"
        )


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_script(path, check_script):
    """The conversation goes exactly as the script says."""
    check_script(path, Env())


def test_there_are_scripts():
    assert len(SCRIPTS) >= 7


def test_r11_one_alter_in_flight():
    env = Env()
    env.do_master("1.1", "1")
    env.do_propose("1,2")
    with pytest.raises(AssertionError, match="R11") as raised:
        env.do_propose("1,3")
    assert "ProposalRequested" in raised.value.__notes__[0], "the events that led to it"


@pytest.mark.parametrize("unknown", [False, True])
@pytest.mark.parametrize(
    ("code", "ends_first", "ends_after_unknown"),
    [
        (0, False, False),  # a view shows to what
        (2000, True, False),
        (2001, True, False),
        (2002, True, False),
        (2003, True, True),
        (2005, True, True),
        (2006, True, True),
        (2007, False, False),
        (2010, True, True),
        (2013, True, False),
        (2015, False, False),
    ],
)
def test_r11_what_each_answer_proves_while_a_first_copy_may_be_queued(
    code, ends_first, ends_after_unknown, unknown
):
    """1. The Alter goes to c1, which falls silent: c1 may still have it in its queue. 2. c2 leads
    and answers the same request. A fence (2000-2002) or "same set" may be the work of that copy;
    the other refusals were given by the state that a late copy would meet, too, and are remembered
    there under its id. Only after a refusal is the union taken back."""
    env = Env()
    env.do_master("1.1")
    env.do_propose("1,3")
    (sent,) = env.out
    target, env.out = "c1", []
    if unknown:
        env.do_fail("alter", "c1")
        assert env.out == ["proposal unknown"]
        env.do_answer("c2", "epoch=2")
        assert sent.replace("c1", "c2") in env.out, "the same request"
        target, env.out = "c2", []
    env.do_reply("alter", target, str(code))
    ended = ends_after_unknown if unknown else ends_first
    assert (env.core.open_alter is None) is ended
    assert (f"proposal refused {code} a remark" in env.out) is ended
    shows_other_epochs = not ended and code in (0, 2000, 2001, 2002)
    assert any("fetch" in line for line in env.out) is shows_other_epochs
    env.do_view("c2", "1@1.2:1,2")
    assert env.core.open_alter is None, "a committed bump ends it in any case"
    env.out = []
    env.do_tick("1000")
    assert not any("fetch" in line for line in env.out), "nor is a newer view missed"


def test_r11_an_answer_to_an_earlier_alter_ends_no_later_one():
    """1 an Alter is open, and a view passes it. 2 the next one is open. 3 the first is answered."""
    env = Env()
    env.do_master("1.1", "1")
    env.do_propose("1,2")
    first = env.calls["alter"]
    env.do_view("c1", "1@1.2:1")
    env.do_propose("1,3")
    env.out = []
    env.say(ev.Replied(first, 2006, "late", None, 0))
    env.say(ev.Unanswered(first, "later still"))
    assert env.core.open_alter is not None and env.out == []


def test_what_is_of_another_group_changes_nothing_here():
    """Neither a view that is pushed, nor who is dead in it, nor one that comes with an answer."""
    env = Env()
    env.do_master("1.1", "1")
    env.do_propose("1,2")
    env.out = []
    env.do_view("c1", "1@9.0", "group=broker-b", "dead=2")
    assert env.out == [] and env.core.current.key == (1, 1)
    env.do_reply("alter", "c1", "0", "1@9.0:1,2", "group=broker-b")
    assert env.core.current.key == (1, 1)
    assert not any("adopts" in line or "Become" in line for line in env.out)


def test_r5_a_view_that_calls_its_own_reader_dead_is_not_believed():
    env = Env()
    env.do_master("1.1")
    env.out = []
    env.do_view("c1", "1@1.1:1,2", "dead=1,2")
    assert env.out == ["dead: 2"]


def test_a_view_that_was_named_first_is_wanted_though_an_older_one_is_named_later():
    missed = MissedViews()
    missed.want((3, 2), 0)
    missed.want((3, 1), 10)
    assert missed.due(10, [], (3, 1), None, "c1", None) == [ev.FetchView("c1")]
    assert not missed.due(9_000, [], (3, 1), None, "c1", None), "one at a time"
    for leader in (None, "c1"):
        found = MissedViews().due(100, [], (3, 2), ("c2", 0), "c9", leader)
        assert found == [ev.FetchView(leader or "c2")]


def test_r20_a_view_that_a_lagging_controller_does_not_have_is_fetched_again():
    env = Env()
    env.do_master("1.1")
    env.do_notice("1.5")
    env.do_fetched("c1", "1@1.1:1,2")
    env.out = []
    env.do_tick("300")
    assert any("fetch" in line for line in env.out)


def test_a_registration_that_begins_again_tries_without_the_pauses_of_the_one_before():
    registration = ControllerRegistration(2, lambda: "id")
    for _ in range(3):
        registration.not_answered(0)
    registration.begin(0)
    registration.not_answered(0)
    assert registration.due(0, [], "c2", 1), "the other one at once"
    registration.not_answered(0)
    assert not registration.due(49, [], "c1", 1) and registration.due(50, [], "c1", 1)


def test_a_registration_pauses_for_an_eighth_of_the_time_that_it_has_waited_for_a_leader():
    registration = ControllerRegistration(1, lambda: "id")
    registration.begin(1_000)
    asked = []
    now_ms = 1_000
    while now_ms < 60_000:
        deadlines: list[int] = []
        if registration.due(now_ms, deadlines, "c1", 0):
            asked.append(now_ms - 1_000)
            registration.not_answered(now_ms)
        else:
            (now_ms,) = deadlines
    assert asked[:10] == [0, 50, 100, 150, 200, 250, 300, 350, 400, 450]
    pauses = [after - before for before, after in itertools.pairwise(asked)]
    assert pauses == sorted(pauses) and pauses[-1] == 500


def test_an_election_is_asked_for_soon_after_a_leader_was_found():
    elections = Elections()
    elections.wanted(60_000)
    elections.retry_now(1_000)
    assert not elections.due(1_299, []) and elections.due(1_300, [])


def test_r5_heartbeats_are_numbered_and_a_follower_names_the_leader():
    """What is lost and found is reported once."""
    controllers = Controllers(("c1", "c2"), SessionTimings())
    controllers.opened("c1", 0)
    seen = [
        [
            effect.sequence if isinstance(effect, ev.SendHeartbeat) else "lost"
            for effect in controllers.due(ms, [], (0, 0), master=False, report_loss=True)
        ]
        for ms in (0, 100, 800, 900)
    ]
    assert seen == [[1], [2], [3, "lost"], [4]]
    assert controllers.back() and not controllers.back()
    controllers.answered(ev.AnswerReceived("c1", 900, False, 1, "c2", 0, 0), (0, 0), 900)
    assert controllers.target() == "c2"


def test_what_is_missed_is_counted_from_the_first_answer_that_told_of_it():
    """Answers that come every 50 ms do not put the fetch off for ever."""
    controllers = Controllers(("c1",), SessionTimings())
    controllers.opened("c1", 0)
    for now_ms in (10, 60):
        controllers.answered(ev.AnswerReceived("c1", now_ms, False, 1, "", 3, 2), (3, 1), now_ms)
    assert controllers.ahead() == ("c1", 10)
    controllers.answered(ev.AnswerReceived("c1", 90, False, 1, "", 3, 1), (3, 1), 90)
    assert controllers.ahead() is None
