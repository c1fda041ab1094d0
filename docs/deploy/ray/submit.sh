#!/bin/bash
# Run a job on a running Ray cluster: one actor per GPU, on any node that has one.
#
#   RAY_ADDRESS=http://head:8265 docs/deploy/ray/submit.sh /srv/relabel/jobs/ecom.yaml
#
# The driver runs on the cluster. Every node has relabel with the extras `ray` and `vllm`; job file, input, output and model are where every
# node sees them (s3:// or a shared file system).
set -eu

job=${1:?which job file?}
case $job in
    /* | *://*) ;;
    *) job=$PWD/$job ;;  # the driver's working directory is another
esac
day=${RELABEL_DATE:-$(date -u +%F)}

exec ray job submit \
    --address "${RAY_ADDRESS:-http://127.0.0.1:8265}" \
    --runtime-env-json "{\"env_vars\": {\"RELABEL_DATE\": \"$day\"}}" \
    -- relabel run "$job" --backend ray --address auto --done-ok --log-format json
