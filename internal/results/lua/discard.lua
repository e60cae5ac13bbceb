-- Removes a job that is accepting since exactly then.
-- KEYS: 1 record, 2 body, 3 events
-- ARGV: 1 since (ms)
-- Returns 1 if the record is gone (also when it was gone before: a repeat must say the same), else 0
local s, a = unpack(redis.call('HMGET', KEYS[1], 's', 'a'))
if not s then return 1 end
if s ~= 'accepting' or a ~= ARGV[1] then return 0 end
redis.call('DEL', KEYS[1], KEYS[2], KEYS[3])
return 1
