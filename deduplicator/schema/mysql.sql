CREATE TABLE IF NOT EXISTS {processed} (
    consumer_name varbinary(255) NOT NULL,
    message_key   varbinary(255) NOT NULL,
    processed_at  datetime(6) NOT NULL,
    fingerprint   varbinary(255),
    PRIMARY KEY (consumer_name, message_key),
    INDEX {processed_index} (processed_at)
) ENGINE = InnoDB;

CREATE TABLE IF NOT EXISTS {produced} (
    consumer_name varbinary(255) NOT NULL,
    message_key   varbinary(255) NOT NULL,
    ordinal       int NOT NULL,
    topic         blob NOT NULL,
    uuid          blob NOT NULL,
    metadata      longblob NOT NULL,
    payload       longblob NOT NULL,
    created_at    datetime(6) NOT NULL,
    PRIMARY KEY (consumer_name, message_key, ordinal),
    INDEX {produced_index} (consumer_name, ordinal, created_at)
) ENGINE = InnoDB;

CREATE TABLE IF NOT EXISTS {leases} (
    consumer_name varbinary(255) NOT NULL,
    token         varbinary(255) NOT NULL,
    expires_at    datetime(6) NOT NULL,
    PRIMARY KEY (consumer_name)
) ENGINE = InnoDB;

CREATE TABLE IF NOT EXISTS {attempts} (
    consumer_name varbinary(255) NOT NULL,
    message_key   varbinary(255) NOT NULL,
    attempts      int NOT NULL,
    updated_at    datetime(6) NOT NULL,
    PRIMARY KEY (consumer_name, message_key),
    INDEX {attempts_index} (updated_at)
) ENGINE = InnoDB;
