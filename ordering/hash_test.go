package ordering_test

import (
	"bufio"
	"encoding/hex"
	"errors"
	"fmt"
	"hash/crc32"
	"hash/fnv"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/seed-2f56a981/watermill-idempotent/ordering"
)

// The vectors are those of Kafka's own UtilsTest, plus the empty key.
func TestMurmur2(t *testing.T) {
	t.Parallel()
	for key, want := range map[string]int32{
		"21":                         -973932308,
		"foobar":                     -790332482,
		"a-little-bit-long-string":   -985981536,
		"a-little-bit-longer-string": -1486304829,
		"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
		"abc": 479470107,
		"":    275646681,
	} {
		if got := int32(ordering.Murmur2(key)); got != want {
			t.Errorf("Murmur2(%q) = %d, want %d", key, got, want)
		}
	}
}

// What org.apache.kafka.common.utils.Utils.murmur2 of kafka-clients 4.1.0 returned
// for 300 keys of 0 to 255 bytes: see testdata/Murmur2.java.
func TestMurmur2OfTheJavaClient(t *testing.T) {
	t.Parallel()
	file, err := os.Open("testdata/murmur2.txt")
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	lines := 0
	for scanner := bufio.NewScanner(file); scanner.Scan(); lines++ {
		text, hash, _ := strings.Cut(scanner.Text(), " ")
		key, err := hex.DecodeString(text)
		want, err2 := strconv.ParseInt(hash, 10, 32)
		if err := errors.Join(err, err2); err != nil {
			t.Fatal(err)
		}
		if got := int32(ordering.Murmur2(string(key))); int64(got) != want {
			t.Errorf("Murmur2(%q) = %d, the Java client has %d", key, got, want)
		}
	}
	if lines != 300 {
		t.Errorf("%d vectors", lines)
	}
}

// The first vectors are the check values of the two algorithms.
func TestCRC32AndFNV1a(t *testing.T) {
	t.Parallel()
	if got := ordering.CRC32("123456789"); got != 0xcbf43926 {
		t.Errorf("CRC32 = %x", got)
	}
	if got := ordering.FNV1a("foobar"); got != 0xbf9cf968 {
		t.Errorf("FNV1a = %x", got)
	}
	for i := range 256 {
		key := strings.Repeat(string([]byte{byte(i), byte(i * 7)}), i/2)
		h := fnv.New32a()
		_, _ = h.Write([]byte(key))
		if ordering.CRC32(key) != crc32.ChecksumIEEE([]byte(key)) || ordering.FNV1a(key) != h.Sum32() {
			t.Errorf("key %q", key)
		}
	}
}

var partitioners = []ordering.Partitioner{
	"", ordering.Murmur2Partitioner, ordering.CRC32Partitioner, ordering.FNV1aPartitioner, ordering.FNV1aReferencePartitioner,
}

// librdkafka's own vectors (tests/0048-partitioner.c): consistent, murmur2, fnv1a.
func TestPartitionersOfLibrdkafka(t *testing.T) {
	t.Parallel()
	const n = 17
	for key, want := range map[string][3]int{
		"23456": {0xb1b451d7, 0x058d780f, 0x27e6f469},
		"this is another string with more length to it perhaps": {0xb0150df7, 0x4f7703da, 0x155e3e5f},
		"hejsan": {0xd077037e, 0x5ec19395, 0x17b1e27a},
	} {
		for i, p := range []ordering.Partitioner{ordering.CRC32Partitioner, ordering.Murmur2Partitioner, ordering.FNV1aPartitioner} {
			if got := p.Shard(key, n); got != want[i]%n {
				t.Errorf("%s: %q goes to %d, want %d", p, key, got, want[i]%n)
			}
		}
	}
}

func TestPartitionerOutOfRange(t *testing.T) {
	t.Parallel()
	if err := ordering.Partitioner("md5").Validate(); !errors.Is(err, ordering.ErrInvalidOption) || !strings.Contains(err.Error(), `"md5"`) {
		t.Error(err)
	}
	for name, f := range map[string]func(){
		"unknown":  func() { ordering.Partitioner("md5").Shard("k", 1) },
		"no shard": func() { ordering.CRC32Partitioner.Shard("k", 0) },
		"no lane":  func() { ordering.Lane("k", 0) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			defer func() {
				if recover() == nil {
					t.Error("no panic")
				}
			}()
			f()
		})
	}
}

// A million keys of each form: the fullest of 16 shards has at most 2 % more
// than its share. CRC-32 and FNV-1a are not asked: they are what other clients
// have.
func TestDistribution(t *testing.T) {
	t.Parallel()
	const keys, shards, most = 1_000_000, 16, 1.02
	forms := map[string]func(i int) string{
		"number": strconv.Itoa,
		"order":  func(i int) string { return "order-" + strconv.Itoa(i) },
		"uuid": func(i int) string {
			x := uint64(i)*0x9e3779b97f4a7c15 + 1
			return fmt.Sprintf("%08x-%04x-4%03x-8%03x-%012x", uint32(x>>32), uint16(x>>16), x&0xfff, x>>52, x*x>>16)
		},
	}
	for name, key := range forms {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var murmur2, lane [shards]int
			for i := range keys {
				k := key(i)
				murmur2[ordering.Shard(k, shards)]++
				lane[ordering.Lane(k, shards)]++
			}
			for what, counts := range map[string][]int{"Shard": murmur2[:], "Lane": lane[:]} {
				ratio := float64(slices.Max(counts)) / (keys / shards)
				t.Logf("%s: max/mean %.4f", what, ratio)
				if ratio > most {
					t.Errorf("%s: max/mean is %.4f, want %.2f at most: %v", what, ratio, most, counts)
				}
			}
		})
	}
}

// ORDERING trap 9: within one partition, every lane is used evenly.
func TestLanesAreIndependentOfThePartition(t *testing.T) {
	t.Parallel()
	const partitions, lanes, keys = 12, 8, 120_000
	for _, p := range partitioners {
		var counts [lanes]int
		n := 0
		for i := range keys {
			key := "order-" + strconv.Itoa(i)
			if p.Shard(key, partitions) == 5 {
				counts[ordering.Lane(key, lanes)]++
				n++
			}
		}
		for lane, count := range counts {
			if ratio := float64(count) / (float64(n) / lanes); math.Abs(ratio-1) > 0.1 {
				t.Errorf("%s: lane %d has %.2f of its share: %v", p, lane, ratio, counts)
			}
		}
	}
}

// One lane more takes keys from all others, and no key moves between those.
func TestLaneMovesFewKeys(t *testing.T) {
	t.Parallel()
	const keys = 100_000
	moved := 0
	for i := range keys {
		key := strconv.Itoa(i)
		before, after := ordering.Lane(key, 15), ordering.Lane(key, 16)
		if before != after {
			moved++
			if after != 15 {
				t.Fatalf("key %s moved from %d to %d", key, before, after)
			}
		}
	}
	if share := float64(moved) / keys; math.Abs(share-1.0/16) > 0.005 {
		t.Errorf("%.4f of the keys moved", share)
	}
}

func TestRoutingAllocatesNothing(t *testing.T) {
	key := strings.Repeat("k", ordering.MaxKeyLength)
	for _, p := range partitioners {
		if n := testing.AllocsPerRun(100, func() { p.Shard(key, 16) }); n != 0 {
			t.Errorf("%s: %v allocations", p, n)
		}
	}
	if n := testing.AllocsPerRun(100, func() { ordering.Lane(key, 16) }); n != 0 {
		t.Errorf("Lane: %v allocations", n)
	}
}

func BenchmarkRouting(b *testing.B) {
	for _, key := range []string{"123456789", "f47ac10b-58cc-4372-a567-0e02b2c3d479"} {
		for _, p := range partitioners[1:] {
			b.Run(fmt.Sprintf("%s/%d bytes", p, len(key)), func(b *testing.B) {
				b.ReportAllocs()
				for b.Loop() {
					p.Shard(key, 16)
				}
			})
		}
		b.Run(fmt.Sprintf("lane/%d bytes", len(key)), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				ordering.Lane(key, 16)
			}
		})
	}
}
