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

# The broker may be on another node now.
rm -f "$run/ticket"
if [ -e "$run/state" ] || [ -e "$run/checkpoints" ]; then
    fusionllm broker --resume "$run" --peers "$SLURM_NNODES" &
else
    # A start that was killed before it had written where the run stands leaves nothing to go on with.
    rm -f "$run/job.toml" "$run/metrics.jsonl"
    fusionllm broker "$job" --run-dir "$run" --peers "$SLURM_NNODES" &
fi
broker=$!
trap 'kill -TERM $broker' TERM

# A run that is over has no ticket, and its broker ends at once.
until [ -s "$run/ticket" ] || ! kill -0 $broker 2> /dev/null; do
    sleep 1
done
# Each task keeps its key from job to job, whatever its node, so that a ticket with limits lets it back in.
if [ -s "$run/ticket" ]; then
    mkdir -p "$run.keys"
    srun sh -c 'fusionllm join - --name "$(hostname)" --identity "$1.keys/$SLURM_PROCID" < "$1/ticket"' sh "$run" &
fi

# A signal ends the first wait.
wait $broker || wait $broker
