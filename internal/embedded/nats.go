// Package embedded runs a NATS server and a Redis-compatible store inside this process, for `millrace up` and for tests.
package embedded

import (
	"crypto/subtle"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"strconv"
	"time"

	natsserver "github.com/nats-io/nats-server/v2/server"
)

// NATSConfig of an embedded server. Zero works for a server on a temporary folder that the caller names.
type NATSConfig struct {
	// Dir holds the JetStream store.
	Dir string
	// Relaxed syncs the store every 100 ms and not after each write: a power loss then loses what was accepted in that time.
	Relaxed bool
	// Listen is the address of an open port, "" for in-process connections alone.
	Listen string
	// User and Password that every connection needs, in-process ones too; "" for none.
	User, Password string
	// MaxPayload in bytes; default 8 MiB.
	MaxPayload int32
	// StoreLimit of JetStream's files in bytes; default: what the disk has, as the server finds it. MemoryLimit likewise.
	StoreLimit, MemoryLimit int64
	Log                     *slog.Logger
}

// NATS is a running server. It is a nats.InProcessConnProvider.
type NATS struct {
	server *natsserver.Server
	user   *url.Userinfo // nil if none is needed
}

// StartNATS returns once the server takes connections and JetStream has recovered its store.
func StartNATS(cfg NATSConfig) (*NATS, error) {
	if cfg.Dir == "" {
		return nil, errors.New("embedded NATS: no folder for its store is given")
	}
	o := &natsserver.Options{
		ServerName: "millrace-embedded", JetStream: true, StoreDir: cfg.Dir, NoSigs: true,
		SyncAlways: !cfg.Relaxed,
		MaxPayload: cfg.MaxPayload, JetStreamMaxStore: cfg.StoreLimit, JetStreamMaxMemory: cfg.MemoryLimit,
		DontListen: cfg.Listen == "",
		// Windows of a second for pings would cut slow laptops off; the client pings more often than this.
		PingInterval: time.Minute,
	}
	if cfg.Relaxed {
		o.SyncInterval = 100 * time.Millisecond
	}
	if cfg.User != "" {
		// The server's own user and password make it warn of a file that holds them, and there is none.
		o.CustomClientAuthentication = password{cfg.User, cfg.Password}
	}
	if o.MaxPayload == 0 {
		o.MaxPayload = 8 << 20
	}
	if cfg.Listen != "" {
		host, port, err := net.SplitHostPort(cfg.Listen)
		if err != nil {
			return nil, fmt.Errorf("embedded NATS: reading the address %q: %w", cfg.Listen, err)
		}
		if o.Port, err = strconv.Atoi(port); err != nil {
			return nil, fmt.Errorf("embedded NATS: reading the port of %q: %w", cfg.Listen, err)
		}
		if o.Host = host; o.Port == 0 {
			o.Port = natsserver.RANDOM_PORT
		}
	}
	s, err := natsserver.NewServer(o)
	if err != nil {
		return nil, fmt.Errorf("making the embedded NATS server: %w", err)
	}
	log := cfg.Log
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	s.SetLoggerV2(serverLog{log}, false, false, false)
	go s.Start() // ends with Shutdown
	if !s.ReadyForConnections(30 * time.Second) {
		s.Shutdown()
		return nil, fmt.Errorf("the embedded NATS server on %s is not ready after 30 s: is another process using the folder?", cfg.Dir)
	}
	if !s.JetStreamEnabled() {
		s.Shutdown()
		return nil, fmt.Errorf("the embedded NATS server could not open its store in %s", cfg.Dir)
	}
	n := &NATS{server: s}
	if cfg.User != "" {
		n.user = url.UserPassword(cfg.User, cfg.Password)
	}
	return n, nil
}

// password lets in who knows it.
type password struct{ user, password string }

// Check is called for each connection.
func (p password) Check(c natsserver.ClientAuthentication) bool {
	o := c.GetOpts()
	same := func(a, b string) int { return subtle.ConstantTimeCompare([]byte(a), []byte(b)) }
	return same(o.Username, p.user)&same(o.Password, p.password) == 1
}

// InProcessConn makes NATS a nats.InProcessConnProvider.
func (n *NATS) InProcessConn() (net.Conn, error) { return n.server.InProcessConn() }

// URL is the address of the open port, as this machine reaches it, with the password if there is one; "" if there is no port.
func (n *NATS) URL() string {
	a, ok := n.server.Addr().(*net.TCPAddr)
	if !ok || a == nil {
		return ""
	}
	host := a.IP.String()
	if a.IP.IsUnspecified() {
		host = "127.0.0.1"
	}
	u := url.URL{Scheme: "nats", User: n.user, Host: net.JoinHostPort(host, strconv.Itoa(a.Port))}
	return u.String()
}

// Shutdown stops the server and waits for it.
func (n *NATS) Shutdown() {
	n.server.Shutdown()
	n.server.WaitForShutdown()
}

// serverLog passes what the server has to say on, without its debug lines.
type serverLog struct{ log *slog.Logger }

func (l serverLog) Noticef(format string, v ...any) {
	l.log.Debug("nats server", "text", fmt.Sprintf(format, v...))
}

func (l serverLog) Warnf(format string, v ...any) {
	l.log.Warn("nats server", "text", fmt.Sprintf(format, v...))
}

func (l serverLog) Errorf(format string, v ...any) {
	l.log.Error("nats server", "text", fmt.Sprintf(format, v...))
}

func (l serverLog) Fatalf(format string, v ...any) {
	l.log.Error("nats server", "text", fmt.Sprintf(format, v...))
}
func (l serverLog) Debugf(string, ...any) {}
func (l serverLog) Tracef(string, ...any) {}
