# Sourced by ./run: what the Python package is built and tested with, for `./run test` and `./run build` alone. A private
# virtual environment of the system's Python, with pinned, hash-checked wheels; and the small model as mlx-lm loads it.
# shellcheck shell=bash disable=SC2154 # set by ./run and tools/setup.sh

python_folder=$cache/python
python=$python_folder/bin/python
mlx_model_folder=$cache/models/smollm2-mlx

# Says why and does nothing where the pinned wheels do not fit: all else builds without Python.
setup_python() {
  local system inputs
  if [ -n "${MLX_DIR:-}" ]; then
    say "MLX_DIR is set; the Python package needs the MLX of its Python, so it is left out"
    return 0
  fi
  system=$(python3 -c 'import platform, sys; print(sys.platform, platform.machine(), "%d.%d" % sys.version_info[:2])')
  case $system in
    "linux x86_64 3.1"[123] | "linux aarch64 3.1"[123]) ;;
    *)
      say "the Python package is left out: its pinned wheels are for Python 3.11 to 3.13 on Linux, and this is $system"
      return 0
      ;;
  esac
  inputs=$({ echo "$system" && cat "$root/tools/requirements_python.txt"; } | sha256)
  if ! python_is_ready || ! stamp_is python "$inputs $(readlink -f "$python")"; then
    install_packages python3-dev python3-venv
    say "fetching mlx-lm and nanobind for the Python tests"
    unstamp python
    rm -rf "$python_folder"
    python3 -m venv "$python_folder" || die "could not make the virtual environment .cache/python"
    "$python" -m pip install --quiet --disable-pip-version-check --no-compile --require-hashes --only-binary :all: \
      -r "$root/tools/requirements_python.txt" || die "could not install what tools/requirements_python.txt names"
    stamp python "$inputs $(readlink -f "$python")"
  fi
}

# Is the environment there, and made by the Python that it runs now?
python_is_ready() {
  [ -z "${MLX_DIR:-}" ] && [ -x "$python" ] && [ -e "$cache/stamps/python" ] &&
    case $(cat "$cache/stamps/python") in *" $(readlink -f "$python")") true ;; *) false ;; esac
}

# Needs fetch_model.
convert_model() {
  python_is_ready || return 0
  local inputs
  inputs=$(cat "$root/tools/gguf_to_mlx.py" "$root/tools/requirements_model.txt" | sha256)
  if ! stamp_is mlx_model "$inputs" || [ ! -d "$mlx_model_folder" ]; then
    say "converting the small model for mlx-lm"
    rm -rf "$mlx_model_folder" "$mlx_model_folder.new"
    "$python" "$root/tools/gguf_to_mlx.py" "$model_file" "$mlx_model_folder.new" || die "could not convert the small model"
    mv "$mlx_model_folder.new" "$mlx_model_folder"
    stamp mlx_model "$inputs"
  fi
}
