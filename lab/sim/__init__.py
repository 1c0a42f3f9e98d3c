"""The cluster in one process on virtual time: what ships, with everything around it simulated.

A seed is a life of the whole cluster, replayed to the byte: `python -m lab.sim --seed 7 --trace`.
"""
