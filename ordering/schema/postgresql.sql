CREATE TABLE IF NOT EXISTS {versions} (
    consumer_name text COLLATE "C" NOT NULL,
    entity        text COLLATE "C" NOT NULL,
    version       bigint NOT NULL,
    fingerprint   bytea,
    updated_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (consumer_name, entity)
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
