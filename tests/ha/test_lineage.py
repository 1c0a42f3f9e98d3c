"""R47: equal epochs are not equal bytes; both ends compare before a log counts as a prefix."""

import shutil
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from batonmq.protocol.records.codec import NewMessage
from batonmq.store.message_store import MessageStore
from batonmq.store.recovery import ConfirmedByLog, ConfirmedBySet
from tests.ha.conftest import HOST, SEGMENT, TOPIC, Group, Node, expire_first_segment, flip, until

RunGroup = Callable[[Callable[[Group], Awaitable[None]]], None]


async def old_volume(
    tmp_path: Path, body: bytes, count: int, segment: int = SEGMENT, end: int = 0
) -> Path:
    """The data folder of replica 2 of an earlier cluster of the same names, cut at `end`."""
    earlier = Group(tmp_path / "earlier")
    earlier.segment_size = segment
    one, two = await earlier.pair()
    one.put(count, body=body)
    await earlier.caught_up(one, two)
    await earlier.close()
    if end:
        store = MessageStore(two.store_config, store_host=HOST, confirm_rule=ConfirmedBySet())
        store.open()
        store.slave_log.truncate_to(end, keep_aside=False, unclean_epoch=True)
        store.close()
    return two.root


def holds(node: Node, text: bytes) -> int:
    return node.log_bytes().count(text)


@pytest.mark.parametrize(
    ("new", "old", "count"),
    [
        (b"new cluster ", b"old cluster ", 5),  # a record of the master ends where its log does
        (b"new cluster ", b"old, and longer ", 5),
        (b"new cluster ", b"old cluster ", 60),  # its log is longer than the master's
        (b"new " * 3000, b"old " * 3000, 1),  # a sample lies within one record
    ],
)
async def test_r47_the_volume_of_an_earlier_cluster_is_no_common_prefix(
    group, tmp_path, new, old, count
):
    kept = await old_volume(tmp_path, old, count)
    one = await group.add(1)
    await group.elect(one)
    one.put(10 if len(new) < 1000 else 1, body=new)
    shutil.copytree(kept, group.tmp_path / "b2")
    two = await group.add(2)
    before = two.log_bytes()
    await group.follow(two)
    await until(lambda: two.diverged)
    assert "differ" in two.diverged[0] and "move this store aside" in two.diverged[0]
    assert two.log_bytes() == before and not two.truncated, "nothing is dropped by itself"
    assert one.ha.in_sync_count == 1 and not one.damage
    # As the error says. Then it has what the group has, and the old log is still there.
    await two.stop()
    aside = two.root.rename(tmp_path / "aside")
    await two.start()
    await group.follow(two)
    await until(lambda: one.ha.in_sync_count == 2)
    await group.caught_up(one, two)
    assert two.log_bytes() == one.log_bytes()
    kept_log = b"".join(each.read_bytes() for each in sorted((aside / "commitlog").glob("0*")))
    assert kept_log.startswith(before[:4096])


async def test_r47_an_epoch_that_was_given_twice_ends_the_common_part_where_it_begins(group):
    one, two, three = [await group.add(n) for n in (1, 2, 3)]
    await group.elect(one)
    await until(lambda: one.ha.in_sync_count == 3)
    one.put(4, body=b"common ")
    await group.caught_up(one, two, three)
    common = one.store.max_phy_offset
    await group.elect(three, 3, others=False)
    three.put(3, body=b"line A ")
    await until(lambda: three.confirm_offset == three.store.max_phy_offset)
    await three.stop()
    group.view = replace(group.view, master_epoch=1, sync_state_set_epoch=0)
    await group.restart(one)
    await group.restart(two)
    await group.elect(one, 1, 2, others=False)
    await group.follow(two)
    await until(lambda: one.ha.required_set_whole)
    one.put(6, body=b"line B ")
    await group.caught_up(one, two)
    await three.start()
    assert three.epochs == one.epochs
    await group.follow(three)
    # Its bytes of that epoch are confirmed: R23 keeps them for an operator to compare.
    await until(lambda: three.diverged)
    assert f"leaves ours at {common}" in three.diverged[0]
    assert holds(three, b"line A ") == 3


async def test_r47_unconfirmed_bytes_of_an_epoch_given_twice_are_cut(group):
    one, two = await group.pair()
    one.put(4, body=b"common ")
    await group.caught_up(one, two)
    common = one.store.max_phy_offset
    await two.stop()
    two.up = False
    await two.start()
    await two.ha.change_to_master(replace(group.next_view(two, 1, 2)))
    two.put(3, body=b"line A ")
    await two.stop()
    group.view = replace(group.view, master_epoch=1)
    await group.elect(one, 1, others=False)
    one.put(6, body=b"line B ")
    await two.start()
    assert two.confirm_offset == common and two.epochs == one.epochs
    await group.follow(two)
    await until(lambda: one.ha.in_sync_count == 2)
    await group.caught_up(one, two)
    assert two.truncated[0][1] == common and holds(two, b"line B ") == 6


@pytest.mark.parametrize("volume", ["ends at the first byte", "ends below it", "is unnamed"])
async def test_r47_a_foreign_log_below_the_masters_first_byte_is_neither_taken_nor_dropped(
    group, tmp_path, volume
):
    """No byte is left at the master to compare with, and the epochs are equal."""
    group.segment_size = 4096
    size = (5, 4096, 0) if "below" in volume else (40, 4096, 4096)
    kept = await old_volume(tmp_path, b"old cluster ", *size)
    if "unnamed" in volume:  # an earlier version wrote it
        (kept / "commitlog" / ".baton" / "lineage").unlink(missing_ok=True)
    one = await group.add(1)
    await group.elect(one)
    while one.store.max_phy_offset <= 8192:
        one.put(1, body=b"new cluster ")
    await until(lambda: one.confirm_offset == one.store.max_phy_offset)
    await expire_first_segment(one)
    assert one.store.min_phy_offset == 4096
    shutil.copytree(kept, group.tmp_path / "b2")
    two = await group.add(2)
    before = two.log_bytes()
    assert two.store.max_phy_offset == 4096 or "below" in volume
    assert two.epochs == one.epochs == [(1, 0)]
    await group.follow(two)
    if "unnamed" in volume:  # starts again, as it does where its next byte is gone (R27)
        await group.caught_up(one, two)
        aside = [p for p in (two.root / "truncated").rglob("*") if p.is_file()]
        assert any(before in p.read_bytes() for p in aside)
        assert holds(two, b"old cluster ") == 0
        return
    await until(lambda: two.diverged)
    assert "another history" in two.diverged[0] and "move this store aside" in two.diverged[0]
    assert two.log_bytes() == before and not two.truncated
    assert one.ha.in_sync_count == 1


async def test_r47_a_replica_that_was_away_until_its_bytes_expired_is_known_again(group):
    """It knows the history, whoever leads it by now."""
    group.segment_size = 4096
    one, two, three = [await group.add(n) for n in (1, 2, 3)]
    await group.elect(one)
    await until(lambda: one.ha.in_sync_count == 3)
    one.put(3)
    await group.caught_up(one, two, three)
    await two.stop()
    await group.elect(three, 1, 3)
    three.put(1)
    await group.caught_up(one, three)
    await one.stop()
    three.ha.set_dead(frozenset({1, 2}))
    await until(lambda: three.ha.required_set == {3})
    while three.store.max_phy_offset <= 8192:
        three.put(1)
    await expire_first_segment(three)
    three.ha.set_dead(frozenset())
    await two.start()
    await group.follow(two)
    await group.caught_up(three, two)
    assert two.store.min_phy_offset == 4096 and not two.diverged


@pytest.mark.parametrize("rotten", ["master", "slave"])
async def test_r47_a_rotten_byte_is_no_other_history(group, rotten):
    one, two = await group.pair()
    first = one.put(1)
    second = one.put(1)
    await group.caught_up(one, two)
    host = one if rotten == "master" else two
    await host.stop()
    flip(host, (first + second) // 2)
    await host.start()
    await group.elect(one, 1, 2, others=False)
    await group.follow(two)
    one.put(2)
    await until(lambda: two.is_following)
    await until(lambda: one.confirm_offset == one.store.max_phy_offset)
    assert not two.diverged and not two.truncated


async def test_r47_an_older_version_and_a_java_broker_are_followed_by_their_epochs(
    group, monkeypatch
):
    one, two = await group.add(1), await group.add(2)
    monkeypatch.setattr(one.ha, "_samples", None)  # sends no samples
    await group.elect(one)
    await until(lambda: one.ha.in_sync_count == 2)
    one.put(3)
    await group.restart(two)
    monkeypatch.setattr(two.ha, "_samples", None)  # asks for none
    await group.follow(two)
    await until(lambda: one.ha.in_sync_count == 2)
    await group.caught_up(one, two)


def classic_life(node: Node, count: int, body: bytes) -> None:
    """What a broker without controllers does to the folder."""
    store = MessageStore(node.store_config, store_host=HOST, confirm_rule=ConfirmedByLog())
    store.open()
    for n in range(count):
        message = NewMessage(
            TOPIC, 0, body + b"%d" % n, b"", 0, None, None, born_timestamp=1, born_host=HOST
        )
        store.appender.put_message(message)
        store.advance_confirm_offset(store.end_turn())
    store.close()


@pytest.mark.parametrize("written", [(3, 5), (0, 0), (0, 5)])
async def test_r48_bytes_of_a_classic_life_belong_to_no_epoch(group, written):
    one, two = await group.pair()
    one.put(4)
    await group.caught_up(one, two)
    await one.stop()
    await two.stop()
    classic_life(one, written[0], b"classic 1 ")
    classic_life(two, written[1], b"classic 2 ")
    await one.start()
    await two.start()
    assert one.epochs == two.epochs == []
    await group.elect(two, 1, 2, others=False)
    await group.follow(one)
    if written[0]:
        await until(lambda: one.diverged)
        assert "differ" in one.diverged[0]
        assert not one.truncated and holds(one, b"classic 1 ") == 3
    else:  # compared, and found to be a prefix
        await until(lambda: two.ha.required_set_whole)
        two.put(2)
        await group.caught_up(one, two)
        assert one.epochs == two.epochs == [(2, 0)]
