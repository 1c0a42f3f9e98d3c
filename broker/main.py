"""`python -m batonmq.broker.main -c FILE`: one broker process.

Exit codes: 0 after SIGTERM or SIGINT, 1 if it cannot run (a taken port, a locked folder, damage),
2 for a configuration that cannot be read.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from batonmq.process.extras import need_server

if __name__ == "__main__":
    need_server("broker")  # before the imports that would fail

import msgspec

from batonmq.broker.broker_endpoint import BrokerEndpoint
from batonmq.broker.config import BrokerConfig, BrokerSections, ReplicasConfig
from batonmq.ha.config import HAConfig
from batonmq.process import read_faults
from batonmq.process.durable_file import why_no_room
from batonmq.process.server_main import ServerMain, keep_what_is_loaded, run_server
from batonmq.store.bad_sector import fault_note
from batonmq.store.config import StoreConfig

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from batonmq.broker.service import BrokerService

SECTIONS: dict[str, type[msgspec.Struct]] = {
    "broker": BrokerConfig,
    "store": StoreConfig,
    "ha": HAConfig,
    "replicas": ReplicasConfig,
}


# After fdatasync the flush thread waits until the loop releases the interpreter: by default up to
# 5 ms, and every SYNC_FLUSH ack would wait as long.
SWITCH_INTERVAL_S = 0.0005

ROOM_POLL_S = 1.0


async def _has_room(main: ServerMain, root: Path) -> bool:
    """R45: a start on a full disk waits for room, and ends nothing. False if it is to stop."""
    told = ""
    while why := why_no_room(root):
        if why != told:
            log.error("start_waits_for_room why=%r", why)
            told = why
        try:
            async with asyncio.timeout(ROOM_POLL_S):
                await main.stopped()
            return False
        except TimeoutError:
            pass
    return True


def _load() -> type[BrokerService]:
    """The rest of the code, in a thread: the loop serves the endpoint meanwhile."""
    from batonmq.broker.service import BrokerService

    keep_what_is_loaded()
    return BrokerService


async def serve(main: ServerMain) -> None:
    """Runs a broker until SIGTERM, SIGINT or a fatal error."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    sections = main.sections
    config = BrokerSections(
        sections["broker"], sections["store"], sections["ha"], sections["replicas"]
    )
    read_faults.watch(fault_note(config.store.root))
    if not await _has_room(main, config.store.root):
        return
    endpoint = BrokerEndpoint(config)
    await endpoint.listen()
    main.serving()
    service = (await asyncio.to_thread(_load))(config, main.fail, endpoint)
    await service.start()
    try:
        await main.stopped()
    finally:
        await service.close()


def main() -> int:
    return run_server("broker", SECTIONS, serve)


if __name__ == "__main__":
    sys.exit(main())
