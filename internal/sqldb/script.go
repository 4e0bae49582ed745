package sqldb

import (
	"crypto/sha256"
	"encoding/hex"
	"io/fs"
	"strings"
)

// Script returns the dialect's file schema/DIALECT.sql of files for tables with
// other names. For each name in tables, {name} becomes the table, quoted, and
// {name_base} the same without its schema. For each name in indexes, whose value is
// a suffix, {name_index} becomes the name of that table's index.
func Script(files fs.FS, d Dialect, tables, indexes map[string]string) string {
	text, err := fs.ReadFile(files, "schema/"+string(d)+".sql")
	if err != nil {
		panic(err) // each dialect that is valid has its file
	}
	var pairs []string
	for name, table := range tables {
		pairs = append(pairs, "{"+name+"}", d.Quote(table), "{"+name+"_base}", d.Quote(Base(table)))
		if suffix, ok := indexes[name]; ok {
			pairs = append(pairs, "{"+name+"_index}", d.index(table, suffix))
		}
	}
	return strings.NewReplacer(pairs...).Replace(string(text))
}

// index returns the quoted name of a table's index. SQLite wants the schema
// there, the others with the table.
func (d Dialect) index(table, suffix string) string {
	base := Base(table)
	schema := strings.TrimSuffix(table, base)
	if d != SQLite {
		schema = ""
	}
	return d.Quote(schema + IndexName(base, suffix))
}

// IndexName keeps within the 63 bytes that PostgreSQL has for a name. Two tables
// must not get one name: the second index would be taken for the first.
func IndexName(base, suffix string) string {
	if len(base)+len(suffix) > 63 {
		sum := sha256.Sum256([]byte(base))
		suffix = "_" + hex.EncodeToString(sum[:4]) + suffix
		base = base[:63-len(suffix)]
	}
	return base + suffix
}
