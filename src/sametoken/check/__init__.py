"""Library of checks; commands print their results.

- `proof.prove`: equality of speculative and plain output (`sametoken verify`)
- `diagnosis.diagnose`, `diagnosis.measure_acceptance`: facts of a head, and its acceptance (`sametoken doctor HEAD`)
- `memory.forecast`: memory of a model (`sametoken doctor MODEL`)
- `machine.describe_machine`: processor, kernels and versions (`sametoken doctor`)
- `remote.examine`: speculation of a running server (`sametoken doctor --url URL`)
- `race.race`: speed of plain and speculative decoding of one prompt (`sametoken demo`)
"""
