package testenv

import (
	"bytes"
	"errors"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// postgresServer is the one that all tests of a process share. It listens on a socket in its own folder, and nowhere else.
type postgresServer struct {
	bin, dir string
	made     atomic.Int64
	// alive is the writing end of the standard input of the server's keeper: when this process ends, however it does, the keeper reads the end, and ends the server.
	alive *os.File
}

var thePostgres = sync.OnceValues(startPostgres)

// Postgres returns the URL of a fresh, empty database on a real PostgreSQL server. The first call of a process starts the server (from MILLRACE_TEST_POSTGRES_BIN, the PATH, or where
// packages put its programs), which ends with the process. It does not sync to disk.
func Postgres(t testing.TB) string {
	t.Helper()
	p, err := thePostgres()
	if err != nil {
		t.Fatalf("starting PostgreSQL: %v", err)
	}
	name := "test_" + strconv.FormatInt(p.made.Add(1), 10)
	if err := p.run("createdb", name); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.run("dropdb", "--force", name); err != nil {
			t.Error(err)
		}
	})
	u := url.URL{Scheme: "postgres", User: url.User("postgres"), Path: "/" + name, RawQuery: url.Values{"host": {p.dir}}.Encode()}
	return u.String()
}

// PostgresSocket is the path of the socket on which the server of Postgres listens, for a test that puts something between it and the store.
func PostgresSocket(t testing.TB) string {
	t.Helper()
	p, err := thePostgres()
	if err != nil {
		t.Fatalf("starting PostgreSQL: %v", err)
	}
	return filepath.Join(p.dir, ".s.PGSQL.5432")
}

// postgresKeeper runs the server until its own standard input ends, and removes the server's folder.
const postgresKeeper = `"$1/postgres" -D "$2/data" -k "$2" -h "" -p 5432 -c fsync=off -c synchronous_commit=off -c full_page_writes=off -c max_connections=300 -c shared_buffers=32MB </dev/null &
server=$!
trap "" INT TERM HUP
cat >/dev/null
kill -QUIT $server
wait $server
cd /
rm -rf "$2"`

func startPostgres() (_ *postgresServer, err error) {
	bin, err := postgresPrograms()
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "millrace-postgres-")
	if err != nil {
		return nil, err
	}
	p := &postgresServer{bin: bin, dir: dir}
	defer func() {
		if err != nil {
			_ = os.RemoveAll(dir) // what went wrong is said already
		}
	}()
	if err := givePostgres(dir); err != nil {
		return nil, err
	}
	if err := p.run("initdb", "-D", dir+"/data", "-U", "postgres", "-A", "trust", "-E", "UTF8", "--no-locale", "--no-sync"); err != nil {
		return nil, err
	}
	log, err := os.Create(filepath.Join(dir, "log"))
	if err != nil {
		return nil, err
	}
	defer log.Close() //nolint:errcheck // the server has its own
	keeper := p.command("sh", "-c", postgresKeeper, "sh", bin, dir)
	keeper.Stdout, keeper.Stderr = log, log
	read, write, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	keeper.Stdin, p.alive = read, write
	err = keeper.Start()
	_ = read.Close() // the keeper has its own
	if err != nil {
		_ = write.Close()
		return nil, err
	}
	for deadline := time.Now().Add(time.Minute); ; {
		err := p.run("pg_isready", "--quiet")
		if err == nil {
			return p, nil
		}
		if time.Now().After(deadline) {
			said, _ := os.ReadFile(log.Name()) // only to say more
			_ = write.Close()
			return nil, fmt.Errorf("it does not answer: %w\n%s", err, said)
		}
		time.Sleep(20 * time.Millisecond) // a process tells nobody when it is ready
	}
}

func (p *postgresServer) command(program string, args ...string) *exec.Cmd {
	cmd := exec.Command(program, args...)
	cmd.Dir = p.dir
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + p.dir, "PGHOST=" + p.dir, "PGPORT=5432", "PGUSER=postgres", "LC_ALL=C"}
	asPostgres(cmd)
	return cmd
}

// run runs one of PostgreSQL's programs.
func (p *postgresServer) run(program string, args ...string) error {
	if out, err := p.command(filepath.Join(p.bin, program), args...).CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w\n%s", program, err, bytes.TrimSpace(out))
	}
	return nil
}

// postgresPrograms is the folder with initdb and its like.
func postgresPrograms() (string, error) {
	if dir := os.Getenv("MILLRACE_TEST_POSTGRES_BIN"); dir != "" {
		return dir, nil
	}
	if path, err := exec.LookPath("initdb"); err == nil {
		if path, err = filepath.EvalSymlinks(path); err == nil {
			return filepath.Dir(path), nil
		}
	}
	var found []string
	for _, pattern := range []string{"/usr/lib/postgresql/*/bin/initdb", "/opt/homebrew/opt/postgresql@*/bin/initdb", "/usr/local/opt/postgresql@*/bin/initdb", "/usr/pgsql-*/bin/initdb"} {
		paths, err := filepath.Glob(pattern)
		if err != nil {
			return "", err
		}
		found = append(found, paths...)
	}
	if len(found) == 0 {
		return "", errors.New("its programs are not here: `make test` installs them")
	}
	slices.Sort(found)
	return filepath.Dir(found[len(found)-1]), nil
}
