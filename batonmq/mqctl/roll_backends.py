"""How a rolling restart restarts one process: the supervisor of `batonmq up`, systemd, compose.

Each backend has the same members; those that take a node raise Doubt:

- `how` names the way; another text is another roll.
- `describe` says what `restart` would do.
- `restart` returns when the old process has ended and a new one was started.
- `undo` is called if the new process is not well. Where this side decides which version starts, the
  former one does again.
- `is_chosen`: whether a start would take the version that this roll is to. Not so after `undo`.

Commands are run without a shell: a template is split into words first, then names are put in.
"""

import asyncio
import json
import os
import shlex
import signal
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from batonmq.launcher.layout import PYTHON_SUFFIX
from batonmq.mqctl.roll import Doubt, RollNode
from batonmq.runtime.durable_file import remove_file, replace_file

POLL_S: Final = 0.05
OUTPUT_SHOWN: Final = 400
SYSTEMD: Final = "systemctl restart batonmq@{kind}"
SYSTEMD_BY_SSH: Final = f"ssh {{host}} {SYSTEMD}"


class UpBackend:
    """Processes of `batonmq up`: SIGTERM, and its supervisor starts them again. `python`: the
    interpreter of another installation, which the supervisor uses from then on."""

    def __init__(self, cluster_file: Path, python: Path | None, within_s: float) -> None:
        self._file = cluster_file
        # Not resolved: the interpreter of a virtual environment is a link to the system's.
        self._python = python.absolute() if python is not None else None
        self._former: str | None = None
        self._within_s = within_s

    @property
    def how(self) -> str:
        return f"up {self._python}" if self._python is not None else "up"

    def describe(self, node: RollNode) -> str:
        entry = self._entry(node)
        version = f", then start it by {self._python}" if self._python is not None else ""
        return f"SIGTERM to pid {entry['pid']}{version}"

    async def restart(self, node: RollNode) -> None:
        before = self._entry(node)
        pid, by_hand = before["pid"], shlex.join(before["argv"])
        if not pid:
            raise Doubt(f"{node.name} does not run", by_hand)
        if self._python is not None:
            chosen = self._chosen(node)
            self._former = chosen.read_text() if chosen.exists() else None
            replace_file(chosen, f"{self._python}\n".encode())
        try:
            os.kill(pid, signal.SIGTERM)
        except ProcessLookupError:
            pass  # its end is about to be reported
        try:
            async with asyncio.timeout(self._within_s):
                while self._entry(node)["pid"] in (None, pid):  # noqa: ASYNC110  another process's file
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            text = f"{node.name} was not started again within {self._within_s:g} s"
            raise Doubt(text, f"see its process.log; by hand: {by_hand}") from None

    def undo(self, node: RollNode) -> None:
        if self._python is None:
            return
        if self._former is None:
            remove_file(self._chosen(node))
        else:
            replace_file(self._chosen(node), self._former.encode())

    def is_chosen(self, node: RollNode) -> bool:
        if self._python is None:
            return True
        chosen = self._chosen(node)
        return chosen.exists() and chosen.read_text() == f"{self._python}\n"

    def _chosen(self, node: RollNode) -> Path:
        return Path(self._entry(node)["config"]).with_suffix(PYTHON_SUFFIX)

    def _entry(self, node: RollNode) -> dict[str, Any]:
        try:
            document = json.loads(self._file.read_text())
            nodes = document["nameServers" if node.kind == "namesrv" else "brokers"]
            found: dict[str, Any] = next(e for e in nodes if e["address"] == node.address)
        except (OSError, ValueError, KeyError, StopIteration) as error:
            text = f"{self._file} has no process for {node.name}"
            raise Doubt(text, "batonmq up") from error
        return found


class CommandBackend:
    """One command for each process. In its words {kind}, {host}, {port}, {address}, {group} are
    put in, and {service} if `services` knows it by port."""

    def __init__(
        self, template: str, within_s: float, services: Mapping[int, str] | None = None
    ) -> None:
        self._template = template
        self._within_s = within_s
        self._services = services or {}

    @property
    def how(self) -> str:
        return self._template

    def describe(self, node: RollNode) -> str:
        return shlex.join(self._argv(node))

    def _argv(self, node: RollNode) -> list[str]:
        words = node.words
        if service := self._services.get(int(words["port"])):
            words["service"] = service
        try:
            return [word.format_map(words) for word in shlex.split(self._template)]
        except (KeyError, IndexError, ValueError, AttributeError) as error:
            known = ", ".join(f"{{{word}}}" for word in words)
            text = f"{self._template!r} is no command for {node.name}: {error}"
            raise Doubt(text, f"its words may hold {known}") from error

    async def restart(self, node: RollNode) -> None:
        await run(self._argv(node), self._within_s)

    def undo(self, node: RollNode) -> None:
        """Without effect: which version starts is decided on its host."""

    def is_chosen(self, node: RollNode) -> bool:
        return True


Backend = UpBackend | CommandBackend


async def run(argv: list[str], within_s: float) -> bytes:
    """The standard output of a command. Raises Doubt if it fails, or takes longer."""
    command = shlex.join(argv)
    try:
        process = await asyncio.create_subprocess_exec(
            *argv,
            # ssh would read the terminal, and a question of sudo would wait unseen.
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
    except OSError as error:
        raise Doubt(f"{command}: {error.strerror}", command) from error
    try:
        async with asyncio.timeout(within_s):
            output, errors = await process.communicate()
    except TimeoutError:
        with suppress(ProcessLookupError):  # it ended just now
            process.kill()
        await process.wait()
        raise Doubt(f"{command}: no end within {within_s:g} s", command) from None
    if process.returncode:
        said = (errors or output).decode(errors="replace").strip()[-OUTPUT_SHOWN:]
        raise Doubt(f"{command}: exit code {process.returncode}: {said}", command)
    return output


async def compose_backend(compose: str, within_s: float) -> CommandBackend:
    """Services of a compose project, found by the ports that they publish. `compose`: the command
    with its options, `docker compose -f FILE`. Raises Doubt."""
    import yaml  # of the extra `server`

    try:
        words = shlex.split(compose)
    except ValueError as error:  # a quote that does not end
        raise Doubt(f"{compose!r} is no command: {error}", "correct --compose") from error
    output = await run([*words, "config"], within_s)
    try:
        project = yaml.safe_load(output)
        services = {
            published: name
            for name, service in project["services"].items()
            for published in map(_published, service.get("ports", ()))
        }
    except (yaml.YAMLError, TypeError, KeyError, ValueError, AttributeError) as error:
        raise Doubt(f"{compose} config shows no services: {error!r}", compose) from error
    up = f"{compose} up --detach --no-deps --force-recreate {{service}}"
    return CommandBackend(up, within_s, services)


def _published(port: object) -> int:
    """The port on the host, of the long form or of `HOST:PORT:PORT`."""
    if isinstance(port, dict):
        return int(port["published"])
    return int(str(port).split(":")[-2])
