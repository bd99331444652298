-- Read the mark that names what a part of a cluster holds; make it if it is not there.
-- KEYS[1] the mark
-- ARGV[1] what a new one says
-- Answer what it says
-- The commands are those of the other scripts, so that a server that refuses one of them shows here.
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
