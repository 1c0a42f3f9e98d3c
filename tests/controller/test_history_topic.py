"""The publication of the history: every event, in order, none left out, whoever leads."""

import random

import pytest

from batonmq.controller.history_topic import (
    BACKOFF_FIRST_MS,
    BACKOFF_MAX_MS,
    Create,
    HistoryTopic,
    Learn,
    Read,
    Send,
    Target,
    Wait,
)
from batonmq.history.message import Line, history_name, history_properties
from batonmq.protocol.codes import ResponseCode

DELAY_MS = 1_000


def line(index, part=0, log="log-a"):
    return Line((log, index, part), "elected", "broker-a", f"{log}/{index}/{part}".encode())


def target(epoch=1, address="10.0.0.1:10911"):
    return Target("broker-a", address, epoch)


class Play:
    """One leadership: answers what the core asks from `file` and `topic`, as told."""

    def __init__(self, file, topic, batch_max=2, now_ms=0, expired=False):
        self.file, self.topic, self.batch_max = file, topic, batch_max
        self.expired = expired
        self.now_ms = now_ms
        self.core = HistoryTopic(DELAY_MS, now_ms)

    def aim(self, at):
        self.core.set_target(at, self.now_ms)

    def write(self, *lines):
        self.file.extend(lines)
        self.core.written(self.now_ms)

    def step(self):
        return self.core.step(self.now_ms)

    def behind(self, mark):
        """What `HistoryReader` gives."""
        begin = 0
        for at, each in enumerate(self.file):
            if mark is not None and each.mark[0] == mark[0] and each.mark <= mark:
                begin = at + 1
        return self.file[begin : begin + self.batch_max]

    def young(self):
        """The same where the mark is not known: the last three are young."""
        return self.file[-3:][: self.batch_max]

    def do(self, step, code=ResponseCode.SUCCESS, stored=True):
        match step:
            case Learn(at):
                mark = self.topic[-1].mark if self.topic else None
                self.core.learned(at, mark, used=bool(self.topic) or self.expired)
            case Read(at, mark, recent):
                self.core.read(at, self.young() if recent else self.behind(mark))
            case Create(at):
                self.core.created(at)
            case Send(at, batch):
                if stored:
                    self.topic.extend(batch)
                self.core.answered(at, code, "", self.now_ms)

    def run(self):
        """Until there is nothing more to do; the clock goes on by itself."""
        while True:
            step = self.step()
            if isinstance(step, Wait):
                if step.until_ms is None:
                    return
                self.now_ms = step.until_ms
            self.do(step)


def names(lines):
    return [each.mark[1:] for each in lines]


def test_events_go_out_in_batches_in_the_order_of_the_file():
    play = Play([line(1), line(2), line(2, 1), line(3), line(5)], [])
    play.aim(target())
    sent = []
    while not (isinstance(step := play.step(), Wait) and step.until_ms is None):
        if isinstance(step, Send):
            sent.append(names(step.batch))
        if isinstance(step, Wait):
            play.now_ms = step.until_ms
        play.do(step)
    assert sent == [[(1, 0), (2, 0)], [(2, 1), (3, 0)], [(5, 0)]]
    assert play.now_ms == DELAY_MS
    assert play.core.behind_since_ms is None


def test_nothing_is_sent_without_a_master_and_early_behind_an_election():
    play = Play([line(1)], [], now_ms=10_000)
    assert play.step() == Wait()
    play.now_ms = 50_000
    assert play.step() == Wait()
    play.aim(target(epoch=1))
    assert play.step() == Wait(51_000)
    play.now_ms = 50_900
    play.aim(target(epoch=2))
    assert play.step() == Wait(51_900)
    play.now_ms = 51_900
    assert isinstance(play.step(), Learn)
    play.aim(None)
    assert play.step() == Wait()
    assert play.core.behind_since_ms == 10_000


def test_a_new_event_waits_its_time_and_others_join_it():
    play = Play([], [])
    play.aim(target())
    play.run()
    play.now_ms = 7_000
    play.write(line(1))
    play.now_ms = 7_800
    play.write(line(2))
    assert play.core.behind_since_ms == 7_000
    assert play.step() == Wait(8_000)
    play.run()
    assert names(play.topic) == [(1, 0), (2, 0)]
    assert play.now_ms == 8_000


def test_an_event_written_while_the_file_is_read_is_not_forgotten():
    play = Play([line(1)], [line(1)])
    play.aim(target())
    play.now_ms = DELAY_MS
    play.do(play.step())
    read = play.step()
    assert isinstance(read, Read)
    nothing = play.behind(read.mark)
    play.write(line(2))
    play.core.read(read.target, nothing)
    play.run()
    assert names(play.topic) == [(1, 0), (2, 0)]


def test_the_next_leader_goes_on_behind_the_newest_message():
    events = [line(index) for index in range(1, 8)]
    topic = []
    first = Play(events[:5], topic)
    first.aim(target())
    first.run()
    second = Play(events, topic)
    second.aim(target())
    second.run()
    assert names(topic) == names(events)


def test_what_a_deposed_leader_still_sends_leaves_no_gap():
    """Its batch stands behind newer ones: the third leader goes on too early, not too late."""
    events = [line(index) for index in range(1, 8)]
    topic = [*events[:6], *events[2:4]]
    third = Play(events, topic)
    third.aim(target())
    third.run()
    assert names(topic[8:]) == [(5, 0), (6, 0), (7, 0)]


@pytest.mark.parametrize("mark", [None, line(9, log="log-of-others")])
def test_an_unknown_mark_means_from_the_oldest_event_on(mark):
    events = [line(900, log="log-older"), line(1), line(2)]
    topic = [mark] if mark else []
    play = Play(events, topic)
    play.aim(target())
    play.run()
    assert topic[-3:] == events


def test_a_topic_that_expired_is_not_filled_with_the_whole_history_again():
    play = Play([line(index) for index in range(1, 10)], [], expired=True)
    play.aim(target())
    play.run()
    assert names(play.topic) == [(7, 0), (8, 0), (9, 0)]


def test_a_leader_remembers_what_the_group_acknowledged_before_it_expired():
    play = Play([line(index) for index in range(1, 10)], [])
    play.aim(target())
    play.run()
    play.topic.clear()
    play.expired = True
    play.aim(target(epoch=2))
    play.write(line(10))
    play.run()
    assert names(play.topic) == [(10, 0)]
    # Another group has not acknowledged anything.
    play.topic.clear()
    play.aim(Target("broker-b", "10.0.0.3:10911", 1))
    play.write(line(11))
    play.run()
    assert names(play.topic) == [(9, 0), (10, 0), (11, 0)]


def test_what_the_topic_tells_counts_before_what_is_remembered():
    """An unclean election may have cut it off again, or the topic was made anew."""
    play = Play([line(index) for index in range(1, 6)], [])
    play.aim(target())
    play.run()
    del play.topic[3:]
    play.aim(target(epoch=2))
    play.write(line(6))
    play.run()
    assert names(play.topic) == [(index, 0) for index in range(1, 7)]
    play.topic.clear()
    play.aim(target(epoch=3))
    play.write(line(7))
    play.run()
    assert names(play.topic) == [(index, 0) for index in range(1, 8)]


@pytest.mark.parametrize(
    "code",
    [
        ResponseCode.FLUSH_DISK_TIMEOUT,
        ResponseCode.SLAVE_NOT_AVAILABLE,
        ResponseCode.FLUSH_SLAVE_TIMEOUT,
        ResponseCode.SERVICE_NOT_AVAILABLE,
        ResponseCode.SYSTEM_BUSY,
    ],
)
@pytest.mark.parametrize("stored", [True, False])
def test_only_code_0_means_that_a_batch_is_safe(code, stored):
    play = Play([line(1), line(2), line(3)], [])
    play.aim(target())
    play.now_ms = DELAY_MS
    play.do(play.step())
    play.do(play.step())
    send = play.step()
    assert isinstance(send, Send)
    play.do(send, code, stored)
    assert str(int(code)) in play.core.problem
    assert play.step() == Wait(DELAY_MS + BACKOFF_FIRST_MS)
    play.run()
    assert names(play.topic) == [(1, 0), (2, 0), (3, 0)]
    assert play.core.problem == ""


def test_pauses_grow_up_to_a_bound_and_begin_anew_with_another_master():
    play = Play([line(1)], [])
    at = target()
    play.aim(at)
    play.now_ms = DELAY_MS
    pauses = []
    for _ in range(9):
        play.core.failed(at, "nobody answers", play.now_ms)
        step = play.step()
        pauses.append(step.until_ms - play.now_ms)
        play.now_ms = step.until_ms
    assert pauses[:3] == [BACKOFF_FIRST_MS, 2 * BACKOFF_FIRST_MS, 4 * BACKOFF_FIRST_MS]
    assert pauses[-2:] == [BACKOFF_MAX_MS, BACKOFF_MAX_MS]
    play.aim(target(epoch=2))
    assert play.step() == Wait(play.now_ms + DELAY_MS)
    assert play.core.problem == ""


def test_the_topic_is_made_once_where_it_is_unknown():
    play = Play([line(1)], [])
    play.aim(target())
    play.now_ms = DELAY_MS
    play.do(play.step())
    play.do(play.step())
    play.do(play.step(), ResponseCode.TOPIC_NOT_EXIST, stored=False)
    assert isinstance(play.step(), Create)
    play.do(play.step())
    assert isinstance(play.step(), Send)
    play.do(play.step(), ResponseCode.TOPIC_NOT_EXIST, stored=False)
    assert isinstance(play.step(), Wait)
    assert "17" in play.core.problem


def test_answers_for_an_earlier_master_come_too_late():
    play = Play([line(1), line(2), line(3)], [])
    old, new = target(1), target(2, "10.0.0.2:10911")
    play.aim(old)
    play.now_ms = DELAY_MS
    play.do(play.step())
    play.do(play.step())
    send = play.step()
    assert isinstance(send, Send)
    play.aim(new)
    play.core.answered(old, ResponseCode.SUCCESS, "", play.now_ms)
    play.core.failed(old, "gone", play.now_ms)
    play.core.read(old, [line(3)])
    play.core.learned(old, line(3).mark)
    play.run()
    assert names(play.topic) == [(1, 0), (2, 0), (3, 0)]
    assert play.core.problem == ""


def test_no_chance_leaves_a_gap():
    """Leaders and masters change at random, answers are lost, batches stay or vanish."""
    chance = random.Random(20)
    for _ in range(300):
        events = [
            line(index, part, log)
            for log in ("log-a", "log-b")
            for index in range(1, chance.randrange(3, 30))
            for part in range(chance.choice((1, 1, 2)))
        ]
        topic = []
        epoch = 1
        shown = 0
        while shown < len(events):
            shown = min(len(events), shown + chance.randrange(1, 12))
            play = Play(events[:shown], topic, chance.randrange(1, 5))
            play.aim(target(epoch))
            for _ in range(chance.randrange(40)):
                step = play.step()
                if isinstance(step, Wait):
                    if step.until_ms is None:
                        break
                    play.now_ms = step.until_ms
                    continue
                fate = chance.random()
                if fate < 0.7:
                    play.do(step)
                elif fate < 0.8 and isinstance(step, Send):
                    play.do(step, ResponseCode.FLUSH_SLAVE_TIMEOUT, chance.random() < 0.5)
                elif fate < 0.9:
                    play.core.failed(step.target, "lost", play.now_ms)
                else:
                    epoch += 1
                    play.aim(target(epoch))
        last = Play(events, topic)
        last.aim(target(epoch + 1))
        last.run()
        in_topic = [each.mark for each in topic]
        first_seen = list(dict.fromkeys(in_topic))
        assert first_seen == [each.mark for each in events]


def test_a_repeat_carries_the_same_name():
    properties = history_properties(Line(("log-a", 17, 2), "elected", "broker-a", b""))
    assert properties["KEYS"] == "17 log-a-17-2"
    assert properties["TAGS"] == "elected"
    assert properties["BATON_GROUP"] == "broker-a"
    assert history_name(properties) == ("log-a", 17, 2)
    assert "BATON_AFTER" not in properties
    named = history_properties(Line(("log-a", 17, 2), "elected", "broker-a", b"", (16, 1)))
    assert named["BATON_AFTER"] == "16-1"
    of_none = Line(("log-a", 17, 2), "controller_leader_changed", "", b"")
    assert "BATON_GROUP" not in history_properties(of_none)
    assert history_name({"KEYS": "17"}) is None
    assert history_name(properties | {"BATON_PART": "x"}) is None
