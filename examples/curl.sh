#!/usr/bin/env bash
# Millrace by hand: ask, stream, submit a durable job, follow it, wait for it. Needs curl, and jq to read the answers.
#
#   examples/curl.sh                                             against `millrace up` on its usual port
#   MILLRACE_URL=… MILLRACE_API_KEY=… MODEL=… examples/curl.sh   against another
set -euo pipefail

url=${MILLRACE_URL:-http://127.0.0.1:8080}
call=(curl --silent --show-error --fail-with-body -H "Authorization: Bearer ${MILLRACE_API_KEY:-any}" -H "Content-Type: application/json")

model=${MODEL:-$("${call[@]}" "$url/v1/models" | jq -r '.data[0].id // empty')}
[ -n "$model" ] || { echo "no model is served yet: is a worker running?" >&2; exit 1; }
body=$(jq -nc --arg model "$model" '{model: $model, messages: [{role: "user", content: "Why is the sky blue?"}], max_tokens: 48}')

echo "--- ask, and wait on the connection"
"${call[@]}" "$url/v1/chat/completions" -d "$body" | jq -r '.choices[0].message.content'

echo "--- the same as a stream"
"${call[@]}" --no-buffer "$url/v1/chat/completions" -d "$(jq -c '.stream = true' <<<"$body")" |
  sed -un 's/^data: //p' | grep --line-buffered -v '^\[DONE\]$' | jq --unbuffered -rj '.choices[0].delta.content // empty'
echo

# A 202 means that the job is on disk. The key makes a repeat of this call, after a lost answer, give the same job.
echo "--- submit a durable job"
job=$("${call[@]}" "$url/v1/jobs" -H "Idempotency-Key: $(date +%s)-$$" -d "{\"body\": $body, \"priority\": \"standard\", \"metadata\": {\"from\": \"curl.sh\"}}")
id=$(jq -r .id <<<"$job")
jq -c '{id, status, queue}' <<<"$job"

# Each event has its number: after a cut, the header `Last-Event-ID: <number>` goes on behind it, and nothing comes twice.
echo "--- follow its events"
"${call[@]}" --no-buffer "$url/v1/jobs/$id/events" | sed -un 's/^event: //p' | uniq -c

echo "--- its result"
"${call[@]}" "$url/v1/jobs/$id?wait=30s" | jq '{status, usage, attempts: [.attempts[] | {worker, outcome}], text: .result.body.choices[0].message.content}'

# The plain routes do this too: `Prefer: respond-async` (RFC 7240) answers 202, or waits so many seconds for a 200 first.
echo "--- the same by a header"
"${call[@]}" "$url/v1/chat/completions" -H "Prefer: respond-async" -d "$body" | jq -c '{id, status}'
