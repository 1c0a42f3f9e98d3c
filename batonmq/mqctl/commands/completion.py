"""The script that completes `mqctl` in a shell."""

import click
from click.shell_completion import get_completion_class

from batonmq.mqctl.catalogue import SUMMARIES
from batonmq.mqctl.context import disk_failures

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
