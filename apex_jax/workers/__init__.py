"""The roles of a run: the loops, sockets, threads and signals around the modules that do the work.

actor            acts, in environments on the CPU or on the policy's device
replay_server    serves the replay
learner          updates; its links and metrics
run_counters     updates, frames and limits of the run; when the learner saves
evaluator        plays the games of an evaluation, with the newest params or those of a checkpoint
recording        films a game, and draws the run's curves
film_command     films an episode in the task's own simulator
role             parts common to these processes: report, metrics, sockets, copy of the run
local            all roles on this machine, each in a process, supervised
one_process      all roles in one process, which take turns
series           runs several seeds one after the other
"""
