{% extends "slurm_everywhere.sh" %}
<# Each node writes one part. #>
{% block command %}bash -c 'exec "$@" --shard "$SLURM_PROCID/$SLURM_NTASKS"' prepare {{ command }}{% endblock %}
