"""The tiny pipeline: a small, real Stable Diffusion, the drawn pictures it is trained on, and the proof that it learns.

drawing.py      one picture: a coloured shape on a ground, antialiased
captions.py     what is drawn and how it is said: words, combinations, those held out, the new subject
pictures.py     folders and batches of pictures, all from a seed
sizes.py        the modules of the tiny pipeline, its tokenizer and schedule
autoencoder.py  the training of its VAE
prepare.py      what its U-Net's training starts from: pictures, the VAE, a U-Net and a text encoder to train
detector.py     says shape, colour, ground and whether it is the subject; trained on what the VAE makes of pictures
viewer.py       says what a viewer sees: the nearest named colours and the outline that fits, by pixels alone
metrics.py      the figures: attributes right, subject seen, class drift, leak, the VAE's ceiling
sheet.py        before and after, side by side
__main__.py     `make demo-diffusion`
"""
