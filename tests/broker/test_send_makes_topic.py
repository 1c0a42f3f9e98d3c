"""Who sent to a new topic, or made one, finds it at the name servers."""

import asyncio
from collections.abc import Callable

from lone_broker import until

from batonmq.protocol.codes import RequestCode, ResponseCode


async def test_the_send_that_made_its_topic_is_answered_when_name_servers_know_it(rig, monkeypatch):
    waiting: list[Callable[[], None]] = []
    monkeypatch.setattr(rig.service.send, "_when_known", waiting.append)
    first = asyncio.ensure_future(rig.send())
    second = asyncio.ensure_future(rig.send())
    await until(lambda: len(waiting) == 2)
    assert not first.done() and not second.done()
    for known in waiting:
        known()
    assert {(await first).code, (await second).code} == {ResponseCode.SUCCESS}
    assert (await rig.send()).code == ResponseCode.SUCCESS
    assert len(waiting) == 2  # it is known now


async def test_a_topic_that_was_made_is_answered_when_name_servers_know_it(rig, monkeypatch):
    waiting: list[Callable[[], None]] = []
    monkeypatch.setattr(rig.service.registrar, "when_known", waiting.append)
    ext = {"topic": "T", "readQueueNums": "4", "writeQueueNums": "4", "perm": "6"}
    made = asyncio.ensure_future(rig.ask(RequestCode.UPDATE_AND_CREATE_TOPIC, ext))
    await until(lambda: len(waiting) == 1)
    assert not made.done()
    waiting[0]()
    assert (await made).code == ResponseCode.SUCCESS
