"""What a good record of the commit log is, told once: for the store, for clients and for Spark.

`codec` is the reference: it writes and reads one record, and says why bytes are none. `faults`
lists the reasons. `common` reads the usual record quickly, `columns` reads many at once with numpy,
and `search` finds records where no boundary is known. All agree with `codec`. Only `columns`
imports numpy: a client is installed without it.
"""
