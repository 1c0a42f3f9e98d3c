"""Passes requests that only the master may handle on to it, if they reach another replica.

A stock client uses the address in its route until its next poll, up to 30 s after a switch. So a
replica that is not master keeps such a request until it knows the master, sends it there over one
shared connection, and returns the reply under the client's opaque. Only the master acknowledges
(R1).

- One hop: a relayed request carries RELAY_FIELD, `EPOCH@HOST:PORT` (the masterEpoch that the relay
  knows, and the client's address). A slave, or a master of a lower epoch, refuses it.
- At most once: a request that a master may have taken is never sent again. If the master fails, the
  client gets SERVICE_NOT_AVAILABLE (14). Two cases prove that a request was not taken, so that it
  waits and is sent again: a refusal at the gate, marked NOT_STORED; and the last frame of a
  stopping master (BATON_CONNECTION_ENDS), which says how many requests of the connection it took.
- Requests of this project's own clients are refused with the master's address, since they find it
  themselves.

Waiting requests are bounded in number, bytes and time; further ones are refused.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import msgspec

from batonmq.broker.request_fields import invalid, number
from batonmq.broker.role_gate import RoleGate
from batonmq.protocol.codes import RELAY_FIELD, TAKEN_FIELD, LanguageCode, RequestCode, ResponseCode
from batonmq.protocol.errors import BatonError, ConnectError, RequestTimeoutError
from batonmq.protocol.numbers import host_and_port, natural_number
from batonmq.protocol.role_view import Role
from batonmq.remoting.command import RemotingCommand, decode_frame, encode_frame
from batonmq.remoting.connection import (
    OPAQUE_MAX,
    Connection,
    Handler,
    Processors,
    RawHandler,
    Response,
)
from batonmq.remoting.endpoint import RemotingClient
from batonmq.runtime.backoff import Backoff
from batonmq.runtime.tls import Dialling
from batonmq.runtime.turns import Pace

log = logging.getLogger(__name__)

RELAYED_CODES: Final = (
    RequestCode.QUERY_CONSUMER_OFFSET,
    RequestCode.UPDATE_CONSUMER_OFFSET,
    RequestCode.GET_CONSUMER_LIST_BY_GROUP,
    RequestCode.CONSUMER_SEND_MSG_BACK,
    RequestCode.GET_CONSUME_STATS,
    RequestCode.INVOKE_BROKER_TO_RESET_OFFSET,
    RequestCode.LOCK_BATCH_MQ,
    RequestCode.SEND_REPLY_MESSAGE,
    RequestCode.SEND_REPLY_MESSAGE_V2,
    RequestCode.UNLOCK_BATCH_MQ,
    RequestCode.UPDATE_AND_CREATE_TOPIC,
    RequestCode.UPDATE_AND_CREATE_TOPIC_LIST,
    RequestCode.DELETE_TOPIC_IN_BROKER,
    RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP,
    RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST,
    RequestCode.DELETE_SUBSCRIPTIONGROUP,
    RequestCode.UPDATE_AND_GET_GROUP_FORBIDDEN,
    RequestCode.CLEAN_UNUSED_TOPIC,
    RequestCode.CLONE_GROUP_OFFSET,
    RequestCode.RESUME_CHECK_HALF_MESSAGE,
    RequestCode.END_TRANSACTION,
    RequestCode.RECALL_MESSAGE,
    RequestCode.QUERY_ASSIGNMENT,
    RequestCode.SET_MESSAGE_REQUEST_MODE,
    RequestCode.POP_MESSAGE,
    RequestCode.PEEK_MESSAGE,
    RequestCode.NOTIFICATION,
    RequestCode.POLLING_INFO,
    RequestCode.ACK_MESSAGE,
    RequestCode.BATCH_ACK_MESSAGE,
    RequestCode.CHANGE_MESSAGE_INVISIBLETIME,
    RequestCode.AUTH_CREATE_USER,
    RequestCode.AUTH_UPDATE_USER,
    RequestCode.AUTH_DELETE_USER,
    RequestCode.AUTH_CREATE_ACL,
    RequestCode.AUTH_UPDATE_ACL,
    RequestCode.AUTH_DELETE_ACL,
    RequestCode.BATON_ROTATE_USER,
)
"""Only the master handles these. Sends and pulls are not listed: their raw handlers call the
relay."""

SENDS: Final = (
    RequestCode.SEND_MESSAGE,
    RequestCode.SEND_MESSAGE_V2,
    RequestCode.SEND_BATCH_MESSAGE,
)
PULL_CODES: Final = (RequestCode.PULL_MESSAGE, RequestCode.LITE_PULL_MESSAGE)
LONG_POLLS: Final = (*PULL_CODES, RequestCode.POP_MESSAGE, RequestCode.NOTIFICATION)
"""Answered when a message arrives."""
WAIT_MS: Final = 2500
"""How long a request waits for a master: less than the 3 s after which a stock client gives up."""
ANSWER_MS: Final = 3000
PULL_ANSWER_MS: Final = 35_000
"""Longer than the 30 s for which a stock client waits for a held pull."""
NOT_STORED: Final = {RELAY_FIELD: "refused"}
"""extFields of a relayed request's refusal at the gate."""
LOST_WAIT_MS: Final = 1000
"""How long a lost request waits until another master is known."""
SETTLE_S: Final = 0.3
"""How long a stopping broker waits for the master's replies."""
PAUSE_FIRST_MS: Final = 25
PAUSE_MAX_MS: Final = 200
HELD_MAX: Final = 20_000
HELD_BYTES_MAX: Final = 64 << 20
SLICE: Final = 500
"""Waiting requests that are handled in one turn of the loop."""

NO_MASTER = "this broker is not the master, and no master of its group answered in time"
MASTER_GONE = "the master went away before it answered: send it again"
STOPPING = "this broker is stopping"


def relayed_by(field: str) -> tuple[int, str]:
    """(masterEpoch, the client's "host:port") of a RELAY_FIELD. Raises BrokerRefusal."""
    text, _, client = field.partition("@")
    epoch = natural_number(text)
    if epoch is None or host_and_port(client) is None:
        raise invalid(f"{RELAY_FIELD} is {field[:64]!r}, allowed is EPOCH@HOST:PORT")
    return epoch, client


def relay_asks(request: RemotingCommand, channel: Connection) -> RemotingCommand:
    """Another replica asks how many of its requests this one took, to be answered when this one
    stops."""

    def farewell(taken: int) -> RemotingCommand:
        return RemotingCommand.request(RequestCode.BATON_CONNECTION_ENDS, {TAKEN_FIELD: str(taken)})

    channel.farewell = farewell
    return RemotingCommand.response_to(request)


@dataclass(slots=True, eq=False)
class RelayedRequest:
    """A client's request. `again` calls this broker's own handler. `for_any_role`: a slave can
    answer it, too, so it waits for any role."""

    channel: Connection
    request: RemotingCommand
    again: Callable[[], None]
    deadline_ms: int
    answer_ms: int
    for_any_role: bool
    epoch: int = 0
    """Only a master of at least this masterEpoch may take it."""
    size: int = 0
    """Bytes of the request."""
    is_lost: bool = False
    """The master failed and may have taken it. It is refused only once there is another master, so
    that the immediate retry of a stock client finds that one."""


@dataclass(frozen=True, slots=True)
class PassedRequest:
    """Where a request was sent: to the master of `epoch`."""

    connection: Connection
    epoch: int
    opaque: int

    @property
    def is_taken(self) -> bool:
        """False only if the master said so. The n-th frame on the connection has the opaque n."""
        taken = self.connection.attachments.get(TAKEN_FIELD)
        return not isinstance(taken, int) or (taken - self.opaque) & OPAQUE_MAX <= OPAQUE_MAX // 2


class Relay:
    """Keeps requests until a master is known, then passes them on."""

    def __init__(
        self,
        gate: RoleGate,
        clock_ms: Callable[[], int],
        *,
        enabled: bool,
        tls: Dialling | None = None,
        sign: Callable[[RemotingCommand], None] | None = None,
    ) -> None:
        """`sign` signs the relay's own requests to a master; clients' requests stay unchanged."""
        self._sign = sign
        self.enabled = enabled
        self.passed_on = 0
        self.refused = 0
        self._gate = gate
        gate.changed = self.role_changed
        processors = Processors()
        processors.register(RequestCode.BATON_CONNECTION_ENDS, self._master_stops)
        self._client = RemotingClient(processors, name="broker-relay", tls=tls)
        self._clock_ms = clock_ms
        self._waiting: deque[RelayedRequest] = deque()
        self._held = 0
        self._held_bytes = 0
        self._settled: asyncio.Event | None = None
        self._next_slice: asyncio.Handle | None = None
        self._pause: asyncio.TimerHandle | None = None
        self._pauses = Backoff(PAUSE_FIRST_MS, PAUSE_MAX_MS)
        self._dials: dict[str, asyncio.Task[None]] = {}
        self._due: deque[RelayedRequest] = deque()
        self._is_closing = False

    def __len__(self) -> int:
        """The number of requests that wait here or for the master's reply."""
        return self._held

    def stand_before(self, processors: Processors) -> None:
        """Puts the relay before the handlers of RELAYED_CODES, which then run only on the
        master."""
        for code in RELAYED_CODES:
            processors.handlers[code] = self._before(processors.handlers[code])
        processors.register(RequestCode.BATON_CONNECTION_ENDS, relay_asks)

    def _master_stops(self, request: RemotingCommand, channel: Connection) -> None:
        channel.attachments[TAKEN_FIELD] = number(request, TAKEN_FIELD)
        channel.close("the master ends it")

    def _before(self, handler: Handler) -> Handler:
        def handle(request: RemotingCommand, channel: Connection) -> Response:
            if self.take(channel, request):
                return None
            refusal = self._gate.refusal
            if refusal is not None and RELAY_FIELD in request.ext and not self._gate.is_master:
                code, remark = refusal.code, refusal.remark
                return RemotingCommand.response_to(request, code, remark, ext=NOT_STORED)
            return handler(request, channel)  # type: ignore[return-value]

        return handle

    def take(self, channel: Connection, request: RemotingCommand) -> bool:
        """Takes a request of RELAYED_CODES. False: this broker must answer it, perhaps with a
        refusal."""
        if self._gate.is_master or not self._may_take(request):
            return False
        answer_ms = PULL_ANSWER_MS if request.code in LONG_POLLS else ANSWER_MS
        self._take(channel, request, partial(channel.handle, request), answer_ms)
        return True

    def take_raw(
        self,
        channel: Connection,
        handler: RawHandler,
        kind: int,
        header: bytes,
        body: bytes,
        *,
        for_any_role: bool = False,
    ) -> bool:
        """Takes a request that a raw handler cannot answer. False: the handler must refuse it."""
        if self._gate.is_master or not self.enabled:
            return False
        request = decode_frame(header, body, kind)
        if not self._may_take(request):
            return False
        again = partial(channel.handle_again, handler, kind, header, body)
        answer_ms = PULL_ANSWER_MS if request.code in PULL_CODES else ANSWER_MS
        self._take(channel, request, again, answer_ms, for_any_role=for_any_role)
        return True

    def _may_take(self, request: RemotingCommand) -> bool:
        return (
            self.enabled
            # A broker that stops still passes requests on, if it knows the next master.
            and (not self._gate.is_stopping or self._knows_master)
            # Our own client finds the master by itself.
            and request.language != LanguageCode.PYTHON
            # One hop only: two replicas that take each other for the master would pass it on
            # endlessly.
            and RELAY_FIELD not in request.ext
            and self._held < HELD_MAX
            and self._held_bytes + request.size <= HELD_BYTES_MAX
        )

    @property
    def _knows_master(self) -> bool:
        return self._gate.refusal is not None and bool(self._gate.refusal.master_address)

    def _take(
        self,
        channel: Connection,
        request: RemotingCommand,
        again: Callable[[], None],
        answer_ms: int,
        *,
        for_any_role: bool = False,
    ) -> None:
        asked = RelayedRequest(
            channel, request, again, self._clock_ms() + WAIT_MS, answer_ms, for_any_role
        )
        # As in `close`: without a reply a stock client retries a send elsewhere.
        if self._is_closing and request.code in SENDS:
            return
        asked.size = request.size
        self._held += 1
        self._held_bytes += asked.size
        self._handle(asked)

    def role_changed(self) -> None:
        """The role or the known master changed: handles waiting requests again."""
        self._pauses.reset()
        self._handle_waiting_soon()

    def _handle_waiting_soon(self) -> None:
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None
        if self._waiting and self._next_slice is None:
            loop = asyncio.get_running_loop()
            self._next_slice = loop.call_soon(self._slice, len(self._waiting))

    def _slice(self, left: int) -> None:
        self._next_slice = None
        for _ in range(min(left, SLICE, len(self._waiting))):
            self._handle(self._waiting.popleft())
        if left > SLICE:
            loop = asyncio.get_running_loop()
            self._next_slice = loop.call_soon(self._slice, left - SLICE)

    def tick(self, now_ms: int) -> bool:
        """Refuses a slice of the late requests; returns whether there may be more. They are almost
        in order of their deadlines."""
        for _ in range(SLICE):
            if not self._waiting or self._waiting[0].deadline_ms > now_ms:
                return False
            asked = self._waiting.popleft()
            self._refuse(asked, MASTER_GONE if asked.is_lost else NO_MASTER)
        return True

    async def close(self) -> None:
        """Refuses all waiting requests except sends, and waits SETTLE_S for replies of the
        master."""
        self._is_closing = True
        pace = Pace(SLICE)
        while self._waiting:
            asked = self._waiting.popleft()
            # Sends get no reply: when their connection ends, a stock client retries an asynchronous
            # send elsewhere; after a refusal it does not.
            if asked.request.code in SENDS and not asked.is_lost:
                self._release(asked)
            else:
                self._refuse(asked, STOPPING)
            await pace.step()
        self._handle_waiting_soon()
        if self._held:
            self._settled = asyncio.Event()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SETTLE_S):
                    await self._settled.wait()
        for dial in self._dials.values():
            dial.cancel()
        await asyncio.gather(*self._dials.values(), return_exceptions=True)
        await self._client.close()

    def _handle(self, asked: RelayedRequest, *, is_due: bool = False) -> None:
        """Passes the request on, answers it here, refuses it, or lets it wait."""
        gate = self._gate
        if asked.channel.closed:
            self._release(asked)
        elif asked.is_lost:
            if gate.master_epoch < asked.epoch:
                self._waiting.append(asked)
            else:
                self._refuse(asked, MASTER_GONE)
        elif gate.refusal is None or (asked.for_any_role and gate.role is Role.SLAVE):
            self._release(asked)
            asked.again()
        # A master that refuses writes: there is no other one to pass the request to.
        elif gate.is_master or (gate.is_stopping and not self._knows_master):
            self._refuse(asked, gate.refusal.remark)
        elif not gate.refusal.master_address or gate.refusal.master_epoch < asked.epoch:
            self._waiting.append(asked)
        elif is_due:
            self._pass_on(asked, gate.refusal.master_address, gate.refusal.master_epoch)
        else:
            self._pass_on_soon(asked)

    def _pass_on_soon(self, asked: RelayedRequest) -> None:
        """Passes it on two turns later. If the master has just died, the end of its connection may
        have arrived together with this client's retry. It must be handled first, because a request
        written to a dead connection counts as possibly taken."""
        self._due.append(asked)
        if len(self._due) == 1:
            asyncio.get_running_loop().call_soon(self._next_turn)

    def _next_turn(self) -> None:
        """Requests that arrive from now on are due a turn later."""
        due, self._due = self._due, deque()
        asyncio.get_running_loop().call_soon(self._pass_on_due, due)

    def _pass_on_due(self, due: deque[RelayedRequest]) -> None:
        try:
            for _ in range(min(SLICE, len(due))):
                self._handle(due.popleft(), is_due=True)
        finally:
            if due:
                asyncio.get_running_loop().call_soon(self._pass_on_due, due)

    def _pass_on(self, asked: RelayedRequest, address: str, epoch: int) -> None:
        connection = self._client.live_connection(address)
        # After a refusal by the master, or a failed dial, it pauses.
        if connection is None or self._pause is not None:
            self._waiting.append(asked)
            if connection is None:
                self._dial(address)
            return
        field = {RELAY_FIELD: f"{epoch}@{asked.channel.peer}"}
        request = msgspec.structs.replace(
            asked.request, ext=asked.request.ext | field, has_ext=True
        )
        self.passed_on += 1
        try:
            if request.is_oneway:
                connection.oneway(request)
                self._release(asked)  # no reply will come
                return
            answer = connection.request(request, asked.answer_ms)
        except ConnectError:  # it closed in this turn, and nothing was sent
            self._waiting.append(asked)
            self._dial(address)
            return
        except BatonError as error:
            self._refuse(asked, str(error))
            return
        passed = PassedRequest(connection, epoch, request.opaque)
        answer.add_done_callback(partial(self._answered, asked, passed))

    def _answered(
        self, asked: RelayedRequest, passed: PassedRequest, answer: asyncio.Future[RemotingCommand]
    ) -> None:
        # The master may have taken it: sending it again could store it twice.
        if answer.cancelled() or isinstance(answer.exception(), RequestTimeoutError):
            self._refuse(asked, MASTER_GONE)
            return
        if answer.exception() is not None:
            if not passed.is_taken:
                self._again_in_a_moment(asked)
            elif self._is_closing:
                self._release(asked)
            else:
                asked.is_lost, asked.epoch = True, passed.epoch + 1
                asked.deadline_ms = self._clock_ms() + LOST_WAIT_MS
                self._handle(asked)
            return
        response = answer.result()
        # Refused at the master's gate: nothing was stored.
        if RELAY_FIELD in response.ext:
            self._again_in_a_moment(asked)
            return
        self._pauses.reset()
        self._release(asked)
        response.opaque = asked.request.opaque
        asked.channel.write(encode_frame(response))

    def _dial(self, address: str) -> None:
        if address not in self._dials:
            dial = asyncio.create_task(self._connect(address), name="relay-dial")
            self._dials[address] = dial
            dial.add_done_callback(lambda _: self._dials.pop(address))

    async def _connect(self, address: str) -> None:
        try:
            connection = await self._client.connection(address, timeout_ms=WAIT_MS)
            # So that the master says, before it ends this connection, how many requests it took.
            hello = RemotingCommand.request(RequestCode.BATON_CONNECTION_ENDS)
            if self._sign is not None:
                self._sign(hello)
            connection.oneway(hello)
        except ConnectError as error:
            log.debug("relay_not_connected address=%s reason=%s", address, error)
            self._wait_a_moment()
        else:
            self._handle_waiting_soon()

    def _again_in_a_moment(self, asked: RelayedRequest) -> None:
        self._waiting.append(asked)
        self._wait_a_moment()

    def _wait_a_moment(self) -> None:
        """Tries waiting requests again after a pause, or when the role changes, whichever is
        first."""
        if self._pause is None:
            loop = asyncio.get_running_loop()
            self._pause = loop.call_later(self._pauses.next_ms() / 1000, self._handle_waiting_soon)

    def _refuse(self, asked: RelayedRequest, remark: str) -> None:
        self.refused += 1
        self._release(asked)
        code = ResponseCode.SERVICE_NOT_AVAILABLE
        asked.channel.reply(asked.request, RemotingCommand.response_to(asked.request, code, remark))

    def _release(self, asked: RelayedRequest) -> None:
        self._held -= 1
        self._held_bytes -= asked.size
        if self._settled is not None and not self._held:
            self._settled.set()
