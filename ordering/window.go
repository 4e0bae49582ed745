package ordering

import (
	"encoding/binary"
	"fmt"
)

// WindowSize is how many of a stream's highest numbers [Windows] knows one by
// one.
const WindowSize = 1024

const windowBytes = WindowSize / 8

// window is what a consumer knows of a stream: bit i of seen, counted from the
// lowest of word 0, is set when number highest-i of epoch was seen.
type window struct {
	epoch   uint32
	highest uint64
	seen    [WindowSize / 64]uint64
}

// newWindow is the window of a stream whose first message that this consumer
// sees has the number seq. Lower numbers count as not seen.
func newWindow(epoch uint32, seq uint64) window {
	w := window{epoch: epoch, highest: seq}
	w.seen[0] = 1
	return w
}

// admit marks a number of w's epoch as seen. A seen number and one below the
// window leave w as it is.
func (w window) admit(seq uint64) (window, WindowResult) {
	if seq > w.highest {
		ahead := seq - w.highest
		w.shift(ahead)
		w.highest = seq
		w.seen[0] |= 1
		if ahead > 1 {
			return w, AcceptedAhead
		}
		return w, Accepted
	}
	behind := w.highest - seq
	if behind >= WindowSize {
		return w, Unknown
	}
	word, bit := behind/64, uint64(1)<<(behind%64)
	if w.seen[word]&bit != 0 {
		return w, Replayed
	}
	w.seen[word] |= bit
	return w, Accepted
}

// shift makes room for n numbers above highest.
func (w *window) shift(n uint64) {
	words, bits := int(n/64), n%64
	for i := len(w.seen) - 1; i >= 0; i-- {
		var word uint64
		if i >= words {
			word = w.seen[i-words] << bits
		}
		if i > words && bits > 0 {
			word |= w.seen[i-words-1] >> (64 - bits)
		}
		w.seen[i] = word
	}
}

// columns are the values of epoch, highest and seen.
func (w window) columns() []any {
	b := make([]byte, 0, windowBytes)
	for _, word := range w.seen {
		b = binary.BigEndian.AppendUint64(b, word)
	}
	return []any{int64(w.epoch), int64(w.highest), b} //nolint:gosec // MaxSequence at most
}

func parseWindow(epoch, highest int64, seen []byte) (window, error) {
	if epoch < 1 || epoch > maxEpoch || highest < 1 || len(seen) != windowBytes {
		return window{}, fmt.Errorf("ordering: stored window has epoch %d, number %d and %d bytes", epoch, highest, len(seen))
	}
	w := window{epoch: uint32(epoch), highest: uint64(highest)}
	for i := range w.seen {
		w.seen[i] = binary.BigEndian.Uint64(seen[8*i:])
	}
	return w, nil
}
