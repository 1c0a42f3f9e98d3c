"""What a shell keeps for `mqctl`: names for clusters, of which BATONMQ_CONTEXT says which one is
meant, and the script that completes commands."""

import json
import os
from pathlib import Path

import click
from click.shell_completion import get_completion_class

from batonmq.mqctl.catalogue import SUMMARIES
from batonmq.mqctl.context import CommandContext, CommandFailed, disk_failures
from batonmq.mqctl.params import NEW_FILE, command, option
from batonmq.mqctl.target import (
    CONTEXT_VARIABLE,
    TargetError,
    addresses,
    contexts_file,
    kept_contexts,
)
from batonmq.runtime.durable_file import show_file


@command("contexts", controllers=True)
@click.argument("name", required=False)
@option("--trust", type=NEW_FILE, help="The authority of a cluster with TLS (PEM).")
@option("--cert", type=NEW_FILE, help="Your certificate with its key, for such a cluster.")
@option("--credentials", type=NEW_FILE, help="YAML with accessKey and secretKey, of a user.")
@option("--remove", is_flag=True, help="Forget NAME.")
async def contexts(
    context: CommandContext, name: str | None, *, remove: bool, **files: Path | None
) -> None:
    """`BATONMQ_CONTEXT=NAME mqctl ...` then goes there. Options and NAMESRV_ADDR come first.

    JSON: name to namesrv and controller, where given also trust, cert and credentials."""
    try:
        known = kept_contexts()
    except TargetError as error:
        raise CommandFailed(str(error)) from error
    namesrv, controller = context.given
    if name is None and (remove or namesrv or controller):
        raise click.UsageError("which context? give its NAME")
    if name is not None:
        if remove and known.pop(name, None) is None:
            raise CommandFailed(
                f"no context {name}; there are {', '.join(sorted(known)) or 'none'}"
            )
        if not remove:
            if not namesrv:
                raise click.UsageError("give its name servers: -n host:port;host:port")
            # Only checked: a typo shows now, and not at night.
            addresses(namesrv, "-n")
            addresses(controller, "-a")
            known[name] = {"namesrv": namesrv, "controller": controller or ""}
            known[name] |= {key: str(at.absolute()) for key, at in files.items() if at}
        _keep(known)
    if context.out.wrote_json(known):
        return
    chosen = os.environ.get(CONTEXT_VARIABLE)
    rows = [
        ["*" if each == chosen else "", each, at["namesrv"], at["controller"]]
        for each, at in sorted(known.items())
    ]
    context.out.table(["", "Context", "Name Servers", "Controllers"], rows)


def _keep(known: dict[str, dict[str, str]]) -> None:
    file = contexts_file()
    if file is None:
        raise CommandFailed("this user has no home folder to keep them in")
    with disk_failures(file):
        show_file(file, json.dumps(known, indent=2) + "\n")


SHELLS = ("bash", "zsh", "fish")


_HELP = f"""{SUMMARIES["completion"]}.

\b
bash: mqctl completion bash >> ~/.bashrc
zsh:  mqctl completion zsh >> ~/.zshrc
fish: mqctl completion fish > ~/.config/fish/completions/mqctl.fish"""


@click.command("completion", context_settings={"help_option_names": ["-h", "--help"]}, help=_HELP)
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    found = get_completion_class(shell)
    assert found is not None
    script = found(context.find_root().command, {}, "mqctl", "_MQCTL_COMPLETE")
    # Not source(): that would start a bash to ask its version, when the script is only printed.
    with disk_failures("standard output"):
        click.echo(script.source_template % script.source_vars())
