-- Return the store id of a bucket of a cluster, creating it if absent.
-- KEYS[1] key of the store id
-- ARGV[1] a new store id
-- Answer the store id
-- Runs the commands of the other scripts, so that a server that refuses one of them is detected here.
local call, pcall = redis.call, redis.pcall
local key = KEYS[1]

call('SET', key, ARGV[1], 'NX')
call('SETRANGE', key, 0, '')
call('PTTL', key)
local expired = pcall('PEXPIRE', key .. ':none', 1)
if type(expired) == 'table' and (string.find(expired.err, 'ermission') or string.find(expired.err, "can't run")) then
  return expired
end
return call('GET', key)
