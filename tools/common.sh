# Sourced by ./run: messages, the lock, stamps. Needs $cache.
# shellcheck shell=bash disable=SC2154 # set by ./run

say() { printf 'run: %s\n' "$*" >&2; }
die() {
  say "$*"
  exit 1
}

is_macos() { [ "$(uname -s)" = Darwin ]; }

# One ./run at a time sets up and builds; the lock is given up before the program starts.
lock() {
  mkdir -p "$cache/stamps"
  command -v flock >/dev/null || return 0 # macOS
  exec 9>"$cache/lock"
  if ! flock -n 9; then
    say "waiting for another ./run to finish its build"
    flock 9
  fi
}
unlock() { exec 9>&-; }

sha256() { if command -v sha256sum >/dev/null; then sha256sum; else shasum -a 256; fi; }

# A stamp says that a step was done for these inputs. stamp_is NAME INPUTS; stamp NAME INPUTS; unstamp NAME…
stamp_is() { [ -e "$cache/stamps/$1" ] && [ "$(cat "$cache/stamps/$1")" = "$2" ]; }
stamp() { printf '%s\n' "$2" >"$cache/stamps/$1.new" && mv "$cache/stamps/$1.new" "$cache/stamps/$1"; }
unstamp() {
  local name
  for name in "$@"; do rm -f "$cache/stamps/$name"; done
}
