"""Stable Diffusion: pretrain, fine-tune, DreamBooth and sample, with diffusers' and transformers' modules as they are."""
