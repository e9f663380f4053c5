"""Backfills: the rows that tables already have, read in chunks between the live changes.

    penstock backfill start -> `request`, in the store -> `supervisor`, in the run: the desired state
    -> `reader`, beside the capture: `chunks` reads each chunk in a snapshot, and writes its watermark
    -> the decoder meets the watermark (`postgres.watermarks`): the chunk, less the rows changed since
    -> `read`: the rows of the chunk become messages, which go through the lanes as all others do
    -> `events` of the reader -> `progress`, in the run -> the cursor, in the store

What the parts exchange is in `postgres.reads`. `tables` and `initial` select the tables that a backfill
is asked for. The supervisor has a `source` for each source, and that its `current` backfill. `session`
has the connections, `source_table` what is known of a table, `ranges` the SQL.
"""
