-- Events that wait to be published.  headers: JSON, pairs of a name and Base64.
CREATE TABLE idempotency_outbox (
    id BIGSERIAL NOT NULL,
    bucket SMALLINT NOT NULL,
    event_id TEXT NOT NULL,
    event_type TEXT NOT NULL,
    topic TEXT NOT NULL,
    message_key BYTEA,
    value BYTEA NOT NULL,
    headers BYTEA NOT NULL,
    PRIMARY KEY (id)
);
CREATE INDEX idempotency_outbox_bucket ON idempotency_outbox (bucket, id);

-- Which relay publishes what: the events of one Kafka key are in one bucket.
CREATE TABLE idempotency_outbox_buckets (
    bucket SMALLINT NOT NULL,
    token BYTEA NOT NULL,
    claimed_until BIGINT NOT NULL,
    PRIMARY KEY (bucket)
);

-- One row a key.  Times are microseconds since 1970, UTC.  status: 1 processing, 2 completed, 3 failed,
-- previous: 0 none, 1 released, 2 lapsed.  lease_until is null once released or settled.
CREATE TABLE idempotency_records (
    key VARCHAR(255) COLLATE "C" NOT NULL,
    status SMALLINT NOT NULL,
    attempt INTEGER NOT NULL,
    fence BIGINT NOT NULL,
    token BYTEA NOT NULL,
    lease_until BIGINT,
    expires_at BIGINT NOT NULL,
    settled_at BIGINT,
    previous SMALLINT NOT NULL,
    fingerprint BYTEA,
    owner TEXT NOT NULL,
    trace BYTEA,
    result BYTEA,
    content_type TEXT,
    result_dropped BOOLEAN NOT NULL,
    error TEXT NOT NULL,
    PRIMARY KEY (key)
);
CREATE INDEX idempotency_records_expires_at ON idempotency_records (expires_at);

-- One row: the version of the schema, what names these data, and when somebody last looked.
CREATE TABLE idempotency_store (
    id SMALLINT NOT NULL,
    version INTEGER NOT NULL,
    identity VARCHAR(64) NOT NULL,
    seen_at BIGINT NOT NULL,
    PRIMARY KEY (id)
);
