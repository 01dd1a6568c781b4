#!/bin/bash
# The same line on each of NODES machines; HEAD is the name of any one of them, as all of them resolve it.
#   NODES=4 HEAD=node-0 bash docs/examples/torchrun.sh
set -euo pipefail

exec torchrun --nnodes "$NODES" --nproc-per-node 8 \
    --rdzv-backend c10d --rdzv-endpoint "$HEAD:29500" --rdzv-id "${RUN:-opt}" \
    -m apps.llm pretrain --recipe opt_13b --data.path /shared/corpus --mesh.tp 8 --zero 3 \
    --out "/shared/runs/${RUN:-opt}" --resume
