"""An operator trusts a suspect log again (R17), by our own request 60001."""

from lone_broker import lone_broker

from batonmq.protocol.codes import RequestCode, ResponseCode


async def test_r17_r24_an_operator_repairs_a_damaged_log_without_a_master(tmp_path):
    """1 a byte flips in the log of a broker that stands alone. 2 it serves what lies before it and
    takes nothing. 3 the operator names what he saw: the tail goes aside, and writes are taken."""
    async with lone_broker(tmp_path) as rig:
        ends = []
        for number in range(3):
            assert (await rig.send(body=b"%d" % number * 300)).code == ResponseCode.SUCCESS
            ends.append(rig.service.store.max_phy_offset)
        refused = await rig.ask(RequestCode.BATON_REPAIR_REPLICA, {"suspect": "x"})
        assert refused.code == ResponseCode.INVALID_PARAMETER
        assert "not suspect" in refused.remark
    (segment,) = (tmp_path / "commitlog").glob("0*")
    with segment.open("r+b") as file:
        file.seek(ends[0] + 120)
        file.write(b"?")
    (tmp_path / "checkpoint").unlink()  # so that the start reads the whole log
    for folder in ("consumequeue", "index"):
        (tmp_path / folder).rename(tmp_path / f"{folder}-away")
    async with lone_broker(tmp_path) as rig:
        store = rig.service.store
        assert f"at offset {ends[0]}" in store.trust.reason
        assert (await rig.send()).code != ResponseCode.SUCCESS
        other = await rig.ask(RequestCode.BATON_REPAIR_REPLICA, {"suspect": "something"})
        assert other.code == ResponseCode.INVALID_PARAMETER and store.trust.reason in other.remark
        done = await rig.ask(RequestCode.BATON_REPAIR_REPLICA, {"suspect": store.trust.reason})
        assert done.code == ResponseCode.SUCCESS and f"cut at {ends[0]}" in done.remark
        assert store.trust.reason == "" and store.max_phy_offset == ends[0]
        assert list((tmp_path / "truncated").iterdir())
        assert (await rig.send(body=b"new")).code == ResponseCode.SUCCESS
