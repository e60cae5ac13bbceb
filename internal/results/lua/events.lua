-- Reads the events whose number is above a given one. Entries are ordered by (token, number), and numbers rise over all attempts, so the place to begin is found by
-- going back attempt by attempt from the last one.
-- KEYS: 1 events
-- ARGV: 1 number, 2 how many at most
-- Returns {first number, last number, entries}, zeros for a stream that is not there
local function split(id)
	local token, n = string.match(id, '(%d+)-(%d+)')
	return token, tonumber(n)
end
local first = redis.call('XRANGE', KEYS[1], '-', '+', 'COUNT', 1)[1]
if not first then return {'0', '0', {}} end
local _, low = split(first[1])
local after = tonumber(ARGV[1])
local token, high = split(redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)[1][1])
local entries = {}
if after < high then
	local from = '-'
	while low <= after do
		if redis.call('XREVRANGE', KEYS[1], token .. '-' .. ARGV[1], token .. '-0', 'COUNT', 1)[1] then
			from = '(' .. token .. '-' .. ARGV[1]
			break
		end
		from = token .. '-0'
		local n
		token, n = split(redis.call('XREVRANGE', KEYS[1], '(' .. from, '-', 'COUNT', 1)[1][1])
		if n <= after then break end
	end
	entries = redis.call('XRANGE', KEYS[1], from, '+', 'COUNT', ARGV[2])
end
return {string.format('%.0f', low), string.format('%.0f', high), entries}
