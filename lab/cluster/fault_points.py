"""Faults inside a server process: a disk that fails, kill -9 at a disk call, a wall clock that
jumps. `fault_environment` makes a server load this module at its start; it logs that loudly.

`BATONMQ_DISK_FAULTS` has rules, one a line or with `;` between them (`#` begins a comment):

    CALL PATH ERROR [after N] [once | for SECONDSs]     the call raises that error, and does nothing
    CALL PATH SHORT [after N] [once | for SECONDSs]     a write writes half, and says so
    kill before|during|after CALL PATH [after N]        kill -9 of this process, at that call

CALL is a name of `runtime.disk`, `changes` (every call that changes a disk), `room` (what fails on
a full disk: new files and folders, and writes where nothing is allocated yet) or `*`. PATH is found
anywhere in the path of the file or folder; `*` and `?` are wild. `after N` lets N such calls pass,
`once` is one failure, `for 5s` a time from the first failure on. `during` needs a write, of which
half is done. Each rule counts for itself; the first one that fits a call acts:

    fdatasync commitlog EIO once after 3
    pwrite * ENOSPC after 100 for 5s
    kill before replace epochFileCheckpoint

`BATONMQ_CLOCK_FAULTS` is a jump of the wall clock in seconds: `+3600`, `-0.5`.

`@FILE` in the place of rules: they are in that file, which may be missing, and are read again at
each SIGUSR1. So a fault begins and ends while the process runs.
"""

import contextlib
import errno
import fnmatch
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, NoReturn

from batonmq.protocol.errors import BatonError
from batonmq.runtime import disk
from batonmq.runtime.clock import boot_ms
from batonmq.runtime.server_main import START_HOOK
from lab.cluster.processes import ROOT

log = logging.getLogger(__name__)

DISK_VARIABLE: Final = "BATONMQ_DISK_FAULTS"
CLOCK_VARIABLE: Final = "BATONMQ_CLOCK_FAULTS"
RELOAD_SIGNAL: Final = signal.SIGUSR1

_CHANGES: Final = frozenset(disk.CALLS) - {
    "close",
    "pread",
    "listdir",
    "lseek",
    "read_bytes",
    "map_read",
}
_WRITES: Final = ("pwrite", "write")
_ROOM: Final = frozenset({"open", "mkdir", "makedirs", "link", "posix_fallocate", *_WRITES})
_KINDS: Final = {"changes": _CHANGES, "room": _ROOM, "*": frozenset(disk.CALLS)}
_BLOCK_BYTES: Final = 512
_MAKES: Final = os.O_CREAT | os.O_TRUNC
_OPTIONS: Final = re.compile(r"\s*(?:after (?P<after>\d+)|(?P<once>once)|for (?P<for>[\d.]+)s)\b")
_JUMP: Final = re.compile(r"[+-]\d+(\.\d+)?")
_plain_clock: Final = {"time_ns": time.time_ns, "time": time.time}

Action = Literal["fail", "short", "before", "during", "after"]


class FaultRuleError(BatonError):
    """A rule that cannot be carried out: which one, and what is allowed."""


@dataclass(frozen=True, slots=True)
class DiskFault:
    """One rule. `error` is an errno, of action "fail" only; `for_ms` None: no end."""

    text: str
    action: Action
    call: str
    path: str
    error: int = 0
    after: int = 0
    once: bool = False
    for_ms: int | None = None

    def fits(self, call: str, arguments: tuple[Any, ...]) -> bool:
        if call not in self.calls:
            return False
        if self.call == "changes" and call == "open" and not arguments[1] & _MAKES:
            return False
        if self.call == "room" and not _needs_room(call, arguments):
            return False
        pattern = f"*{self.path}*"
        return any(fnmatch.fnmatchcase(path, pattern) for path in _paths(call, arguments))

    @property
    def calls(self) -> frozenset[str]:
        """Which calls it may fit."""
        return _KINDS.get(self.call, frozenset({self.call}))


def parse_disk_faults(text: str) -> tuple[DiskFault, ...]:
    """The rules in a text. Raises FaultRuleError."""
    lines = (line.partition("#")[0].strip() for line in re.split(r"[\n;]", text))
    return tuple(_parse_rule(line) for line in lines if line)


def _parse_rule(text: str) -> DiskFault:
    words = text.split(maxsplit=4)
    kills = words[0] == "kill"
    if len(words) < (4 if kills else 3):
        raise FaultRuleError(
            f"{text!r}: needed are CALL PATH ERROR, or kill before|during|after CALL PATH"
        )
    if kills:
        action, call, path, rest = words[1], words[2], words[3], "".join(words[4:])
        if action not in ("before", "during", "after"):
            raise FaultRuleError(f"{text!r}: kill before, during or after, not {action!r}")
        if action == "during" and call not in _WRITES:
            raise FaultRuleError(f"{text!r}: only {' and '.join(_WRITES)} have a middle")
        number = 0
    else:
        call, path, name = words[:3]
        action, rest = "short" if name == "SHORT" else "fail", " ".join(words[3:])
        number = getattr(errno, name, 0) if name.startswith("E") else 0
        if action == "short" and call not in _WRITES:
            raise FaultRuleError(f"{text!r}: only {' and '.join(_WRITES)} can be short")
        if action == "fail" and not number:
            raise FaultRuleError(f"{text!r}: {name!r} is no error, such as EIO or ENOSPC")
    allowed = (*disk.CALLS, *_KINDS)
    if call not in allowed:
        raise FaultRuleError(f"{text!r}: no call {call!r}; allowed are {', '.join(allowed)}")
    given = _options(text, rest)
    if kills and ("once" in given or "for" in given):
        raise FaultRuleError(f"{text!r}: a process is killed once: only `after N` may follow")
    seconds = given.get("for")
    return DiskFault(
        text,
        action,  # type: ignore[arg-type]  # one of the three, or "fail"
        call,
        path,
        number,
        int(given.get("after", 0)),
        "once" in given,
        None if seconds is None else int(float(seconds) * 1000),
    )


def _options(text: str, rest: str) -> dict[str, str]:
    given: dict[str, str] = {}
    position = 0
    while position < len(rest.rstrip()):
        found = _OPTIONS.match(rest, position)
        if found is None:
            raise FaultRuleError(
                f"{text!r}: {rest[position:].strip()!r} is none of `after N`, `once`, `for 5s`"
            )
        given |= {name: value for name, value in found.groupdict().items() if value is not None}
        position = found.end()
    if "once" in given and "for" in given:
        raise FaultRuleError(f"{text!r}: `once` or `for`, not both")
    return given


def _paths(call: str, arguments: tuple[Any, ...]) -> Iterator[str]:
    for argument in arguments[: 2 if call in ("link", "rename", "replace") else 1]:
        if isinstance(argument, int):
            with contextlib.suppress(OSError):
                yield os.readlink(f"/proc/self/fd/{argument}")
        else:
            yield os.fspath(argument)


def _needs_room(call: str, arguments: tuple[Any, ...]) -> bool:
    """Whether a call of `_ROOM` takes space that the disk has not given yet."""
    if call == "open":
        return bool(arguments[1] & os.O_CREAT) and not os.path.exists(arguments[0])
    if call == "makedirs":
        return not os.path.exists(arguments[0])
    if call not in ("pwrite", "posix_fallocate"):
        return True
    status = os.fstat(arguments[0])
    allocated = status.st_blocks * _BLOCK_BYTES
    if call == "posix_fallocate":
        return allocated < int(arguments[1]) + int(arguments[2])
    end = int(arguments[2]) + len(arguments[1])
    return end > status.st_size or allocated < status.st_size


class _Counted:
    """A rule and how far it has come."""

    def __init__(self, rule: DiskFault) -> None:
        self.rule = rule
        self._passed = 0
        self._since_ms: int | None = None
        self.is_over = False

    def strikes(self, call: str, arguments: tuple[Any, ...]) -> bool:
        """Whether this call is one to be spoiled; counts it."""
        rule = self.rule
        if self.is_over or not rule.fits(call, arguments):
            return False
        self._passed += 1
        if self._passed <= rule.after:
            return False
        now = boot_ms()
        if self._since_ms is None:
            self._since_ms = now
        if rule.for_ms is not None and now - self._since_ms > rule.for_ms:
            self.is_over = True
            return False
        self.is_over = rule.once
        return True


class SpoiledDiskCalls:
    """Takes the place of the calls that its rules name, until `remove`."""

    def __init__(self, rules: tuple[DiskFault, ...]) -> None:
        self._rules = [_Counted(rule) for rule in rules]
        self._lock = threading.Lock()  # several threads write
        names = frozenset[str]().union(*(rule.calls for rule in rules))
        self._plain = {name: getattr(disk, name) for name in names}
        disk.replace_calls({name: self._spoiled(name) for name in names})

    @property
    def is_over(self) -> bool:
        """Whether a rule has spoiled all that it ever will."""
        return any(counted.is_over for counted in self._rules)

    def remove(self) -> None:
        disk.replace_calls(self._plain)

    def _spoiled(self, name: str) -> Callable[..., Any]:
        plain = self._plain[name]

        def call(*arguments: Any, **named: Any) -> Any:
            rule = self._striking(name, arguments)
            if rule is None:
                return plain(*arguments, **named)
            if rule.action == "fail":
                log.warning("disk_fault rule=%r call=%s", rule.text, name)
                raise disk.named(OSError(rule.error, os.strerror(rule.error)), arguments[0])
            if rule.action == "short":
                return _half(plain, arguments)
            if rule.action == "during":
                _half(plain, arguments)
            elif rule.action == "after":
                plain(*arguments, **named)
            _die(rule, name)

        return call

    def _striking(self, name: str, arguments: tuple[Any, ...]) -> DiskFault | None:
        with self._lock:
            for counted in self._rules:
                if counted.strikes(name, arguments):
                    return counted.rule
        return None


def _half(plain: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """The first half of a `write` or `pwrite`, at least a byte."""
    fd, data, *position = arguments
    with memoryview(data).cast("B") as view:
        return plain(fd, view[: max(1, len(view) // 2)], *position)


def _die(rule: DiskFault, call: str) -> NoReturn:
    log.critical("disk_fault_kill rule=%r call=%s", rule.text, call)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("it outlived SIGKILL")


def parse_jump(text: str) -> float:
    """Seconds by which the wall clock is off. Raises FaultRuleError."""
    text = text.strip()
    if not text:
        return 0.0
    if _JUMP.fullmatch(text) is None:
        raise FaultRuleError(f"{text!r}: seconds with a sign are needed, such as +3600")
    return float(text)


def jump_wall_clock(seconds: float) -> None:
    """This process's wall clock is that far off from now on; 0 puts it right."""
    clock = vars(time)
    if seconds == 0:
        clock.update(_plain_clock)
        return
    ns = int(seconds * 1e9)
    clock["time_ns"] = lambda: _plain_clock["time_ns"]() + ns
    clock["time"] = lambda: _plain_clock["time"]() + seconds


def _text(source: str) -> str:
    if not source.startswith("@"):
        return source
    try:
        return Path(source[1:]).read_text()
    except FileNotFoundError:
        return ""


class _FaultPoints:
    """The faults that an environment asks for."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._disk_source = environ.get(DISK_VARIABLE, "")
        self._clock_source = environ.get(CLOCK_VARIABLE, "")
        self._disk: SpoiledDiskCalls | None = None

    def load(self) -> None:
        """Puts them in force. Raises FaultRuleError, OSError for a file that cannot be read."""
        rules = parse_disk_faults(_text(self._disk_source))
        jump = parse_jump(_text(self._clock_source))
        if self._disk is not None:
            self._disk.remove()
        self._disk = SpoiledDiskCalls(rules) if rules else None
        jump_wall_clock(jump)
        log.critical(
            "FAULTS ON PURPOSE: this process fails as %s and %s say: disk=%s clock=%+gs",
            DISK_VARIABLE,
            CLOCK_VARIABLE,
            [rule.text for rule in rules] or "sound",
            jump,
        )

    def reload(self, *_: object) -> None:
        """The same while it runs. Rules that cannot be used leave those before in force."""
        try:
            self.load()
        except (FaultRuleError, OSError) as error:
            log.error("fault_points_refused why=%s", error)


def fault_environment(*, disk: str = "", clock: str = "", source: Path = ROOT) -> dict[str, str]:
    """Variables that give a server these faults. `source`: the checkout whose code it runs."""
    # The laboratory is not installed, so the server finds this module only by PYTHONPATH.
    paths = [str(source), os.environ.get("PYTHONPATH", "")]
    return {
        START_HOOK: __name__,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        DISK_VARIABLE: disk,
        CLOCK_VARIABLE: clock,
    }


def at_start(environ: Mapping[str, str]) -> None:
    """The hook of a server: sets up what the environment asks for. For the main thread.

    Raises FaultRuleError, OSError for a file that cannot be read.
    """
    if environ.get(DISK_VARIABLE) or environ.get(CLOCK_VARIABLE):
        points = _FaultPoints(environ)
        signal.signal(RELOAD_SIGNAL, points.reload)
        points.load()
