"""`python -m lab.reference`: writes docs/reference.md and docs/python-api.md from the code.

`tests/test_docs.py` fails where a page is not what this program makes.
"""

import ast
import dataclasses
import enum
import functools
import importlib
import inspect
import itertools
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import click
import msgspec

import batonmq
from batonmq.broker.config import RUNTIME_KEYS as BROKER_LIVE
from batonmq.broker.main import SECTIONS as BROKER_SECTIONS
from batonmq.client.admin.cluster import BrokerAdmin, ClusterAdmin
from batonmq.client.admin.consumer_groups import ConsumerGroupAdmin
from batonmq.client.admin.messages import MessageAdmin
from batonmq.client.admin.topics import TopicAdmin
from batonmq.client.admin.users import UserAdmin
from batonmq.client.instance.connections import Connections
from batonmq.client.instance.heartbeats import ClientMember
from batonmq.client.instance.routes import RouteListener
from batonmq.controller.config import RUNTIME_KEYS as CONTROLLER_LIVE
from batonmq.mqctl.main import cli
from batonmq.namesrv.config import RUNTIME_KEYS as NAMESRV_LIVE
from batonmq.namesrv.main import SECTIONS as NAMESRV_SECTIONS
from batonmq.protocol.codes import ResponseCode
from batonmq.protocol.json_body import Json

DOCS: Final = Path(__file__).resolve().parents[1] / "docs"
SOURCE: Final = DOCS.parent / "batonmq"
_CODE: Final = re.compile(r"\bResponseCode\.([A-Z_]+)")
MADE: Final = "<!-- Made by `make reference`; not to be edited. -->"

MEANINGS: Final[dict[str, str]] = {
    "SUCCESS": "done; of a send: on every member of the SyncStateSet",
    "SYSTEM_ERROR": "the remark says what failed",
    "SYSTEM_BUSY": "too much waits already, or a queue is locked; repeat it later",
    "REQUEST_CODE_NOT_SUPPORTED": "this server does not know the request",
    "FLUSH_DISK_TIMEOUT": "stored, not synced in time",
    "SLAVE_NOT_AVAILABLE": "stored; without controllers: too few slaves follow",
    "FLUSH_SLAVE_TIMEOUT": "stored, not confirmed in time: a failover may lose it. Send again",
    "MESSAGE_ILLEGAL": "the message is too large, or its topic or properties are not allowed",
    "SERVICE_NOT_AVAILABLE": "no write now: no master, no lease, a full disk. Clients retry",
    "NO_PERMISSION": "the topic, the broker or the user lacks the right; the remark says which",
    "TOPIC_NOT_EXIST": "no route; with `autoCreateTopicEnable` a send creates it",
    "PULL_NOT_FOUND": "nothing to read yet",
    "PULL_RETRY_IMMEDIATELY": "nothing in this stretch fits the filter; ask from the next offset",
    "PULL_OFFSET_MOVED": "the offset is outside of the queue; the answer names a valid one",
    "QUERY_NOT_FOUND": "no such message or offset",
    "SUBSCRIPTION_PARSE_FAILED": "the filter is no expression",
    "SUBSCRIPTION_NOT_EXIST": "the group does not subscribe to the topic",
    "SUBSCRIPTION_NOT_LATEST": "the broker knows an older one; heartbeats bring the new one",
    "SUBSCRIPTION_GROUP_NOT_EXIST": "no such group; `autoCreateSubscriptionGroup` creates it",
    "INVALID_PARAMETER": "a field of the request is wrong; the remark says which",
    "FILTER_DATA_NOT_EXIST": "the group has no filter of the topic; heartbeats bring it",
    "FILTER_DATA_NOT_LATEST": "the broker knows an older filter; heartbeats bring the new one",
    "CONSUMER_NOT_ONLINE": "no member of the group is connected",
    "CONSUME_MSG_TIMEOUT": "the client did not answer in time",
    "NO_MESSAGE": "an ack names an offset that the queue does not have",
    "POLLING_FULL": "too many POPs wait",
    "POLLING_TIMEOUT": "no message came while a POP waited",
    "ILLEGAL_OPERATION": "a recall whose handle does not fit, or comes too late",
    "CONTROLLER_FENCED_MASTER_EPOCH": "the asker's masterEpoch is not the newest: it was deposed",
    "CONTROLLER_FENCED_SYNC_STATE_SET_EPOCH": "the set was changed meanwhile; ask with the new one",
    "CONTROLLER_INVALID_MASTER": "the asker is not the master",
    "CONTROLLER_INVALID_REPLICAS": "a replica of the request is not known, or not alive",
    "CONTROLLER_MASTER_NOT_AVAILABLE": "no replica may be elected: `mqctl health` says why",
    "CONTROLLER_INVALID_REQUEST": "the request contradicts itself",
    "CONTROLLER_BROKER_NOT_ALIVE": "the broker has no session",
    "CONTROLLER_NOT_LEADER": "another controller leads, or none; clients find it",
    "CONTROLLER_BROKER_METADATA_NOT_EXIST": "no such group or broker is registered",
    "CONTROLLER_INVALID_CLEAN_BROKER_METADATA": "a broker that is alive is not forgotten",
    "CONTROLLER_BROKER_NEED_TO_BE_REGISTERED": "the broker has to register first",
    "CONTROLLER_MASTER_STILL_EXIST": "the master is alive",
    "CONTROLLER_ELECT_MASTER_FAILED": "the election failed; the remark says why",
    "CONTROLLER_ALTER_SYNC_STATE_SET_FAILED": "the change of the set failed; the remark says why",
    "CONTROLLER_BROKER_ID_INVALID": "the broker id belongs to another store",
}


def table(head: str, rows: Iterator[tuple[str, ...]]) -> str:
    columns = head.count("|") + 1
    lines = [f"| {head} |", "|" + "---|" * columns]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def _text(words: str) -> str:
    return textwrap.fill(" ".join(words.split()), 100, break_on_hyphens=False)


def _default(value: Any) -> str:
    if value is msgspec.NODEFAULT or value is None or value == "":
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)


def keys(config: type[msgspec.Struct], live: frozenset[str]) -> Iterator[tuple[str, ...]]:
    for field in msgspec.structs.fields(config):
        name = field.encode_name
        yield f"`{name}`", _default(field.default), "live" if name in live else ""


def commands() -> Iterator[tuple[str, ...]]:
    context = click.Context(cli)
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        assert command is not None
        arguments = [
            p.make_metavar(context) for p in command.params if p.param_type_name == "argument"
        ]
        what = (command.help or command.short_help or "").partition("\n\n")[0]
        yield f"`mqctl {' '.join([name, *arguments])}`", " ".join(what.split())


def codes_sent() -> set[str]:
    """Names of the codes that the servers' source names."""
    folders = ("broker", "controller", "namesrv", "remoting", "auth")
    files = (file for name in folders for file in (SOURCE / name).rglob("*.py"))
    return {name for file in files for name in _CODE.findall(file.read_text("utf-8"))}


def reference() -> str:
    sent = codes_sent()
    sections = {
        **{name: (config, BROKER_LIVE) for name, config in BROKER_SECTIONS.items()},
        "namesrv": (NAMESRV_SECTIONS["namesrv"], NAMESRV_LIVE),
        "controller": (NAMESRV_SECTIONS["controller"], CONTROLLER_LIVE),
    }
    parts = [
        "# Reference",
        MADE,
        "Every key, command and status code.",
        "## Keys",
        _text("""
        By section of a server's file, with their defaults; an empty default is empty, or made at
        the start. *live*: may be changed while running. Keys that RocketMQ lacks are explained in
        [settings.md](settings.md), those of `tls:` and `auth:` in [security.md](security.md), the
        others mean what they mean in RocketMQ.
        """),
    ]
    for name, (config, live) in sections.items():
        parts += [f"### `{name}:`", table("key | default | live", keys(config, live))]
    parts += [
        "## Commands",
        "`mqctl NAME --help` has the options, and the fields of `--json`.",
        table("command | what it does", commands()),
        "## Status codes",
        _text("""RocketMQ's numbers and names. Our servers send those in this table, and with each a
        remark that says what is wrong."""),
        table(
            "number | name | meaning",
            (
                (str(code.value), code.name, MEANINGS[code.name])
                for code in ResponseCode
                if code.name in sent
            ),
        ),
    ]
    return "\n\n".join(parts) + "\n"


# The Python API.


def _said(thing: Any) -> str:
    """Its docstring, of a class with its paragraphs; "" if it has none of its own."""
    text = inspect.cleandoc(vars(thing).get("__doc__") or "") if inspect.isclass(thing) else ""
    if not inspect.isclass(thing):
        text = inspect.getdoc(thing) or ""
    if inspect.isclass(thing) and text.startswith(f"{thing.__name__}("):
        return ""  # a dataclass without one
    paragraphs = text.split("\n\n") if inspect.isclass(thing) else [text]
    return "\n\n".join(" ".join(each.split()) for each in paragraphs).replace("<", "&lt;")


def _assigned(value: Any) -> str:
    """`=value`; "" without a default, and for one that is no literal of Python."""
    if value in (dict, list):
        return f"={value()}"
    if isinstance(value, enum.Enum):
        return f"={type(value).__name__}.{value.name}"
    return f"={value!r}" if isinstance(value, bool | int | str | bytes | None | tuple) else ""


def _parameters(function: Any) -> str:
    words, starred = [], False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name in ("self", "cls"):
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            words.append("*")
            starred = True
        variadic = {parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD}
        star = str(parameter).partition(parameter.name)[0] if parameter.kind in variadic else ""
        starred = starred or star == "*"
        words.append(star + parameter.name + _assigned(parameter.default))
    return ", ".join(words)


_INNER: Final = (ClientMember, RouteListener, Connections, Json)
"""What a client instance and its producers and consumers call of each other, and what they do with
the bodies of answers."""


def _members(kind: type[Any]) -> Iterator[tuple[str, ...]]:
    for name, member in inspect.getmembers(kind):
        if name.startswith("_") or not any(name in vars(base) for base in _ours(kind)):
            continue
        if any(name in vars(base) for base in _INNER if issubclass(kind, base)):
            continue
        static = inspect.getattr_static(kind, name)
        if isinstance(static, functools.cached_property):
            yield f"`{name}`", f"See `{kind.__name__}.{name}`."
        elif isinstance(static, property):
            yield f"`{name}`", _said(static)
        elif inspect.isfunction(member) or inspect.ismethod(member):
            wait = "await " if inspect.iscoroutinefunction(member) else ""
            yield f"`{wait}{name}({_parameters(member)})`", _said(member)


def _ours(kind: type[Any]) -> list[type[Any]]:
    return [base for base in kind.__mro__ if base.__module__.startswith("batonmq")]


def _fields(kind: type[Any]) -> list[str]:
    fields: tuple[Any, ...] = ()
    if dataclasses.is_dataclass(kind):
        fields = dataclasses.fields(kind)
    elif issubclass(kind, msgspec.Struct):
        fields = msgspec.structs.fields(kind)
    return [
        field.name + (_assigned(field.default) or _assigned(field.default_factory))
        for field in fields
        if not field.name.startswith("_")
    ]


def _said_below(name: str) -> str:
    """The text below the definition of a public name that is no class."""
    public = (SOURCE / "public.py").read_text("utf-8")
    module = re.search(rf"^from (\S+) import {name} ", public, re.MULTILINE)
    assert module is not None
    body = ast.parse(inspect.getsource(importlib.import_module(module[1]))).body
    for node, below in itertools.pairwise(body):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            assert isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant), name
            return " ".join(str(below.value.value).split())
    raise AssertionError(name)


def _entry(name: str, kind: Any) -> str:
    if not inspect.isclass(kind):
        return f"### {name}\n\n{_said_below(name)}"
    parts = [f"### {name}", _said(kind)]
    if issubclass(kind, enum.Enum):
        parts.append(", ".join(f"`{member}`" for member in kind.__members__) + ".")
    elif fields := _fields(kind):
        parts.append("Fields: " + ", ".join(f"`{field}`" for field in fields) + ".")
    elif "." not in name and not issubclass(kind, BaseException) and "__init__" in vars(kind):
        parts.append(f"`{name}({_parameters(kind)})`")
    rows = [] if issubclass(kind, enum.Enum) else list(_members(kind))
    if rows and not issubclass(kind, BaseException):
        parts.append(table("member | what it does", iter(rows)))
    return "\n\n".join(filter(None, parts))


_ADMIN_PARTS: Final = {
    "Admin.brokers": BrokerAdmin,
    "Admin.cluster": ClusterAdmin,
    "Admin.consumer_groups": ConsumerGroupAdmin,
    "Admin.messages": MessageAdmin,
    "Admin.topics": TopicAdmin,
    "Admin.users": UserAdmin,
}


def python_api() -> str:
    names = {name: getattr(batonmq, name) for name in dir(batonmq)} | _ADMIN_PARTS
    groups: dict[str, list[str]] = {
        "Clients": [],
        "Options, messages and answers": [],
        "Errors": [],
    }
    for name, kind in sorted(names.items()):
        if name == "ResponseCode":
            continue
        is_error = inspect.isclass(kind) and issubclass(kind, BaseException)
        is_client = name.endswith(("Producer", "Consumer", "Admin", "Instance")) or "." in name
        group = (
            "Errors" if is_error else "Clients" if is_client else "Options, messages and answers"
        )
        groups[group].append(_entry(name, kind))
    parts = [
        "# Python API",
        MADE,
        _text("""
        All public names of `batonmq`, for the words behind `from batonmq import`. Types are in the
        code: `help(batonmq.Producer)` shows them. Times are in ms unless a text says seconds.
        Begin with the programs in [examples](../examples/README.md), which paste and run.
        `batonmq.blocking` has the same classes without asyncio (`BlockingProducer`, ...),
        `batonmq.otel` a hook for OpenTelemetry. Status codes:
        [reference.md](reference.md#status-codes).
        """),
    ]
    for title, entries in groups.items():
        parts += [f"## {title}", *entries]
    return "\n\n".join(parts) + "\n"


PAGES: Final = {"reference.md": reference, "python-api.md": python_api}


if __name__ == "__main__":
    for page, make in PAGES.items():
        (DOCS / page).write_text(make(), encoding="utf-8")
