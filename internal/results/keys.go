package results

import (
	"hash/fnv"
	"net/url"
	"strconv"
	"time"

	"github.com/millrace/millrace/internal/job"
)

// shards is the number of parts of the live index. It is fixed: another number would not find what is there.
const shards = 16

// The keys of one job. They share a slot.
func (s *Store) recordKey(id job.ID) string { return s.cfg.Prefix + "{" + string(id) + "}:r" }
func (s *Store) eventsKey(id job.ID) string { return s.cfg.Prefix + "{" + string(id) + "}:e" }
func (s *Store) bodyKey(id job.ID) string   { return s.cfg.Prefix + "{" + string(id) + "}:b" }
func (s *Store) answerKey(id job.ID) string { return s.cfg.Prefix + "{" + string(id) + "}:o" }

// Names come from outside: escaped, so that no two are the same key.
func (s *Store) listKey(t job.Tenant) string {
	return s.cfg.Prefix + "list:" + url.QueryEscape(string(t))
}

func (s *Store) heldKey(w job.Worker) string {
	return s.cfg.Prefix + "held:" + url.QueryEscape(string(w))
}

func (s *Store) idempotencyKey(t job.Tenant, key string) string {
	return s.cfg.Prefix + "key:" + url.QueryEscape(string(t)) + ":" + url.QueryEscape(key)
}

func (s *Store) holdersKey() string { return s.cfg.Prefix + "holders" }

func (s *Store) shardKey(shard int, what string) string {
	return s.cfg.Prefix + "{" + strconv.Itoa(shard) + "}:" + what
}

// liveKey is the part of the live index that id belongs to.
func (s *Store) liveKey(id job.ID) string {
	h := fnv.New32a()
	_, _ = h.Write([]byte(id)) // never fails
	return s.shardKey(int(h.Sum32()%shards), "live")
}

// expireAt is when a job's keys expire.
func (s *Store) expireAt(j *job.Job) int64 {
	return int64(max(j.Expires, j.Created)) + s.cfg.Retention.Milliseconds()
}

// listTTL is how long a list is kept after its last new job: until the last record that it leads to is gone.
func (s *Store) listTTL() time.Duration { return longestDeadline + s.cfg.Retention + 24*time.Hour }
