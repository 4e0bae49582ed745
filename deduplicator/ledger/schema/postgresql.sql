CREATE TABLE IF NOT EXISTS {effects} (
    idempotency_key text COLLATE "C" NOT NULL,
    consumer_name   text COLLATE "C" NOT NULL,
    message_key     text COLLATE "C" NOT NULL,
    effect          text COLLATE "C" NOT NULL,
    epoch           integer NOT NULL,
    state           text COLLATE "C" NOT NULL,
    token           text COLLATE "C" NOT NULL,
    lease_until     timestamptz NOT NULL,
    attempts        integer NOT NULL,
    arguments       bytea,
    result          bytea,
    error           text,
    first_tried_at  timestamptz NOT NULL,
    PRIMARY KEY (idempotency_key)
);
CREATE INDEX IF NOT EXISTS {effects_index} ON {effects} (first_tried_at);
