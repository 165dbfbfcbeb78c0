#!/usr/bin/env bash
# Compares many conversations at once with llama-server and mlx_lm.server: sets the peers up where they are missing, then
# runs engine_peers.py. Called by `./run bench engine-peers`.
# usage: engine_peers.sh PROGRAM MODEL [--peers DIR] [engine_peers.py's arguments…]
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(dirname "$here")
program=${1:?usage: engine_peers.sh PROGRAM MODEL [ARGS…]}
model=${2:?usage: engine_peers.sh PROGRAM MODEL [ARGS…]}
shift 2
. "$here/peers_setup.sh"

gemma3=${REPRISE_GEMMA3:-$root/.cache/models/gemma-3-270m-q4_k_m.gguf}
if [ -e "$gemma3" ]; then arguments+=(--gemma3 "$gemma3"); fi
exec "$peers/bin/python" "$here/engine_peers.py" --program "$program" --model "$model" --peers "$peers" \
  --models "$(dirname "$shared")/models" ${arguments[@]+"${arguments[@]}"}
