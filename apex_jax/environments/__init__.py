"""Environments, their observations and scores.

environment                  the environments of a run, with the beginning and end of every episode marked
task                         the observations and actions of a task
tasks                        which tasks can be trained
preset                       the configuration for a task, if the user names none
envpool_package              EnvPool, whose families of tasks are imported when they are used
envpool_tasks                tasks of EnvPool, and their observations of several parts as one vector
gymnasium_tasks              any environment of Gymnasium
gymnasium_pool               many environments of Gymnasium at once
processes                    environments in processes of their own, of this Python or another
served                       what those processes run: Python 3.8, NumPy and the user's package
batches                      a batch of one's own, of gymnasium.vector
jax_tasks                    environments written in JAX: as pure functions, and many at once for the evaluator
jax_packages                 environments of JAX packages as their authors wrote them
images                       observations of Gymnasium -> pixels, by their layout
atari_scores                 random, human and Ape-X scores of 57 games
"""
