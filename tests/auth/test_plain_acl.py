"""ACL 1.0's accounts as users: what RocketMQ's own example becomes, and what is named as lost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batonmq.auth.plain_acl import PlainAcl, PlainAclError, entry_changes, read_plain_acl
from batonmq.auth.policy import KnownUser, Need, User

EXAMPLE = """
globalWhiteRemoteAddresses:
  - 10.10.103.*
  - 192.168.0.*

accounts:
  - accessKey: RocketMQ
    secretKey: 12345678
    whiteRemoteAddress:
    admin: false
    defaultTopicPerm: DENY
    defaultGroupPerm: SUB
    topicPerms:
      - topicA=DENY
      - topicB=PUB|SUB
      - topicC=SUB
    groupPerms:
      # the group should convert to retry topic
      - groupA=DENY
      - groupB=PUB|SUB
      - groupC=SUB

  - accessKey: rocketmq2
    secretKey: 12345678
    whiteRemoteAddress: 192.168.1.*
    # if it is admin, it could access all resources
    admin: true
"""


def may(user: User, kind: str, name: str, action: str) -> bool:
    return KnownUser(user).evaluate(Need(((kind, name),), (action,)), "10.0.0.1", "C").allowed


def read(text: str) -> PlainAcl:
    return read_plain_acl({"plain_acl.yml": text})


def test_the_example_of_rocketmq() -> None:
    found = read(EXAMPLE)
    normal, admin = found.users["RocketMQ"], found.users["rocketmq2"]
    assert (normal.password, normal.user_type) == ("12345678", "Normal")
    assert (admin.user_type, admin.policies) == ("Super", {})
    for kind, name, action, allowed in (
        ("Topic", "topicA", "Pub", False),
        ("Topic", "topicB", "Pub", True),
        ("Topic", "topicB", "Sub", True),
        ("Topic", "topicC", "Pub", False),
        ("Topic", "topicC", "Sub", True),
        ("Topic", "other", "Sub", False),
        ("Group", "groupA", "Sub", False),
        ("Group", "groupB", "Sub", True),
        ("Group", "other", "Sub", True),  # by default
    ):
        assert may(normal, kind, name, action) is allowed, (kind, name, action)
    assert len(found.lost) == 2 and "10.10.103.*, 192.168.0.*" in found.lost[0]
    assert "rocketmq2" in found.lost[1] and "192.168.1.*" in found.lost[1]
    assert "12345678" not in str(found.lost)


def test_each_permission_and_the_spellings_of_a_group() -> None:
    head = "accounts:\n  - {accessKey: u, secretKey: s"
    for perm, allowed in (
        ("PUB", {"Pub"}),
        ("SUB", {"Sub"}),
        ("PUB|SUB", {"Pub", "Sub"}),
        ("SUB | PUB", {"Pub", "Sub"}),
        ("ANY", {"Pub", "Sub"}),
        ("DENY", set()),
    ):
        # a right of its own replaces the default
        user = read(f"{head}, defaultTopicPerm: ANY, topicPerms: ['T={perm}']}}").users["u"]
        assert {action for action in ("Pub", "Sub") if may(user, "Topic", "T", action)} == allowed
        assert may(user, "Topic", "other", "Pub")
    found = read(f"{head}, groupPerms: ['%RETRY%g=SUB'], topicPerms: ['%RETRY%h=SUB']}}")
    assert may(found.users["u"], "Group", "g", "Sub") and may(found.users["u"], "Group", "h", "Sub")
    nothing = read(f"{head}, whiteRemoteAddress: '', topicPerms: }}")
    assert nothing.users["u"].policies == {} and nothing.lost == []


@pytest.mark.parametrize(
    ("account", "names"),
    [
        ("{accessKey: u}", "account u: password"),
        ("{secretKey: hidden}", "account 1"),
        ("{accessKey: 'a b', secretKey: hidden}", "account a b: username"),
        ("{accessKey: u, secretKey: hidden, topicPerms: [T]}", "NAME=PERM"),
        ("{accessKey: u, secretKey: hidden, topicPerms: ['T=READ']}", "READ"),
        ("{accessKey: u, secretKey: hidden, topicPerms: ['T*=PUB']}", "no name"),
        ("{accessKey: u, secretKey: hidden, topicPerms: ['T=PUB', 'T=SUB']}", "two different"),
        ("{accessKey: u, secretKey: hidden, topicPerms: {T: PUB}}", "list"),
        ("{accessKey: u, secretKey: [hidden]}", "no text"),
        ("hidden", "no mapping"),
        ("{accessKey: u, secretKey: hidden}\n  - {accessKey: u, secretKey: hidden}", "twice"),
        ("{accessKey: u, secretKey: hidden: x}", "not YAML at line 2"),
    ],
)
def test_what_cannot_be_read_is_named_without_a_secret(account: str, names: str) -> None:
    with pytest.raises(PlainAclError) as caught:
        read(f"accounts:\n  - {account}\n")
    assert names in str(caught.value) and "hidden" not in str(caught.value)


def test_what_is_not_of_acl_1_is_named() -> None:
    found = read("accounts: [{accessKey: u, secretKey: s, roles: x}]\nextra: 1\ndataVersion: []\n")
    assert [text.split("'")[1] for text in found.lost] == ["extra", "roles"]


def test_a_white_list_that_is_no_list_is_named() -> None:
    """It was an internal error of `mqctl acl import`."""
    with pytest.raises(PlainAclError) as refused:
        read_plain_acl({"f.yml": "globalWhiteRemoteAddresses: 10.0.0.1\naccounts: []\n"})
    assert refused.value.problems == ["f.yml: globalWhiteRemoteAddresses: a list is expected"]


def test_an_entry_is_new_the_same_or_changed() -> None:
    first = read("accounts: [{accessKey: u, secretKey: s, topicPerms: [A=PUB, B=SUB]}]")
    later = read("accounts: [{accessKey: u, secretKey: s, topicPerms: [A=SUB, B=SUB, C=SUB]}]")
    changes = entry_changes(later.users["u"], first.users["u"].acl())
    states = {change.entry.resource: change.state for change in changes}
    assert states == {"Topic:A": "changed", "Topic:B": "same", "Topic:C": "new"}


@given(st.text(), st.sampled_from(["", "accounts: ", "accounts: [", "accounts:\n  - accessKey: "]))
def test_any_text_is_read_or_refused(text: str, before: str) -> None:
    try:
        read(before + text)
    except PlainAclError as error:
        assert error.problems
