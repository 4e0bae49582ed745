package services

import (
	"context"
	"crypto/rand"
	"encoding/base64"
	"fmt"
	"os"
	"os/user"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// definition is all that the engine knows about one kind of server.
type definition struct {
	name  Name
	limit time.Duration // from start to the first answer

	// Where it is.
	variable string // environment variable of the suites
	standard string // its value for the standard port and test login
	value    func(ports []int) string
	extras   []extra // further addresses of the same server
	ports    int

	// Whether it answers, and whether one that we did not start is of the right kind.
	probe func(ctx context.Context, value string) error
	suits func(ctx context.Context, value string) error

	// How to get it.
	programs []string // installed when all are found
	packages []string // Debian packages that bring them
	fetch    func(ctx context.Context, cache string) error

	// How to run it.
	user    string                   // system account instead of root
	process string                   // name of the process that stop signals go to
	stop    syscall.Signal           // orderly shutdown
	pidFile string                   // in the data folder, what a killed server leaves there
	root    string                   // folder in the cache to change root to
	init    func(*Instance) []string // command that fills an empty data folder
	files   func(*Instance) map[string]string
	env     func(*Instance) []string
	command func(*Instance) []string
}

type extra struct {
	variable, standard string
	value              func(ports []int) string
}

const (
	kafkaVersion  = "4.1.0"
	kafkaFolder   = "kafka-" + kafkaVersion
	rabbit4Folder = "rabbitmq-trixie"
	mysqlFolder   = "mysql-sid"
)

var definitions = table()

func table() []*definition {
	rabbit := definition{
		limit:    90 * time.Second,
		value:    address("amqp://guest:guest@127.0.0.1:%d/", 0),
		ports:    4, // AMQP, management, distribution, epmd
		probe:    probeAMQP,
		suits:    suitsAMQP,
		process:  "beam.smp",
		stop:     syscall.SIGTERM,
		files:    rabbitFiles,
		env:      rabbitEnv,
		command:  rabbitCommand,
		programs: []string{"rabbitmq-server"},
		packages: []string{"rabbitmq-server"},
	}
	amqp := rabbit
	amqp.name, amqp.variable, amqp.standard = AMQP, "TEST_AMQP_URL", "amqp://guest:guest@127.0.0.1:5672/"
	amqp.extras = []extra{{
		"TEST_AMQP_MANAGEMENT_URL", "http://guest:guest@127.0.0.1:15672",
		address("http://guest:guest@127.0.0.1:%d", 1),
	}}
	amqp4 := rabbit
	// No standard port is RabbitMQ 4's own: these are compose.yaml's.
	amqp4.name, amqp4.variable, amqp4.standard = AMQP4, "TEST_AMQP4_URL", "amqp://guest:guest@127.0.0.1:5673/"
	amqp4.extras = []extra{{
		"TEST_AMQP4_MANAGEMENT_URL", "http://guest:guest@127.0.0.1:15673",
		address("http://guest:guest@127.0.0.1:%d", 1),
	}}
	amqp4.suits = suitsAMQP4
	amqp4.programs, amqp4.packages = []string{"debootstrap"}, []string{"debootstrap"}
	amqp4.root, amqp4.fetch = rabbit4Folder, debootstrap("trixie", "rabbitmq-server", rabbit4Folder)

	return []*definition{
		{
			name: Postgres, limit: 60 * time.Second, variable: "TEST_POSTGRES_DSN",
			standard: "postgres://postgres@127.0.0.1:5432/postgres?sslmode=disable",
			value:    address("postgres://postgres@127.0.0.1:%d/postgres?sslmode=disable", 0),
			ports:    1,
			probe:    probePostgres,
			programs: []string{"postgres", "initdb"},
			packages: []string{"postgresql"},
			user:     "postgres", // PostgreSQL refuses to run as root
			process:  "postgres",
			pidFile:  "postmaster.pid",
			stop:     syscall.SIGINT, // fast shutdown: does not wait for clients
			init: func(in *Instance) []string {
				return []string{find("initdb"), "--no-sync", "-A", "trust", "-U", "postgres", "-E", "UTF8", "--locale=C", "-D", in.data()}
			},
			command: func(in *Instance) []string {
				return []string{
					find("postgres"), "-D", in.data(), "-p", in.port(0), "-c", "listen_addresses=127.0.0.1",
					// A socket in the state folder could exceed the 107 bytes that a path may have.
					"-c", "unix_socket_directories=", "-c", "max_connections=300",
				}
			},
		},
		{
			name: MariaDB, limit: 60 * time.Second, variable: "TEST_MARIADB_DSN",
			standard: "root@tcp(127.0.0.1:3306)/test?parseTime=true",
			value:    address("root@tcp(127.0.0.1:%d)/test?parseTime=true", 0),
			ports:    1,
			probe:    probeMySQL,
			suits:    suitsMariaDB,
			programs: []string{"mariadbd", "mysql_install_db"},
			packages: []string{"mariadb-server"},
			process:  "mariadbd",
			stop:     syscall.SIGTERM,
			init: func(in *Instance) []string {
				return []string{
					find("mysql_install_db"), "--no-defaults", "--user=" + account(), "--auth-root-authentication-method=normal",
					"--skip-test-db", "--datadir=" + in.data(),
				}
			},
			files:   mysqlFiles,
			command: func(in *Instance) []string { return mysqlCommand(in, find("mariadbd")) },
		},
		&amqp,
		{
			name: Kafka, limit: 90 * time.Second, variable: "TEST_KAFKA_BROKERS", standard: "127.0.0.1:9092",
			value:    address("127.0.0.1:%d", 0),
			ports:    2, // clients, controller
			probe:    probeKafka,
			programs: []string{"java", "mvn"},
			packages: []string{"default-jre-headless", "maven"},
			fetch:    fetchKafka,
			process:  "java",
			stop:     syscall.SIGTERM,
			init: func(in *Instance) []string {
				id := make([]byte, 16)
				_, _ = rand.Read(id) // never fails
				return kafkaJava(in, "kafka.tools.StorageTool", "format", "--standalone",
					"-t", base64.RawURLEncoding.EncodeToString(id), "-c", in.path("server.properties"))
			},
			files: kafkaFiles,
			command: func(in *Instance) []string {
				return kafkaJava(in, "kafka.Kafka", in.path("server.properties"))
			},
		},
		&amqp4,
		{
			name: MySQL, limit: 60 * time.Second, variable: "TEST_MYSQL_DSN",
			value:    address("root@tcp(127.0.0.1:%d)/test?parseTime=true", 0),
			ports:    1,
			probe:    probeMySQL,
			programs: []string{"debootstrap"},
			packages: []string{"debootstrap"},
			fetch:    debootstrap("sid", "mysql-server", mysqlFolder),
			root:     mysqlFolder,
			process:  "mysqld",
			stop:     syscall.SIGTERM,
			init: func(in *Instance) []string {
				return []string{"/usr/sbin/mysqld", "--no-defaults", "--initialize-insecure", "--user=" + account(), "--datadir=" + in.data()}
			},
			files:   mysqlFiles,
			command: func(in *Instance) []string { return mysqlCommand(in, "/usr/sbin/mysqld", "--mysqlx=OFF") },
		},
		{
			name: Redis, limit: 30 * time.Second, variable: "TEST_REDIS_ADDR", standard: "127.0.0.1:6379",
			value:    address("127.0.0.1:%d", 0),
			ports:    1,
			probe:    probeRedis,
			programs: []string{"redis-server"},
			packages: []string{"redis-server"},
			process:  "redis-server",
			stop:     syscall.SIGTERM,
			command: func(in *Instance) []string {
				return []string{
					find("redis-server"), "--port", in.port(0), "--bind", "127.0.0.1", "--dir", in.data(), "--appendonly", "yes",
					// The title would overwrite the environment by which we find the process.
					"--set-proc-title", "no",
				}
			},
		},
	}
}

func define(name Name) (*definition, error) {
	for _, def := range definitions {
		if def.name == name {
			return def, nil
		}
	}
	return nil, fmt.Errorf("services: unknown server %q: one of %v", name, All())
}

// address returns a function that puts one of an instance's ports into format.
func address(format string, port int) func([]int) string {
	return func(ports []int) string { return fmt.Sprintf(format, ports[port]) }
}

// serverFolders hold programs that Debian keeps out of PATH. They go first:
// the rabbitmq-server in PATH is a wrapper that insists on the packaged user.
var serverFolders = []string{"/usr/lib/postgresql/*/bin", "/usr/lib/rabbitmq/bin", "/usr/sbin", "/usr/local/sbin"}

// find returns the path of a program, or "" if there is none.
func find(program string) string {
	for _, folder := range serverFolders {
		if matches, _ := filepath.Glob(filepath.Join(folder, program)); len(matches) > 0 {
			return matches[len(matches)-1]
		}
	}
	for _, folder := range filepath.SplitList(os.Getenv("PATH")) {
		path := filepath.Join(folder, program)
		if info, err := os.Stat(path); err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0 {
			return path
		}
	}
	return ""
}

// account is the user that we are: MariaDB and MySQL run as root if told to.
func account() string {
	if current, err := user.Current(); err == nil {
		return current.Username
	}
	return "root"
}

func mysqlFiles(*Instance) map[string]string {
	return map[string]string{"init.sql": "CREATE DATABASE IF NOT EXISTS test;\n"}
}

func mysqlCommand(in *Instance, program string, more ...string) []string {
	return append([]string{
		program, "--no-defaults", "--user=" + account(), "--datadir=" + in.data(), "--port=" + in.port(0), "--bind-address=127.0.0.1",
		// Relative to the data folder: an absolute path could exceed 107 bytes.
		"--socket=s.sock",
		"--init-file=" + in.path("init.sql"), "--max-connections=300",
		// InnoDB passes the system's cache by, so that a large table needs it all here.
		"--innodb-buffer-pool-size=2G",
	}, more...)
}

func rabbitFiles(in *Instance) map[string]string {
	return map[string]string{
		"enabled_plugins": "[rabbitmq_consistent_hash_exchange,rabbitmq_management].\n",
		"rabbitmq.conf": strings.Join([]string{
			"listeners.tcp.1 = 127.0.0.1:" + in.port(0),
			"management.tcp.ip = 127.0.0.1",
			"management.tcp.port = " + in.port(1),
			"",
		}, "\n"),
	}
}

func rabbitEnv(in *Instance) []string {
	return []string{
		"RABBITMQ_NODENAME=" + filepath.Base(in.dir) + "@localhost",
		"RABBITMQ_CONF_ENV_FILE=/dev/null", // the system's own settings
		"RABBITMQ_CONFIG_FILE=" + in.path("rabbitmq.conf"),
		"RABBITMQ_ADVANCED_CONFIG_FILE=" + in.path("advanced.config"),
		"RABBITMQ_ENABLED_PLUGINS_FILE=" + in.path("enabled_plugins"),
		"RABBITMQ_MNESIA_BASE=" + in.data(),
		"RABBITMQ_LOG_BASE=" + in.data(),
		"RABBITMQ_PID_FILE=" + in.path("rabbitmq.pid"),
		"RABBITMQ_LOGS=-",
		"RABBITMQ_DIST_PORT=" + in.port(2),
		"ERL_EPMD_PORT=" + in.port(3),
		"ERL_EPMD_ADDRESS=127.0.0.1",
		// Schedulers that spin while idle take the CPU from the tests.
		"RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS=+sbwt none +sbwtdcpu none +sbwtdio none -kernel inet_dist_use_interface {127,0,0,1}",
	}
}

func rabbitCommand(in *Instance) []string {
	program := "/usr/lib/rabbitmq/bin/rabbitmq-server"
	if in.def.root == "" {
		program = find("rabbitmq-server")
	}
	return []string{program}
}

func kafkaJava(in *Instance, class string, args ...string) []string {
	return append([]string{
		find("java"), "-Xmx768m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1",
		"-Dorg.slf4j.simpleLogger.defaultLogLevel=warn", "-Dorg.slf4j.simpleLogger.showDateTime=true",
		"-cp", filepath.Join(in.cache, kafkaFolder, "*"), class,
	}, args...)
}

func kafkaFiles(in *Instance) map[string]string {
	client, controller := "127.0.0.1:"+in.port(0), "127.0.0.1:"+in.port(1)
	return map[string]string{"server.properties": strings.Join([]string{
		"process.roles=broker,controller",
		"node.id=1",
		"controller.quorum.bootstrap.servers=" + controller,
		"listeners=PLAINTEXT://" + client + ",CONTROLLER://" + controller,
		"advertised.listeners=PLAINTEXT://" + client,
		"controller.listener.names=CONTROLLER",
		"inter.broker.listener.name=PLAINTEXT",
		"offsets.topic.replication.factor=1",
		"transaction.state.log.replication.factor=1",
		"transaction.state.log.min.isr=1",
		"group.initial.rebalance.delay.ms=0",
		// Tests stop consumers for longer than their sessions last: 6s by default.
		"group.min.session.timeout.ms=1000",
		// A killed broker may come back when its session has ended: 9s by default.
		"broker.heartbeat.interval.ms=500",
		"broker.session.timeout.ms=3000",
		"log.dirs=" + in.data(),
		"",
	}, "\n")}
}
