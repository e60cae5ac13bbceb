#!/usr/bin/env bash
# Finds the programs that the tests start by themselves, and installs what is missing where it may: by apt-get as root or through sudo without a
# password, or by Homebrew. Where it may not, it stops and prints the one line to run.
#   redis-server   the result store's tests
#   postgresql     the tests of the SQL ledger (its service is not started: each test process starts a server of its own)
#   node, npm      the test of the official Node client
#   curl           the test of the example in shell
#   cc             the race detector, when called with "race"
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf 'test-deps: %s\n' "$*"; }
have() { command -v "$1" >/dev/null 2>&1; }

# have_postgres: the places are those of internal/testenv.
have_postgres() {
  local found
  have initdb && return
  for found in "${MILLRACE_TEST_POSTGRES_BIN:-/}"/initdb /usr/lib/postgresql/*/bin/initdb /opt/homebrew/opt/postgresql@*/bin/initdb /usr/local/opt/postgresql@*/bin/initdb /usr/pgsql-*/bin/initdb; do
    [ ! -x "$found" ] || return 0
  done
  return 1
}

missing=()
have redis-server || missing+=(redis)
have_postgres || missing+=(postgres)
{ have node && have npm; } || missing+=(node)
have curl || missing+=(curl)
[ "${1:-}" != race ] || have cc || missing+=(cc)

# names MANAGER: what the missing programs are called there.
names() {
  local m
  for m in "${missing[@]}"; do
    case $1:$m in
      apt:redis) echo redis-server ;;
      apt:postgres) echo postgresql ;;
      apt:node) echo nodejs npm ;;
      apt:curl) echo curl ;;
      apt:cc) echo gcc libc6-dev ;;
      brew:cc) echo gcc ;;
      brew:postgres) echo postgresql@15 ;;
      brew:*) echo "$m" ;;
    esac
  done
}

install() {
  local packages sudo=()
  if have apt-get; then
    # shellcheck disable=SC2207 # package names hold no blanks
    packages=($(names apt))
    if [ "$(id -u)" != 0 ]; then
      if ! have sudo || ! sudo -n true 2>/dev/null; then
        say "these tests need programs that are not here. Run:" >&2
        echo "  sudo apt-get update && sudo apt-get install -y ${packages[*]}" >&2
        exit 1
      fi
      sudo=(sudo -n)
    fi
    say "installing ${packages[*]} with apt-get"
    "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get update -q >/dev/null
    # Debian's packages also start services, which nobody asked for here: tests start servers of their own. The variable keeps a system without systemd from it.
    "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get install -y -q --no-install-recommends "${packages[@]}" >/dev/null
    local service
    for service in redis-server postgresql; do
      if have systemctl && [[ " ${packages[*]} " == *" $service "* ]]; then
        "${sudo[@]}" systemctl disable --now "$service" >/dev/null 2>&1 || true
      fi
    done
  elif have brew; then
    # shellcheck disable=SC2207
    packages=($(names brew))
    say "installing ${packages[*]} with Homebrew"
    brew install --quiet "${packages[@]}"
  else
    say "please install ${missing[*]} with this system's package manager, so that redis-server, PostgreSQL's initdb, node, npm, curl (and cc, for the race detector) are on the PATH" >&2
    exit 1
  fi
}

[ ${#missing[@]} = 0 ] || install
for program in redis-server node npm curl; do
  have "$program" || { say "$program is still not on the PATH after the installation" >&2; exit 1; }
done

have_postgres || { say "PostgreSQL is still not here after the installation: name the folder of its initdb in MILLRACE_TEST_POSTGRES_BIN" >&2; exit 1; }

# The Node client, in the version of its lock file. npm leaves this file behind when an installation is whole.
client=examples/openai-node
if [ ! $client/node_modules/.package-lock.json -nt $client/package-lock.json ]; then
  say "installing the Node client in $client"
  npm ci --prefix $client --no-audit --no-fund --prefer-offline --loglevel=error >/dev/null
fi
