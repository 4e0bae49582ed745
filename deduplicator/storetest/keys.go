package storetest

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"strings"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
)

func testScopes(k *kit) {
	a, b := k.claim("a"), k.claim("a")
	b.Consumer += "-2"
	k.processed(a, k.write("of a"))
	k.processed(b, k.write("of b"))
	k.count("of a", 1)
	k.count("of b", 1)
	k.duplicate(a)
	k.duplicate(b)

	// Where consumer and key touch each other must not matter.
	c, d := k.claim("xy"), k.claim("y")
	d.Consumer += "x"
	k.processed(c, k.write("of c"))
	k.processed(d, k.write("of d"))
}

func testEmpty(k *kit) {
	for _, claim := range []deduplicator.Claim{{}, {Consumer: k.consumer}, {Key: "a"}} {
		_, err := k.process(claim, func(context.Context) ([]deduplicator.Output, error) {
			k.Error("the work was called")
			return nil, nil
		})
		if !errors.Is(err, deduplicator.ErrInvalidClaim) {
			k.Errorf("claim %+v: error %v, want %v", claim, err, deduplicator.ErrInvalidClaim)
		}
	}
}

// names are all different, but not to every collation, column width or encoding.
func names() []string {
	long, huge := strings.Repeat("k", 299), strings.Repeat("k", 4999)
	hash := func(s string) string { return fmt.Sprintf("sha256:%x", sha256.Sum256([]byte(s))) }
	return []string{
		"order-a", "Order-A", "ORDER-A",
		"cafe", "café", "cafe\u0301", "CAFÉ", // composed, decomposed
		"a", "a ", " a", "a  ", "a\t", "a\n", "a\u00a0", "a\u200b",
		"a\x00", "a\x00b", "a\x00c", "\x00",
		"\xff", "\xfe", "\ufffd", "a\xff", "a\xc3",
		"ß", "ss", "ſs", "ı", "i", "İ", "I",
		"1", "01", "1.0", "1e0", "null", "NULL", "%", "_", "\\", "'", `"`, "a'); --", "😀", "😁",
		long[:253], long[:254], long[:255], long[:256], strings.Repeat("é", 127), strings.Repeat("é", 128),
		long + "1", long + "2", huge + "1", huge + "2",
		hash(long + "1"), hash(huge + "1"), hash("\xff"), strings.ToUpper(hash("\xff")), hash(hash(long + "1")),
		"sha256:", fmt.Sprintf("%x", sha256.Sum256([]byte(long+"1"))),
	}
}

func testKeys(k *kit) {
	for i, name := range names() {
		k.processed(k.claim(name), k.write(fmt.Sprint(i)))
	}
	for i, name := range names() {
		k.duplicate(k.claim(name))
		k.count(fmt.Sprint(i), 1)
	}
}

func testConsumers(k *kit) {
	claim := func(name string) deduplicator.Claim {
		claim := k.claim(k.consumer) // the key keeps tests apart
		claim.Consumer = name
		return claim
	}
	for i, name := range names() {
		k.processed(claim(name), k.write(fmt.Sprint(i)))
	}
	for i, name := range names() {
		k.duplicate(claim(name))
		k.count(fmt.Sprint(i), 1)
	}
}

func testFingerprint(k *kit) {
	with := func(key string, fingerprint []byte) deduplicator.Claim {
		claim := k.claim(key)
		claim.Fingerprint = fingerprint
		return claim
	}
	one, two := sha256.Sum256([]byte("one")), sha256.Sum256([]byte{0, 0xff})

	k.processed(with("a", one[:]), k.write("a"))
	k.duplicate(with("a", one[:]))
	k.duplicate(with("a", nil))
	k.duplicate(with("a", []byte{}))
	result, err := k.process(with("a", two[:]), func(context.Context) ([]deduplicator.Output, error) {
		k.Error("the work of a conflict was called")
		return nil, nil
	})
	var conflict *deduplicator.ConflictError
	if !errors.As(err, &conflict) || !errors.Is(err, deduplicator.ErrConflict) {
		k.Fatalf("outcome %d, error %v, want a ConflictError", result.Outcome, err)
	}
	if conflict.Consumer != k.consumer || conflict.Key != "a" || !bytes.Equal(conflict.Stored, one[:]) || !bytes.Equal(conflict.Got, two[:]) {
		k.Errorf("conflict %+v does not say what met what", conflict)
	}
	// The conflict changed nothing.
	k.duplicate(with("a", one[:]))

	k.processed(with("b", nil), k.write("b"))
	k.duplicate(with("b", one[:]))
	k.duplicate(with("b", two[:]))
}
