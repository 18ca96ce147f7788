<# Connection of an engine's ranks on several nodes: options of srun, words before the engine's command, and words after
   it, which the shell of each task expands. With words after it srun starts a task per node, else a task per rank. #>
{% set mpi, before, own = {
    "TensorRT-LLM": ("--mpi=pmix ", ("trtllm-llmapi-launch",), ""),
    "vLLM": ("", (), '--nnodes %d --node-rank "$SLURM_PROCID" --master-addr "$first" '
        '$( ((SLURM_PROCID == 0)) || echo --headless)'),
    "SGLang": ("", (), '--nnodes %d --node-rank "$SLURM_PROCID" --dist-init-addr "$first:20000"'),
}.get(engine, ("", (), "")) if nodes > 1 else ("", (), "") %}
#!/bin/bash
#SBATCH --job-name={{ name | safe }}
#SBATCH --nodes={{ nodes }}
{% if nodes == 1 %}
#SBATCH --ntasks=1
{% if gpus %}
#SBATCH --gpus={{ gpus }}
{% endif %}
{% else %}
{% set tasks = 1 if own else share %}
#SBATCH --ntasks-per-node={{ tasks }}
{% if gpus %}
#SBATCH --gpus-per-node={{ share }}
{% endif %}
{% endif %}
#SBATCH --output=%x-%j.log
#SBATCH --signal=B:TERM@90
set -e
{% include "ended.sh" %}
{% include "files.sh" %}
{% if own %}
nodes=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))
{% include "first_address.sh" %}
export first
{% endif %}
{% set srun = "srun %s--nodes=%d --ntasks-per-node=%d --kill-on-bad-exit=1 " % (mpi, nodes, tasks) if nodes > 1 else "srun " %}
{% set each = "bash -c 'exec \"$@\" %s' serve \\\n    " % (own % nodes) if own else "" %}
{{ (srun ~ each) | safe }}{{ (before + words) | lines }} &
server=$!
# A signal to srun itself would end its tasks at once, with their open streams.
stop() { scancel --signal=TERM "$SLURM_JOB_ID.0"; }
trap stop TERM INT
for ((second = 0; ; second++)); do
    curl --silent --fail --output /dev/null http://127.0.0.1:{{ port }}/health && break
    kill -0 $server 2>/dev/null || { wait $server; exit 1; }
    ((second < 1800)) || { echo "the server did not answer within 1800 s" >&2; stop; exit 1; }
    sleep 1
done
echo "http://$(hostname):{{ port }} answers"
ended $server
