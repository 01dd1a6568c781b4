#!/bin/bash
# Eight replicas of a node each that may die and come back: STORE_NODE=node-0 bash docs/examples/elastic_slurm.sh
# One job is the store, on a node that is not taken away; replicas are the jobs of an array, and one whose node is taken
# away or fails goes back into the queue. The store ends when all of them have ended.
set -euo pipefail

STORE=$(sbatch --parsable --job-name store --nodelist "$STORE_NODE" --time 7-0 \
    --wrap "python -m core.members $STORE_NODE:29400")

REPLICAS=$(sbatch --parsable --job-name replicas --array 0-7 --dependency "after:$STORE" --requeue --nodes 1 \
    --gpus-per-node 8 --mem 0 --time 24:00:00 --signal TERM@120 --open-mode append --output replica-%a.log \
    --wrap "srun megalith llm pretrain --recipe gpt2_124m --nproc 8 --mesh.tp 2 --zero 1 \
        --elastic.store $STORE_NODE:29400 --elastic.min 4 --out /shared/runs/one --resume auto")

sbatch --job-name end --dependency "afterany:$REPLICAS" --wrap "scancel $STORE"
