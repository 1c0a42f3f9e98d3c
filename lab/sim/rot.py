"""Bits that flipped at rest, in logs: which, whether they still show, and what was there.

Checkers that compare a log with the truth read it by `Rot.read`: a bad byte that no process has
read breaks no promise. To serve or copy it, to cut good records because of it, or to continue
without being suspect does; other checkers see that.
"""

import os

from batonmq.store.message_store import MessageStore
from lab.sim.hosts import BrokerHost


class Rot:
    """`truth` is what is confirmed. Of each host the flipped bits, as masks by log offset."""

    def __init__(self, truth: bytearray) -> None:
        self._truth = truth
        self._flipped: dict[str, dict[int, int]] = {}
        self.met: set[str] = set()
        """The hosts of which a bit ever flipped, or a call to the disk failed."""

    def flip(self, host: BrokerHost, offset: int, mask: int) -> None:
        """Changes the byte of its log at `offset` on its disk. The broker does not notice."""
        path = self._segment(host, offset)
        size = host.world.settings.segment_size
        with open(path, "r+b") as file:
            file.seek(offset % size)
            (byte,) = file.read(1)
            file.seek(offset % size)
            file.write(bytes((byte ^ mask,)))
        self.met.add(host.name)
        self._flipped.setdefault(host.name, {})[offset] = mask

    def of(self, host: BrokerHost) -> dict[int, int]:
        """Those that still show on its disk."""
        shown = {}
        for offset, mask in self._flipped.get(host.name, {}).items():
            path = self._segment(host, offset)
            if offset < len(self._truth) and os.path.exists(path):
                with open(path, "rb") as file:
                    file.seek(offset % host.world.settings.segment_size)
                    if file.read(1) == bytes((self._truth[offset] ^ mask,)):
                        shown[offset] = mask
        return shown

    def read(self, host: BrokerHost, begin: int, end: int) -> bytes:
        """The bytes [begin, end) of its log as they were written, fewer if it ends before."""
        assert host.service is not None
        data = read_log(host.service.store, begin, end)
        if host.name not in self._flipped:
            return data
        mended = bytearray(data)
        for offset, mask in self.of(host).items():
            if begin <= offset < begin + len(data):
                mended[offset - begin] ^= mask
        return bytes(mended)

    @staticmethod
    def _segment(host: BrokerHost, offset: int) -> str:
        start = offset - offset % host.world.settings.segment_size
        return f"{host.disk.root}/store/commitlog/{start:020d}"


def read_log(store: MessageStore, begin: int, end: int) -> bytes:
    """The bytes [begin, end) of a log, fewer if it ends before."""
    pieces = []
    while begin < end and (view := store.log.view(begin, end - begin)):
        pieces.append(bytes(view))
        begin += len(view)
    return b"".join(pieces)
