-- +goose Up
-- When a tenant was deleted, 0 for never. Its row stays: whoever had its id next would have its jobs and their answers.
ALTER TABLE tenants ADD COLUMN deleted BIGINT NOT NULL DEFAULT 0;

-- +goose Down
-- What was deleted is disabled, and its id stays taken.
ALTER TABLE tenants DROP COLUMN deleted;
