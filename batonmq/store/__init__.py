"""The store of one broker: commit log, consume queues, index. `message_store.MessageStore` puts the
parts together. A put goes through `appender` and `commit_log`; what is confirmed through `dispatch`
into `queue_table`, `consume_queue` and the index; a read through `queries` and `reader`. Import the
modules: readers of single files need not load a whole store."""
