"""Requests of every code with odd fields and bodies, and what must still work behind them.

Values are at and beyond limits. What may rightly take things away (deletions, the stop of a role)
is left out.
"""

from __future__ import annotations

import random

from lone_broker import Rig, end_of, until
from test_pop import pop

from batonmq.protocol.errors import BatonError
from batonmq.remoting.command import RemotingCommand

NUMBERS = (
    "0", "1", "-1", "2147483647", "-2147483648", "2147483648", str(2**63 - 1), str(2**63),
    "9" * 5000, "", "x", "1.5", " 7 ", "1_0",
)  # fmt: skip
NAMES = (
    "T", "g", "", "a/b", "..", "../commitlog", "/x", "a\0b", "a\nb", "%", "%RETRY%g", "%DLQ%g",
    "n" * 127, "n" * 251, "n" * 255, "n" * 256, "é" * 128, "日本", "SCHEDULE_TOPIC_XXXX", "TBW102",
)  # fmt: skip
FLAGS = ("true", "false", "x", "")
NAME_FIELDS = [
    "topic",
    "consumerGroup",
    "group",
    "groupName",
    "producerGroup",
    "clientId",
    "clientID",
    "srcGroup",
    "destGroup",
    "attemptId",
    "key",
    "statsName",
    "statsKey",
    "brokerName",
    "clusterName",
    "subscription",
    "exp",
    "a",
    "b",
    "c",
    "n",
]
NUMBER_FIELDS = [
    "queueId",
    "queueOffset",
    "offset",
    "commitOffset",
    "maxMsgNums",
    "sysFlag",
    "suspendTimeoutMillis",
    "subVersion",
    "invisibleTime",
    "pollTime",
    "bornTime",
    "initMode",
    "delayLevel",
    "maxReconsumeTimes",
    "timestamp",
    "maxNum",
    "beginTimestamp",
    "endTimestamp",
    "readQueueNums",
    "writeQueueNums",
    "perm",
    "topicSysFlag",
    "index",
    "count",
    "tranStateTableOffset",
    "commitLogOffset",
    "commitOrRollback",
    "masterEpoch",
    "syncStateSetEpoch",
    "d",
    "e",
    "f",
    "g",
    "h",
    "j",
]
FLAG_FIELDS = "order force isForce offline readable cleanOffset committed fromTransactionCheck k m"
PROPERTIES = [
    "DELAY",
    "TIMER_DELAY_SEC",
    "TIMER_DELAY_MS",
    "TIMER_DELIVER_MS",
    "TIMER_OUT_MS",
    "REAL_QID",
    "INNER_NUM",
    "CHECK_IMMUNITY_TIME_IN_SECONDS",
    "1ST_POP_TIME",
    "RECONSUME_TIME",
    "TRAN_MSG",
    "PGROUP",
    "POP_CK",
]
BODIES = (
    b"", b"{}", b"[]", b"null", b"x", b"\xff" * 40, b"\0" * 5000, b'{"groupName":"a/b"}',
    b'{"clientID":"c","consumerDataSet":[{"groupName":"..","subscriptionDataSet":[]}]}',
    b'{"consumerGroup":"g","clientId":"c","mqSet":[{"topic":"../x","queueId":-5}]}',
    b'{"topicConfigList":[{"topicName":"..","readQueueNums":-1}]}',
)  # fmt: skip
TAKES_AWAY = {215, 207, 316, 60001, 25, 306, 329}


class RequestFuzz:
    def __init__(self, rig: Rig, seed: int) -> None:
        self._rig = rig
        self._rng = random.Random(seed)
        handlers = rig.service._processors
        self.codes = sorted({*handlers.handlers, *handlers.raw_handlers} - TAKES_AWAY)

    def request(self, code: int) -> RemotingCommand:
        rng = self._rng
        fields: dict[str, str] = {}
        for keys, values in (
            (NAME_FIELDS, NAMES),
            (NUMBER_FIELDS, NUMBERS),
            (FLAG_FIELDS.split(), FLAGS),
        ):
            fields |= {key: rng.choice(values) for key in keys if rng.random() < 0.8}
        if rng.random() < 0.6:
            fields |= {"topic": "T", "consumerGroup": "g", "group": "g", "queueId": "0"}
            fields |= {"a": "pg", "b": rng.choice(("T", "U")), "c": "TBW102", "d": "4", "e": "0"}
            fields |= {"f": "0", "g": "1", "h": "0", "j": "0", "m": "false"}
        some = rng.sample(PROPERTIES, rng.randrange(4))
        fields["i"] = "".join(f"{one}\1{rng.choice(NUMBERS)}\2" for one in some)
        return RemotingCommand.request(code, fields, rng.choice(BODIES))

    async def run(self, rounds: int) -> list[str]:
        """Each code so often; the answers that only a mistake in the code gives."""
        odd = []
        for _ in range(rounds):
            for code in self.codes:
                command = self.request(code)
                try:
                    reply = await self._rig.client.invoke(self._rig.service.address, command, 300)
                except BatonError:
                    continue  # held, one-way, or no frame for this protocol
                remark = reply.remark or ""
                if reply.code == 1 and "Error: " in remark.split(" ")[0] + " ":
                    odd.append(f"{code}: {remark[:200]} <- {command.ext}")
        return odd


async def check_features(rig: Rig) -> None:
    """Sends, pulls, POP, delays and timers work, and the checkpoint moves."""
    topic = "Behind"
    assert (await rig.send(topic, b"now")).code == 0
    assert (await rig.pull(topic)).code == 0
    await until(lambda: rig.service.waiting.pop.is_loaded)
    assert (await pop(rig, topic=topic, consumerGroup="behind")).code == 0
    assert (await rig.send(topic, b"timed", TIMER_DELAY_MS="50")).code == 0
    assert (await rig.send(topic, b"delayed", DELAY="1")).code == 0
    await until(lambda: end_of(rig, topic) >= 3)
    waiting = rig.service.waiting
    for feature in (waiting.schedule, waiting.timers, waiting.transactions, waiting.pop):
        assert feature._timer is not None, feature
    store = rig.service.store
    await until(lambda: store.checkpoints.covered_offset == store.confirm_offset)
