#!/bin/bash

# server 15
env HPC_RL_NUM_RANKS=1 HPC_RL_STEPS=srun OMP_NUM_THREADS=4 PYTHONNOUSERSITE=1 PYTHONPATH=/shared/hpc-rl/user/maths/qwen2.5-1.5b-grpo/scripts/WHEEL.zip:/WORKDIR PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1 \
  srun \
  --job-name=server-15.0 \
  --nodes=1 \
  --nodelist=n3 \
  --ntasks=1 \
  --ntasks-per-node=1 \
  --distribution=block \
  --cpus-per-task=4 \
  --exact \
  --mem=0 \
  --gpus-per-node=1 \
  --kill-on-bad-exit=0 \
  --wait=30 \
  --no-kill=off \
  --export=ALL \
  --mpi=none \
  --input=all \
  '--container-image=/storage/images/sglang 0.5.sqsh' \
  --container-mounts=/storage:/storage,/shared/hpc-rl:/shared/hpc-rl,/shared/models/Qwen2.5-1.5B-Instruct:/shared/models/Qwen2.5-1.5B-Instruct,/shared/data/maths:/shared/data/maths,/WORKDIR:/WORKDIR \
  --container-workdir=/WORKDIR \
  --container-env=HPC_RL_NUM_RANKS,HPC_RL_STEPS,OMP_NUM_THREADS,PYTHONNOUSERSITE,PYTHONPATH,PYTHONSAFEPATH,PYTHONUNBUFFERED \
  --no-container-entrypoint \
  --no-container-mount-home \
  python3 \
  -m \
  hpc_rl.app.server \
  --trial_dir \
  /shared/hpc-rl/user/maths/qwen2.5-1.5b-grpo \
  --attempt \
  7.0 \
  --index \
  15

# rollout 0
env HPC_RL_NUM_RANKS=1 HPC_RL_STEPS=srun OMP_NUM_THREADS=4 PYTHONNOUSERSITE=1 PYTHONPATH=/shared/hpc-rl/user/maths/qwen2.5-1.5b-grpo/scripts/WHEEL.zip:/WORKDIR PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1 \
  srun \
  --job-name=rollout-0.0 \
  --nodes=1 \
  --nodelist=n0 \
  --ntasks=1 \
  --ntasks-per-node=1 \
  --distribution=block \
  --cpus-per-task=4 \
  --exact \
  --mem=0 \
  --gpus-per-node=0 \
  --kill-on-bad-exit=0 \
  --wait=30 \
  --no-kill=off \
  --export=ALL \
  --mpi=none \
  --input=all \
  --container-image=/storage/images/trainer.sqsh \
  --container-mounts=/storage:/storage,/shared/hpc-rl:/shared/hpc-rl,/shared/models/Qwen2.5-1.5B-Instruct:/shared/models/Qwen2.5-1.5B-Instruct,/shared/data/maths:/shared/data/maths,/WORKDIR:/WORKDIR \
  --container-workdir=/WORKDIR \
  --container-env=HPC_RL_NUM_RANKS,HPC_RL_STEPS,OMP_NUM_THREADS,PYTHONNOUSERSITE,PYTHONPATH,PYTHONSAFEPATH,PYTHONUNBUFFERED \
  --no-container-entrypoint \
  --no-container-mount-home \
  python3 \
  -m \
  hpc_rl.app.rollout \
  --trial_dir \
  /shared/hpc-rl/user/maths/qwen2.5-1.5b-grpo \
  --attempt \
  7.0 \
  --index \
  0

# trainer 0
env HPC_RL_NUM_RANKS=16 HPC_RL_STEPS=srun NCCL_DEBUG=WARN 'NOTE=a b, $(c)' OMP_NUM_THREADS=4 PYTHONNOUSERSITE=1 PYTHONPATH=/shared/hpc-rl/user/maths/qwen2.5-1.5b-grpo/scripts/WHEEL.zip:/WORKDIR PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1 \
  srun \
  --job-name=trainer-0.0 \
  --nodes=2 \
  --nodelist=n0,n1 \
  --ntasks=16 \
  --ntasks-per-node=8 \
  --distribution=block \
  --cpus-per-task=4 \
  --exact \
  --mem=0 \
  --gpus-per-node=8 \
  --kill-on-bad-exit=0 \
  --wait=30 \
  --no-kill=off \
  --export=ALL \
  --mpi=none \
  --input=all \
  --output=/shared/hpc-rl/user/maths/qwen2.5-1.5b-grpo/attempts/7.0/logs/trainer-0.0-rank%t.log \
  --container-image=/storage/images/trainer.sqsh \
  --container-mounts=/storage:/storage,/shared/hpc-rl:/shared/hpc-rl,/shared/models/Qwen2.5-1.5B-Instruct:/shared/models/Qwen2.5-1.5B-Instruct,/shared/data/maths:/shared/data/maths,/WORKDIR:/WORKDIR \
  --container-workdir=/WORKDIR \
  --container-env=HPC_RL_NUM_RANKS,HPC_RL_STEPS,NCCL_DEBUG,NOTE,OMP_NUM_THREADS,PYTHONNOUSERSITE,PYTHONPATH,PYTHONSAFEPATH,PYTHONUNBUFFERED \
  --no-container-entrypoint \
  --no-container-mount-home \
  python3 \
  -m \
  hpc_rl.app.trainer \
  --trial_dir \
  /shared/hpc-rl/user/maths/qwen2.5-1.5b-grpo \
  --attempt \
  7.0 \
  --index \
  0
