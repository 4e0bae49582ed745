package main

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/IBM/sarama"
	"github.com/ThreeDotsLabs/watermill"
	"github.com/go-sql-driver/mysql"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"
	amqp "github.com/rabbitmq/amqp091-go"
	"github.com/twmb/franz-go/pkg/kfake"
	"modernc.org/sqlite"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/ordering"
	"github.com/seed-2f56a981/watermill-idempotent/ordering/amqpshard"
	"github.com/seed-2f56a981/watermill-idempotent/ordering/kafkashard"
)

// shards is how many messages a handler works on at a time, over all workers.
const shards = 8

// byOrder sends all events of an order through one shard.
var byOrder = ordering.KeyFromMetadata(metaOrderID)

// servers are what a run works on.
type servers struct {
	run      string
	broker   brokerServer
	database *database
	logger   watermill.LoggerAdapter
}

// brokerServer is a message broker. All that the rest of the program knows of it
// is that open returns an ordering.Broker.
type brokerServer interface {
	open(ctx context.Context, group string) (ordering.Broker, error)
	remove(ctx context.Context, topics, groups []string) error
	address() string
	close()
}

// kafka is a cluster, or one in this process.
type kafka struct {
	brokers  []string
	logger   watermill.LoggerAdapter
	embedded *kfake.Cluster
}

func startEmbeddedKafka(logger watermill.LoggerAdapter) (*kafka, error) {
	cluster, err := kfake.NewCluster(kfake.NumBrokers(1))
	if err != nil {
		return nil, err
	}
	return &kafka{brokers: cluster.ListenAddrs(), logger: logger, embedded: cluster}, nil
}

func (k *kafka) open(ctx context.Context, group string) (ordering.Broker, error) {
	return kafkashard.Open(ctx, kafkashard.Config{
		Brokers:      k.brokers,
		Group:        group,
		Shards:       shards,
		Key:          byOrder,
		DialTimeout:  dialTimeout,
		DrainTimeout: drainTimeout,
		Sarama: func(c *sarama.Config) {
			// A group's members learn with a heartbeat that one of them is new or
			// gone. Every 3s, the default, is long for a demonstration.
			c.Consumer.Group.Heartbeat.Interval = 200 * time.Millisecond
		},
	}, k.logger)
}

func (k *kafka) remove(_ context.Context, topics, groups []string) error {
	if k.embedded != nil {
		return nil
	}
	config := sarama.NewConfig()
	config.Version = sarama.V2_8_0_0
	admin, err := sarama.NewClusterAdmin(k.brokers, config)
	if err != nil {
		return err
	}
	defer func() { _ = admin.Close() }()
	var errs []error
	for _, group := range groups {
		if err := admin.DeleteConsumerGroup(group); err != nil && !errors.Is(err, sarama.ErrGroupIDNotFound) {
			errs = append(errs, fmt.Errorf("delete group %s: %w", group, err))
		}
	}
	for _, topic := range topics {
		if err := admin.DeleteTopic(topic); err != nil && !errors.Is(err, sarama.ErrUnknownTopicOrPartition) {
			errs = append(errs, fmt.Errorf("delete topic %s: %w", topic, err))
		}
	}
	return errors.Join(errs...)
}

func (k *kafka) address() string { return strings.Join(k.brokers, ",") }

func (k *kafka) close() {
	if k.embedded != nil {
		k.embedded.Close()
	}
}

type rabbitMQ struct {
	url    string
	logger watermill.LoggerAdapter
}

func (r rabbitMQ) open(ctx context.Context, group string) (ordering.Broker, error) {
	return amqpshard.Open(ctx, amqpshard.Config{
		URL:          r.url,
		Group:        group,
		Shards:       shards,
		Key:          byOrder,
		DialTimeout:  dialTimeout,
		DrainTimeout: drainTimeout,
	}, r.logger)
}

// remove deletes the queues and exchanges that amqpshard has declared, see its
// package documentation. What does not exist is no error on RabbitMQ.
func (r rabbitMQ) remove(_ context.Context, topics, groups []string) error {
	conn, err := amqp.Dial(r.url)
	if err != nil {
		return errors.New("can't connect to remove queues")
	}
	defer func() { _ = conn.Close() }()
	ch, err := conn.Channel()
	if err != nil {
		return err
	}
	for _, topic := range topics {
		for _, group := range groups {
			exchange := topic + "." + group
			queues := []string{exchange + ".dead"}
			for shard := range shards {
				queues = append(queues, fmt.Sprintf("%s.%03d", exchange, shard))
			}
			for _, queue := range queues {
				if _, err := ch.QueueDelete(queue, false, false, false); err != nil {
					return fmt.Errorf("delete queue %s: %w", queue, err)
				}
			}
			if err := ch.ExchangeDelete(exchange, false, false); err != nil {
				return fmt.Errorf("delete exchange %s: %w", exchange, err)
			}
		}
		if err := ch.ExchangeDelete(topic, false, false); err != nil {
			return fmt.Errorf("delete exchange %s: %w", topic, err)
		}
	}
	return nil
}

func (r rabbitMQ) address() string {
	uri, err := amqp.ParseURI(r.url)
	if err != nil {
		return "an address that is not an amqp:// URL"
	}
	return net.JoinHostPort(uri.Host, fmt.Sprint(uri.Port))
}

func (rabbitMQ) close() {}

// database is a database server, or a directory with SQLite files. A schema is
// what one half has for itself.
type database struct {
	dialect     deduplicator.Dialect
	connections int // for each worker
	address     string
	server      driver.Connector // nil for SQLite
	connector   func(schema string) (driver.Connector, error)
	createSQL   string // with %s for the schema's name
	dropSQL     string
}

func (d *database) db(schema string) (*sql.DB, error) {
	connector, err := d.connector(schema)
	if err != nil {
		return nil, err
	}
	return sql.OpenDB(connector), nil
}

func (d *database) create(ctx context.Context, schema string) error {
	return d.admin(ctx, d.createSQL, schema)
}

func (d *database) drop(ctx context.Context, schema string) error {
	return d.admin(ctx, d.dropSQL, schema)
}

func (d *database) admin(ctx context.Context, statement, schema string) error {
	if d.server == nil {
		return nil
	}
	db := sql.OpenDB(d.server)
	defer func() { _ = db.Close() }()
	_, err := db.ExecContext(ctx, fmt.Sprintf(statement, schema))
	return err
}

func (d *database) ping(ctx context.Context) error {
	if d.server == nil {
		return nil
	}
	db := sql.OpenDB(d.server)
	defer func() { _ = db.Close() }()
	return db.PingContext(ctx)
}

func openSQLite(dir string) *database {
	return &database{
		dialect:     deduplicator.SQLite,
		connections: 2, // there is one writer at a time anyway
		address:     dir,
		connector: func(schema string) (driver.Connector, error) {
			return sqliteConnector("file:" + filepath.Join(dir, schema+".db") +
				"?_txlock=immediate&_pragma=busy_timeout(5000)&_pragma=journal_mode(WAL)&_pragma=synchronous(NORMAL)"), nil
		},
	}
}

// sqliteConnector is a data source name.
type sqliteConnector string

func (c sqliteConnector) Connect(context.Context) (driver.Conn, error) {
	return c.Driver().Open(string(c))
}

func (c sqliteConnector) Driver() driver.Driver { return &sqlite.Driver{} }

func openPostgres(dsn string) (*database, error) {
	config, err := pgx.ParseConfig(dsn)
	if err != nil {
		return nil, errors.New("not a PostgreSQL DSN")
	}
	return &database{
		dialect:     deduplicator.PostgreSQL,
		connections: shards * 3,
		address:     net.JoinHostPort(config.Host, fmt.Sprint(config.Port)),
		server:      stdlib.GetConnector(*config),
		connector: func(schema string) (driver.Connector, error) {
			own := config.Copy()
			own.RuntimeParams["search_path"] = schema
			return stdlib.GetConnector(*own), nil
		},
		createSQL: "CREATE SCHEMA %s",
		dropSQL:   "DROP SCHEMA IF EXISTS %s CASCADE",
	}, nil
}

func openMySQL(dsn string) (*database, error) {
	config, err := mysql.ParseDSN(dsn)
	if err != nil {
		return nil, errors.New("not a MySQL DSN")
	}
	config.Logger = &mysql.NopLogger{} // the driver logs connections that are cut
	config.DBName = ""
	server, err := mysql.NewConnector(config)
	if err != nil {
		return nil, errors.New("not a MySQL DSN")
	}
	return &database{
		dialect:     deduplicator.MySQL,
		connections: shards * 3,
		address:     config.Addr,
		server:      server,
		connector: func(schema string) (driver.Connector, error) {
			own := config.Clone()
			own.DBName = schema
			return mysql.NewConnector(own)
		},
		createSQL: "CREATE DATABASE %s",
		dropSQL:   "DROP DATABASE IF EXISTS %s",
	}, nil
}

const dialTimeout = 5 * time.Second

// openServers connects to what o names. Its error is one line, with addresses
// but without credentials.
func openServers(ctx context.Context, o options, logger watermill.LoggerAdapter, run, dir string) (*servers, error) {
	s := &servers{run: run, logger: logger}
	ctx, cancel := context.WithTimeout(ctx, 2*dialTimeout)
	defer cancel()

	var err error
	var name, setting string
	switch o.database {
	case "sqlite":
		s.database = openSQLite(dir)
	case "postgres":
		name, setting = "PostgreSQL", "-postgres or POSTGRES_DSN"
		s.database, err = openPostgres(o.postgres)
	case "mysql":
		name, setting = "MySQL or MariaDB", "-mysql or MYSQL_DSN"
		s.database, err = openMySQL(o.mysql)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", setting, err)
	}
	if err := s.database.ping(ctx); err != nil {
		return nil, unreachable(name, s.database.address, setting, err)
	}

	switch o.backend {
	case "embedded":
		s.broker, err = startEmbeddedKafka(logger)
	case "kafka":
		name, setting = "Kafka", "-kafka or KAFKA_BROKERS"
		s.broker = &kafka{brokers: strings.Split(o.kafka, ","), logger: logger}
	case "amqp":
		name, setting = "RabbitMQ", "-amqp or AMQP_URL"
		s.broker = rabbitMQ{o.amqp, logger}
	}
	if err != nil {
		return nil, fmt.Errorf("start the Kafka in this process: %w", err)
	}
	probe, err := s.broker.open(ctx, "orders-demo")
	if err != nil {
		return nil, unreachable(name, s.broker.address(), setting, err)
	}
	return s, probe.Close()
}

// unreachable leaves out the text of err, in which drivers put user names.
func unreachable(name, address, setting string, err error) error {
	reason := "it refuses the connection: check user and password"
	var op *net.OpError
	switch {
	case errors.As(err, &op):
		reason = op.Err.Error()
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, os.ErrDeadlineExceeded):
		reason = "no answer"
	case errors.Is(err, sarama.ErrOutOfBrokers):
		reason = "no broker answers"
	case errors.Is(err, kafkashard.ErrInvalidConfig), errors.Is(err, amqpshard.ErrInvalidConfig):
		reason = "not an address"
	}
	return fmt.Errorf("no %s at %s (%s): start the servers with `make services`, or name another one with %s",
		name, address, reason, setting)
}
