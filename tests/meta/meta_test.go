// Package meta_test checks the repository itself: what the core links, that the
// README shows a program that compiles, and that each requirement names tests
// that exist.
package meta_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

const root = "../.."

// The core links no broker client and no database driver.
func TestCoreDependencies(t *testing.T) {
	t.Parallel()
	allowed := []string{
		"github.com/seed-2f56a981/watermill-idempotent",
		"github.com/ThreeDotsLabs/watermill",
		"github.com/cenkalti/backoff/v5", "github.com/cespare/xxhash/v2",
		// of Watermill's message and message/router/middleware
		"github.com/google/uuid", "github.com/lithammer/shortuuid/v3", "github.com/oklog/ulid",
		"github.com/pkg/errors", "github.com/sony/gobreaker",
	}
	command := exec.CommandContext(t.Context(), "go", "list", "-deps", "-f", "{{with .Module}}{{.Path}}{{end}}",
		"./middleware", "./deduplicator", "./deduplicator/write", "./deduplicator/ledger", "./ordering")
	command.Dir = root
	out, err := command.Output()
	require.NoError(t, err)
	modules := slices.Compact(slices.Sorted(slices.Values(strings.Fields(string(out)))))
	require.Contains(t, modules, allowed[0])
	for _, module := range modules {
		require.Contains(t, allowed, module)
	}
}

// The README's first program is the example that the compiler sees.
func TestReadmeShowsTheExample(t *testing.T) {
	t.Parallel()
	readme := read(t, "README.md")
	block := regexp.MustCompile("(?s)```go\n(.*?)```").FindStringSubmatch(readme)
	require.NotNil(t, block, "README.md has no Go block")

	const file = "middleware/example_test.go"
	source := read(t, file)
	set := token.NewFileSet()
	parsed, err := parser.ParseFile(set, file, source, parser.ParseComments)
	require.NoError(t, err)
	for _, decl := range parsed.Decls {
		if f, ok := decl.(*ast.FuncDecl); ok && f.Name.Name == "Example" {
			body := source[set.Position(f.Body.Lbrace).Offset+1 : set.Position(f.Body.Rbrace).Offset]
			require.Equal(t, lines(body), lines(block[1]), "README.md and Example in %s differ", file)
			return
		}
	}
	require.Fail(t, "no func Example in "+file)
}

// lines are the lines of code without their indentation.
func lines(code string) []string {
	var out []string
	for line := range strings.Lines(code) {
		if line = strings.TrimSpace(line); line != "" {
			out = append(out, line)
		}
	}
	return out
}

var (
	requirementID = regexp.MustCompile(`^(C[1-5]|I([1-9]|1[0-2])|R[1-9]|K[1-8])$`)
	testName      = regexp.MustCompile("`((?:Test|Fuzz|Example|Benchmark)[A-Za-z0-9_]*)(/[^`]*)?`")
)

// Each requirement has one row in REQUIREMENTS.md, which is open or names tests
// that exist.
func TestRequirements(t *testing.T) {
	t.Parallel()
	names := testNames(t)
	rows := proofs(t, requirementID)
	for id, cells := range rows {
		proof := cells[3]
		found := testName.FindAllStringSubmatch(proof, -1)
		require.True(t, len(found) > 0 || strings.Contains(proof, "open") || strings.Contains(proof, "by design"), "%s names no test and is not open", id)
		for _, match := range found {
			require.True(t, names[match[1]], "%s names %s, which does not exist", id, match[1])
		}
	}
	require.Len(t, rows, 5+12+9+8, "rows")
}

// proofs returns the rows of REQUIREMENTS.md whose ids match, by their ids.
func proofs(t *testing.T, id *regexp.Regexp) map[string][]string {
	t.Helper()
	rows := map[string][]string{}
	for line := range strings.Lines(read(t, "tests/REQUIREMENTS.md")) {
		cells := strings.Split(line, "|")
		if len(cells) < 5 || !id.MatchString(strings.TrimSpace(cells[1])) {
			continue
		}
		name := strings.TrimSpace(cells[1])
		require.Nil(t, rows[name], "%s has two rows", name)
		rows[name] = cells
	}
	return rows
}

var (
	faultID   = regexp.MustCompile(`^B[0-9]{2,3}$`)
	faultsOf  = regexp.MustCompile(`B[0-9]{2,3}`)
	faultTest = regexp.MustCompile(`^Test.*?((?:B[0-9]{2,3})+)$`)
)

// Each failure has one row, whose tests and subtests exist, and each id in the name of
// a test has its row.
func TestFailures(t *testing.T) {
	t.Parallel()
	names, code := testNames(t), sources(t)
	rows := proofs(t, faultID)
	for id, cells := range rows {
		found := testName.FindAllStringSubmatch(cells[4], -1)
		require.NotEmpty(t, found, "%s names no test", id)
		for _, match := range found {
			require.True(t, names[match[1]], "%s names %s, which does not exist", id, match[1])
			subtest := strings.TrimPrefix(match[2], "/")
			require.Contains(t, code, subtest, "%s names a subtest that does not exist", id)
		}
	}
	require.NotEmpty(t, rows)
	for name := range names {
		if match := faultTest.FindStringSubmatch(name); match != nil {
			for _, id := range faultsOf.FindAllString(match[1], -1) {
				require.NotNil(t, rows[id], "%s has no row for %s", id, name)
			}
		}
	}
}

// The documents name only tests that exist.
func TestDocumentsNameTests(t *testing.T) {
	t.Parallel()
	names := testNames(t)
	documents, err := filepath.Glob(filepath.Join(root, "docs", "*.md"))
	require.NoError(t, err)
	require.NotEmpty(t, documents)
	for _, document := range append(documents, filepath.Join(root, "README.md")) {
		text, err := os.ReadFile(document)
		require.NoError(t, err)
		for _, match := range testName.FindAllStringSubmatch(string(text), -1) {
			require.True(t, names[match[1]], "%s names %s, which does not exist", document, match[1])
		}
	}
}

// sources is the text of all Go files but those of this package.
func sources(t *testing.T) string {
	var all strings.Builder
	eachSource(t, func(path string) error {
		if strings.Contains(filepath.ToSlash(path), "tests/meta/") {
			return nil
		}
		text, err := os.ReadFile(path)
		all.Write(text)
		return err
	})
	return all.String()
}

func eachSource(t *testing.T, do func(path string) error) {
	require.NoError(t, filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		if path != root && err == nil && entry.IsDir() && strings.HasPrefix(entry.Name(), ".") {
			return filepath.SkipDir // the data of running servers changes under our eyes
		}
		if err != nil || entry.IsDir() || !strings.HasSuffix(path, ".go") {
			return err
		}
		return do(path)
	}))
}

func testNames(t *testing.T) map[string]bool {
	names := map[string]bool{}
	eachSource(t, func(path string) error {
		parsed, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		for _, decl := range parsed.Decls {
			if f, ok := decl.(*ast.FuncDecl); ok {
				names[f.Name.Name] = true
			}
		}
		return nil
	})
	return names
}

func read(t *testing.T, path string) string {
	t.Helper()
	content, err := os.ReadFile(filepath.Join(root, path))
	require.NoError(t, err)
	return string(content)
}
