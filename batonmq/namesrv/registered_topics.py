"""The topics of a registration: in parts, and without what no route shows."""

import logging
from collections.abc import Iterator
from itertools import chain, count, islice
from operator import attrgetter, eq
from typing import Final

from msgspec.structs import replace

from batonmq.namesrv.topics import Parts
from batonmq.protocol.bodies import DataVersion, TopicConfig
from batonmq.protocol.register_body import RegisterBrokerBody
from batonmq.protocol.topic_name import TOPIC_LENGTH_MAX, TOPIC_QUEUES_MAX, odd_topics, text_problem

log = logging.getLogger(__name__)

TOPICS_AT_ONCE: Final = 8192  # of one registration, in one turn of the loop: about 8 ms
_NO_ATTRIBUTES: Final[dict[str, str]] = {}
_FILTER_TYPES: Final = frozenset({"", "SINGLE_TAG", "MULTI_TAG"})
_FILTER_SERVERS_MAX: Final = 16
_QUEUES: Final = attrgetter("read_queue_nums", "write_queue_nums")
_passing: Final = count(-1, -1)
"""Counters of made-up data versions (`parts_of`): those of brokers are not negative."""


def parts_of(body: RegisterBrokerBody, parts: Parts) -> Iterator[RegisterBrokerBody]:
    """`body` as registrations of TOPICS_AT_ONCE topics each (R58)."""
    # If the topics are new only the last part has the broker's data version, the others have
    # made-up ones: if the last part does not come, the version differs and the broker registers
    # again.
    wrapper = body.topic_config_serialize_wrapper
    topics = iter(wrapper.topic_config_table.items())
    left = len(wrapper.topic_config_table)
    version = wrapper.data_version
    while left > TOPICS_AT_ONCE:
        left -= TOPICS_AT_ONCE
        part = dict(islice(topics, TOPICS_AT_ONCE))
        if parts.is_new:
            version = DataVersion(
                counter=next(_passing), state_version=wrapper.data_version.state_version
            )
        some = replace(wrapper, data_version=version, topic_config_table=part)
        yield replace(body, topic_config_serialize_wrapper=some)
    parts.ends = True
    rest = replace(wrapper, topic_config_table=dict(topics))
    yield replace(body, topic_config_serialize_wrapper=rest)


def drop_odd_topics(broker_name: str, body: RegisterBrokerBody) -> None:
    """Drops topics with bad names (R46), or with more queues than any broker has: clients make an
    object of each (R58). A broker of an earlier version may have some, and its other topics must be
    found."""
    topics = body.topic_config_serialize_wrapper.topic_config_table
    odd = odd_topics(topics)
    if max(chain.from_iterable(map(_QUEUES, topics.values())), default=0) > TOPIC_QUEUES_MAX:
        odd += [
            topic for topic, config in topics.items() if max(_QUEUES(config)) > TOPIC_QUEUES_MAX
        ]
    for topic in odd:
        topics.pop(topic, None)
    if odd:
        log.warning(
            "topics_not_registered broker_name=%s count=%d first=%r reason='no legal names or"
            " numbers of queues'",
            broker_name,
            len(odd),
            odd[0][:TOPIC_LENGTH_MAX],
        )


def drop_what_no_route_shows(body: RegisterBrokerBody) -> None:
    """R58: of a topic only the name and a few numbers are kept."""
    topics = body.topic_config_serialize_wrapper.topic_config_table
    if not _is_plain(topics):
        for name, topic in topics.items():
            topic.topic_name, topic.topic_filter_type, topic.attributes = name, "", _NO_ATTRIBUTES
    servers = body.filter_server_list[:_FILTER_SERVERS_MAX]
    body.filter_server_list = [each for each in servers if text_problem(each) is None]


def _is_plain(topics: dict[str, TopicConfig]) -> bool:
    each = topics.values()
    return (
        # R58: no Python loop, since a table of 10,000 topics is checked in one turn.
        not any(map(attrgetter("attributes"), each))
        and _FILTER_TYPES.issuperset(map(attrgetter("topic_filter_type"), each))
        and all(map(eq, topics, map(attrgetter("topic_name"), each)))
    )
