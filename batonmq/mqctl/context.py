"""One run of a command: the target, the output, the client, and errors as one line.

Exit codes: 0 done, 1 refused or failed, 2 wrong usage. A command that asks several nodes continues
when one does not reply: it reports that on standard error, shows the rest, and ends with 1.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import signal
import sys
import threading
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
)
from typing import TYPE_CHECKING, Any, TypeVar

import click
import uvloop

from batonmq.client.admin.admin import Admin
from batonmq.client.admin.cluster import masters_of
from batonmq.client.admin.controller_admin import ControllerAdmin
from batonmq.client.instance.connections import ClientOptions
from batonmq.mqctl.output import Output, note, shown
from batonmq.mqctl.target import RunningCluster, Target, TargetError, find_target
from batonmq.protocol.errors import BatonError
from batonmq.runtime import disk

if TYPE_CHECKING:
    from batonmq.client.consumer.pull_consumer import PullConsumer
    from batonmq.client.producer.producer import Producer

T = TypeVar("T")
K = TypeVar("K")
COMPLETE_MS = 1_500
SIGN = "give the user by BATONMQ_ACCESS_KEY and BATONMQ_SECRET_KEY, or BATONMQ_CREDENTIALS=FILE"
AT_ONCE = 32
"""Requests of a command at a time: one that asks for thousands of topics must not crowd out the
requests of producers."""


class CommandFailed(click.ClickException):
    """Refused or failed: one line on standard error, exit code 1."""

    exit_code = 1

    def show(self, file: Any = None) -> None:
        # Some name several faults, one a line.
        click.echo(f"mqctl: {shown(self.message, keep=chr(10))}", err=True)


class CommandContext:
    def __init__(
        self,
        out: Output,
        *,
        namesrv_addr: str | None = None,
        controller_addr: str | None = None,
        timeout_s: float = 5.0,
        interval_s: float | None = None,
        writes: bool = False,
    ) -> None:
        """`writes`: the command changes something; it never goes to a cluster that is only the
        last one started."""
        self.out = out
        self.timeout_ms = max(1, int(timeout_s * 1000))
        self.interval_s = interval_s
        self.failed = False
        """Set where a part did not work: the command ends with exit code 1."""
        self.exit_code = 0
        """Of a command that answers with its exit code."""
        self.given = (namesrv_addr, controller_addr)
        """`-n` and `-a` as they were given."""
        self._writes = writes

    @functools.cached_property
    def target(self) -> Target:
        target = find_target(*self.given)
        if target.by_hint and self._writes:
            raise TargetError(
                f"which cluster? The one that was started last is {target}, and a command that"
                " changes something does not guess: give -n and -a, or set BATONMQ_DATA"
            )
        if target.local is not None or target.context or (self._writes and target.name_servers):
            note(f"cluster {target}")
        return target

    def forget_target(self) -> None:
        """The next use looks for the cluster again: it may have started or ended."""
        self.__dict__.pop("target", None)

    @property
    def name_servers(self) -> tuple[str, ...]:
        """Raises TargetError, whose text says what to give."""
        return self.target.name_servers_or_advice()

    @property
    def controllers(self) -> tuple[str, ...]:
        """Raises TargetError, whose text says what to give."""
        return self.target.controllers_or_advice()

    def local_cluster(self) -> RunningCluster:
        """The one that `batonmq up` runs here. Raises CommandFailed if none runs, or if it is only
        the last one started: it is to be changed."""
        local = self.target.local
        if local is None or not local.supervised or self.target.by_hint:
            raise CommandFailed(
                "no `batonmq up` runs here: set BATONMQ_DATA to its folder (docs/security.md and"
                " docs/operating.md have the steps for other clusters)"
            )
        return local

    @contextlib.asynccontextmanager
    async def admin(self) -> AsyncIterator[Admin]:
        """Admin calls; name servers must be known."""
        async with self._open(self.name_servers) as admin:
            yield admin

    @contextlib.asynccontextmanager
    async def controller(self) -> AsyncIterator[tuple[Admin, ControllerAdmin]]:
        """Controller calls; name servers are used where they are known."""
        controllers = self.controllers
        async with self._open(self.target.name_servers) as admin:
            yield admin, admin.controller(controllers)

    @property
    def client_options(self) -> ClientOptions:
        """For every client that a command opens: with the TLS and the user of the target."""
        return ClientOptions(tls=self.target.tls, credentials=self.target.credentials)

    def _open(self, name_servers: tuple[str, ...]) -> Admin:
        options = self.client_options
        return Admin(name_servers, timeout_ms=self.timeout_ms, client_options=options)

    def producer(self, group: str) -> Producer:
        """One that was not started; each of its sends may take `timeout_ms`."""
        from batonmq.client.producer import producer

        return producer.Producer(
            group,
            name_servers=self.name_servers,
            options=producer.ProducerOptions(send_timeout_ms=self.timeout_ms),
            client_options=self.client_options,
        )

    def consumer(self, group: str) -> PullConsumer:
        """One that was not started."""
        from batonmq.client.consumer import pull_consumer

        return pull_consumer.PullConsumer(
            group, name_servers=self.name_servers, client_options=self.client_options
        )

    def complain(self, text: str) -> None:
        """Reports a part that failed on standard error; the command continues, and ends with 1."""
        self.failed = True
        note(text)

    async def ask_each(self, keys: Iterable[K], ask: Callable[[K], Awaitable[T]]) -> dict[K, T]:
        """Asks for each, AT_ONCE at a time; those that fail are reported and left out."""
        answers = await ask_all(keys, ask)
        failures = [str(answer) for answer in answers.values() if isinstance(answer, BatonError)]
        for text in dict.fromkeys(failures):  # one dead node may be the reason of many
            self.complain(text)
        return answered(answers)

    async def again_and_again(self, once: Callable[[], Awaitable[None]]) -> None:
        """Once, or with `--watch` or `-i` every so many seconds until ctrl-C. Then a failure is
        shown, and the next round tries again: the cluster may be in the middle of a failover."""
        if self.interval_s is None:
            await once()
            return
        self.out.compact = True
        while True:
            if not self.out.as_json:
                self.out.clear()
            try:
                await once()
            except (BatonError, CommandFailed) as error:
                note(str(error) or type(error).__name__)
            await asyncio.sleep(self.interval_s)

    def confirm(self, what: str, *, yes: bool, question: str = "Do it?") -> None:
        """Says on standard error what will happen and where, and asks. Raises CommandFailed if the
        answer is no, or there is no terminal."""
        _ = self.target  # says which cluster
        note(what)
        if yes:
            return
        if not sys.stdin.isatty():
            raise CommandFailed("not done: there is no terminal to confirm it on, give --yes")
        try:
            said_yes = click.confirm(question, default=False, err=True)
        except click.Abort:  # ctrl-C or ctrl-D instead of an answer
            click.echo(err=True)
            said_yes = False
        if not said_yes:
            raise CommandFailed("not done")


async def ask_all(keys: Iterable[K], ask: Callable[[K], Awaitable[T]]) -> dict[K, T | BatonError]:
    """What each key's question gave, AT_ONCE at a time."""
    limit = asyncio.Semaphore(AT_ONCE)

    async def one(key: K) -> T | BatonError:
        async with limit:
            try:
                return await ask(key)
            except BatonError as error:
                return error

    wanted = list(keys)
    return dict(zip(wanted, await asyncio.gather(*map(one, wanted)), strict=True))


def answered(answers: Mapping[K, T | BatonError]) -> dict[K, T]:
    """Without those that failed."""
    return {key: each for key, each in answers.items() if not isinstance(each, BatonError)}


def run(context: CommandContext, work: Coroutine[Any, Any, None]) -> None:
    """Runs a command to its end; what it raises becomes one line and an exit code."""
    debug = bool(os.environ.get("MQCTL_DEBUG"))
    last_resort = logging.lastResort
    # The client's log is for programs; only MQCTL_DEBUG shows it here.
    if debug:
        logging.basicConfig(level=logging.DEBUG)
    else:
        logging.lastResort = None
    try:
        with _ctrl_c_at_once():
            uvloop.run(work)
    except BatonError as error:
        text = " ".join(str(error).split()) or type(error).__name__
        raise CommandFailed(f"{text}; {SIGN}" if is_unsigned(text) else text) from error
    except (click.ClickException, click.exceptions.Exit, BrokenPipeError):
        raise
    except KeyboardInterrupt:
        # The usual end of what prints again and again; elsewhere the work was not done.
        context.failed = context.failed or context.interval_s is None
    except Exception as error:
        if debug:
            raise
        if isinstance(error, OSError) and error.filename:
            raise _disk_failure(error, None) from error
        raise CommandFailed(
            f"internal error, please report: {type(error).__name__}: {error}"
            " (MQCTL_DEBUG=1 shows where)"
        ) from error
    finally:
        logging.lastResort = last_resort
    if context.failed or context.exit_code:
        click.get_current_context().exit(context.exit_code or 1)


@contextlib.contextmanager
def _ctrl_c_at_once() -> Iterator[None]:
    """Asyncio would only cancel the command at the first ctrl-C. One that reads a large log or
    waits for an answer on the terminal would not notice before its end."""
    # Only the main thread may set handlers. A script's `mqctl … &` starts with ctrl-C ignored, and
    # must not be ended by it.
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    before = signal.signal(signal.SIGINT, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@contextlib.contextmanager
def disk_failures(where: object) -> Iterator[None]:
    """An OSError inside becomes a CommandFailed. `where`: the file, if the error names none."""
    try:
        yield
    except OSError as error:
        raise _disk_failure(error, where) from error


def _disk_failure(error: OSError, where: object) -> CommandFailed:
    return CommandFailed(f"{error.filename or where}: {disk.reason(error)}")


async def names_there(what: str, given: Mapping[str, Any]) -> list[str]:
    """Names for the completion of a shell: `topics`, `groups`, `brokers`, `addresses` or
    `clusters` of the cluster where the command goes; empty if it does not answer at once."""
    try:
        target = find_target(given.get("namesrv_addr"), given.get("controller_address"))
        async with Admin(
            target.name_servers_or_advice(),
            timeout_ms=COMPLETE_MS,
            client_options=ClientOptions(tls=target.tls, credentials=target.credentials),
        ) as asked:
            if what == "topics":
                return await asked.topics.names()
            info = await asked.cluster.info()
            if what == "groups":
                masters, _ = masters_of(info)
                groups = asked.consumer_groups
                found = await ask_all(masters, lambda name: groups.names({name: masters[name]}))
                return sorted({group for names in answered(found).values() for group in names})
    except (BatonError, TargetError, OSError):
        return []
    if what == "clusters":
        return sorted(info.cluster_addr_table)
    if what == "brokers":
        return sorted(info.broker_addr_table)
    return sorted(a for data in info.broker_addr_table.values() for a in data.broker_addrs.values())


def reason(address: str, error: object) -> str:
    """The text of an error without the address in front, which is shown beside it."""
    return str(error).removeprefix(address).removeprefix(":").lstrip()


def is_unsigned(why: str) -> bool:
    """Whether a node refused the signature: no right that the user has could help then."""
    return "request is not signed" in why or "signature is not right" in why
