package job

import (
	"strconv"
	"strings"
)

// RequestBlob names the object that holds a job's request where that is too large for a message.
func RequestBlob(id ID) string { return "request/" + string(id) }

// ResultBlob names the object that holds the answer of one attempt at a job: attempts do not overwrite each other's.
func ResultBlob(id ID, attempt Token) string {
	return "result/" + string(id) + "/" + strconv.FormatInt(int64(attempt), 10)
}

// ParseBlob tells whose object name is. It is false for what is no job's.
func ParseBlob(name string) (ID, bool) {
	kind, rest, _ := strings.Cut(name, "/")
	if kind == "result" {
		rest, _, _ = strings.Cut(rest, "/")
	} else if kind != "request" {
		return "", false
	}
	id, err := ParseID(rest)
	return id, err == nil
}
