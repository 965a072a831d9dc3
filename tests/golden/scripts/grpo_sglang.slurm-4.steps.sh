#!/bin/bash
# The srun line of each role. The supervisor runs: bash steps.sh ROLE NAME NODES OUTPUT COMPONENT REPLICAS ARGUMENT...
# To change a line, override the block of its role (hpc-rl templates eject steps --block trainer), resubmit.
#
# --exact with explicit CPUs and GPUs gives the steps of a node disjoint resources, so that no step waits for
# another. The distribution fills one socket before the next, so that a rank is close to its GPU. --mem=0 lets each
# step use the memory of the job. When a task exits, the others end after --wait seconds,
# time for their exit records; --kill-on-bad-exit gives none. A step, unlike the job, ends with its node.
# All replicas of a role on one node share one step, with the CPUs and GPUs of all: an agent starts them.
#
# shellcheck disable=SC2034 # not every role uses every argument
set -euo pipefail
role=$1 name=$2 nodes=$3 output=$4 component=$5 replicas=$6
shift 6

# If inherited, these would override options of a step, or make srun refuse (memory given twice).
unset SLURM_NTASKS SLURM_NPROCS SLURM_NTASKS_PER_NODE SLURM_CPUS_PER_TASK SRUN_CPUS_PER_TASK
unset SLURM_MEM_PER_NODE SLURM_MEM_PER_CPU SLURM_MEM_PER_GPU SLURM_TRES_PER_TASK SLURM_DISTRIBUTION
unset SLURM_GPUS SLURM_GPUS_PER_NODE SLURM_GPUS_PER_TASK SLURM_EXPORT_ENV SLURM_OVERLAP SLURM_WHOLE
unset SLURM_NO_KILL SLURM_KILL_BAD_EXIT SLURM_WAIT SLURM_OPEN_MODE SLURM_LABELIO SLURM_UNBUFFEREDIO
unset SLURM_STDINMODE SLURM_STDOUTMODE SLURM_STDERRMODE

server() { # 16 units, 1 process, 4 CPUs, 1 GPU, 65536 MB
  exec srun --job-name="$name" --nodelist="$nodes" \
    --nodes=1 --ntasks=1 \
    --ntasks-per-node=1 --cpus-per-task=$((replicas * 4)) \
    --gpus-per-node=$((replicas * 1)) --mem=0 --exact --distribution=block:block \
    --kill-on-bad-exit=0 --wait=30 --no-kill=off --export=ALL --mpi=none --input=all \
    /PYTHON \
    "$@"
}

rollout() { # 1 unit, 1 process, 4 CPUs, 0 GPUs, 16384 MB
  exec srun --job-name="$name" --nodelist="$nodes" \
    --nodes=1 --ntasks=1 \
    --ntasks-per-node=1 --cpus-per-task=4 \
    --gpus-per-node=0 --mem=0 --exact --distribution=block:block \
    --kill-on-bad-exit=0 --wait=30 --no-kill=off --export=ALL --mpi=none --input=all \
    /PYTHON \
    "$@"
}

trainer() { # 1 unit, 8 processes on each node, each 4 CPUs, 1 GPU, 65536 MB
  exec srun --job-name="$name" --nodelist="$nodes" \
    --nodes=2 --ntasks=16 \
    --ntasks-per-node=8 --cpus-per-task=4 \
    --gpus-per-node=8 --mem=0 --exact --distribution=block:block --output="$output" \
    --kill-on-bad-exit=0 --wait=30 --no-kill=off --export=ALL --mpi=none --input=all \
    /PYTHON \
    "$@"
}

case $role in
server | rollout | trainer) "$role" "$@" ;;
*) echo "steps.sh: this trial has no role $role" >&2 && exit 78 ;;
esac
