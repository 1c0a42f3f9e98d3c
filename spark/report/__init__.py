"""Reports: one HTML page that opens offline, with pictures drawn by plotly.js inside it.

`page` is the skeleton and escapes all that comes from data; the modules `*_figure(s)` each make one
kind of picture from plain values; `epoch_tables` gets those values out of Spark with bounded
aggregates; `epoch_report` decides what is on the page of `epoch_history`.
"""
