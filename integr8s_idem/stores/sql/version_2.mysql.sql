-- The history of attempts: how many leases have lapsed, how many of these attempts ran alone in their process, and
-- whether the present one does.  Workers of version 1 leave these columns alone: they are ignored in a row whose fence
-- is not history_fence.
ALTER TABLE idempotency_records ADD COLUMN lapsed INTEGER NOT NULL DEFAULT 0;
ALTER TABLE idempotency_records ADD COLUMN lapsed_alone INTEGER NOT NULL DEFAULT 0;
ALTER TABLE idempotency_records ADD COLUMN alone BOOL NOT NULL DEFAULT false;
ALTER TABLE idempotency_records ADD COLUMN history_fence BIGINT NOT NULL DEFAULT 0;
