CREATE TABLE IF NOT EXISTS {versions} (
    consumer_name varbinary(255) NOT NULL,
    entity        varbinary(255) NOT NULL,
    version       bigint NOT NULL,
    fingerprint   varbinary(255),
    updated_at    datetime(6) NOT NULL,
    PRIMARY KEY (consumer_name, entity)
) ENGINE = InnoDB;

CREATE TABLE IF NOT EXISTS {sequences} (
    consumer_name  varbinary(255) NOT NULL,
    entity         varbinary(255) NOT NULL,
    epoch          bigint NOT NULL,
    last_seq       bigint NOT NULL,
    fingerprint    varbinary(255),
    state          varbinary(16) NOT NULL,
    blocked_reason blob,
    parked         bigint NOT NULL,
    updated_at     datetime(6) NOT NULL,
    PRIMARY KEY (consumer_name, entity)
) ENGINE = InnoDB;

CREATE TABLE IF NOT EXISTS {parked} (
    consumer_name varbinary(255) NOT NULL,
    entity        varbinary(255) NOT NULL,
    epoch         bigint NOT NULL,
    seq           bigint NOT NULL,
    uuid          blob NOT NULL,
    metadata      longblob NOT NULL,
    payload       longblob NOT NULL,
    fingerprint   varbinary(255),
    reason        varbinary(16) NOT NULL,
    error         blob,
    attempts      bigint NOT NULL,
    parked_at     datetime(6) NOT NULL,
    PRIMARY KEY (consumer_name, entity, epoch, seq)
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
