-- When a message was written, in microseconds since 1970 by the clock of the database, to report how long it has waited.
-- 0 is unknown: rows of earlier versions, whose workers leave the column alone.
ALTER TABLE idempotency_outbox ADD COLUMN created_at BIGINT DEFAULT 0 NOT NULL;
