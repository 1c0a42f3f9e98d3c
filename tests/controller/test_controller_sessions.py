"""BrokerSession queues and the codec of views."""

from batonmq.controller.watch import SessionTable
from batonmq.proto.controller.v1 import controller_pb2 as pb
from batonmq.proto.controller.v1.role_view import role_view_from_pb, role_view_to_pb
from batonmq.protocol.role_view import Replica, RoleView

VIEW = RoleView(
    cluster_name="c",
    broker_name="broker-a",
    master_broker_id=2,
    master_address="h:1",
    master_ha_address="h:2",
    master_incarnation="life-2",
    master_epoch=3,
    sync_state_set_epoch=7,
    sync_state_set=frozenset({3, 2}),
    replicas=(
        Replica(2, "h:1", "h:2", alive=True, incarnation="life-2", log_id="log-2"),
        Replica(3, "i:1", "i:2", learner=True),
    ),
    raft_index=41,
)


def test_views_survive_the_wire():
    message = role_view_to_pb(VIEW)
    assert list(message.sync_state_set) == [2, 3]
    assert role_view_from_pb(pb.RoleView.FromString(message.SerializeToString())) == VIEW


def test_no_master_is_0_on_the_wire():
    message = role_view_to_pb(RoleView("c", "broker-a"))
    assert message.master_broker_id == 0
    assert role_view_from_pb(message).master_broker_id is None


async def test_a_view_goes_to_the_sessions_of_its_group_in_order():
    book = SessionTable()
    mine, other = book.add("broker-a", 1, "x"), book.add("broker-b", 1, "y")
    written: list[pb.ControllerMessage] = []

    async def write(message: pb.ControllerMessage) -> None:
        written.append(message)

    mine.send(pb.ControllerMessage(answer=pb.HeartbeatAnswer(sequence=1)))
    book.push_view(VIEW)
    mine.end()
    other.end()
    await mine.write_all(write)
    await other.write_all(write)
    assert [message.WhichOneof("kind") for message in written] == ["answer", "view"]
    book.remove(mine)
    book.remove(other)
    assert len(book) == 0 and not book.of_group("broker-a")


async def test_a_session_that_does_not_read_is_cut():
    session = SessionTable().add("broker-a", 1, "x")
    message = pb.ControllerMessage()
    while not session.cut.is_set():
        session.send(message)
    session.send(message)
