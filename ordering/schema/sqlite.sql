CREATE TABLE IF NOT EXISTS {versions} (
    consumer_name TEXT NOT NULL,
    entity        TEXT NOT NULL,
    version       INTEGER NOT NULL,
    fingerprint   BLOB,
    updated_at    TEXT NOT NULL,
    PRIMARY KEY (consumer_name, entity)
) WITHOUT ROWID;
