"""`sametoken quantize`: quantisation of a plain checkpoint, layer by layer, with its cost in accuracy."""
