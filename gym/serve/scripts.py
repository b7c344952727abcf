"""The state of jobs in Redis: key names, and the Lua scripts that change it. Each script is one atomic step.

A job is ``waiting``, ``running``, or has a result; a result is written once (SET NX) together with the batch's event,
the counters and the owner's quota, so that a death between the two cannot strand a batch, and a second writer loses.
``waiting`` and ``running`` are sorted sets (score: when submitted, when started) beside the job's hash; ``deadlines``
holds the same jobs as ``waiting``, by when they expire.

Scripts build key names themselves: one Redis, no Cluster.
"""

from __future__ import annotations

PREFIX = "drk:"
WAITING = "drk:waiting"
RUNNING = "drk:running"
WORKERS = "drk:workers"
CLASSES = "drk:classes"
OPEN = "drk:open"
DEADLINES = "drk:deadlines"
DONE = "drk:done"
METRICS = "drk:metrics"
DRAINING = "drk:draining"
OVERSEER = "drk:overseer"


def job_key(job_id: str) -> str:
    """Hash: the job's fields and state."""
    return f"drk:job:{job_id}"


def result_key(job_id: str) -> str:
    """String: the result, as JSON."""
    return f"drk:result:{job_id}"


def events_key(job_id: str) -> str:
    """Stream: the job's stages."""
    return f"drk:events:{job_id}"


def task_key(task_id: str) -> str:
    """String: a task's bundle, by content."""
    return f"drk:task:{task_id}"


def batch_key(batch_id: str) -> str:
    """Stream: one entry per finished job."""
    return f"drk:batch:{batch_id}"


def batch_meta_key(batch_id: str) -> str:
    """Hash: owner, total, finished."""
    return f"drk:batchmeta:{batch_id}"


def worker_key(worker_id: str) -> str:
    """Hash with a short life: the worker's heartbeat."""
    return f"drk:worker:{worker_id}"


def cache_key(digest: str) -> str:
    """String: a result, by content."""
    return f"drk:cache:{digest}"


SUBMIT = """
-- ARGV: jobs (JSON array of flat objects), now, queue limit, owner, open limit, rate limit, ttl, batch (JSON or ''),
-- ids of tasks that must be kept here (JSON array). Returns {verb, ids, ids whose result is in the cache}: of the new
-- jobs if queued, of the missing tasks if 'tasks'
local jobs, now, owner, ttl = cjson.decode(ARGV[1]), ARGV[2], ARGV[4], ARGV[7]
local new = {}
for _, job in ipairs(jobs) do
  if redis.call('EXISTS', 'drk:job:' .. job.id) == 0 then new[#new + 1] = job end
end
if #new == 0 then return {'exists'} end
local missing = {}
for _, task in ipairs(cjson.decode(ARGV[9])) do
  local left = redis.call('TTL', 'drk:task:' .. task)
  if left == -2 then missing[#missing + 1] = task
  elseif left < tonumber(ttl) then redis.call('EXPIRE', 'drk:task:' .. task, ttl) end
end
if #missing > 0 then return {'tasks', missing} end
if redis.call('EXISTS', 'drk:draining') == 1 then return {'draining'} end
local open = redis.call('ZCARD', 'drk:waiting') + redis.call('ZCARD', 'drk:running')
if open + #new > tonumber(ARGV[3]) then return {'full'} end
local mine = tonumber(redis.call('HGET', 'drk:open', owner) or '0')
if mine + #new > tonumber(ARGV[5]) then return {'quota'} end
local rate = 'drk:rate:' .. owner .. ':' .. math.floor(tonumber(now) / 60)
if tonumber(redis.call('GET', rate) or '0') + #new > tonumber(ARGV[6]) then return {'rate'} end
redis.call('INCRBY', rate, #new)
redis.call('EXPIRE', rate, 120)
redis.call('HINCRBY', 'drk:open', owner, #new)
redis.call('HINCRBY', 'drk:metrics', 'submitted', #new)
if ARGV[8] ~= '' then
  local batch = cjson.decode(ARGV[8])
  local key = 'drk:batchmeta:' .. batch.id
  redis.call('HSETNX', key, 'finished', '0')
  redis.call('HSET', key, 'owner', owner, 'total', batch.total, 'submitted_at', now)
  redis.call('EXPIRE', key, ttl)
end
local ids, kept = {}, {}
for _, job in ipairs(new) do
  local flat = {}
  for name, value in pairs(job) do flat[#flat + 1] = name; flat[#flat + 1] = value end
  redis.call('HSET', 'drk:job:' .. job.id, 'state', 'waiting', 'submitted_at', now, 'owner', owner,
    'attempts', '0', 'deaths', '0', unpack(flat))
  redis.call('EXPIRE', 'drk:job:' .. job.id, ttl)
  redis.call('ZADD', 'drk:waiting', now, job.id)
  redis.call('ZADD', 'drk:deadlines', job.queue_deadline, job.id)
  ids[#ids + 1] = job.id
  if job.cache ~= '' and redis.call('EXISTS', 'drk:cache:' .. job.cache) == 1 then kept[#kept + 1] = job.id end
end
return {'queued', ids, kept}
"""

CLAIM = """
-- ARGV: id, worker, claim, now, most deaths. Returns {verb, field, value, ...}
local id, worker, claim, now = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local key = 'drk:job:' .. id
if redis.call('EXISTS', 'drk:result:' .. id) == 1 then return {'done'} end
local state = redis.call('HGET', key, 'state')
if not state then return {'gone'} end
local verb = 'run'
if redis.call('HGET', key, 'cancel') == '1' then
  verb = 'cancelled'
elseif state == 'running' then
  if redis.call('HGET', key, 'claim') ~= claim then
    if redis.call('EXISTS', 'drk:worker:' .. redis.call('HGET', key, 'worker')) == 1 then return {'busy'} end
    redis.call('HINCRBY', 'drk:metrics', 'worker_deaths', 1)
    if redis.call('HINCRBY', key, 'deaths', 1) >= tonumber(ARGV[5]) then verb = 'poison' end
  end
elseif tonumber(redis.call('HGET', key, 'queue_deadline')) < tonumber(now) then
  verb = 'expired'
end
if verb == 'run' then
  redis.call('HSET', key, 'state', 'running', 'worker', worker, 'claim', claim, 'started_at', now)
  redis.call('HINCRBY', key, 'attempts', 1)
  redis.call('ZREM', 'drk:waiting', id)
  redis.call('ZREM', 'drk:deadlines', id)
  redis.call('ZADD', 'drk:running', now, id)
end
local all = redis.call('HGETALL', key)
table.insert(all, 1, verb)
return all
"""

FINISH = """
-- ARGV: id, state, result, ttl, now, increments (JSON object), cache key or '', cache ttl
local id, state, ttl = ARGV[1], ARGV[2], ARGV[4]
if not redis.call('SET', 'drk:result:' .. id, ARGV[3], 'NX', 'EX', ttl) then return 0 end
redis.call('ZREM', 'drk:waiting', id)
redis.call('ZREM', 'drk:deadlines', id)
redis.call('ZREM', 'drk:running', id)
redis.call('XADD', 'drk:done', 'MAXLEN', '~', 20000, '*', 'job', id, 'state', state)
for name, value in pairs(cjson.decode(ARGV[6])) do redis.call('HINCRBYFLOAT', 'drk:metrics', name, value) end
if ARGV[7] ~= '' then redis.call('SET', ARGV[7], ARGV[3], 'EX', ARGV[8]) end
local key = 'drk:job:' .. id
if redis.call('EXISTS', key) == 0 then return 1 end
local found = redis.call('HMGET', key, 'owner', 'batch', 'index')
redis.call('HSET', key, 'state', state, 'finished_at', ARGV[5])
redis.call('HDEL', key, 'candidate')
redis.call('EXPIRE', key, ttl)
redis.call('HINCRBY', 'drk:open', found[1], -1)
if found[2] and found[2] ~= '' then
  local stream = 'drk:batch:' .. found[2]
  redis.call('XADD', stream, '*', 'job', id, 'index', found[3], 'state', state)
  redis.call('EXPIRE', stream, ttl)
  redis.call('HINCRBY', 'drk:batchmeta:' .. found[2], 'finished', 1)
  redis.call('EXPIRE', 'drk:batchmeta:' .. found[2], ttl)
end
return 1
"""

REQUEUE = """
-- ARGV: id, worker that is gone, most deaths, now. Returns '' (moved on by itself), 'poison', or queue and priority
local id, key = ARGV[1], 'drk:job:' .. ARGV[1]
if redis.call('HGET', key, 'state') ~= 'running' or redis.call('HGET', key, 'worker') ~= ARGV[2] then return {''} end
redis.call('HINCRBY', 'drk:metrics', 'worker_deaths', 1)
if redis.call('HINCRBY', key, 'deaths', 1) >= tonumber(ARGV[3]) then return {'poison'} end
redis.call('HSET', key, 'state', 'waiting', 'worker', '', 'claim', '')
redis.call('ZREM', 'drk:running', id)
redis.call('ZADD', 'drk:waiting', redis.call('HGET', key, 'submitted_at'), id)
-- It began in time once, so it gets at least as long again to begin as it may run.
local again = tonumber(ARGV[4]) + tonumber(redis.call('HGET', key, 'run_s'))
if tonumber(redis.call('HGET', key, 'queue_deadline')) < again then redis.call('HSET', key, 'queue_deadline', again) end
redis.call('ZADD', 'drk:deadlines', redis.call('HGET', key, 'queue_deadline'), id)
return {'requeued', redis.call('HGET', key, 'queue'), redis.call('HGET', key, 'priority')}
"""

CANCEL = """
-- ARGV: id. Returns the state that it found, after asking for an end
local key = 'drk:job:' .. ARGV[1]
local state = redis.call('HGET', key, 'state')
if state == 'waiting' or state == 'running' then redis.call('HSET', key, 'cancel', '1') end
return state or ''
"""

OPEN_OF_BATCH = """
-- ARGV: batch. Returns the ids of its jobs that wait or run
local found = {}
for _, set in ipairs({'drk:waiting', 'drk:running'}) do
  for _, id in ipairs(redis.call('ZRANGE', set, 0, -1)) do
    if redis.call('HGET', 'drk:job:' .. id, 'batch') == ARGV[1] then found[#found + 1] = id end
  end
end
return found
"""
