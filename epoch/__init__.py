"""Epochs: which master wrote which part of the log, and up to where two logs are the same.

`entry` is pure; `file_cache` keeps a replica's list in memory and durably on disk.
"""
