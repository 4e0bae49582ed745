package services

import (
	"bufio"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net"
	"strings"
	"time"

	"github.com/IBM/sarama"
	"github.com/go-sql-driver/mysql"
	_ "github.com/jackc/pgx/v5/stdlib" // driver "pgx"
	amqp "github.com/rabbitmq/amqp091-go"
)

// probeLimit bounds one attempt: a paused server accepts connections and then
// says nothing.
const probeLimit = 3 * time.Second

func probePostgres(ctx context.Context, dsn string) error {
	db, err := sql.Open("pgx", dsn)
	if err != nil {
		return errors.New("malformed DSN") // the driver's text may quote it
	}
	defer func() { _ = db.Close() }()
	return db.QueryRowContext(ctx, "SELECT 1").Scan(new(int))
}

func probeMySQL(ctx context.Context, dsn string) error {
	_, err := mysqlVersion(ctx, dsn)
	return err
}

func suitsMariaDB(ctx context.Context, dsn string) error {
	version, err := mysqlVersion(ctx, dsn)
	if err == nil && !strings.Contains(version, "MariaDB") {
		err = fmt.Errorf("version %s is not MariaDB", version)
	}
	return err
}

func mysqlVersion(ctx context.Context, dsn string) (version string, err error) {
	cfg, err := mysql.ParseDSN(dsn)
	if err != nil {
		return "", errors.New("malformed DSN")
	}
	cfg.Logger = &mysql.NopLogger{} // a server that is still starting is no news
	connector, err := mysql.NewConnector(cfg)
	if err != nil {
		return "", err
	}
	db := sql.OpenDB(connector)
	defer func() { _ = db.Close() }()
	err = db.QueryRowContext(ctx, "SELECT VERSION()").Scan(&version)
	return version, err
}

func probeAMQP(ctx context.Context, url string) error {
	return withChannel(ctx, url, func(*amqp.Channel) error { return nil })
}

func suitsAMQP4(ctx context.Context, url string) error {
	conn, err := amqp.DialConfig(url, amqp.Config{Dial: dialer{ctx}.Dial})
	if err != nil {
		return err
	}
	version, _ := conn.Properties["version"].(string)
	_ = conn.Close()
	if !strings.HasPrefix(version, "4.") {
		return fmt.Errorf("it is RabbitMQ %s, not 4", version)
	}
	return suitsAMQP(ctx, url)
}

func suitsAMQP(ctx context.Context, url string) error {
	return withChannel(ctx, url, func(ch *amqp.Channel) error {
		name := "services-probe-" + randomName()
		if err := ch.ExchangeDeclare(name, "x-consistent-hash", false, true, false, false, nil); err != nil {
			return fmt.Errorf("rabbitmq_consistent_hash_exchange is not enabled: %w", err)
		}
		return ch.ExchangeDelete(name, false, false)
	})
}

func withChannel(ctx context.Context, url string, use func(*amqp.Channel) error) error {
	conn, err := amqp.DialConfig(url, amqp.Config{Dial: dialer{ctx}.Dial})
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	ch, err := conn.Channel()
	if err != nil {
		return err
	}
	return use(ch)
}

func probeKafka(ctx context.Context, brokers string) error {
	cfg := sarama.NewConfig()
	cfg.Version = sarama.V2_1_0_0
	cfg.Metadata.Retry.Max = 0
	cfg.Metadata.Full = false
	cfg.Net.Proxy.Enable, cfg.Net.Proxy.Dialer = true, dialer{ctx}
	client, err := sarama.NewClient(strings.Split(brokers, ","), cfg)
	if err != nil {
		return err
	}
	defer func() { _ = client.Close() }()
	// A broker answers before it has registered with the controller.
	if err := client.RefreshMetadata(); err != nil {
		return err
	}
	if len(client.Brokers()) == 0 {
		return errors.New("no broker has registered yet")
	}
	_, err = client.Controller()
	return err
}

func probeRedis(ctx context.Context, addr string) error {
	conn, err := new(net.Dialer).DialContext(ctx, "tcp", addr)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	if deadline, ok := ctx.Deadline(); ok {
		_ = conn.SetDeadline(deadline)
	}
	if _, err := conn.Write([]byte("PING\r\n")); err != nil {
		return err
	}
	line, err := bufio.NewReader(conn).ReadString('\n')
	if err == nil && !strings.HasPrefix(line, "+PONG") {
		err = fmt.Errorf("answer %q", strings.TrimSpace(line))
	}
	return err
}

// dialer opens connections that end with the context, for clients that take
// none: closing the socket ends whatever they wait for.
type dialer struct{ ctx context.Context }

func (d dialer) Dial(network, addr string) (net.Conn, error) {
	conn, err := new(net.Dialer).DialContext(d.ctx, network, addr)
	if err == nil {
		context.AfterFunc(d.ctx, func() { _ = conn.Close() })
	}
	return conn, err
}

// ask runs one probe, for at most probeLimit.
func ask(ctx context.Context, probe func(context.Context, string) error, value string) error {
	ctx, cancel := context.WithTimeout(ctx, probeLimit)
	defer cancel()
	return probe(ctx, value)
}
