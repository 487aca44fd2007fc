"""The algorithms: arrays in, arrays out; the only modules that use jax.jit. No clock, socket, file or thread.

algorithm        the interface to the workers: init, act, update, acting_params, exploration
registry         the algorithms by name: those of this package, and the user's, which are checked
networks         observations -> q-values; observations -> actions and their values
space_to_depth   the first convolution of a network on blocks of pixels, for GPUs
losses           the paper's equations
dqn              Ape-X DQN, for discrete actions
estimator        the meaning and the loss of DQN's outputs, as its options choose them
munchausen       an option of DQN: soft targets with a bonus for the probability of the action
quantiles        an option of DQN: the loss of quantiles of the return
categorical      an option of DQN: how probable each of some returns is
dpg              Ape-X DPG, for continuous actions
training         parts common to all updates: optimizer, target copies, several updates in one call
moments          running mean and variance of observations
rollout          many steps of JAX environments and the policy in one call
policy_function  a trained policy as one function of observations, for export
action_masks     masks of invalid actions in observations
exploration      the ladders of epsilon and of noise
segments         steps of environments -> segments with n-step transitions
frame_store      segments on the learner's device -> batches by index
"""
