package ordering

import (
	"errors"
	"fmt"
	"strconv"
	"unicode/utf8"

	"github.com/ThreeDotsLabs/watermill/message"
)

// Metadata fields of messages that a [Producer] has numbered. A message has all
// of them but the last, or none.
const (
	// ProducerMetadata is the producer's name.
	ProducerMetadata = "ordering_producer"
	// ProducerEpochMetadata is the producer's epoch, a decimal number from 1.
	ProducerEpochMetadata = "ordering_producer_epoch"
	// ProducerStreamMetadata is the stream in which the message is numbered.
	ProducerStreamMetadata = "ordering_producer_stream"
	// ProducerSequenceMetadata is the message's number in its stream and epoch, a
	// decimal number from 1.
	ProducerSequenceMetadata = "ordering_producer_sequence"
	// ProducerMessageMetadata is the UUID of the message that was numbered. Where
	// it is not the message's own, a handler has copied the metadata of another
	// message, whose number says nothing about this one.
	ProducerMessageMetadata = "ordering_producer_message"
	// ProducerSenderMetadata is the epoch of the producer that has sent a stored
	// message of an earlier epoch of its name again.
	ProducerSenderMetadata = "ordering_producer_sender"
)

// MaxSequence is the highest sequence number: what SQL's bigint can hold. At a
// million messages a second it lasts for 292,000 years.
const MaxSequence = 1<<63 - 1

// ErrInvalidStamp says that a message carries some of a producer's metadata
// fields, but not all, or values that they can't have.
var ErrInvalidStamp = errors.New("ordering: invalid producer numbers")

// Stamp is the number of a message, as its metadata carry it.
type Stamp struct {
	Producer string // name, 1 to MaxKeyLength bytes of UTF-8
	Epoch    uint32 // from 1
	Stream   string // 1 to MaxKeyLength bytes of UTF-8
	Sequence uint64 // 1 to MaxSequence
	Sender   uint32 // higher than Epoch if a later epoch sent the message again, else 0
}

// ParseStamp returns the stamp of msg. It reports false for a message that no
// [Producer] has numbered, and for one with the stamp of another message: see
// [ProducerMessageMetadata]. It returns [ErrInvalidStamp], without the values.
func ParseStamp(msg *message.Message) (Stamp, bool, error) {
	fields := [...]string{ProducerMetadata, ProducerEpochMetadata, ProducerStreamMetadata, ProducerSequenceMetadata, ProducerMessageMetadata}
	missing, missed := 0, ""
	for _, field := range fields {
		if _, ok := msg.Metadata[field]; !ok {
			missing, missed = missing+1, field
		}
	}
	if missing == len(fields) {
		return Stamp{}, false, nil
	}
	if missing > 0 {
		return Stamp{}, false, fmt.Errorf("%w: metadata field %q is missing beside others of them", ErrInvalidStamp, missed)
	}
	s := Stamp{Producer: msg.Metadata[ProducerMetadata], Stream: msg.Metadata[ProducerStreamMetadata]}
	var problems []error
	for _, f := range []struct{ field, text string }{{ProducerMetadata, s.Producer}, {ProducerStreamMetadata, s.Stream}} {
		if checkName(f.text) != nil {
			problems = append(problems, fmt.Errorf("metadata field %q must be 1 to %d bytes of UTF-8", f.field, MaxKeyLength))
		}
	}
	number := func(field string, most uint64) uint64 {
		text := msg.Metadata[field]
		n, err := strconv.ParseUint(text, 10, 64)
		if err != nil || n < 1 || n > most || strconv.FormatUint(n, 10) != text {
			problems = append(problems, fmt.Errorf("metadata field %q must be a decimal integer from 1 to %d", field, most))
		}
		return n
	}
	s.Epoch = uint32(number(ProducerEpochMetadata, maxEpoch)) //nolint:gosec // checked by number
	s.Sequence = number(ProducerSequenceMetadata, MaxSequence)
	if _, ok := msg.Metadata[ProducerSenderMetadata]; ok {
		s.Sender = uint32(number(ProducerSenderMetadata, maxEpoch)) //nolint:gosec // checked by number
	}
	if len(problems) > 0 {
		return Stamp{}, false, fmt.Errorf("%w: %w", ErrInvalidStamp, errors.Join(problems...))
	}
	if s.Sender <= s.Epoch {
		s.Sender = 0
	}
	if msg.Metadata[ProducerMessageMetadata] != msg.UUID {
		return Stamp{}, false, nil
	}
	return s, true, nil
}

// set writes s into msg, instead of what it carries.
func (s Stamp) set(msg *message.Message) {
	if msg.Metadata == nil {
		msg.Metadata = message.Metadata{}
	}
	msg.Metadata[ProducerMetadata] = s.Producer
	msg.Metadata[ProducerEpochMetadata] = strconv.FormatUint(uint64(s.Epoch), 10)
	msg.Metadata[ProducerStreamMetadata] = s.Stream
	msg.Metadata[ProducerSequenceMetadata] = strconv.FormatUint(s.Sequence, 10)
	msg.Metadata[ProducerMessageMetadata] = msg.UUID
	delete(msg.Metadata, ProducerSenderMetadata)
	if s.Sender != 0 {
		msg.Metadata[ProducerSenderMetadata] = strconv.FormatUint(uint64(s.Sender), 10)
	}
}

func checkName(name string) error {
	if name == "" || len(name) > MaxKeyLength || !utf8.ValidString(name) {
		return fmt.Errorf("must be 1 to %d bytes of UTF-8", MaxKeyLength)
	}
	return nil
}
