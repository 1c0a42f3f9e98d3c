"""The notice 40: at once in a usual group; once for all changes, and in slices, in a large one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from batonmq.broker.consume.client_processor import ClientProcessor
from batonmq.broker.consume.consumer_manager import ConsumerManager, GroupChanged


class _Channel:
    def __init__(self) -> None:
        self.closed = False
        self.noticed = 0

    def oneway(self, command: Any) -> None:
        self.noticed += 1


def test_the_members_of_a_large_group_hear_of_many_changes_once_and_in_slices() -> None:
    nothing = cast(Any, SimpleNamespace(gate=None, clock_ms=None, groups={}))
    clients = ClientProcessor(ConsumerManager(), nothing, nothing, nothing, nothing, sql92=False)
    small = tuple(_Channel() for _ in range(10))
    clients.notify([GroupChanged("small", small)])
    assert [channel.noticed for channel in small] == [1] * 10 and not clients.tick()
    large = [_Channel() for _ in range(1000)]
    for count in range(500, 1001):
        clients.notify([GroupChanged("large", tuple(large[:count]))])
    assert not any(channel.noticed for channel in large)
    slices = 1
    before = 0
    while clients.tick():
        noticed = sum(channel.noticed for channel in large)
        assert 0 < noticed - before <= 128
        before, slices = noticed, slices + 1
    assert [channel.noticed for channel in large] == [1] * 1000 and slices == 8
