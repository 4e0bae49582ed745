package deduplicator

// KnownKeys can be told from a database only by its speed.
type KnownKeys = knownKeys

var NewKnownKeys = newKnownKeys

func (k *knownKeys) Duplicate(claim Claim) bool { return k.duplicate(claim) }
func (k *knownKeys) Committed(claim Claim, fingerprint []byte, outputs bool) {
	k.committed(claim, fingerprint, outputs)
}
func (k *knownKeys) Forgotten(claims []Claim) { k.forgotten(claims) }
func (k *knownKeys) Len() int                 { return len(k.young) + len(k.old) }
