"""What a training objective is built from: batches, an unrolled forward, losses. Torch only."""
