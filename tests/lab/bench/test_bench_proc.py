"""Reading /proc."""

from __future__ import annotations

import os

import pytest

from lab.bench.cpu import (
    CpuUse,
    anon_mib,
    cpu_seconds,
    parse_busy_ticks,
    parse_memory_kib,
    parse_stat,
)

STAT = (
    "4242 (java (x) y) S 1 4242 4242 0 -1 4194560 100 0 0 0 1234 66 0 0 20 0 90 0 5000 1 2 3"
    " 0 0 0 0 0 0 0 0 0 0 0 17 1 0 0 0 0 0"
)


def test_stat_of_a_command_with_blanks_and_brackets() -> None:
    stat = parse_stat(STAT)
    assert (stat.pid, stat.command, stat.state, stat.cpu_ticks) == (4242, "java (x) y", "S", 1300)


def test_status_line_in_kib() -> None:
    text = "00400000-7ff0 ---p 00000000 00:00 0 [rollup]\nRss:  900 kB\nPss_Anon:\t  512 kB\n"
    assert parse_memory_kib(text, "Pss_Anon") == 512
    with pytest.raises(KeyError):
        parse_memory_kib(text, "Pss_Shmem")


def test_this_process_can_be_read() -> None:
    assert cpu_seconds([os.getpid()]) >= 0
    assert anon_mib([os.getpid()]) > 1


def test_busy_is_all_but_idle_and_waiting() -> None:
    text = "cpu  100 1 20 5000 300 2 3 4 0 0\ncpu0 50 0 10 2500 150 1 1 2 0 0\n"
    assert parse_busy_ticks(text) == 100 + 1 + 20 + 2 + 3 + 4


def test_noise_in_percent_of_a_core() -> None:
    assert CpuUse({}, 10.0, 2.5).others_percent == 25.0


def test_micros_per_thing_done() -> None:
    use = CpuUse({"master": 0.5, "slave": 0.25}, 10.0)
    assert use.micros_per(10_000) == {"master": 50.0, "slave": 25.0}
    assert use.micros_per(0)["master"] == 500_000.0
