CREATE TABLE IF NOT EXISTS sqlshard_shards (
    topic       varbinary(255) NOT NULL,
    shard       int NOT NULL,
    last_offset bigint NOT NULL,
    PRIMARY KEY (topic, shard)
) ENGINE = InnoDB;

CREATE TABLE IF NOT EXISTS sqlshard_messages (
    topic          varbinary(255) NOT NULL,
    shard          int NOT NULL,
    message_offset bigint NOT NULL,
    uuid           varbinary(255) NOT NULL,
    metadata       longblob NOT NULL,
    payload        longblob NOT NULL,
    PRIMARY KEY (topic, shard, message_offset)
) ENGINE = InnoDB;

CREATE TABLE IF NOT EXISTS sqlshard_groups (
    consumer_group varbinary(255) NOT NULL,
    topic          varbinary(255) NOT NULL,
    shard          int NOT NULL,
    acked_offset   bigint NOT NULL,
    PRIMARY KEY (consumer_group, topic, shard)
) ENGINE = InnoDB;
