-- Times are unix milliseconds, 0 for never; descriptions, states and decisions are JSON.

-- +goose Up
-- The autoscaler leads by epochs of its own.
INSERT INTO leadership (id, epoch) VALUES (2, 0);

CREATE TABLE pools (
    name TEXT NOT NULL PRIMARY KEY,
    spec TEXT NOT NULL,
    source TEXT NOT NULL,
    created BIGINT NOT NULL,
    updated BIGINT NOT NULL
);

-- What was learned of a pool. It outlives the pool until its last worker is gone.
CREATE TABLE pool_states (
    pool TEXT NOT NULL PRIMARY KEY,
    state TEXT NOT NULL
);

-- The workers that were asked for and are not gone. A row is written before its provider is asked.
CREATE TABLE launches (
    pool TEXT NOT NULL,
    name TEXT NOT NULL,
    at BIGINT NOT NULL,
    ready BIGINT NOT NULL,
    stopping BIGINT NOT NULL,
    PRIMARY KEY (pool, name)
);

-- What came in for each model in five minutes.
CREATE TABLE arrivals (
    model TEXT NOT NULL,
    start BIGINT NOT NULL,
    jobs BIGINT NOT NULL,
    tokens BIGINT NOT NULL,
    squares DOUBLE PRECISION NOT NULL,
    PRIMARY KEY (model, start)
);
CREATE INDEX arrivals_start ON arrivals (start);

CREATE TABLE scaling (
    id BIGINT NOT NULL PRIMARY KEY,
    pool TEXT NOT NULL,
    at BIGINT NOT NULL,
    action TEXT NOT NULL,
    decision TEXT NOT NULL
);
CREATE INDEX scaling_listing ON scaling (pool, id);
CREATE INDEX scaling_at ON scaling (at);

-- +goose Down
DROP TABLE scaling;
DROP TABLE arrivals;
DROP TABLE launches;
DROP TABLE pool_states;
DROP TABLE pools;
DELETE FROM leadership WHERE id = 2;
