package deduplicator

import (
	"sync"

	"github.com/seed-2f56a981/watermill-idempotent/internal/sqldb"
)

// knownKeys remembers claims that are committed. What it does not know may be
// committed as well. It is exact: claims are compared as the database compares
// them. The nil set is one that is switched off.
type knownKeys struct {
	generation int // how many claims young holds

	mu    sync.Mutex // guards what follows
	young map[knownKey]knownClaim
	old   map[knownKey]knownClaim // what was young before; dropped by the next one
}

// knownKey is a claim as it is stored, so each part has 255 bytes at most.
type knownKey struct{ consumer, key string }

type knownClaim struct {
	fingerprint string // as stored; empty if there is none
	outputs     bool   // there may be some, so the database must be asked
}

func newKnownKeys(n int) *knownKeys {
	if n == 0 {
		return nil
	}
	return &knownKeys{generation: max(n/2, 1), young: make(map[knownKey]knownClaim)}
}

func storedKey(claim Claim) knownKey {
	return knownKey{sqldb.EncodeKey(claim.Consumer), sqldb.EncodeKey(claim.Key)}
}

// duplicate reports whether claim is known to be committed and without outputs,
// and returns a ConflictError if that was with other content.
func (k *knownKeys) duplicate(claim Claim) (bool, error) {
	if k == nil {
		return false, nil
	}
	key := storedKey(claim)
	k.mu.Lock()
	known, ok := k.young[key]
	if !ok {
		if known, ok = k.old[key]; ok {
			k.put(key, known) // asked for: it stays
		}
	}
	k.mu.Unlock()
	if !ok || known.outputs {
		return false, nil
	}
	if claim.conflicts(known.fingerprint) {
		return true, &ConflictError{Consumer: claim.Consumer, Key: claim.Key, Stored: []byte(known.fingerprint), Got: claim.Fingerprint}
	}
	return true, nil
}

// conflicts reports whether a claim is stored with other content.
func (c Claim) conflicts(stored string) bool {
	return len(c.Fingerprint) > 0 && stored != "" && string(c.Fingerprint) != stored
}

// committed adds a claim that is committed with that fingerprint.
func (k *knownKeys) committed(claim Claim, fingerprint []byte, outputs bool) {
	if k == nil {
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.put(storedKey(claim), knownClaim{string(fingerprint), outputs})
}

// put needs the lock.
func (k *knownKeys) put(key knownKey, claim knownClaim) {
	if _, ok := k.young[key]; !ok && len(k.young) >= k.generation {
		k.young, k.old = make(map[knownKey]knownClaim, k.generation), k.young
	}
	k.young[key] = claim
}

// forgotten says that claims have no outputs any more. Those that are not known
// to be committed do not become so.
func (k *knownKeys) forgotten(claims []Claim) {
	if k == nil {
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, claim := range claims {
		key := storedKey(claim)
		for _, known := range []map[knownKey]knownClaim{k.young, k.old} {
			if c, ok := known[key]; ok {
				c.outputs = false
				known[key] = c
			}
		}
	}
}
