"""The data of a training run: pictures, captions and what is kept of both.

images.py        one file of any kind of image as RGB, or one line that says why not
folder.py        a folder of images with captions; a line for each that cannot be used
buckets.py       sizes of equal area for every aspect ratio, and how an image is laid into one
store.py         tensors on disk by the content and the settings that they follow from
encoding.py      latents and text embeddings, made once, by all ranks together
class_images.py  class images of prior preservation, drawn where they are missing
prepare.py       all of it for a run
batches.py       rows of a step: a function of the step and the row alone
"""
