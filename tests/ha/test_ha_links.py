"""Connections without sockets: what waits for a mastership, what is sent and what is written."""

import asyncio
import inspect
from unittest.mock import Mock

import pytest

from batonmq.ha.classic.master_core import ClassicMasterCore, ClassicPolicy
from batonmq.ha.classic.master_shell import ClassicMasterShell
from batonmq.ha.classic.wire import ReportReader, encode_report
from batonmq.ha.links import ByteRate, LinkTasks, OpenLinks, SlaveLink, WaitingLinks
from batonmq.ha.master_core import SendLog
from batonmq.ha.master_shell import MasterShell
from batonmq.ha.proof import STRANGERS_MAX
from batonmq.ha.shells import ReceivedPieces, master_info
from batonmq.ha.slave_effects import AppendLog
from batonmq.protocol.bodies import HAConnectionRuntimeInfo


def waiting_link(early_max: int) -> tuple[SlaveLink[None], Mock]:
    """A connection that no one has adopted, and its transport."""
    link = SlaveLink(1, Mock(), Mock(), OpenLinks(), None, early_max)
    transport = Mock(spec=asyncio.Transport)
    transport.get_extra_info.return_value = None
    link.connection_made(transport)
    return link, transport


def test_r9_what_a_slave_sent_before_the_mastership_is_read_when_it_begins():
    link, transport = waiting_link(6)
    shell = Mock()
    for piece in (b"hand", b"sh"):
        link.data_received(piece)
    link.adopt(shell)
    assert [call[0] for call in shell.method_calls] == ["attach", "received"]
    shell.received.assert_called_once_with(link, b"handsh")
    transport.abort.assert_not_called()


def test_who_sends_more_than_an_opening_before_it_is_answered_is_dropped():
    link, transport = waiting_link(6)
    link.data_received(b"no hand")
    transport.abort.assert_called_once()


async def test_a_dial_that_is_given_up_before_it_began_is_closed():
    async def work() -> None:
        raise AssertionError("it began")

    tasks, dial = LinkTasks(asyncio.get_running_loop()), work()
    tasks.spawn(dial)
    tasks.cancel()
    await asyncio.sleep(0)
    assert inspect.getcoroutinestate(dial) == inspect.CORO_CLOSED


async def test_at_most_64_connections_wait_and_the_oldest_makes_room():
    waiting: WaitingLinks[Mock] = WaitingLinks()
    links = [Mock(address="host:1") for _ in range(STRANGERS_MAX + 1)]
    for link in links[:-1]:
        waiting.add(link)
    assert not any(link.end.called for link in links)
    waiting.add(links[-1])
    assert [link.end.called for link in links] == [True, *[False] * STRANGERS_MAX]
    assert waiting.take_all() == links[1:] and not len(waiting)


async def test_r58_a_flood_before_the_mastership_leaves_a_slave_of_another_host_waiting():
    waiting: WaitingLinks[Mock] = WaitingLinks()
    slave = Mock(address="slave:1")
    waiting.add(slave)
    for number in range(3 * STRANGERS_MAX):
        waiting.add(Mock(address=f"flood:{number}"))
    assert len(waiting) == STRANGERS_MAX and not slave.end.called
    waiting.end_all()


def test_a_rate_is_of_bytes_per_second():
    rate = ByteRate()
    rate.sample(1_000, 10_000)
    assert rate.sample(6_000, 12_000) == 2_500
    assert rate.sample(9_000, 12_999) == 2_500, "of the last full second"


def test_pieces_of_one_read_are_written_in_a_row_where_the_first_one_begins():
    store = Mock()
    store.slave_log.append_replicated.side_effect = lambda offset, data: offset + len(data)
    pieces = ReceivedPieces(store)
    large = b"3" * (1 << 16)
    for small, after in ((b"1", b"2"), (large, large)):
        pieces.add(AppendLog(100, memoryview(small)))
        pieces.add(AppendLog(100 + len(small), memoryview(after)))
        assert pieces.write() and not pieces.write()
    calls = [call.args for call in store.slave_log.append_replicated.call_args_list]
    assert calls == [(100, b"12"), (100, large), (100 + len(large), large)]


def test_907_counts_the_slaves_that_are_in_the_set():
    slaves = [HAConnectionRuntimeInfo(in_sync=each) for each in (True, False, True)]
    assert master_info(10, slaves).in_sync_slave_nums == 2


@pytest.mark.parametrize("there", [b"", b"1234"])
async def test_a_frame_whose_bytes_expired_is_not_sent_in_part(there):
    """The slave would take what comes next for the rest of it."""
    store = Mock()
    store.log.view.return_value = memoryview(there)
    core = Mock(wakeup_ms=1 << 40)
    core.connection_opened.return_value = core.connection_closed.return_value = []
    shell = MasterShell(core, store, Mock(), lambda: 0)
    link = Mock(connection_id=7)
    shell.attach(link)
    shell.perform([SendLog(7, b"header", 100, 5)])
    link.transport.writelines.assert_not_called()
    link.transport.write.assert_not_called()
    link.end.assert_called_once()
    core.connection_closed.assert_called_once_with(7, 0)
    shell.close()


async def test_a_classic_slave_that_needs_expired_bytes_is_refused():
    """A segment went since the last look; the bytes behind it would come as if they were next."""
    core = ClassicMasterCore(ClassicPolicy(1 << 20), 0, 500, 0)
    shell = ClassicMasterShell(core, Mock(min_phy_offset=100), Mock(), lambda: 0)
    link = Mock(connection_id=7, address="a:1", reader=ReportReader())
    shell.attach(link)
    shell.received(link, encode_report(50))
    link.transport.writelines.assert_not_called()
    link.end.assert_called_once()
    shell.close()
