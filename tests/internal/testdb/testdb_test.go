package testdb_test

import (
	"strings"
	"testing"

	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/services"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/testdb"
)

// make test-matrix must not run MariaDB again, nor make test something else.
func TestMySQLServer(t *testing.T) {
	t.Parallel()
	var version string
	if err := testdb.Open(t, testdb.MySQL).QueryRowContext(t.Context(), "SELECT VERSION()").Scan(&version); err != nil {
		t.Fatal(err)
	}
	isMariaDB := strings.Contains(version, "MariaDB")
	if want := testdb.MySQLServer(t); isMariaDB != (want == services.MariaDB) {
		t.Errorf("the MySQL drivers reach %s, want %s", version, want)
	}
	t.Log(version)
}

func TestNumbers(t *testing.T) {
	t.Parallel()
	for _, d := range testdb.Servers {
		for _, n := range []int{1, 2, 10, 11, 1000, 12_345} {
			var rows, distinct, lowest, highest int
			err := testdb.Open(t, d).QueryRowContext(t.Context(), "SELECT COUNT(*), COUNT(DISTINCT i), MIN(i), MAX(i) FROM "+testdb.Numbers(n)).
				Scan(&rows, &distinct, &lowest, &highest)
			if err != nil || rows != n || distinct != n || lowest != 1 || highest != n {
				t.Errorf("%s: %d rows, %d different, from %d to %d, want 1 to %d; error %v", d.Name, rows, distinct, lowest, highest, n, err)
			}
		}
	}
}
