package ordering_test

import (
	"fmt"

	"github.com/seed-2f56a981/watermill-idempotent/ordering"
)

// One key on 12 partitions, as clients with different defaults place it.
func ExamplePartitioner() {
	for _, p := range []ordering.Partitioner{
		ordering.Murmur2Partitioner, ordering.CRC32Partitioner, ordering.FNV1aPartitioner, ordering.FNV1aReferencePartitioner,
	} {
		fmt.Println(p, p.Shard("order-42", 12))
	}
	// Output:
	// murmur2 0
	// crc32 10
	// fnv1a 8
	// fnv1a-reference 8
}

func ExampleEntityParts() {
	fmt.Println(ordering.EntityParts("a", "bc"))
	fmt.Println(ordering.EntityParts("ab", "c"))
	// Output:
	// 1:a2:bc
	// 2:ab1:c
}
