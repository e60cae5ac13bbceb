-- Stores the wish to cancel a job that has not ended.
-- KEYS: 1 record
-- Returns all fields of the record, or 'gone'
local s = redis.call('HGET', KEYS[1], 's')
if not s then return 'gone' end
if not ended[s] then redis.call('HSET', KEYS[1], 'c', 1) end
return redis.call('HGETALL', KEYS[1])
