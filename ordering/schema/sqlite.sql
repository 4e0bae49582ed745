CREATE TABLE IF NOT EXISTS {versions} (
    consumer_name TEXT NOT NULL,
    entity        TEXT NOT NULL,
    version       INTEGER NOT NULL,
    fingerprint   BLOB,
    updated_at    TEXT NOT NULL,
    PRIMARY KEY (consumer_name, entity)
) WITHOUT ROWID;

CREATE TABLE IF NOT EXISTS {sequences} (
    consumer_name  TEXT NOT NULL,
    entity         TEXT NOT NULL,
    epoch          INTEGER NOT NULL,
    last_seq       INTEGER NOT NULL,
    fingerprint    BLOB,
    state          TEXT NOT NULL,
    blocked_reason TEXT,
    parked         INTEGER NOT NULL,
    updated_at     TEXT NOT NULL,
    PRIMARY KEY (consumer_name, entity)
) WITHOUT ROWID;

CREATE TABLE IF NOT EXISTS {parked} (
    consumer_name TEXT NOT NULL,
    entity        TEXT NOT NULL,
    epoch         INTEGER NOT NULL,
    seq           INTEGER NOT NULL,
    uuid          BLOB NOT NULL,
    metadata      BLOB NOT NULL,
    payload       BLOB NOT NULL,
    fingerprint   BLOB,
    reason        TEXT NOT NULL,
    error         TEXT,
    attempts      INTEGER NOT NULL,
    parked_at     TEXT NOT NULL,
    PRIMARY KEY (consumer_name, entity, epoch, seq)
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
