package queue

import (
	"context"
	"fmt"
	"log/slog"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
)

// Connect opens a connection as every Millrace process needs it: it reconnects for ever, buffers no publishes while cut off (a buffered one would be delivered long after it was reported failed), and
// notices a dead server within seconds. server is an in-process server, or nil to dial url. name shows in the server's listings.
// A server that is not there yet is no error: the connection waits for it.
func Connect(url, name string, server nats.InProcessConnProvider, log *slog.Logger) (*nats.Conn, error) {
	opts := []nats.Option{
		nats.Name(name),
		nats.ReconnectBufSize(-1),
		nats.MaxReconnects(-1),
		nats.RetryOnFailedConnect(true),
		// Else two refusals in a row, as when a server's users are reloaded, would close the connection for good.
		nats.IgnoreAuthErrorAbort(),
		nats.Timeout(2 * time.Second),
		nats.ReconnectWait(250 * time.Millisecond),
		nats.ReconnectJitter(100*time.Millisecond, 250*time.Millisecond),
		nats.PingInterval(2 * time.Second),
		nats.MaxPingsOutstanding(2),
		nats.DisconnectErrHandler(func(_ *nats.Conn, err error) {
			if err != nil {
				log.Warn("nats disconnected", "err", err)
			}
		}),
		nats.ReconnectHandler(func(nc *nats.Conn) { log.Info("nats reconnected", "server", nc.ConnectedServerName()) }),
		nats.ErrorHandler(func(_ *nats.Conn, sub *nats.Subscription, err error) {
			if sub != nil {
				log.Error("nats error", "subject", sub.Subject, "err", err)
				return
			}
			log.Error("nats error", "err", err)
		}),
	}
	if server != nil {
		opts = append(opts, nats.InProcessServer(server))
	}
	nc, err := nats.Connect(url, opts...)
	if err != nil {
		return nil, fmt.Errorf("connecting to NATS as %s: %w", name, err)
	}
	return nc, nil
}

// checkServer refuses servers that lack what this package is built on, and warns of those with known bugs.
func checkServer(nc *nats.Conn, log *slog.Logger) error {
	version := nc.ConnectedServerVersion()
	switch {
	case older(version, 2, 12, 0):
		return fmt.Errorf("nats-server %s lacks prioritized pulls and atomic publishes: use 2.15.3 or later", version)
	case older(version, 2, 15, 3):
		log.Warn("nats-server has known faults in waiting pulls: use 2.15.3 or later", "version", version)
	}
	return nil
}

func older(version string, want ...int) bool {
	version, _, _ = strings.Cut(strings.TrimPrefix(version, "v"), "-")
	parts := strings.Split(version, ".")
	for i, w := range want {
		have := 0
		if i < len(parts) {
			have, _ = strconv.Atoi(parts[i])
		}
		if have != w {
			return have < w
		}
	}
	return false
}

// waitConnected returns once the connection stands, or with ErrUnavailable when ctx ends first.
func (q *Queue) waitConnected(ctx context.Context) error {
	for {
		q.mu.Lock()
		up := q.up
		q.mu.Unlock()
		if q.nc.IsConnected() {
			return nil
		}
		if q.nc.IsClosed() {
			return fmt.Errorf("%w: the connection is closed", ErrUnavailable)
		}
		select {
		case <-up:
		case <-ctx.Done():
			return fmt.Errorf("%w: not connected", ErrUnavailable)
		case <-q.stop:
			return fmt.Errorf("%w: the queue is closed", ErrUnavailable)
		}
	}
}

// watch ends pulls that a lost connection took with it and has the models repaired, each time that the connection comes back.
func (q *Queue) watch() {
	for {
		select {
		case <-q.stop:
			return
		case s, open := <-q.status:
			if !open {
				return // the connection is closed for good
			}
			if s != nats.CONNECTED {
				q.mu.Lock()
				q.unlink() // ends the calls under way
				q.mu.Unlock()
				continue
			}
		}
		q.mu.Lock()
		close(q.up)
		q.up = make(chan struct{})
		if q.link.Err() != nil {
			q.link, q.unlink = context.WithCancel(q.life)
		}
		pullers := make([]*Puller, 0, len(q.pullers))
		for p := range q.pullers {
			pullers = append(pullers, p)
		}
		q.mu.Unlock()
		// The server may have come back without its memory streams.
		q.models.Range(func(_, v any) bool {
			v.(*model).ok.Store(false)
			return true
		})
		generation := q.nc.Stats().Reconnects
		for _, p := range pullers {
			p.cut(generation)
		}
		select {
		case q.repair <- struct{}{}:
		default: // one is due already
		}
	}
}

// repairs makes the streams and consumers of all models that this process has used, so that a job that arrives after a server's restart finds them.
// Pullers do the same for their own model; here it is for processes that only publish.
func (q *Queue) repairs() {
	for {
		select {
		case <-q.stop:
			return
		case <-q.repair:
		}
		q.models.Range(func(_, v any) bool {
			m := v.(*model)
			if err := q.ensure(q.life, m, m.epoch.Load()); err != nil && q.life.Err() == nil && q.nc.IsConnected() {
				// Whoever misses the stream next tries again. After another loss of the connection these repairs do.
				q.log.Warn("repairing a model's streams after a reconnection", "model", m.name, "err", err)
			}
			return q.life.Err() == nil
		})
	}
}
