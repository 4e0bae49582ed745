package ordering

// Murmur2 is the hash with which the Java client places a record key on a
// partition: MurmurHash2, 32 bit, seed 0x9747b28c, over the key's bytes
// (org.apache.kafka.common.utils.Utils.murmur2). It allocates nothing.
func Murmur2(key string) uint32 {
	const (
		seed uint32 = 0x9747b28c
		m    uint32 = 0x5bd1e995
		r           = 24
	)
	h := seed ^ uint32(len(key))
	for len(key) >= 4 {
		k := uint32(key[0]) | uint32(key[1])<<8 | uint32(key[2])<<16 | uint32(key[3])<<24
		k *= m
		k ^= k >> r
		k *= m
		h *= m
		h ^= k
		key = key[4:]
	}
	switch len(key) {
	case 3:
		h ^= uint32(key[2]) << 16
		fallthrough
	case 2:
		h ^= uint32(key[1]) << 8
		fallthrough
	case 1:
		h ^= uint32(key[0])
		h *= m
	}
	h ^= h >> 13
	h *= m
	h ^= h >> 15
	return h
}

// Shard returns the shard of key among n: Murmur2 with the sign bit cleared,
// modulo n, which is the partition that the Java client and franz-go choose for
// the same key. It panics if n is not positive.
func Shard(key string, n int) int {
	return int(Murmur2(key)&0x7fffffff) % n
}
