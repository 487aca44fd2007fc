"""Environments, their observations and scores.

environment                  the environments of a run, with the beginning and end of every episode marked
task                         the observations and actions of a task
tasks                        which tasks can be trained
envpool_package              EnvPool, without what it imports for one renderer
envpool_tasks                tasks of EnvPool
gymnasium_tasks              any environment of Gymnasium
gymnasium_pool               many environments of Gymnasium at once
gymnasium_processes          the processes in which environments of Gymnasium run
jax_tasks                    environments written in JAX: as pure functions, and many at once for the evaluator
observations                 observations of several parts -> vectors
images                       observations of Gymnasium -> pixels, by their layout
atari_scores                 random, human and Ape-X scores of 57 games
"""
