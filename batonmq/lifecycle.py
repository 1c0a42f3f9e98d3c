"""`async with` for everything of the client that is started and closed."""

from types import TracebackType
from typing import Self


class Startable:
    """`start` on entering, `close` on leaving, whatever happened in between."""

    async def start(self) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()
