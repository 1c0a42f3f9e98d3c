"""One run of a command: the target, the output, the client, and errors as one line.

Exit codes: 0 done, 1 refused or failed, 2 wrong usage. A command that asks several nodes continues
when one does not reply: it reports that on standard error, shows the rest, and ends with 1.
"""

from __future__ import annotations

import contextlib
import functools
import sys
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

from batonmq.mqctl.output import Output
from batonmq.mqctl.target import Target, TargetError, target_here

if TYPE_CHECKING:
    from batonmq.client.admin.admin import Admin
    from batonmq.client.admin.controller_admin import ControllerAdmin
    from batonmq.client.consumer.pull_consumer import PullConsumer
    from batonmq.client.instance.connections import ClientOptions
    from batonmq.client.producer.producer import Producer

T = TypeVar("T")
K = TypeVar("K")
COMPLETE_MS = 1_500


class CommandFailed(click.ClickException):
    """Refused or failed: one line on standard error, exit code 1."""

    exit_code = 1

    def show(self, file: Any = None) -> None:
        click.echo(f"mqctl: {self.message}", err=True)


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
        with _usage_errors():
            target = target_here(*self.given)
            if target.by_hint and self._writes:
                raise TargetError(
                    f"which cluster? The one that was started last is {target}, and a command that"
                    " changes something does not guess: give -n and -a, or set BATONMQ_DATA"
                )
        if target.local is not None or target.context or (self._writes and target.name_servers):
            click.echo(f"mqctl: cluster {target}", err=True)
        return target

    def forget_target(self) -> None:
        """The next use looks for the cluster again: it may have started or ended."""
        self.__dict__.pop("target", None)

    @property
    def name_servers(self) -> tuple[str, ...]:
        """Raises click.UsageError, whose text says what to give."""
        with _usage_errors():
            return self.target.name_servers_or_advice()

    @property
    def controllers(self) -> tuple[str, ...]:
        """Raises click.UsageError, whose text says what to give."""
        with _usage_errors():
            return self.target.controllers_or_advice()

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
        from batonmq.client.instance.connections import ClientOptions

        return ClientOptions(tls=self.target.tls, credentials=self.target.credentials)

    def _open(self, name_servers: tuple[str, ...]) -> Admin:
        from batonmq.client.admin import admin

        options = self.client_options
        return admin.Admin(name_servers, timeout_ms=self.timeout_ms, client_options=options)

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
        click.echo(f"mqctl: {text}", err=True)

    async def ask_each(self, keys: Iterable[K], ask: Callable[[K], Awaitable[T]]) -> dict[K, T]:
        """Asks for all at once; those that fail are reported and left out."""
        import asyncio

        from batonmq.protocol.errors import BatonError

        wanted = list(keys)
        answers = await asyncio.gather(*(ask(key) for key in wanted), return_exceptions=True)
        found: dict[K, T] = {}
        for key, answer in zip(wanted, answers, strict=True):
            if isinstance(answer, BatonError):
                self.complain(str(answer))
            elif isinstance(answer, BaseException):
                raise answer
            else:
                found[key] = answer
        return found

    async def again_and_again(self, once: Callable[[], Awaitable[None]]) -> None:
        """Once, or with `--watch` or `-i` every so many seconds until ctrl-C. Then an error is
        shown, and the next round tries again: the cluster may be in the middle of a failover."""
        import asyncio

        from batonmq.protocol.errors import BatonError

        if self.interval_s is None:
            await once()
            return
        self.out.compact = True
        while True:
            if not self.out.as_json:
                self.out.clear()
            try:
                await once()
            except BatonError as error:
                click.echo(f"mqctl: {_one_line(error)}", err=True)
            await asyncio.sleep(self.interval_s)

    def confirm(self, what: str, *, yes: bool, question: str = "Do it?") -> None:
        """Says on standard error what will happen and where, and asks. Raises CommandFailed if the
        answer is no, or there is no terminal."""
        _ = self.target  # says which cluster
        click.echo(f"mqctl: {what}", err=True)
        if yes:
            return
        if not sys.stdin.isatty():
            raise CommandFailed("not done: there is no terminal to confirm it on, give --yes")
        if not click.confirm(question, default=False, err=True):
            raise CommandFailed("not done")


def run(context: CommandContext, work: Coroutine[Any, Any, None]) -> None:
    """Runs a command to its end; what it raises becomes one line and an exit code."""
    import logging
    import os

    import uvloop

    from batonmq.protocol.errors import BatonError

    debug = bool(os.environ.get("MQCTL_DEBUG"))
    last_resort = logging.lastResort
    # The client's log is for programs; only MQCTL_DEBUG shows it here.
    if debug:
        logging.basicConfig(level=logging.DEBUG)
    else:
        logging.lastResort = None
    try:
        uvloop.run(work)
    except BatonError as error:
        raise CommandFailed(_one_line(error)) from error
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
            f"internal error, please report: {type(error).__name__}: {_one_line(error)} "
            "(MQCTL_DEBUG=1 shows where)"
        ) from error
    finally:
        logging.lastResort = last_resort
    if context.failed or context.exit_code:
        click.get_current_context().exit(context.exit_code or 1)


@contextlib.contextmanager
def disk_failures(where: object) -> Iterator[None]:
    """An OSError inside becomes a CommandFailed. `where`: the file, if the error names none."""
    try:
        yield
    except OSError as error:
        raise _disk_failure(error, where) from error


def _disk_failure(error: OSError, where: object) -> CommandFailed:
    return CommandFailed(f"{error.filename or where}: {error.strerror}")


@contextlib.contextmanager
def _usage_errors() -> Any:
    try:
        yield
    except TargetError as error:
        raise click.UsageError(str(error), click.get_current_context(silent=True)) from error


async def names_there(what: str, given: Mapping[str, Any]) -> list[str]:
    """Names for the completion of a shell: `topics`, `groups`, `brokers`, `addresses` or
    `clusters` of the cluster where the command goes; empty if it does not answer at once."""
    from batonmq.client.admin import admin
    from batonmq.client.instance.connections import ClientOptions
    from batonmq.protocol.errors import BatonError

    try:
        target = target_here(given.get("namesrv_addr"), given.get("controller_address"))
        async with admin.Admin(
            target.name_servers_or_advice(),
            timeout_ms=COMPLETE_MS,
            client_options=ClientOptions(tls=target.tls, credentials=target.credentials),
        ) as asked:
            if what == "topics":
                return await asked.topics.names()
            if what == "groups":
                return await asked.consumer_groups.names()
            info = await asked.cluster.info()
    except (BatonError, TargetError, OSError):
        return []
    if what == "clusters":
        return sorted(info.cluster_addr_table)
    if what == "brokers":
        return sorted(info.broker_addr_table)
    return sorted(a for data in info.broker_addr_table.values() for a in data.broker_addrs.values())


def reason(address: str, error: object) -> str:
    """The text of an error without the address in front, which is shown beside it."""
    return str(error).removeprefix(f"{address}: ")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
