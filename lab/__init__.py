"""The laboratory, which is not shipped: clusters of real processes, faults, the simulation, the
bench."""
