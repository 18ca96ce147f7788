#!/bin/bash
# etcd (port 2379) and NATS (port 4222) must run; set ETCD_ENDPOINTS and NATS_SERVER if they run on another host.
set -e
trap 'echo Cleaning up...; kill 0' EXIT
{% include "files.sh" %}
python -m dynamo.frontend --http-host={{ host }} --http-port={{ port }} &
DYN_SYSTEM_PORT=8081 {{ (worker + options) | lines }} &
wait -n
