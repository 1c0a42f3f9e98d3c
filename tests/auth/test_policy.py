"""What policies decide: RocketMQ's order of precedence, and the rights of each request code."""

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batonmq.auth.config import AuthConfig
from batonmq.auth.policy import (
    CUSTOM,
    NODES,
    AclInfo,
    Decision,
    KnownUser,
    Need,
    PolicyEntry,
    PolicyInfo,
    User,
    check_user,
    merged,
    without,
)
from batonmq.auth.rights import RIGHTS, needs_of
from batonmq.protocol.codes import RequestCode
from batonmq.protocol.errors import BrokerRefusal
from batonmq.remoting.command import RemotingCommand
from tests.fuzz.targets import by_the_page


def entry(resource: str, actions: str = "All", decision: str = "Allow", ips: str = "") -> Any:
    return PolicyEntry(
        resource=resource,
        actions=actions.split(","),
        decision=decision,
        source_ips=ips.split(",") if ips else [],
    )


def user_with(*entries: PolicyEntry, default: tuple[PolicyEntry, ...] = ()) -> User:
    acl = AclInfo(
        policies=[
            PolicyInfo(policy_type="Custom", entries=list(entries)),
            PolicyInfo(policy_type="Default", entries=list(default)),
        ]
    )
    return merged(User(username="u", password="p"), acl)


def decide(
    user: User, resource: str, *actions: str, source: str = "10.0.0.1", cluster: str = "C"
) -> Decision:
    kind, _, name = resource.partition(":")
    return KnownUser(user).evaluate(Need(((kind, name),), actions), source, cluster)


@pytest.mark.parametrize(
    ("entries", "resource", "action", "allowed"),
    [
        ([], "Topic:a", "Pub", False),
        ([entry("Topic:a", "Pub")], "Topic:a", "Pub", True),
        ([entry("topic:a", "pub", "ALLOW")], "Topic:a", "Pub", True),
        ([entry("Topic:a", "Pub")], "Topic:a", "Sub", False),
        ([entry("Topic:a", "Pub")], "Topic:ab", "Pub", False),
        ([entry("Topic:a", "Pub")], "Group:a", "Pub", False),
        ([entry("Topic:a*", "Pub")], "Topic:ab", "Pub", True),
        ([entry("Topic:a*b*", "Pub")], "Topic:axx", "Pub", True),
        ([entry("Topic:a*b", "Pub")], "Topic:axb", "Pub", False),
        ([entry("Topic:a*b", "Pub")], "Topic:a*b", "Pub", True),
        ([entry("Topic:*", "Pub")], "Topic:x", "Pub", True),
        ([entry("Topic:*", "Pub")], "Group:x", "Pub", False),
        ([entry("*")], "Cluster:", "Update", True),
        ([entry("Cluster:D", "Get")], "Cluster:", "Get", False),
        ([entry("Cluster:C", "Get")], "Cluster:", "Get", True),
        # the more specific one decides, whichever it is
        ([entry("*"), entry("Topic:*", "All", "Deny")], "Topic:a", "Pub", False),
        ([entry("*", "All", "Deny"), entry("Topic:*")], "Topic:a", "Pub", True),
        ([entry("Topic:ab*", "Pub", "Deny"), entry("Topic:a*")], "Topic:abc", "Pub", False),
        ([entry("Topic:ab*", "Pub"), entry("Topic:a*", "All", "Deny")], "Topic:abc", "Pub", True),
        ([entry("Topic:a"), entry("Topic:a*", "All", "Deny")], "Topic:a", "Pub", True),
        ([entry("Topic:a*"), entry("Topic:a", "Sub", "Deny")], "Topic:a", "Pub", True),
    ],
)
def test_the_most_specific_entry_decides(
    entries: list[PolicyEntry], resource: str, action: str, allowed: bool
) -> None:
    for order in (entries, entries[::-1]):
        assert decide(user_with(*order), resource, action).allowed is allowed


def test_one_action_of_several_is_enough() -> None:
    user = user_with(entry("Topic:a", "Get"))
    assert decide(user, "Topic:a", "Pub", "Sub", "Get").allowed
    assert not decide(user, "Topic:a", "Pub", "Sub").allowed


@pytest.mark.parametrize(
    ("ips", "source", "allowed"),
    [
        ("10.0.0.1", "10.0.0.1", True),
        ("10.0.0.1", "10.0.0.2", False),
        ("10.0.0.0/8", "10.200.3.4", True),
        ("10.0.0.0/8", "11.0.0.1", False),
        ("10.0.0.0/8", "::ffff:10.0.0.1", True),
        ("fd00::/8", "fd12::1", True),
        ("fd00::/8", "10.0.0.1", False),
        ("192.168.0.1,10.0.0.0/8", "10.0.0.1", True),
        ("0.0.0.0/0", "?", False),
    ],
)
def test_an_entry_may_be_for_some_addresses(ips: str, source: str, allowed: bool) -> None:
    user = user_with(entry("Topic:a", "Pub", "Allow", ips))
    assert decide(user, "Topic:a", "Pub", source=source).allowed is allowed


def test_the_default_policy_counts_where_no_custom_entry_matches() -> None:
    user = user_with(entry("Topic:a", "Sub", "Deny"), default=(entry("Topic:*", "Sub"),))
    assert not decide(user, "Topic:a", "Sub").allowed
    assert decide(user, "Topic:b", "Sub").allowed
    assert "Default policy: Allow Sub on Topic:*" in decide(user, "Topic:b", "Sub").reason


def test_super_and_disabled_users() -> None:
    root = User(username="u", password="p", user_type="Super")
    assert decide(root, f"{NODES}:", "Update").allowed
    assert not decide(
        msgspec.structs.replace(root, user_status="disable"), "Topic:a", "Pub"
    ).allowed
    everything = user_with(entry("*"))
    assert decide(everything, "Topic:a", "Pub").allowed
    assert not decide(everything, f"{NODES}:", "Update").allowed


NAMES = st.sampled_from(["a", "ab", "abb", "b"])
RESOURCES = st.sampled_from(
    ["*", "Topic:*", "Topic:a*", "Topic:ab*", "Topic:ab", "Topic:b", "Group:a*"]
)
ENTRIES = st.lists(
    st.builds(
        entry,
        RESOURCES,
        st.sampled_from(["All", "Pub", "Sub", "Pub,Sub"]),
        st.sampled_from(["Allow", "Deny"]),
        st.sampled_from(["", "10.0.0.0/8", "11.0.0.1"]),
    ),
    max_size=6,
    unique_by=lambda each: each.resource,
)


@given(st.data(), ENTRIES, NAMES, st.sampled_from(["Pub", "Sub"]))
def test_the_order_of_entries_never_matters(
    data: st.DataObject, entries: list[PolicyEntry], name: str, action: str
) -> None:
    other = data.draw(st.permutations(entries))
    first, second = (decide(user_with(*each), f"Topic:{name}", action) for each in (entries, other))
    assert first == second


@given(ENTRIES, ENTRIES, NAMES, st.sampled_from(["Pub", "Sub"]), st.sampled_from(["10.1.1.1", "?"]))
def test_a_decision_is_the_one_that_the_page_describes(
    custom: list[PolicyEntry], default: list[PolicyEntry], name: str, action: str, source: str
) -> None:
    user = user_with(*custom, default=tuple(default))
    decided = decide(user, f"Topic:{name}", action, source=source).allowed
    assert decided is by_the_page(user, "Topic", name, action, source)


def test_equal_resources_are_replaced_and_others_kept() -> None:
    user = user_with(entry("Topic:a", "Pub"), entry("Group:g", "Sub"))
    user = merged(user, AclInfo(policies=[PolicyInfo(entries=[entry("Topic:a", "Sub")])]))
    assert list(user.policies[CUSTOM]) == ["Topic:a", "Group:g"]
    assert not decide(user, "Topic:a", "Pub").allowed and decide(user, "Topic:a", "Sub").allowed
    assert list(without(user, None, "topic:a").policies[CUSTOM]) == ["Group:g"]
    assert without(user, None, None).acl().policies == []


@pytest.mark.parametrize(
    "bad",
    [
        entry("Topic"),
        entry("Table:a"),
        entry("Topic:"),
        entry(f"{NODES}:x"),
        entry("Topic:a", "Fly"),
        entry("Topic:a", "Pub", "Maybe"),
        entry("Topic:a", "Pub", "Allow", "10.0.0.300"),
        PolicyEntry(resource="Topic:a", actions=[]),
    ],
)
def test_what_is_no_entry_is_refused_by_name(bad: PolicyEntry) -> None:
    with pytest.raises(BrokerRefusal):
        user_with(bad)


def test_an_entry_has_a_size() -> None:
    """A user with all its entries is one record of the log."""
    largest = entry("Topic:" + "a" * 294, ips=",".join(["10.0.0.1"] * 64))
    user = user_with(largest)
    for bad in (entry(largest.resource + "a"), entry("Topic:a", ips=",".join(["10.0.0.1"] * 65))):
        with pytest.raises(BrokerRefusal, match="most") as caught:
            user_with(bad)
        assert len(caught.value.remark) < 300
    many = [entry(f"Topic:{number}") for number in range(1023)]
    full = merged(user, AclInfo(policies=[PolicyInfo(entries=many)]))
    with pytest.raises(BrokerRefusal, match="at most 1024 entries"):
        merged(full, AclInfo(policies=[PolicyInfo(entries=[entry("Group:g")])]))


@pytest.mark.parametrize("name", ["", "a b", "a/b", "a,b", "..", "é", "x" * 129])
def test_names_that_no_client_could_use(name: str) -> None:
    with pytest.raises(BrokerRefusal) as caught:
        check_user(User(username=name, password="hidden-secret"))
    assert "hidden" not in str(caught.value)
    longest = User(username="x" * 128, password="p" * 128)
    assert check_user(longest) == longest
    for secrets in ({"password": "p" * 129}, {"next_password": "p" * 129}, {"password": ""}):
        with pytest.raises(BrokerRefusal, match="1 to 128 characters"):
            check_user(msgspec.structs.replace(longest, **secrets))


def ask(code: int, body: object = None, **ext: str) -> list[str]:
    data = b"" if body is None else json.dumps(body).encode()
    return [str(need) for need in needs_of(code, RemotingCommand.request(code, ext, data))]


def test_retry_and_dead_letter_topics_follow_their_group() -> None:
    pull = RequestCode.PULL_MESSAGE
    assert ask(pull, consumerGroup="g", topic="T") == ["Sub on Group:g", "Sub on Topic:T"]
    assert ask(pull, consumerGroup="g", topic="%RETRY%g") == ["Sub on Group:g"]
    other = ask(pull, consumerGroup="g", topic="%RETRY%h")
    assert other == ["Sub on Group:g", "Sub on Group:h"]
    dlq = ask(pull, consumerGroup="g", topic="%DLQ%h")
    assert dlq == ["Sub on Group:g", "Sub on Topic:%DLQ%h or Group:h"]
    # POP's: the ack of a message that came again names its retry topic
    ack = RequestCode.ACK_MESSAGE
    assert ask(ack, consumerGroup="g", topic="%RETRY%g+T") == ["Sub on Group:g"]
    assert ask(RequestCode.SEND_MESSAGE_V2, a="p", b="%RETRY%g") == ["Sub on Group:g"]
    assert ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, topic="%RETRY%g") == ["Pub/Sub/Get on Group:g"]


@pytest.mark.parametrize("code", [11, 361, 200050, 200052, 200054, 200055])
def test_a_group_whose_name_begins_like_another_does_not_read_its_retries(code: int) -> None:
    """`%RETRY%bar_vip` is the topic of group bar_vip, and POP's of group bar in topic vip. Clients
    of POP acknowledge by that name, and never read by it: only there the topic is enough."""
    needs = ask(code, consumerGroup="bar", topic="%RETRY%bar_vip")
    assert needs == ["Sub on Group:bar", "Sub on Group:bar_vip"]
    for ack in (200051, 200053):
        needs = ask(ack, consumerGroup="bar", topic="%RETRY%bar_vip")
        assert needs == ["Sub on Group:bar", "Sub on Group:bar_vip or Topic:vip"]


DECOYS = dict.fromkeys(["topic", "b", "group", "consumerGroup", "groupName", "srcGroup"], "mine")


@pytest.mark.parametrize(
    ("code", "fields", "needs"),
    [
        (10, {"topic": "T"}, ["Pub on Topic:T"]),
        (310, {"b": "T"}, ["Pub on Topic:T"]),
        (324, {"topic": "T"}, ["Pub on Topic:T"]),
        (325, {"b": "T"}, ["Pub on Topic:T"]),
        (208, {"consumerGroup": "g", "topic": "T"}, ["Get on Group:g", "Get on Topic:T"]),
        (303, {"group": "g", "topic": "T"}, ["Get on Group:g", "Get on Topic:T"]),
        (345, {"group": "g", "topic": "T"}, ["Get on Group:g", "Get on Topic:T"]),
        (222, {"group": "g", "topic": "T"}, ["Update on Group:g", "Update on Topic:T"]),
        (207, {"groupName": "g"}, ["Delete on Group:g"]),
        (38, {"consumerGroup": "g"}, ["Sub/Get on Group:g"]),
    ],
)
def test_a_field_that_the_handler_does_not_read_gives_no_right(
    code: int, fields: dict[str, str], needs: list[str]
) -> None:
    """A stranger adds the fields of other codes, with names on which it has rights."""
    assert ask(code, **(DECOYS | fields)) == needs
    assert ask(code, **fields) == needs


def test_each_topic_of_a_list_is_asked_for() -> None:
    needs = ask(208, consumerGroup="g", topicList="A;;B")
    assert sorted(needs) == ["Get on Group:g", "Get on Topic:A", "Get on Topic:B"]


def test_a_group_without_a_name_is_not_named_like_the_cluster() -> None:
    user = user_with(entry("Group:C", "Sub"), entry("Cluster:C", "Get"))
    assert not decide(user, "Group:", "Sub").allowed
    assert decide(user, "Cluster:", "Get").allowed


def test_internal_topics_are_read_by_nodes_only() -> None:
    """They hold messages of all topics: delayed ones, half ones, discarded ones."""
    for topic in (
        "SCHEDULE_TOPIC_XXXX",
        "RMQ_SYS_TRANS_HALF_TOPIC",
        "rmq_sys_wheel_timer",
        "TRANS_CHECK_MAX_TIME_TOPIC",
        "rmq_sys_BATON_POP",
        "rmq_sys_BATON_USERS",
    ):
        node = f"Sub on {NODES}:{topic}"
        for code in (11, 361, 200050, 200052):
            assert ask(code, consumerGroup="g", topic=topic) == ["Sub on Group:g", node]
        assert ask(12, topic=topic) == [f"Sub/Get on {NODES}:{topic}"]
        body = {
            "clientID": "c",
            "consumerDataSet": [{"groupName": "g", "subscriptionDataSet": [{"topic": topic}]}],
        }
        assert ask(RequestCode.HEART_BEAT, body) == ["Sub on Group:g", node]
        # figures are not messages
        assert ask(RequestCode.GET_TOPIC_STATS_INFO, topic=topic) == [f"Get on Topic:{topic}"]
    assert ask(12, topic="RMQ_SYS_TRACE_TOPIC") == ["Sub/Get on Topic:RMQ_SYS_TRACE_TOPIC"]


def test_internal_topics_are_for_nodes_and_traces_for_all() -> None:
    send = RequestCode.SEND_MESSAGE_V2
    assert ask(send, b="RMQ_SYS_TRACE_TOPIC") == []
    assert ask(send, b="rmq_sys_BATON_USERS") == [f"Pub on {NODES}:rmq_sys_BATON_USERS"]
    assert ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, topic="TBW102") == []


def test_a_heartbeat_needs_what_its_consumers_read() -> None:
    body = {
        "clientID": "c",
        "consumerDataSet": [
            {"groupName": "g", "subscriptionDataSet": [{"topic": "T"}, {"topic": "%RETRY%g"}]}
        ],
        "producerDataSet": [{"groupName": "CLIENT_INNER_PRODUCER"}],
    }
    assert ask(RequestCode.HEART_BEAT, body) == ["Sub on Group:g", "Sub on Topic:T"]


def test_a_code_without_a_row_and_a_request_that_names_nothing_are_denied() -> None:
    assert ask(4711) == [f"Update on {NODES}"]
    with pytest.raises(BrokerRefusal, match="topic"):
        ask(RequestCode.PULL_MESSAGE, consumerGroup="g")


def test_every_code_of_this_protocol_has_a_row() -> None:
    """But for requests to clients."""
    elsewhere = {
        RequestCode.CHECK_TRANSACTION_STATE,
        RequestCode.RESET_CONSUMER_CLIENT_OFFSET,
        RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT,
        RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT,
    }
    assert set(RequestCode) - elsewhere == set(RIGHTS)


def test_what_an_admin_changes_is_in_the_audit_log() -> None:
    writes = {
        code for code, right in RIGHTS.items() if re.search("Create|Update|Delete", right.text)
    }
    of_super_users = {RequestCode.CONSUME_MESSAGE_DIRECTLY, RequestCode.RESET_MASTER_FLUSH_OFFSET}
    expected = writes - {RequestCode.UPDATE_CONSUMER_OFFSET} | of_super_users
    assert {code for code, right in RIGHTS.items() if right.changes} == expected


def test_the_page_has_the_table_of_rights() -> None:
    rows: dict[str, list[str]] = {}
    for code, right in RIGHTS.items():
        rows.setdefault(right.text, []).append(f"{RequestCode(code).name} ({int(code)})")
    page = (Path(__file__).resolve().parents[2] / "docs" / "security.md").read_text("utf-8")
    _, _, table = page.partition("| right | requests |\n|---|---|\n")
    shown = table.partition("\n\n")[0].splitlines()
    assert shown == [f"| {text} | {', '.join(names)} |" for text, names in rows.items()]


NODE = '{"accessKey":"node","secretKey":"hidden-secret"}'


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"authorization_enabled": True}, "authenticationEnabled"),
        ({"authentication_enabled": True}, "innerClientAuthenticationCredentials"),
        (
            {
                "authentication_enabled": True,
                "inner_client_authentication_credentials": '{"accessKey":"hidden-secret"',
            },
            "allowed is",
        ),
        ({"init_authentication_user": '{"username":"a b","password":"hidden-secret"}'}, "username"),
        ({"authentication_whitelist": "10, x"}, "authenticationWhitelist"),
        ({"authorization_whitelist": "10, 3001"}, "3001: requests about users are always checked"),
    ],
)
def test_settings_that_would_not_protect_are_refused(settings: Any, names: str) -> None:
    with pytest.raises(ValueError, match=names) as caught:
        AuthConfig(**settings)
    assert "hidden" not in str(caught.value)


def test_the_settings() -> None:
    config = AuthConfig(
        authentication_enabled=True,
        authorization_enabled=True,
        inner_client_authentication_credentials=NODE,
        init_authentication_user='{"username":"admin","password":"12345678"}',
        authorization_whitelist="105, 34",
    )
    assert config.node.access_key == "node" and config.not_authorized == {105, 34}
    assert config.first_user is not None and config.first_user.user_type == "Super"
