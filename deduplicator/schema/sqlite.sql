CREATE TABLE IF NOT EXISTS {processed} (
    consumer_name TEXT NOT NULL,
    message_key   TEXT NOT NULL,
    processed_at  TEXT NOT NULL,
    fingerprint   BLOB,
    PRIMARY KEY (consumer_name, message_key)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS {processed_index} ON {processed_base} (processed_at);

CREATE TABLE IF NOT EXISTS {produced} (
    consumer_name TEXT NOT NULL,
    message_key   TEXT NOT NULL,
    ordinal       INTEGER NOT NULL,
    topic         TEXT NOT NULL,
    uuid          TEXT NOT NULL,
    metadata      BLOB NOT NULL,
    payload       BLOB NOT NULL,
    created_at    TEXT NOT NULL,
    PRIMARY KEY (consumer_name, message_key, ordinal)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS {produced_index} ON {produced_base} (consumer_name, ordinal, created_at);

CREATE TABLE IF NOT EXISTS {leases} (
    consumer_name TEXT NOT NULL,
    token         TEXT NOT NULL,
    expires_at    TEXT NOT NULL,
    PRIMARY KEY (consumer_name)
) WITHOUT ROWID;

CREATE TABLE IF NOT EXISTS {attempts} (
    consumer_name TEXT NOT NULL,
    message_key   TEXT NOT NULL,
    attempts      INTEGER NOT NULL,
    updated_at    TEXT NOT NULL,
    PRIMARY KEY (consumer_name, message_key)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS {attempts_index} ON {attempts_base} (updated_at);
