"""`mqctl importMetadata --users`: whose secret is shown, and whose never."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from batonmq.auth.policy import AclInfo, PolicyEntry, PolicyInfo, UserInfo
from batonmq.protocol.errors import ResponseError
from tests.mqctl.conftest import Run


@dataclass
class Users:
    """Of the brokers by address. A name in `refused` may not be made."""

    refused: dict[str, set[str]]
    made: dict[str, dict[str, str]] = field(default_factory=dict)
    rights: list[AclInfo] = field(default_factory=list)
    put: list[AclInfo] = field(default_factory=list)

    async def users(self, address: str) -> list[UserInfo]:
        return [UserInfo(username=name) for name in self.made.get(address, ())]

    async def create_at(self, address: str, user: UserInfo) -> None:
        assert user.username and user.password
        if user.username in self.refused.get(address, ()):
            raise ResponseError(16, "only a super user may do this", address)
        self.made.setdefault(address, {})[user.username] = user.password

    async def acls(self, address: str) -> list[AclInfo]:
        return self.rights

    async def put_acl_at(self, address: str, acl: AclInfo) -> None:
        self.put.append(acl)


def exported(file: Path, *brokers: str) -> str:
    """A file with the users `ann` and `bob` at each broker."""
    user = {"userType": "Normal", "userStatus": "enable"}
    empty: dict[str, Any] = {"topics": {}, "groups": {}, "offsets": {}, "settings": {}}
    of = empty | {"users": {"ann": user, "bob": user}, "acls": []}
    file.write_text(json.dumps({"form": 1, "brokers": dict.fromkeys(brokers, of)}))
    return str(file)


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_a_user_that_was_refused_has_no_secret_to_show(
    mqctl: Run, fake: Any, tmp_path: Path, form: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    (master,) = {data.broker_addrs[0] for data in fake.info.broker_addr_table.values()}
    users = Users({master: {"bob"}})
    fake.users = users
    file = exported(tmp_path / "metadata.json", *fake.info.broker_addr_table)
    drawn = iter(("secret-of-ann", "secret-of-bob"))
    monkeypatch.setattr("secrets.token_urlsafe", lambda size: next(drawn))
    assert mqctl("importMetadata", file, "--users", "--dry-run", *form).code == 0 and not users.made
    ran = mqctl("importMetadata", file, "--users", "--yes", *form)
    assert ran.code == 1 and "user bob: " in ran.err and "only a super user" in ran.err
    assert users.made == {master: {"ann": "secret-of-ann"}}
    assert "secret-of-ann" in ran.out and "secret-of-bob" not in ran.out + ran.err


def test_rights_that_differ_are_named_and_those_in_another_order_do_not(
    mqctl: Run, fake: Any, tmp_path: Path
) -> None:
    """Ann has the rights of the file in another order; Bob has some, and none in the file."""
    (master,) = {data.broker_addrs[0] for data in fake.info.broker_addr_table.values()}
    users = Users({}, {master: {"ann": "a", "bob": "b"}})
    users.rights = [rights_of("ann", "Topic:a", "Topic:b"), rights_of("bob", "Topic:a")]
    fake.users = users
    path = tmp_path / "metadata.json"
    exported(path, *fake.info.broker_addr_table)
    document = json.loads(path.read_text())
    for of in document["brokers"].values():
        of["acls"] = [json.loads(rights_of("ann", "Topic:b", "Topic:a").encode())]
    path.write_text(json.dumps(document))
    ran = mqctl("importMetadata", str(path), "--users", "--yes")
    assert "User:bob has other rights: they stay as they are" in ran.err
    assert "User:ann" not in ran.err and not users.put


def test_rights_without_a_user_in_the_file_are_named(mqctl: Run, fake: Any, tmp_path: Path) -> None:
    """As in a file that was edited by hand: they must not be left out without a word."""
    users = fake.users = Users({})
    path = tmp_path / "metadata.json"
    exported(path, *fake.info.broker_addr_table)
    document = json.loads(path.read_text())
    for of in document["brokers"].values():
        of["acls"] = [json.loads(rights_of(name, "Topic:a").encode()) for name in ("ann", "eve")]
    path.write_text(json.dumps(document))
    ran = mqctl("importMetadata", str(path), "--users", "--yes")
    assert ran.code == 1
    assert "rights of User:eve: its user is not in the file" in ran.err
    assert [acl.subject for acl in users.put] == ["User:ann"]


def rights_of(name: str, *resources: str) -> AclInfo:
    entries = [PolicyEntry(resource=resource, actions=["Pub", "Sub"]) for resource in resources]
    policies = [PolicyInfo(policy_type="Custom", entries=entries)]
    return AclInfo(subject=f"User:{name}", policies=policies)
