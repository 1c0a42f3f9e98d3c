"""R58: no turn of the loop handles all users, since there may be 10,000."""

import asyncio
import inspect
import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

from batonmq.auth.policy import AclInfo, PolicyEntry, PolicyInfo, Rulebook, User, merged
from batonmq.broker.tables.users import USERS_MAX, UserService, UserTable
from batonmq.broker.user_processor import UserProcessor
from batonmq.protocol.codes import RequestCode
from batonmq.remoting.command import RemotingCommand
from batonmq.remoting.connection import Processors
from tests.shared.turns import counted_turns
from tests.test_request_cost import LINES_MAX

CODES = {
    RequestCode.AUTH_LIST_USER: lambda found: len(found),
    RequestCode.AUTH_LIST_ACL: lambda found: sum(len(acl["policies"]) for acl in found),
}


@pytest.fixture(scope="module")
def users() -> list[User]:
    entries = [PolicyEntry(resource=f"Topic:T{n}", actions=["PUB"], decision="ALLOW") for n in "ab"]
    acl = AclInfo(subject="User:u", policies=[PolicyInfo(policy_type="CUSTOM", entries=entries)])
    policies = merged(User(username="u", password="secret"), acl).policies
    user = User(username="u", password="secret", policies=policies)
    return [msgspec.structs.replace(user, username=f"u{n}") for n in range(USERS_MAX)]


@pytest.mark.parametrize("code", CODES)
def test_r58_answers_about_all_users_are_made_in_turns(
    tmp_path: Path, users: list[User], code: RequestCode
) -> None:
    table = UserTable(tmp_path / "users.json")
    table.put_all(users)
    processors = Processors()
    UserProcessor(Mock(), UserService(table, Mock(), Mock()), Mock()).register(processors)

    async def ask() -> Any:
        answer = processors.handlers[code](RemotingCommand.request(code), Mock())
        return await answer if inspect.isawaitable(answer) else answer

    with counted_turns() as turns, asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        reply = runner.run(ask())
    assert turns.lines < LINES_MAX and CODES[code](json.loads(reply.body)) == USERS_MAX


def test_r58_a_table_from_the_master_is_taken_over_in_one_short_turn(users: list[User]) -> None:
    """As slaves and name servers do it. Their requests prepare the rules and keys of a user."""
    book = Rulebook("C")
    with counted_turns() as turns:
        turns.run(book.replace, {user.username: user for user in users})
    assert turns.lines < LINES_MAX
    known = book.get("u7")
    assert known is not None and known.user is users[7] and book.get("other") is None
