package sqldb

import (
	"context"
	"database/sql"
	"errors"
)

// SQLiteFiles returns the files of a SQLite connection by the names of its databases.
// A database in memory has none.
func SQLiteFiles(ctx context.Context, db *sql.DB) (map[string]string, error) {
	rows, err := db.QueryContext(ctx, "PRAGMA database_list")
	if err != nil {
		return nil, err
	}
	defer rows.Close() //nolint:errcheck // rows.Err has the error of reading
	found := make(map[string]string)
	for rows.Next() {
		var seq int
		var name string
		var file sql.NullString
		if err := rows.Scan(&seq, &name, &file); err != nil {
			return nil, err
		}
		found[name] = file.String
	}
	return found, rows.Err()
}

// ErrSplit says that each connection of a pool has a database of its own.
var ErrSplit = errors.New("db is a SQLite database in memory, and each of its connections has another one: " +
	"call db.SetMaxOpenConns(1), or use a file")

// CheckMemory returns ErrSplit for a SQLite database in memory, unless db has one
// connection or its connections share a cache.
func CheckMemory(ctx context.Context, db *sql.DB) error {
	files, err := SQLiteFiles(ctx, db)
	if err != nil || files["main"] != "" || db.Stats().MaxOpenConnections == 1 {
		return err
	}
	var versions [2]int // the database that has tables, and an empty one
	for i := range versions {
		conn, err := db.Conn(ctx)
		if err != nil {
			return err
		}
		defer conn.Close() //nolint:errcheck // after both, so that they are not the same
		if err := conn.QueryRowContext(ctx, "PRAGMA main.schema_version").Scan(&versions[i]); err != nil {
			return err
		}
	}
	if versions[0] != versions[1] {
		return ErrSplit
	}
	return nil
}
