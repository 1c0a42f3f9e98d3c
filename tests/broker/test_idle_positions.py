"""A broker without writes states queue positions by itself (R38)."""

from lone_broker import until


async def test_r38_an_idle_master_states_positions_but_not_while_it_drains(rig):
    assert (await rig.send()).code == 0
    service = rig.service
    store, path = service.store, service.path
    end = store.confirm_offset
    path.hold.begin()
    store.positions.due_at = 0
    path.tick(path.clock_ms())
    path.end_turn()
    assert store.max_phy_offset == end, "the member that takes over waits for the last byte"
    path.hold.release()
    await until(lambda: store.confirm_offset > end)
    assert store.positions.due_at == 1 << 20, "the next segment"
    assert (await rig.send()).ext["queueOffset"] == "1"
