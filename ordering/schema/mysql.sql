CREATE TABLE IF NOT EXISTS {versions} (
    consumer_name varbinary(255) NOT NULL,
    entity        varbinary(255) NOT NULL,
    version       bigint NOT NULL,
    fingerprint   varbinary(255),
    updated_at    datetime(6) NOT NULL,
    PRIMARY KEY (consumer_name, entity)
) ENGINE = InnoDB;

CREATE TABLE IF NOT EXISTS {producers} (
    name       varbinary(255) NOT NULL,
    epoch      bigint NOT NULL,
    updated_at datetime(6) NOT NULL,
    PRIMARY KEY (name)
) ENGINE = InnoDB;

CREATE TABLE IF NOT EXISTS {streams} (
    consumer_name varbinary(255) NOT NULL,
    producer      varbinary(255) NOT NULL,
    stream        varbinary(255) NOT NULL,
    epoch         bigint NOT NULL,
    highest       bigint NOT NULL,
    seen          binary(128) NOT NULL,
    updated_at    datetime(6) NOT NULL,
    PRIMARY KEY (consumer_name, producer, stream)
) ENGINE = InnoDB;

CREATE TABLE IF NOT EXISTS {partitioning} (
    topic       varbinary(255) NOT NULL,
    partitioner varbinary(255) NOT NULL,
    shards      bigint NOT NULL,
    recorded_at datetime(6) NOT NULL,
    PRIMARY KEY (topic)
) ENGINE = InnoDB;
