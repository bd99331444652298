-- Events that wait to be published.  headers: JSON, pairs of a name and Base64.
CREATE TABLE idempotency_outbox (
    id BIGINT NOT NULL AUTO_INCREMENT,
    bucket SMALLINT NOT NULL,
    event_id MEDIUMTEXT NOT NULL,
    event_type TEXT CHARACTER SET utf8mb4 NOT NULL,
    topic TEXT CHARACTER SET utf8mb4 NOT NULL,
    message_key LONGBLOB,
    value LONGBLOB NOT NULL,
    headers LONGBLOB NOT NULL,
    PRIMARY KEY (id)
) ENGINE=InnoDB;
CREATE INDEX idempotency_outbox_bucket ON idempotency_outbox (bucket, id);

-- Which relay publishes what: the events of one Kafka key are in one bucket.
CREATE TABLE idempotency_outbox_buckets (
    bucket SMALLINT NOT NULL,
    token VARBINARY(16) NOT NULL,
    claimed_until BIGINT NOT NULL,
    PRIMARY KEY (bucket)
) ENGINE=InnoDB;

-- One row a key.  Times are microseconds since 1970, UTC.  status: 1 processing, 2 completed, 3 failed,
-- previous: 0 none, 1 released, 2 lapsed.  lease_until is null once released or settled.
CREATE TABLE idempotency_records (
    `key` VARBINARY(1020) NOT NULL,
    status SMALLINT NOT NULL,
    attempt INTEGER NOT NULL,
    fence BIGINT NOT NULL,
    token VARBINARY(16) NOT NULL,
    lease_until BIGINT,
    expires_at BIGINT NOT NULL,
    settled_at BIGINT,
    previous SMALLINT NOT NULL,
    fingerprint VARBINARY(16),
    owner MEDIUMTEXT NOT NULL,
    trace VARBINARY(24),
    result LONGBLOB,
    content_type MEDIUMTEXT,
    result_dropped BOOL NOT NULL,
    error MEDIUMTEXT NOT NULL,
    PRIMARY KEY (`key`)
) ENGINE=InnoDB;
CREATE INDEX idempotency_records_expires_at ON idempotency_records (expires_at);

-- One row: the version of the schema, what names these data, and when somebody last looked.
CREATE TABLE idempotency_store (
    id SMALLINT NOT NULL,
    version INTEGER NOT NULL,
    identity VARCHAR(64) NOT NULL,
    seen_at BIGINT NOT NULL,
    PRIMARY KEY (id)
) ENGINE=InnoDB;
