-- What the operator's Lua runs in, and what runs it: loaded once into a new runtime of Lua 5.4, before
-- the operator's code, with the program, the time limit in seconds, and the names of the
-- reserved metadata.
--
-- The program sees the globals of `env` alone. What could load code, reach files or Python, change the
-- hook, or run outside of it (coroutines and finalizers have no hook) is not among them. Here everything
-- is a local taken before the program starts, so nothing that it does to a table matters.
--
-- A hook counts instructions and looks at the CPU time. One call of a library function is one instruction,
-- however long it takes: for that the process has a timer, see lua_helper.py.

local program, seconds, reserved = ...

local NAME <const> = "transform"

local clock, sethook, getinfo = os.clock, debug.sethook, debug.getinfo
local type, next, select, error, pcall, load = type, next, select, error, pcall, load
local rawget, rawequal, rawlen, rawset = rawget, rawequal, rawlen, rawset
local getmetatable, setmetatable, tostring, collect = getmetatable, setmetatable, tostring, collectgarbage
local find, gsub, format, byte, match = string.find, string.gsub, string.format, string.byte, string.match
local sub = string.sub
local concat, sort, unpack = table.concat, table.sort, table.unpack
local utf8len, huge, mathtype = utf8.len, math.huge, math.type

local DEPTH <const> = 200
local MOST <const> = 1000
local TEXT <const> = 500

-- Errors --------------------------------------------------------------------------------------------

-- Raised at the limit, and again by every protected call, so that no program can catch it.
local EXPIRED = {}
-- Of a value that was returned and is no message.
local BAD = {}

local deadline, expired, where = huge, false, ""

local function bad(text, ...)
  error(setmetatable({format(text, ...)}, BAD), 0)
end

-- The line of the program that runs, for errors without one.
local function line()
  for level = 2, 60 do
    local info = getinfo(level, "Sl")
    if not info then return "" end
    if info.source == "=" .. NAME then return info.currentline end
  end
  return ""
end

local function hook()
  if clock() > deadline then
    if not expired then
      expired, where = true, line()
    end
    error(EXPIRED, 0)
  end
end

local function guarded(ok, ...)
  if expired then error(EXPIRED, 0) end
  return ok, ...
end

-- The sandbox -----------------------------------------------------------------------------------------

-- JSON's null: true in a condition, unlike nil, and it stays where it is stored. A userdata, so that no
-- program can put fields into it.
local null = io.stdout
debug.setmetatable(null, {
  __name = "null", __metatable = false, __tostring = function() return "null" end,
})
local ARRAY = {__name = "array", __metatable = false}

local env = {
  assert = assert, error = error, ipairs = ipairs, next = next, pairs = pairs, rawequal = rawequal,
  rawget = rawget, rawlen = rawlen, rawset = rawset, select = select, getmetatable = getmetatable,
  tonumber = tonumber, tostring = tostring, type = type, unpack = unpack, _VERSION = _VERSION,
  null = null,
  string = {
    byte = byte, char = string.char, find = find, format = format, gmatch = string.gmatch, gsub = gsub,
    len = string.len, lower = string.lower, match = match, rep = string.rep,
    reverse = string.reverse, sub = sub, upper = string.upper,
  },
  table = {
    concat = concat, insert = table.insert, move = table.move, pack = table.pack,
    remove = table.remove, sort = sort, unpack = unpack,
  },
  -- Without random: a message that is sent again would not be the same.
  math = {
    abs = math.abs, ceil = math.ceil, exp = math.exp, floor = math.floor, fmod = math.fmod,
    huge = huge, log = math.log, max = math.max, maxinteger = math.maxinteger, min = math.min,
    mininteger = math.mininteger, modf = math.modf, pi = math.pi, sqrt = math.sqrt,
    tointeger = math.tointeger, type = mathtype, ult = math.ult, sin = math.sin, cos = math.cos,
    tan = math.tan, asin = math.asin, acos = math.acos, atan = math.atan,
  },
  utf8 = {
    char = utf8.char, charpattern = utf8.charpattern, codepoint = utf8.codepoint,
    codes = utf8.codes, len = utf8len, offset = utf8.offset,
  },
}
env._G = env

function env.pcall(f, ...)
  return guarded(pcall(f, ...))
end

-- The handler of Lua's own xpcall runs with the hook off; here it comes after.
local function handled(handler, ok, ...)
  if expired then error(EXPIRED, 0) end
  if ok then return true, ... end
  return false, handler(...)
end

function env.xpcall(f, handler, ...)
  return handled(handler, pcall(f, ...))
end

function env.setmetatable(t, meta)
  if type(meta) == "table" and rawget(meta, "__gc") ~= nil then
    error("a metatable with __gc is refused: finalizers would run outside of the time limit", 2)
  end
  return setmetatable(t, meta)
end

-- Marks a table as a JSON array, which matters for an empty one.
function env.array(t)
  if t == nil then t = {} end
  if type(t) ~= "table" then error("array: expected a table, or nothing for an empty one", 2) end
  return setmetatable(t, ARRAY)
end

-- Methods of texts (`s:upper()`) come from the same table, and its metatable is not to be had.
local texts = getmetatable("")
texts.__index = env.string
texts.__metatable = false

-- A value as an error names it.
local function kind(value)
  if value == nil then return "nil" end
  if rawequal(value, null) then return "null" end
  return "a " .. type(value)
end

-- JSON --------------------------------------------------------------------------------------------------

local out, n, path = {}, 0, {}

local function at(depth, last)
  local parts = {}
  for i = 1, depth do
    local key = path[i]
    if type(key) == "number" then
      parts[i] = format("[%d]", key)
    else
      parts[i] = (i > 1 and "." or "") .. gsub(tostring(key), "[^\32-\126]", "?")
    end
    if #parts[i] > 60 then parts[i] = sub(parts[i], 1, 60) .. "…" end
  end
  return concat(parts) .. (last or "")
end

local escapes = {['"'] = '\\"', ["\\"] = "\\\\", ["\n"] = "\\n", ["\r"] = "\\r", ["\t"] = "\\t"}
setmetatable(escapes, {__index = function(_, c) return format("\\u%04x", byte(c)) end})

local function text(s, depth)
  if find(s, '[%z\1-\31"\\\128-\255]') then
    if find(s, "[\128-\255]") and not utf8len(s) then
      bad("%s is not valid UTF-8", at(depth))
    end
    s = gsub(s, '[%z\1-\31"\\]', escapes)
  end
  return '"' .. s .. '"'
end

local function number(v, depth)
  if mathtype(v) == "integer" then return format("%d", v) end
  if v ~= v or v == huge or v == -huge then
    local what = v ~= v and "nan" or tostring(v)
    bad("%s is %s, which JSON lacks: make it text, or null", at(depth), what)
  end
  for digits = 15, 17 do
    local s = format("%." .. digits .. "g", v)
    if tonumber(s) == v or digits == 17 then
      return find(s, "[.e]") and s or s .. ".0"
    end
  end
end

local labels, labelled = {}, 0

local function label(key, depth)
  local found = labels[key]
  if not found then
    if labelled > 10000 then labels, labelled = {}, 0 end
    found = text(key, depth) .. ":"
    labels[key], labelled = found, labelled + 1
  end
  return found
end

local function put(s)
  n = n + 1
  out[n] = s
end

local write

-- The keys of an object in order, so that a message is the same bytes whenever it is made.
local function names(t, depth)
  local keys, count = {}, 0
  for key in next, t do
    if type(key) ~= "string" then
      bad("%s has the key %s: expected an array from 1 on, or text as keys",
        at(depth), type(key) == "number" and tostring(key) or kind(key))
    end
    count = count + 1
    keys[count] = key
  end
  sort(keys)
  return keys, count
end

local function members(t, depth)
  put("{")
  local keys, count = names(t, depth)
  for i = 1, count do
    local key = keys[i]
    path[depth + 1] = key
    if i > 1 then put(",") end
    put(label(key, depth + 1))
    write(rawget(t, key), depth + 1)
  end
  put("}")
end

local function elements(t, length, depth)
  put("[")
  local count = 0
  for _ in next, t do count = count + 1 end
  for i = 1, length do
    local value = rawget(t, i)
    path[depth + 1] = i
    if value == nil then bad("%s is missing: write null for an element without a value", at(depth + 1)) end
    if i > 1 then put(",") end
    write(value, depth + 1)
  end
  if count ~= length then
    bad("%s has both numbers and other keys: expected an array from 1 on, or text as keys", at(depth))
  end
  put("]")
end

function write(value, depth)
  local t = type(value)
  if t == "string" then put(text(value, depth))
  elseif t == "number" then put(number(value, depth))
  elseif t == "boolean" then put(value and "true" or "false")
  elseif rawequal(value, null) then put("null")
  elseif t ~= "table" then
    bad("%s is %s: expected text, a number, true or false, null or a table", at(depth), kind(value))
  elseif depth > DEPTH then
    bad("%s… is nested more than %d levels deep", at(3), DEPTH)
  else
    local length = rawlen(value)
    if length > 0 then elements(value, length, depth)
    elseif rawequal(getmetatable(value), false) and next(value) == nil then put("[]")
    else members(value, depth) end
  end
end

-- Messages ----------------------------------------------------------------------------------------------

-- In a copy, what is compared with the fields that come back; no table is ever equal to it.
local TABLE = setmetatable({}, {__eq = function() return false end})

local function copied(t)
  local copy, count = {}, 0
  for key, value in next, t do
    if type(value) == "table" then value = TABLE end
    copy[key], count = value, count + 1
  end
  return copy, count
end

-- What differs from the `count` captured fields: a JSON object of those to set, an array of those to drop;
-- nil for none. Tables are always among them: they may have been changed in place.
local function difference(new, old, count, what)
  local changed
  for key, value in next, new do
    if value ~= old[key] then
      changed = changed or {}
      changed[key] = value
    end
    count = count - 1
  end
  if not changed and count == 0 then return end
  path[1] = what
  local set, dropped
  if changed then
    n = 0
    members(changed, 1)
    set = concat(out, "", 1, n)
  end
  for key in next, old do
    if rawget(new, key) == nil then
      dropped = dropped or {}
      dropped[#dropped + 1] = text(key, 1)
    end
  end
  return set, dropped and "[" .. concat(dropped, ",") .. "]"
end

local captured = {}
for i = 1, #reserved do captured[reserved[i]] = true end
local fields = {record = true, changes = true, action = true, metadata = true}

local function checked(value, what)
  if type(value) ~= "table" or rawlen(value) > 0 then
    bad("%s is %s: expected a table with names as keys", what,
      type(value) == "table" and "an array" or kind(value))
  end
  return value
end

-- A message as the helper takes it: what to set in and drop from record and changes (false: there are
-- none), the action or nil, the metadata to add or nil.
local function output(message, prefix, record, size, changes, changed, action)
  for key in next, message do
    if not fields[key] then
      bad("returned a message with %s: expected record, changes, action and metadata",
        type(key) == "string" and "'" .. key .. "'" or "the key " .. kind(key))
    end
  end
  local what = prefix .. "record"
  local set, dropped = difference(checked(message.record, what), record, size, what)
  local cset, cdropped = nil, nil
  if message.changes == nil or rawequal(message.changes, null) then
    cset = false
  else
    what = prefix .. "changes"
    cset, cdropped = difference(checked(message.changes, what), changes or {}, changed or 0, what)
    if not cset and not changes then cset = "{}" end
  end
  local new = message.action
  if rawequal(new, null) or rawequal(new, action) then new = nil end
  if new ~= nil and type(new) ~= "string" then
    bad("%saction is %s: expected text", prefix, kind(new))
  end
  if new and not utf8len(new) then bad("%saction is not valid UTF-8", prefix) end
  local metadata, extras = message.metadata, nil
  if metadata ~= nil and not rawequal(metadata, null) then
    checked(metadata, prefix .. "metadata")
    local added
    for key, value in next, metadata do
      if not captured[key] then
        added = added or {}
        added[key] = value
      end
    end
    if added then
      path[1], n = prefix .. "metadata", 0
      members(added, 1)
      extras = concat(out, "", 1, n)
    end
  end
  return set, dropped, cset, cdropped, new, extras
end

local transform
local more = {}

local function work(record, changes, action, metadata)
  local old, size = copied(record)
  local oldchanges, changed
  if changes then oldchanges, changed = copied(changes) end
  local result = transform({record = record, changes = changes, action = action, metadata = metadata})
  if result == nil or rawequal(result, null) then return 0 end
  if type(result) ~= "table" then
    bad("returned %s: expected a message (a table), a list of them, or nil", kind(result))
  end
  if result.record ~= nil then
    return 1, output(result, "", old, size, oldchanges, changed, action)
  end
  local length = rawlen(result)
  if length == 0 then
    if next(result) == nil then return 0 end
    bad("returned a message without record: expected a table there")
  end
  if length > MOST then bad("returned %d messages: at most %d are taken", length, MOST) end
  more = {}
  for i = 1, length do
    local message = rawget(result, i)
    if type(message) ~= "table" then
      bad("returned %s at [%d]: expected a message (a table)", kind(message), i)
    end
    more[i] = {output(message, format("[%d].", i), old, size, oldchanges, changed, action)}
  end
  return length
end

-- An error's text as UTF-8, not too long, without what a terminal would take for commands.
local function printable(e)
  e = tostring(e)
  if #e > TEXT then
    local last = TEXT
    -- Not within a character.
    while last > TEXT - 4 and byte(e, last + 1) // 64 == 2 do last = last - 1 end
    e = sub(e, 1, last) .. "…"
  end
  if not utf8len(e) then e = gsub(e, "[\128-\255]", "?") end
  return (gsub(e, "[%z\1-\9\11-\31\127]", "?"))
end

local function explained(e)
  if rawequal(e, EXPIRED) or expired then return "time", where end
  if e == "not enough memory" then return "memory", "" end
  if type(e) == "string" then return "error", e end
  if type(e) == "table" and rawequal(getmetatable(e), BAD) then return "bad", e[1] end
  if type(e) == "number" then return "error", tostring(e) end
  return "error", "an error was raised that is " .. kind(e) .. ", not text"
end

local function ended(ok, ...)
  deadline = huge
  if ok and not expired then return ... end
  local sort, what = explained(...)
  expired, more = false, {}
  if #out > 10000 then out = {} end
  return -1, sort, printable(what)
end

-- Transform a message in so many seconds of CPU time; returns how many came of it, then what `output` returns
-- for the only one, or -1, the kind of failure and its text.
local function run(record, changes, action, metadata, limit)
  deadline = clock() + limit
  return ended(pcall(work, record, changes, action, metadata))
end

-- The `i`-th of several.
local function take(i)
  return unpack(more[i], 1, 6)
end

local function array()
  return setmetatable({}, ARRAY)
end

-- The program ---------------------------------------------------------------------------------------------

sethook(hook, "", 1000)
local chunk, problem = load(program, "=" .. NAME, "t", env)
if not chunk then return nil, "syntax", printable(problem) end
deadline = clock() + seconds
local ok, e = pcall(chunk)
deadline = huge
if not ok or expired then
  local sort, what = explained(e)
  return nil, sort, printable(what)
end
transform = env.transform
if type(transform) ~= "function" then return nil, "none", type(transform) end
return run, take, array, null
