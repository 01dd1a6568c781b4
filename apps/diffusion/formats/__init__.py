"""Files of others: single-file checkpoints and LoRA, in and out.

ldm_names.py    what each tensor of ours is called in a single-file checkpoint, and how it stands there
topology.py     the configurations of the modules, read off the shapes of such a file
single_file.py  reads and writes them
lora.py         LoRA files in the layouts of diffusers/PEFT and of kohya
"""
