"""Transactions: consumers see a message only if a local transaction was committed.

First the half message is stored, then the local transaction runs, then its outcome is sent to the
broker. If the outcome is unknown or lost, the broker asks any producer of the group
(CHECK_TRANSACTION_STATE, 39), and `check` must find the outcome in what the application stored.
`check` may run in another process, and more than once. Origin: TransactionMQProducer,
DefaultMQProducerImpl.
"""

import enum
import inspect
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, replace

from batonmq.client.arguments import check_call, check_send
from batonmq.client.consumer.pulling import for_reader
from batonmq.client.errors import MessageIllegalError
from batonmq.client.failures import Failures
from batonmq.client.instance.client_instance import ClientInstance
from batonmq.client.instance.connections import ClientOptions
from batonmq.client.producer.producer import Producer, ProducerOptions, QueueSelector
from batonmq.client.producer.sending import SendResult
from batonmq.protocol import properties as names
from batonmq.protocol.codes import RequestCode
from batonmq.protocol.errors import BatonError
from batonmq.protocol.message import Message, MessageExt, MessageQueue
from batonmq.protocol.message_id import decode_offset_msg_id
from batonmq.protocol.records.codec import decode_record
from batonmq.protocol.records.faults import CorruptRecord
from batonmq.protocol.sysflag import TRANSACTION_COMMIT, TRANSACTION_PREPARED, TRANSACTION_ROLLBACK
from batonmq.remoting.command import RemotingCommand
from batonmq.runtime.clock import boot_ms

log = logging.getLogger(__name__)

_WAITS = (names.DELAY, names.TIMER_DELAY_SEC, names.TIMER_DELAY_MS, names.TIMER_DELIVER_MS)


class TransactionState(enum.IntEnum):
    """The outcome of a local transaction. `UNKNOWN`: the broker will ask later."""

    UNKNOWN = 0
    COMMIT = TRANSACTION_COMMIT
    ROLLBACK = TRANSACTION_ROLLBACK


LocalTransaction = Callable[[Message], TransactionState | Awaitable[TransactionState]]
"""Runs the local transaction. If it raises, the message is rolled back, and the caller gets the
error."""
TransactionCheck = Callable[[MessageExt], TransactionState | Awaitable[TransactionState]]
"""Returns the outcome of a message's local transaction. An exception counts as UNKNOWN."""


@dataclass(frozen=True, slots=True)
class TransactionResult:
    """`send`: the result for the half message. `ended`: the broker confirmed the end; if not, its
    check decides."""

    send: SendResult
    state: TransactionState
    ended: bool


class TransactionProducer(Producer):
    """`async with TransactionProducer("group", check, name_servers="host:9876") as producer: ...`

    It can also send ordinary messages."""

    def __init__(
        self,
        group: str,
        check: TransactionCheck,
        *,
        name_servers: str | Sequence[str] | None = None,
        options: ProducerOptions | None = None,
        client: ClientInstance | None = None,
        client_options: ClientOptions | None = None,
    ) -> None:
        """Errors as `Producer`, and ArgumentError for a bad `check`."""
        check_call("check", check, ("message",))
        super().__init__(
            group,
            name_servers=name_servers,
            options=options,
            client=client,
            client_options=client_options,
        )
        self._check = check
        self._failures = Failures("transaction_check_failed")

    async def send_in_transaction(
        self,
        message: Message,
        execute: LocalTransaction,
        *,
        queue: MessageQueue | None = None,
        selector: QueueSelector | None = None,
        timeout_ms: int | None = None,
    ) -> TransactionResult:
        """Stores the half message, runs `execute`, and ends the transaction with its result.

        If the half message is not acknowledged, it is rolled back and `execute` does not run.
        `timeout_ms` applies to the half message and again to the end. Raises MessageIllegalError
        for a delayed message, and as `send`."""
        check_send([message], queue, timeout_ms)
        check_call("execute", execute, ("message",))
        waits = [name for name in _WAITS if message.properties.get(name, "0") != "0"]
        if waits:
            raise MessageIllegalError(f"a message of a transaction cannot be delayed ({waits[0]})")
        properties = {**message.properties, names.TRAN_MSG: "true", names.PGROUP: self.group}
        half = Message(message.topic, message.body, properties=properties, flag=message.flag)

        async def send(messages: Sequence[Message]) -> SendResult:
            ready = self._outgoing(messages[0], self._ids.next)
            ready = replace(ready, sys_flag=ready.sys_flag | TRANSACTION_PREPARED)
            return await self._send(ready, self._chooser(message, queue, selector), timeout_ms)

        sent = await self._observed([half], send)
        if not sent.acknowledged:
            # It may be stored nevertheless, and the broker would ask about it for a long time.
            return await self._end(sent, TransactionState.ROLLBACK, timeout_ms)
        try:
            state = await _state_of(execute(message))
        except BaseException:  # also if cancelled: only this call knows the outcome
            await self._end(sent, TransactionState.ROLLBACK, timeout_ms)
            raise
        return await self._end(sent, state, timeout_ms)

    async def _end(
        self, sent: SendResult, state: TransactionState, timeout_ms: int | None
    ) -> TransactionResult:
        if state is TransactionState.UNKNOWN:
            return TransactionResult(sent, state, ended=False)
        _, phy_offset = decode_offset_msg_id(sent.offset_msg_id)
        request = self._end_request(state, sent.queue_offset, phy_offset, sent.msg_id)
        try:
            deadline_ms = boot_ms() + self._limit_ms(timeout_ms)
            topic, name = sent.queue.topic, sent.queue.broker_name
            await self._client.masters.call(topic, name, request, deadline_ms=deadline_ms)
        # No error of the caller: the half message is safe, and the broker will ask.
        except BatonError as error:
            log.warning("transaction_not_ended msg_id=%s reason=%s", sent.msg_id, error)
            return TransactionResult(sent, state, ended=False)
        return TransactionResult(sent, state, ended=True)

    def _end_request(
        self,
        state: TransactionState,
        queue_offset: int,
        phy_offset: int,
        msg_id: str,
        *,
        from_check: bool = False,
    ) -> RemotingCommand:
        return RemotingCommand.request(
            RequestCode.END_TRANSACTION,
            {
                "producerGroup": self.group,
                "tranStateTableOffset": str(queue_offset),
                "commitLogOffset": str(phy_offset),
                "commitOrRollback": str(state.value),
                "fromTransactionCheck": str(from_check).lower(),
                "msgId": msg_id,
                "transactionId": msg_id,
            },
        )

    def topics(self) -> Collection[str]:
        """Includes the template topic, so that a restarted producer knows brokers before it sends:
        they must be able to ask it about open transactions of its group."""
        return {*super().topics(), self.options.default_topic}

    def transaction_asked(self, request: RemotingCommand, address: str) -> None:
        """A broker asks for the state of a transaction. Requests for other groups are ignored."""
        try:
            message = decode_record(request.body)
        except CorruptRecord as error:
            log.warning("transaction_check_unreadable address=%s reason=%s", address, error)
            return
        if message.properties.get(names.PGROUP) == self.group:
            for_reader(message, "")
            # A check may take long, and the connection's other frames must not wait for it.
            self._client.spawn(self._answer(message, request, address))

    async def _answer(self, message: MessageExt, request: RemotingCommand, address: str) -> None:
        try:
            state = await _state_of(self._check(message))
        except Exception as error:
            self._failures.note(error, f"group={self.group}")
            state = TransactionState.UNKNOWN
        end = self._end_request(
            state,
            request.get_int("tranStateTableOffset", -1),
            request.get_int("commitLogOffset", -1),
            request.ext.get("msgId", ""),
            from_check=True,
        )
        try:
            # Without a reply: if this is lost, the broker asks again.
            await self._client.remoting.oneway(address, end)
        except BatonError as error:
            log.info("transaction_check_unanswered address=%s reason=%s", address, error)


async def _state_of(result: TransactionState | Awaitable[TransactionState]) -> TransactionState:
    """Raises TypeError for anything but a TransactionState."""
    state = await result if inspect.isawaitable(result) else result
    if not isinstance(state, TransactionState):
        raise TypeError(f"a TransactionState is needed, not {state!r}")
    return state
