"""Large bodies in pieces: the same JSON, and the same values."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from batonmq.broker.tables.config_file import ConfigFile
from batonmq.protocol.bodies import (
    ConsumerOffsetSerializeWrapper,
    DataVersion,
    ResetOffsetBody,
    SubscriptionGroupConfig,
    SubscriptionGroupWrapper,
    TopicConfig,
    TopicConfigSerializeWrapper,
    TopicList,
)
from batonmq.protocol.errors import RemoteProtocolError
from batonmq.protocol.json_body import ENTRIES_AT_ONCE, Body, decoded_in_steps, encoded_pieces


def bodies() -> Iterator[Body]:
    """Tables that end just before, at and behind the end of a piece."""
    for size in (0, 1, ENTRIES_AT_ONCE - 1, ENTRIES_AT_ONCE, ENTRIES_AT_ONCE + 1, 1000):
        version = DataVersion(counter=size)
        topics = {f"T{n}": TopicConfig(topic_name=f"T{n}") for n in range(size)}
        yield TopicConfigSerializeWrapper(data_version=version, topic_config_table=topics)
        groups = {f"g{n}": SubscriptionGroupConfig(group_name=f"g{n}") for n in range(size)}
        forbidden = {f"g{n}": {"T": 4, "U": 4} for n in range(size)}
        yield SubscriptionGroupWrapper(
            data_version=version, forbidden_table=forbidden, subscription_group_table=groups
        )
        offsets = {f"T{n}@g": {0: n, 1: n} for n in range(size)}
        yield ConsumerOffsetSerializeWrapper(data_version=version, offset_table=offsets)
        yield TopicList(broker_addr="h:1", topic_list=list(topics))


@pytest.mark.parametrize("body", list(bodies()), ids=lambda body: type(body).__name__)
def test_pieces_are_the_whole(body: Body, tmp_path: Path) -> None:
    assert b"".join(encoded_pieces(body)) == body.encode()
    assert decoded(type(body), body.encode()) == body
    file = ConfigFile(tmp_path / "table.json", type(body))
    file.write_of(lambda: body)()
    assert file.path.read_bytes() == msgspec.json.format(body.encode(), indent=1)


def decoded(kind: type[Body], data: bytes) -> Body:
    steps = decoded_in_steps(kind, data)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def test_a_javas_dialect_is_read_and_nonsense_is_refused() -> None:
    kind = ConsumerOffsetSerializeWrapper
    assert decoded(kind, b'{"offsetTable":{"T@g":{0:12,3:"4"}}}').offset_table == {
        "T@g": {0: 12, 3: 4}
    }
    for odd in (b'{"offsetTable":null}', b'{"other":1}', b"{}"):
        assert decoded(kind, odd).offset_table == {}
    deep = b'{"x":' * 100_000
    for wrong in (b"nonsense", b'{"offsetTable":{"T@g":7}}', b'{"offsetTable":[]}', b"\xff", deep):
        with pytest.raises(RemoteProtocolError):
            decoded(kind, wrong)
    with pytest.raises(RemoteProtocolError, match="ResetOffsetBody: "):
        ResetOffsetBody.decode(b'{"offsetTable":' + deep)
