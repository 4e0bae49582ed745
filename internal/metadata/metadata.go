// Package metadata holds the metadata fields that packages read which must not
// import the one that owns the field. A test compares the two.
package metadata

const (
	// Redelivered is amqpshard.RedeliveredMetadata.
	Redelivered = "amqpshard_redelivered"

	// PartitionKey is ordering.PartitionKeyMetadata.
	PartitionKey = "ordering_partition_key"
)
