"""Defects to be planted, one at a time: what the checkers of the simulation must find.

Each `NAME.patch` begins with a line that says what is wrong and which rule it breaks. Two more may
follow: `Found by seed N`, a life that is tried first, and `In lives with 3 pause, sync_flush`, for
which the others are looked through (faults drawn, settings). A life is another one after any change
of the code, so the second is what lasts. The rest is a unified diff, of a few lines.

`python -m lab.sim.defects` (`make defects`) plants each, and lives until a checker finds it.
"""
