"""What a broker refuses and how: codes and remarks on raw frames, and frames that are none.

The tests share one cluster of two replicas with `minInSyncReplicas: 2`; the one that takes a
replica away comes last and brings it back.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import pytest

from lab.cluster.connection import BlockingConnection, ask
from lab.cluster.frames import HA_STATUS, MAX_OFFSET, SEND_V1, UPDATE_TOPIC, Reply
from lab.cluster.processes import wait_for
from lab.cluster.up import ClusterProcess

pytestmark = pytest.mark.process

TOPIC = "Refused"
FRAME_LIMIT = 16_777_216


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterProcess]:
    overrides: dict[str, dict[str, object]] = {"store": {"minInSyncReplicas": 2}}
    folder = tmp_path_factory.mktemp("refusals")
    with ClusterProcess(folder, replicas=2, overrides=overrides) as running:
        with BlockingConnection(running.master()["address"]) as probe:
            assert probe.send(TOPIC, b"first").code == 0
        yield running


def max_offset(address: str, topic: str = TOPIC) -> int:
    return int(ask(address, MAX_OFFSET, {"topic": topic, "queueId": 0}).ext["offset"])


@pytest.mark.parametrize(
    "properties",
    [
        "DELAY\x01soon\x02",
        "TIMER_DELAY_SEC\x01tomorrow\x02",
        "TIMER_DELIVER_MS\x019999999999999\x02",
        "TRAN_MSG\x01true\x02DELAY\x013\x02",
    ],
)
def test_a_wish_that_is_none_is_refused_with_13(pair: ClusterProcess, properties: str) -> None:
    """Code 13, a remark that says why, and nothing is stored as an ordinary message."""
    master = pair.master()["address"]
    before = max_offset(master)
    with BlockingConnection(master) as probe:
        reply = probe.send(TOPIC, b"later", properties=properties)
        assert reply.code == 13 and "not stored" in reply.remark
    assert max_offset(master) == before


def test_an_unknown_code_is_answered_with_3(pair: ClusterProcess) -> None:
    """Also codes of RocketMQ that are left out (2003), on both ports."""
    address = pair.master()["address"]
    host, _, port = address.rpartition(":")
    for endpoint in (address, f"{host}:{int(port) - 2}"):
        with BlockingConnection(endpoint) as probe:
            for code in (2_003, 31_999):
                reply = probe.request(code, {"topic": TOPIC})
                assert (reply.code, bool(reply.remark)) == (3, True), (code, reply)


def test_the_same_handlers_answer_on_port_minus_2(pair: ClusterProcess) -> None:
    """Send (310 and 10), pull, offsets, HA status and topic admin on port - 2."""
    host, _, port = pair.master()["address"].rpartition(":")
    with BlockingConnection(f"{host}:{int(port) - 2}") as probe:
        assert probe.send(TOPIC, b"by the other port").code == 0
        long_names = {
            "producerGroup": "probe", "topic": TOPIC, "defaultTopic": "TBW102",
            "defaultTopicQueueNums": 4, "queueId": 0, "sysFlag": 0, "bornTimestamp": 1, "flag": 0,
            "properties": "", "reconsumeTimes": 0,
        }  # fmt: skip
        sent = probe.request(SEND_V1, long_names, b"with long names")
        assert sent.code == 0
        found = probe.pull(TOPIC, int(sent.ext["queueOffset"]))
        assert found.code == 0 and b"with long names" in found.body
        assert probe.request(HA_STATUS).json["master"] is True
        topic = {
            "topic": "ByOtherPort", "defaultTopic": "TBW102", "readQueueNums": 2,
            "writeQueueNums": 2, "perm": 6, "topicFilterType": "SINGLE_TAG", "order": "false",
        }  # fmt: skip
        assert probe.request(UPDATE_TOPIC, topic).code == 0


def test_a_slave_takes_no_message_and_serves_no_reader(pair: ClusterProcess) -> None:
    """Send and pull at a slave: 2, with the advice to ask the name server."""
    with BlockingConnection(pair.slaves()[0]["address"]) as probe:
        for reply in (probe.send(TOPIC, b"to a slave"), probe.pull(TOPIC, 0)):
            assert reply.code == 2 and "name server" in reply.remark


def frame(header: bytes, *, length: int | None = None, kind: int = 0) -> bytes:
    size = 4 + len(header) if length is None else length
    return struct.pack(">II", size, kind << 24 | len(header)) + header


@pytest.mark.parametrize(
    "nonsense",
    [
        frame(b"this is no header"),
        frame(b'{"code":"ten"}'),
        frame(b"{}", length=FRAME_LIMIT + 1),
        frame(b"{}", length=2),
        frame(b"{}", kind=77),
        struct.pack(">II", 10, 4_000) + b"short!",
        b"GET / HTTP/1.1\r\nHost: batonmq\r\n\r\n",
    ],
    ids=["no-json", "no-code", "oversized", "too-short", "unknown-type", "header-too-long", "http"],
)
def test_a_malformed_frame_closes_that_one_connection(
    pair: ClusterProcess, nonsense: bytes
) -> None:
    """The sender's connection is closed, with one log line that says what was wrong; another
    connection goes on, on the broker as on the name server."""
    master = pair.master()
    for address in (master["address"], pair.name_servers.split(";")[0]):
        with BlockingConnection(address) as sound, BlockingConnection(address) as faulty:
            sound.request(HA_STATUS)
            faulty.write(nonsense)
            assert faulty.is_closed_by_peer()
            sound.request(HA_STATUS)
    assert pair.brokers == pair.document["brokers"]


def test_malformed_frames_leave_one_log_line_each(pair: ClusterProcess) -> None:
    """Three bad connections, three lines with the peer's address and the reason."""
    master = pair.master()

    def lines() -> int:
        return pair.broker_log(master).count("connection_dropped")

    before = lines()
    for _ in range(3):
        with BlockingConnection(master["address"]) as faulty:
            faulty.write(frame(b"nonsense"))
            assert faulty.is_closed_by_peer()
    wait_for("three lines", lambda: lines() >= before + 3)
    assert lines() == before + 3


def test_a_cut_frame_harms_nobody(pair: ClusterProcess) -> None:
    """A peer sends half of a frame and goes: its connection ends, nothing is stored."""
    master = pair.master()["address"]
    before = max_offset(master)
    with BlockingConnection(master) as probe:
        probe.write(frame(b'{"code":310,"extFields":{', length=4_000))
    with BlockingConnection(master) as probe:
        assert probe.request(HA_STATUS).code == 0
    assert max_offset(master) == before


def test_r15_min_in_sync_replicas(pair: ClusterProcess) -> None:
    """1. `minInSyncReplicas: 2` with two replicas; the slave is killed.
    2. The set shrinks to the master alone: each send is refused with code 1 and the numbers, and
       nothing more is confirmed, so a reader sees nothing of it.
    3. The slave comes back, the set grows, sends are acknowledged.
    """
    master, slave = pair.master(), pair.slaves()[0]
    before = max_offset(master["address"])
    pair.kill(slave)
    pair.wait_in_sync(1)
    with BlockingConnection(master["address"]) as probe:
        reply = wait_for("a refusal", lambda: refused(probe))
        assert reply.code == 1
        assert "1" in reply.remark and "minInSyncReplicas is 2" in reply.remark
        assert max_offset(master["address"]) == before
        assert probe.send("NewTopicMeanwhile", b"x").code == 1
    pair.restart(slave)
    pair.wait_in_sync(2)
    with BlockingConnection(master["address"]) as probe:
        assert wait_for("an ack", lambda: probe.send(TOPIC, b"again").code == 0)


def refused(probe: BlockingConnection) -> Reply | None:
    reply = probe.send(TOPIC, b"single copy")
    assert reply.code != 0, "acknowledged with a single copy"
    return reply if reply.code == 1 else None
