"""The store of one broker: commit log, consume queues, index and what keeps them whole.

`message_store.MessageStore` is the door; the other modules are its parts, each with one idea:
`mapped_file` and `commit_log` bytes on disk, `appender` the write path, `dispatch` what makes
confirmed records visible, `queries` and `reader` reading, `recovery` and `truncation` where the log
ends, `flush`, `upkeep` and `expiry` the work beside it. Imports are left to the modules, so that
readers of single files do not load a whole store.
"""
