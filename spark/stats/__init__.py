"""Statistics of topics: volume, sizes, delays, hot queues and slow consumers, from store folders.

`replicas` picks one store per broker group, `scan` turns its log into one small table in one pass,
`tables` makes all results of that, `stats_report` the page.
"""
