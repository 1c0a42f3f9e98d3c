"""A replica that joined after messages had expired numbers on where its group is (R38)."""

import os

from batonmq.protocol.records.codec import NewMessage

HOST = bytes([127, 0, 0, 1, 0, 0, 0x2A, 0x9F])


def put(node, topic, body):
    result = node.store.appender.put_message(
        NewMessage(topic, 0, body, b"", 0, None, None, born_timestamp=1, born_host=HOST)
    )
    node.ha.notify_append(node.store.end_turn())
    return result


async def test_r38_queue_offsets_go_on_over_failovers(group, wait_until):
    """1. Messages of Rare expire at A. 2. B joins with a log that begins behind them. 3. B leads
    and takes one for Rare; a group that stands at 5 reads it. 4. So it does when A leads again."""
    a = await group.add(1)
    b = await group.add(2)
    await group.elect(a, 1, others=False)
    for n in range(5):
        put(a, "Rare", b"old%d" % n)
    for _ in range(60):
        put(a, "Busy", bytes(1000))
    await wait_until(lambda: a.store.confirm_offset == a.store.max_phy_offset)
    for path in sorted((a.root / "commitlog").glob("0*"))[:2]:
        os.utime(path, (0, 0))
    assert a.store.expirer.clean_expired(manual=True) == 2
    await group.follow(b)
    await wait_until(lambda: 2 in group.view.sync_state_set)
    await group.caught_up(a, b)
    assert b.store.min_phy_offset == a.store.min_phy_offset > 0
    assert b.store.positions.whole_from == b.store.min_phy_offset

    await group.elect(b, 1, 2)
    await wait_until(lambda: b.ha.required_set_whole)
    new = put(b, "Rare", b"new")
    assert new.queue_offset == 5
    for node in (a, b):
        await wait_until(lambda node=node: node.store.confirm_offset >= new.end_offset)
        found = node.store.queries.get_message("Rare", 0, 5, 32)
        assert found.message_count == 1
    await group.elect(a, 1, 2)
    await wait_until(lambda: a.ha.required_set_whole)
    assert put(a, "Rare", b"newer").queue_offset == 6
    await group.caught_up(a, b)
    assert a.store.queries.max_offset_in_queue("Rare", 0) == 7
    assert b.store.queries.max_offset_in_queue("Rare", 0) == 7
