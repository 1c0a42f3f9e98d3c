"""Certificates of a cluster: made, renewed; TLS of a running one: turned on, off, looked at."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from batonmq.client.admin.admin import Admin
from batonmq.client.errors import UnsupportedByBrokerError
from batonmq.launcher.layout import Stage
from batonmq.mqctl.commands.roll import (
    STOPPED,
    RollWork,
    alone,
    doubt_document,
    rolling,
    show_doubt,
    state_file,
    up_backend,
)
from batonmq.mqctl.commands.up import ask_supervisor
from batonmq.mqctl.context import CommandContext, CommandFailed, ask_all, disk_failures
from batonmq.mqctl.output import GOOD, still_lacking, when
from batonmq.mqctl.params import PLACE, SECONDS, command, option
from batonmq.mqctl.roll import Doubt
from batonmq.mqctl.routes import brokers_of
from batonmq.mqctl.secret_rotation import rotate_secrets, wait_taken
from batonmq.mqctl.target import Target, data_of
from batonmq.mqctl.tls_probe import Port, PortState, probe
from batonmq.mqctl.tls_steps import WHAT, Step, refused, stages_of, steps
from batonmq.protocol.errors import BatonError
from batonmq.runtime.extras import lacking
from batonmq.runtime.tls import Mode, TlsState, fingerprints, read_pem

if TYPE_CHECKING:
    from batonmq.runtime.authority import Authority, NodeCertificate
ACTIONS = ("init", "enable", "disable", "rotate", "status")
GONE_S: Final = 2.0
"""How long it waits for connections that are closing."""


@command("secure", controllers=True)
@click.argument("action", type=click.Choice(ACTIONS))
@click.argument("folder", metavar="[DIR]", required=False, type=PLACE)
@option(
    "--node",
    "nodes",
    multiple=True,
    metavar="NAME@HOST,HOST",
    help="With init: a node and the hosts by which others dial it. May be repeated.",
)
@option(
    "--cluster", default="batonmq", show_default=True, help="With init: in the authority's name."
)
@option("--days", type=click.IntRange(1, 3650), default=397, show_default=True, help="Validity.")
@option(
    "--mode",
    type=click.Choice(["permissive", "enforcing"]),
    default="enforcing",
    show_default=True,
    help="With enable: whether clients may do without TLS. Nodes may not.",
)
@option("--authority", is_flag=True, help="With rotate: the next step to another authority.")
@option("--secrets", is_flag=True, help="With rotate: the secrets that nodes share; DIR is a file.")
@option(
    "--step",
    type=click.Choice(["next", "former", "done"]),
    help="With --secrets FILE: only this step; nothing is done where FILE is there already.",
)
@option("--force", is_flag=True, help="With enable and disable: refuse clients that are connected.")
@option("--within", "within_s", type=SECONDS, default=120.0, help="For one process to be well.")
async def secure(
    context: CommandContext,
    action: str,
    folder: Path | None,
    nodes: tuple[str, ...],
    cluster: str,
    days: int,
    mode: Mode,
    authority: bool,
    secrets: bool,
    step: str | None,
    force: bool,
    within_s: float,
) -> None:
    """`init` makes an authority, one file for each --node (certificate and key, mode 0600), and
    `admin.pem` for tools. A node is broker/GROUP/ID, controller/ID, or namesrv/NAME. It needs only
    its own file and `ca.pem`; keep `ca.key` off the servers. docs/security.md has the settings.

    `rotate` replaces every certificate, without DIR those of the local cluster; servers take theirs
    within two seconds. --authority goes one step on the way to another authority. --secrets
    replaces what nodes share (password of Raft, the secret that signs): of the local cluster, or
    with a file as DIR one step of it, named by --step.

    `enable` turns TLS on at a cluster of `batonmq up` under load, `disable` off. Processes restart
    one by one. It stops before it would refuse connected clients, and continues when repeated.

    `status` dials every port, and counts clients without TLS and with it. Exit code: 1 if a port
    does not answer or its certificate is not trusted, 3 if a port between nodes takes plain
    connections. Of enable and disable: 0 done, 1 failed, 3 stopped at a doubt.

    JSON: of init and rotate a list of file, names, hosts, notAfter (ms since 1970); of status a
    list of node, port, address, plain, tls (its version), verified, notAfter, refusal, plainClients
    and tlsClients (addresses, at most 20, while both are taken), and of HA ports proof (of the
    nodes' secret: required, optional), unproven (peers) and lastUnproven; of enable and disable
    stages (stage, restarted), doubt, nextStep; of --authority step (trusted, renewed, dropped) and
    nextStep; of --secrets a list of file, step (next, former, done)."""
    _check_rotation(action, folder, authority, secrets, step)
    if action == "status":
        await _status(context)
    elif action in ("enable", "disable"):
        await _ModeChange(
            context, "disabled" if action == "disable" else mode, within_s, force
        ).run()
    elif action == "rotate" and secrets:
        await rotate_secrets(context, folder, step or "", within_s)
    elif action == "rotate" and authority:
        await _rotate_authority(context, folder, days, within_s)
    else:
        where = folder or _folder_of(context.target, action)
        _show(context, _make(action, where, _nodes(nodes), cluster, days))


def _check_rotation(
    action: str, folder: Path | None, authority: bool, secrets: bool, step: str | None
) -> None:
    if (authority or secrets) and action != "rotate":
        raise click.UsageError("--authority and --secrets go with rotate")
    if authority and secrets:
        raise click.UsageError("--authority and --secrets replace different things: one at a time")
    if step and not (secrets and folder):
        raise click.UsageError("--step goes with rotate --secrets FILE")


def _folder_of(target: Target, action: str) -> Path:
    """Of the cluster that is meant; one that was only started last is not."""
    if action == "init" or target.local is None or target.by_hint:
        raise click.UsageError("which folder? give DIR")
    return data_of(target.local.path) / "conf" / "tls"


AUTHORITY_STEPS: Final = {
    "trusted": (
        "servers trust a second authority; it issues nothing yet",
        "give ca.pem to all clients, then the same command",
    ),
    "renewed": (
        "all certificates are of the new authority",
        "the same command drops the old authority",
    ),
    "dropped": (
        "only the new authority is trusted",
        "give ca.pem to all clients; they trust both until then",
    ),
}
"""Step of a rotation -> what is so after it, and what to do next."""


async def _rotate_authority(
    context: CommandContext, folder: Path | None, days: int, within_s: float
) -> None:
    """One step to another authority. Without `folder` that of the local cluster, whose processes
    are asked. Raises CommandFailed."""
    where = folder or _folder_of(context.target, "rotate")
    authority = _authority(where)
    local = context.target.local

    async def await_processes() -> None:
        if folder is None and local is not None:
            addresses = [*local.name_servers, *(address for _, address in local.brokers)]
            await wait_taken(context, addresses, _has_taken(where), "the files", within_s)

    with _failures(where):
        state = authority.rotation()
    # Of an earlier run, which may have been interrupted before it had waited.
    if state in ("trusted", "renewed"):
        await await_processes()  # else the next step would cut off who has not
    with _failures(where):
        if state == "none":
            step = "trusted"
            authority.trust_next()
        elif state == "renewed":
            step = "dropped"
            authority.drop_former()
        else:
            step = "renewed"
            authority.issue_by_next(days)
    await await_processes()
    done, next_step = AUTHORITY_STEPS[step]
    if not context.out.wrote_json({"step": step, "nextStep": next_step}):
        context.out.line(done, style=GOOD)
        context.out.line(f"  next: {next_step}")


def _has_taken(folder: Path) -> Callable[[TlsState], bool]:
    """Whether a process has the trust and a certificate of that folder as they are now."""
    trusted = fingerprints(read_pem(str(folder / "ca.pem")))
    files = (path for path in folder.glob("*.pem") if path.name != "ca.pem")
    issued = {fingerprints(read_pem(str(path)))[0] for path in files}
    return lambda state: state.trusted == trusted and state.certificate in issued


def _authority(folder: Path) -> Authority:
    """Raises CommandFailed without the extra that makes certificates."""
    if missing := lacking("server"):
        raise CommandFailed(f"certificates are made with {missing}")
    from batonmq.runtime.authority import Authority

    return Authority(folder)


@contextmanager
def _failures(folder: Path) -> Iterator[None]:
    """Raises CommandFailed for what the disk refuses, UsageError for names that cannot be."""
    try:
        with disk_failures(folder):
            yield
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def _make(
    action: str, folder: Path, nodes: list[tuple[str, list[str]]], cluster: str, days: int
) -> list[NodeCertificate]:
    authority = _authority(folder)
    with _failures(folder):
        return _init(authority, nodes, cluster, days) if action == "init" else authority.renew(days)


def _nodes(given: tuple[str, ...]) -> list[tuple[str, list[str]]]:
    found = []
    for text in given:
        name, at, hosts = text.partition("@")
        if not at or not all(hosts.split(",")):
            raise click.UsageError(f"--node {text}: NAME@HOST is needed, as broker/broker-a/1@mq1")
        found.append((name, hosts.split(",")))
    return found


def _init(
    authority: Authority, nodes: list[tuple[str, list[str]]], cluster: str, days: int
) -> list[NodeCertificate]:
    from batonmq.runtime.authority import check_names, file_of

    if not nodes:
        raise click.UsageError("which nodes? give --node NAME@HOST for each")
    check_names([name for name, _ in nodes])
    authority.make(cluster)
    made = [authority.issue(file_of(name), [name], hosts, days) for name, hosts in nodes]
    return [*made, authority.issue("admin.pem", ["admin"], [], days)]


def _show(context: CommandContext, made: list[NodeCertificate]) -> None:
    documents = [
        {"file": str(one.path), "names": one.names, "hosts": one.hosts, "notAfter": one.ends_ms}
        for one in made
    ]
    if context.out.wrote_json(documents):
        return
    rows = [
        [one.path.name, " ".join(one.names), " ".join(one.hosts), when(one.ends_ms)] for one in made
    ]
    context.out.table(["File", "Names", "Hosts", "Ends"], rows)


@dataclass(slots=True)
class _ModeChange:
    """One run of enable or disable. `done`: (stage, names of the processes that were restarted)."""

    context: CommandContext
    target: Stage
    within_s: float
    force: bool
    done: list[tuple[Stage, list[str]]] = field(default_factory=list)

    async def run(self) -> None:
        """Raises CommandFailed."""
        self.context.local_cluster()
        doubt = None
        with alone(state_file(self.context)):
            try:
                while await self._one_step():
                    pass
            except Doubt as stopped:
                doubt = stopped
                self.context.exit_code = STOPPED
        out = self.context.out
        stages = [{"stage": stage, "restarted": names} for stage, names in self.done]
        if out.wrote_json({"stages": stages, **doubt_document(doubt)}):
            return
        if doubt is not None:
            show_doubt(out, doubt, "then the same command continues")
        else:
            out.line(f"TLS is {self.target}", style=GOOD)

    async def _one_step(self) -> bool:
        """False: nothing was left to do. Raises Doubt."""
        async with rolling(self.context, self.within_s) as work:
            stages = stages_of(await self._states(work))
            step = next(steps(stages, self.target), None)
            if step is None:
                # All run at the target; files that an interrupted run wrote may say something else.
                await ask_supervisor(self.context, do="secure", stage=self.target)
                return False
            # Only these two refuse a client; the stages between take both kinds.
            if step.stage in ("enforcing", "disabled"):
                await self._check_clients(work, step.stage)
            # The supervisor writes the settings of all processes.
            await ask_supervisor(self.context, do="secure", stage=step.stage)
        # Tools dial as the file of the cluster says from now on.
        self.context.forget_target()
        async with rolling(self.context, self.within_s) as work:
            self.context.out.say(f"{step.stage}: {WHAT[step.stage]}")
            self.done.append((step.stage, work.rolled))
            await work.restart_these(
                [node for node in work.nodes if node.name in step.names],
                up_backend(self.context, self.within_s),
                controllers_first=step.controllers_first,
            )
            await self._check_restarted(work, step)
        return True

    async def _states(self, work: RollWork) -> dict[str, TlsState]:
        """By name of the process. Raises Doubt for one that does not say."""
        asked = (work.admin.cluster.tls(node.address) for node in work.nodes)
        try:
            found = await asyncio.gather(*asked)
        except UnsupportedByBrokerError as error:
            raise Doubt(f"an earlier version runs there: {error}", "mqctl roll") from error
        except BatonError as error:
            raise Doubt(str(error)) from error
        return dict(zip((node.name for node in work.nodes), found, strict=True))

    async def _check_clients(self, work: RollWork, stage: Stage) -> None:
        """Raises Doubt if a client that is connected now would be refused."""

        async def connected() -> str:
            return refused(await self._states(work), stage)

        if self.force or not (found := await still_lacking(connected, GONE_S, "connected")):
            return
        how, what = ("without", "give it to them") if stage == "enforcing" else ("with", "end that")
        raise Doubt(f"clients are connected {how} TLS: {found}", f"{what}, or --force refuses them")

    async def _check_restarted(self, work: RollWork, step: Step) -> None:
        """Raises Doubt."""
        stages = stages_of(await self._states(work))
        if other := sorted(name for name in step.names if stages.get(name) != step.stage):
            text = f"{other[0]} was restarted and is at stage {stages.get(other[0])}"
            raise Doubt(text, "see BATONMQ_ variables in the environment of `batonmq up`")


async def _status(context: CommandContext) -> None:
    async with context.admin() as admin:
        ports = await _ports(context, admin)
        said = await _said(admin, {each.address for each in ports if each.kind == "remoting"})
    tls, timeout_s = context.target.tls, context.timeout_ms / 1000
    states = await asyncio.gather(*(probe(port, tls, timeout_s) for port in ports))
    states = [_with_said(state, said) for state in states]
    # Clients may be allowed to do without TLS; nodes never are, once it is on.
    if any(state.port.kind != "remoting" and state.takes_plain for state in states):
        context.exit_code = 3
    if any(state.refusal for state in states):
        context.exit_code = 1
    _show_states(context, states)


def _with_said(state: PortState, said: dict[str, TlsState]) -> PortState:
    """Adds what only the process knows."""
    clients, proof = said.get(state.port.address), said.get(state.port.broker)
    # Where only one kind of client can connect, a count of both says nothing.
    if clients is not None and clients.server_mode != "permissive":
        clients = None
    if proof is not None and not proof.ha_proof:
        proof = None
    return replace(state, clients=clients, proof=proof)


async def _said(admin: Admin, addresses: Iterable[str]) -> dict[str, TlsState]:
    answers = await ask_all(addresses, admin.cluster.tls)
    # An earlier version says nothing; of one that does not answer the probe of its port says why.
    return {at: state for at, state in answers.items() if not isinstance(state, BatonError)}


async def _ports(context: CommandContext, admin: Admin) -> list[Port]:
    found = [Port("namesrv", "remoting", address) for address in context.name_servers]
    for address in context.target.controllers:
        host, _, port = address.rpartition(":")
        for offset, kind in enumerate(("remoting", "grpc", "raft")):
            found.append(Port("controller", kind, f"{host}:{int(port) + offset}"))
    brokers = [(name, address) for _, name, _, address in brokers_of(await admin.cluster.info())]
    configs = await context.ask_each([address for _, address in brokers], admin.brokers.config)
    for name, address in brokers:
        host, _, port = address.rpartition(":")
        config = configs.get(address, {})
        found.append(Port(name, "remoting", address))
        found.append(Port(name, "remoting", f"{host}:{int(port) - 2}"))
        if ha_port := config.get("haListenPort"):
            ha_host = config.get("brokerIP2") or host
            found.append(Port(name, "ha", f"{ha_host}:{ha_port}", broker=address))
    return found


def _unproven(state: PortState) -> str:
    if state.proof is None or not state.proof.ha_unproven:
        return ""
    return f"{state.proof.ha_unproven} without proof, last {state.proof.ha_unproven_last}"


def _show_states(context: CommandContext, states: list[PortState]) -> None:
    documents = [
        {
            "node": each.port.node,
            "port": each.port.kind,
            "address": each.port.address,
            "plain": each.takes_plain,
            "tls": each.takes_tls,
            "verified": each.is_verified,
            "notAfter": each.ends_ms,
            "refusal": each.refusal,
            "plainClients": each.clients.plain_peers if each.clients else [],
            "tlsClients": each.clients.encrypted_peers if each.clients else [],
            "proof": each.proof.ha_proof if each.proof else "",
            "unproven": each.proof.ha_unproven if each.proof else 0,
            "lastUnproven": each.proof.ha_unproven_last if each.proof else "",
        }
        for each in states
    ]
    if context.out.wrote_json(documents):
        return
    rows = [
        [
            each.port.node,
            each.port.kind,
            each.port.address,
            "yes" if each.takes_plain else "no",
            each.takes_tls or "no",
            "yes" if each.is_verified else f"secret {each.proof.ha_proof}" if each.proof else "no",
            when(each.ends_ms) if each.ends_ms else "",
            f"{each.clients.plain}, {each.clients.encrypted}" if each.clients else "",
            each.refusal or _unproven(each),
        ]
        for each in states
    ]
    headings = [
        "Node", "Port", "Address", "Plain", "TLS", "Verified", "Ends", "Connected plain, TLS",
        "Refused",
    ]  # fmt: skip
    context.out.table(headings, rows)
