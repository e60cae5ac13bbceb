-- Binds a worker to what is in its KV cache now. Where there is no place left it takes that of a worker that may be replaced, and that is still bound.
-- KEYS: 1 the workers bound, the latest first, with spaces between
-- ARGV: 1 worker, 2 time to live (ms), 3 most workers, 4... workers that may be replaced
-- Returns the workers bound now. If the worker is not among them, they are as they were
local bound = redis.call('GET', KEYS[1]) or ''
local most, replaceable = tonumber(ARGV[3]), {}
for i = 4, #ARGV do replaceable[ARGV[i]] = true end
local others, mine = {}, false
for w in string.gmatch(bound, '%S+') do
	if w == ARGV[1] then mine = true else table.insert(others, w) end
end
for i = #others, 1, -1 do
	if #others >= most and not mine and replaceable[others[i]] then table.remove(others, i) end
end
if #others >= most and not mine then return bound end
table.insert(others, 1, ARGV[1])
local now = table.concat(others, ' ')
redis.call('SET', KEYS[1], now, 'PX', ARGV[2])
return now
