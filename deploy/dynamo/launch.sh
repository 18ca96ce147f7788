#!/usr/bin/env bash
# Dynamo's frontend and our workers on one machine, ended together: Dynamo's agg_spec_decoding.sh with our worker.
#
#   deploy/dynamo/launch.sh [OPTIONS OF THE WORKER]      without options: --model embedded
#
# Variables: WORKERS (1) engines; ROUTER_MODE (round-robin) or kv, random, least-loaded; MIGRATION_LIMIT (3) workers that
# a request may go on to; INFRASTRUCTURE none, which finds workers by files, or etcd, which needs etcd and NATS;
# DYN_HTTP_HOST (127.0.0.1) and DYN_HTTP_PORT (8000) of the frontend; SYSTEM_PORT (8081) of the first worker's health and
# metrics, the others have the next ones; PYTHON (python) that has sametoken and ai-dynamo. Dynamo's own are kept.
set -euo pipefail

python=${PYTHON:-python}
infrastructure=${INFRASTRUCTURE:-none}
store=$(mktemp -d)
workers=()
frontend=

stop() {
    trap - EXIT
    kill ${frontend:+"$frontend"} "${workers[@]}" 2>/dev/null || true
    wait || true
    rm -rf "$store"
}
trap stop EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

case $infrastructure in
    none) export DYN_DISCOVERY_BACKEND=file DYN_FILE_KV=$store DYN_REQUEST_PLANE=tcp DYN_EVENT_PLANE=zmq ;;
    etcd) export DYN_DISCOVERY_BACKEND=etcd DYN_REQUEST_PLANE=nats DYN_EVENT_PLANE=nats ;;
    *) echo "error: INFRASTRUCTURE is $infrastructure, expected none or etcd" >&2; exit 2 ;;
esac
# Everything is on this machine: nothing but the frontend needs to be reached from others.
export DYN_TCP_RPC_HOST=${DYN_TCP_RPC_HOST:-127.0.0.1} DYN_EVENT_PLANE_HOST=${DYN_EVENT_PLANE_HOST:-127.0.0.1}
export DYN_SYSTEM_HOST=${DYN_SYSTEM_HOST:-127.0.0.1} DYN_TCP_RESPONSE_STREAM_HOST=${DYN_TCP_RESPONSE_STREAM_HOST:-lo}
export DYN_SDK_DISABLE_ANSI_LOGGING=${DYN_SDK_DISABLE_ANSI_LOGGING:-1}
(($#)) || set -- --model embedded
if ! "$python" -c 'import dynamo.frontend' 2>/dev/null; then
    echo "error: $python has no ai-dynamo; install deploy/dynamo/requirements.txt as docs/dynamo.md says" >&2
    exit 2
fi

for ((number = 0; number < ${WORKERS:-1}; number++)); do
    port=$((${SYSTEM_PORT:-8081} + number))
    DYN_SYSTEM_PORT=$port "$python" -m sametoken.deploy.dynamo "$@" &
    workers+=($!)
    echo "worker $number: process $!, health and metrics on port $port"
done
"$python" -m dynamo.frontend --http-host "${DYN_HTTP_HOST:-127.0.0.1}" --http-port "${DYN_HTTP_PORT:-8000}" \
    --router-mode "${ROUTER_MODE:-round-robin}" --migration-limit "${MIGRATION_LIMIT:-3}" &
frontend=$!
echo "frontend: process $frontend, http://${DYN_HTTP_HOST:-127.0.0.1}:${DYN_HTTP_PORT:-8000}"

# Until the frontend or the last worker ends; a worker may end before.
code=0
while kill -0 "$frontend" 2>/dev/null; do
    wait -n || code=$?
    living=0
    for worker in "${workers[@]}"; do
        ! kill -0 "$worker" 2>/dev/null || living=$((living + 1))
    done
    ((living)) || break
done
exit "$code"
