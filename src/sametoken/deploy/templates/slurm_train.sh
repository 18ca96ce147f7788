{% extends "slurm_everywhere.sh" %}
{% block before %}
{% include "first_address.sh" %}
{% endblock %}
<# torchrun starts a process per GPU and also reads options from variables PET_OPTION. #>
{% block command %}
bash -c 'PET_NODE_RANK=$SLURM_PROCID exec "$@"' train {{ python }} -m torch.distributed.run --nnodes="${#nodes[@]}" --nproc-per-node={{ gpus or 1 }} --master-addr="$first" --master-port={{ port }} -m {{ command }}
{%- endblock %}
