"""The last events of a pure core, shown when one of its assertions fails. Pure. A core has
`recent_events` and `@records_event` on each method that takes an event, `@shows_events` on
`check_invariants`. An error that only a bug can cause gets the events as a note. Costs 0.3 µs an
event; arguments are formatted only when shown. Origin: dask/distributed, `WorkerState.story` and
`InvalidTransition`."""

import inspect
from collections import deque
from collections.abc import Callable
from functools import wraps
from reprlib import Repr
from typing import Any, Concatenate, Final, ParamSpec, Protocol, TypeVar

EVENTS_MAX: Final = 50

_BUGS: Final = (AssertionError, LookupError, TypeError, AttributeError)

P = ParamSpec("P")
R = TypeVar("R")


class RecentEvents:
    """The last 50 calls: parameter names, method name, arguments."""

    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls: deque[tuple[tuple[str, ...], str, tuple[Any, ...], dict[str, Any]]] = deque(
            maxlen=EVENTS_MAX
        )

    def lines(self) -> list[str]:
        """One line per event, oldest first: `now_ms=1200 acked(broker_id=2, offset=4096)`."""
        return [_line(*call) for call in self.calls]

    def add_to(self, error: BaseException) -> None:
        """Adds the events to `error` as a note, once."""
        head = f"the last {len(self.calls)} events, oldest first:"
        note = "\n  ".join([head, *self.lines()])
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)


class HasRecentEvents(Protocol):
    @property
    def recent_events(self) -> RecentEvents: ...


Core = TypeVar("Core", bound=HasRecentEvents)


def records_event(method: Callable[Concatenate[Core, P], R]) -> Callable[Concatenate[Core, P], R]:
    """For a method of a core that takes an event."""
    name = method.__name__
    parameters = tuple(inspect.signature(method).parameters)[1:]

    @wraps(method)
    def recorded(self: Core, /, *args: P.args, **kwargs: P.kwargs) -> R:
        self.recent_events.calls.append((parameters, name, args, kwargs))
        try:
            return method(self, *args, **kwargs)
        except _BUGS as error:
            self.recent_events.add_to(error)
            raise

    return recorded


def shows_events(method: Callable[Concatenate[Core, P], R]) -> Callable[Concatenate[Core, P], R]:
    """For `check_invariants`, which is no event."""

    @wraps(method)
    def shown(self: Core, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(self, *args, **kwargs)
        except _BUGS as error:
            self.recent_events.add_to(error)
            raise

    return shown


class _ArgumentRepr(Repr):
    """Short: log bytes and frames are shown by their size."""

    def __init__(self) -> None:
        super().__init__()
        self.maxother = self.maxstring = 200

    def repr_bytes(self, value: bytes, level: int) -> str:
        return f"<{len(value)} bytes>"

    def repr_memoryview(self, value: memoryview, level: int) -> str:
        return f"<{len(value)} bytes>"


_short_repr = _ArgumentRepr().repr


def _line(
    parameters: tuple[str, ...], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> str:
    # Not strict: parameters with a default may be absent.
    named = dict(zip(parameters, args, strict=False)) | kwargs
    time = f"now_ms={named.pop('now_ms')} " if "now_ms" in named else ""
    return f"{time}{name}({', '.join(f'{key}={_short_repr(arg)}' for key, arg in named.items())})"
