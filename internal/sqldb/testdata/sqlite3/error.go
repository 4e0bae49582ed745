// Package sqlite3 has an error of the shape of github.com/mattn/go-sqlite3's, which
// needs cgo.
package sqlite3

// ErrNo is a primary result code.
type ErrNo int

// Error is what the driver returns, as a value.
type Error struct{ Code ErrNo }

func (Error) Error() string { return "verrouillé" }
