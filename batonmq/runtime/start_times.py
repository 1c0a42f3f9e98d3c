"""How long each step of a start took. Pure."""

from collections.abc import Callable


class Laps:
    """Call `begin` once, then `end` with the name of each step."""

    def __init__(self, clock_ms: Callable[[], int]) -> None:
        self._clock_ms = clock_ms
        self._since_ms = clock_ms()
        self._took: list[str] = []

    def begin(self) -> None:
        self._since_ms = self._clock_ms()

    def end(self, step: str) -> str:
        """Ends this step: all steps so far, as STEP_ms=N."""
        now_ms = self._clock_ms()
        self._took.append(f"{step}_ms={now_ms - self._since_ms}")
        self._since_ms = now_ms
        return " ".join(self._took)
