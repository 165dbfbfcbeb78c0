# Sourced by peers.sh and engine_peers.sh, with their arguments: takes --peers out of them, and sets the peers up where
# they are missing. Sets peers, shared and arguments.
# shellcheck shell=bash disable=SC2154 # root is set by who sources it
peers=${REPRISE_PEERS:-$root/.cache/peers}
arguments=()
while [ $# -gt 0 ]; do
  case $1 in
    --peers) peers=${2:?--peers needs a folder} && shift 2 ;;
    --peers=*) peers=${1#--peers=} && shift ;;
    *) arguments+=("$1") && shift ;;
  esac
done

shared=${REPRISE_TEST_DATA:-$root/../shared}/peers
if [ ! -x "$peers/bin/llama-bench" ] || [ ! -x "$peers/bin/llama-server" ] || [ ! -x "$peers/bin/python" ] ||
  [ ! -e "$peers/smollm2-mlx/config.json" ]; then
  if [ ! -e "$shared/setup.sh" ]; then
    echo "$(basename "$0"): the peers are not in $peers, and $shared/setup.sh, which makes them, is not there" >&2
    exit 1
  fi
  echo "setting up llama.cpp and mlx-lm in $peers (10 to 15 minutes, once)" >&2
  bash "$shared/setup.sh" "$peers" >&2
fi
