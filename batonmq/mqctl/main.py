"""The command `mqctl`: the list of commands by family, each loaded when it is run.

RocketMQ's camelCase names are the names; the kebab-case form of each works as well.
"""

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]  # as in batonmq.launcher.main

import os
import signal

# A ctrl-C while the code is loaded would show where Python was. Who ignores it continues to.
if (__name__ == "__main__" or os.path.basename(sys.argv[0]) == "mqctl") and signal.getsignal(
    signal.SIGINT
) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import contextlib
import difflib
import io
import json
from importlib import import_module
from typing import Any, NoReturn

import click
from click.shell_completion import CompletionItem

from batonmq.mqctl.catalogue import FAMILIES, MODULES, SUMMARIES, kebab

OFTEN_TRIED = {"status": "health", "topics": "topicList", "brokers": "clusterList"}
"""What people type first, and the command that they want."""
ALIASES = {kebab(name): name for name in MODULES}


AS_JSON = "batonmq.as_json"
"""In the context's `meta`: whether `--json` was given."""
STREAMS = "batonmq.streams"
"""In it, too: whether standard output is the archive of `backup STORE -`."""


def _show_as_json(error: click.ClickException, *, err: bool) -> None:
    """A script that asked for JSON gets a document on standard output, errors included. `err`: on
    standard error, where every document of a command that streams is."""
    document: dict[str, object] = {"error": error.format_message(), "exitCode": error.exit_code}
    code = getattr(error.__cause__, "code", None)  # of a ResponseError: RocketMQ's response code
    if isinstance(code, int):
        document["code"] = int(code)
    click.echo(json.dumps(document), err=err)  # ASCII: a mistyped name may be no text at all


def _no_such_command(ctx: click.Context, name: str) -> NoReturn:
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
        # By its words: a usage error ends a command before it could say so itself.
        ctx.meta[STREAMS] = args[:1] == ["backup"] and "-" in args
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.ClickException as error:
            if ctx.meta[AS_JSON]:
                with contextlib.suppress(OSError):  # it is on standard error, too
                    _show_as_json(error, err=ctx.meta[STREAMS])
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
        for family, texts in FAMILIES.items():
            with formatter.section(family):
                formatter.write_dl([(name.ljust(width), text) for name, text in texts.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        # Not click's own: it would import every command for a key press.
        names = [name for name in SUMMARIES if name.startswith(incomplete)]
        options = click.Command.shell_complete(self, ctx, incomplete)
        return [*(CompletionItem(name, help=SUMMARIES[name]) for name in names), *options]


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
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by the caller, as with `>&-`
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  open until the end
    # gRPC's C core has its own words on standard error, for what a command reports in one line.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    if isinstance(sys.stdout, io.TextIOWrapper):
        # What the terminal's encoding lacks is shown escaped, and ends no command.
        sys.stdout.reconfigure(errors="backslashreplace")
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        cli(prog_name="mqctl")
    finally:
        _give_up_unwritten()


def _give_up_unwritten() -> None:
    """What a closed pipe or a full disk did not take. The end of the interpreter would try again,
    complain in its own words, and change the exit code to 120."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
