"""The store's Lua scripts run by a real Lua 5.1, over a table of commands instead of a server."""

from collections.abc import Callable
from functools import cache
from typing import Any

from lupa.luajit21 import LuaRuntime

#: What the server gives scripts: JSON as the server's library writes it, and calls that go to `perform`.
_LIBRARY = r"""
local perform = ...
local escapes = { ['"'] = '\\"', ['\\'] = '\\\\', ['\b'] = '\\b', ['\f'] = '\\f', ['\n'] = '\\n', ['\r'] = '\\r', ['\t'] = '\\t',
  ['/'] = '\\/' }
local function quoted(text)
  return '"' .. string.gsub(text, '[%c"\\/]', function(c)
    return escapes[c] or string.format('\\u%04x', string.byte(c))
  end) .. '"'
end
local encode
encode = function(value)
  local kind = type(value)
  if kind == 'string' then return quoted(value) end
  if kind == 'number' then return string.format('%.14g', value) end
  if kind == 'boolean' then return tostring(value) end
  if kind == 'nil' then return 'null' end
  local parts = {}
  if #value > 0 then
    for i, one in ipairs(value) do parts[i] = encode(one) end
    return '[' .. table.concat(parts, ',') .. ']'
  end
  for name, one in pairs(value) do parts[#parts + 1] = quoted(tostring(name)) .. ':' .. encode(one) end
  return '{' .. table.concat(parts, ',') .. '}'
end
local back = { b = '\b', f = '\f', n = '\n', r = '\r', t = '\t' }
local function utf8_of(code)
  if code < 128 then return string.char(code) end
  if code < 2048 then return string.char(192 + math.floor(code / 64), 128 + code % 64) end
  return string.char(224 + math.floor(code / 4096), 128 + math.floor(code / 64) % 64, 128 + code % 64)
end
local function string_at(text, at)
  local from, parts = at + 1, nil
  while true do
    local stop = string.find(text, '["\\]', from)
    if string.byte(text, stop) == 34 then
      local last = string.sub(text, from, stop - 1)
      if not parts then return last, stop + 1 end
      parts[#parts + 1] = last
      return table.concat(parts), stop + 1
    end
    parts = parts or {}
    parts[#parts + 1] = string.sub(text, from, stop - 1)
    local c = string.sub(text, stop + 1, stop + 1)
    if c == 'u' then
      parts[#parts + 1] = utf8_of(tonumber(string.sub(text, stop + 2, stop + 5), 16))
      from = stop + 6
    else
      parts[#parts + 1] = back[c] or c
      from = stop + 2
    end
  end
end
local value_at
local function list_at(text, at)
  local list = {}
  at = string.find(text, '%S', at + 1)
  if string.sub(text, at, at) == ']' then return list, at + 1 end
  while true do
    list[#list + 1], at = value_at(text, at)
    at = string.find(text, '%S', at)
    if string.sub(text, at, at) == ']' then return list, at + 1 end
    at = at + 1
  end
end
local function object_at(text, at)
  local object, name = {}, nil
  at = string.find(text, '%S', at + 1)
  if string.sub(text, at, at) == '}' then return object, at + 1 end
  while true do
    at = string.find(text, '"', at, true)
    name, at = string_at(text, at)
    at = string.find(text, ':', at, true) + 1
    object[name], at = value_at(text, at)
    at = string.find(text, '%S', at)
    if string.sub(text, at, at) == '}' then return object, at + 1 end
    at = at + 1
  end
end
value_at = function(text, at)
  at = string.find(text, '%S', at)
  local c = string.sub(text, at, at)
  if c == '"' then return string_at(text, at) end
  if c == '[' then return list_at(text, at) end
  if c == '{' then return object_at(text, at) end
  if c == 't' then return true, at + 4 end
  if c == 'f' then return false, at + 5 end
  if c == 'n' then return nil, at + 4 end
  local from, to = string.find(text, '^[-+%d.eE]+', at)
  return tonumber(string.sub(text, from, to)), to + 1
end
cjson = { encode = encode, decode = function(text) return (value_at(text, 1)) end }
redis = {
  call = function(...) return perform({ ... }) end,
  error_reply = function(text) return { err = text } end,
}
"""


class ScriptError(Exception):
    """A script answered with an error."""


class Scripts:
    """Compiled scripts; `perform` carries out one command of whichever server runs a script now."""

    def __init__(self) -> None:
        self._lua = LuaRuntime(unpack_returned_tuples=True)
        self._perform: Callable[[list[str]], Any] | None = None
        self._compiled: dict[str, Any] = {}
        self._lua.execute(_LIBRARY, self._called)

    def run(self, text: str, keys: list[str], arguments: list[str], perform: Callable[[list[str]], Any]) -> Any:
        """One run. Raises ScriptError."""
        compiled = self._compiled.get(text)
        if compiled is None:
            compiled = self._compiled[text] = self._lua.eval("loadstring")(f"local KEYS, ARGV = ... ; {text}")
        self._perform = perform
        answer = compiled(self._lua.table_from(keys), self._lua.table_from(arguments))
        return self._to_python(answer)

    def _called(self, words: Any) -> Any:
        assert self._perform is not None
        answer = self._perform([_text(word) for word in words.values()])
        if answer is None:
            return False
        if not isinstance(answer, list):
            return answer
        return self._lua.table_from([False if one is None else one for one in answer])

    def _to_python(self, answer: Any) -> Any:
        """As the server turns a script's answer into a reply."""
        if answer is False or answer is None:
            return None
        if answer is True:
            return 1
        if isinstance(answer, int | float):
            return int(answer)
        if isinstance(answer, str):
            return answer
        if answer["err"] is not None:
            raise ScriptError(answer["err"])
        return [self._to_python(one) for one in answer.values()]


@cache
def scripts() -> Scripts:
    """One Lua for all worlds of this process: scripts keep nothing between runs."""
    return Scripts()


def _text(word: Any) -> str:
    if isinstance(word, float):
        return str(int(word)) if word.is_integer() else repr(word)
    return str(word)
