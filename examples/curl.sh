#!/usr/bin/env bash
# Millrace by hand: ask, stream, submit a durable job, follow it, wait for it. Needs curl alone.
#
#   examples/curl.sh                                             against `millrace up` on its usual port
#   MILLRACE_URL=… MILLRACE_API_KEY=… MODEL=… examples/curl.sh   against another
set -euo pipefail

url=${MILLRACE_URL:-http://127.0.0.1:8080}

# call METHOD PATH [CURL'S OPTIONS]: an error's text is on the standard output like any other answer.
call() {
  curl --silent --show-error --no-buffer --fail-with-body -X "$1" "$url$2" \
    -H "Authorization: Bearer ${MILLRACE_API_KEY:-any}" -H "Content-Type: application/json" "${@:3}"
}

if [ -z "${MODEL:-}" ]; then
  models=$(call GET /v1/models) || { printf '%s' "$models"; exit 1; }
  MODEL=$(sed -n 's/^[^[]*\[{"id":"\([^"]*\)".*/\1/p' <<<"$models")
  [ -n "$MODEL" ] || { echo "no model is served yet: is a worker running?" >&2; exit 1; }
fi
body='{"model": "'$MODEL'", "messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 12}'

echo "--- ask, and wait on the connection"
call POST /v1/chat/completions -d "$body"
echo

echo "--- the same as a stream"
call POST /v1/chat/completions -d "${body%\}}, \"stream\": true}"

# A 202 means that the job is on disk. The key makes a repeat of this call, after a lost answer, give the same job.
echo "--- submit a durable job"
job=$(call POST /v1/jobs -H "Idempotency-Key: $(date +%s)-$$" -d '{"body": '"$body"', "priority": "standard", "metadata": {"from": "curl.sh"}}') || { printf '%s' "$job"; exit 1; }
echo "$job"
id=$(sed 's/^{"id":"\([^"]*\)".*/\1/' <<<"$job")

# Each event has its number: after a cut, the header `Last-Event-ID: <number>` goes on behind it, and nothing comes twice.
echo "--- follow its events"
call GET "/v1/jobs/$id/events"

echo "--- its result"
call GET "/v1/jobs/$id?wait=30s"
echo

# The plain routes do this too: `Prefer: respond-async` (RFC 7240) answers 202, or waits so many seconds for a 200 first.
echo "--- the same by a header"
call POST /v1/chat/completions -H "Prefer: respond-async" -d "$body"
echo
