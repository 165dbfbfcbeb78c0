# Sourced by ./run: `lint` and `format`. The clang tools are installed only for these.
# shellcheck shell=bash disable=SC2154 # set by ./run

clang_tools() {
  is_macos && return 0
  install_packages "$@"
}

tracked_sources() { git -C "$root" ls-files '*.h' '*.cpp'; }

# C++ sources that differ from the main branch, or from the last commit on it.
changed_sources() {
  local base
  base=$(git -C "$root" merge-base HEAD origin/main 2>/dev/null || true)
  if [ -z "$base" ] || [ "$base" = "$(git -C "$root" rev-parse HEAD)" ]; then
    base=$(git -C "$root" rev-parse -q --verify HEAD~1 || git -C "$root" rev-parse HEAD)
  fi
  git -C "$root" diff --name-only --diff-filter=d "$base" -- 'reprise/*.cpp' 'apps/*.cpp' 'examples/*.cpp'
}

format() {
  clang_tools git clang-format
  cd "$root" || return
  tracked_sources | xargs clang-format -i
}

# lint [--all]: clang-tidy looks at the changed files, or at all.
lint() {
  clang_tools git clang-format clang-tidy
  build dev base_unit_tests
  cd "$root" || return
  local failed=0 sources
  say "clang-format"
  tracked_sources | xargs clang-format --dry-run -Werror || failed=1
  say "include table"
  build/dev/bin/base_unit_tests --gtest_brief=1 --gtest_filter='Layers.*' || failed=1
  if [ "${1:-}" = --all ]; then
    sources=$(tracked_sources | grep -E '^(reprise|apps)/.*\.cpp$' || true)
  else
    sources=$(changed_sources)
  fi
  if [ -n "$sources" ]; then
    say "clang-tidy: $(echo "$sources" | wc -l) files"
    echo "$sources" | xargs -n 1 -P "$(getconf _NPROCESSORS_ONLN)" clang-tidy --quiet -p build/dev 2>/dev/null || failed=1
  fi
  if [ $failed != 0 ]; then die "lint found something; ./run format mends the formatting"; fi
  say "nothing to complain about"
}
