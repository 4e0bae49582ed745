CREATE TABLE IF NOT EXISTS {effects} (
    consumer_name   text COLLATE "C" NOT NULL,
    message_key     text COLLATE "C" NOT NULL,
    effect          text COLLATE "C" NOT NULL,
    epoch           integer NOT NULL,
    idempotency_key text COLLATE "C" NOT NULL,
    state           text COLLATE "C" NOT NULL,
    token           text COLLATE "C" NOT NULL,
    lease_until     timestamptz NOT NULL,
    attempts        integer NOT NULL,
    arguments       bytea,
    result          bytea,
    error           text,
    first_tried_at  timestamptz NOT NULL,
    updated_at      timestamptz NOT NULL,
    PRIMARY KEY (consumer_name, message_key, effect, epoch)
);
CREATE INDEX IF NOT EXISTS {effects_index} ON {effects} (state, updated_at);
