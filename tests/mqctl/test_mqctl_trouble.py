"""What an operator meets at night: ctrl-C, full disks, closed pipes, half answers, odd names."""

import json
import os
import signal
import subprocess
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest

from batonmq.client.errors import NoRouteError
from batonmq.mqctl.context import CommandFailed, _ctrl_c_at_once, disk_failures
from batonmq.mqctl.output import Cell, shown
from batonmq.mqctl.roll import Doubt
from batonmq.mqctl.roll_backends import compose_backend
from batonmq.protocol.bodies import BrokerData, ReplicaIdentity, ReplicasInfo
from batonmq.protocol.errors import BatonError
from batonmq.protocol.message import MessageQueue
from batonmq.runtime.lock_file import FolderLock
from batonmq.runtime.secret_file import SecretFileError, read_passwords
from tests.mqctl.conftest import (
    MASTER,
    OFFSET_ID,
    SLAVE,
    FakeBrokers,
    FakeCluster,
    FakeConsumer,
    FakeProducer,
    FakeTopics,
    Run,
    stored_message,
    write_cluster,
)
from tests.mqctl.test_mqctl_backup import Store
from tests.shared.failing_disk import failing

MQCTL = [sys.executable, "-m", "batonmq.mqctl.main"]
BUSY = """
import asyncio, click
from batonmq.mqctl.context import CommandContext, run
from batonmq.mqctl.output import Output

async def work():
    print("begun", flush=True)
    {wait}

@click.command()
def command():
    run(CommandContext(Output(as_json=False)), work())

command()
"""


@pytest.mark.parametrize("wait", ["while True: pass", "await asyncio.sleep(600)"])
def test_one_ctrl_c_is_enough(wait: str) -> None:
    """A log of a terabyte is read in one go: at the first ctrl-C asyncio alone would only wait for
    its end."""
    argv = [sys.executable, "-c", BUSY.format(wait=wait)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        try:
            assert process.stdout.readline() == b"begun\n"
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=30) == 1
            assert process.stderr.read() == b""
        finally:
            process.kill()


def test_ctrl_c_within_the_start_shows_no_trace(tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGINT)")
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.getcwd()}"}
    ran = subprocess.run(MQCTL, capture_output=True, env=environ, timeout=60, check=False)
    assert (ran.returncode, ran.stderr) == (-signal.SIGINT, b"")


def test_who_ignores_ctrl_c_goes_on_doing_so() -> None:
    """A script's `mqctl roll &`: the ctrl-C is for what runs in the foreground."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with _ctrl_c_at_once():
            os.kill(os.getpid(), signal.SIGINT)
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("answer", [click.Abort, KeyboardInterrupt])
def test_who_ends_a_question_has_not_said_yes(
    mqctl: Run, fake: FakeCluster, monkeypatch: pytest.MonkeyPatch, answer: type[BaseException]
) -> None:
    def ask(*_: object, **__: object) -> bool:
        raise answer

    terminal = SimpleNamespace(stdin=SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr("batonmq.mqctl.context.sys", terminal)
    monkeypatch.setattr(click, "confirm", ask)
    ran = mqctl("deleteTopic", "-t", "T", "-c", "C")
    assert ran.code == 1 and "internal error" not in ran.err
    assert not [call for call in fake.calls if call[0] == "delete_topic"]


def shell(words: str, home: Path) -> subprocess.CompletedProcess[str]:
    line = " ".join(MQCTL) + f" {words}"
    environ = {"HOME": str(home), "PATH": os.environ["PATH"], "PYTHONPATH": os.getcwd()}
    return subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, env=environ, timeout=60
    )


@pytest.mark.parametrize("words", ["contexts --json", "completion bash"])
def test_a_full_disk_behind_the_output_is_one_line(tmp_path: Path, words: str) -> None:
    ran = shell(f"{words} > /dev/full", tmp_path)
    assert (ran.returncode, ran.stdout) == (1, "")
    failure = "mqctl: standard output: No space left on device; make space on that disk"
    assert ran.stderr.splitlines()[-1] == failure
    assert "Traceback" not in ran.stderr and "internal error" not in ran.stderr


def test_a_closed_output_is_no_bug(tmp_path: Path) -> None:
    for words in ("contexts >&-", "contexts x -n a:1 <&- 2>&-"):
        ran = shell(words, tmp_path)
        assert (ran.returncode, ran.stderr) == (0, "")


TRICKS = "\x1b]0;owned\x07 \u202eevil \x9b2J \udcff"


def test_no_message_and_no_name_commands_a_terminal(mqctl: Run, fake: FakeCluster) -> None:
    fake.messages = [
        stored_message(
            body=b"\x1b[2Jhi\nthere",
            properties={"KEYS": "k1 \x1b[1m", "TAGS": "\u202etag", "UNIQ_KEY": "u\nv"},
        )
    ]
    shown_one = mqctl("queryMsgById", "-i", OFFSET_ID).out
    row = mqctl("queryMsgByKey", "-t", "T", "-k", "k1").out
    for text in (shown_one, row):
        assert not [c for c in text if not c.isprintable() and c != "\n"]
    assert "\\x1b[2Jhi\nthere" in shown_one, "lines of a body stay lines"
    assert len(row.splitlines()) == 2 and "u\\nv" in row, "a row of a table is one line"
    document = mqctl("queryMsgById", "-i", OFFSET_ID, "--json").json
    assert document["body"] == "\x1b[2Jhi\nthere"


def test_what_is_shown_keeps_words_of_every_language() -> None:
    for text in ("héllo wörld", "注文　完了", "заказ", "%DLQ%a|b", "a\u00a0b"):
        assert shown(text) == text
    assert shown(TRICKS) == "\\x1b]0;owned\\x07 \\u202eevil \\x9b2J \\udcff"
    cell = Cell.of("good", "green")
    assert shown(cell) is cell


def test_a_file_name_that_is_no_text_is_shown_escaped(mqctl: Run, tmp_path: Path) -> None:
    Store(tmp_path / "store")
    odd = os.fsdecode(os.fsencode(str(tmp_path)) + b"/b\xff")
    ran = mqctl("backup", str(tmp_path / "store"), odd)
    assert ran.code == 0 and "b\\udcff: the log from 0" in ran.out
    ran = mqctl("backup", str(tmp_path / "store"), odd, "--json")
    assert (ran.code, ran.json["target"]) == (0, odd)
    ran = mqctl("topicRoute", "-t", "\udcff", "--json")
    assert (ran.code, ran.json["exitCode"]) == (2, 2)


# Half answers.


FENCED = "10.0.0.3:10911"


def lose_master(fake: FakeCluster, *, is_routed: bool = True) -> None:
    """A second group, which has no master now. With controllers its brokers are in no route then:
    `is_routed` False."""
    if is_routed:
        lost = BrokerData(broker_addrs={3: FENCED}, broker_name="broker-z", cluster="C")
        fake.info.broker_addr_table["broker-z"] = lost
        fake.info.cluster_addr_table["C"].append("broker-z")
        return
    fake.replicas.replicas_info_table["broker-z"] = ReplicasInfo(
        not_in_sync_replicas=[ReplicaIdentity(alive=True, broker_address=FENCED, broker_id=3)]
    )


@pytest.mark.parametrize("is_routed", [True, False])
@pytest.mark.parametrize(
    "words",
    [
        "haStatus",
        "haStatus -c C",
        "getTopicConfig -t T",
        "getConsumerConfig -g G",
        "brokerConsumeStats",
        "topicList -c",
        "topicStatus -t T",
        "dlq list",
        "consumerProgress",
        "consumerProgress -g G",
        "consumerConnection -g G",
        "producerConnection -g P",
        "describe group G",
        "describe topic T",
        "statsAll",
        "exportMetadata",
    ],
)
def test_a_group_without_a_master_hides_no_other_group(
    mqctl: Run, fake: FakeCluster, words: str, is_routed: bool
) -> None:
    whole = mqctl(*words.split(), "--json")
    lose_master(fake, is_routed=is_routed)
    ran = mqctl(*words.split(), "--json")
    assert (ran.code, ran.json) == (1, whole.json)
    assert "broker-z has no master and is left out" in ran.err


@pytest.mark.parametrize("words", ["consumerProgress", "consumerProgress -g G"])
def test_a_master_that_does_not_answer_hides_no_other_group(
    mqctl: Run, fake: FakeCluster, words: str
) -> None:
    whole = mqctl(*words.split(), "--json")
    lose_master(fake)
    fake.info.broker_addr_table["broker-z"].broker_addrs[0] = "10.0.0.4:10911"
    fake.dead |= {"10.0.0.4:10911"}
    ran = mqctl(*words.split(), "--json")
    assert (ran.code, ran.json) == (1, whole.json)
    assert ran.err.count("10.0.0.4:10911") == 1
    fake.dead |= {MASTER}
    ran = mqctl("consumerProgress", "-g", "Nope")
    assert ran.code == 1 and "no consumer group" not in ran.err, "nobody can say that"


@pytest.mark.parametrize("is_routed", [True, False])
@pytest.mark.parametrize(
    "words",
    [
        "updateTopic -t T -c C",
        "deleteTopic -t T -c C -y",
        "updateSubGroup -g G -c C -r 3",
        "deleteSubGroup -g G -c C -y",
        "user delete shop",
        "acl create shop -r Topic:T -a Pub",
    ],
)
def test_no_change_leaves_out_a_group_without_a_master(
    mqctl: Run, fake: FakeCluster, words: str, is_routed: bool
) -> None:
    """It was done in the others and ended with 0; a deleted topic came back with the group."""
    lose_master(fake, is_routed=is_routed)
    ran = mqctl(*words.split())
    assert ran.code == 1 and "nothing was changed: broker-z would lack it" in ran.err
    assert not [call for call in fake.calls if call[0] != "Admin"]


def test_a_broker_that_no_route_has_is_asked_as_any_other(mqctl: Run, fake: FakeCluster) -> None:
    """Its log end is what an operator needs to choose the replica of an unclean election."""
    lose_master(fake, is_routed=False)
    (epochs,) = mqctl("getBrokerEpoch", "-b", "broker-z", "--json").json
    assert epochs["maxOffset"] == 300
    assert mqctl("updateBrokerConfig", "-c", "C", "-k", "a", "-v", "b", "--json").json[
        "addresses"
    ] == [MASTER, SLAVE, FENCED]
    for words in ("brokerStatus", "getBrokerConfig"):
        assert mqctl(words, "--json").json.keys() == {MASTER, SLAVE, FENCED}
    fake.dead = {FENCED}
    assert mqctl("getBrokerEpoch", "-b", "broker-z").code == 1


CHANGES = [
    "updateSubGroup -g G -c C -r 3",
    "deleteTopic -t T -c C -y",
    "deleteSubGroup -g G -c C -y",
]
TABLES = ["haStatus", "getConsumerConfig -g G", "topicStatus -t T", "brokerStatus", "statsAll"]


@pytest.mark.parametrize("words", CHANGES + TABLES)
def test_a_dead_group_that_only_the_controllers_remember_is_a_note(
    mqctl: Run, fake: FakeCluster, words: str
) -> None:
    """Without cluster.json it may have been removed: every table ended with 1, and no change was
    possible."""
    whole = mqctl(*words.split())
    fake.lose_group("broker-z", FENCED)
    ran = mqctl(*words.split())
    assert (ran.code, ran.out) == (whole.code, whole.out) and whole.code == 0
    assert ran.err.count("broker-z is skipped") == 1
    assert mqctl("getBrokerEpoch", "-b", "broker-z").code == 1, "it is asked if it is named"


@pytest.mark.parametrize("is_alive", [True, False])
@pytest.mark.parametrize("words", [*CHANGES, *TABLES, "clusterList", "top --once --json", "health"])
def test_a_group_of_another_cluster_with_the_same_controllers_is_not_ours(
    mqctl: Run, fake: FakeCluster, words: str, is_alive: bool
) -> None:
    whole = mqctl(*words.split())
    if is_alive:
        lose_master(fake, is_routed=False)
    else:
        fake.lose_group("broker-z", FENCED)
    fake.replicas.replicas_info_table["broker-z"].cluster_name = "D"
    ran = mqctl(*words.split())
    assert (ran.code, ran.out, ran.err) == (0, whole.out, whole.err)


def test_a_dead_group_of_the_plan_still_refuses_changes(
    mqctl: Run, fake: FakeCluster, local: Path
) -> None:
    write_cluster(local / "cluster.json", os.getpid(), {"broker-z": (FENCED,)})
    fake.lose_group("broker-z", FENCED)
    ran = mqctl("updateSubGroup", "-g", "G", "-c", "C", "-r", "3")
    assert ran.code == 1 and "nothing was changed: broker-z would lack it" in ran.err


def test_an_export_that_would_lack_a_group_leaves_its_file_alone(
    mqctl: Run, fake: FakeCluster, tmp_path: Path
) -> None:
    file = tmp_path / "metadata.json"
    assert mqctl("exportMetadata", "-f", str(file)).code == 0
    before = file.read_bytes()
    lose_master(fake)
    ran = mqctl("exportMetadata", "-f", str(file))
    assert ran.code == 1 and "was not written" in ran.err and "broker-z" in ran.err
    assert file.read_bytes() == before


def test_top_and_verdict_show_the_consumers_of_groups_that_have_a_master(
    mqctl: Run, fake: FakeCluster
) -> None:
    lose_master(fake)
    found = mqctl("top", "--once", "--json").json
    assert [each["consumerGroup"] for each in found["groups"]] == ["G", "H"]
    (why,) = found["notKnown"]
    assert "broker-z has no master and is left out" in why
    absent = mqctl("verdict", "--json").json["absent"]
    lost = {"name": "consumer groups at broker-z", "why": "no master of it answers"}
    assert [each for each in absent if "consumer groups" in each["name"]] == [lost]


def test_a_group_is_deleted_from_one_broker_while_another_group_has_no_master(
    mqctl: Run, fake: FakeCluster
) -> None:
    lose_master(fake)
    assert mqctl("deleteSubGroup", "-g", "G", "-c", "C", "-y").code == 1
    assert mqctl("deleteSubGroup", "-g", "G", "-b", MASTER, "-y").code == 0


@pytest.mark.parametrize("words", ["backup none - --json", "backup . - --json"])
def test_an_error_does_not_get_into_the_archive_of_a_stream(mqctl: Run, words: str) -> None:
    ran = mqctl(*words.split())
    assert ran.code and ran.out == ""
    (document,) = [line for line in ran.err.splitlines() if line.startswith("{")]
    assert json.loads(document)["exitCode"] == ran.code


def test_a_full_disk_is_said_also_by_a_broker_that_answers_no_second_question(
    mqctl: Run, fake: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def silent(self: object, address: str) -> Any:
        raise BatonError("no answer")

    fake.problems = {SLAVE: ["its disk is full: No space left on device"]}
    monkeypatch.setattr(FakeBrokers, "config", silent)
    ran = mqctl("health", "--json")
    assert ran.json["problems"] == [f"broker {SLAVE}: {fake.problems[SLAVE][0]}"]


def test_a_backup_without_a_master_says_what_it_may_lack(
    mqctl: Run, fake: FakeCluster, tmp_path: Path
) -> None:
    offsets = Store(tmp_path / "store").offsets
    fake.log_ends = {SLAVE: (offsets[45], offsets[45])}
    lock = FolderLock(tmp_path / "store" / "lock")
    lock.acquire()
    try:
        fake.info.broker_addr_table["broker-a"].broker_addrs = {2: SLAVE}
        ran = mqctl("backup", str(tmp_path / "store"), str(tmp_path / "one"), "-b", SLAVE)
        assert ran.code == 1 and "has no master now: this copy may lack" in ran.err
        # An address of its that is not the registered one: a healthy broker by loopback, say.
        fake.info.broker_addr_table["broker-a"].broker_addrs = {0: MASTER}
        ran = mqctl("backup", str(tmp_path / "store"), str(tmp_path / "two"), "-b", SLAVE)
        assert (ran.code, f"no route has {SLAVE}" in ran.err) == (0, True), ran.err
    finally:
        lock.release()


def test_dead_letters_that_were_sent_are_named_when_one_fails(
    mqctl: Run,
    consumer: None,
    producer: type[FakeProducer],
    fake: FakeCluster,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From an error alone nobody could tell which were sent; a second run sent them twice."""
    real = producer.send

    async def send(self: FakeProducer, message: Any, **how: Any) -> Any:
        if len(producer.sent) == 2:
            producer.sent.append(message)
            raise BatonError("no master")
        return await real(self, message, **how)

    monkeypatch.setattr(producer, "send", send)
    fake.letter = {"RETRY_TOPIC": "T", "UNIQ_KEY": "id"}
    ran = mqctl("dlq", "resend", "g", "--yes", "--json")
    assert ran.code == 1 and ran.err.count("id: no master") == 1
    assert [m["sendStatus"] for m in ran.json] == ["SEND_OK", "SEND_OK", None, *["SEND_OK"] * 3]


def test_dead_letters_are_sent_only_when_that_is_confirmed(
    mqctl: Run, consumer: None, producer: type[FakeProducer], fake: FakeCluster
) -> None:
    fake.letter = {"RETRY_TOPIC": "T", "UNIQ_KEY": "id"}
    dry = mqctl("dlq", "resend", "g", "-m", "2", "--dry-run", "--json").json
    assert [m["sendStatus"] for m in dry] == ["DRY_RUN"] * 2
    assert [m["storeTimestamp"] for m in dry] == [102, 102], "the newest"
    assert "nothing was sent" in mqctl("dlq", "resend", "g", "--dry-run").out
    assert mqctl("dlq", "resend", "g").code == 1 and producer.sent == []


def test_a_group_without_dead_letters_is_no_missing_topic(
    mqctl: Run, consumer: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unknown(self: object, topic: str, **_: Any) -> None:
        raise NoRouteError(topic, ("10.0.0.1:9876",))

    monkeypatch.setattr(FakeConsumer, "fetch_queues", unknown)
    ran = mqctl("dlq", "show", "g")
    assert ran.code == 1 and "no name server knows %DLQ%g: the group has no dead" in ran.err
    assert "or its brokers are away" in ran.err


def test_a_queue_that_cannot_be_read_hides_no_other_queue(
    mqctl: Run, consumer: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def half(self: object, queue: MessageQueue, **_: Any) -> int:
        if queue.queue_id == 0:
            raise BatonError("no master")
        return 3

    monkeypatch.setattr(FakeConsumer, "max_offset", half)
    ran = mqctl("consumeMessage", "-t", "T", "--json")
    assert (ran.code, ran.err) == (1, "mqctl: broker-a:0: no master\n")
    assert [message["queueId"] for message in ran.json] == [1, 1, 1]


def test_a_topic_that_does_not_answer_hides_no_other_topic(
    mqctl: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = mqctl("statsAll", "--json").json["topics"]

    async def more(self: Any) -> list[str]:
        return ["T", "U", "Gone", "%DLQ%Gone", "%DLQ%G"]

    def but_one(ask: Any) -> Any:
        async def asked(self: Any, topic: str) -> Any:
            if topic.endswith("Gone"):
                raise BatonError("no master")
            return await ask(self, topic)

        return asked

    for name in ("traffic", "stats"):
        monkeypatch.setattr(FakeTopics, name, but_one(getattr(FakeTopics, name)))
    monkeypatch.setattr(FakeTopics, "names", more)
    ran = mqctl("statsAll", "--json")
    assert (ran.code, ran.err, ran.json["topics"]) == (1, "mqctl: no master\n", whole)
    ran = mqctl("dlq", "list", "--json")
    assert ran.code == 1 and [each["consumerGroup"] for each in ran.json["groups"]] == ["G"]


def test_a_watch_goes_on_after_a_round_that_failed(
    mqctl: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = 0

    async def sleep(_: float) -> None:
        nonlocal rounds
        rounds += 1
        if rounds == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("asyncio.sleep", sleep)
    ran = mqctl("consumerConnection", "-g", "nobody", "--watch")
    assert (rounds, ran.err.count("no member of group nobody")) == (3, 3)


def test_a_message_that_is_not_there_is_a_document_too(mqctl: Run, fake: FakeCluster) -> None:
    fake.messages.clear()
    ran = mqctl("queryMsgById", "-i", OFFSET_ID, "--json")
    assert (ran.code, ran.json["exitCode"]) == (1, 1) and OFFSET_ID in ran.json["error"]


# Files.


@pytest.mark.parametrize("text", ["{", "[]", '{"prod": {}}'])
def test_names_of_clusters_are_not_lost_over_a_file_that_cannot_be_read(
    mqctl: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """It counted as empty, and the next name replaced all others."""
    assert mqctl("contexts", "prod", "-n", "p:1").code == 0
    (file,) = (tmp_path / ".batonmq").iterdir()
    file.write_text(text)
    for words in ((), ("test", "-n", "t:1")):
        ran = mqctl("contexts", *words)
        assert ran.code == 1 and f"{file} is not what `mqctl contexts` wrote" in ran.err
    assert file.read_text() == text
    assert mqctl("topicList").code == 0, "who names no context needs none"
    monkeypatch.setenv("BATONMQ_CONTEXT", "prod")
    monkeypatch.delenv("NAMESRV_ADDR")
    monkeypatch.delenv("CONTROLLER_ADDR")
    assert "is not what" in mqctl("topicList").err


def test_a_bundle_is_written_whole_and_has_every_store(mqctl: Run, tmp_path: Path) -> None:
    for host in ("one", "two"):
        Store(tmp_path / host / "broker-0")
        (tmp_path / host / "broker-0" / "process.log").write_text(f"of {host}\n")
    stores = [str(tmp_path / host / "broker-0") for host in ("one", "two")]
    bundle = tmp_path / "bundle.tar.gz"
    assert mqctl("doctor", "--bundle", str(bundle), *stores).code == 0
    with tarfile.open(bundle) as archive:
        logs = [name for name in archive.getnames() if name.startswith("doctor/logs/")]
    assert len(logs) == 2
    bundle.unlink()

    with failing("pwrite bundle.tar.gz ENOSPC"):
        ran = mqctl("doctor", "--bundle", str(bundle), *stores)
    assert ran.code == 1 and f"mqctl: {bundle}: No space left on device" in ran.err
    assert not [path for path in tmp_path.iterdir() if path.is_file()]


def test_an_empty_password_file_makes_no_secret(mqctl: Run, tmp_path: Path) -> None:
    (tmp_path / "password").write_text("\n")
    for file, says in (("password", "is empty"), (".", "Is a directory")):
        ran = mqctl("user", "rotate", "shop", "--passwordFile", str(tmp_path / file))
        assert ran.code == 1 and says in ran.err


def test_a_named_pipe_in_place_of_a_secret_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(SecretFileError, match="is no regular file"):
        read_passwords(tmp_path / "pipe")


def test_a_file_that_was_replaced_by_a_folder_is_named(mqctl: Run, tmp_path: Path) -> None:
    (tmp_path / "metadata.json").write_bytes(b"\xff")
    ran = mqctl("importMetadata", str(tmp_path / "metadata.json"), "-y")
    assert ran.code == 1 and "is no file of `mqctl exportMetadata`" in ran.err
    with pytest.raises(CommandFailed, match="a: short write"), disk_failures("a"):
        raise OSError("short write")


async def test_a_command_of_compose_with_an_open_quote_is_a_doubt() -> None:
    with pytest.raises(Doubt, match="is no command: No closing quotation"):
        await compose_backend("docker 'compose", 1.0)


def test_top_shows_topics_that_answer_and_why_others_are_missing(
    mqctl: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = FakeTopics.traffic

    async def half(self: Any, topic: str) -> Any:
        if topic == "U":
            raise BatonError("U is not there")
        return await real(self, topic)

    monkeypatch.setattr(FakeTopics, "traffic", half)
    found = mqctl("top", "--once", "--json").json
    assert [topic["topic"] for topic in found["topics"]] == ["T"]
    assert found["notKnown"] == ["U is not there"]
