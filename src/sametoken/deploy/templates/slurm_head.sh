#!/bin/bash
#SBATCH --job-name={{ name | safe }}
#SBATCH {{ "--nodelist" if named else "--nodes" }}={{ nodes | string | safe }}
#SBATCH --ntasks-per-node=1
#SBATCH --output="{{ logs | safe }}/%x-%j.log"
{% if name == "synthesize" %}<# its nodes are independent #>
#SBATCH --no-kill
{% endif %}
#SBATCH --requeue
{% if gpus %}
#SBATCH --gpus-per-node={{ gpus }}
{% endif %}
#SBATCH {{ sbatch }}
{% include "ended.sh" %}
