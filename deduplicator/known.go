package deduplicator

import (
	"crypto/sha256"
	"encoding/binary"
	"sync"
)

// knownKeys remembers claims that are committed. What it does not know may be
// committed as well. The nil set is one that is switched off.
//
// It holds digests, so that its size does not depend on the keys, and the garbage
// collector, which would take one percent of all time, has no pointers to follow.
type knownKeys struct {
	generation int // how many claims young holds

	mu    sync.Mutex // guards what follows
	young map[digest]knownClaim
	old   map[digest]knownClaim // what was young before; dropped by the next one
}

type digest [sha256.Size]byte

type knownClaim struct {
	fingerprint digest // of the fingerprint; zero if there is none
	outputs     bool   // there may be some, so the database must be asked
}

func newKnownKeys(n int) *knownKeys {
	if n == 0 {
		return nil
	}
	return &knownKeys{generation: max(n/2, 1), young: make(map[digest]knownClaim)}
}

// digestOfKey tells claims apart as the database does.
func digestOfKey(claim Claim) digest {
	var buffer [128]byte
	text := binary.AppendUvarint(buffer[:0], uint64(len(claim.Consumer)))
	text = append(text, claim.Consumer...)
	return sha256.Sum256(append(text, claim.Key...))
}

func digestOf(fingerprint []byte) digest {
	if len(fingerprint) == 0 {
		return digest{}
	}
	return sha256.Sum256(fingerprint)
}

// duplicate reports whether claim is known to be committed, with no other content
// and without outputs.
func (k *knownKeys) duplicate(claim Claim) bool {
	if k == nil {
		return false
	}
	key := digestOfKey(claim)
	k.mu.Lock()
	known, ok := k.young[key]
	if !ok {
		if known, ok = k.old[key]; ok {
			k.put(key, known) // asked for: it stays
		}
	}
	k.mu.Unlock()
	none := digest{}
	fingerprint := digestOf(claim.Fingerprint)
	return ok && !known.outputs && (fingerprint == none || known.fingerprint == none || fingerprint == known.fingerprint)
}

// committed adds a claim that is committed with that fingerprint.
func (k *knownKeys) committed(claim Claim, fingerprint []byte, outputs bool) {
	if k == nil {
		return
	}
	key, known := digestOfKey(claim), knownClaim{digestOf(fingerprint), outputs}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.put(key, known)
}

// put needs the lock.
func (k *knownKeys) put(key digest, claim knownClaim) {
	if _, ok := k.young[key]; !ok && len(k.young) >= k.generation {
		k.young, k.old = make(map[digest]knownClaim, k.generation), k.young
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
		key := digestOfKey(claim)
		for _, known := range []map[digest]knownClaim{k.young, k.old} {
			if c, ok := known[key]; ok {
				c.outputs = false
				known[key] = c
			}
		}
	}
}
