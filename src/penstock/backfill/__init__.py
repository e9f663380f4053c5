"""Backfills: the rows that tables already have, read in chunks between the live changes.

    penstock backfill start -> `request`, in the store -> `supervisor`, in the run: the desired state
    -> `reader`, beside the capture: `chunks` plans each chunk in a snapshot, and writes its watermark
    -> the decoder meets the watermark (`postgres.watermarks`): the chunk, less the rows changed since
    -> `read`, in Spark's tasks: the ranges of the chunk become messages, in order with the changes
    -> `events` of the reader and its tasks -> `progress`, in the run -> the cursor, in the store

What the parts exchange is in `postgres.reads`. `tables` and `initial` select the tables that a backfill
is asked for. The supervisor has a `source` for each source, and that its `current` backfill. Planner and
tasks share `session` (connections), `source_table` (what they know of the table) and `ranges` (SQL).
"""
