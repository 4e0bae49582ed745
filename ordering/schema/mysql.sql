CREATE TABLE IF NOT EXISTS {versions} (
    consumer_name varbinary(255) NOT NULL,
    entity        varbinary(255) NOT NULL,
    version       bigint NOT NULL,
    fingerprint   varbinary(255),
    updated_at    datetime(6) NOT NULL,
    PRIMARY KEY (consumer_name, entity)
) ENGINE = InnoDB;
