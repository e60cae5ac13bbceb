package blob

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/nats-io/nuid"
)

const (
	bucket       = "blobs"
	bucketStream = "OBJ_" + bucket
	chunkPrefix  = "$O." + bucket + ".C."
	metaPrefix   = "$O." + bucket + ".M."
	digestPrefix = "SHA-256="
	// chunkSize is what one message holds: each costs the server a sync, and a server's default limit is four times that.
	chunkSize = 256 << 10
	// seqsKey is the field of an object's metadata that holds the sequences of its chunks, for whoever reads parts of it. Objects that other tools have written have none.
	seqsKey = "millrace-chunks"
	// callTimeout bounds each request, not the whole object.
	callTimeout = 5 * time.Second
)

// objectStore reads and writes the Object Store's own form, so that its tools can be used, but by its own calls: the client library's Put makes an
// object visible whose chunk failed, its Get ends any object after five seconds without a deadline, and its Delete leaves a marker for ever.
type objectStore struct {
	nc *nats.Conn
	js jetstream.JetStream
}

// OpenJetStream keeps objects in the JetStream Object Store bucket "blobs", created with replicas if missing.
func OpenJetStream(ctx context.Context, nc *nats.Conn, replicas int) (Store, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	js, err := jetstream.New(nc)
	if err != nil {
		return nil, fmt.Errorf("opening the object store: %w", err)
	}
	cfg := jetstream.ObjectStoreConfig{Bucket: bucket, Storage: jetstream.FileStorage, Replicas: max(replicas, 1)}
	if _, err := js.CreateOrUpdateObjectStore(ctx, cfg); err != nil {
		return nil, fmt.Errorf("opening the object store: %w", unavailable(err))
	}
	return &objectStore{nc, js}, nil
}

func metaSubject(name string) string {
	return metaPrefix + base64.URLEncoding.EncodeToString([]byte(name))
}

func (s *objectStore) Put(ctx context.Context, name string, r io.Reader) (int64, error) {
	if err := checkName(name); err != nil {
		return 0, fmt.Errorf("storing an object: %w", err)
	}
	info := jetstream.ObjectInfo{
		ObjectMeta: jetstream.ObjectMeta{Name: name, Opts: &jetstream.ObjectMetaOptions{ChunkSize: chunkSize}},
		Bucket:     bucket, NUID: nuid.Next(),
	}
	if err := s.put(ctx, &info, r); err != nil {
		s.undo(ctx, &info)
		return 0, fmt.Errorf("storing object %s: %w", name, err)
	}
	return int64(info.Size), nil
}

func (s *objectStore) put(ctx context.Context, info *jetstream.ObjectInfo, r io.Reader) error {
	before, err := s.info(ctx, info.Name)
	if err != nil && !errors.Is(err, ErrNotFound) {
		return err
	}
	sum := sha256.New()
	chunk := make([]byte, chunkSize)
	var seqs []byte // those of the chunks, as written by binary.AppendUvarint: each less the one before
	for last, seq := false, uint64(0); !last; {
		if err := ctx.Err(); err != nil {
			return err
		}
		n, err := io.ReadFull(r, chunk)
		last = errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF)
		if err != nil && !last {
			return err
		}
		if n == 0 {
			break
		}
		sum.Write(chunk[:n])
		// One after the other: that they stand in order is what makes them the object.
		at, err := s.publish(ctx, &nats.Msg{Subject: chunkPrefix + info.NUID, Data: chunk[:n]})
		if err != nil {
			return err
		}
		seqs = binary.AppendUvarint(seqs, at-seq)
		seq = at
		info.Size += uint64(n)
		info.Chunks++
	}
	info.Digest = digestPrefix + base64.URLEncoding.EncodeToString(sum.Sum(nil))
	info.Metadata = map[string]string{seqsKey: base64.StdEncoding.EncodeToString(seqs)}
	text, err := json.Marshal(info)
	if err != nil {
		return err
	}
	// With this message the object becomes visible, whole.
	_, err = s.publish(ctx, &nats.Msg{Subject: metaSubject(info.Name), Header: nats.Header{jetstream.MsgRollup: {jetstream.MsgRollupSubject}}, Data: text})
	if err != nil {
		return err
	}
	if before != nil {
		_ = s.purge(ctx, chunkPrefix+before.NUID) // nothing points to them any more: at worst they take space
	}
	return nil
}

// undo takes away what a Put that failed has left. Where the store does not answer, chunks may remain, which no reader sees: see Tidy.
func (s *objectStore) undo(ctx context.Context, info *jetstream.ObjectInfo) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), callTimeout) // the caller's end is a reason to clean up
	defer cancel()
	if info.Digest != "" { // the answer to the last message may have been lost, and the object be visible
		if now, err := s.info(ctx, info.Name); err == nil && now.NUID == info.NUID {
			_ = s.purge(ctx, metaSubject(info.Name))
		}
	}
	_ = s.purge(ctx, chunkPrefix+info.NUID)
}

// publish stores a message, and returns its sequence.
func (s *objectStore) publish(ctx context.Context, m *nats.Msg) (uint64, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	reply, err := s.nc.RequestMsgWithContext(ctx, m)
	if err != nil {
		return 0, unavailable(err)
	}
	var ack struct {
		Seq uint64 `json:"seq"`
	}
	err = refused(reply.Data, &ack)
	return ack.Seq, err
}

// refused reads an API answer into what into, and returns the server's error if it is one.
func refused(data []byte, into any) error {
	var answer struct {
		Error *jetstream.APIError `json:"error"`
	}
	if err := json.Unmarshal(data, &answer); err != nil {
		return unavailable(err)
	}
	if answer.Error != nil {
		if answer.Error.ErrorCode == jetstream.JSErrCodeMessageNotFound {
			return ErrNotFound
		}
		return unavailable(answer.Error)
	}
	if into == nil {
		return nil
	}
	if err := json.Unmarshal(data, into); err != nil {
		return unavailable(err)
	}
	return nil
}

func (s *objectStore) call(ctx context.Context, what string, request, into any) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	data, err := json.Marshal(request)
	if err != nil {
		return err
	}
	reply, err := s.nc.RequestWithContext(ctx, "$JS.API.STREAM."+what+"."+bucketStream, data)
	if err != nil {
		return unavailable(err)
	}
	return refused(reply.Data, into)
}

func (s *objectStore) purge(ctx context.Context, subject string) error {
	return s.call(ctx, "PURGE", map[string]string{"filter": subject}, nil)
}

// message is one message of the bucket.
type message struct {
	Seq  uint64    `json:"seq"`
	Data []byte    `json:"data"`
	Time time.Time `json:"time"`
}

// next reads the first message on subject from sequence seq on: from any replica, and if that has none from the leader, whose ErrNotFound is certain.
func (s *objectStore) next(ctx context.Context, subject string, seq uint64) (*message, error) {
	request := map[string]any{"seq": seq, "next_by_subj": subject}
	data, err := json.Marshal(request)
	if err != nil {
		return nil, err
	}
	direct, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	m, err := s.nc.RequestWithContext(direct, "$JS.API.DIRECT.GET."+bucketStream, data)
	if err == nil && m.Header.Get(jetstream.SubjectHeader) != "" {
		out := message{Data: m.Data}
		if _, err := fmt.Sscan(m.Header.Get(jetstream.SequenceHeader), &out.Seq); err != nil {
			return nil, unavailable(err)
		}
		if out.Time, err = time.Parse(time.RFC3339Nano, m.Header.Get(jetstream.TimeStampHeaer)); err != nil {
			return nil, unavailable(err)
		}
		return &out, nil
	}
	if err != nil && !errors.Is(err, nats.ErrNoResponders) {
		return nil, unavailable(err)
	}
	var answer struct {
		Message message `json:"message"`
	}
	if err := s.call(ctx, "MSG.GET", request, &answer); err != nil {
		return nil, err
	}
	return &answer.Message, nil
}

// info reads what the bucket says of an object. A marker of deletion, which other tools write, is ErrNotFound.
func (s *objectStore) info(ctx context.Context, name string) (*jetstream.ObjectInfo, error) {
	m, err := s.next(ctx, metaSubject(name), 1)
	if err != nil {
		return nil, err
	}
	var info jetstream.ObjectInfo
	if err := json.Unmarshal(m.Data, &info); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrCorrupt, err)
	}
	if info.Deleted {
		return nil, ErrNotFound
	}
	return &info, nil
}

func (s *objectStore) Get(ctx context.Context, name string) (io.ReadCloser, error) {
	if err := checkName(name); err != nil {
		return nil, fmt.Errorf("reading an object: %w", err)
	}
	info, err := s.info(ctx, name)
	if err != nil {
		return nil, fmt.Errorf("reading object %s: %w", name, err)
	}
	digest, err := base64.URLEncoding.DecodeString(strings.TrimPrefix(info.Digest, digestPrefix))
	if err != nil || len(digest) != sha256.Size {
		return nil, fmt.Errorf("reading object %s: %w", name, ErrCorrupt)
	}
	chunks := &chunkReader{ctx: ctx, s: s, subject: chunkPrefix + info.NUID, left: info.Chunks, seq: 1}
	return io.NopCloser(newVerifier(name, chunks, int64(info.Size), known(digest))), nil
}

// chunkReader asks for a chunk when it is read: a slow reader holds one in memory and nothing at the server.
type chunkReader struct {
	ctx     context.Context // of the Get: it bounds the reading
	s       *objectStore
	subject string
	left    uint32
	seq     uint64
	chunk   bytes.Reader
}

func (c *chunkReader) Read(p []byte) (int, error) {
	for c.chunk.Len() == 0 {
		if c.left == 0 {
			return 0, io.EOF
		}
		m, err := c.s.next(c.ctx, c.subject, c.seq)
		if errors.Is(err, ErrNotFound) { // deleted while it is read
			return 0, ErrCorrupt
		}
		if err != nil {
			return 0, err
		}
		c.chunk.Reset(m.Data)
		c.seq = m.Seq + 1
		c.left--
	}
	return c.chunk.Read(p)
}

func (s *objectStore) OpenAt(ctx context.Context, name string) (At, error) {
	if err := checkName(name); err != nil {
		return nil, fmt.Errorf("reading an object: %w", err)
	}
	info, err := s.info(ctx, name)
	if err != nil {
		return nil, fmt.Errorf("reading object %s: %w", name, err)
	}
	subject := chunkPrefix + info.NUID
	var seqs []uint64
	var ends []int64
	if text, ok := info.Metadata[seqsKey]; ok {
		seqs, ends, err = placesIn(text, info)
	} else {
		seqs, ends, err = s.places(ctx, subject, info)
	}
	if err != nil {
		return nil, fmt.Errorf("reading object %s: %w", name, err)
	}
	return &piecesAt{name: name, ends: ends, fetch: func(i int) ([]byte, error) {
		m, err := s.next(ctx, subject, seqs[i])
		if errors.Is(err, ErrNotFound) || err == nil && m.Seq != seqs[i] { // deleted while it is read
			return nil, ErrCorrupt
		}
		if err != nil {
			return nil, err
		}
		return m.Data, nil
	}}, nil
}

// placesIn reads the chunks' places from what Put has noted.
func placesIn(text string, info *jetstream.ObjectInfo) (seqs []uint64, ends []int64, err error) {
	raw, err := base64.StdEncoding.DecodeString(text)
	if err != nil {
		return nil, nil, ErrCorrupt
	}
	seq := uint64(0)
	for len(raw) > 0 {
		d, n := binary.Uvarint(raw)
		if n <= 0 {
			return nil, nil, ErrCorrupt
		}
		raw, seq = raw[n:], seq+d
		seqs = append(seqs, seq)
	}
	ends = evenPieces(int64(info.Size), chunkSize)
	if len(seqs) != len(ends) || len(seqs) != int(info.Chunks) {
		return nil, nil, ErrCorrupt
	}
	return seqs, ends, nil
}

// places looks at all chunks of an object that another tool has written: only so are they found.
func (s *objectStore) places(ctx context.Context, subject string, info *jetstream.ObjectInfo) (seqs []uint64, ends []int64, err error) {
	end, seq := int64(0), uint64(1)
	for range info.Chunks {
		m, err := s.next(ctx, subject, seq)
		if errors.Is(err, ErrNotFound) {
			return nil, nil, ErrCorrupt
		}
		if err != nil {
			return nil, nil, err
		}
		end, seq = end+int64(len(m.Data)), m.Seq+1
		seqs, ends = append(seqs, m.Seq), append(ends, end)
	}
	if end != int64(info.Size) {
		return nil, nil, ErrCorrupt
	}
	return seqs, ends, nil
}

func (s *objectStore) Delete(ctx context.Context, name string) error {
	if err := checkName(name); err != nil {
		return fmt.Errorf("deleting an object: %w", err)
	}
	info, err := s.info(ctx, name)
	if errors.Is(err, ErrNotFound) {
		return nil
	}
	if err == nil { // invisible first: a crash in between leaves chunks that no reader sees
		err = s.purge(ctx, metaSubject(name))
	}
	if err == nil {
		err = s.purge(ctx, chunkPrefix+info.NUID)
	}
	if err != nil {
		return fmt.Errorf("deleting object %s: %w", name, err)
	}
	return nil
}

func (s *objectStore) List(ctx context.Context, fn func(Info) error) error {
	return s.each(ctx, func(info *jetstream.ObjectInfo, at time.Time) error {
		if info.Deleted {
			return nil
		}
		return fn(Info{Name: info.Name, Size: int64(info.Size), Time: at.UnixMilli()})
	})
}

// each calls fn with what the bucket says of every object, and when that was written; markers of deletion, which other tools write, included.
func (s *objectStore) each(ctx context.Context, fn func(*jetstream.ObjectInfo, time.Time) error) error {
	for seq := uint64(1); ; {
		m, err := s.next(ctx, metaPrefix+">", seq)
		if errors.Is(err, ErrNotFound) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("listing the objects: %w", err)
		}
		seq = m.Seq + 1
		var info jetstream.ObjectInfo
		if err := json.Unmarshal(m.Data, &info); err != nil {
			return fmt.Errorf("listing the objects: %w: %w", ErrCorrupt, err)
		}
		if err := fn(&info, m.Time); err != nil {
			return err
		}
	}
}

// Tidy looks at the objects before it looks at the chunks: chunks that get an object in between are young.
func (s *objectStore) Tidy(ctx context.Context, before time.Time) error {
	needed := make(map[string]bool)
	err := s.each(ctx, func(info *jetstream.ObjectInfo, _ time.Time) error {
		needed[chunkPrefix+info.NUID] = true
		return nil
	})
	if err != nil {
		return err
	}
	subjects, err := s.chunkSubjects(ctx)
	if err != nil {
		return fmt.Errorf("listing the chunks: %w", err)
	}
	for subject := range subjects {
		if needed[subject] {
			continue
		}
		m, err := s.next(ctx, subject, 1)
		if err == nil && m.Time.Before(before) {
			err = s.purge(ctx, subject)
		}
		if err != nil && !errors.Is(err, ErrNotFound) {
			return fmt.Errorf("removing chunks without an object: %w", err)
		}
	}
	return nil
}

// chunkSubjects tells the subjects that have chunks, and how many.
func (s *objectStore) chunkSubjects(ctx context.Context) (map[string]uint64, error) {
	all := make(map[string]uint64)
	for {
		var page struct {
			Total int `json:"total"`
			State struct {
				Subjects map[string]uint64 `json:"subjects"`
			} `json:"state"`
		}
		err := s.call(ctx, "INFO", map[string]any{"subjects_filter": chunkPrefix + ">", "offset": len(all)}, &page)
		if err != nil {
			return nil, err
		}
		for subject, n := range page.State.Subjects {
			all[subject] = n
		}
		if len(page.State.Subjects) == 0 || len(all) >= page.Total {
			return all, nil
		}
	}
}
