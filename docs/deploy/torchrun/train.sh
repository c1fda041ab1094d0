#!/bin/bash
# A teacher or student on all GPUs of one machine, or of several that share the output's folder. The same line again goes on.
#
#   docs/deploy/torchrun/train.sh train teacher.yaml
#   NODES=2 HEAD=node1:29500 docs/deploy/torchrun/train.sh train teacher.yaml     # on both machines
set -eu

command=$1
spec=$2
if [ "${NODES:-1}" -gt 1 ]; then
    meet=(--nnodes "$NODES" --rdzv-backend c10d --rdzv-endpoint "$HEAD" --rdzv-id "${RUN_ID:-relabel}")
else
    meet=(--standalone)
fi
# After a signal all processes end their step and write a checkpoint, for which torchrun leaves them so many seconds.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${SHUTDOWN_S:-300}"
exec torchrun "${meet[@]}" --nproc-per-node "${GPUS:-8}" --no-python relabel "$command" "$spec" --resume --done-ok
