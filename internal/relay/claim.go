package relay

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/millrace/millrace/internal/job"
)

// claimTimeout is how long a claim waits for the API.
const claimTimeout = 2 * time.Second

// ClaimRequest is a worker's wish to run a live job.
type ClaimRequest struct {
	ID         job.ID     `json:"id"`
	Worker     job.Worker `json:"worker"`
	AckSubject string     `json:"ack_subject"`
	Charged    bool       `json:"-"`
}

// Claimed is the API's yes: the attempt's token, and the number of tries charged before.
type Claimed struct {
	Token   job.Token `json:"token"`
	Charged int       `json:"charged"`
	// Shown is what the client has already got of an earlier attempt's stream: whole SSE events as they were sent. It is set only where another attempt may continue it; else nothing was shown.
	Shown []byte `json:"shown,omitempty"`
}

// claimReply is the API's answer.
type claimReply struct {
	Claimed
	// Refused is why not: refusedGone or refusedHeld.
	Refused string `json:"refused,omitempty"`
}

const (
	refusedGone = "gone"
	refusedHeld = "held"
)

// Claim asks the API for the job. ErrGone (settle as cancelled, ack), ErrHeld (nak), ErrUnreachable (nak; after 2 s, or at once if nobody listens). After ErrUnreachable it may be ours unknowingly: claiming again
// with the same AckSubject then gets the same token, and for others the claim is void after 3 s. Open the Answer right after the claim.
func (r *Relay) Claim(ctx context.Context, api job.API, c ClaimRequest) (*Claimed, error) {
	data, err := json.Marshal(c)
	if err != nil {
		return nil, fmt.Errorf("claiming job %s: %w", c.ID, err)
	}
	call, cancel := context.WithTimeout(ctx, claimTimeout)
	defer cancel()
	m, err := r.nc.RequestWithContext(call, liveSubject+token(string(api))+".claim", data)
	if err != nil {
		if ctx.Err() != nil {
			return nil, fmt.Errorf("claiming job %s: %w", c.ID, ctx.Err())
		}
		return nil, fmt.Errorf("claiming job %s: %w: %w", c.ID, ErrUnreachable, err)
	}
	var reply claimReply
	if err := json.Unmarshal(m.Data, &reply); err != nil {
		return nil, fmt.Errorf("claiming job %s: reading the reply: %w", c.ID, err)
	}
	switch reply.Refused {
	case "":
		return &reply.Claimed, nil
	case refusedGone:
		return nil, fmt.Errorf("claiming job %s: %w", c.ID, ErrGone)
	default: // also what a newer API may say: nobody loses anything by trying again
		return nil, fmt.Errorf("claiming job %s: %w", c.ID, ErrHeld)
	}
}
