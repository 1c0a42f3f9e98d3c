"""One store alone, by the number of its queues: `python -m lab.bench.store_scale`.

Printed for each number: puts, rounds of upkeep, opening. The longest turn is processor time of the
loop's thread between two returns to the loop.
"""

from __future__ import annotations

import asyncio
import gc
import tempfile
import time
from pathlib import Path
from typing import Final, Self

from batonmq.protocol.message_id import host_bytes
from batonmq.protocol.records.codec import NewMessage
from batonmq.store.config import StoreConfig
from batonmq.store.message_store import MessageStore
from batonmq.store.recovery import ConfirmedByLog

HOST: Final = host_bytes("127.0.0.1", 10911)
BODY: Final = b"x" * 1024
ROUNDS: Final = 3
QUEUES: Final = (10, 1_000, 10_000)
PER_TOPIC: Final = 8


def _store(folder: Path, queues: int) -> MessageStore:
    config = StoreConfig(store_path_root_dir=str(folder / f"store{queues}"))
    return MessageStore(config, store_host=HOST, confirm_rule=ConfirmedByLog())


def _put_everywhere(store: MessageStore, queues: int) -> None:
    for number in range(queues):
        topic, queue_id = f"Scale{number // PER_TOPIC}", number % PER_TOPIC
        key = b"%032d" % number
        store.appender.put_message(
            NewMessage(
                topic, queue_id, BODY, b"UNIQ_KEY\x01" + key + b"\x02", 0, None, key, 0, HOST
            )
        )
        if number % 64 == 63:
            store.advance_confirm_offset(store.end_turn())
    store.advance_confirm_offset(store.end_turn())


class _Turns:
    """While it is entered: the longest callback of any loop and all of them, in seconds of
    processor time."""

    def __enter__(self) -> Self:
        self.longest = self.total = 0.0
        self._run = asyncio.Handle._run
        turns, run = self, self._run

        def timed(handle: asyncio.Handle) -> None:
            began = time.thread_time()
            run(handle)
            turns.note(time.thread_time() - began)

        asyncio.Handle._run = timed  # type: ignore
        return self

    def note(self, took: float) -> None:
        self.longest = max(self.longest, took)
        self.total += took

    def __exit__(self, *exc: object) -> None:
        asyncio.Handle._run = self._run  # type: ignore


async def _rounds(store: MessageStore, queues: int) -> None:
    store.start(asyncio.get_running_loop(), lambda error: None)
    for number in range(ROUNDS):
        began = time.thread_time()
        _put_everywhere(store, queues)
        each_us = (time.thread_time() - began) * 1e6 / queues
        begun, end = time.monotonic(), store.confirm_offset
        with _Turns() as turns:
            while store._files.checkpoint.recovery_offset != end:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        print(
            f"  round {number}: put {each_us:.1f} us each; upkeep {turns.total * 1000:.0f} ms of"
            f" the loop, longest turn {turns.longest * 1000:.1f} ms;"
            f" checkpoint after {time.monotonic() - begun:.1f} s",
            flush=True,
        )


def measure(folder: Path, queues: int) -> None:
    print(f"{queues} queues", flush=True)
    store = _store(folder, queues)
    store.open()
    gc.collect()
    gc.freeze()  # as a server does
    asyncio.run(_rounds(store, queues))
    began = time.monotonic()
    store.close()
    print(f"  closed in {time.monotonic() - began:.2f} s", flush=True)
    for how in ("clean stop", "kill"):
        store = _store(folder, queues)
        began, used = time.monotonic(), time.process_time()
        store.open()
        print(
            f"  opened after a {how} in {time.monotonic() - began:.2f} s,"
            f" processor {time.process_time() - used:.2f} s",
            flush=True,
        )
        store.abandon()


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="batonmq-scale-") as folder:
        for queues in QUEUES:
            measure(Path(folder), queues)


if __name__ == "__main__":
    main()
