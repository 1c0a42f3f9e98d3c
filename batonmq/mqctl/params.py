"""Options as `mqadmin` spells them, and the decorator that makes a function a command.

Every long option has RocketMQ's camelCase name, and its kebab-case form works as well; the help
shows the former. Options of more than one letter behind one dash (`-bn`) are whole names.
"""

import asyncio
import functools
import inspect
import re
from collections.abc import Callable, Coroutine
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import click

from batonmq.mqctl.catalogue import SUMMARIES, kebab
from batonmq.mqctl.context import CommandContext, names_there, run
from batonmq.mqctl.output import Output
from batonmq.protocol.codes import LONG_MAX
from batonmq.protocol.topic_name import text_problem
from batonmq.runtime.clock import UNITS_MS, wall_ms

CommandFunction = Callable[..., Coroutine[Any, Any, None]]
T = TypeVar("T")
SECONDS_MAX = 1e6


class Seconds(click.FloatRange):
    """Of a time-out or an interval. A longer one overflows a timer, and NaN is in every range."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        seconds = super().convert(value, param, ctx)
        if not seconds <= SECONDS_MAX:
            self.fail(f"{value}: at most {SECONDS_MAX:.0f} are allowed", param, ctx)
        return seconds


_METAVARS = {
    Seconds: "SECONDS",
    click.IntRange: "N",
    type(click.STRING): "NAME",
    type(click.BOOL): "true|false",
}


_SHOWS_DEFAULT = (click.IntRange, click.FloatRange, click.Choice)


_PLACES = frozenset(
    {
        "--broker", "--brokerAddr", "--brokerName", "--clusterName", "--controllerAddress",
        "--namesrvAddr",
    }
)  # fmt: skip
"""Where a command goes. Most mean a wider place if they are not given."""
_NAMED = frozenset(
    {
        "--activeTopic", "--brokerName", "--clusterName", "--consumerGroup", "--group",
        "--groupName", "--topic", "--topicName",
    }
)  # fmt: skip
"""Names, or several behind each other with `;`. Which ones are legal, the servers decide; none has
a character that would forge a line of a log or command a terminal (R46)."""


_COMPLETED = {
    "--topic": "topics",
    "--topicName": "topics",
    "--group": "groups",
    "--groupName": "groups",
    "--consumerGroup": "groups",
    "--broker": "brokers",
    "--brokerName": "brokers",
    "--brokerAddr": "addresses",
    "--clusterName": "clusters",
}
"""Option -> what a shell completes it with."""


def complete(what: str) -> Callable[[click.Context, click.Parameter, str], list[str]]:
    """For `shell_complete`: names of the cluster, as `names_there`."""

    def found(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
        names = asyncio.run(names_there(what, ctx.params))
        return [name for name in names if name.startswith(incomplete)]

    return found


class MqOption(click.Option):
    """An option whose camelCase long name has a kebab-case twin that the help leaves out. One that
    names a place may not be empty, as `-b "$ADDR"` is with the variable unset."""

    def __init__(self, *args: Any, **attributes: Any) -> None:
        attributes.setdefault("show_default", isinstance(attributes.get("type"), _SHOWS_DEFAULT))
        for name in args[0]:
            if name in _COMPLETED:
                attributes.setdefault("shell_complete", complete(_COMPLETED[name]))
        super().__init__(*args, **attributes)
        if self.metavar is None and not self.is_flag:
            self.metavar = _METAVARS.get(type(self.type))
        self.shown = list(self.opts)
        twins = [f"--{kebab(opt[2:])}" for opt in self.opts if opt.startswith("--")]
        self.opts = list(dict.fromkeys([*self.opts, *twins]))

    def process_value(self, ctx: click.Context, value: Any) -> Any:
        if value == "" and value != self.default and not _PLACES.isdisjoint(self.shown):
            raise click.BadParameter("it is empty: name a place, or leave it out", ctx, self)
        if isinstance(value, str) and not _NAMED.isdisjoint(self.shown):
            for name in filter(None, value.split(";")):
                if problem := text_problem(name):
                    raise click.BadParameter(f"{name[:64]!r}: {problem}", ctx, self)
        return super().process_value(ctx, value)

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        # click writes the help from `opts`: for that moment without the twins.
        every, self.opts = self.opts, self.shown
        try:
            return super().get_help_record(ctx)
        finally:
            self.opts = every


def option(*names: str, **attributes: Any) -> Callable[[CommandFunction], CommandFunction]:
    """`click.option` with twins in kebab-case. `--brokerName` is the parameter `broker_name`,
    unless a name without dashes says otherwise."""
    if all(name.startswith("-") for name in names):
        long_name = next(name for name in names if name.startswith("--"))
        names = (*names, kebab(long_name[2:]).replace("-", "_"))
    return click.option(*names, cls=MqOption, **attributes)


TIME_FORMS = (
    "2026-11-24 15:40:00 (local time), 2026-11-24T14:40:00Z (RFC 3339), 10m (ago; s, m, h, d),"
    " @1795531200000 (ms since 1970), or RocketMQ's 2026-11-24#15:40:00:000"
)


def read_time(text: str, now_ms: int) -> int:
    """A point in time in ms since 1970, in one of TIME_FORMS or as plain digits.

    Raises ValueError that lists the forms."""
    ago = re.fullmatch(r"(\d+)([smhd])", text)
    if ago is not None:
        return now_ms - int(ago[1]) * UNITS_MS[ago[2]]
    if text == "now":
        return now_ms
    if text.removeprefix("@").isdecimal():
        return int(text.removeprefix("@"))
    java = re.fullmatch(r"(\d{4}-\d\d-\d\d)#(\d\d:\d\d:\d\d):(\d{3})", text)
    try:
        # A time without a zone is local time, as `output.when` prints it.
        at = datetime.fromisoformat(f"{java[1]} {java[2]}.{java[3]}" if java else text)
        return round(at.timestamp() * 1000)
    except (ValueError, OverflowError, OSError):
        raise ValueError(f"{text!r} is no time; give {TIME_FORMS}") from None


def read_duration(text: str) -> int:
    """`90s`, `10m`, `24h` or `7d` in ms. Raises ValueError."""
    found = re.fullmatch(r"(\d{1,9})([smhd])", text)
    if found is None:
        raise ValueError(f"{text!r}: allowed are a number and s, m, h or d, as 24h")
    return int(found[1]) * UNITS_MS[found[2]]


def read_ids(text: str) -> tuple[int, ...]:
    """The numbers of `1;2;3`. Raises ValueError."""
    parts = [part.strip() for part in text.replace(",", ";").split(";") if part.strip()]
    if not parts or not all(part.isdecimal() for part in parts):
        raise ValueError(f"{text!r} is no list of broker ids such as 1;2")
    return tuple(int(part) for part in parts)


class TextType(click.ParamType[T]):
    """What `read` makes of a text. Its ValueError is the error of the option."""

    def __init__(self, name: str, read: Callable[[str], T]) -> None:
        self.name = name
        self._read = read

    def convert(
        self, value: str | T, param: click.Parameter | None, ctx: click.Context | None
    ) -> T:
        if not isinstance(value, str):  # click converts defaults, too
            return value
        try:
            return self._read(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


TIME = TextType("time", lambda text: read_time(text, wall_ms()))
DURATION = TextType("duration", read_duration)
IDS = TextType("ids", read_ids)
FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
NEW_FILE = click.Path(dir_okay=False, path_type=Path)
PLACE = click.Path(path_type=Path)
TRUE_OR_FALSE = click.BOOL
WATCH_S = 2.0
COUNT = click.IntRange(min=1)
INDEX = click.IntRange(min=0)
SECONDS = Seconds(min=0, min_open=True)


folders_argument = click.argument("folders", metavar="[DIR]...", nargs=-1, type=FOLDER)
yes_option = option("-y", "--yes", "yes", is_flag=True, help="Do not ask.")
dry_run_option = option(
    "--dry-run", "dry_run", is_flag=True, help="Show what it would do, do nothing."
)


def stored_from(letter: str) -> Callable[[CommandFunction], CommandFunction]:
    text = "Stored at or after: '2026-11-24 15:40:00', 10m, @ms, or RFC 3339."
    return option(letter, "--beginTimestamp", "begin_ms", type=TIME, default=0, help=text)


stored_until = option(
    "-e", "--endTimestamp", "end_ms", type=TIME, default=LONG_MAX, help="Stored at or before."
)


def exclusive(*given: tuple[str, object]) -> None:
    """Raises click.UsageError if more than one of the options has a value."""
    if sum(value is not None for _, value in given) > 1:
        raise click.UsageError(f"give {' or '.join(name for name, _ in given)}, not both")


def command(
    name: str,
    *,
    controllers: bool = False,
    interval: bool = False,
    writes: bool = False,
    timeout_s: float = 5.0,
) -> Callable[[CommandFunction], click.Command]:
    """Makes `async def f(context, **options)` the command `name`, with the options all have.

    `controllers`: it has `-a`. `interval`: it has `-i` and `--watch` and repeats itself. `writes`:
    it changes something. `timeout_s`: default of `--timeout`."""

    def wrap(function: CommandFunction) -> click.Command:
        @functools.wraps(function)
        def body(
            namesrv_addr: str | None,
            as_json: bool,
            timeout_s: float,
            controller_address: str | None = None,
            interval: float | None = None,
            watch_table: bool = False,
            **options: Any,
        ) -> None:
            # --interval says how often; --watch alone only that.
            if watch_table and interval is None:
                interval = WATCH_S
            context = CommandContext(
                Output(as_json=as_json),
                namesrv_addr=namesrv_addr,
                controller_addr=controller_address,
                timeout_s=timeout_s,
                interval_s=interval,
                writes=writes,
            )
            run(context, context.again_and_again(lambda: function(context, **options)))

        settings = {"help_option_names": ["-h", "--help"]}
        text = f"{SUMMARIES[name]}.\n\n{inspect.cleandoc(function.__doc__ or '')}"
        made: click.Command = click.command(name, context_settings=settings, help=text)(body)
        made.params += _common(controllers, interval, timeout_s)
        return made

    return wrap


def _common(controllers: bool, interval: bool, timeout_s: float) -> list[click.Parameter]:
    options: list[click.Parameter] = []
    if interval:
        often, each = "Print again every so often, until ctrl-C.", f"The same, each {WATCH_S:g} s."
        options += [
            MqOption(["-i", "--interval", "interval"], type=SECONDS, help=often),
            MqOption(["--watch", "watch_table"], is_flag=True, help=each),
        ]
    if controllers:
        options += [
            MqOption(
                ["-a", "--controllerAddress", "controller_address"],
                metavar="ADDR",
                help="Controllers, host:port;host:port. Default: CONTROLLER_ADDR, else those of the"
                " local cluster.",
            )
        ]
    return [
        *options,
        MqOption(
            ["-n", "--namesrvAddr", "namesrv_addr"],
            metavar="ADDR",
            help="Name servers, host:port;host:port. Default: NAMESRV_ADDR, else those of the"
            " cluster that `batonmq up` runs.",
        ),
        MqOption(
            ["--timeout", "timeout_s"],
            type=SECONDS,
            default=timeout_s,
            help="How long one answer is waited for.",
        ),
        MqOption(["--json", "as_json"], is_flag=True, help="JSON on standard output."),
    ]
