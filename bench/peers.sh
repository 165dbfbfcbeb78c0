#!/usr/bin/env bash
# Compares Reprise with llama.cpp and mlx-lm on this machine: sets the peers up where they are missing, then runs peers.py.
# Called by `./run bench peers`. usage: peers.sh PROGRAM MODEL [--peers DIR] [peers.py's arguments…]
#   PROGRAM: reprise, in a folder with the measuring programs, or any other: build/bench is then looked at
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(dirname "$here")
program=${1:?usage: peers.sh PROGRAM MODEL [ARGS…]}
model=${2:?usage: peers.sh PROGRAM MODEL [ARGS…]}
shift 2

. "$here/peers_setup.sh"

programs=$(dirname "$program")
if [ ! -x "$programs/stream" ]; then programs=$root/build/bench/bin && program=$programs/reprise; fi
for needed in reprise stream gemm save_load; do
  [ -x "$programs/$needed" ] && continue
  echo "peers.sh: there is no $programs/$needed: cmake --preset bench && cmake --build --preset bench makes it" >&2
  exit 1
done

exec "$peers/bin/python" "$here/peers.py" --program "$program" --programs "$programs" --model "$model" --peers "$peers" \
  --mlx-lm-bench "$shared/mlx_lm_bench.py" ${arguments[@]+"${arguments[@]}"}
