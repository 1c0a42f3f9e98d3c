"""What a broker does beside sends and pulls, used by clients and checked: a module a feature.

A life draws which of them it uses. Most checkers read the confirmed log, record by record
(`log.FeatureLog`), for what a feature promises is said there; they know of the clients what these
did and were answered.
"""
