-- Times are unix milliseconds, 0 for never; flags are 0 or 1; limits, lists and maps are JSON.

-- +goose Up
CREATE TABLE tenants (
    id TEXT NOT NULL PRIMARY KEY,
    name TEXT NOT NULL,
    weight INTEGER NOT NULL,
    limits TEXT NOT NULL,
    created BIGINT NOT NULL,
    disabled INTEGER NOT NULL
);
INSERT INTO tenants (id, name, weight, limits, created, disabled) VALUES ('default', '', 100, '{}', 0, 0);

-- A key's row outlives its tenant: usage names it, and that a key was made is never forgotten.
CREATE TABLE api_keys (
    id TEXT NOT NULL PRIMARY KEY,
    tenant TEXT NOT NULL,
    hash TEXT NOT NULL UNIQUE,
    name TEXT NOT NULL,
    prefix TEXT NOT NULL,
    scopes TEXT NOT NULL,
    models TEXT NOT NULL,
    limits TEXT NOT NULL,
    created BIGINT NOT NULL,
    expires BIGINT NOT NULL,
    revoked BIGINT NOT NULL,
    last_used BIGINT NOT NULL
);
CREATE INDEX api_keys_listing ON api_keys (tenant, created, id);

CREATE TABLE files (
    id TEXT NOT NULL PRIMARY KEY,
    tenant TEXT NOT NULL REFERENCES tenants (id),
    api_key TEXT NOT NULL,
    purpose TEXT NOT NULL,
    filename TEXT NOT NULL,
    bytes BIGINT NOT NULL,
    sha256 TEXT NOT NULL,
    blob TEXT NOT NULL,
    batch TEXT NOT NULL,
    created BIGINT NOT NULL,
    expires BIGINT NOT NULL
);
CREATE INDEX files_listing ON files (tenant, created, id);
CREATE INDEX files_purpose ON files (tenant, purpose, created, id);
CREATE INDEX files_bytes ON files (tenant, bytes);
CREATE INDEX files_expiry ON files (expires) WHERE expires > 0;
CREATE INDEX files_blob ON files (blob);

CREATE TABLE batches (
    id TEXT NOT NULL PRIMARY KEY,
    tenant TEXT NOT NULL REFERENCES tenants (id),
    api_key TEXT NOT NULL,
    endpoint TEXT NOT NULL,
    input_file TEXT NOT NULL,
    completion_window TEXT NOT NULL,
    models TEXT NOT NULL,
    metadata TEXT NOT NULL,
    output_expires BIGINT NOT NULL,
    retry_of TEXT NOT NULL,
    status TEXT NOT NULL,
    live INTEGER NOT NULL,
    late INTEGER NOT NULL,
    errors TEXT NOT NULL,
    model TEXT NOT NULL,
    output_file TEXT NOT NULL,
    error_file TEXT NOT NULL,
    total BIGINT NOT NULL,
    done BIGINT NOT NULL,
    bad BIGINT NOT NULL,
    tokens BIGINT NOT NULL,
    tokens_done BIGINT NOT NULL,
    prompt_tokens BIGINT NOT NULL,
    completion_tokens BIGINT NOT NULL,
    total_tokens BIGINT NOT NULL,
    cached_tokens BIGINT NOT NULL,
    reasoning_tokens BIGINT NOT NULL,
    created BIGINT NOT NULL,
    in_progress BIGINT NOT NULL,
    expires BIGINT NOT NULL,
    finalizing BIGINT NOT NULL,
    completed BIGINT NOT NULL,
    failed BIGINT NOT NULL,
    expired BIGINT NOT NULL,
    cancelling BIGINT NOT NULL,
    cancelled BIGINT NOT NULL
);
CREATE INDEX batches_listing ON batches (tenant, created, id);
CREATE INDEX batches_live ON batches (created, id) WHERE live = 1;
CREATE INDEX batches_input ON batches (input_file) WHERE live = 1;
CREATE INDEX batches_ended ON batches ((completed + expired + cancelled), id) WHERE live = 0;

-- A batch's lines of one model: those before confirmed are surely queued, those from reserved on surely not.
CREATE TABLE batch_portions (
    batch TEXT NOT NULL REFERENCES batches (id) ON DELETE CASCADE,
    model TEXT NOT NULL,
    total BIGINT NOT NULL,
    tokens BIGINT NOT NULL,
    confirmed BIGINT NOT NULL,
    reserved BIGINT NOT NULL,
    PRIMARY KEY (batch, model)
);

-- One row per day (UTC), tenant, model and key. It outlives them.
CREATE TABLE usage (
    day TEXT NOT NULL,
    tenant TEXT NOT NULL,
    model TEXT NOT NULL,
    api_key TEXT NOT NULL,
    requests BIGINT NOT NULL,
    failed BIGINT NOT NULL,
    prompt_tokens BIGINT NOT NULL,
    completion_tokens BIGINT NOT NULL,
    total_tokens BIGINT NOT NULL,
    cached_tokens BIGINT NOT NULL,
    reasoning_tokens BIGINT NOT NULL,
    PRIMARY KEY (tenant, model, day, api_key)
);
CREATE INDEX usage_day ON usage (day);

-- How far a stream was read.
CREATE TABLE positions (
    name TEXT NOT NULL PRIMARY KEY,
    stream TEXT NOT NULL,
    seq BIGINT NOT NULL
);
INSERT INTO positions (name, stream, seq) VALUES ('done', '', 0);

-- The highest epoch that has written: who writes with a lower one leads no more.
CREATE TABLE leadership (
    id INTEGER NOT NULL PRIMARY KEY,
    epoch BIGINT NOT NULL
);
INSERT INTO leadership (id, epoch) VALUES (1, 0);

CREATE TABLE idempotency (
    tenant TEXT NOT NULL,
    route TEXT NOT NULL,
    idempotency_key TEXT NOT NULL,
    hash TEXT NOT NULL,
    object TEXT NOT NULL,
    expires BIGINT NOT NULL,
    PRIMARY KEY (tenant, route, idempotency_key)
);
CREATE INDEX idempotency_expiry ON idempotency (expires);

-- +goose Down
DROP TABLE idempotency;
DROP TABLE leadership;
DROP TABLE positions;
DROP TABLE usage;
DROP TABLE batch_portions;
DROP TABLE batches;
DROP TABLE files;
DROP TABLE api_keys;
DROP TABLE tenants;
