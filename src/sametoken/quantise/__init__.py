"""`sametoken quantize`: a plain checkpoint into one that other tools read, layer by layer, with what it costs."""
