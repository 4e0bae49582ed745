package kafkashard

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/IBM/sarama"
	"github.com/ThreeDotsLabs/watermill-kafka/v3/pkg/kafka"
	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/seed-2f56a981/watermill-idempotent/ordering"
)

// Metadata fields of received messages. They say where a message was read, so
// they are not written when it is published again, such as to a poison queue.
const (
	// PartitionMetadata is the partition, a decimal number.
	PartitionMetadata = metadataPrefix + "partition"
	// OffsetMetadata is the offset in the partition, a decimal number.
	OffsetMetadata = metadataPrefix + "offset"

	metadataPrefix = "kafkashard_"
)

// Marshaler maps messages to records and back: the payload is the value, the
// metadata are headers, the UUID is the header of watermill-kafka's own
// marshaler, and the partition key is the record's key and a header. The zero
// value is ready for use, and safe for concurrent use.
type Marshaler struct{}

// Marshal returns the record of a message for topic, with the present time. A
// nil payload becomes a null value (a tombstone in a compacted topic), an empty
// one does not. It returns an [ordering.KeyError] if the message does not carry
// a usable [ordering.PartitionKeyMetadata].
func (Marshaler) Marshal(topic string, msg *message.Message) (*sarama.ProducerMessage, error) {
	key := msg.Metadata.Get(ordering.PartitionKeyMetadata)
	if reason := ordering.CheckKey(key); reason != "" {
		return nil, &ordering.KeyError{Topic: topic, UUID: msg.UUID, Reason: reason}
	}
	if _, taken := msg.Metadata[kafka.UUIDHeaderKey]; taken {
		return nil, fmt.Errorf("kafkashard: metadata field %s is reserved for the UUID", kafka.UUIDHeaderKey)
	}
	headers := make([]sarama.RecordHeader, 0, len(msg.Metadata)+1)
	headers = append(headers, sarama.RecordHeader{Key: []byte(kafka.UUIDHeaderKey), Value: []byte(msg.UUID)})
	for field, value := range msg.Metadata {
		if !strings.HasPrefix(field, metadataPrefix) {
			headers = append(headers, sarama.RecordHeader{Key: []byte(field), Value: []byte(value)})
		}
	}
	record := &sarama.ProducerMessage{
		Topic:     topic,
		Key:       sarama.StringEncoder(key),
		Headers:   headers,
		Timestamp: time.Now(),
	}
	if msg.Payload != nil {
		record.Value = sarama.ByteEncoder(msg.Payload)
	}
	return record, nil
}

// Unmarshal returns the message of a record. It never fails, because an error
// would end the claim and the group would rejoin at the same record for ever:
//
//   - A record without a UUID header becomes a message with the UUID "".
//   - A null value becomes an empty payload.
//   - Header names and values are taken byte for byte; of several headers with
//     one name the last counts.
//   - The record's key becomes [ordering.PartitionKeyMetadata] if there is no
//     such header and the key can be one.
//   - The record's timestamp becomes [ordering.PublishedAtMetadata] if there is no
//     such header.
func (Marshaler) Unmarshal(record *sarama.ConsumerMessage) (*message.Message, error) {
	msg := message.NewMessage("", record.Value)
	if msg.Payload == nil {
		msg.Payload = message.Payload{}
	}
	for _, header := range record.Headers {
		if header == nil {
			continue
		}
		switch field := string(header.Key); {
		case field == kafka.UUIDHeaderKey:
			msg.UUID = string(header.Value)
		case strings.HasPrefix(field, metadataPrefix):
			// Only this function may say where a message was read.
		default:
			msg.Metadata.Set(field, string(header.Value))
		}
	}
	if key := string(record.Key); msg.Metadata.Get(ordering.PartitionKeyMetadata) == "" && ordering.CheckKey(key) == "" {
		msg.Metadata.Set(ordering.PartitionKeyMetadata, key)
	}
	msg.Metadata.Set(PartitionMetadata, strconv.FormatInt(int64(record.Partition), 10))
	msg.Metadata.Set(OffsetMetadata, strconv.FormatInt(record.Offset, 10))
	if msg.Metadata.Get(ordering.PublishedAtMetadata) == "" && !record.Timestamp.IsZero() {
		msg.Metadata.Set(ordering.PublishedAtMetadata, record.Timestamp.UTC().Format(time.RFC3339Nano))
	}
	return msg, nil
}
