"""A topic whose deletion waits to be confirmed takes no more messages (R31)."""

from __future__ import annotations

from pathlib import Path

from lone_broker import lone_broker

from batonmq.protocol.codes import ResponseCode


async def test_r31_a_topic_known_to_senders_is_closed_while_its_deletion_waits(
    tmp_path: Path,
) -> None:
    async with lone_broker(tmp_path) as rig:
        assert (await rig.send()).code == ResponseCode.SUCCESS
        service = rig.service
        path, waiting = service.path, []
        confirmed = path.confirmed
        path.confirmed = waiting.append  # type: ignore[method-assign]
        service.topics.delete_topic("T")
        reply = await rig.send(body=b"behind the deletion")
        assert reply.code == ResponseCode.SYSTEM_BUSY
        assert "being deleted" in (reply.remark or "")
        path.confirmed = confirmed  # type: ignore[method-assign]
        confirmed(waiting[-1])
        assert (await rig.send(body=b"a new topic of that name")).code == ResponseCode.SUCCESS
        assert service.tables.topics.get("T") is not None
