CREATE TABLE IF NOT EXISTS {versions} (
    consumer_name text COLLATE "C" NOT NULL,
    entity        text COLLATE "C" NOT NULL,
    version       bigint NOT NULL,
    fingerprint   bytea,
    updated_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (consumer_name, entity)
);
