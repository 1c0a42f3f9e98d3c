"""Processor time and memory of processes."""

import os

from lab.bench.cpu import CpuMeter, CpuUse, anon_mib, cpu_seconds


def test_this_process_can_be_read() -> None:
    assert cpu_seconds([os.getpid()]) > 0
    assert anon_mib([os.getpid()]) > 1
    use = CpuMeter({"this": [os.getpid()]}).stop()
    assert use.seconds["this"] >= 0 and use.others_s >= 0


def test_noise_in_percent_of_a_core() -> None:
    assert CpuUse({}, 10.0, 2.5).others_percent == 25.0


def test_micros_per_thing_done() -> None:
    use = CpuUse({"master": 0.5, "slave": 0.25}, 10.0)
    assert use.micros_per(10_000) == {"master": 50.0, "slave": 25.0}
    assert use.micros_per(0)["master"] == 500_000.0
