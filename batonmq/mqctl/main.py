"""The command `mqctl`: the list of commands by family, each loaded when it is asked for.

RocketMQ's camelCase names are the names; the kebab-case form of each works as well.
"""

from __future__ import annotations

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]  # as in batonmq.launcher.main

from importlib import import_module
from typing import Any, NoReturn

import click

from batonmq.mqctl.params import kebab

# Family -> command -> its module in mqctl.commands.
FAMILIES: dict[str, dict[str, str]] = {
    "Cluster": {
        "health": "health",
        "verdict": "verdict",
        "doctor": "doctor",
        "timeline": "timeline",
        "top": "top",
        "clusterList": "cluster",
        "brokerStatus": "cluster",
        "getBrokerConfig": "cluster",
        "updateBrokerConfig": "cluster",
        "roll": "roll",
        "up": "up",
        "exportMetadata": "metadata",
        "importMetadata": "metadata",
    },
    "Topics": {
        "topicList": "topic",
        "topicRoute": "topic",
        "topicStatus": "topic",
        "statsAll": "topic",
        "getTopicConfig": "topic",
        "updateTopic": "topic",
        "deleteTopic": "topic",
        "describe": "describe",
    },
    "Messages": {
        "sendMessage": "message",
        "consumeMessage": "message",
        "tail": "message",
        "queryMsgById": "message",
        "queryMsgByKey": "message",
        "queryMsgByOffset": "message",
        "dlq": "dlq",
        "bench": "bench",
    },
    "Consumers": {
        "consumerProgress": "consumer",
        "consumerConnection": "consumer",
        "getConsumerConfig": "groups",
        "updateSubGroup": "groups",
        "deleteSubGroup": "groups",
        "producerConnection": "groups",
        "brokerConsumeStats": "groups",
        "resetOffset": "consumer",
        "skip": "consumer",
    },
    "Replication": {
        "getSyncStateSet": "ha",
        "haStatus": "ha",
        "getBrokerEpoch": "ha",
        "repairReplica": "ha",
        "verifyStore": "verify",
        "backup": "backup",
        "restore": "backup",
        "drain": "election",
        "undrain": "election",
        "migrate": "migrate",
    },
    "Controllers": {
        "getControllerMetaData": "controller",
        "getControllerConfig": "controller",
        "updateControllerConfig": "controller",
        "electMaster": "election",
        "cleanBrokerMetadata": "controller",
    },
    "Analysis": {
        "epochHistory": "analysis",
        "messageAudit": "analysis",
        "topicStats": "analysis",
        "streamHistory": "analysis",
        "topicTable": "analysis",
    },
    "Security": {"secure": "secure", "user": "users", "acl": "users", "whoami": "users"},
    "Shell": {"contexts": "contexts", "completion": "completion"},
}
MODULES = {name: module for family in FAMILIES.values() for name, module in family.items()}
OFTEN_TRIED = {"status": "health", "topics": "topicList", "brokers": "clusterList"}
"""What people type first, and the command that they want."""
ALIASES = {kebab(name): name for name in MODULES}


AS_JSON = "batonmq.as_json"
"""In the context's `meta`: whether `--json` was given."""


def _show_as_json(error: click.ClickException) -> None:
    """A script that asked for JSON gets a document on standard output, errors included."""
    import json

    document: dict[str, object] = {"error": error.format_message(), "exitCode": error.exit_code}
    code = getattr(error.__cause__, "code", None)  # of a ResponseError: RocketMQ's response code
    if isinstance(code, int):
        document["code"] = int(code)
    click.echo(json.dumps(document, ensure_ascii=False))


def _no_such_command(ctx: click.Context, name: str) -> NoReturn:
    import difflib

    known = {each.lower(): each for each in (*MODULES, *OFTEN_TRIED)}
    near = difflib.get_close_matches(name.lower().replace("-", ""), known, n=3, cutoff=0.6)
    meant = dict.fromkeys(OFTEN_TRIED.get(known[each], known[each]) for each in near)
    advice = f"did you mean {' or '.join(meant)}?" if meant else "`mqctl --help` lists them"
    ctx.fail(f"no command {name!r}; {advice}")


class Commands(click.Group):
    """Finds a command by either name and imports its module then."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(MODULES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        name = ALIASES.get(cmd_name, cmd_name)
        if name not in MODULES:
            return None
        home = import_module(f"batonmq.mqctl.commands.{MODULES[name]}")
        found = getattr(home, kebab(name).replace("-", "_"))
        assert isinstance(found, click.Command)
        return found

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[AS_JSON] = "--json" in args
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.ClickException as error:
            if ctx.meta[AS_JSON]:
                _show_as_json(error)
            raise

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if not args[0].startswith("-") and ALIASES.get(args[0], args[0]) not in MODULES:
            _no_such_command(ctx, args[0])
        # The name shown in usage lines is RocketMQ's, whichever was typed.
        _, found, rest = super().resolve_command(ctx, args)
        return (found.name if found is not None else None), found, rest

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, MODULES))
        for family, names in FAMILIES.items():
            rows = []
            for name in names:
                found = self.get_command(ctx, name)
                assert found is not None
                rows.append((name.ljust(width), found.get_short_help_str(limit=formatter.width)))
            with formatter.section(family):
                formatter.write_dl(rows)


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="Exit codes: 0 done, 1 refused or failed, 2 wrong usage.",
)
@click.version_option(package_name="batonmq")
def cli() -> None:
    """Look at and steer a BatonMQ or RocketMQ cluster.

    Without -n and NAMESRV_ADDR, commands go to the cluster that `batonmq up` runs: the one in
    BATONMQ_DATA, else in ./batonmq-data, else (to look only) the last one started. Every command
    has RocketMQ's name, and works in kebab-case as well: clusterList, cluster-list."""


def main() -> None:
    cli(prog_name="mqctl")


if __name__ == "__main__":
    main()
