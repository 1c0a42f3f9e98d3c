"""The transaction producer against scripted brokers: the half, its end, and answers to checks."""

import contextlib
import zlib
from collections.abc import AsyncIterator, Callable

import pytest
from fake_cluster import FakeCluster, answer, open_cluster

from batonmq import (
    ClientOptions,
    Message,
    MessageExt,
    MessageIllegalError,
    TransactionProducer,
    TransactionState,
)
from batonmq.protocol.codes import RequestCode, ResponseCode
from batonmq.protocol.message_id import decode_offset_msg_id
from batonmq.protocol.properties import decode_properties
from batonmq.protocol.sysflag import COMPRESSED, COMPRESSION_ZLIB
from batonmq.remoting.command import RemotingCommand
from batonmq.remoting.connection import Connection
from tests.records import record_of
from tests.shared.waiting import until

END = RequestCode.END_TRANSACTION
SEND = RequestCode.SEND_MESSAGE_V2


@contextlib.asynccontextmanager
async def producing(
    check: Callable[[MessageExt], TransactionState] | None = None,
) -> AsyncIterator[tuple[FakeCluster, TransactionProducer]]:
    async with open_cluster() as cluster:
        check = check or (lambda message: TransactionState.UNKNOWN)
        names = cluster.name_server_addresses
        async with TransactionProducer("tg", check, name_servers=names) as producer:
            yield cluster, producer


def ends(cluster: FakeCluster) -> list[dict[str, str]]:
    return [one.ext for one in cluster.master().requests if one.code == END]


async def test_the_local_transaction_runs_between_the_half_and_its_end() -> None:
    async with producing() as (cluster, producer):
        seen: list[int] = []

        def local(message: Message) -> TransactionState:
            seen.extend(cluster.master().codes())
            return TransactionState.COMMIT

        cluster.master().before[END].append(answer(ResponseCode.SUCCESS, ""))
        result = await producer.send_in_transaction(Message.of("T", "x", tags="A"), local)
        assert SEND in seen and END not in seen
        assert result.ended and result.state is TransactionState.COMMIT
        (sent,) = (one for one in cluster.master().requests if one.code == SEND)
        properties = decode_properties(sent.ext["i"])
        assert (properties["TRAN_MSG"], properties["PGROUP"]) == ("true", "tg")
        assert int(sent.ext["f"]) & 0xC == 4
        (end,) = ends(cluster)
        _, offset = decode_offset_msg_id(result.send.offset_msg_id)
        assert end["commitOrRollback"] == "8" and end["fromTransactionCheck"] == "false"
        assert end["commitLogOffset"] == str(offset) and end["producerGroup"] == "tg"
        assert end["tranStateTableOffset"] == str(result.send.queue_offset)


async def test_what_the_local_transaction_raises_rolls_back_and_reaches_the_caller() -> None:
    async with producing() as (cluster, producer):

        async def local(message: Message) -> TransactionState:
            raise KeyError("no stock")

        cluster.master().before[END].append(answer(ResponseCode.SUCCESS, ""))
        with pytest.raises(KeyError):
            await producer.send_in_transaction(Message.of("T", "x"), local)
        assert [end["commitOrRollback"] for end in ends(cluster)] == ["12"]


async def test_unknown_and_a_refused_end_are_left_to_the_check() -> None:
    async with producing() as (cluster, producer):
        unknown = await producer.send_in_transaction(
            Message.of("T", "x"), lambda _: TransactionState.UNKNOWN
        )
        assert not unknown.ended and not ends(cluster)
        cluster.master().before[END].append(answer(ResponseCode.SYSTEM_ERROR, "ended already"))
        refused = await producer.send_in_transaction(
            Message.of("T", "x"), lambda _: TransactionState.COMMIT
        )
        assert not refused.ended


async def test_a_half_that_is_not_acknowledged_is_rolled_back_and_nothing_runs() -> None:
    async with producing() as (cluster, producer):
        master = cluster.master()

        async def slow(request: RemotingCommand, connection: Connection) -> RemotingCommand:
            stored = await master.serve(request, connection)
            stored.code = ResponseCode.FLUSH_SLAVE_TIMEOUT
            return stored

        master.before[SEND].append(slow)
        master.before[END].append(answer(ResponseCode.SUCCESS, ""))
        result = await producer.send_in_transaction(
            Message.of("T", "x"), lambda _: pytest.fail("it must not run")
        )
        assert result.state is TransactionState.ROLLBACK and ends(cluster)


@pytest.mark.parametrize("name", ["DELAY", "TIMER_DELAY_SEC", "TIMER_DELAY_MS", "TIMER_DELIVER_MS"])
async def test_a_delay_is_refused_where_it_is_given(name: str) -> None:
    async with producing() as (cluster, producer):
        message = Message("T", b"x", properties={name: "3"})
        with pytest.raises(MessageIllegalError, match=name):
            await producer.send_in_transaction(message, lambda _: TransactionState.COMMIT)
        assert 310 not in cluster.master().codes()


def half_record(group: str) -> bytes:
    return record_of(
        topic=b"T", queue_id=1, queue_offset=7, physical_offset=900, body=zlib.compress(b"half"),
        sys_flag=COMPRESSED | COMPRESSION_ZLIB, born_timestamp=1, born_host=bytes(8),
        store_timestamp=2, store_host=bytes(8),
        properties=f"PGROUP\x01{group}\x02UNIQ_KEY\x01K1\x02".encode(), append_prop_crc=False,
    )  # fmt: skip


async def ask(cluster: FakeCluster, producer: TransactionProducer, group: str) -> None:
    """39, as a broker sends it on the producer's own connection."""
    await producer.send(Message.of("T", "so that it is connected"))
    ext = {"tranStateTableOffset": "7", "commitLogOffset": "900", "msgId": "K1"}
    request = RemotingCommand.request(RequestCode.CHECK_TRANSACTION_STATE, ext, half_record(group))
    for connection in cluster.master().connections:
        connection.oneway(request)


async def test_a_check_is_answered_from_what_the_application_knows() -> None:
    asked: list[MessageExt] = []

    def check(message: MessageExt) -> TransactionState:
        asked.append(message)
        return TransactionState.COMMIT

    async with producing(check) as (cluster, producer):
        await ask(cluster, producer, "tg")
        await until(lambda: bool(ends(cluster)))
        (end,) = ends(cluster)
        assert (end["commitOrRollback"], end["fromTransactionCheck"]) == ("8", "true")
        assert (end["tranStateTableOffset"], end["commitLogOffset"]) == ("7", "900")
        assert (asked[0].body, asked[0].queue_offset, asked[0].topic) == (b"half", 7, "T")


async def test_a_check_that_fails_answers_unknown_and_one_of_another_group_nothing() -> None:
    asked: list[str] = []

    def check(message: MessageExt) -> TransactionState:
        asked.append(message.properties["PGROUP"])
        raise OSError("the database is away")

    async with producing(check) as (cluster, producer):
        await ask(cluster, producer, "other")
        await ask(cluster, producer, "tg")
        await until(lambda: bool(ends(cluster)))
        assert asked == ["tg"]
        assert [end["commitOrRollback"] for end in ends(cluster)] == ["0"]


async def test_a_restarted_producer_is_known_to_brokers_before_it_sends(
    cluster: FakeCluster,
) -> None:
    """Else no broker asks it for what the one before it left undecided."""
    async with TransactionProducer(
        "tg",
        lambda message: TransactionState.UNKNOWN,
        name_servers=cluster.name_server_addresses,
        client_options=ClientOptions(route_poll_ms=5, heartbeat_ms=5),
    ):
        await until(lambda: RequestCode.HEART_BEAT in cluster.master().codes())


async def test_an_end_that_cannot_be_sent_is_no_error_of_the_caller() -> None:
    """The local transaction was committed: the broker asks for it."""
    async with producing() as (_, producer):

        async def local(message: Message) -> TransactionState:
            await producer.close()
            return TransactionState.COMMIT

        result = await producer.send_in_transaction(Message.of("T", "x"), local)
        assert result.state is TransactionState.COMMIT and not result.ended
