-- Drops a worker from the holders if it has not claimed anything since.
-- KEYS: 1 holders
-- ARGV: 1 worker, 2 when it last claimed (ms)
if redis.call('ZSCORE', KEYS[1], ARGV[1]) == ARGV[2] then redis.call('ZREM', KEYS[1], ARGV[1]) end
return 1
