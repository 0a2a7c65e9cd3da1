"""unspool: token-exact, multi-turn agent rollouts for reinforcement learning of language models."""
