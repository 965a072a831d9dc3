#!/bin/bash
# Job script of a trial, by hpc-rl VERSION from templates/local.sh.j2
# trial    /shared/hpc-rl/user/maths/qwen2.5-1.5b-grpo
# config   sha256 SHA256
# render   hpc-rl render --config /shared/hpc-rl/user/maths/qwen2.5-1.5b-grpo/config.yaml
# submit   bash /shared/hpc-rl/user/maths/qwen2.5-1.5b-grpo/scripts/local.sh
# recover  hpc-rl recover /shared/hpc-rl/user/maths/qwen2.5-1.5b-grpo
# Edits are lost at the next submission. A queued job runs its own copy of this file; a successor uses this file.
# Run the trial on this machine, detached: a batch script without a scheduler.
set -euo pipefail
trial_dir=/shared/hpc-rl/user/maths/qwen2.5-1.5b-grpo
# Keep a request to stop that comes before the hand-over.
stop_asked=0
trap 'stop_asked=1' USR1 USR2

# ==== SITE: module load and similar commands of all scripts; to change it: hpc-rl templates eject site ====
# A warning of `module load` must not end the job, so -e and -u are off here.
set +eu
# shellcheck source=/dev/null
source "$trial_dir/scripts/site.sh" || echo "site.sh returned $?" >&2
set -eu

# ==== ENVIRONMENT of every process ====
umask 077
workdir=/WORKDIR
python=/PYTHON
# The trial has a copy of the code of hpc-rl; the directory of the submission holds the user's code.
export PYTHONPATH="$trial_dir"/scripts/hpc_rl-WHEEL.zip:"$workdir"${PYTHONPATH:+":$PYTHONPATH"}
export PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1
# Variables of a surrounding MPI job or of the login node mislead libraries that look for a launcher.
unset PYTHONHOME PYTHONSTARTUP "${!PMI@}" "${!OMPI_@}" RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT
if [[ -n ${TMPDIR:-} && ! -w $TMPDIR ]]; then unset TMPDIR; fi
cd "$workdir" || cd "$trial_dir"

# ==== PLAN: sglang:d4+fsdp:d4; node 0 is the first of the job ====
# node 0  supervisor  1 process, 1 CPU, 1024 MB
# node 0  trainer     4 processes, each 4 CPUs, 1 GPU, 65536 MB
# node 0  rollout     1 process, 4 CPUs, 0 GPUs, 16384 MB
# node 0  server      server 0-3: 1 process, 4 CPUs, 1 GPU, 65536 MB

# ==== HAND-OVER: hpc_rl.roles.job starts and watches the supervisor ====
# A request to stop must not end Python before it can receive signals.
trap '' USR1 USR2
exec "$python" -m hpc_rl.roles.job trial_dir="$trial_dir" workdir="$workdir" python="$python" \
  stop_asked="$stop_asked" scheduler=local script_name=local.sh attempts=attempts \
  recover_mode=auto recover_retries=3 start_mode=auto from_step='' new_batches=0 n_nodes=1 \
  hook_limit_s=300 on_preempt_limit_s=20 -- "$@"
