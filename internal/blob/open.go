package blob

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"strings"

	"github.com/nats-io/nats.go"
)

// Config says where objects are kept.
type Config struct {
	// URL is "" for the JetStream Object Store; dir:PATH for a folder, which all processes of a platform must share; or s3://BUCKET/PREFIX?endpoint=URL&region=NAME, with the credentials in the AWS_*
	// variables of the environment.
	URL string
	// NATS and Replicas are for the JetStream Object Store.
	NATS     *nats.Conn
	Replicas int
}

// Open opens the store that cfg names.
func Open(ctx context.Context, cfg Config) (Store, error) {
	dir, bucket, err := parseURL(cfg.URL)
	switch {
	case err != nil:
		return nil, err
	case dir != "":
		return OpenDir(dir)
	case bucket != nil:
		return OpenS3(ctx, *bucket)
	default:
		return OpenJetStream(ctx, cfg.NATS, cfg.Replicas)
	}
}

// CheckURL tells what is wrong with a Config's URL, without looking at what it names.
func CheckURL(text string) error {
	_, _, err := parseURL(text)
	return err
}

// errURL holds nothing of the URL: there may be a secret in it that should not be there.
var errURL = errors.New("the URL of the object store must be dir:PATH, or s3://BUCKET/PREFIX?endpoint=URL&region=NAME")

// parseURL returns the folder, or the bucket, or neither.
func parseURL(text string) (dir string, bucket *S3Config, err error) {
	if text == "" {
		return "", nil, nil
	}
	if path, ok := strings.CutPrefix(text, "dir:"); ok {
		path = strings.TrimPrefix(path, "//")
		if !filepath.IsAbs(path) {
			return "", nil, fmt.Errorf("%w: the path must be absolute, as dir:/var/lib/millrace/blobs", errURL)
		}
		return filepath.Clean(path), nil, nil
	}
	u, err := url.Parse(text)
	if err != nil || u.Scheme != "s3" || u.Host == "" {
		return "", nil, errURL
	}
	if u.User != nil {
		return "", nil, fmt.Errorf("%w: credentials do not belong in it, set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY", errURL)
	}
	cfg := &S3Config{Bucket: u.Host, Prefix: strings.Trim(u.Path, "/"), Region: os.Getenv("AWS_REGION"), Endpoint: os.Getenv("AWS_ENDPOINT_URL_S3")}
	orEnv(&cfg.Region, "AWS_DEFAULT_REGION")
	orEnv(&cfg.Endpoint, "AWS_ENDPOINT_URL")
	query, err := url.ParseQuery(u.RawQuery)
	if err != nil {
		return "", nil, errURL
	}
	for name, values := range query {
		switch name {
		case "endpoint":
			cfg.Endpoint = values[0]
		case "region":
			cfg.Region = values[0]
		default:
			return "", nil, fmt.Errorf("%w: it has a parameter that is neither endpoint nor region", errURL)
		}
	}
	return "", cfg, nil
}

func orEnv(field *string, name string) {
	if *field == "" {
		*field = os.Getenv(name)
	}
}
