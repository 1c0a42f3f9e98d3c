"""Measures this cluster beside Apache RocketMQ 5.3.3, in the same shape, on the same machine.

`python -m lab.bench.compare` runs everything and prints one table of medians and ratios. A *side*
is one of the two clusters (`side`), a *part* measures some rows on a side.
"""
