"""Train an unmodified model of transformers on all ranks by the plan that takes the least time.

torchrun --nproc-per-node 2 docs/examples/auto_parallelize.py
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import core.auto

torch.manual_seed(0)  # the first rank's values count; the batches must be alike on every rank
config = GPT2Config(vocab_size=512, n_positions=64, n_embd=128, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=1)
model = GPT2LMHeadModel(config)
ids = torch.randint(2, 512, (8, 32))

model = core.auto.parallelize(model, {"input_ids": ids, "labels": ids})
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(5):
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
if torch.distributed.get_rank() == 0:
    print(core.auto.plan_of(model))
    print(f"loss {loss.item():.4f}")
