"""The shared acceleration core: parallelism, memory, precision, optimizers, models, training."""
