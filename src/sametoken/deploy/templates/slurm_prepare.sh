{% extends "slurm_everywhere.sh" %}
<# Each node writes its part. #>
{% block command %}bash -c 'exec "$@" --shard "$SLURM_PROCID/$SLURM_NTASKS"' prepare {{ command }}{% endblock %}
