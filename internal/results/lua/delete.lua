-- Removes an ended job.
-- KEYS: 1 record, 2 events, 3 body, 4 answer
-- Returns 1 if nothing of it is there any more, 0 if it has not ended
local s = redis.call('HGET', KEYS[1], 's')
if s and not ended[s] then return 0 end
redis.call('DEL', KEYS[1], KEYS[2], KEYS[3], KEYS[4])
return 1
