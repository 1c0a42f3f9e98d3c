"""Requests of every code with odd fields and bodies, for a broker, a name server or a controller.

Values are at and beyond limits, sizes as well. The same seed makes the same requests.
"""

import asyncio
import random
import secrets
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from batonmq.protocol.errors import BatonError
from batonmq.remoting.command import FRAME_SIZE_MAX, RemotingCommand
from batonmq.remoting.endpoint import RemotingClient
from tests.conftest import SOAK

SEEDS: Final = range(1) if not SOAK else [secrets.randbelow(1 << 32) for _ in range(200)]
"""`make soak` draws new ones; a test that fails has its seed in its name."""
NUMBERS = (
    "0", "1", "-1", "2147483647", "-2147483648", "2147483648", str(2**63 - 1), str(2**63),
    "9" * 5000, "", "x", "1.5", " 7 ", "1_0",
)  # fmt: skip
NAMES = (
    "T", "g", "", "a/b", "..", "../commitlog", "/x", "a\0b", "a\nb", "%", "%RETRY%g", "%DLQ%g",
    "n" * 127, "n" * 251, "n" * 255, "n" * 256, "é" * 128, "日本", "SCHEDULE_TOPIC_XXXX", "TBW102",
)  # fmt: skip
FLAGS = ("true", "false", "x", "")
NAME_FIELDS = (
    "topic", "consumerGroup", "group", "groupName", "producerGroup", "clientId", "clientID",
    "srcGroup", "destGroup", "attemptId", "key", "statsName", "statsKey", "brokerName",
    "clusterName", "subscription", "exp", "a", "b", "c", "n", "msgId", "transactionId",
    "uniqMsgId", "brokerAddr", "namespace", "controllerAddress", "brokerAddress", "value",
    "haServerAddr", "registerCheckCode", "cluster", "__ZONE_NAME", "brokerControllerIdsToClean",
)  # fmt: skip
NUMBER_FIELDS = (
    "queueId", "queueOffset", "offset", "commitOffset", "maxMsgNums", "sysFlag",
    "suspendTimeoutMillis", "subVersion", "invisibleTime", "pollTime", "bornTime", "initMode",
    "delayLevel", "maxReconsumeTimes", "timestamp", "maxNum", "beginTimestamp", "endTimestamp",
    "readQueueNums", "writeQueueNums", "perm", "topicSysFlag", "index", "count",
    "tranStateTableOffset", "commitLogOffset", "commitOrRollback", "masterEpoch",
    "syncStateSetEpoch", "d", "e", "f", "g", "h", "j", "brokerId", "confirmOffset", "extraInfo",
    "originMsgId", "batch", "appliedBrokerId", "masterBrokerId", "epoch", "maxOffset",
    "electionPriority", "heartbeatTimeoutMills", "heartbeatTimeoutMillis", "bodyCrc32",
)  # fmt: skip
FLAG_FIELDS = (
    "order", "force", "isForce", "offline", "readable", "cleanOffset", "committed",
    "fromTransactionCheck", "k", "m", "compressed", "designateElect", "uncleanElect",
    "cutLaterAcks", "isCleanLivingBroker", "enableActingMaster", "batonPartial",
)  # fmt: skip
PROPERTIES = (
    "DELAY", "TIMER_DELAY_SEC", "TIMER_DELAY_MS", "TIMER_DELIVER_MS", "TIMER_OUT_MS", "REAL_QID",
    "INNER_NUM", "CHECK_IMMUNITY_TIME_IN_SECONDS", "1ST_POP_TIME", "RECONSUME_TIME", "TRAN_MSG",
    "PGROUP", "POP_CK",
)  # fmt: skip
BODIES = (
    b"", b"{}", b"[]", b"null", b"x", b"\xff" * 40, b"\0" * 5000, b'{"groupName":"a/b"}',
    b'{"clientID":"c","consumerDataSet":[{"groupName":"..","subscriptionDataSet":[]}]}',
    b'{"consumerGroup":"g","clientId":"c","mqSet":[{"topic":"../x","queueId":-5}]}',
    b'{"topicConfigList":[{"topicName":"..","readQueueNums":-1}]}', b'["broker-a","a/b",""]',
    b'{"syncStateSet":[1,2],"syncStateSetEpoch":9223372036854775807}', b'{"syncStateSet":[-1,"x"]}',
    b'{"queueDatas":[{"brokerName":"broker-a","perm":-1,"readQueueNums":2147483647}]}',
    b'{"topicConfigSerializeWrapper":{"topicConfigTable":{"..":{},"T":{"perm":-1},"a\\nb":{}}}}',
)  # fmt: skip
MESSAGE_MAX = 4 << 20
LARGE = (
    b"x" * MESSAGE_MAX, b"x" * (MESSAGE_MAX + 1), b"x" * (FRAME_SIZE_MAX - 65_536),
    b"[" * 1_000_000, b'{"a":' * 1_000_000, b"[" + b"0," * 1_000_000 + b"0]",
    b'{"topicConfigTable":{' + b'"x":{},' * 100_000 + b'"y":{}}}',
    zlib.compress(b'{"a":"' + b"0" * (64 << 20) + b'"}'),
)  # fmt: skip
LARGE_SHARE = 0.03


class OddRequests:
    """Requests of these codes. `known`: values of fields that exist at the server, such as a topic
    or the place of a message; they lead a request further."""

    def __init__(
        self, codes: Iterable[int], seed: int, known: Mapping[str, Sequence[str]] | None = None
    ) -> None:
        self._codes = sorted(codes)
        self._rng = random.Random(seed)
        self._known = known or {}

    def request(self, code: int) -> RemotingCommand:
        rng = self._rng
        fields: dict[str, str] = {}
        for keys, values in (
            (NAME_FIELDS, NAMES),
            (NUMBER_FIELDS, NUMBERS),
            (FLAG_FIELDS, FLAGS),
        ):
            fields |= {key: rng.choice(values) for key in keys if rng.random() < 0.8}
        some = rng.sample(PROPERTIES, rng.randrange(4))
        fields["i"] = "".join(f"{one}\1{rng.choice(NUMBERS)}\2" for one in some)
        if rng.random() < 0.6:
            fields |= {key: rng.choice(values) for key, values in self._known.items()}
        if rng.random() < LARGE_SHARE:
            fields[rng.choice(NAME_FIELDS)] = "n" * rng.choice((32_767, 70_000))
        body = rng.choice(LARGE if rng.random() < LARGE_SHARE else BODIES)
        return RemotingCommand.request(code, fields, body)

    async def send(self, client: RemotingClient, address: str, rounds: int) -> list[str]:
        """A round has each code once, all at once; the answers that show a mistake in the code."""
        odd = []

        async def ask(code: int) -> None:
            command = self.request(code)
            try:
                reply = await client.invoke(address, command, 300)
            except BatonError:
                return  # held, one-way, or no frame for this protocol
            remark = reply.remark or ""
            if reply.code == 1 and "Error: " in remark.split(" ")[0] + " ":
                odd.append(f"{code}: {remark[:200]} <- {str(command.ext)[:2000]}")

        for _ in range(rounds):
            await asyncio.gather(*map(ask, self._codes))
        return odd
