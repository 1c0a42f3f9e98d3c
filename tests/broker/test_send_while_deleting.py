"""A topic whose deletion waits to be confirmed takes no more messages (R31)."""

from batonmq.protocol.codes import ResponseCode


async def test_r31_a_topic_known_to_senders_is_closed_while_its_deletion_waits(rig):
    assert (await rig.send()).code == ResponseCode.SUCCESS
    service = rig.service
    path, waiting = service.path, []
    confirmed = path.confirmed
    path.confirmed = waiting.append
    service.topics.delete_topic("T")
    reply = await rig.send(body=b"behind the deletion")
    assert reply.code == ResponseCode.SYSTEM_BUSY
    assert "being deleted" in (reply.remark or "")
    path.confirmed = confirmed
    confirmed(waiting[-1])
    assert (await rig.send(body=b"a new topic of that name")).code == ResponseCode.SUCCESS
    assert service.tables.topics.get("T") is not None
