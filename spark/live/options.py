"""The options of `table=topic` and of the sink, checked; `docs/spark.md` lists them for users.

Free of Spark.
"""

import os
import re
from collections.abc import Mapping
from typing import Annotated, Final, Self

import msgspec
from msgspec import Meta

from batonmq.auth.given import KEY_VARIABLES, credentials_of, made_of, tls_in_environment
from batonmq.client.instance.connections import ClientOptions
from batonmq.client.instance.name_servers import parse_addresses
from batonmq.client.producer.outgoing import MESSAGE_SIZE_MAX
from batonmq.protocol.topic_name import group_problem, topic_problem
from batonmq.runtime.tls import ClientTls, client_context
from batonmq.spark.read.options import (
    MIB,
    DurationMs,
    Narrowed,
    Options,
    Positive,
    Words,
    by,
    read_truth,
    read_words,
)
from batonmq.spark.read.storage import locate

_BATCH_ONLY: Final = ("endingOffsets", "endingTimestamp")
_STREAM_ONLY: Final = (
    "maxOffsetsPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay", "passOverSilentGroups"
)  # fmt: skip
#: Column of what is written -> types it may have, as Spark writes them.
COLUMNS: Final[dict[str, tuple[str, ...]]] = {
    "body": ("binary", "string"),
    "topic": ("string",),
    "keys": ("string",),
    "tags": ("string",),
    "properties": ("map<string,string>",),
    "broker": ("string",),
    "queue_id": ("int", "bigint", "smallint", "tinyint"),
    "sharding_key": ("string",),
}


def _folder(text: str) -> str:
    """An absolute path, or a `file:` URI of this host. Workers run in folders of their own, so a
    relative path is another one for each, and object stores know no file that grows."""
    try:
        if text.lower().startswith(("/", "file:")):
            return locate(text)[1]
    except ValueError:
        pass
    raise ValueError(
        "it must be an absolute path, or file:///path, of a folder that all executors share"
    )


def _addresses(text: str) -> tuple[str, ...]:
    """host:port by commas or semicolons, or a JSON list."""
    is_list = re.match(r'\[\s*"', text)  # a bracket alone may begin an address of IPv6
    return parse_addresses(read_words(text) if is_list else text)


def _topics(text: str) -> tuple[str, ...]:
    found = read_words(text)
    for topic in found:
        if problem := topic_problem(topic):
            raise ValueError(problem)
    return found


def _group(text: str) -> str:
    if problem := group_problem(text):
        raise ValueError(problem)
    return text


class _Hidden(str):
    """A text that no `repr` shows."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "'...'"


Secret = Annotated[str, by(_Hidden)]
_NO_SERVERS: Final = "no nameServers: name those of the cluster, host:port by commas"
NameServers = Annotated[tuple[str, ...], by(_addresses, _NO_SERVERS)]
_NO_CONTROLLERS: Final = (
    "no controllers: a stream of table=history is read from those of the cluster; name their "
    "remoting addresses, host:port by commas"
)
Controllers = Annotated[tuple[str, ...], by(_addresses, _NO_CONTROLLERS)]
_NO_TOPIC: Final = "no topic: name one or several, by commas, as option topic"
Topics = Annotated[tuple[str, ...], by(_topics, _NO_TOPIC)]
Group = Annotated[str, by(_group)]

_OF_TLS: Final = ("tlsenable", "trustcertpath", "certpath")
"""Options that say whether and by which files. The others alone turn nothing on, so they must not
turn off what the environment says."""


class Access(Options, frozen=True, kw_only=True):
    """As whom a cluster is asked, and how connections are encrypted: as the options say, else this
    process's environment. Paths are of PEM files, and the same on all executors."""

    access_key: str = ""
    secret_key: Secret = ""
    security_token: Secret = ""
    tls_enable: Annotated[bool | None, by(read_truth)] = None
    """None: if a path is given. Without `trustCertPath` authorities of the machine are trusted."""
    trust_cert_path: str = ""
    cert_path: str = ""
    key_path: str = ""
    key_password: Secret = ""
    check_host: bool = True

    @classmethod
    def _made(cls, given: Mapping[str, str]) -> Self:
        """Raises ValueError for a user without a secret."""
        keys = {key: given[key.lower()] for key in KEY_VARIABLES if given.get(key.lower())}
        user = made_of(keys, "options") if keys else credentials_of(os.environ)
        found = dict(given)
        if user is not None:
            values = (user.access_key, user.secret_key, user.security_token)
            found |= dict(zip(map(str.lower, KEY_VARIABLES), values, strict=True))
        tls = tls_in_environment(os.environ)
        if tls is not None and not any(map(given.get, _OF_TLS)):
            found |= {"trustcertpath": tls.trust_cert_path, "certpath": tls.cert_path}
        return super()._made(found)

    def client_options(self) -> ClientOptions:
        """Raises ValueError for a user without a secret, TlsError for a file."""
        values = (self.access_key, self.secret_key, self.security_token)
        keys = dict(zip(KEY_VARIABLES, values, strict=True))
        tls, is_on = None, self.tls_enable
        if is_on or (is_on is None and (self.trust_cert_path or self.cert_path)):
            tls = ClientTls(
                trust_cert_path=self.trust_cert_path,
                cert_path=self.cert_path,
                key_path=self.key_path,
                key_password=self.key_password,
                check_host=self.check_host,
            )
            client_context(tls)  # a bad file is an error now, not after a long wait
        return ClientOptions(credentials=made_of(keys, "options") if any(values) else None, tls=tls)


class TopicOptions(Narrowed, frozen=True, kw_only=True):
    """The options of a read. Sizes are bytes, times ms, counts messages.

    0 offsets per trigger or partition: no such limit.
    """

    name_servers: NameServers
    topics: Topics = msgspec.field(name="topic")
    table: str = "topic"
    columns: Words = ()
    offsets_per_trigger_max: Positive = msgspec.field(name="maxOffsetsPerTrigger", default=0)
    offsets_per_trigger_min: Positive = msgspec.field(name="minOffsetsPerTrigger", default=0)
    trigger_delay_max_ms: DurationMs = msgspec.field(name="maxTriggerDelay", default=900_000)
    offsets_per_partition_max: Positive = msgspec.field(name="maxOffsetsPerPartition", default=0)
    fail_on_data_loss: bool = True
    operation_timeout_ms: DurationMs = msgspec.field(name="operationTimeout", default=60_000)
    pass_over_silent: bool = msgspec.field(name="passOverSilentGroups", default=False)
    batch_bytes: Annotated[int, Meta(ge=MIB // 16)] = 4 * MIB
    group: Group = msgspec.field(name="consumerGroup", default="BATON_SPARK")
    access: Access = Access()

    @classmethod
    def what(cls) -> str:
        return "table=topic"

    @classmethod
    def from_mapping(cls, options: Mapping[str, str], *, streaming: bool | None = None) -> Self:
        """The options by their names in Spark. `streaming` None: not known yet which it will be.

        Raises ValueError, with what is allowed, for a bad value, an unknown name, or options that
        exclude each other.
        """
        given = {name.lower() for name, value in options.items() if value.strip()}
        for name in () if streaming is None else _BATCH_ONLY if streaming else _STREAM_ONLY:
            if name.lower() in given:
                kind = "batch reads only, not of streams" if streaming else "streams only"
                raise ValueError(f"{name} is an option of {kind}: leave it out")
        made = super().from_mapping(options)
        if made.offsets_per_trigger_min > made.offsets_per_trigger_max > 0:
            raise ValueError(
                f"minOffsetsPerTrigger={made.offsets_per_trigger_min} is above "
                f"maxOffsetsPerTrigger={made.offsets_per_trigger_max}"
            )
        return made


class HistoryOptions(Options, frozen=True):
    """The options of a stream of `table=history`. Counts are events."""

    controllers: Controllers
    table: str = "history"
    columns: Words = ()
    events_per_trigger_max: Positive = msgspec.field(name="maxOffsetsPerTrigger", default=10_000)
    fail_on_data_loss: bool = True
    operation_timeout_ms: DurationMs = msgspec.field(name="operationTimeout", default=60_000)
    access: Access = Access()

    @classmethod
    def what(cls) -> str:
        return "a stream of table=history"

    def __post_init__(self) -> None:
        if self.access.key_password or not self.access.check_host:
            raise ValueError(
                "keyPassword and checkHost=false are not for controllers, which are asked by gRPC: "
                "give a key without a password, and name hosts as their certificates do"
            )


class SinkOptions(Options, frozen=True):
    """`topics` empty: each row names its own. `ack_folder` "": nothing is written down."""

    name_servers: NameServers
    topics: Topics = msgspec.field(name="topic", default=())
    table: str = "topic"
    group: Group = msgspec.field(name="producerGroup", default="BATON_SPARK_SINK")
    send_timeout_ms: DurationMs = msgspec.field(name="sendTimeout", default=60_000)
    batch_messages: Positive = 64
    batch_bytes: Positive = 256 << 10
    in_flight: Positive = 8
    ack_folder: Annotated[str, by(_folder)] = msgspec.field(name="ackReport", default="")
    # Not ours: Spark hands a stream's to its sink, and unknown options are refused.
    checkpoint_location: str = ""
    access: Access = Access()

    @classmethod
    def what(cls) -> str:
        return "writing"

    def __post_init__(self) -> None:
        if self.table.lower() != "topic":
            raise ValueError(f"table={self.table!r}: only topics are written; leave it out")
        if len(self.topics) > 1:
            raise ValueError(
                f"topic={','.join(self.topics)!r}: name one, or give each row a column topic"
            )
        if self.batch_bytes > MESSAGE_SIZE_MAX:
            raise ValueError(
                f"batchBytes={self.batch_bytes}: a broker takes no more than {MESSAGE_SIZE_MAX} in "
                "one request"
            )

    @property
    def topic(self) -> str:
        return self.topics[0] if self.topics else ""


def check_columns(columns: Mapping[str, str], options: SinkOptions) -> None:
    """`columns`: name -> type of what is written. Raises ValueError for what cannot be sent."""
    if "body" not in columns:
        raise ValueError(
            f"no column body among {', '.join(columns) or 'none'}: it is what is sent (binary or "
            "string)"
        )
    if not options.topic and "topic" not in columns:
        raise ValueError("no topic: give the option topic, or a column of that name")
    for name, kind in columns.items():
        allowed = COLUMNS.get(name)
        if allowed is None:
            raise ValueError(
                f"column {name} cannot be sent: drop it, or put it into properties or body; there "
                f"are {', '.join(COLUMNS)}"
            )
        if kind not in allowed:
            raise ValueError(f"column {name} is {kind}; it must be {' or '.join(allowed)}")
    if "queue_id" in columns and "sharding_key" in columns:
        raise ValueError("queue_id and sharding_key both choose the queue: drop one of the columns")
    if "broker" in columns and "queue_id" not in columns:
        raise ValueError("column broker belongs to column queue_id, which is missing")
