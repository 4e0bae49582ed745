package ledger

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"math"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
)

// MaxNameBytes is the longest name of an effect.
const MaxNameBytes = 255

// EffectOption is an option of [NewEffect] and [KeyFor].
type EffectOption interface{ apply(*effectConfig) }

type effectOptionFunc func(*effectConfig)

func (f effectOptionFunc) apply(c *effectConfig) { f(c) }

type effectConfig struct{ epoch int }

// WithEpoch opens a new space of keys for an effect: what was done under another
// epoch counts as never done. It is for an effect that must be done again, for
// messages that come again too, because its meaning has changed. n is 0, the
// default, to 2^31-1.
func WithEpoch(n int) EffectOption {
	return effectOptionFunc(func(c *effectConfig) { c.epoch = n })
}

// identity is what makes an effect one and the same.
type identity struct {
	consumer, message string
	name              string
	epoch             int
}

// key returns a UUID of version 8 (RFC 9562), whose 122 free bits are those of a
// SHA-256 over the parts, each with its length before it.
func (id identity) key() string {
	buffer := make([]byte, 0, 256) // on the stack, unless the parts are long
	buffer = append(buffer, "effect 1"...)
	for _, part := range [...]string{id.consumer, id.message, id.name} {
		buffer = binary.BigEndian.AppendUint64(buffer, uint64(len(part)))
		buffer = append(buffer, part...)
	}
	buffer = binary.BigEndian.AppendUint64(buffer, uint64(id.epoch)) //nolint:gosec // it is not negative
	sum := sha256.Sum256(buffer)
	sum[6] = sum[6]&0x0f | 0x80
	sum[8] = sum[8]&0x3f | 0x80
	var text [36]byte
	hex.Encode(text[0:8], sum[0:4])
	hex.Encode(text[9:13], sum[4:6])
	hex.Encode(text[14:18], sum[6:8])
	hex.Encode(text[19:23], sum[8:10])
	hex.Encode(text[24:36], sum[10:16])
	text[8], text[13], text[18], text[23] = '-', '-', '-', '-'
	return string(text[:])
}

// KeyFor returns the idempotency key of an effect: for a provider that recognises
// repeated requests by such a key, for the metadata of a gRPC call, or as the UUID
// of a message that the handler publishes itself. ctx is the context of a message
// inside Deduplicate.
//
// The key depends on the consumer, the key of the message, the name and the epoch
// of the effect, and on nothing else: it is the same at every attempt, after every
// redelivery and in every instance. It has the form of a UUID (version 8, 36
// characters of lower-case hexadecimal digits and hyphens), which every provider
// known to us accepts. Name is 1 to [MaxNameBytes] bytes of printable UTF-8; give
// two effects of one handler, or two charges of one order, different names.
//
// It returns [ErrNoClaim] outside of Deduplicate and [ErrInvalidEffect] for a name
// or epoch out of range. Nothing is durable then.
func KeyFor(ctx context.Context, name string, opts ...EffectOption) (string, error) {
	var cfg effectConfig
	for _, opt := range opts {
		opt.apply(&cfg)
	}
	if err := checkEffect(name, cfg.epoch); err != nil {
		return "", err
	}
	id, err := identify(ctx, name, cfg.epoch)
	if err != nil {
		return "", err
	}
	return id.key(), nil
}

func identify(ctx context.Context, name string, epoch int) (identity, error) {
	claim, ok := deduplicator.ClaimFromContext(ctx)
	if !ok || claim.Consumer == "" || claim.Key == "" {
		return identity{}, fmt.Errorf("%w: effect %q", ErrNoClaim, name)
	}
	return identity{claim.Consumer, claim.Key, name, epoch}, nil
}

func checkEffect(name string, epoch int) error {
	switch {
	case name == "":
		return fmt.Errorf("%w: the name is empty", ErrInvalidEffect)
	case len(name) > MaxNameBytes:
		return fmt.Errorf("%w: the name has %d bytes, the limit is %d", ErrInvalidEffect, len(name), MaxNameBytes)
	case !utf8.ValidString(name) || strings.ContainsFunc(name, unprintable):
		return fmt.Errorf("%w: name %q is not printable UTF-8", ErrInvalidEffect, name)
	case epoch < 0 || epoch > math.MaxInt32:
		return fmt.Errorf("%w: epoch %d is not 0 to %d", ErrInvalidEffect, epoch, math.MaxInt32)
	}
	return nil
}

func unprintable(r rune) bool { return !unicode.IsPrint(r) }

type callKey struct{}

// call is what the context of a call carries.
type call struct {
	key    string
	effect string // empty if it is not a call of Do
	once   bool   // the rule allows no second request
}

// ContextWithKey returns a context that carries the idempotency key of a request,
// for a transport that sends it along. In a call of [Do] it changes the key alone.
func ContextWithKey(ctx context.Context, key string) context.Context {
	of, _ := ctx.Value(callKey{}).(call)
	of.key = key
	return context.WithValue(ctx, callKey{}, of)
}

// sendOnce reports whether ctx is the one of a call that must not be repeated.
func sendOnce(ctx context.Context) bool {
	of, _ := ctx.Value(callKey{}).(call)
	return of.once
}

// KeyFromContext returns the idempotency key of the effect that ctx belongs to: of
// the context that [Do] gives the function that calls the provider, or one of
// [ContextWithKey].
func KeyFromContext(ctx context.Context) (string, bool) {
	of, ok := ctx.Value(callKey{}).(call)
	return of.key, ok
}
