package ordering

import (
	"fmt"
	"hash/crc32"

	"github.com/cespare/xxhash/v2"
)

// Partitioner is a rule that places keys on shards as a Kafka client does. Its
// text is what [RecordPartitioning] stores. The zero value is Murmur2Partitioner.
type Partitioner string

const (
	// Murmur2Partitioner is the default of the Java client and of franz-go, and
	// librdkafka's murmur2_random: see [Shard].
	Murmur2Partitioner Partitioner = "murmur2"
	// CRC32Partitioner is librdkafka's default (consistent_random), so that of its
	// Python, .NET and Node clients: CRC-32 (IEEE) as an unsigned number, modulo n.
	CRC32Partitioner Partitioner = "crc32"
	// FNV1aPartitioner is sarama's and so Watermill's default: FNV-1a, 32 bit, as
	// a signed number, modulo n, without its sign.
	FNV1aPartitioner Partitioner = "fnv1a"
	// FNV1aReferencePartitioner is sarama's NewReferenceHashPartitioner: FNV-1a,
	// 32 bit, with the sign bit cleared, modulo n.
	FNV1aReferencePartitioner Partitioner = "fnv1a-reference"
)

// Validate returns an error that wraps [ErrInvalidOption] for anything but the
// four partitioners and the zero value.
func (p Partitioner) Validate() error {
	switch p {
	case "", Murmur2Partitioner, CRC32Partitioner, FNV1aPartitioner, FNV1aReferencePartitioner:
		return nil
	}
	return fmt.Errorf("%w: partitioner %q is unknown, must be %q, %q, %q or %q", ErrInvalidOption, string(p),
		Murmur2Partitioner, CRC32Partitioner, FNV1aPartitioner, FNV1aReferencePartitioner)
}

// Shard returns the shard of key among n, 0 to n-1. It allocates nothing. It
// panics if n is not positive or p is not valid.
func (p Partitioner) Shard(key string, n int) int {
	switch p {
	case "", Murmur2Partitioner:
		return Shard(key, n)
	case CRC32Partitioner:
		return int(CRC32(key) % uint32(n)) //nolint:gosec // n is positive
	case FNV1aPartitioner:
		shard := int(int32(FNV1a(key))) % n //nolint:gosec // sarama takes the hash as signed
		if shard < 0 {
			shard = -shard
		}
		return shard
	case FNV1aReferencePartitioner:
		return int(FNV1a(key)&0x7fffffff) % n
	}
	panic(p.Validate())
}

// name is p with the default spelled out.
func (p Partitioner) name() string {
	if p == "" {
		return string(Murmur2Partitioner)
	}
	return string(p)
}

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

// CRC32 is the CRC-32 (IEEE) of key. It allocates nothing.
func CRC32(key string) uint32 {
	crc, table := ^uint32(0), crc32.IEEETable // hash/crc32 takes bytes, and the conversion would allocate
	for i := range len(key) {
		crc = table[byte(crc)^key[i]] ^ crc>>8
	}
	return ^crc
}

// FNV1a is the FNV-1a hash of key, 32 bit. It allocates nothing.
func FNV1a(key string) uint32 {
	h := uint32(2166136261)
	for i := range len(key) {
		h ^= uint32(key[i])
		h *= 16777619
	}
	return h
}

// laneSeed makes the lanes independent of other users of the same hashes.
const laneSeed = 0x6c616e65

// Lane returns the lane of key among n, for work that one process spreads over n
// goroutines: xxHash64 and then a jump hash. It is independent of every
// [Partitioner]: lanes that are chosen with the hash that chose the partition
// stay empty, as 6 of 8 did with murmur2 and 12 partitions. With another n the
// least number of keys moves. It allocates nothing, and panics if n is not
// positive.
func Lane(key string, n int) int {
	if n <= 0 {
		panic("ordering: Lane of no lanes")
	}
	return jump(xxhash.Sum64String(key)^laneSeed, n)
}

// jump is the jump consistent hash of Lamping and Veach, "A Fast, Minimal Memory,
// Consistent Hash Algorithm" (2014).
func jump(hash uint64, n int) int {
	b, j := int64(-1), int64(0)
	for j < int64(n) {
		b = j
		hash = hash*2862933555777941757 + 1
		j = int64(float64(b+1) * (float64(1<<31) / float64(hash>>33+1)))
	}
	return int(b)
}
