# Everything here works from a fresh clone with Go 1.26 or newer. The servers that
# tests need are started where they are not running: see tests/services.

STATICCHECK = go run honnef.co/go/tools/cmd/staticcheck@v0.8.2
GOVULNCHECK = go run golang.org/x/vuln/cmd/govulncheck@v1.9.0
SERVICES    = go run ./tests/services

PACKAGES = ./... ./examples/... ./examples/querylayers/... ./tests/...
MODULES  = . examples examples/querylayers tests

.PHONY: test test-long test-matrix test-fast bench load services services-stop lint lint-static vuln orders

## test: all tests, with the race detector, on the real servers
test:
	$(SERVICES) run postgres mariadb amqp amqp4 kafka redis -- go test -race -count=1 -timeout 15m $(PACKAGES)

## test-long: RabbitMQ killed under load, and more of what is random: kills (CRASH_CUTS per database, CRASH_SEED),
## consumers and brokers broken (HISTORY_EVENTS, HISTORY_ENTITIES, HISTORY_ROUNDS per run, HISTORY_SEED),
## runs against the model (PROPERTY_CHECKS times as many), keys (FUZZ_TIME)
test-long: export CRASH_CUTS ?= 200
test-long: export PROPERTY_CHECKS ?= 20
test-long: export HISTORY_EVENTS ?= 100000
test-long: export HISTORY_ENTITIES ?= 1000
test-long: export HISTORY_ROUNDS ?= 10
test-long: FUZZ_TIME ?= 2m
test-long:
	$(SERVICES) run -- go test -race -count=1 -timeout 90m -v ./tests/crash ./tests/property
	$(SERVICES) run postgres mariadb -- go test -count=1 -timeout 180m -v -run TestChaos ./tests/history
	BROKER_KILL=1 $(SERVICES) run amqp amqp4 -- go test -race -count=1 -timeout 30m -v -run TestBrokerFaults ./tests/amqp
	$(SERVICES) run postgres mariadb -- go test -run '^$$' -fuzz FuzzKeys -fuzztime $(FUZZ_TIME) -fuzzminimizetime 10x ./tests/property

## test-matrix: the database suites on MySQL instead of MariaDB (a chroot of Debian sid: root, 900 MB)
test-matrix: export TEST_MATRIX = mysql
test-matrix:
	$(SERVICES) run postgres mysql amqp kafka -- go test -race -count=1 -p 2 -timeout 30m ./tests/internal/testdb ./tests/store ./tests/maintenance \
		./tests/ledger ./tests/write ./tests/property ./tests/sequence ./tests/producer ./tests/outbox ./tests/handlertest ./tests/crash

## test-fast: the tests that need no server
test-fast:
	go test -count=1 ./deduplicator/... ./internal/... ./middleware/... ./ordering/... ./examples/... ./examples/querylayers/...

## bench: what the middlewares and brokers cost, as ratios against the same work by hand, the release of parked
## messages, the choice of a shard, and known keys (with BENCH_LATENCY=1, at 1 ms per round trip to PostgreSQL and MariaDB)
bench:
	$(SERVICES) run postgres mariadb redis -- go test -run '^$$' -bench 'Single|Outputs|Duplicates|TableSize|Do' -benchtime 100x ./tests/bench ./tests/ledger
	$(SERVICES) run postgres mariadb amqp4 kafka -- go test -run '^$$' -bench 'Publish|EndToEnd' -benchtime 15x ./tests/bench
	$(SERVICES) run postgres mariadb -- go test -run '^$$' -bench Release -benchtime 3x ./tests/sequence
	go test -run '^$$' -bench 'Routing|KnownKeys' ./ordering ./deduplicator

## load: live traffic beside four cleaners in a table with EXPIRED rows, for ten minutes each; a table of ROWS rows against an empty one; 1 ms round trips
load: EXPIRED ?= 5000000
load: ROWS ?= 10000000
load:
	$(SERVICES) run postgres mariadb -- go test -run '^$$' -bench Cleaners -benchtime 1x -timeout 3h ./tests/load -expired $(EXPIRED) -pairs 60
	BENCH_ROWS=$(ROWS) $(SERVICES) run postgres mariadb -- go test -run '^$$' -bench TableSize -benchtime 100x -timeout 3h ./tests/bench
	BENCH_LATENCY=1 $(SERVICES) run postgres mariadb -- go test -run '^$$' -bench 'Single|Outputs|Duplicates' -benchtime 50x -timeout 1h ./tests/bench

## services, services-stop: start the real servers and leave them running; stop them
services:
	$(SERVICES) up
services-stop:
	$(SERVICES) down

## orders: the demonstration on the four pairs of real servers
orders:
	$(SERVICES) run -- sh -ec 'for b in kafka amqp; do for d in postgres mysql; do go run ./examples/orders -backend $$b -db $$d; done; done'

## lint: gofmt, vet, staticcheck, tidy go.mod files, known vulnerabilities
lint: lint-static vuln

lint-static:
	@test -z "$$(gofmt -l .)" || { echo "gofmt is needed for:"; gofmt -l .; exit 1; }
	go vet $(PACKAGES)
	$(STATICCHECK) $(PACKAGES)
	for m in $(MODULES); do (cd $$m && GOWORK=off go mod tidy -diff) || exit 1; done

vuln:
	for m in $(MODULES); do (cd $$m && $(GOVULNCHECK) ./...) || exit 1; done
