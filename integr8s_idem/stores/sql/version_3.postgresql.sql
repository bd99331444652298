-- The trace of the attempt that the current one took the row over from.  RETURNING and SELECT only see the row after a
-- takeover, which has replaced it.  Workers of earlier versions leave the column alone, and a takeover by a worker of
-- this version overwrites it.
ALTER TABLE idempotency_records ADD COLUMN previous_trace BYTEA;
