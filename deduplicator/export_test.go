package deduplicator

// What is stored of outputs and named in the schema can't be seen without a
// database.
var (
	EncodeMetadata = encodeMetadata
	DecodeMetadata = decodeMetadata
	IndexName      = indexName
)
