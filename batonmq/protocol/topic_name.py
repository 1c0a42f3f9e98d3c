"""Which names topics and groups may have, and which topics are the broker's own. Origin: Java
`TopicValidator`, `MixAll`, `NamespaceUtil`."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import filterfalse
from typing import Final

from batonmq.protocol.codes import ResponseCode
from batonmq.protocol.errors import BrokerRefusal

RETRY_PREFIX: Final = "%RETRY%"
DLQ_PREFIX: Final = "%DLQ%"
LMQ_PREFIX: Final = "%LMQ%"
TOPIC_LENGTH_MAX: Final = 127
RETRY_TOPIC_LENGTH_MAX: Final = 255
GROUP_LENGTH_MAX: Final = 255
CLIENT_ID_LENGTH_MAX: Final = 1024
TOPIC_QUEUES_MAX: Final = 65536
NAME_BYTES_MAX: Final = 255
"""The limit for every topic, also one made from a group: a record stores its length in one byte,
and it names a folder."""
_PLAIN_NAME: Final = re.compile(r"[%|0-9A-Za-z_-]{1,63}")

AUTO_CREATE_TOPIC: Final = "TBW102"
SCHEDULE_TOPIC: Final = "SCHEDULE_TOPIC_XXXX"
BENCHMARK_TOPIC: Final = "BenchmarkTest"
TRANS_HALF_TOPIC: Final = "RMQ_SYS_TRANS_HALF_TOPIC"
TRANS_OP_HALF_TOPIC: Final = "RMQ_SYS_TRANS_OP_HALF_TOPIC"
TRANS_GROUP: Final = "CID_RMQ_SYS_TRANS"  # the group that reads both
TRANS_CHECK_MAX_TIME_TOPIC: Final = "TRANS_CHECK_MAX_TIME_TOPIC"
TRACE_TOPIC: Final = "RMQ_SYS_TRACE_TOPIC"
SELF_TEST_TOPIC: Final = "SELF_TEST_TOPIC"
OFFSET_MOVED_TOPIC: Final = "OFFSET_MOVED_EVENT"
TIMER_TOPIC: Final = "rmq_sys_wheel_timer"
SYSTEM_TOPIC_PREFIX: Final = "rmq_sys_"
OLD_SYSTEM_TOPIC_PREFIX: Final = "RMQ_SYS_"
"""The prefix of topics of transactions and traces, which `is_system_topic` knows by name."""
REPLY_TOPIC_POSTFIX: Final = "REPLY_TOPIC"
REVIVE_TOPIC_PREFIX: Final = "rmq_sys_REVIVE_LOG_"
SYNC_BROKER_MEMBER_PREFIX: Final = "rmq_sys_SYNC_BROKER_MEMBER_"
# Ours: topic and group changes as log records (R31). No consume queue.
METADATA_TOPIC: Final = "rmq_sys_BATON_METADATA"
# Ours: progress of delayed and timed messages, as log records. No consume queue.
PROGRESS_TOPIC: Final = "rmq_sys_BATON_PROGRESS"
# Ours: POP's messages in flight, as records of one queue.
POP_TOPIC: Final = "rmq_sys_BATON_POP"
# Ours: changes of users and policies, as log records. No consume queue.
USERS_TOPIC: Final = "rmq_sys_BATON_USERS"
OUR_TOPICS: Final = (METADATA_TOPIC, PROGRESS_TOPIC, POP_TOPIC, USERS_TOPIC)

SYSTEM_TOPICS: Final = frozenset(
    {
        AUTO_CREATE_TOPIC,
        SCHEDULE_TOPIC,
        BENCHMARK_TOPIC,
        TRANS_HALF_TOPIC,
        TRACE_TOPIC,
        TRANS_OP_HALF_TOPIC,
        TRANS_CHECK_MAX_TIME_TOPIC,
        SELF_TEST_TOPIC,
        OFFSET_MOVED_TOPIC,
    }
)
TOOLS_CONSUMER: Final = "TOOLS_CONSUMER"
SYSTEM_GROUPS: Final = (
    TOOLS_CONSUMER,
    "FILTERSRV_CONSUMER",
    "SELF_TEST_C_GROUP",
    "CID_ONS-HTTP-PROXY",
    "CID_ONSAPI_PULL",
    "CID_ONSAPI_PERMISSION",
    "CID_ONSAPI_OWNER",
    TRANS_GROUP,
)
"""Consumer groups of a fresh Java broker; tools and old clients use these names."""


def is_system_group(group: str) -> bool:
    """Whether brokers consume by that name themselves."""
    return group in SYSTEM_GROUPS or group.upper().startswith("CID_RMQ_SYS_")


# Their consume queue units hold due times instead of tags.
DUE_TOPICS: Final = frozenset({SCHEDULE_TOPIC, TIMER_TOPIC})
# Existing topics that clients may not send to.
NOT_ALLOWED_SEND_TOPICS: Final = frozenset(
    {
        SCHEDULE_TOPIC,
        TRANS_HALF_TOPIC,
        TRANS_OP_HALF_TOPIC,
        TRANS_CHECK_MAX_TIME_TOPIC,
        SELF_TEST_TOPIC,
        OFFSET_MOVED_TOPIC,
        METADATA_TOPIC,
        POP_TOPIC,
        PROGRESS_TOPIC,
        TIMER_TOPIC,
        USERS_TOPIC,
    }
)

_LEGAL: Final = re.compile(r"[%|a-zA-Z0-9_-]+")
# Also the character that POP writes between group and topic; clients cannot use it.
_LEGAL_STORED: Final = re.compile(r"[%|a-zA-Z0-9_+-]+")


def retry_topic(group: str) -> str:
    """The topic from which a group gets failed messages again."""
    return RETRY_PREFIX + group


def dlq_topic(group: str) -> str:
    """The topic of messages that a group failed on too often."""
    return DLQ_PREFIX + group


def reply_topic(cluster_name: str) -> str:
    """The topic of a cluster's request-reply answers."""
    return f"{cluster_name}_{REPLY_TOPIC_POSTFIX}"


def pop_retry_topics(group: str, topic: str) -> tuple[str, str]:
    """Where POP keeps failed messages of a topic for a group, in Java's two spellings."""
    return f"{RETRY_PREFIX}{group}+{topic}", f"{RETRY_PREFIX}{group}_{topic}"


def pop_topic_pairs(retry_topic_v1: str) -> Iterator[tuple[str, str]]:
    """Each (group, topic) for which POP may have made this retry topic, in the first spelling."""
    name = retry_topic_v1.removeprefix(RETRY_PREFIX)
    for at, char in enumerate(name):
        if char == "_":
            yield name[:at], name[at + 1 :]


def is_file_name(name: str) -> bool:
    """Whether a file of this name is a direct child of its folder, on any file system."""
    return _PLAIN_NAME.fullmatch(name) is not None or _is_odd_file_name(name)


def _is_odd_file_name(name: str) -> bool:
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        return False
    if len(name) * 4 <= NAME_BYTES_MAX and name.isascii():
        return True
    try:
        return len(name.encode("utf-8")) <= NAME_BYTES_MAX
    except UnicodeEncodeError:  # a lone surrogate
        return False


def odd_topics(names: Iterable[str]) -> list[str]:
    """The invalid ones of `names`: a folder, record or log line could not contain them. One C call
    per name."""
    odd = filterfalse(_PLAIN_NAME.fullmatch, names)
    return [name for name in odd if not (name.isprintable() and is_file_name(name))]


def text_problem(text: str) -> str | None:
    """Why this text must not be used as a name, address or other shown text; None if it may. Not
    for paths."""
    if not text or text.isspace():
        return "it is blank"
    if not text.isprintable():
        return "allowed are printable characters"
    if len(text) > NAME_BYTES_MAX or len(text.encode("utf-8")) > NAME_BYTES_MAX:
        return f"at most {NAME_BYTES_MAX} bytes are allowed"
    return None


def first_problem(names: Mapping[str, str], texts: Mapping[str, str]) -> str:
    """The problem of the first illegal value; "" if there is none. Keys say what each value is.
    `names`: of brokers and clusters; `texts`: other short texts."""
    found = [(what, name, server_name_problem(name)) for what, name in names.items()]
    found += [(what, text, text_problem(text)) for what, text in texts.items()]
    bad = next((each for each in found if each[2]), None)
    return f"{bad[0]} {bad[1][:64]!r}: {bad[2]}" if bad else ""


def is_system_topic(topic: str) -> bool:
    """Whether the broker owns this topic (Java `TopicValidator.isSystemTopic`)."""
    return topic in SYSTEM_TOPICS or topic.startswith(SYSTEM_TOPIC_PREFIX)


def is_brokers_own(topic: str, names: Collection[str]) -> bool:
    """Whether brokers created this topic, retry and dead-letter topics included. `names`: of
    clusters and brokers, which have topics of their name."""
    own = is_system_topic(topic) or is_retry_or_dlq(topic) or topic in names
    return own or topic.endswith(f"_{REPLY_TOPIC_POSTFIX}")


def is_retry_or_dlq(topic: str) -> bool:
    """Whether the topic belongs to one consumer group."""
    return topic.startswith((RETRY_PREFIX, DLQ_PREFIX))


def topic_problem(topic: str) -> str | None:
    """Why this is no legal topic name, or None."""
    if not topic or topic.isspace():
        return "The specified topic is blank."
    if _LEGAL.fullmatch(topic) is None:
        return (
            "The specified topic contains illegal characters, "
            "allowing only ^[%|a-zA-Z0-9_-]+$: " + topic[:TOPIC_LENGTH_MAX]
        )
    limit = RETRY_TOPIC_LENGTH_MAX if is_retry_or_dlq(topic) else TOPIC_LENGTH_MAX
    if len(topic) > limit:
        return f"The specified topic is longer than topic max length {limit}."
    return None


def group_problem(group: str) -> str | None:
    """Why this is no legal group name, or None."""
    if not group or group.isspace():
        return "The specified group is blank."
    if len(group) > GROUP_LENGTH_MAX:
        return f"The specified group is longer than group max length {GROUP_LENGTH_MAX}."
    if _LEGAL.fullmatch(group) is None:
        return (
            "The specified group contains illegal characters, "
            "allowing only ^[%|a-zA-Z0-9_-]+$: " + group[:GROUP_LENGTH_MAX]
        )
    return None


def server_name_problem(name: str) -> str | None:
    """Why this is no name of a broker or cluster, or None. Topics are named after it."""
    if not name or "#" in name:
        return "it must be non-empty and hold no '#'"
    if not (name.isprintable() and is_file_name(name)):
        return "allowed are printable characters without '/', not '.' or '..'"
    if not is_file_name(SYNC_BROKER_MEMBER_PREFIX + name):
        return f"at most {NAME_BYTES_MAX - len(SYNC_BROKER_MEMBER_PREFIX)} bytes are allowed"
    return None


def check_group(group: str) -> None:
    """Raises BrokerRefusal(INVALID_PARAMETER) for an illegal name."""
    problem = group_problem(group)
    if problem is not None:
        raise BrokerRefusal(ResponseCode.INVALID_PARAMETER, f"group: {problem}")


def check_made_topic(topic: str) -> None:
    """As `check_topic`, for a topic that the broker named or that exists: it may be a retry topic
    of POP, and must fit into a record and a folder name."""
    size = len(topic.encode("utf-8", "surrogatepass"))
    if size > NAME_BYTES_MAX:
        raise BrokerRefusal(
            ResponseCode.INVALID_PARAMETER,
            f"topic {topic[:TOPIC_LENGTH_MAX]}... would have a name of {size} bytes, allowed are"
            f" {NAME_BYTES_MAX}: the name of the group is too long for it",
        )
    if _LEGAL_STORED.fullmatch(topic) is None:
        raise BrokerRefusal(
            ResponseCode.INVALID_PARAMETER,
            "The specified topic contains illegal characters, allowing only"
            f" ^[%|a-zA-Z0-9_-]+$: {topic[:TOPIC_LENGTH_MAX]!r}",
        )


def check_pop_names(group: str, topic: str) -> None:
    """Raises BrokerRefusal(INVALID_PARAMETER) if the name of POP's retry topic (`%RETRY%`, group,
    one character, topic) would be too long."""
    size = len(pop_retry_topics(group, topic)[0].encode("utf-8", "surrogatepass"))
    if not topic.startswith(RETRY_PREFIX) and size > NAME_BYTES_MAX:
        raise BrokerRefusal(
            ResponseCode.INVALID_PARAMETER,
            f"group {group[:32]}... and topic {topic[:32]}... are too long for POP: the topic of"
            f" their retries would have a name of {size} bytes, allowed are {NAME_BYTES_MAX}",
        )


def check_topic(topic: str) -> None:
    """Raises BrokerRefusal(INVALID_PARAMETER) for an illegal name."""
    problem = topic_problem(topic)
    if problem is not None:
        raise BrokerRefusal(ResponseCode.INVALID_PARAMETER, problem)


def check_send_allowed(topic: str) -> None:
    """Raises BrokerRefusal(NO_PERMISSION) for a topic that clients must not write to."""
    if topic in NOT_ALLOWED_SEND_TOPICS:
        raise BrokerRefusal(
            ResponseCode.NO_PERMISSION, f"Sending message to topic[{topic}] is forbidden."
        )
