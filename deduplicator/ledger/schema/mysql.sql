CREATE TABLE IF NOT EXISTS {effects} (
    idempotency_key varbinary(36) NOT NULL,
    consumer_name   varbinary(255) NOT NULL,
    message_key     varbinary(255) NOT NULL,
    effect          varbinary(255) NOT NULL,
    epoch           int NOT NULL,
    state           varbinary(16) NOT NULL,
    token           varbinary(64) NOT NULL,
    lease_until     datetime(6) NOT NULL,
    attempts        int NOT NULL,
    arguments       varbinary(32),
    result          longblob,
    error           blob,
    first_tried_at  datetime(6) NOT NULL,
    PRIMARY KEY (idempotency_key),
    INDEX {effects_index} (first_tried_at)
) ENGINE = InnoDB;
