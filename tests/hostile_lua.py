"""Lua that does what it must not, chosen by the name in each message."""

from __future__ import annotations

import json
from typing import Final

STOPPED: Final = "stopped after 100 ms of CPU time"
MEMORY: Final = "64 MiB"

MISDEEDS = {
    "loop": ("while true do end", STOPPED),
    "goto": ("::again:: goto again", STOPPED),
    "pcall": ("while true do pcall(function() while true do end end) end", STOPPED),
    "pcalls": ("local function f() pcall(f) while true do end end f()", STOPPED),
    "handler": ("xpcall(error, function() while true do end end)", STOPPED),
    "closing": (
        "local x <close> = setmetatable({}, {__close = function() while true do end end}) error()",
        STOPPED,
    ),
    "finalizer": ("setmetatable({}, {__gc = function() while true do end end})", "__gc is refused"),
    "coroutine": ("coroutine.wrap(function() while true do end end)()", "global 'coroutine'"),
    "pattern": ("return (('a'):rep(100000)):find('.-.-.-.-b')", "inside one call"),
    "patterns": ("while true do pcall(string.find, ('a'):rep(3000), '.-.-.-b') end", "inside one call"),
    "captures": ("return (('a'):rep(1000000)):match('(.*)(.*)(.*)(.*)b')", "inside one call"),
    "gigabyte": ("local s = ('x'):rep(1 << 30)", "64 MiB"),
    "overflow": ("local s = ('x'):rep(math.maxinteger)", "too large"),
    "doubling": ("local s = 'x' while true do s = s .. s end", MEMORY),
    "caught": ("local t = {} while true do pcall(function() t[#t + 1] = ('x'):rep(1 << 20) end) end",
               ""),
    "table": ("local s, t = ('x'):rep(1 << 16), {} for i = 1, 1e9 do t[i] = s .. i end", MEMORY),
    "replaced": ("local s = ('x'):rep(1 << 20):gsub('.', ('y'):rep(1000))", MEMORY),
    "answer": ("local s = ('x'):rep(1 << 20) r.a = {} for i = 1, 1000 do r.a[i] = s end return m",
               ""),
    "many": ("local l = {} for i = 1, 1e6 do l[i] = m end return l", "at most 1000 are taken"),
    "endless": ("r.a = r return m", "nested more than"),
    "recursion": ("local function f() return 1 + f() end f()", ""),
    "c stack": ("local function f(s) return (s:gsub('.', f)) end f('x')", "C stack overflow"),
    "sort": ("local t = {} for i = 1, 1e6 do t[i] = i end "
             "table.sort(t, function() while true do end end)", STOPPED),
    "os": ("os.execute('touch /tmp/x')", "global 'os'"),
    "io": ("io.open('/etc/passwd')", "global 'io'"),
    "require": ("require('os')", "global 'require'"),
    "debug": ("debug.sethook()", "global 'debug'"),
    "package": ("package.loadlib('libc.so.6', '*')", "global 'package'"),
    "load": ("load('return 1')()", "global 'load'"),
    "loadstring": ("loadstring('return 1')()", "global 'loadstring'"),
    "dofile": ("dofile('/etc/passwd')", "global 'dofile'"),
    "dump": ("string.dump(transform)", "field 'dump'"),
    "ffi": ("ffi.cdef('')", "global 'ffi'"),
    "python": ("python.eval('1')", "global 'python'"),
    "globals": ("return _G._G._ENV.os.exit()", "attempt to index a nil value"),
    "texts": ("getmetatable('').__index.upper = nil", "attempt to index a boolean value"),
    "null": ("null:close()", "attempt to index a null value"),
    "null's": ("getmetatable(null).__index = _G", "attempt to index a boolean value"),
    "collect": ("collectgarbage('stop')", "global 'collectgarbage'"),
    "error": ("error(setmetatable({}, {__tostring = function() while true do end end}))",
              "an error was raised that is a table"),
    "length": ("return setmetatable({}, {__index = function() while true do end end})", STOPPED),
    "bytes": ("r.name = '\\xff\\xfe' return m", "not valid UTF-8"),
    "nan": ("r.a = 0 / 0 return m", "nan, which JSON lacks"),
    "function": ("r.a = {transform} return m", "is a function"),
    "action": ("m.action = 'x\\r\\nPUB y' return m", "expected one of insert"),
}  # fmt: skip
"""What a message's `name` makes the program do, and what the reason of its failure holds."""


def expects(name: str, reason: str) -> bool:
    """Return whether `reason` is one for which this misdeed may be refused.

    What takes memory step by step takes time too: on a slow machine that runs out first.
    """
    expected = MISDEEDS[name][1]
    return expected in reason or (expected is MEMORY and STOPPED in reason)


def program() -> str:
    """Return a program that commits the misdeed that a record names, and else returns the message."""
    misdeeds = "\n".join(
        f"  [{json.dumps(name)}] = function(m, r) {code} end,"
        for name, (code, _) in MISDEEDS.items()
    )
    return f"""\
local misdeeds = {{
{misdeeds}
}}
function transform(m)
  local r = m.record
  local misdeed = misdeeds[r.name]
  if misdeed then return misdeed(m, r) end
  return m
end
"""
