package outbox_test

import (
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/testdb"
)

// The program in examples/outbox does what it says.
func TestExampleProgram(t *testing.T) {
	t.Parallel()
	program := filepath.Join(t.TempDir(), "outbox")
	build := exec.CommandContext(t.Context(), "go", "build", "-o", program, "../../examples/outbox")
	out, err := build.CombinedOutput()
	require.NoError(t, err, "%s", out)
	for _, driver := range []testdb.Driver{testdb.PGX, testdb.MySQL} {
		t.Run(driver.Name, func(t *testing.T) {
			t.Parallel()
			database := testdb.Create(t, driver)
			db := "postgres"
			if driver.Dialect == deduplicator.MySQL {
				db = "mysql"
			}
			out, err := exec.CommandContext(t.Context(), program, "-db", db, "-dsn", database.DSN).CombinedOutput()
			require.NoError(t, err, "%s", out)
			require.Contains(t, string(out), "nothing was lost or doubled")
			t.Logf("%s", out)
		})
	}
}
