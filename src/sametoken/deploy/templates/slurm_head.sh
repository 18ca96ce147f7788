#!/bin/bash
#SBATCH --job-name={{ name | safe }}
#SBATCH {{ "--nodelist" if named else "--nodes" }}={{ nodes | string | safe }}
#SBATCH --ntasks-per-node=1
#SBATCH --output="{{ logs | safe }}/%x-%j.log"
{% if name == "synthesize" %}<# whose nodes do not need each other #>
#SBATCH --no-kill
{% endif %}
#SBATCH --requeue
{% if gpus %}
#SBATCH --gpus-per-node={{ gpus }}
{% endif %}
#SBATCH {{ sbatch }}
{% include "ended.sh" %}
