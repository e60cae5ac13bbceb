package results

import (
	"errors"
	"fmt"
	"net"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/logging"
	"github.com/redis/go-redis/v9/maintnotifications"
)

// connect makes a client for the URL. Nothing is dialled yet.
func connect(url string) (db redis.UniversalClient, isCluster bool, err error) {
	logging.Disable() // what the client would print to stderr comes to the caller as an error, too
	first, rest, isCluster := strings.Cut(url, ",")
	o := &redis.Options{Addr: first}
	if !isCluster || strings.Contains(first, "://") {
		if o, err = redis.ParseURL(first); err != nil {
			// The parser's own message may quote the password.
			return nil, false, errors.New("the Redis URL is not valid: use redis://[user:password@]host:port[/db], rediss://… for TLS, unix://[user:password@]/path, or host:port,host:port,… for a cluster")
		}
	}
	single := redis.Options{
		Network: o.Network, Addr: o.Addr, Username: o.Username, Password: o.Password, DB: o.DB, TLSConfig: o.TLSConfig,
		// RESP 2: scripts answer alike on all servers.
		Protocol: 2, DisableIdentity: true,
		MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
		// A hung server costs one read and is asked once more within opTimeout; a refused connection is tried three times in about half a second.
		ContextTimeoutEnabled: true,
		DialTimeout:           time.Second, DialerRetries: 1, ReadTimeout: 1500 * time.Millisecond, WriteTimeout: opTimeout,
		MaxRetries: 2, MinRetryBackoff: 10 * time.Millisecond, MaxRetryBackoff: 300 * time.Millisecond,
		// All commands are short; pipelines and single commands share one pool. Connections are dialled as they are needed.
		PoolSize: 64, PoolTimeout: 2 * time.Second, PipelinePoolSize: -1,
		// A server that was demoted behind its name is left: at once when it answers READONLY, which the client takes as a bad connection, and in any case in this time.
		ConnMaxLifetime: 10 * time.Minute,
	}
	if !isCluster {
		return redis.NewClient(&single), false, nil
	}
	if o.DB != 0 {
		return nil, false, fmt.Errorf("the Redis URL names database %d: a cluster has only 0", o.DB)
	}
	addrs := append([]string{o.Addr}, strings.Split(rest, ",")...)
	for _, a := range addrs {
		if _, _, err := net.SplitHostPort(a); err != nil {
			return nil, false, errors.New("the Redis URL lists an address that is not host:port")
		}
	}
	return redis.NewClusterClient(&redis.ClusterOptions{
		Addrs: addrs, Username: single.Username, Password: single.Password, TLSConfig: single.TLSConfig,
		Protocol: single.Protocol, DisableIdentity: true, MaintNotificationsConfig: single.MaintNotificationsConfig,
		ContextTimeoutEnabled: true, DialTimeout: single.DialTimeout, DialerRetries: 1, ReadTimeout: single.ReadTimeout, WriteTimeout: single.WriteTimeout,
		// A redirection counts as a retry.
		MaxRedirects: 3, MaxRetries: -1, MinRetryBackoff: single.MinRetryBackoff, MaxRetryBackoff: single.MaxRetryBackoff,
		PoolSize: single.PoolSize, PoolTimeout: single.PoolTimeout, PipelinePoolSize: -1, ConnMaxLifetime: single.ConnMaxLifetime,
	}), true, nil
}
