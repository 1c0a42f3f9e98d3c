"""Which names are legal, and which can be files (R46)."""

import pytest

from batonmq.protocol.errors import BrokerRefusal
from batonmq.protocol.topic_name import (
    check_group,
    check_made_topic,
    check_pop_names,
    check_topic,
    dlq_topic,
    is_file_name,
    pop_retry_topics,
    pop_topic_pairs,
    retry_topic,
    server_name_problem,
)

NOT_BELOW = ["", ".", "..", "/", "a/b", "../commitlog", "/etc", "T/", "a\0"]


@pytest.mark.parametrize("name", [*NOT_BELOW, "n" * 256, "é" * 128, "\ud800"])
def test_r46_what_is_no_direct_child_is_no_file_name(name):
    assert not is_file_name(name)


@pytest.mark.parametrize("name", ["a", "...", "a.b", "%RETRY%g+T", "n" * 255, "é" * 127])
def test_r46_file_names(name):
    assert is_file_name(name)


@pytest.mark.parametrize(
    "name", ["", " ", "a/b", "..", "a\0b", "a\n", "é", "a b", "a.b", "g" * 256]
)
def test_r46_illegal_groups_and_topics(name):
    with pytest.raises(BrokerRefusal):
        check_group(name)
    with pytest.raises(BrokerRefusal):
        check_topic(name)


def test_r46_legal_names_stay_legal():
    check_group("g" * 255)
    check_group("%|aA0_-")
    check_topic("t" * 127)
    check_topic("%|aA0_-")
    check_topic(retry_topic("g" * 248))
    check_topic(dlq_topic("g" * 250))
    check_made_topic(retry_topic("g" * 248))
    check_made_topic(dlq_topic("g" * 250))
    check_made_topic(pop_retry_topics("g" * 120, "t" * 127)[0])
    check_pop_names("g" * 120, "t" * 127)


def test_r46_made_topics_have_the_same_limit():
    for topic in (retry_topic("g" * 249), dlq_topic("g" * 251), "a/b", "a\0b", "", ".."):
        for check in (check_made_topic, check_topic):
            with pytest.raises(BrokerRefusal):
                check(topic)
    with pytest.raises(BrokerRefusal):
        check_topic("t" * 128)
    with pytest.raises(BrokerRefusal, match="too long for POP"):
        check_pop_names("g" * 140, "t" * 120)


def test_r46_the_first_spelling_may_belong_to_several_pairs():
    pairs = list(pop_topic_pairs(pop_retry_topics("pay", "core_orders")[1]))
    assert pairs == [("pay", "core_orders"), ("pay_core", "orders")]


@pytest.mark.parametrize("name", ["", "a#b", "a/b", "..", "a\nb", "b" * 229])
def test_r46_names_of_brokers_and_clusters(name):
    assert server_name_problem(name)
    assert server_name_problem("ip-10-0-0-1.ec2.internal") is None
    assert server_name_problem("b" * 228) is None
