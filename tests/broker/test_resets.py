"""An operator's reset (222) outlives its master: the next one sends the group where it was set."""

import asyncio
from pathlib import Path

import pytest
import test_pop as pops
from lone_broker import Rig, run_with_broker, unconfirmed
from test_pop import clock as clock
from test_table_safety import Tables, Wire, following

from batonmq.broker.tables.consumer_offset import ConsumerOffsetManager
from batonmq.broker.tables.offset_resets import OffsetReset
from batonmq.broker.tables.topics import MetadataChange
from batonmq.protocol.codes import RequestCode

TO_ONE = OffsetReset(group="g", topic="T", offsets={0: 1})


async def four_consumed(rig: Rig) -> None:
    for number in range(4):
        assert (await rig.send(body=b"%d" % number)).code == 0
    await rig.pull(offset=4, commit=4)


async def reset_to_one(rig: Rig) -> int:
    fields = {"topic": "T", "group": "g", "timestamp": "0", "queueId": "0", "offset": "1"}
    return (await rig.ask(222, fields)).code


def fails_over(rig: Rig) -> None:
    """This broker is the successor as well: it keeps what its log and its tables have."""
    rig.service.role_left()
    rig.service.master_opened()


async def is_reset(rig: Rig) -> bool:
    """Whether a consumer that did not learn of it can neither continue nor commit."""
    moved = await rig.pull(offset=4, commit=4)
    late, asked = await rig.commit(4), await rig.committed()
    return (moved.code, late.code, asked.ext["offset"]) == (21, 0, "1") and (
        moved.ext["nextBeginOffset"] == "1"
    )


async def takes_it_up(rig: Rig) -> None:
    assert (await rig.pull(offset=1)).code == 0
    assert (await rig.commit(3)).code == 0
    assert (await rig.committed()).ext["offset"] == "3"


def test_r56_a_reset_outlives_the_role_and_the_process(tmp_path):
    async def first(rig: Rig) -> None:
        await four_consumed(rig)
        assert await reset_to_one(rig) == 0
        assert await is_reset(rig)
        fails_over(rig)
        assert await is_reset(rig)

    async def second(rig: Rig) -> None:
        assert await is_reset(rig)
        await takes_it_up(rig)
        fails_over(rig)
        assert (await rig.pull(offset=3)).code == 0, "it is over"

    async def third(rig: Rig) -> None:
        assert (await rig.pull(offset=3)).code == 0
        assert (await rig.committed()).ext["offset"] == "3"

    for play in (first, second, third):
        run_with_broker(tmp_path, play)


async def test_r56_a_reset_is_answered_when_every_member_has_it(rig):
    """Before, nothing has changed: what is not confirmed may be cut."""
    await four_consumed(rig)
    with unconfirmed(rig):
        asked = asyncio.ensure_future(reset_to_one(rig))
        for _ in range(3):
            assert (await rig.committed()).ext["offset"] == "4"
        assert not asked.done()
    assert await asked == 0 and await is_reset(rig)


class Pair:
    """A master and its slave, whose log has what the master put."""

    def __init__(self, folder: Path) -> None:
        self.master, self.slave = Tables(folder / "master"), Tables(folder / "slave")
        self.wire = Wire(self.master, 3)
        self.sync, self.followed = following(self.slave, self.wire, 3)

    def fetch(self) -> None:
        asyncio.run(self.sync.synchronize(self.followed))

    def reset(self, *tables: Tables) -> int:
        """Puts the record; it is confirmed at these."""
        end = self.master.service.reset_offsets("g", "T", {0: 1})
        for each in tables:
            if each is self.master:
                each.carried_out = end
            each.service.apply_record(self.master.log[-1], end)
        return end


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    pair = Pair(tmp_path)
    pair.master.offsets.commit("g", "T", 0, 4)
    pair.fetch()
    return pair


def place(tables: Tables) -> tuple[int, bool]:
    """The offset of the group, and whether its reset runs."""
    return tables.offsets.query("g", "T", 0), tables.offsets.resets.runs("g", "T", 0)


def test_r56_the_heir_has_a_reset_before_it_has_fetched_an_offset(pair):
    pair.reset(pair.master, pair.slave)
    assert place(pair.slave) == (1, True)
    pair.fetch()
    assert place(pair.slave) == (1, True)


def test_r56_offsets_from_before_a_reset_do_not_undo_it(pair):
    """They are under way to the slave while the log shows it the reset."""
    pair.master.offsets.commit("g", "T", 0, 5)
    pair.wire.before_reply[RequestCode.GET_ALL_CONSUMER_OFFSET] = lambda: pair.reset(
        pair.master, pair.slave
    )
    pair.fetch()
    assert place(pair.slave) == (1, True)
    pair.fetch()
    assert place(pair.slave) == (1, True)


def test_r56_a_new_master_finds_a_reset_that_is_not_confirmed_there(pair):
    """It was answered, so it is in the log; confirmOffset lags there. When it is confirmed it does
    not begin again."""
    end, successor = pair.reset(pair.master), pair.slave
    successor.service.take_over_record(pair.master.log[-1], end)
    assert place(successor) == (1, True)
    successor.offsets.resets.finish("T@g", 0)
    successor.offsets.commit("g", "T", 0, 3)
    successor.service.own_record_confirmed(pair.master.log[-1], end)
    assert place(successor) == (3, False)


def test_r56_a_reset_that_was_taken_over_and_cut_is_not_missed_later(pair):
    successor, end = pair.slave, pair.reset(pair.master)
    successor.service.take_over_record(pair.master.log[-1], end + 50)
    successor.service.role_left()
    successor.offsets.commit("g", "T", 0, 4)
    successor.service.apply_record(pair.master.log[-1], end)
    assert place(successor) == (1, True)


def test_r56_the_end_of_a_reset_reaches_the_slave_with_the_progress_behind_it(pair):
    pair.reset(pair.master, pair.slave)
    pair.fetch()
    pair.master.offsets.resets.finish("T@g", 0)
    pair.fetch()
    assert place(pair.slave) == (1, False), "slaves fetch it though no offset has changed"
    pair.master.offsets.commit("g", "T", 0, 3)
    pair.fetch()
    assert place(pair.slave) == (3, False)


def test_r56_a_slave_that_finds_the_record_late_does_not_begin_a_reset_that_ended(pair):
    """It was away: it has the master's offsets at once, and the record only later."""
    end = pair.reset(pair.master)
    pair.master.service.apply_record(pair.master.log[-1], end)
    pair.master.carried_out = end
    pair.master.offsets.commit("g", "T", 0, 3)
    pair.fetch()
    pair.slave.service.apply_record(pair.master.log[-1], end)
    assert place(pair.slave) == (3, False)


def test_r56_a_reset_is_on_the_disk_before_a_checkpoint_and_begins_once(pair, tmp_path):
    end = pair.reset(pair.slave)
    for write in pair.slave.tables.shown_by_the_log():
        write()
    again = ConsumerOffsetManager(tmp_path / "slave" / "consumerOffset.json")
    again.load()
    assert again.query("g", "T", 0) == 1 and again.resets.runs("g", "T", 0)
    again.commit("g", "T", 0, 3)
    again.resets.begin([TO_ONE], end)  # a start shows the log from before again
    assert again.query("g", "T", 0) == 3 and not again.resets.runs("g", "T", 0)


def test_r56_what_deletes_or_cuts_a_queues_offsets_ends_its_reset(pair):
    end = pair.reset(pair.slave)
    pair.slave.offsets.log_ends(end)
    assert place(pair.slave) == (1, True)
    pair.slave.offsets.delete_topic("T", end + 1)
    assert place(pair.slave) == (-1, False)
    pair.reset(pair.slave)
    pair.slave.offsets.log_ends(end)
    assert place(pair.slave) == (1, False)
    pair.reset(pair.slave)
    pair.slave.offsets.clear_for_new_log()
    assert place(pair.slave) == (-1, False)


def test_r56_earlier_versions_read_the_record_and_theirs_is_read(pair):
    """They skip what they do not know; a master that knows no resets ends none for good."""
    pair.reset(pair.slave)
    assert MetadataChange.decode(pair.master.log[-1]).v == 1
    assert MetadataChange.decode(b'{"v":1,"topics":{}}').resets == []
    offsets = pair.slave.offsets
    assert offsets.apply_from_master(4, {"T@g": {0: 3}}, 1 << 20)
    assert place(pair.slave) == (3, False)


async def test_r56_a_reset_of_a_popping_group_outlives_its_master(rig, clock):
    """Popped before it, and again after it: each master gives what comes next for the group."""

    async def loaded(rig: Rig) -> None:
        fails_over(rig)
        await pops.until(lambda: rig.service.features.pop.is_loaded)

    for number in range(4):
        await rig.send("T", b"%d" % number)
    assert pops.bodies(await pops.pop(rig)) == [b"0", b"1", b"2", b"3"]
    assert await reset_to_one(rig) == 0
    await loaded(rig)
    assert pops.bodies(await pops.pop(rig, maxMsgNums=1)) == [b"1"]
    assert not rig.service.tables.offsets.resets.running, "it is taken up"
    await loaded(rig)
    assert pops.bodies(await pops.pop(rig)) == [b"2", b"3"]
