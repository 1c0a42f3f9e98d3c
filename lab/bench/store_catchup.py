"""What catching up costs a replica's store: `python -m lab.bench.store_catchup`.

No network and no cluster: a master's log of messages with KEYS is appended to an empty store in
pieces, checked, and made visible, as a slave does. Printed: processor time per record and MB/s, of
the append with its check, of the dispatch, and of both. Medians of `--rounds`.
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Final, NamedTuple

from batonmq.protocol.message_id import host_bytes
from batonmq.protocol.properties import find_property
from batonmq.protocol.records.codec import NewMessage
from batonmq.protocol.tags import tags_code
from batonmq.store.config import StoreConfig
from batonmq.store.index_service import IndexService
from batonmq.store.message_store import MessageStore
from batonmq.store.recovery import ConfirmedBySet

HOST: Final = host_bytes("127.0.0.1", 10911)
PIECE: Final = 1 << 20


class CatchUpCost(NamedTuple):
    """Seconds of processor time for all records."""

    check: float
    dispatch: float


def _store(folder: Path) -> MessageStore:
    config = StoreConfig(store_path_root_dir=str(folder))
    return MessageStore(config, store_host=HOST, confirm_rule=ConfirmedBySet())


def message(number: int, kind: str) -> NewMessage:
    """`uniform`: one layout. `mixed`: several topics, tags, lengths and numbers of keys."""
    chance = random.Random(number)
    body, topic, tag, extra = b"c" * 1024, "BenchCatchUp", b"TagA", b""
    keys = b"order-%08d" % number
    if kind == "mixed":
        body = body[: chance.randrange(900, 1025)]
        topic = f"BenchCatchUp{chance.randrange(20)}"
        tag = b"Tag" + b"ABCDEFGH"[: chance.randrange(9)]
        keys = b" ".join(b"k%d" % chance.randrange(10**9) for _ in range(chance.randrange(3)))
        extra = b"a%d\x01%d\x02" % (chance.randrange(20), number)
    uniq = b"7F0000011F906E0B0A1A%012X" % number
    pairs = [b"UNIQ_KEY\x01" + uniq, b"WAIT\x01true", b"TAGS\x01" + tag]
    if keys:
        pairs.append(b"KEYS\x01" + keys)
    properties = extra + b"\x02".join(pairs) + b"\x02"
    return NewMessage(
        topic, number // 64 % 8, body, properties, tags_code(tag),
        find_property(properties, b"KEYS"), uniq, 0, HOST,
    )  # fmt: skip


def _log_of(folder: Path, size: int, kind: str) -> tuple[bytes, int]:
    """A master's log, and of how many records."""
    master = _store(folder)
    master.open()
    master.prepare_master()
    count = 0
    while master.max_phy_offset < size:
        for _ in range(64):
            master.appender.put_message(message(count, kind))
            count += 1
        master.end_turn()
    data = bytes(master.log.view(0, master.max_phy_offset))
    master.abandon()
    return data, count


def _catch_up(folder: Path, data: bytes) -> CatchUpCost:
    slave = _store(folder)
    slave.open()
    check = dispatch = 0.0
    view = memoryview(data)
    slave.slave_log.reset_for_empty_start(0)
    for at in range(0, len(data), PIECE):
        began = time.process_time()
        end = slave.slave_log.append_replicated(at, view[at : at + PIECE])
        checked = time.process_time()
        slave.advance_confirm_offset(end)
        check += checked - began
        dispatch += time.process_time() - checked
    assert slave.confirm_offset == len(data)
    slave.abandon()
    shutil.rmtree(folder)
    return CatchUpCost(check, dispatch)


def _line(name: str, seconds: list[float], size: int, count: int) -> str:
    median = statistics.median(seconds)
    return f"{name:16} {median / count * 1e6:6.2f} us a record {size / 1e6 / median:7.0f} MB/s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=150)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="for the stores; default: a temporary one")
    options = parser.parse_args()
    IndexService.preload()
    for kind in ("uniform", "mixed"):
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            data, count = _log_of(Path(folder, "master"), options.mb * 1_000_000, kind)
            costs = [
                _catch_up(Path(folder, f"slave{number}"), data) for number in range(options.rounds)
            ]
        print(f"{kind}: {count} records, {len(data) / 1e6:.0f} MB")
        for name, seconds in (
            ("append, check", [cost.check for cost in costs]),
            ("dispatch", [cost.dispatch for cost in costs]),
            ("both", [sum(cost) for cost in costs]),
        ):
            print(" ", _line(name, seconds, len(data), count))


if __name__ == "__main__":
    main()
