CREATE TABLE IF NOT EXISTS {effects} (
    consumer_name   TEXT NOT NULL,
    message_key     TEXT NOT NULL,
    effect          TEXT NOT NULL,
    epoch           INTEGER NOT NULL,
    idempotency_key TEXT NOT NULL,
    state           TEXT NOT NULL,
    token           TEXT NOT NULL,
    lease_until     TEXT NOT NULL,
    attempts        INTEGER NOT NULL,
    arguments       BLOB,
    result          BLOB,
    error           TEXT,
    first_tried_at  TEXT NOT NULL,
    updated_at      TEXT NOT NULL,
    PRIMARY KEY (consumer_name, message_key, effect, epoch)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS {effects_index} ON {effects_base} (state, updated_at);
