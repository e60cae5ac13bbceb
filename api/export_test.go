package api

import (
	"context"
	"time"

	"github.com/labstack/echo/v4"

	"github.com/millrace/millrace/internal/cluster"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/queue"
	"github.com/millrace/millrace/internal/results"
)

// Publisher lets a test stand between the server and its queue.
type Publisher = publisher

// SetPublisher replaces what stores messages. Call it before the first request.
func (s *Server) SetPublisher(f func(Publisher) Publisher) { s.publisher = f(s.publisher) }

// PublisherFunc is a Publisher.
type PublisherFunc func(ctx context.Context, kind queue.Kind, lane queue.Lane, m *queue.Message) error

// Enqueue calls f.
func (f PublisherFunc) Enqueue(ctx context.Context, kind queue.Kind, lane queue.Lane, m *queue.Message) error {
	return f(ctx, kind, lane, m)
}

// HopelessFrom is how long heartbeats must have been heard for a call without hope to have been ended, if its HopelessFor is next to nothing: by the second look.
const HopelessFrom = settleTime + 3*heldPeriod

// Held counts the calls that the server holds.
func (s *Server) Held() int { return s.held.len() }

// Routes are the routes that the server has.
func (s *Server) Routes() []*echo.Route { return s.echo.Routes() }

// AddRoute adds a route, to see what happens around its handler.
func (s *Server) AddRoute(path string, h echo.HandlerFunc) { s.echo.GET(path, h) }

// Ahead is what goes before a job: jobs, and their tokens; false if nobody knows.
func Ahead(j *job.Job, p *results.Place, q *cluster.QueueInfo, mean float64) (jobs int, tokens float64, known bool) {
	a, ok := aheadOf(j, p, q, mean)
	return a.jobs, a.tokens, ok
}

var (
	UntilRoom   = untilRoom
	HashBody    = hashBody
	HashKey     = hashKey
	MendError   = mendError
	ValidJSON   = validJSON
	Chunks      = chunks
	ParsePrefer = parsePrefer
	Matches     = matches
)

func (p preference) String() string {
	if p.async {
		return "async " + p.wait.String()
	}
	return "sync " + p.wait.String()
}

// Pace is how fast jobs end.
type Pace struct{ p *pace }

// NewPace has measured nothing.
func NewPace() Pace { return Pace{newPace()} }

func (p Pace) Came(now time.Time, m job.Model, expected job.Tokens, live bool) {
	p.p.came(now, m, expected, live)
}

func (p Pace) Since(m job.Model, t time.Time) (job.Tokens, float64) { return p.p.since(m, t) }

func (p Pace) Tokens(m job.Model, workers []cluster.Member, mean float64) float64 {
	return p.p.tokens(m, workers, mean)
}

func (p Pace) Observe(now time.Time, workers []cluster.Member, waits bool) {
	waiting := map[job.Model]bool{}
	for _, w := range workers {
		for _, m := range w.Worker.Models {
			waiting[m] = waits
		}
	}
	p.p.observe(now, workers, waiting)
}
func (p Pace) Of(m job.Model) float64 { return p.p.of(m) }
