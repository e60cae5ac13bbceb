-- Unbinds an idempotency key that is bound to a job.
-- KEYS: 1 key
-- ARGV: 1 job id
local v = redis.call('GET', KEYS[1])
if v and string.sub(v, 1, #ARGV[1] + 1) == ARGV[1] .. ' ' then redis.call('DEL', KEYS[1]) end
return 1
