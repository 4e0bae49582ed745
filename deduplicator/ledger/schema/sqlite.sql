CREATE TABLE IF NOT EXISTS {effects} (
    idempotency_key TEXT NOT NULL,
    consumer_name   TEXT NOT NULL,
    message_key     TEXT NOT NULL,
    effect          TEXT NOT NULL,
    epoch           INTEGER NOT NULL,
    state           TEXT NOT NULL,
    token           TEXT NOT NULL,
    lease_until     TEXT NOT NULL,
    attempts        INTEGER NOT NULL,
    arguments       BLOB,
    result          BLOB,
    error           TEXT,
    first_tried_at  TEXT NOT NULL,
    PRIMARY KEY (idempotency_key)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS {effects_index} ON {effects_base} (first_tried_at);
