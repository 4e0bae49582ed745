package metadata

import (
	"encoding/json"
	"fmt"
	"strings"
	"unicode/utf8"
)

// binaryMark begins metadata that is not UTF-8, whose values JSON would change.
// It is followed by JSON with values in base64.
const binaryMark = "binary:"

// Encode returns metadata as it is stored in a column of bytes: every byte comes back,
// which JSON strings would not promise.
func Encode(metadata map[string]string) []byte {
	if len(metadata) == 0 {
		return []byte("{}")
	}
	text := true
	for k, v := range metadata {
		text = text && utf8.ValidString(k) && utf8.ValidString(v)
	}
	var encoded []byte
	var err error
	if text {
		encoded, err = json.Marshal(metadata)
	} else {
		pairs := make([][2][]byte, 0, len(metadata))
		for k, v := range metadata {
			pairs = append(pairs, [2][]byte{[]byte(k), []byte(v)})
		}
		encoded, err = json.Marshal(pairs)
		encoded = append([]byte(binaryMark), encoded...)
	}
	if err != nil {
		panic(err) // strings and bytes can always be encoded
	}
	return encoded
}

// Decode returns what Encode was given; an empty map for nil.
func Decode(encoded []byte) (map[string]string, error) {
	metadata := make(map[string]string)
	if rest, ok := strings.CutPrefix(string(encoded), binaryMark); ok {
		var pairs [][2][]byte
		if err := json.Unmarshal([]byte(rest), &pairs); err != nil {
			return nil, fmt.Errorf("metadata: %w", err)
		}
		for _, pair := range pairs {
			metadata[string(pair[0])] = string(pair[1])
		}
		return metadata, nil
	}
	if err := json.Unmarshal(encoded, &metadata); err != nil {
		return nil, fmt.Errorf("metadata: %w", err)
	}
	return metadata, nil
}
