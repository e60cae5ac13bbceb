# Everything that is done with Millrace from a checkout. `make` alone lists it.

GO        ?= go
BENCHTIME ?= 1s
N         ?= 20
TESTFLAGS ?=
COMPOSE   ?= docker compose

# NVIDIA's header warns of each old name that its own binding keeps.
export CGO_CFLAGS ?= -O2 -g -Wno-deprecated-declarations

# Packages where state is shared between goroutines: `make race RACE=./...` takes them all.
RACE ?= ./api/... ./autoscaler/... ./dispatcher/... ./worker/... ./internal/...

# Tests behind a build tag need a server that `make test` does not bring; the checkers read them all the same.
TAGS := compose,engine,kubernetes

.DEFAULT_GOAL := help

.PHONY: help
help: ## List the targets
	@[ -t 1 ] && { b=$$(printf '\033[1m'); n=$$(printf '\033[0m'); }; \
	awk -F ':.*## ' -v b="$$b" -v n="$$n" \
	  '/^## ---/ {gsub(/## -+ | -+$$/, ""); printf "\n%s\n", $$0} /^[a-z-]+:.*## / {printf "  %smake %-16s%s %s\n", b, $$1, n, $$2}' $(MAKEFILE_LIST)

## --- try it ---

.PHONY: demo
demo: ## Send the 200 example prompts through a whole platform in one process (needs Go alone)
	$(GO) run ./cmd/millrace demo

.PHONY: run
run: ## Start the platform in one process on embedded parts: make run ARGS='--engine http://127.0.0.1:11434'
	$(GO) run ./cmd/millrace up $(ARGS)

.PHONY: up
up: ## Start the platform in containers, and wait until all of it is healthy
	$(COMPOSE) up --build --wait

.PHONY: down
down: ## Stop the containers; the queue's volume stays
	$(COMPOSE) down

## --- before a commit ---

.PHONY: test
test: test-deps ## Run every test; finds or installs the servers that they need
	$(GO) test -p=3 -timeout=10m $(TESTFLAGS) ./worker ./... # the longest one first

.PHONY: test-deps
test-deps:
	@scripts/test-deps.sh

.PHONY: check
check: ## Format, vet, staticcheck, import rules, module sums
	@files=$$($(GO) tool gofumpt -l .) && { [ -z "$$files" ] || { echo "not formatted, run 'make fmt':"; echo "$$files"; exit 1; }; }
	$(GO) vet -tags=$(TAGS) ./...
	$(GO) tool staticcheck -tags=$(TAGS) ./...
	$(GO) test -count=1 ./internal/archtest
	$(GO) mod verify

.PHONY: fmt
fmt: ## Format the code
	$(GO) tool gofumpt -w .

.PHONY: lint
lint: ## Run golangci-lint, built from its own module file
	$(GO) tool -modfile=.ci/lint/go.mod golangci-lint run ./...

.PHONY: race
race: ## Run the tests of the concurrent packages under the race detector
	@scripts/test-deps.sh race
	$(GO) test -race -timeout=20m $(TESTFLAGS) $(RACE)

.PHONY: bench
bench: ## Run the Go benchmarks, then `millrace bench dispatch`
	$(GO) test -run='^$$' -bench=. -benchmem -benchtime=$(BENCHTIME) ./...
	$(GO) run ./cmd/millrace bench dispatch

## --- against real parts ---

.PHONY: compose-test
compose-test: ## Bring compose.yaml up, run jobs through restarts of its parts, take it down (needs Docker)
	$(GO) test -tags=compose -count=1 -timeout=20m -v ./test/compose

.PHONY: engine-test
engine-test: ## Run against a real engine: make engine-test ENGINE_URL=http://127.0.0.1:11434
	@[ -n "$(ENGINE_URL)" ] || { echo "make engine-test ENGINE_URL=http://127.0.0.1:11434"; exit 2; }
	ENGINE_URL=$(ENGINE_URL) $(GO) test -tags=engine -count=1 -timeout=10m -v ./test/engine

.PHONY: kubernetes-test
kubernetes-test: ## Run the Kubernetes provider in namespaces of a real cluster: make kubernetes-test KUBECONFIG=FILE
	@[ -n "$(KUBECONFIG)" ] || { echo "make kubernetes-test KUBECONFIG=FILE: it makes namespaces millrace-test-… in that cluster, and removes them"; exit 2; }
	KUBECONFIG=$(abspath $(KUBECONFIG)) $(GO) test -tags=kubernetes -run='^TestCluster' -count=1 -timeout=20m -v $(TESTFLAGS) ./internal/provider/kubernetes

.PHONY: soak
soak: test-deps ## Run the end-to-end tests over and over, and those that take long: make soak N=100
	$(GO) test -tags=soak -count=$(N) -failfast -timeout=0 $(TESTFLAGS) ./test/...
