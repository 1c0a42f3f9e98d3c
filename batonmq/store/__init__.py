"""The store of one broker: commit log, consume queues, index and what keeps them whole.

`message_store.MessageStore` puts the parts together. A put goes through `appender` and
`commit_log`; what is confirmed through `dispatch` into `queue_table`, `consume_queue` and the
index; a read through `queries` and `reader`. Imports are left to the modules, so that readers of
single files do not load a whole store.
"""
