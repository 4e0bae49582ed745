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

CREATE TABLE IF NOT EXISTS {producers} (
    name       text COLLATE "C" NOT NULL,
    epoch      bigint NOT NULL,
    updated_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (name)
);

CREATE TABLE IF NOT EXISTS {streams} (
    consumer_name text COLLATE "C" NOT NULL,
    producer      text COLLATE "C" NOT NULL,
    stream        text COLLATE "C" NOT NULL,
    epoch         bigint NOT NULL,
    highest       bigint NOT NULL,
    seen          bytea NOT NULL,
    updated_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (consumer_name, producer, stream)
);

CREATE TABLE IF NOT EXISTS {partitioning} (
    topic       text COLLATE "C" NOT NULL,
    partitioner text COLLATE "C" NOT NULL,
    shards      bigint NOT NULL,
    recorded_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (topic)
);
