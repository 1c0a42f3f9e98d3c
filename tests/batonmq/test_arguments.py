"""Wrong types, addresses and expressions are refused where they are given, by name."""

from collections.abc import Callable
from typing import Any

import pytest
from fake_cluster import open_cluster

from batonmq import (
    ArgumentError,
    ClientError,
    ClientOptions,
    ConsumeFromWhere,
    ConsumeOptions,
    LitePullConsumer,
    LitePullOptions,
    Message,
    MessageModel,
    MessageQueue,
    PopConsumer,
    Producer,
    ProducerOptions,
    PullConsumer,
    PullOptions,
    PushConsumer,
    PushConsumerOptions,
    TopicConfig,
    TransactionProducer,
)

TOPIC = "T"
NAMES = "127.0.0.1:9876"
Q0 = MessageQueue(TOPIC, "broker-a", 0)


async def listener(messages: object, context: object) -> None:
    return None


def new(kind: Callable[..., Any], *arguments: object, **named: object) -> Callable[[], Any]:
    return lambda: kind(*arguments, **{"name_servers": NAMES, **named})


def subscribed(*arguments: object, **named: Any) -> Callable[[], Any]:
    return lambda: PushConsumer("g", listener, name_servers=NAMES).subscribe(*arguments, **named)


def broadcasting(group: str, instance: str) -> Callable[[], Any]:
    options = PushConsumerOptions(model=MessageModel.BROADCASTING)
    client = ClientOptions(instance_name=instance)
    return new(PushConsumer, group, listener, options=options, client_options=client)


def message(**named: Any) -> Callable[[], Any]:
    return lambda: Message.of(**{"topic": TOPIC, "body": b"x", **named})


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (new(Producer, "g", name_servers="nohost"), "'nohost': host:port is allowed"),
        (new(Producer, "g", name_servers="127.0.0.1:99999"), "a port of 1 to 65535"),
        (new(Producer, "g", name_servers="127.0.0.1:abc"), "'127.0.0.1:abc': host:port"),
        (new(Producer, "g", name_servers="http://x:1"), "'http://x:1': host:port"),
        (new(Producer, "g", name_servers=5), "name_servers is 5"),
        (new(Producer, "g", name_servers=[NAMES, 7]), "an address is 7"),
        (new(Producer, 5), "group is 5"),
        (new(PushConsumer, "g", None), "listener is None: a function of"),
        (new(PushConsumer, "g", lambda one: None), r"a function of \(messages, context\)"),
        (new(TransactionProducer, "g", "no"), "check is 'no'"),
        (subscribed("a b"), "topic is 'a b'"),
        (subscribed(None), "topic is None"),
        (subscribed(TOPIC, 5), "expression is 5"),
        (subscribed(TOPIC, "a > 5"), "no tag; a condition needs expression_type='SQL92'"),
        (subscribed(TOPIC, "TAGS = 'a' and b is null"), "no tag"),
        (subscribed(TOPIC, "a | b"), "'a || b'"),
        (subscribed(TOPIC, "||"), "names no tag"),
        (subscribed(TOPIC, "a", expression_type="SQL"), "expression_type is 'SQL'"),
        (new(TopicConfig, "T"), "positional"),
        (message(body=None), "body is None"),
        (message(tags=["a"]), r"tags is \['a'\]"),
        (message(keys=5), "keys is 5"),
        (message(keys=["a b"]), "keys has 'a b'"),
        (lambda: ConsumeOptions(batch=0), "batch is 0: a whole number of at least 1"),
        (lambda: ConsumeOptions(close_wait_ms=-1), "close_wait_ms is -1"),
        (lambda: PullOptions(batch=True), "batch is True"),
        (lambda: PushConsumerOptions(model="BROADCASTING"), "MessageModel is allowed"),  # type: ignore[arg-type]
        (lambda: PushConsumerOptions(offset_dir="x"), "offset_dir is .x.: Path"),  # type: ignore[arg-type]
        (lambda: LitePullOptions(auto_commit_ms=0), "auto_commit_ms is 0"),
        (lambda: ClientOptions(route_poll_ms="5"), "route_poll_ms is .5."),  # type: ignore[arg-type]
        (lambda: ClientOptions(hook=5), "hook is 5"),  # type: ignore[arg-type]
        (lambda: ProducerOptions(send_timeout_ms=0), "send_timeout_ms is 0"),
        (broadcasting("g", "../x"), "instance_name is '../x'"),
        (broadcasting("g" * 251, "x"), "group is 'ggg"),
        (new(PullConsumer, "g", from_where="x"), "from_where is .x."),
        (new(PopConsumer, "g", from_where=ConsumeFromWhere.TIMESTAMP), "FIRST and LAST"),
    ],
)
def test_what_cannot_be_meant_is_refused_at_once(call: Callable[[], Any], why: str) -> None:
    with pytest.raises((ClientError, TypeError, ValueError), match=why):
        call()


def test_what_looks_odd_and_can_be_meant_is_taken() -> None:
    assert message(keys=["a", "b"])().keys == "a b" == message(keys="a b")().keys
    assert message(body="text")().body == b"text"
    for expression in ("", "*", "a||b", "a || b ||", "a-b", "TagA", "order", "not"):
        subscribed(TOPIC, expression)()
    PushConsumer("g", max, name_servers="[::1]:9876;localhost:1")
    assert isinstance(ArgumentError("a", 1, "b"), ValueError)


async def test_wrong_calls_cost_no_request() -> None:
    """None is tried again until its time is over."""
    async with open_cluster() as cluster:
        names = cluster.name_server_addresses
        one = Message(TOPIC, b"1")
        async with Producer("pg", name_servers=names) as producer:
            for call, why in (
                (producer.send("x"), "message is 'x'"),
                (producer.send(Message(TOPIC, "text")), "body is 'text'"),  # type: ignore
                (producer.send(Message(TOPIC, b"1", 0, {"a": 5})), "property 'a' is 5"),  # type: ignore
                (producer.send(one, queue=5), "queue is 5"),  # type: ignore[arg-type]
                (producer.send(one, queue=MessageQueue("U", "broker-a", 0)), "of topic T"),
                (producer.send(Message(TOPIC, b"1", 1 << 31)), "flag is 2147483648"),
                (producer.send(one, delay=1e308), "delay is 1e\\+308"),
                (producer.send(one, deliver_at=10**400), "deliver_at is 1000"),
                (producer.send(Message("a b", b"1")), "illegal characters"),
                (producer.publish_queues("a b"), "topic is 'a b'"),
                (producer.send(one, selector=lambda *_: 2), "result of the selector is 2"),
                (producer.send(one, unique_key=5), "unique_key is 5"),  # type: ignore[arg-type]
                (producer.send_batch([one], unique_keys=["a", "b"]), "each of the 1 messages"),
                (producer.send(one, timeout_ms="3"), "timeout_ms is '3'"),  # type: ignore
                (producer.send(one, timeout_ms=0), "timeout_ms is 0"),
                (producer.send_batch(one), "messages is Message"),  # type: ignore[arg-type]
                (producer.send_oneway(None), "message is None"),  # type: ignore[arg-type]
                (producer.request(one, timeout_ms=-1), "timeout_ms is -1"),
                (producer.reply(one, b"x"), "asked is Message"),  # type: ignore[arg-type]
                (producer.recall(TOPIC, None), "recall_handle is None"),  # type: ignore
            ):
                with pytest.raises(ClientError, match=why):
                    await call
            assert list(producer.topics()) == [], "their routes would be polled"
        async with PullConsumer("g", name_servers=names) as consumer:
            await consumer.assign([Q0])
            for call, why in (
                (consumer.max_offset("q"), "queue is .q."),  # type: ignore[arg-type]
                (consumer.assign("abc"), "queues is 'abc'"),  # type: ignore[arg-type]
                (consumer.seek(Q0, -5), "offset is -5"),
                (consumer.seek(Q0, "5"), "offset is '5'"),  # type: ignore[arg-type]
                (consumer.commit({Q0: -1}), "offset is -1"),
                (consumer.poll(max_messages=0), "max_messages is 0"),
                (consumer.poll(True), "timeout_ms is True"),
            ):
                with pytest.raises(ArgumentError, match=why):
                    await call
        async with PopConsumer("g", name_servers=names) as popping:
            await popping.subscribe(TOPIC)
            for call, why in (
                (popping.receive(TOPIC, invisible_ms=0), "invisible_ms is 0"),
                (popping.receive(TOPIC, max_messages=0), "max_messages is 0"),
                (popping.ack("x"), "message is 'x'"),  # type: ignore[arg-type]
            ):
                with pytest.raises(ArgumentError, match=why):
                    await call
        with pytest.raises(ArgumentError, match="expression is"):
            LitePullConsumer("g", name_servers=names).subscribe(TOPIC, "a = 1")
        assert not cluster.groups["broker-a"].queues.get((TOPIC, 0))
