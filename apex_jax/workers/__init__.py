"""The roles of a run: the loops, sockets, threads and signals around the modules that do the work.

actor            acts
replay_server    serves the replay
learner          updates
learner_links    its links to a fleet
learner_metrics  what it writes
run_counters     its updates, frames and limits
saver            its checkpoints
evaluator        evaluates the newest params
checkpoint_evaluation  evaluates those of a checkpoint
evaluation       plays the games, and stores their returns
recording        films one, and draws the run's curves
role             parts common to these processes: status page, metrics, sockets, copy of the run
local            all roles on this machine, supervised
role_process     one of them
one_process      all roles in one process, which take turns
series           runs several seeds one after the other
"""
