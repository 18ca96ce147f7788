{% include "slurm_head.sh" %}
logs={{ logs }} first={{ start }} steps=() code=0
trap 'kill -TERM "${steps[@]}" 2>/dev/null' TERM INT
for node in $(scontrol show hostnames {{ where | safe }}); do
    srun {{ srun }} --nodes=1 --ntasks=1 --nodelist="$node" \
        --open-mode=append --output="$logs/$node.log" \
        {{ command }} --start "$first" &
    steps+=($!)
    echo "$node: shards $first to $((first + {{ shards }} - 1)), log $logs/$node.log"
    first=$((first + {{ shards }}))
done
for step in "${steps[@]}"; do
    ended "$step" && status=0 || status=$?
    ((status == 0)) || echo "srun with process number $step ended with exit code $status" >&2
    ((status <= code)) || code=$status
done
exit "$code"
