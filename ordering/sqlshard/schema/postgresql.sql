CREATE TABLE IF NOT EXISTS sqlshard_shards (
    topic       text COLLATE "C" NOT NULL,
    shard       integer NOT NULL,
    last_offset bigint NOT NULL,
    PRIMARY KEY (topic, shard)
);

CREATE TABLE IF NOT EXISTS sqlshard_messages (
    topic          text COLLATE "C" NOT NULL,
    shard          integer NOT NULL,
    message_offset bigint NOT NULL,
    uuid           text NOT NULL,
    metadata       text NOT NULL,
    payload        bytea NOT NULL,
    PRIMARY KEY (topic, shard, message_offset)
);

CREATE TABLE IF NOT EXISTS sqlshard_groups (
    consumer_group text COLLATE "C" NOT NULL,
    topic          text COLLATE "C" NOT NULL,
    shard          integer NOT NULL,
    acked_offset   bigint NOT NULL,
    PRIMARY KEY (consumer_group, topic, shard)
);
