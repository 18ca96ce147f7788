"""Storage formats of weights: the reference of each format is plain torch, its fast path a compiled kernel."""
