package e2e_test

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"testing"
	"time"
)

// do runs one command on the Redis server and returns its answer: a string, an int64, a []any, or nil.
func (c *cluster) do(args ...string) any {
	c.t.Helper()
	conn, err := net.DialTimeout("tcp", c.redis.Addr, patience)
	if err != nil {
		c.t.Fatal(err)
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(patience)); err != nil {
		c.t.Fatal(err)
	}
	var b strings.Builder
	fmt.Fprintf(&b, "*%d\r\n", len(args))
	for _, a := range args {
		fmt.Fprintf(&b, "$%d\r\n%s\r\n", len(a), a)
	}
	if _, err := io.WriteString(conn, b.String()); err != nil {
		c.t.Fatal(err)
	}
	answer, err := readReply(bufio.NewReader(conn))
	if err != nil {
		c.t.Fatalf("redis %s: %v", args[0], err)
	}
	return answer
}

func readReply(r *bufio.Reader) (any, error) {
	line, err := r.ReadString('\n')
	if err != nil {
		return nil, err
	}
	line = strings.TrimSuffix(line, "\r\n")
	if line == "" {
		return nil, errors.New("an empty reply")
	}
	kind, rest := line[0], line[1:]
	switch kind {
	case '+':
		return rest, nil
	case '-':
		return nil, errors.New(rest)
	case ':':
		return strconv.ParseInt(rest, 10, 64)
	}
	n, err := strconv.Atoi(rest)
	if err != nil || n < 0 {
		return nil, err
	}
	switch kind {
	case '$':
		b := make([]byte, n+2)
		if _, err := io.ReadFull(r, b); err != nil {
			return nil, err
		}
		return string(b[:n]), nil
	case '*':
		list := make([]any, n)
		for i := range list {
			if list[i], err = readReply(r); err != nil {
				return nil, err
			}
		}
		return list, nil
	}
	return nil, fmt.Errorf("an unknown reply %q", line)
}

// keys are all keys of the Redis server.
func (c *cluster) keys(t testing.TB) []string {
	t.Helper()
	var keys []string
	cursor := "0"
	for {
		page := c.do("SCAN", cursor, "COUNT", "1000").([]any)
		cursor = page[0].(string)
		for _, k := range page[1].([]any) {
			keys = append(keys, k.(string))
		}
		if cursor == "0" {
			return keys
		}
	}
}
