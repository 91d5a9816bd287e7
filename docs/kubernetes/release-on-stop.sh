#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
#
# preStop hook of a prefill: waits until its blocks have been read, then has every
# decoder release it. In use, as set in the container's env:
#   DECODERS_URL                 decoders' headless Service, http://NAME:8000
#   POD_IP or VLLM_NIXL_SIDE_CHANNEL_HOST, VLLM_NIXL_SIDE_CHANNEL_PORT (5600)
#   DATA_PARALLEL_SIZE (1)       ranks in this pod: one side channel each, from the port up
#   DATA_PARALLEL_RANK (0)       the first of them
#   STOP_WITHIN_S (90)           for all of it; keep it 30 under the grace period
#   ROUTER_S (5)                 in which the router stops sending to this pod
#   DRAIN_WITHIN_S (45)          for the blocks to be read; 0 leaves the wait out
#   SERVER_URL (http://localhost:8000)
#   VLLM_API_KEY
# It fails only where a decoder could not be told; the pod stops all the same, and that
# decoder finds it dead.
set -u

host=${VLLM_NIXL_SIDE_CHANNEL_HOST:-${POD_IP:?}}
port=${VLLM_NIXL_SIDE_CHANNEL_PORT:-5600}
end=$(($(date +%s) + ${STOP_WITHIN_S:-90}))

say() { # to the pod's log: kubelet shows a hook's own output nowhere
    sed 's/^/release-on-stop: /' >"${LOG:-/proc/1/fd/1}" 2>/dev/null || :
}

sleep "${ROUTER_S:-5}"
if [ "${DRAIN_WITHIN_S:-45}" -gt 0 ]; then
    nixl-peers drain --wait "${DRAIN_WITHIN_S:-45}" \
        "${SERVER_URL:-http://localhost:8000}" 2>&1 | say
fi

set --
rank=${DATA_PARALLEL_RANK:-0}
last=$((rank + ${DATA_PARALLEL_SIZE:-1}))
while [ "$rank" -lt "$last" ]; do
    set -- "$@" --address "$host:$((port + rank))"
    rank=$((rank + 1))
done
left=$((end - $(date +%s)))
said=$(nixl-peers release --wait "$((left > 0 ? left : 0))" "$@" \
    --all-addresses "${DECODERS_URL:?}" 2>&1)
status=$?
printf '%s\n' "$said" | say
exit $status
