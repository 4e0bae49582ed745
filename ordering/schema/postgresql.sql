CREATE TABLE IF NOT EXISTS {versions} (
    consumer_name text COLLATE "C" NOT NULL,
    entity        text COLLATE "C" NOT NULL,
    version       bigint NOT NULL,
    fingerprint   bytea,
    updated_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (consumer_name, entity)
);

CREATE TABLE IF NOT EXISTS {sequences} (
    consumer_name  text COLLATE "C" NOT NULL,
    entity         text COLLATE "C" NOT NULL,
    epoch          bigint NOT NULL,
    last_seq       bigint NOT NULL,
    fingerprint    bytea,
    state          text NOT NULL,
    blocked_reason text,
    parked         bigint NOT NULL,
    updated_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (consumer_name, entity)
);

CREATE TABLE IF NOT EXISTS {parked} (
    consumer_name text COLLATE "C" NOT NULL,
    entity        text COLLATE "C" NOT NULL,
    epoch         bigint NOT NULL,
    seq           bigint NOT NULL,
    uuid          bytea NOT NULL,
    metadata      bytea NOT NULL,
    payload       bytea NOT NULL,
    fingerprint   bytea,
    reason        text NOT NULL,
    error         text,
    attempts      bigint NOT NULL,
    parked_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (consumer_name, entity, epoch, seq)
);
