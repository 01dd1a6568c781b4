#!/bin/bash
# Four nodes of eight GPUs: sbatch docs/examples/slurm.sh
# SLURM starts one torchrun a node, and torchrun the ranks. Two minutes before the time is over SLURM sends SIGTERM: the
# ranks finish their step and save, and the job goes back into the queue, to go on from there.
#SBATCH --job-name=mixtral
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
set -euo pipefail

HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export OMP_NUM_THREADS=8
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=110      # seconds between SIGTERM and SIGKILL, for the last checkpoint
export PYTHONFAULTHANDLER=1                    # kill -ABRT prints a rank's stack
export TORCH_FR_BUFFER_SIZE=2000               # the last collectives, for when one of them hangs
export TORCH_NCCL_DUMP_ON_TIMEOUT=1
export TORCH_FR_DUMP_TEMP_FILE=/shared/runs/mixtral/collectives_

srun --kill-on-bad-exit=1 torchrun --nnodes "$SLURM_NNODES" --nproc-per-node 8 \
    --rdzv-backend c10d --rdzv-endpoint "$HEAD:29500" --rdzv-id "$SLURM_JOB_ID" \
    -m apps.llm pretrain --recipe mixtral_8x7b --data.path /shared/corpus --mesh.ep 8 --zero 3 \
    --out /shared/runs/mixtral --resume || {
    status=$?
    # Stopped for want of time: it has saved. Anything else is an error, and stays one.
    grep -q '"status": "stopped"' /shared/runs/mixtral/summary.json && scontrol requeue "$SLURM_JOB_ID"
    exit "$status"
}
