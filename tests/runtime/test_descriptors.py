"""Low descriptors are held for a while, and free again."""

import errno
import os
import resource
import socket

import pytest

from batonmq.runtime.sockets import LowDescriptors


def open_now() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def test_what_is_opened_meanwhile_has_higher_numbers_than_what_comes_later(
    held_descriptors: int,
) -> None:
    before = open_now()
    low = LowDescriptors()
    with socket.socket() as session:
        low.free()
        low.free()
        with socket.socket() as client:
            assert client.fileno() < session.fileno()
            allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            assert session.fileno() > min(held_descriptors, allowed // 2)
    assert open_now() == before


@pytest.mark.usefixtures("held_descriptors")
def test_where_descriptors_run_out_none_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    before, left, dup = open_now(), iter(range(5)), os.dup

    def scarce(descriptor: int) -> int:
        if next(left, None) is None:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return dup(descriptor)

    monkeypatch.setattr(os, "dup", scarce)
    low = LowDescriptors()
    assert next(left, None) is None and open_now() == before
    low.free()
