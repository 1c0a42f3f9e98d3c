"""What came in and went out by minute, hour and day (315), and the totals of a day (28)."""

from datetime import date

from heartbeats import heartbeat
from lone_broker import pop_header

from batonmq.broker.status import DailyTotals, Totals
from batonmq.broker.write import broker_stats
from batonmq.broker.write.broker_stats import SWEEP, StatsTable
from batonmq.protocol.bodies import BrokerStatsData
from batonmq.protocol.codes import RequestCode

SECOND = 1000
HOUR = 3_600 * SECOND


def ticked(table: StatsTable, begin: int, end: int, every: int = SECOND) -> None:
    for now in range(begin, end, every):
        table.tick(now)


def minute_of(table: StatsTable, key: str, now: int) -> int:
    shown = table.shown(key, now, sizes=False)
    assert shown is not None
    return shown.stats_minute.sum


def test_a_minute_an_hour_and_a_day_reach_back_that_far():
    table = StatsTable(0)
    assert table.shown("T", 0, sizes=False) is None
    table.add("T", 10, 1000)
    shown = table.shown("T", 5 * SECOND, sizes=False)
    assert shown is not None and (shown.stats_minute.sum, shown.stats_minute.tps) == (10, 2.0)
    ticked(table, 0, 120 * SECOND)
    table.add("T", 2, 500)
    table.add("T", 1, 100)
    shown = table.shown("T", 120 * SECOND, sizes=False)
    assert shown is not None
    assert (shown.stats_minute.sum, shown.stats_minute.avgpt) == (3, 1.5)
    assert shown.stats_hour.sum == shown.stats_day.sum == 13
    sizes = table.shown("T", 120 * SECOND, sizes=True)
    assert sizes is not None and (sizes.stats_minute.sum, sizes.stats_day.sum) == (600, 1600)
    ticked(table, 120 * SECOND, 2 * HOUR, 10 * SECOND)
    shown = table.shown("T", 2 * HOUR, sizes=False)
    assert shown is not None and (shown.stats_hour.sum, shown.stats_day.sum) == (0, 13)


def test_keys_that_rest_for_a_day_go_and_leave_nothing_to_who_comes_after():
    table = StatsTable(0)
    for number in range(3 * SWEEP):
        table.add(f"old{number}", 7, 7)
    ticked(table, 0, 24 * HOUR - 1, HOUR)
    table.add("old3", 1, 1)
    assert len(table._slots) == 3 * SWEEP
    ticked(table, 24 * HOUR, 26 * HOUR, 600 * SECOND)
    assert len(table._slots) == 1 and minute_of(table, "old3", 26 * HOUR) == 0
    for number in range(2 * SWEEP):
        table.add(f"new{number}", 5, 5)
    shown = table.shown("new9", 26 * HOUR, sizes=False)
    assert shown is not None
    assert {shown.stats_minute.sum, shown.stats_hour.sum, shown.stats_day.sum} == {5}
    everything = table.shown(None, 26 * HOUR, sizes=False)
    assert everything is not None and everything.stats_minute.sum == 5 * 2 * SWEEP


async def test_a_broker_counts_by_topic_and_group(rig):

    async def of(name: str, key: str) -> BrokerStatsData | None:
        asked = {"statsName": name, "statsKey": key}
        reply = await rig.ask(RequestCode.VIEW_BROKER_STATS_DATA, asked)
        if reply.code == 0:
            return BrokerStatsData.decode(reply.body)
        assert reply.code == 1 and f"The stats <{name}> <{key}> not exist" in reply.remark
        return None

    async def sum_of(name: str, key: str) -> int:
        shown = await of(name, key)
        assert shown is not None
        return shown.stats_minute.sum

    assert await of("TOPIC_PUT_NUMS", "T") is None and await of("NONSENSE", "T") is None
    for _ in range(3):
        await rig.send()
    await rig.send("U")
    end = rig.service.store.max_phy_offset
    assert await sum_of("TOPIC_PUT_NUMS", "T") == 3
    assert 3 * 100 < await sum_of("TOPIC_PUT_SIZE", "T") < end
    assert await sum_of("BROKER_PUT_NUMS", "DefaultCluster") == 4
    await rig.ask(RequestCode.HEART_BEAT, body=heartbeat("c", "T").encode())
    await rig.pull()
    assert await sum_of("GROUP_GET_NUMS", "T@g") == await sum_of("BROKER_GET_NUMS", "x") == 3
    assert await sum_of("GROUP_GET_SIZE", "T@g") > 300
    assert (await rig.ask(RequestCode.POP_MESSAGE, pop_header())).code == 0
    assert await sum_of("GROUP_GET_NUMS", "T@g") == 6
    back = {"offset": "0", "group": "g", "delayLevel": "1", "originTopic": "T"}
    offset = rig.service.store.queries.units("T", 0, 0, 1)[0][0]
    assert (await rig.ask(36, back | {"offset": str(offset)})).code == 0
    offset = rig.service.store.queries.units("SCHEDULE_TOPIC_XXXX", 0, 0, 1)[0][0]
    assert (await rig.ask(36, back | {"offset": str(offset)})).code == 0
    assert await sum_of("SNDBCK_PUT_NUMS", "T@g") == 2, "a retry is of the same topic"


def test_the_oldest_keys_come_first():
    """A page of metrics takes so many series: a new topic must not take the place of another."""
    table = StatsTable(0)
    for number in range(5):
        table.add(f"T{number}", 1, 1)
    assert [key for key, _, _ in table.totals()] == [f"T{number}" for number in range(5)]


def test_r58_keys_beyond_the_limit_count_for_the_whole_broker_only(monkeypatch):
    monkeypatch.setattr(broker_stats, "KEYS_MAX", 2)
    table = StatsTable(0)
    for key in "abcd":
        table.add(key, 1, 10)
    assert [key for key in "abcd" if table.shown(key, 1, sizes=False)] == ["a", "b"]
    assert list(table.totals()) == [("a", 1, 10), ("b", 1, 10)]
    everything = table.shown(None, 1, sizes=True)
    assert everything is not None and everything.stats_minute.sum == 40


def test_totals_of_a_day_begin_in_its_morning():
    steps = ((1, (5, 1)), (1, (9, 2)), (2, (10, 3)), (2, (20, 4)), (3, (21, 5)))
    days = DailyTotals(lambda: Totals(*steps[len(seen)][1]))
    seen: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for day, _ in steps:
        days.tick(date(2026, 1, day))
        seen.append((days.yesterday[:2], days.today[:2]))
    began = (0, 0)
    assert seen[:2] == [(began, began)] * 2
    assert seen[2:4] == [(began, (10, 3))] * 2
    assert seen[4] == ((10, 3), (21, 5))
