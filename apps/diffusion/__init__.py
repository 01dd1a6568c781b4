"""Stable Diffusion: pretrain, fine-tune, DreamBooth, sample; its models are modules of diffusers and transformers."""
