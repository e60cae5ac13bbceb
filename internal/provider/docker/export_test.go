package docker

import (
	"time"

	"github.com/moby/moby/api/types/jsonstream"
)

// Pull is what is known of the loading of an image.
type Pull struct{ l pull }

func NewPull() *Pull { return &Pull{pull{layers: make(map[string]layer)}} }

func (p *Pull) Hear(m jsonstream.Message) (moved, unpacking bool) { return p.l.hear(m) }
func (p *Pull) Progress() string                                  { return p.l.progress() }

// SetGrace sets how long a worker has to end once its drain is over. It counts if nothing was done before.
func (p *Provider) SetGrace(d time.Duration) { p.grace = d }

// SetPatience sets how long a start waits for an image, and after how long without progress that is given up.
func (p *Provider) SetPatience(patience, stall, unpacking time.Duration) {
	p.patience, p.stall, p.unpacking = patience, stall, unpacking
}
