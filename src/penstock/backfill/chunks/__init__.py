"""The capture's side of a backfill: plans chunks in snapshots, and writes their watermarks.

`backfiller` is the thread, `commands` what it is asked for, `attempt` the chunks of one attempt,
`retries` its failures, `watches` the table that the decoder watches meanwhile. `next_chunk` plans a
chunk with `planner` (its ranges), `sizing` (how many rows) and `snapshots`; `pool` has the sessions,
and `cursors` ties a cursor to its columns.
"""
