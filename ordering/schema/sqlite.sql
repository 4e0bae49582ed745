CREATE TABLE IF NOT EXISTS {versions} (
    consumer_name TEXT NOT NULL,
    entity        TEXT NOT NULL,
    version       INTEGER NOT NULL,
    fingerprint   BLOB,
    updated_at    TEXT NOT NULL,
    PRIMARY KEY (consumer_name, entity)
) WITHOUT ROWID;

CREATE TABLE IF NOT EXISTS {producers} (
    name       TEXT NOT NULL,
    epoch      INTEGER NOT NULL,
    updated_at TEXT NOT NULL,
    PRIMARY KEY (name)
) WITHOUT ROWID;

CREATE TABLE IF NOT EXISTS {streams} (
    consumer_name TEXT NOT NULL,
    producer      TEXT NOT NULL,
    stream        TEXT NOT NULL,
    epoch         INTEGER NOT NULL,
    highest       INTEGER NOT NULL,
    seen          BLOB NOT NULL,
    updated_at    TEXT NOT NULL,
    PRIMARY KEY (consumer_name, producer, stream)
) WITHOUT ROWID;

CREATE TABLE IF NOT EXISTS {partitioning} (
    topic       TEXT NOT NULL,
    partitioner TEXT NOT NULL,
    shards      INTEGER NOT NULL,
    recorded_at TEXT NOT NULL,
    PRIMARY KEY (topic)
) WITHOUT ROWID;
