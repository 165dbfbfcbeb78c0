# Sourced by ./run: configures and builds a preset of CMakePresets.json.
# shellcheck shell=bash disable=SC2154 # set by ./run

program() { echo "$root/build/$1/bin/reprise"; }

# configure PRESET: only when its inputs have changed; ninja itself notices changed CMake files.
configure() {
  local preset=$1 inputs
  local mlx_dir=${MLX_DIR:-$mlx_folder/mlx/share/cmake/MLX}
  set -- "-DMLX_DIR=$mlx_dir" "-DREPRISE_CARGO=$(rust_bin)/cargo"
  if [ -d "$sysroot/usr" ]; then set -- "$@" "-DCMAKE_PREFIX_PATH=$sysroot/usr"; fi
  if is_macos; then set -- "$@" "-DOPENSSL_ROOT_DIR=$(brew --prefix openssl@3)"; fi
  if command -v ccache >/dev/null; then set -- "$@" -DCMAKE_CXX_COMPILER_LAUNCHER=ccache; fi
  case $preset in
    release | dev)
      if python_is_ready; then set -- "$@" -DREPRISE_BUILD_PYTHON=ON "-DPython_EXECUTABLE=$python"; fi
      ;;
  esac
  if [ "${CI:-}" = true ]; then set -- "$@" -DCMAKE_COMPILE_WARNING_AS_ERROR=ON; fi

  inputs=$(printf '%s\n' "$@" "${CC:-}" "${CXX:-}" "${CXXFLAGS:-}" | cat - "$root/CMakePresets.json" | sha256)
  if ! stamp_is "configure-$preset" "$inputs" || [ ! -e "$root/build/$preset/build.ninja" ]; then
    unstamp "configure-$preset"
    # A stale cache may name tools and libraries that are no longer there.
    rm -f "$root/build/$preset/CMakeCache.txt"
    (cd "$root" && cmake --preset "$preset" "$@") || build_failed
    stamp "configure-$preset" "$inputs"
  fi
}

# build PRESET [TARGET…]: without targets, those of the build preset.
build() {
  local preset=$1 target
  shift
  local bin
  bin=$(rust_bin)
  export PATH="$bin:$PATH"
  configure "$preset"
  local command="cmake --build --preset $preset"
  for target in "$@"; do command="$command --target $target"; done
  if (cd "$root" && $command -- -n 2>/dev/null) | grep -q 'no work to do'; then return 0; fi
  (cd "$root" && $command) || build_failed
}

# The next call looks at everything again.
build_failed() {
  unstamp setup rust
  die "the build failed, see above"
}
