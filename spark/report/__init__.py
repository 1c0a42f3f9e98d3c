"""Reports: one HTML page that opens offline, with pictures drawn by plotly.js inside it.

`templates/` has the words and the look; `page` fills a template and escapes all that comes from
data. `epoch_tables` reads the tables of `epoch_history`, bounded; `epoch_figures` and
`traffic_figures` turn plain values into pictures by `plots`; `epoch_report` puts a page together.
"""
