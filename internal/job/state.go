package job

import "slices"

// State is where a job stands.
//
//	queued -> running -> completed | failed | cancelled | expired
//	running -> queued on a retry
type State string

// The states. Accepting is never shown to clients: the record exists and the message may not yet.
const (
	Accepting State = "accepting"
	Queued    State = "queued"
	Running   State = "running"
	Completed State = "completed"
	Failed    State = "failed"
	Cancelled State = "cancelled"
	Expired   State = "expired"
)

// Ended tells whether s is terminal.
func (s State) Ended() bool {
	return s == Completed || s == Failed || s == Cancelled || s == Expired
}

// Public is s as clients see it.
func (s State) Public() State {
	if s == Accepting {
		return Queued
	}
	return s
}

// PublicStates lists the states that clients see.
func PublicStates() []State { return []State{Queued, Running, Completed, Failed, Cancelled, Expired} }

// ParseState reads a state that clients see.
func ParseState(s string) (State, bool) {
	st := State(s)
	return st, slices.Contains(PublicStates(), st)
}

// Outcome is how a job ended. Its JSON outlives deploys.
type Outcome struct {
	State State `json:"state"`
	// Token is the attempt that ended the job, 0 if it ended without one (cancelled while queued, expired).
	Token Token `json:"token,omitempty"`
	// StatusCode and ContentType are those of the engine's answer; 0 and "" if none came.
	StatusCode  int       `json:"status_code,omitempty"`
	ContentType string    `json:"content_type,omitempty"`
	Error       *Error    `json:"error,omitempty"`
	Usage       *Usage    `json:"usage,omitempty"`
	Attempts    []Attempt `json:"attempts,omitempty"`
	Started     Millis    `json:"started,omitempty"`
	FirstToken  Millis    `json:"first_token,omitempty"`
	Finished    Millis    `json:"finished"`
	// LastEvent is the number of the job's last event, its `done`; 0 if it kept none.
	LastEvent int64 `json:"last_event,omitempty"`
	// ResultSize is the length in bytes of the engine's answer; Blob names the stored object that holds it where it is too large for a record.
	ResultSize int64  `json:"result_size,omitempty"`
	Blob       string `json:"blob,omitempty"`
	// Erased marks a tombstone: the job ended so, and its owner has erased the rest.
	Erased bool `json:"erased,omitempty"`
}

// Attempt is one try at a job.
type Attempt struct {
	Worker  Worker `json:"worker"`
	Started Millis `json:"started"`
	Ended   Millis `json:"ended,omitempty"`
	// Outcome says how the attempt ended: a terminal state, or the reason why the job was given back.
	Outcome string `json:"outcome,omitempty"`
}

// Usage counts tokens as the engine reported them.
type Usage struct {
	PromptTokens     Tokens `json:"prompt_tokens"`
	CompletionTokens Tokens `json:"completion_tokens"`
	TotalTokens      Tokens `json:"total_tokens"`
	CachedTokens     Tokens `json:"cached_tokens,omitempty"`
	ReasoningTokens  Tokens `json:"reasoning_tokens,omitempty"`
}

// EventKind names what an entry of a job's event stream tells.
type EventKind string

// The kinds of events.
const (
	EventStatus EventKind = "status"
	EventToken  EventKind = "token"
	EventReset  EventKind = "reset"
	EventDone   EventKind = "done"
	EventError  EventKind = "error"
	EventGap    EventKind = "gap"
)

// Event is one numbered entry of a job's event stream. N rises over all attempts.
type Event struct {
	N     int64
	Token Token
	Kind  EventKind
	// Data is the event's JSON text; several engine chunks that share one event are parted by a newline.
	Data []byte
}
