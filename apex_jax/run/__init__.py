"""The records of a run: its identity, checkpoints, metrics and starts, and its copy on object storage.

identity          which run a directory belongs to, and whether configurations fit together
provenance        command, commit, versions, machine of each start
checkpoint        the learner's state on disk
checkpoint_files  the files of checkpoints, with their checksums
params_file       params <-> safetensors
environment_spec  the task's observations and actions, stored for `policy`
evaluations       the evaluator's games, and the params of the best evaluation
metrics           measurements, written for TensorBoard and as JSON lines, and read back
loggers           passes metrics on to wandb, trackio and their like
storage           a copy of the run on object storage
"""
