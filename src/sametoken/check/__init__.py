"""Library of checks: each returns what it found, and a command prints it.

- `proof.prove(llm, prompts, params)`: is speculative output equal to plain output? (`sametoken verify`)
- `diagnosis.diagnose(directory, target)` and `measure`: what is this head, and how much does a target accept?
  (`sametoken doctor HEAD`)
- `machine.describe()`: what does this machine compute with? (`sametoken doctor`)
- `remote.examine(first, second, seconds, about)`: does speculation pay on a server? (`sametoken doctor --url URL`)
- `race.race(llms, prompt, params, repeat)`: how much sooner do the same tokens come? (`sametoken demo`)
"""
