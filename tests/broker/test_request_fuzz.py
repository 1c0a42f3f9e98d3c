"""No request ends the broker or a feature of it, whatever is in its fields (R46, R54)."""

import pytest
from lone_broker import Rig, end_header, end_of, run_with_broker, until
from odd_requests import SEEDS, OddRequests
from test_pop import pop
from test_transactions import COMMIT, ROLLBACK, UNKNOWN, Asked, half

from batonmq.protocol.codes import RequestCode

TAKES_AWAY = {215, 207, 316, 60001, 25, 306, 329}
"""What may rightly delete the topics and groups of the check, or end a role."""
SEND = {"a": "pg", "c": "TBW102", "d": "4", "e": "0", "f": "0", "g": "1", "h": "0", "j": "0"}
KNOWN = {key: (value,) for key, value in SEND.items()} | {
    "b": ("T", "U"),
    "m": ("false",),
    "topic": ("T",),
    "consumerGroup": ("g",),
    "group": ("g",),
    "queueId": ("0",),
}
QUICK = {"transaction_time_out": 100, "transaction_check_interval": 100}


@pytest.mark.request_fuzz
@pytest.mark.parametrize("seed", SEEDS)
def test_r46_r54_after_odd_requests_of_every_code_all_works(tmp_path, seed):
    async def play(rig: Rig) -> None:
        await rig.send("T", b"x")
        halves = [end_header(await half(rig, f"K{number}"), UNKNOWN) for number in range(8)]
        known = KNOWN | {key: [one[key] for one in halves] for key in halves[0]}
        known["commitOrRollback"] = [COMMIT, ROLLBACK, UNKNOWN, "4"]
        processors = rig.service.endpoint.processors
        codes = {*processors.handlers, *processors.raw_handlers} - TAKES_AWAY
        ends = [RequestCode.END_TRANSACTION] * 8
        odd = await OddRequests([*codes, *ends], seed, known).send(
            rig.client, rig.service.address, rounds=3
        )
        await check_features(rig)
        assert not odd, "\n".join(odd)

    run_with_broker(tmp_path, play, broker=QUICK)
    run_with_broker(tmp_path, check_features, broker=QUICK)  # the restart is clean


async def check_features(rig: Rig) -> None:
    """Sends, pulls, POP and its revive, delays, timers, ends and checks of transactions work, and
    the checkpoint moves."""
    topic, revived = "Behind", "Revived"
    rig.answer_ms = 60_000  # a busy machine is behind with the odd requests
    assert (await rig.send(topic, b"now")).code == 0
    assert (await rig.pull(topic)).code == 0
    await until(lambda: rig.service.features.pop.is_loaded)
    before = end_of(rig, f"%RETRY%behind_{revived}")
    assert (await rig.send(revived, b"lost")).code == 0
    assert (await pop(rig, topic=revived, consumerGroup="behind", invisibleTime=100)).code == 0
    delivered = end_of(rig, topic)
    assert (await rig.send(topic, b"timed", TIMER_DELAY_MS="50")).code == 0
    assert (await rig.send(topic, b"delayed", DELAY="1")).code == 0
    committed = end_of(rig, topic, 1)
    sent = await half(rig, "behind", topic=topic)
    assert (await rig.ask(RequestCode.END_TRANSACTION, end_header(sent, COMMIT))).code == 0
    assert end_of(rig, topic, 1) > committed
    committed = end_of(rig, topic, 1)
    async with Asked(rig, COMMIT):
        await half(rig, "open", topic=topic)
        await until(lambda: end_of(rig, topic, 1) > committed)
    await until(lambda: end_of(rig, topic) >= delivered + 2)
    await until(lambda: end_of(rig, f"%RETRY%behind_{revived}") > before)
    features = rig.service.features
    for feature in (features.schedule, features.timers, features.transactions, features.pop):
        assert feature._timer is not None, feature
    store = rig.service.store
    await until(lambda: store._files.checkpoint.recovery_offset == store.confirm_offset)
