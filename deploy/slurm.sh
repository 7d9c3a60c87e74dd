#!/bin/bash
# A run over the nodes of one Slurm job: sbatch deploy/slurm.sh job.toml
# The directory must be one that all nodes see. If the job's time ends first, the run is saved, and the next
# `sbatch deploy/slurm.sh job.toml` goes on with it.
#SBATCH --job-name=fusionllm
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --time=12:00:00
# The broker saves a checkpoint at this signal, ten minutes before the end.
#SBATCH --signal=B:TERM@600

set -eu
job=${1:?usage: sbatch deploy/slurm.sh job.toml}
run=run-$(basename "$job" .toml)

if [ -e "$run" ]; then
    fusionllm broker --resume "$run" --peers "$SLURM_NNODES" &
else
    fusionllm broker "$job" --run-dir "$run" --peers "$SLURM_NNODES" &
fi
broker=$!
trap 'kill -TERM $broker' TERM

until [ -s "$run/ticket" ]; do
    kill -0 $broker || exit 1
    sleep 1
done
srun sh -c 'fusionllm join - --name "$(hostname)" < "$0"' "$run/ticket" &

# A signal ends the first wait.
wait $broker || wait $broker
