"""Where the optimizer's float32 main weights and moments are: beside the model, in host memory, or on a disk."""
