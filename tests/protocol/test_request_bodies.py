"""What one request may hold: it is read in one turn of the loop (R58)."""

import pytest

from batonmq.protocol import fastjson
from batonmq.protocol.bodies import ConsumerData, HeartbeatData, SubscriptionData
from batonmq.protocol.errors import RemoteProtocolError
from batonmq.protocol.fastjson import (
    REFERENCED_VALUES_MAX,
    REQUEST_VALUES_MAX,
    FastjsonError,
    loads,
)
from batonmq.protocol.json_body import (
    LOOSE_MEMBERS_MAX,
    REQUEST_MEMBERS_MAX,
    REQUEST_OBJECTS_MAX,
    REQUEST_SIZE_MAX,
)


def heartbeat(count: int) -> HeartbeatData:
    """Of so many groups with a subscription each."""
    subscriptions = [SubscriptionData(topic=f"T{n}", sub_string="*") for n in range(count)]
    groups = [
        ConsumerData(group_name=f"g{n}", subscription_data_set=[one])
        for n, one in enumerate(subscriptions)
    ]
    return HeartbeatData(client_id="c", consumer_data_set=groups)


@pytest.mark.parametrize(
    "body, complaint",
    [
        (b'{"clientID":"%b"}' % (b"c" * REQUEST_SIZE_MAX), f"at most {REQUEST_SIZE_MAX}"),
        (
            b'{"consumerDataSet":[' + b"{}," * REQUEST_OBJECTS_MAX + b"{}]}",
            "objects in one request",
        ),
        (b'{"x":[' + b"0," * (REQUEST_MEMBERS_MAX + 1) + b"0]}", "members in one request"),
        (b'{"clientID":null,"x":[' + b"0," * LOOSE_MEMBERS_MAX + b"0]}", "with nulls"),
        (b"{clientID:'%b'}" % (b"c" * fastjson.REQUEST_SIZE_MAX), "not standard JSON"),
        (b"{x:[" + b"0," * REQUEST_VALUES_MAX + b"0]}", f"more than {REQUEST_VALUES_MAX} values"),
        (b"{x:" + b"9" * 5000 + b"}", "4300"),
    ],
)
def test_r58_a_request_that_holds_too_much_is_refused(body: bytes, complaint: str) -> None:
    with pytest.raises(RemoteProtocolError, match=f"HeartbeatData: .*{complaint}"):
        HeartbeatData.decode_request(body)


def test_r58_references_to_references_are_counted_by_what_they_stand_for() -> None:
    tables = ['"x0":[0,0,0,0,0,0,0,0,0,0]']
    for number in range(9):
        references = ",".join([f'{{"$ref":"$.x{number}"}}'] * 10)
        tables.append(f'"x{number + 1}":[{references}]')
    body = ('{"clientID":null,' + ",".join(tables) + "}").encode()
    with pytest.raises(RemoteProtocolError, match=f"more than {REQUEST_VALUES_MAX} values"):
        HeartbeatData.decode_request(body)
    # A hostile server's answer: 500 bytes for a billion values, which would never be read.
    with pytest.raises(RemoteProtocolError, match=f"more than {REFERENCED_VALUES_MAX} values"):
        HeartbeatData.decode(body)
    with pytest.raises(FastjsonError, match=f"more than {REQUEST_VALUES_MAX} values"):
        loads(b'{"a":{"$ref":"$"}}', is_request=True)


def test_what_stock_clients_send_is_read() -> None:
    many = heartbeat(10_000)
    assert HeartbeatData.decode_request(many.encode()) == many
    some = heartbeat(1000)
    quoted = some.encode().replace(b'"subVersion":0', b'"subVersion":"0"')
    nulls = quoted.replace(b'{"clientID"', b'{"heartbeatFingerprint":null,"clientID"')
    assert quoted != some.encode() and nulls != quoted
    assert HeartbeatData.decode_request(nulls) == some
    few = heartbeat(10)
    shared = few.encode().replace(b'{"clientID"', b'{"x":{"$ref":"$.clientID"},"clientID"')
    assert HeartbeatData.decode_request(shared) == few


def test_answers_may_hold_more() -> None:
    body = b"{x:[" + b"0," * 20_000 + b"0],clientID:'c'}"
    assert HeartbeatData.decode(body).client_id == "c"
