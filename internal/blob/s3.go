package blob

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"net/url"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/credentials"
)

const (
	// partSize is what one Put holds in memory: the least that S3 allows for a part of an upload.
	partSize = 5 << 20
	// maxParts is how many parts S3 allows.
	maxParts = 10_000
	// pieceSize is what a reader of parts fetches at a time.
	pieceSize = 1 << 20
	// partTimeout bounds the upload of one part and the fetch of one piece, completeTimeout the joining of all parts, idleTimeout the wait for the next bytes of an object.
	partTimeout     = time.Minute
	completeTimeout = 2 * time.Minute
	idleTimeout     = 30 * time.Second
	// s3Tries is how often a request is made that fails for a reason which may pass.
	s3Tries = 3
)

// S3Config of a store in S3, or in what speaks like it.
type S3Config struct {
	// Bucket must exist. Prefix stands before all objects' keys, "" for none.
	Bucket, Prefix string
	// Endpoint is a URL; default that of AWS. Region: default what the bucket's is.
	Endpoint, Region string
	// AccessKey, SecretKey and SessionToken. Without them they are taken from the AWS_* variables of the environment, as AWS's own tools do.
	AccessKey, SecretKey, SessionToken string
}

// s3Store keeps each object under its escaped name as its bytes and then the 32 bytes of their SHA-256, as files of a folder are: an upload's metadata must be told before its first byte, when the digest is
// not known yet.
type s3Store struct {
	client  *minio.Core
	bucket  string
	prefix  string
	buffers sync.Pool // of *[partSize + sha256.Size]byte
}

// OpenS3 keeps objects in a bucket.
func OpenS3(ctx context.Context, cfg S3Config) (Store, error) {
	s, err := newS3(cfg)
	if err != nil {
		return nil, fmt.Errorf("opening the S3 bucket %s: %w", cfg.Bucket, err)
	}
	short, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	there, err := s.client.BucketExists(short, s.bucket)
	if err != nil {
		if err = s3Error(err); errors.Is(err, errDenied) { // no waiting cures that: it does not count as ErrUnavailable
			err = errDenied
		}
		return nil, fmt.Errorf("opening the S3 bucket %s: %w", cfg.Bucket, err)
	}
	if !there {
		return nil, fmt.Errorf("the S3 bucket %s does not exist: make it, or name another", cfg.Bucket)
	}
	return s, nil
}

func newS3(cfg S3Config) (*s3Store, error) {
	if cfg.Bucket == "" {
		return nil, errors.New("no bucket is named")
	}
	if cfg.Endpoint == "" {
		cfg.Endpoint = "https://s3.amazonaws.com"
	} else if cfg.Region == "" {
		cfg.Region = "us-east-1" // which servers that are not AWS take, and ask for no permission to look it up
	}
	u, err := url.Parse(cfg.Endpoint)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.User != nil || strings.Trim(u.Path, "/") != "" {
		return nil, errors.New("the endpoint must be a URL like https://host:port")
	}
	creds, err := s3Credentials(cfg)
	if err != nil {
		return nil, err
	}
	transport, err := minio.DefaultTransport(u.Scheme == "https")
	if err != nil {
		return nil, err
	}
	client, err := minio.NewCore(u.Host, &minio.Options{Creds: creds, Secure: u.Scheme == "https", Region: cfg.Region, Transport: transport, MaxRetries: s3Tries})
	if err != nil {
		return nil, err
	}
	if cfg.Prefix != "" && !strings.HasSuffix(cfg.Prefix, "/") {
		cfg.Prefix += "/"
	}
	s := &s3Store{client: client, bucket: cfg.Bucket, prefix: cfg.Prefix}
	s.buffers.New = func() any { return new([partSize + sha256.Size]byte) }
	return s, nil
}

func s3Credentials(cfg S3Config) (*credentials.Credentials, error) {
	switch {
	case cfg.AccessKey != "":
		return credentials.NewStaticV4(cfg.AccessKey, cfg.SecretKey, cfg.SessionToken), nil
	case os.Getenv("AWS_ACCESS_KEY_ID") != "":
		return credentials.NewEnvAWS(), nil
	case os.Getenv("AWS_WEB_IDENTITY_TOKEN_FILE") != "", os.Getenv("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI") != "", os.Getenv("AWS_CONTAINER_CREDENTIALS_FULL_URI") != "":
		return credentials.NewIAM(""), nil // a role, which the platform around us gives
	default:
		return nil, errors.New("there are no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
	}
}

// errDenied: the credentials are wrong, or may not do it.
var errDenied = errors.New("the bucket refuses the credentials: check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, and what they may do")

// s3Error is what the bucket's error is to a caller.
func s3Error(err error) error {
	switch code := minio.ToErrorResponse(err).Code; code {
	case minio.NoSuchKey:
		return ErrNotFound
	case minio.PreconditionFailed, "InvalidRange": // another object stands there since
		return ErrCorrupt
	case minio.AccessDenied, "InvalidAccessKeyId", "SignatureDoesNotMatch":
		return fmt.Errorf("%w: %w: %s", ErrUnavailable, errDenied, code)
	default:
		return unavailable(err)
	}
}

// Tidy ends uploads that began before then.
func (s *s3Store) Tidy(ctx context.Context, before time.Time) error {
	ctx, cancel := context.WithTimeout(ctx, completeTimeout)
	defer cancel()
	key, id := "", ""
	for {
		page, err := s.client.ListMultipartUploads(ctx, s.bucket, s.prefix, key, id, "", 1000)
		if minio.ToErrorResponse(err).Code == minio.NoSuchUpload { // what some servers say where there is none
			return nil
		}
		if err != nil {
			return fmt.Errorf("looking for uploads in parts: %w", s3Error(err))
		}
		for _, u := range page.Uploads {
			if strings.HasPrefix(u.Key, s.prefix) && strings.HasSuffix(u.Key, suffix) && u.Initiated.Before(before) {
				_ = s.client.AbortMultipartUpload(ctx, s.bucket, u.Key, u.UploadID) // somebody else may have done it; if not, the next look tries again
			}
		}
		if !page.IsTruncated || page.NextKeyMarker == key && page.NextUploadIDMarker == id {
			return nil
		}
		key, id = page.NextKeyMarker, page.NextUploadIDMarker
	}
}

func (s *s3Store) key(name string) (string, error) {
	if err := checkName(name); err != nil {
		return "", err
	}
	return s.prefix + url.PathEscape(name) + suffix, nil
}

func (s *s3Store) Put(ctx context.Context, name string, r io.Reader) (int64, error) {
	key, err := s.key(name)
	if err != nil {
		return 0, fmt.Errorf("storing an object: %w", err)
	}
	buffer := s.buffers.Get().(*[partSize + sha256.Size]byte)
	defer s.buffers.Put(buffer)
	u := &upload{s: s, key: key, sum: sha256.New()}
	if err := u.run(ctx, r, buffer[:]); err != nil {
		return 0, fmt.Errorf("storing object %s: %w", name, err)
	}
	return u.size, nil
}

// upload is one Put. What is small goes in one request; the rest in parts, which become visible together when they are joined.
type upload struct {
	s     *s3Store
	key   string
	sum   hash.Hash
	size  int64
	id    string // of the upload in parts, "" for none
	parts []minio.CompletePart
}

func (u *upload) run(ctx context.Context, r io.Reader, buffer []byte) error {
	for last := false; !last; {
		if err := ctx.Err(); err != nil {
			return u.undo(ctx, err)
		}
		n, err := io.ReadFull(r, buffer[:partSize])
		last = errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF)
		if err != nil && !last {
			return u.undo(ctx, err)
		}
		u.sum.Write(buffer[:n])
		u.size += int64(n)
		part := buffer[:n]
		if last {
			part = u.sum.Sum(part)
		}
		if last && u.id == "" {
			return u.settled(ctx, u.whole(ctx, part))
		}
		if err := u.part(ctx, part); err != nil {
			return u.undo(ctx, err)
		}
	}
	return u.settled(ctx, u.complete(ctx))
}

// whole stores an object in one request.
func (u *upload) whole(ctx context.Context, data []byte) error {
	ctx, cancel := context.WithTimeout(ctx, partTimeout)
	defer cancel()
	_, err := u.s.client.PutObject(ctx, u.s.bucket, u.key, bytes.NewReader(data), int64(len(data)), "", hexSum(data), minio.PutObjectOptions{DisableContentSha256: true})
	return err
}

func (u *upload) part(ctx context.Context, data []byte) (err error) {
	if len(u.parts) == maxParts {
		return fmt.Errorf("the object has more than the %d bytes that the bucket takes", int64(maxParts)*partSize)
	}
	ctx, cancel := context.WithTimeout(ctx, partTimeout)
	defer cancel()
	if u.id == "" {
		if u.id, err = u.s.client.NewMultipartUpload(ctx, u.s.bucket, u.key, minio.PutObjectOptions{}); err != nil {
			return s3Error(err)
		}
	}
	p, err := u.s.client.PutObjectPart(ctx, u.s.bucket, u.key, u.id, len(u.parts)+1, bytes.NewReader(data), int64(len(data)), minio.PutObjectPartOptions{
		Sha256Hex: hexSum(data), DisableContentSha256: true,
	})
	if err != nil {
		return s3Error(err)
	}
	u.parts = append(u.parts, minio.CompletePart{PartNumber: p.PartNumber, ETag: p.ETag})
	return nil
}

func hexSum(data []byte) string {
	sum := sha256.Sum256(data)
	return hex.EncodeToString(sum[:])
}

// complete joins the parts: from here on the object is visible, whole.
func (u *upload) complete(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, completeTimeout)
	defer cancel()
	_, err := u.s.client.CompleteMultipartUpload(ctx, u.s.bucket, u.key, u.id, u.parts, minio.PutObjectOptions{})
	return err
}

// settled looks, where the last request failed for the reason failed, whether it was carried out all the same and only its answer lost.
func (u *upload) settled(ctx context.Context, failed error) error {
	if failed == nil || u.isThere(ctx) {
		return nil
	}
	if ctx.Err() != nil {
		return u.undo(ctx, ctx.Err())
	}
	return u.undo(ctx, s3Error(failed))
}

func (u *upload) isThere(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), callTimeout) // whatever ended the caller, the truth is wanted
	defer cancel()
	digest, size, err := u.s.digest(ctx, u.key)
	return err == nil && size == u.size && bytes.Equal(digest, u.sum.Sum(nil))
}

// undo takes away what a Put that failed for the reason err has left. Where the bucket does not answer, parts may remain, which no reader sees: see Tidy.
func (u *upload) undo(ctx context.Context, err error) error {
	if u.id != "" {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), callTimeout) // the caller's end is a reason to clean up
		defer cancel()
		_ = u.s.client.AbortMultipartUpload(ctx, u.s.bucket, u.key, u.id)
	}
	return err
}

// digest reads the digest at an object's end.
func (s *s3Store) digest(ctx context.Context, key string) (digest []byte, size int64, err error) {
	info, err := s.client.StatObject(ctx, s.bucket, key, minio.StatObjectOptions{})
	if err != nil {
		return nil, 0, s3Error(err)
	}
	size = info.Size - sha256.Size
	if size < 0 {
		return nil, 0, ErrCorrupt
	}
	digest, err = s.part(ctx, key, info.ETag, size, info.Size)
	return digest, size, err
}

// part reads the bytes from start to end of the object with that etag.
func (s *s3Store) part(ctx context.Context, key, etag string, start, end int64) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, partTimeout)
	defer cancel()
	var opts minio.GetObjectOptions
	if err := errors.Join(opts.SetRange(start, end-1), opts.SetMatchETag(etag)); err != nil {
		return nil, err
	}
	body, info, _, err := s.client.GetObject(ctx, s.bucket, key, opts)
	if err != nil {
		return nil, s3Error(err)
	}
	defer body.Close() //nolint:errcheck // only read
	if info.ETag != etag {
		return nil, ErrCorrupt
	}
	data := make([]byte, end-start)
	_, err = io.ReadFull(body, data)
	switch {
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF) && info.Size != end-start:
		return nil, ErrCorrupt
	case err != nil:
		return nil, unavailable(err)
	}
	return data, nil
}

func (s *s3Store) Get(ctx context.Context, name string) (io.ReadCloser, error) {
	key, err := s.key(name)
	if err != nil {
		return nil, fmt.Errorf("reading an object: %w", err)
	}
	ctx, cancel := context.WithCancel(ctx)
	timer := time.AfterFunc(idleTimeout, cancel)
	body, info, _, err := s.client.GetObject(ctx, s.bucket, key, minio.GetObjectOptions{})
	if err == nil && info.Size < sha256.Size {
		_ = body.Close()
		err = ErrCorrupt
	} else if err != nil {
		err = s3Error(err)
	}
	if err != nil {
		timer.Stop()
		cancel()
		return nil, fmt.Errorf("reading object %s: %w", name, err)
	}
	timer.Stop()
	from := &stream{name: name, body: body, timer: timer, cancel: cancel}
	size := info.Size - sha256.Size
	return struct {
		io.Reader
		io.Closer
	}{newVerifier(name, io.LimitReader(from, size), size, func() ([]byte, error) {
		digest := make([]byte, sha256.Size)
		_, err := io.ReadFull(from, digest)
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			err = fmt.Errorf("reading object %s: %w", name, ErrCorrupt)
		}
		return digest, err
	}), from}, nil
}

// stream is an object on its way. A server that sends nothing for long while it is read from is given up; a reader that does not read has all the time that its context gives it.
type stream struct {
	name   string
	body   io.ReadCloser
	timer  *time.Timer
	cancel context.CancelFunc
}

func (s *stream) Read(p []byte) (int, error) {
	s.timer.Reset(idleTimeout)
	n, err := s.body.Read(p)
	s.timer.Stop()
	if err != nil && !errors.Is(err, io.EOF) {
		err = fmt.Errorf("reading object %s: %w", s.name, unavailable(err))
	}
	return n, err
}

func (s *stream) Close() error {
	s.timer.Stop()
	s.cancel()
	return s.body.Close()
}

func (s *s3Store) OpenAt(ctx context.Context, name string) (At, error) {
	key, err := s.key(name)
	if err != nil {
		return nil, fmt.Errorf("reading an object: %w", err)
	}
	short, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	info, err := s.client.StatObject(short, s.bucket, key, minio.StatObjectOptions{})
	if err != nil {
		return nil, fmt.Errorf("reading object %s: %w", name, s3Error(err))
	}
	if info.Size < sha256.Size {
		return nil, fmt.Errorf("reading object %s: %w", name, ErrCorrupt)
	}
	a := &piecesAt{name: name, ends: evenPieces(info.Size-sha256.Size, pieceSize)}
	a.fetch = func(i int) ([]byte, error) { return s.part(ctx, key, info.ETag, a.start(i), a.ends[i]) }
	return a, nil
}

func (s *s3Store) Delete(ctx context.Context, name string) error {
	key, err := s.key(name)
	if err != nil {
		return fmt.Errorf("deleting an object: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	err = s.client.RemoveObject(ctx, s.bucket, key, minio.RemoveObjectOptions{})
	if err != nil && !errors.Is(s3Error(err), ErrNotFound) {
		return fmt.Errorf("deleting object %s: %w", name, s3Error(err))
	}
	return nil
}

func (s *s3Store) List(ctx context.Context, fn func(Info) error) error {
	for o := range s.client.ListObjectsIter(ctx, s.bucket, minio.ListObjectsOptions{Prefix: s.prefix, Recursive: true}) {
		if o.Err != nil {
			return fmt.Errorf("listing the objects: %w", s3Error(o.Err))
		}
		escaped, ok := strings.CutSuffix(strings.TrimPrefix(o.Key, s.prefix), suffix)
		name, err := url.PathUnescape(escaped)
		if !ok || err != nil || strings.Contains(escaped, "/") { // not ours
			continue
		}
		if err := fn(Info{Name: name, Size: o.Size - sha256.Size, Time: o.LastModified.UnixMilli()}); err != nil {
			return err
		}
	}
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("listing the objects: %w", err)
	}
	return nil
}
