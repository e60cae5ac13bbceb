// Package archtest holds the rules of who may import whom, as tables, and the tests that hold the module to them. A new edge is a new line in a
// table, so that it is seen in review.
package archtest

// Edges lists, for each package of the module, the packages of the module that it may import. Its tests may import these too, and what
// TestEdges adds. Every package has its line: a new one without a line fails the test.
//
// The order is cmd -> role -> adapter -> job -> std: roles never import each other, and adapters never import each other.
var Edges = map[string][]string{
	// The nouns.
	"internal/job": {},

	// Adapters: one outside system each.
	"internal/blob":            {"internal/job"},
	"internal/cluster":         {"internal/job"},
	"internal/embedded":        {},
	"internal/engine":          {"internal/job"},
	"internal/gpu":             {},
	"internal/engine/emulator": {"internal/job"},
	"internal/ledger":          {"internal/job", "migrations"},
	"internal/queue":           {"internal/job"},
	"internal/relay":           {"internal/job"},
	"internal/results":         {"internal/job"},

	// The client's side of the HTTP API.
	"internal/client": {"internal/job"},

	// The schema.
	"migrations": {},

	// What several roles do alike.
	"internal/batch":     {"internal/job"},
	"internal/fairshare": {"internal/job"},
	"internal/responses": {"internal/job"},
	"internal/scale":     {"internal/job"},
	"internal/affinity":  {"internal/cluster", "internal/job"},
	"internal/schedule":  {"internal/job"},
	"internal/admission": {"internal/job"},
	"internal/settle":    {"internal/blob", "internal/job", "internal/queue", "internal/relay", "internal/results"},

	// Roles.
	"api": {
		"internal/admission", "internal/affinity", "internal/batch", "internal/blob", "internal/cluster", "internal/job", "internal/ledger", "internal/queue", "internal/relay", "internal/responses", "internal/results", "internal/scale", "internal/settle",
	},
	"dispatcher": {
		"internal/batch", "internal/blob", "internal/cluster", "internal/fairshare", "internal/job", "internal/ledger", "internal/queue", "internal/relay", "internal/results", "internal/settle",
	},
	"worker": {
		"internal/affinity", "internal/blob", "internal/cluster", "internal/engine", "internal/gpu", "internal/job", "internal/queue", "internal/relay", "internal/responses", "internal/results", "internal/schedule", "internal/settle",
	},

	"autoscaler": {"internal/cluster", "internal/job", "internal/ledger", "internal/provider", "internal/scale"},

	// Providers of workers.
	"internal/provider":            {"internal/job", "internal/scale"},
	"internal/provider/command":    {"internal/job", "internal/provider", "internal/scale"},
	"internal/provider/docker":     {"internal/job", "internal/provider", "internal/scale"},
	"internal/provider/kubernetes": {"internal/job", "internal/provider", "internal/scale"},
	"internal/provider/process":    {"internal/job", "internal/provider", "internal/scale"},

	// For main alone.
	"internal/config":    {},
	"internal/telemetry": {},

	// Whoever puts the parts together.
	"cmd/millrace":      {Everything},
	"bench":             {Everything},
	"bench/batch":       {Everything},
	"bench/chart":       {},
	"bench/routing":     {Everything},
	"bench/scaling":     {Everything},
	"bench/workload":    {},
	"internal/platform": {Everything},

	// The prompts of the demo, and clients to copy from.
	"examples":           {},
	"examples/openai-go": {},

	// For tests alone.
	"internal/archtest":                     {},
	"internal/engine/emulator/emulatortest": {"internal/engine/emulator"},
	"internal/provider/providertest":        {"internal/job", "internal/provider", "internal/scale"},
	"internal/results/resultstest":          {"internal/job", "internal/results"},
	"internal/testenv":                      {"internal/embedded", "internal/ledger"},
}

// TestEdges lists what the tests of a package, or of all below a folder that ends in "/...", may import beyond its Edges.
var TestEdges = map[string][]string{
	"...":                   {"internal/testenv", "internal/embedded", "internal/engine/emulator", "internal/engine/emulator/emulatortest", "internal/job"},
	"internal/provider/...": {"internal/provider/providertest"},
	"internal/results":      {"internal/results/resultstest"},
	"test/...":              {Everything},
}

// Everything allows every package of the module.
const Everything = "*"

// Reserved lists what only some packages may import: of the module, of other modules, of the standard library. A path stands for all below it; the
// longest that fits counts.
var Reserved = map[string]Reservation{
	"github.com/redis/go-redis":                                          {Importers: []string{"internal/results", "internal/results/resultstest"}},
	"github.com/nats-io/nats.go/jetstream":                               {Importers: []string{"internal/queue", "internal/cluster", "internal/blob", "bench"}, Tests: true},
	"github.com/synadia-io/orbit.go":                                     {Importers: []string{"internal/queue"}},
	"github.com/nats-io/nats.go":                                         {Importers: []string{"internal/queue", "internal/cluster", "internal/blob", "internal/relay", "internal/embedded", "internal/testenv", "internal/platform", "cmd/millrace", "bench"}, Tests: true},
	"github.com/nats-io/nats-server":                                     {Importers: []string{"internal/embedded"}, Tests: true},
	"github.com/alicebob/miniredis":                                      {Importers: []string{"internal/embedded"}, Tests: true},
	"github.com/labstack/echo":                                           {Importers: []string{"api"}},
	"github.com/spf13/cobra":                                             {Importers: []string{"cmd/millrace"}},
	"github.com/NVIDIA/go-nvml":                                          {Importers: []string{"internal/gpu"}},
	"github.com/vbauerster/mpb":                                          {Importers: []string{"cmd/millrace"}},
	"github.com/moby/moby":                                               {Importers: []string{"internal/provider/docker"}},
	"k8s.io":                                                             {Importers: []string{"internal/provider/kubernetes"}},
	"github.com/openai/openai-go":                                        {Importers: []string{"examples/openai-go"}, Tests: true},
	"database/sql":                                                       {Importers: []string{"internal/ledger"}},
	"github.com/jackc/pgx":                                               {Importers: []string{"internal/ledger"}},
	"modernc.org/sqlite":                                                 {Importers: []string{"internal/ledger"}},
	"github.com/pressly/goose":                                           {Importers: []string{"internal/ledger"}},
	"github.com/go-redis/redis_rate":                                     {Importers: []string{"internal/results"}},
	"github.com/minio/minio-go":                                          {Importers: []string{"internal/blob"}},
	"github.com/johannesboyne/gofakes3":                                  {Importers: []string{"internal/blob"}},
	"github.com/millrace/millrace/internal/config":                       {Importers: []string{"cmd/millrace"}},
	"github.com/millrace/millrace/internal/telemetry":                    {Importers: []string{"cmd/millrace", "bench"}},
	"github.com/millrace/millrace/internal/platform":                     {Importers: []string{"cmd/millrace", "bench", "bench/routing"}, Tests: true},
	"github.com/millrace/millrace/internal/engine/emulator/emulatortest": {Tests: true},
	"github.com/millrace/millrace/internal/results/resultstest":          {Tests: true},
	"github.com/millrace/millrace/internal/testenv":                      {Tests: true},
}

// Reservation names the packages that may import something.
type Reservation struct {
	Importers []string
	// Tests: every package's tests may import it too. Otherwise only the importers' own tests.
	Tests bool
}
