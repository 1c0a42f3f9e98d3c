"""When a controller may depose a master, watched from outside: each election that it proposes.

R6: a second closed connection of one process is no verdict at once. R35: a broker that a controller
never saw is not dead before that controller has led for the time of a first contact.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from batonmq.controller.liveness import events as ev
from batonmq.controller.liveness.core import LivenessCore

FIRST_CONTACT_MS = 1_500
_WINDOW_MS = 10_000
_DELAY_MS = 200


class Verdicts:
    """Of one controller's process, from its start on. `violate` ends the run."""

    def __init__(self, name: str, core: LivenessCore, violate: Callable[[str], None]) -> None:
        self._name = name
        self._core = core
        self._violate = violate
        self._opened_ms = 0
        self._process: dict[int, str] = {}  # by session
        self._closed_ms: dict[str, list[int]] = {}  # by process, what was no good-bye
        self._handle = core.handle
        core.handle = self.handle  # type: ignore[method-assign]

    def handle(self, event: ev.LivenessEvent, now_ms: int) -> list[ev.LivenessEffect]:
        if isinstance(event, ev.GateOpened):
            self._opened_ms = now_ms
        elif isinstance(event, ev.SessionHello):
            self._process[event.session_id] = event.incarnation
        elif isinstance(event, ev.SessionEnded) and self._says_something(event, now_ms):
            process = self._process.get(event.session_id, "")
            self._closed_ms.setdefault(process, []).append(now_ms)
        effects: list[Any] = self._handle(event, now_ms)
        for effect in effects:
            if isinstance(effect, ev.ProposeElect):
                self._judge(effect, now_ms)
        return effects

    def _says_something(self, event: ev.SessionEnded, now_ms: int) -> bool:
        """Not one that was superseded, that was silent before, that closes as its broker stops, or
        while this process stood still (R8), or of a process that is not registered."""
        sessions, state = self._core._sessions, self._core._state
        if not state.is_registered(event.broker_name, event.broker_id):
            return False
        sessions.notice_time(now_ms)
        session = sessions._open_session(event.broker_name, event.broker_id, event.session_id)
        is_news = session is not None and session.silent_since_ms is None
        return is_news and not event.goodbye and now_ms >= sessions._drained_ms

    def _judge(self, effect: ev.ProposeElect, now_ms: int) -> None:
        led_ms = now_ms - self._opened_ms
        if effect.reason == "never_seen" and led_ms < FIRST_CONTACT_MS:
            self._violate(f"R35: {self._name} calls a master dead, never seen in {led_ms} ms")
        group = self._core._state.group(effect.broker_name)
        if effect.reason != "session_closed" or group is None:
            return
        closed_ms = self._closed_ms.get(group.master_incarnation, [])
        earlier = [at for at in closed_ms if 0 < effect.detected_ms - at < _WINDOW_MS]
        waited_ms = now_ms - effect.detected_ms
        if earlier and waited_ms < _DELAY_MS:
            self._violate(
                f"R6: {self._name} deposes {group.master_incarnation} {waited_ms} ms after its"
                f" {len(earlier) + 1}th closed connection in 10 s"
            )
