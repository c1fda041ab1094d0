"""Teachers: reasoning models trained here on the labelers' own prompts. Imports `labelers`; nothing in `students/`
imports it.

Read `sft.py` first, then `grpo.py`: `rollouts.py` (a conversation that the model writes), `rewards.py` (what it earns),
`credit.py` (what of it goes to which part). `res_rag.py` is a method of its own.
"""
