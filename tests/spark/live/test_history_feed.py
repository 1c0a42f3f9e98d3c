"""The stream of the history by its places alone: each event once, whichever controller answers."""

import pickle
import threading
from concurrent import futures
from types import SimpleNamespace

import grpc
import pytest

from batonmq.client.admin.controller_admin import GRPC_PORT_OFFSET
from batonmq.controller.endpoints.grpc_endpoint import event_to_pb
from batonmq.history.event import EventKind, HistoryEvent
from batonmq.history.file import HistoryFile
from batonmq.history.reader import HistoryReader
from batonmq.proto.controller.v1 import controller_pb2 as pb
from batonmq.proto.controller.v1 import controller_pb2_grpc
from batonmq.spark.live import history_feed as module
from batonmq.spark.live.cluster import ClusterError
from batonmq.spark.live.history_feed import HistoryFeed, HistoryRead, from_checkpoint, to_checkpoint
from batonmq.spark.live.offsets import DataLossError
from batonmq.spark.live.options import HistoryOptions
from batonmq.spark.source import BatonmqSource, StreamReader
from lab.cluster.processes import free_base_port


def event(index, part=0, log="log-a"):
    return HistoryEvent(log=log, raft_index=index, part=part, time_ms=index, kind=EventKind.ELECTED)


class Controller(controller_pb2_grpc.ControllerServiceServicer):
    """Answers GetHistory from files, as a controller does for what its state has dropped."""

    def __init__(self, folder, port):
        folder.mkdir()
        self.address = f"127.0.0.1:{port}"
        self._port = port + GRPC_PORT_OFFSET
        path = folder / "history-n.jsonl"
        self._file = HistoryFile(path)
        self._reader, self._one = HistoryReader(path), threading.Lock()
        self._server = None
        self.is_old = False

    def append(self, *events, cut=False):
        self._file.append(events, cut=cut)

    def start(self):
        if self._server is not None:
            return
        self._server = grpc.server(futures.ThreadPoolExecutor(2))
        controller_pb2_grpc.add_ControllerServiceServicer_to_server(self, self._server)
        self._server.add_insecure_port(f"127.0.0.1:{self._port}")
        self._server.start()

    def stop(self):
        if self._server is not None:
            self._server.stop(None).wait()
            self._server = None

    def close(self):
        self.stop()
        self._reader.close()
        self._file.close()

    def GetHistory(self, request, context):
        reply = pb.GetHistoryReply(status=pb.Status(code=0))
        if not request.HasField("after") or self.is_old:
            reply.events.extend(map(event_to_pb, self._file.newest(request.limit or 99, 1 << 20)))
            return reply
        place = request.after
        after = (place.log, place.raft_index, place.part) if place.log else None
        with self._one:
            page = self._reader.page(after, request.limit or 99, 1 << 20)
        reply.events.extend(map(event_to_pb, page.events))
        reply.continuation = pb.GetHistoryReply.FOLLOWS if page.follows else pb.GetHistoryReply.GAP
        return reply


@pytest.fixture
def controllers(tmp_path, monkeypatch):
    """Three of a cluster, of which none has a history yet."""
    monkeypatch.setattr(module, "IDLE_MS", 0)
    monkeypatch.setattr(module, "PAUSE_MS", 1)
    base = free_base_port(1)
    made = [Controller(tmp_path / f"n{at}", base + 2 * at) for at in range(3)]
    for each in made:
        each.start()
    yield made
    for each in made:
        each.close()


@pytest.fixture
def feed_of(controllers):
    """A feed with options; each is a new process of the stream."""
    made = []

    def make(**options):
        given = {"controllers": ",".join(each.address for each in controllers)} | options
        made.append(HistoryFeed(HistoryOptions.from_mapping(given)))
        return made[-1]

    yield make
    for feed in made:
        feed.close()


def places(events):
    return [(each.log, each.raft_index, each.part) for each in events]


def drain(feed, place, most=3):
    """Batches until there is nothing new: (their events, the last place)."""
    found = []
    while (end := feed.next_end(place, most)) != place:
        found += places(feed.between(place, end))
        place = end
    return found, place


def test_each_event_comes_once_whoever_answers(controllers, feed_of):
    events = [event(index, part) for index in range(1, 9) for part in (0, 1)]
    for each, count in zip(controllers, (16, 9, 16), strict=True):
        each.append(*events[:count])
    feed = feed_of()
    found, place = drain(feed, feed.initial())
    assert found == places(events)
    # The one that answered so far ends; the next one is behind, and then a third has a new event.
    controllers[0].stop()
    assert feed.next_end(place, 3) == place
    controllers[2].append(event(20))
    found, place = drain(feed, place)
    assert found == [("log-a", 20, 0)]
    # The first one is back, and has not applied it yet.
    controllers[0].start()
    controllers[2].stop()
    assert feed.next_end(place, 3) == place


def test_a_batch_that_is_repeated_by_another_process_holds_the_same(controllers, feed_of):
    """Spark keeps (start, end) in its checkpoint before the batch is read."""
    for each in controllers:
        each.append(*(event(index) for index in range(1, 8)))
    feed = feed_of()
    start = feed.initial()
    end = feed.next_end(start, 5)
    first = places(feed.between(start, end))
    kept = (from_checkpoint(to_checkpoint(start)), from_checkpoint(to_checkpoint(end)))
    for each in controllers:
        each.append(event(9))
    controllers[0].stop()
    again = feed_of()
    assert places(again.between(*kept)) == first == places(map(event, range(1, 6)))
    assert drain(again, end)[0] == [("log-a", 6, 0), ("log-a", 7, 0), ("log-a", 9, 0)]


def test_a_trigger_without_a_limit_keeps_the_limit_of_the_option(controllers, feed_of):
    """Spark asks so for the trigger `once`; the driver holds the events of a batch in memory."""
    for each in controllers:
        each.append(*(event(index) for index in range(1, 8)))
    feed = feed_of(maxOffsetsPerTrigger="3")
    assert feed.next_end(feed.initial(), 0) == ("log-a", 3, 0)
    assert drain(feed, ("log-a", 3, 0), most=0)[0] == places(map(event, range(4, 8)))


def test_a_batch_waits_for_a_controller_that_is_behind(controllers, feed_of):
    """The one that had the events is gone; those that are left apply the log up to there."""
    start, end = ("log-a", 1, 0), ("log-a", 3, 0)
    for each in controllers[:2]:
        each.append(event(1), event(2))
    feed = feed_of(operationTimeout="50ms")
    with pytest.raises(ClusterError, match=r"no controller .* has event \(log log-a, Raft index 3"):
        feed.between(start, end)
    controllers[1].append(event(3))
    assert places(feed.between(start, end)) == [("log-a", 2, 0), ("log-a", 3, 0)]


def test_what_one_controller_lacks_is_taken_from_another(controllers, feed_of):
    """The first was away for long and came back by a snapshot; the second has lost its disk."""
    whole = [event(index) for index in range(1, 21)]
    controllers[0].append(*whole[:3])
    controllers[0].append(*whole[10:], cut=True)
    controllers[1].append(*whole[15:])
    controllers[2].append(*whole)
    feed = feed_of()
    assert drain(feed, feed.initial())[0] == places(whole)


@pytest.mark.parametrize("silent", [False, True])
def test_events_that_no_controller_keeps_end_the_stream_or_are_passed_over(
    controllers, feed_of, silent, caplog
):
    """A controller that does not answer might have them: it is waited for."""
    for each in controllers:
        each.append(event(1))
        each.append(event(8), event(9), cut=True)
    if silent:
        controllers[2].stop()
    place = ("log-a", 1, 0)
    with pytest.raises(DataLossError) as caught:
        feed_of(operationTimeout="50ms").next_end(place, 9)
    assert str(caught.value).startswith(
        "events of the history behind (log log-a, Raft index 1, part 0) may be lost: no controller "
        "that answers keeps any between it and (log log-a, Raft index 8, part 0); set failOn"
    )
    feed = feed_of(operationTimeout="50ms", failOnDataLoss="false")
    assert drain(feed, place)[0] == [("log-a", 8, 0), ("log-a", 9, 0)]
    assert "data_lost events of the history" in caplog.text


def test_a_silent_controller_that_has_the_events_is_waited_for(controllers, feed_of, monkeypatch):
    for each in controllers[:2]:
        each.append(event(1))
        each.append(event(8), cut=True)
    controllers[2].append(event(1), event(5), event(8))
    controllers[2].stop()
    # Not the sleep of the whole process: another thread would start the server of a finished test.
    monkeypatch.setattr(module, "time", SimpleNamespace(sleep=lambda _: controllers[2].start()))
    assert drain(feed_of(), ("log-a", 1, 0))[0] == [("log-a", 5, 0), ("log-a", 8, 0)]


def test_a_new_log_comes_behind_all_of_the_one_before(controllers, feed_of):
    """All controllers lost their log, one of them not its history."""
    old = [event(index) for index in range(1, 6)]
    new = [event(index, log="log-0") for index in (1, 2)]
    controllers[0].append(*new)
    controllers[1].append(*old[:3], *new)
    controllers[2].append(*old)
    place = ("log-a", 1, 0)
    found, place = drain(feed_of(), place)
    assert found == places(old[1:])
    controllers[2].append(*new)
    assert drain(feed_of(), place)[0] == places(new)
    # A stream of the old log when nobody knows it any more.
    with pytest.raises(DataLossError, match=r"\(log log-x, Raft index 7"):
        feed_of().next_end(("log-x", 7, 0), 9)


def test_a_stream_that_is_to_end_ends_with_what_was_there(controllers, feed_of):
    for each in controllers:
        each.append(*(event(index) for index in range(1, 5)))
    feed = feed_of()
    start = feed.initial()
    feed.aim()
    for each in controllers:
        each.append(event(5), event(6, log="log-b"))
    found, place = drain(feed, start)
    assert found == places(map(event, range(1, 5))) and feed.next_end(place, 3) == place


def test_before_the_first_event_there_is_nothing(controllers, feed_of):
    feed = feed_of()
    assert feed.initial() is None and feed.next_end(None, 9) is None
    assert feed.between(None, None) == ()
    feed.aim()
    for each in controllers:
        each.append(event(3), event(4))
    assert feed.next_end(None, 9) is None
    assert drain(feed_of(), None)[0] == [("log-a", 3, 0), ("log-a", 4, 0)]


def test_without_any_controller_the_text_says_whom_it_asked(controllers, feed_of):
    for each in controllers:
        each.stop()
    with pytest.raises(ClusterError) as caught:
        feed_of(operationTimeout="50ms").initial()
    assert "no controller answers (tried for 50 ms" in str(caught.value)
    assert controllers[2].address in str(caught.value)


def test_a_controller_of_an_earlier_version_is_named_and_another_one_is_asked(controllers, feed_of):
    for each in controllers:
        each.append(event(1), event(2))
        each.is_old = True
    with pytest.raises(ClusterError, match="runs an older version"):
        feed_of(operationTimeout="50ms").initial()
    controllers[1].is_old = False
    feed = feed_of()
    assert drain(feed, feed.initial())[0] == [("log-a", 1, 0), ("log-a", 2, 0)]


@pytest.mark.parametrize(
    "raw",
    [
        {"version": 1, "topics": {"BATON_SYS_HISTORY": {"broker-a": {"0": 7}}}},
        {"version": 2, "log": "a", "raftIndex": "7", "part": 0},
        {"version": 2, "log": "a", "raftIndex": 1 << 63, "part": 0},
        {},
    ],
)
def test_an_offset_of_another_source_is_refused(raw):
    with pytest.raises(ValueError, match="begin with a new checkpoint"):
        from_checkpoint(raw)


def test_the_options_of_a_stream_are_checked(tmp_path):
    given = {"table": "history", "controllers": "a:1;b:2", "columns": "raft_index,file"}
    source = BatonmqSource(given)
    schema = source.schema()
    assert schema.names == ["raft_index", "file"]
    assert source.streamReader(schema)
    with pytest.raises(
        ValueError, match="a batch reads the controllers' files, give their folders"
    ):
        source.reader(schema)
    files = BatonmqSource({"table": "history", "path": str(tmp_path)})
    with pytest.raises(ValueError, match="unknown option path for a stream of table=history"):
        files.streamReader(files.schema())
    with pytest.raises(ValueError, match="controllers='a': an address is 'a'"):
        BatonmqSource(given | {"controllers": "a"}).schema()


def test_rows_are_those_of_the_files_without_their_places(controllers, monkeypatch):
    for each in controllers:
        each.append(*(event(index) for index in range(1, 6)))
    monkeypatch.setattr(module, "_EVENTS_A_TASK", 2)
    given = {"table": "history", "controllers": ",".join(each.address for each in controllers)}
    reader = StreamReader(HistoryRead(HistoryOptions.from_mapping(given)))
    start = reader.initialOffset()
    end = reader.latestOffset(start, reader.getDefaultReadLimit())
    parts = reader.partitions(start, end)
    assert len(parts) == 3 and reader.partitions(start, start) == []
    executor = pickle.loads(pickle.dumps(reader))
    reader.stop()
    rows = [row for part in parts for batch in executor.read(part) for row in batch.to_pylist()]
    assert [(row["log"], row["raft_index"], row["kind"]) for row in rows] == [
        ("log-a", index, "elected") for index in range(1, 6)
    ]
    assert {(row["file"], row["controller"], row["line_offset"]) for row in rows} == {(None,) * 3}
