<# One job step on all nodes. #>
{% include "slurm_head.sh" %}
logs={{ logs }}
nodes=($(scontrol show hostnames {{ where | safe }}))
{% block before %}{% endblock %}
srun {{ srun }} --nodes="${#nodes[@]}" --ntasks="${#nodes[@]}" --ntasks-per-node=1 --kill-on-bad-exit=1 \
    --nodelist="$(IFS=,; echo "${nodes[*]}")" --open-mode=append --output="$logs/%N-%t.log" \
    {%+ block command %}{% endblock %} &
step=$!
trap 'kill -TERM "$step" 2>/dev/null' TERM INT
echo "${nodes[*]}: logs in $logs"
ended "$step"
