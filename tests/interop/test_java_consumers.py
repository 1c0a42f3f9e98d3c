"""Stock Java consumers of every kind, all at once, and a kill -9 of the master in their middle.

One story for the module: a producer's lanes fill a topic, every kind of consumer reads it, a second
member joins the orderly group, the master is killed and comes back as a slave, members leave. All
that is read comes from slaves where the master suggests it (`slaveReadEnable`, nothing counts as in
memory). Each test looks at what one kind of client saw.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

import pytest

from batonmq import LitePullConsumer, Message
from batonmq.blocking import BlockingProducer, BlockingPullConsumer
from batonmq.protocol.codes import RequestCode, ResponseCode
from batonmq.protocol.message import MessageExt, MessageQueue
from batonmq.protocol.topic_name import TRACE_TOPIC
from lab.cluster.connection import ask
from lab.cluster.java import JavaProgram
from lab.cluster.processes import wait_for
from lab.cluster.queues import read_topic
from lab.cluster.up import ClusterProcess

pytestmark = pytest.mark.java

Line = dict[str, Any]
TOPIC, QUESTIONS = "JavaKinds", "JavaQuestions"
QUEUES: Final = 8
PHASE: Final = 120
SETTINGS: Final = {
    "broker": {"slaveReadEnable": True, "traceTopicEnable": True},
    "store": {"accessMessageInMemoryMaxRatio": 0},
}
SQL: Final = (
    "n BETWEEN 3 AND 90 AND kind IN ('red', 'green') AND note IS NULL AND NOT (n = 10 OR n > 80)"
    " OR note = 'it''s seven' AND n NOT IN ('0') AND n >= 100"
)
BAD_SQL: Final = "n BETWEEN 3 AND"
PAUSED: Final = 0
SOUGHT: Final = 1


def is_wanted(number: int) -> bool:
    """What SQL means, for a message of `Consumers.load`."""
    kind, noted = ("red", "green", "blue")[number % 3], number % 7 == 0
    first = 3 <= number <= 80 and number != 10 and kind != "blue" and not noted
    return first or (noted and number >= 100)


def has_tag(number: int) -> bool:
    """A or S, for a message of `Consumers.load`."""
    return number % 2 == 0


@dataclass
class Story:
    """The program's lines. The marks are places in them: `killed` where the master was killed,
    `joined` where the second member of the orderly group had begun."""

    program: JavaProgram
    cluster: ClusterProcess
    joined: int = 0
    killed: int = 0
    paused: tuple[int, int] = (0, 0)
    sought: int = 0
    read_at_slaves: int = 0
    locked_by_intruder: list[Any] | None = None
    committed: dict[int, int] | None = None
    refusal: Line | None = None
    told_to_python: list[bytes] = field(default_factory=list)
    python_took: list[MessageExt] = field(default_factory=list)

    @property
    def now(self) -> int:
        return len(self.program.lines)

    def do(self, command: str) -> Line:
        """Runs a command: its line."""
        results = len(self._results())
        self.program.send(command)
        self.program.wait_for(command, lambda: len(self._results()) > results)
        return self._results()[-1]

    def _results(self) -> list[Line]:
        return [*self.program.of("did"), *self.program.of("refused")]

    def acked(self) -> set[str]:
        return {line["acked"] for line in self.program.of("acked")}

    def seen(self, *names: str, since: int = 0, until: int | None = None) -> list[Line]:
        """What these clients took, in the order of their listeners' ends."""
        lines = list(self.program.lines)[since:until]
        return [line for line in lines if line.get("by") in names and "key" in line]

    def keys(self, *names: str) -> set[str]:
        return {line["key"] for line in self.seen(*names) if not line["suspends"]}

    def missing(self, names: tuple[str, ...], more: frozenset[str] = frozenset()) -> str:
        """The acknowledged messages that these clients lack, by lane, with what they have beside
        the gap and last of that lane."""
        lanes: dict[str, list[str]] = {}
        for key in sorted(self.acked() - self.keys(*names) - more, key=number_of):
            lanes.setdefault(key.split("-")[0], []).append(key)
        text = [f"{names} lack {sum(map(len, lanes.values()))} messages"]
        for lane, keys in lanes.items():
            had = [line for line in self.seen(*names) if line["key"].startswith(f"{lane}-")]
            beside = {f"{lane}-{number_of(keys[0]) - 1}", f"{lane}-{number_of(keys[-1]) + 1}"}
            text.append(f"lane {lane}: {len(keys)}, {' '.join(keys[:20])} to {keys[-1]}")
            text += [f"  had: {line}" for line in had[:-3] if line["key"] in beside]
            text += [f"  last: {line}" for line in had[-3:]]
        return "\n".join(text)

    def questions(self, since: int = 0, until: int | None = None) -> list[Line]:
        return [line for line in list(self.program.lines)[since:until] if "asked" in line]

    def go_on(self, *lite: str) -> None:
        """Until each client has seen more messages, and questions were answered."""
        now = self.now
        clients = [("one", "two"), ("tag",), ("all-1",), ("all-2",), ("assigned",), lite]
        for names in clients:
            self.program.wait_for(
                f"messages of {names}",
                lambda names=names: len(self.seen(*names, since=now)) >= PHASE // 3,
                diagnostics=lambda names=names: self.missing(names),
            )
        self.program.wait_for(
            "answers", lambda: sum("answer" in one for one in self.questions(now)) >= 5
        )


@pytest.fixture(scope="module")
def story(java_classpath: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    folder = tmp_path_factory.mktemp("kinds")
    with (
        ClusterProcess(
            folder / "cluster", controllers=1, overrides=SETTINGS, respawn=True
        ) as cluster,
        JavaProgram(java_classpath, folder / "java", "Consumers", cluster.name_servers) as program,
    ):
        cluster.wait_in_sync(3)
        running = Story(program, cluster)
        begin(running)
        fail_over(running)
        end(running)
        yield running


def begin(story: Story) -> None:
    """Everybody starts, one after the other."""
    for topic in (TOPIC, QUESTIONS):
        # A stock consumer of a topic that is not there yet waits 30 s for its next heartbeat.
        queues = {"readQueueNums": QUEUES, "writeQueueNums": QUEUES, "perm": 6}
        master = story.cluster.master()["address"]
        made = ask(master, RequestCode.UPDATE_AND_CREATE_TOPIC, {"topic": topic, **queues})
        assert made.code == 0, made
    for command in (
        f"load {TOPIC} {QUEUES}",
        f"orderly one java-orderly {TOPIC}",
        f"push sql java-sql {TOPIC} CLUSTERING SQL92 {SQL}",
        f"push tag java-tag {TOPIC} CLUSTERING TAG A || S",
        f"push all-1 java-all {TOPIC} BROADCASTING TAG *",
        f"push all-2 java-all {TOPIC} BROADCASTING TAG *",
        f"lite lite-1 java-lite {TOPIC} subscribe",
        f"lite assigned java-assigned {TOPIC} assign",
        f"answer answers java-answers {QUESTIONS}",
        f"ask question {QUESTIONS}",
    ):
        assert "did" in story.do(command), command
    story.refusal = story.do(f"push bad java-bad {TOPIC} CLUSTERING SQL92 {BAD_SQL}")
    story.go_on("lite-1")
    story.do(f"orderly two java-orderly {TOPIC}")
    story.do(f"pause assigned {PAUSED}")
    story.program.wait_for("its share", lambda: len(story.seen("two")) >= PHASE // 3)
    story.joined = story.now
    story.go_on("lite-1")
    drained = story.now
    story.go_on("lite-1")
    story.paused = (drained, story.now)
    story.do(f"resume assigned {PAUSED}")


def fail_over(story: Story) -> None:
    """The lite pull consumers' positions are kept, then the master is killed."""
    cluster = story.cluster
    story.do("commit assigned")
    reached = {line["queueId"]: line["queueOffset"] for line in story.seen("lite-1")}
    wait_for("its commits", lambda: all(committed(story, q) > reached[q] / 2 for q in reached))
    story.told_to_python = [answer_to_python(cluster, b"python-1")]
    story.committed = {queue: committed(story, queue) for queue in reached}
    story.read_at_slaves = sum(messages_read(slave["address"]) for slave in cluster.slaves())
    story.go_on("lite-1")
    master = cluster.master()
    story.killed = story.now
    cluster.kill(master)
    cluster.wait_new_master(master["address"])
    story.locked_by_intruder = locks_of_intruder(cluster, "java-orderly")
    story.go_on("lite-1")


def end(story: Story) -> None:
    """Members leave their queues to others, the lanes stop, all that was acknowledged is read."""
    story.told_to_python += [answer_to_python(story.cluster, b"python-2")]
    story.python_took = asyncio.run(share_with_java(story.cluster))
    story.do("leave one")
    story.do("end lite-1")
    story.do(f"lite lite-2 java-lite {TOPIC} subscribe")
    story.go_on("lite-2")
    story.do("stop")
    acked = story.acked()
    by_python = {message.keys for message in story.python_took}
    groups = (("one", "two"), ("all-1",), ("all-2",), ("lite-1", "lite-2"), ("assigned",))
    for names in groups:
        more = frozenset(by_python if "lite-1" in names else ())
        story.program.wait_for(
            f"all at {names}",
            lambda n=names, more=more: acked <= story.keys(*n) | more,
            diagnostics=lambda n=names, more=more: story.missing(n, more),
        )
    # Last: the stock client interrupts a thread for it that may read another queue by then, and
    # what that thread has just pulled is never polled.
    story.sought = story.now
    story.do(f"seek assigned {SOUGHT} 0")
    story.program.wait_for("sought", lambda: story.seen("assigned", since=story.sought))
    story.program.finish()


def committed(story: Story, queue_id: int, group: str = "java-lite") -> int:
    with BlockingPullConsumer(group, name_servers=story.cluster.name_servers) as consumer:
        return consumer.committed(MessageQueue(TOPIC, "broker-a", queue_id)) or 0


def answer_to_python(cluster: ClusterProcess, question: bytes) -> bytes:
    with BlockingProducer("python-asks", name_servers=cluster.name_servers) as producer:
        return producer.request(Message.of(QUESTIONS, question), timeout_ms=10_000).body


async def share_with_java(cluster: ClusterProcess) -> list[MessageExt]:
    """A Python member of the subscribing group, for a while."""
    taken: list[MessageExt] = []
    consumer = LitePullConsumer("java-lite", name_servers=cluster.name_servers)
    consumer.subscribe(TOPIC)
    async with consumer:
        assert len(consumer.assigned_queues) == QUEUES // 2
        async for message in consumer:
            taken.append(message)
            if len(taken) >= PHASE // 3:
                break
    return taken


def messages_read(address: str) -> int:
    status = ask(address, RequestCode.GET_BROKER_RUNTIME_INFO)
    return int(status.json["table"]["msgGetTotalTodayNow"])


def locks_of_intruder(cluster: ClusterProcess, group: str) -> list[Any]:
    """What a client that is no member gets, if it asks the master for all queues."""
    queues = [{"topic": TOPIC, "brokerName": "broker-a", "queueId": q} for q in range(QUEUES)]
    body = json.dumps({"clientId": "intruder", "consumerGroup": group, "mqSet": queues}).encode()

    def granted() -> Line | None:
        reply = ask(cluster.master()["address"], RequestCode.LOCK_BATCH_MQ, body=body)
        return reply.json if reply.code == 0 else None  # it may still be opening

    answer = wait_for("an answer of the new master", granted)
    locked: list[Any] = answer["lockOKMQSet"]
    return locked


def test_orderly_members_keep_order_and_never_share_a_queue(story: Story) -> None:
    """Through a rebalance, a kill and a leave: each queue has one owner at a time, whose listener
    gets its messages one after the other in their order, a suspended one again before the next. A
    lock that was answered before the kill is honoured by the new master."""
    assert story.locked_by_intruder == []
    assert len({line["queueId"] for line in story.seen("two", until=story.killed)}) == QUEUES // 2
    lines = sorted(story.seen("one", "two"), key=lambda line: line["from"])
    assert any(line["suspends"] for line in lines)
    for queue_id in range(QUEUES):
        calls = [line for line in lines if line["queueId"] == queue_id]
        assert [b for a, b in pairwise(calls) if b["from"] < a["to"]] == []
        consumed = -1
        for call in calls:
            assert call["queueOffset"] <= consumed + 1, f"it skips messages: {call}"
            if not call["suspends"]:
                consumed = max(consumed, call["queueOffset"])
    keys = [line["key"] for line in lines if not line["suspends"]]
    for lane in range(QUEUES):
        first = list(dict.fromkeys(key for key in keys if key.startswith(f"{lane}-")))
        assert first == sorted(first, key=number_of)


def number_of(key: str) -> int:
    return int(key.split("-")[1])


def test_filters_pass_exactly_what_they_name(story: Story) -> None:
    acked = story.acked()
    for name, wants in (("sql", is_wanted), ("tag", has_tag)):
        wanted = {key for key in acked if wants(number_of(key))}
        assert wanted <= story.keys(name), name
        assert {key for key in story.keys(name) if not wants(number_of(key))} == set(), name


def test_positions_of_lite_pull_consumers_survive_the_kill(story: Story) -> None:
    """The second member of the subscribing group goes on where the first one was: it leaves out
    nothing, and gets nothing again from before the positions that were kept before the kill."""
    assert story.committed is not None
    for queue_id, before in story.committed.items():
        first = [x["queueOffset"] for x in story.seen("lite-1") if x["queueId"] == queue_id]
        second = [x["queueOffset"] for x in story.seen("lite-2") if x["queueId"] == queue_id]
        assert second == sorted(second)  # the first may get a leaving Python member's last again
        first += [x.queue_offset for x in story.python_took if x.queue_id == queue_id]
        assert before <= second[0] <= max(first) + 1


def test_a_lite_pull_consumer_pauses_and_seeks(story: Story) -> None:
    since, until = story.paused
    assert {x["queueId"] for x in story.seen("assigned", since=since, until=until)} == set(
        range(QUEUES)
    ) - {PAUSED}
    again = [x for x in story.seen("assigned", since=story.sought) if x["queueId"] == SOUGHT]
    assert 0 in {x["queueOffset"] for x in again}
    # By place: a send that the kill interrupted may be stored twice.
    taken = [x for x in story.seen("assigned") if x["queueId"] != SOUGHT]
    times = Counter((x["queueId"], x["queueOffset"]) for x in taken)
    assert [(*place, n) for place, n in times.items() if n > 1] == []


def test_every_broadcasting_member_gets_everything(story: Story) -> None:
    for name in ("all-1", "all-2"):
        assert story.acked() <= story.keys(name)


def test_questions_are_answered(story: Story) -> None:
    """All of them while there is a master; those of the failover may fail, and say so."""
    assert [line for line in story.questions(until=story.killed) if "answer" not in line] == []
    answers = [line for line in story.questions() if "answer" in line]
    assert all(line["answer"] == f"answer to {line['asked']}" for line in answers)


def test_java_answers_python(story: Story) -> None:
    assert story.told_to_python == [b"answer to python-1", b"answer to python-2"]


def test_python_and_java_members_share_a_group(story: Story) -> None:
    assert {message.queue_id for message in story.python_took} <= set(range(QUEUES))
    assert len({message.queue_id for message in story.python_took}) <= QUEUES // 2


def test_slaves_serve_who_is_behind(story: Story) -> None:
    assert story.read_at_slaves >= PHASE


def test_traces_of_sends_and_consumption_arrive(story: Story) -> None:
    stored = read_topic(story.cluster.name_servers, TRACE_TOPIC)
    traces = b"".join(message.body for queue in stored.values() for message in queue)
    for kind in (b"Pub\x01", b"SubBefore\x01", b"SubAfter\x01"):
        assert kind in traces, kind
    assert b"loading" in traces and b"java-tag" in traces


def test_a_malformed_filter_is_refused_at_the_start(story: Story) -> None:
    assert story.refusal is not None
    assert story.refusal["code"] == ResponseCode.SUBSCRIPTION_PARSE_FAILED
    assert BAD_SQL in story.refusal["refused"] and story.refusal["why"], story.refusal
