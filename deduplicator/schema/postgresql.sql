CREATE TABLE IF NOT EXISTS {processed} (
    consumer_name text COLLATE "C" NOT NULL,
    message_key   text COLLATE "C" NOT NULL,
    processed_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    fingerprint   bytea,
    PRIMARY KEY (consumer_name, message_key)
);
CREATE INDEX IF NOT EXISTS {processed_index} ON {processed} (processed_at);

CREATE TABLE IF NOT EXISTS {produced} (
    consumer_name text COLLATE "C" NOT NULL,
    message_key   text COLLATE "C" NOT NULL,
    ordinal       integer NOT NULL,
    topic         text NOT NULL,
    uuid          text NOT NULL,
    metadata      bytea NOT NULL,
    payload       bytea NOT NULL,
    created_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (consumer_name, message_key, ordinal)
);
CREATE INDEX IF NOT EXISTS {produced_index} ON {produced} (consumer_name, ordinal, created_at);

CREATE TABLE IF NOT EXISTS {leases} (
    consumer_name text COLLATE "C" NOT NULL,
    token         text NOT NULL,
    expires_at    timestamptz NOT NULL,
    PRIMARY KEY (consumer_name)
);

CREATE TABLE IF NOT EXISTS {attempts} (
    consumer_name text COLLATE "C" NOT NULL,
    message_key   text COLLATE "C" NOT NULL,
    attempts      integer NOT NULL,
    updated_at    timestamptz NOT NULL,
    PRIMARY KEY (consumer_name, message_key)
);
CREATE INDEX IF NOT EXISTS {attempts_index} ON {attempts} (updated_at);
