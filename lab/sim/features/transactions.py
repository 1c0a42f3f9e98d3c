"""Half messages are visible entirely or not at all, and what a client was answered stays so.

`decisions` is the data base of the application. What it has committed comes to the group, once: not
again by another end, by a check, or by a master that inherits a commit without its op (R30). What
it has rolled back never does. What is undecided is checked until it decides. A half message whose
end is confirmed is not checked back any more. One that is given up for its age is promised no more:
where a master begins while its clock is hours ahead, all are old.
"""

import asyncio
import zlib
from collections import defaultdict

from batonmq.client.producer.producer import ProducerOptions
from batonmq.client.producer.transactions import TransactionProducer, TransactionState
from batonmq.protocol.errors import BatonError
from batonmq.protocol.message import Message, MessageExt
from batonmq.protocol.properties import CHECK_IMMUNITY_TIME_IN_SECONDS, TRANSACTION_CHECK_TIMES
from batonmq.protocol.topic_name import (
    TRANS_CHECK_MAX_TIME_TOPIC,
    TRANS_HALF_TOPIC,
    TRANS_OP_HALF_TOPIC,
)
from lab.sim.clients import CLIENT_OPTIONS, SEND_MS, Client
from lab.sim.features.log import Checker, FeatureLog, number_of, some
from lab.sim.hosts import NAME_SERVERS
from lab.sim.messages import Messages
from lab.sim.records import LogRecord

TOPIC = "TopicT"
_OLD_S = 1_800.0
COMMIT, ROLLBACK, UNKNOWN = (
    TransactionState.COMMIT,
    TransactionState.ROLLBACK,
    TransactionState.UNKNOWN,
)


class Transactions(Checker):
    """`_open`: queue offsets of the open half messages of a name. `_sent`: how often a name was
    sent, since a send that is tried again may be stored twice."""

    def __init__(self, log: FeatureLog, group: str) -> None:
        super().__init__(log)
        self._group = group
        self.decisions: dict[str, TransactionState] = {}
        self._open: dict[str, set[int]] = defaultdict(set)
        self._name_at: dict[int, str] = {}
        self._sent: dict[str, int] = defaultdict(int)
        self._commits: dict[str, int] = defaultdict(int)
        self._given_up: set[str] = set()

    def record(self, record: LogRecord, name: str) -> None:
        if record.topic == TRANS_HALF_TOPIC:
            checks = number_of(record, TRANSACTION_CHECK_TIMES)
            if checks and not self._open[name]:
                self.log.violate(f"R30: {name} is checked back after its end, the {checks}th time")
            self._sent[name] += not checks
            self._open[name].add(record.queue_offset)
            self._name_at[record.queue_offset] = name
        elif record.topic == TRANS_OP_HALF_TOPIC:
            for offset in filter(None, bytes(record.body).split(b",")):
                self._open[self._name_at[int(offset)]].discard(int(offset))
        elif record.topic == TRANS_CHECK_MAX_TIME_TOPIC:
            self._given_up.add(name)
            clocks = self.log.cluster.clocks
            if clocks.farthest_s + clocks.passed_s < _OLD_S:
                self.log.violate(f"transactions: {name} is given up")
        elif record.topic == TOPIC:
            self._commits[name] += 1
            if self.decisions.get(name) is not COMMIT:
                self.log.violate(f"transactions: {name} is visible and not committed")
            if self._commits[name] > self._sent[name] or not self._open[name]:
                self.log.violate(f"R30: {name} is committed again, or after its end")

    def ended(self, name: str, queue_offset: int, state: TransactionState) -> None:
        """END_TRANSACTION was answered with success."""
        self.log.read()
        if queue_offset in self._open[name]:
            self.log.violate(f"R30: the end of {name} is answered, and no op of it is confirmed")
        if state is COMMIT and not self._commits[name]:
            self.log.violate(f"R30: the commit of {name} is answered, and it is not visible")

    def pending(self) -> str:
        if undecided := [name for name, offsets in self._open.items() if offsets]:
            return f"transactions of {some(undecided)} are open"
        committed = [n for n in self.log.acked if self.decisions.get(n) is COMMIT]
        got = self.log.got | {(self._group, name) for name in self._given_up}
        missing = [name for name in committed if (self._group, name) not in got]
        return f"{self._group} lacks committed {some(missing)}" if missing else ""


class TransactionSender(Client):
    def __init__(self, checker: Transactions, messages: Messages, number: int) -> None:
        super().__init__(checker.log.cluster, messages, "transactions", number)
        self._checker = checker

    async def run(self) -> None:
        producer = TransactionProducer(
            "Transactions",
            self._asked,
            name_servers=NAME_SERVERS,
            options=ProducerOptions(send_timeout_ms=SEND_MS),
            client_options=CLIENT_OPTIONS,
        )
        async with producer:
            await self._send_forever(producer)

    async def _send_forever(self, producer: TransactionProducer) -> None:
        """Also when all is sent: it is asked for what is undecided."""
        while True:
            await asyncio.sleep(self.rng.uniform(0.1, 0.4))
            if self._checker.log.stopping:
                continue
            name = self.new_name()
            try:
                await self._send(producer, name)
            except BatonError as error:
                self.world.tell(self.name, f"not sent: {error}")

    async def _send(self, producer: TransactionProducer, name: str) -> None:
        checker = self._checker
        state = self.rng.choice((COMMIT, COMMIT, ROLLBACK, UNKNOWN))
        checker.log.sent[name] = TOPIC

        def execute(_: Message) -> TransactionState:
            checker.log.acked.add(name)
            if state is not UNKNOWN:
                return checker.decisions.setdefault(name, state)
            return UNKNOWN

        message = Message.of(TOPIC, f"{name}|0|".encode() + b"." * 40, keys=name)
        if zlib.crc32(name.encode()) % 8 == 0:
            message.properties[CHECK_IMMUNITY_TIME_IN_SECONDS] = "9" * 5000  # R54
        result = await producer.send_in_transaction(message, execute)
        if result.ended and result.state is checker.decisions.get(name):
            checker.ended(name, result.send.queue_offset, result.state)

    def _asked(self, message: MessageExt) -> TransactionState:
        """What is undecided is so for a while, and is decided then."""
        name = message.body.partition(b"|")[0].decode()
        if name not in self._checker.decisions and self.rng.random() < 0.4:
            return UNKNOWN
        is_known = name in self._checker.log.acked
        drawn = self.rng.choice((COMMIT, ROLLBACK)) if is_known else ROLLBACK
        return self._checker.decisions.setdefault(name, drawn)
