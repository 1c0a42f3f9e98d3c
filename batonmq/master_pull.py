"""One pull at a queue's master, whoever that is by then: bridges a failover up to a deadline."""

import asyncio
from dataclasses import dataclass, replace

from batonmq.broker_calls import PullRequest
from batonmq.client_instance import ClientInstance
from batonmq.clock import boot_ms
from batonmq.errors import NoMasterError, NoNameServerError
from batonmq.pull_result import STATUS_BY_CODE, PullStatus
from batonmq.push_options import HELD_CHECK_MS
from batonmq.retry import means_not_master, pause_ms
from protocol.errors import ConnectError, RequestTimeoutError, ResponseError
from protocol.message import MessageQueue
from remoting.command import RemotingCommand

SUSPEND_MS = 15_000


@dataclass(frozen=True, slots=True)
class PulledRecords:
    """An answer whose messages were not taken apart: `records` are whole records of the log, one
    behind the other, as stored (compressed, and of any tag with the wanted hash). The other
    fields are those of `PullResult`."""

    status: PullStatus
    next_begin_offset: int
    min_offset: int
    max_offset: int
    records: bytes


async def pull_at_master(
    client: ClientInstance, request: PullRequest, *, deadline_ms: int, block: bool = False
) -> tuple[RemotingCommand, str]:
    """The answer of the queue's master, and its address. Retries until the deadline.

    `block`: an empty pull is held by the broker until something comes. Raises NoMasterError with
    the last reason, NoRouteError. A refusal that has nothing to do with who is master comes back.
    """
    failures = 0
    address: str | None = None
    while True:
        left_ms = max(deadline_ms - boot_ms(), 1)
        suspend_ms = min(SUSPEND_MS, max(left_ms - 200, 1)) if block else 0
        try:
            address = await _master(client, request.queue, deadline_ms, address)
            reply = await client.invoke_master(
                request.queue.topic,
                request.queue.broker_name,
                address,
                replace(request, suspend_ms=suspend_ms).command(),
                left_ms,
                held_check_ms=HELD_CHECK_MS if block else None,
            )
        except (ConnectError, RequestTimeoutError, NoNameServerError, NoMasterError) as error:
            why = str(error)
        else:
            if not means_not_master(reply.code):
                return reply, address
            why = f"{address} answers {reply.code} {reply.remark or ''}"
        failures += 1
        pause = pause_ms(failures)
        if boot_ms() + pause >= deadline_ms:
            raise NoMasterError(request.queue.broker_name, why)
        await asyncio.sleep(pause / 1000)


async def pull_records(
    client: ClientInstance, request: PullRequest, *, deadline_ms: int
) -> PulledRecords:
    """As `pull_at_master`, the messages left as records. Raises ResponseError for refusals."""
    reply, address = await pull_at_master(client, request, deadline_ms=deadline_ms)
    status = STATUS_BY_CODE.get(reply.code)
    if status is None:
        raise ResponseError(reply.code, reply.remark, address)
    return PulledRecords(
        status=status,
        next_begin_offset=int(reply.ext["nextBeginOffset"]),
        min_offset=int(reply.ext["minOffset"]),
        max_offset=int(reply.ext["maxOffset"]),
        records=bytes(reply.body) if status is PullStatus.FOUND else b"",
    )


async def _master(
    client: ClientInstance, queue: MessageQueue, deadline_ms: int, failed_at: str | None
) -> str:
    if failed_at is None:
        route = await client.route(queue.topic, deadline_ms=deadline_ms)
    else:
        route = await client.refresh_route(
            queue.topic, deadline_ms=deadline_ms, suspects=(failed_at,)
        )
    address = route.master_address(queue.broker_name)
    if address is None:
        route = await client.refresh_route(queue.topic, deadline_ms=deadline_ms)
        address = route.master_address(queue.broker_name)
    if address is None:
        raise NoMasterError(queue.broker_name)
    return address
